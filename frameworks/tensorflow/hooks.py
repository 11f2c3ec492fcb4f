"""The hook that starts ``tf.compat.v1`` sessions alike."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringlet.tensorflow.functions import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcast all variables from ``root_rank`` once a session has initialised them.

    ``device`` is accepted for Horovod's sake.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph, if that is a new one."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            self._operation = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self._operation)
