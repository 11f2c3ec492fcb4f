"""What compressors remember, as part of a ``tf.train.Checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringlet.keras.checkpoint import dumped, read, reducer_of
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.tensorflow.tape import reducer_of_tape


class CompressorState(tf.train.experimental.PythonState):
    """This rank's residuals, to be saved and restored with the model: each rank has its own file.

    tf.train.Checkpoint(model=model, residuals=hvd.CompressorState(optimizer))

    ``owner`` is a DistributedOptimizer, or a DistributedGradientTape together with the
    ``variables`` that its ``gradient`` is asked for. All ranks restore together.
    """

    def __init__(self, owner: Any, variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self._owner, self._variables = owner, variables
        self._reducer()

    def serialize(self) -> bytes:
        """Return what ``deserialize`` takes."""
        return dumped(self._reducer())

    def deserialize(self, string_value: bytes) -> None:
        """Go on with what this rank saved; warns, and starts anew, if another rank saved it."""
        reducer = self._reducer()
        reducer.load(*read(reducer, string_value))

    def _reducer(self) -> GradientReducer:
        if isinstance(self._owner, tf.GradientTape):
            if self._variables is None:
                raise ValueError("CompressorState(tape) needs the variables: pass variables=...")
            return reducer_of_tape(self._owner, self._variables)
        return reducer_of(self._owner)
