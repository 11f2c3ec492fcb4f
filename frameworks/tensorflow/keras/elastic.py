"""The elastic interface of ``ringlet.keras``, under the name that Horovod gives it."""

from ringlet.keras.elastic import (
    CommitStateCallback,
    HostsUpdatedInterrupt,
    KerasState,
    ObjectState,
    State,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
