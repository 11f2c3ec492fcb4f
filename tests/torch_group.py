"""torch's default process group, beside Ringlet's job: what DDP and FSDP reduce over."""

from __future__ import annotations

import tempfile
from pathlib import Path


def started() -> None:
    """Join it over gloo, once a job."""
    import torch.distributed as dist  # here: tests without torch import this too

    import ringlet.torch as hvd

    if not dist.is_initialized():
        place = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
        where = f"file://{Path(place) / 'store'}"
        dist.init_process_group("gloo", where, rank=hvd.rank(), world_size=hvd.size())
