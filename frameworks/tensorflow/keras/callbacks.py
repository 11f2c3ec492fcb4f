"""The callbacks of ``ringlet.keras``, under the name that Horovod gives them."""

from ringlet.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    CompressorStateCheckpoint,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CompressorStateCheckpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
