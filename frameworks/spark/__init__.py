"""Ringlet on Spark: functions called as ranks in the tasks of a barrier stage, and estimators.

```python
import ringlet.spark

results = ringlet.spark.run(train, args=(3e-4,), num_proc=8, restarts=2)
```
"""

from ringlet.job.requirements import need

need("pyspark", "ringlet.spark")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringlet.spark.barrier_job import run, run_elastic

if TYPE_CHECKING:
    from ringlet.spark.keras_estimator import KerasEstimator, KerasModel
    from ringlet.spark.torch_estimator import TorchEstimator, TorchModel

__all__ = ["KerasEstimator", "KerasModel", "TorchEstimator", "TorchModel", "run", "run_elastic"]

_LATE = {"TorchEstimator": "torch_estimator", "TorchModel": "torch_estimator"}
_LATE |= {"KerasEstimator": "keras_estimator", "KerasModel": "keras_estimator"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"ringlet.spark.{_LATE[name]}"), name)
    raise AttributeError(f"module 'ringlet.spark' has no attribute {name!r}")
