"""The check behind the first promise: replicas hold the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.keras.replicas import variables_equal
from ringlet.tensorflow.bridge import refuse_graph


def replicas_equal(variables: Sequence[Any]) -> bool:
    """Whether variables are bit-equal on all ranks. Collective, the same answer on every rank."""
    refuse_graph("replicas_equal", "call it outside")
    return variables_equal(variables)
