"""The elastic interface of ``ringlet.keras``, under the name that Horovod gives it."""

from ringlet.keras.elastic import *  # noqa: F403
from ringlet.keras.elastic import __all__ as __all__
