"""Ringlet for Keras under the name that Horovod gives it: all of ``ringlet.keras``."""

from ringlet.keras import *  # noqa: F403
from ringlet.keras import __all__ as __all__
