"""Ringlet on Spark: functions called as ranks in the tasks of a barrier stage, and an estimator.

import ringlet.spark

results = ringlet.spark.run(train, args=(3e-4,), num_proc=8, restarts=2)
"""

from ringlet.shared.requirements import need

need("pyspark", "ringlet.spark")

from typing import TYPE_CHECKING, Any

from ringlet.spark.barrier_job import run

if TYPE_CHECKING:
    from ringlet.spark.torch_estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel", "run"]


def __getattr__(name: str) -> Any:
    if name in ("TorchEstimator", "TorchModel"):
        from importlib import import_module

        return getattr(import_module("ringlet.spark.torch_estimator"), name)
    raise AttributeError(f"module 'ringlet.spark' has no attribute {name!r}")
