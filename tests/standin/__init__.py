"""A GPU that is none: arrays, streams and a transport like CuPy's and NCCL's, on the host."""

from standin.arrays import DeviceArray, HostRead, array_module, on_gpu
from standin.ranks import Enqueuing, engine_on, on_ranks
from standin.streams import Gpu, OutOfOrder

__all__ = [
    "DeviceArray", "Enqueuing", "Gpu", "HostRead", "OutOfOrder", "array_module", "engine_on",
    "on_gpu", "on_ranks",
]  # fmt: skip
