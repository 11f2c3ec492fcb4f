"""Ringlet on Ray: a backend for Ray Train, and Horovod's executors.

```python
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ringlet.ray import RingletConfig

DataParallelTrainer(train, backend_config=RingletConfig(), scaling_config=...).fit()
```
"""

from ringlet.job.requirements import need

need("ray", "ringlet.ray")

from ringlet.ray.elastic import ElasticRayExecutor
from ringlet.ray.executor import RayExecutor, RaySettings
from ringlet.ray.train_backend import RingletConfig

__all__ = ["ElasticRayExecutor", "RayExecutor", "RaySettings", "RingletConfig"]
