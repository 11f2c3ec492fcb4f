"""Ringlet on Dask: a function called as ranks, one on each worker.

```python
from distributed import Client
import ringlet.dask

results = ringlet.dask.run(Client("scheduler:8786"), train, args=(3e-4,))
```
"""

from ringlet.job.requirements import need

need("distributed", "ringlet.dask")

from ringlet.dask.worker_tasks import run

__all__ = ["run"]
