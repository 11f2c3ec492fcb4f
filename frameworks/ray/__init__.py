"""Ringlet on Ray: a backend for Ray Train, and Horovod's executors.

```python
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ringlet.ray import RingletConfig

DataParallelTrainer(train, backend_config=RingletConfig(), scaling_config=...).fit()
```
"""

from ringlet.job.requirements import need

need("ray", "ringlet.ray")

from typing import TYPE_CHECKING, Any

from ringlet.ray.elastic import ElasticRayExecutor
from ringlet.ray.executor import RayExecutor, RaySettings

if TYPE_CHECKING:
    from ringlet.ray.train_backend import RingletConfig

__all__ = ["ElasticRayExecutor", "RayExecutor", "RaySettings", "RingletConfig"]


def __getattr__(name: str) -> Any:
    if name == "RingletConfig":  # Ray Train wants packages that the executors do without
        from ringlet.ray.train_backend import RingletConfig

        return RingletConfig
    raise AttributeError(f"module 'ringlet.ray' has no attribute {name!r}")
