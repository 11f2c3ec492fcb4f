"""Tensors on a GPU that reach the engine as they are, without the host.

They do over the transports "nccl" and "torch-nccl", which have CuPy with them, if they lie on this
rank's GPU and NCCL reduces their dtype. All others are staged in host memory
(``ringlet.torch.tensors.views``).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ringlet.fusion.devices.cuda import CudaPlace
from ringlet.fusion.devices.host import Place
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array, storage
from ringlet.torch.tensors.views import as_tensor, dtype_of, flat, on_host

log = logging.getLogger("ringlet")

HOST = Place.name


class Places(Protocol):
    """What takes tensors from several places, such as an engine."""

    def place(self, name: str) -> Place | None:
        """Return a place where tensors can lie; None if there is none of that name."""


def place_of(
    tensor: torch.Tensor, op: ReduceOp | None = ReduceOp.SUM, engine: Places | None = None
) -> str:
    """Return where ``engine`` (default: the runtime's) takes ``tensor`` from: "host", or "cuda".

    ``op`` is None for what only moves it, which NCCL does whatever the dtype. A function of its
    dtype, its device and the transport, so that ranks with alike tensors agree.
    """
    gpu = _gpu_of(tensor)
    place = None if gpu is None else (engine or current().engine).place(CudaPlace.name)
    if not isinstance(place, CudaPlace):
        return HOST
    if place.device != gpu:
        _warn_of(gpu, place.device)
        return HOST
    if op is not None and not place.reduces(dtype_of(tensor), op):
        return HOST
    place.adopt(torch_on_gpu)
    return place.name


def packed(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """Return ``tensor`` detached, contiguous and at ``place``: itself, or a copy."""
    return on_host(tensor) if place == HOST else tensor.detach().contiguous()


def flat_at(tensor: torch.Tensor, place: str) -> Array:
    """Return the memory of a ``packed`` tensor as a flat array; bfloat16 as uint16."""
    return flat(tensor) if place == HOST else _view(tensor)


def behind(place: Place | None) -> AbstractContextManager[Any]:
    """Return a context in which what torch does comes behind the engine's work at ``place``."""
    if not isinstance(place, CudaPlace):
        return nullcontext()
    stream: Any = torch.cuda.ExternalStream(place.stream, device=place.device)  # type: ignore[no-untyped-call]
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def from_engine(array: Array, device: torch.device) -> torch.Tensor:
    """Return an array that was made at work, such as a residual, as a tensor on ``device``.

    On a GPU that is a copy: made behind the engine's work, and torch's current stream waits for it.
    """
    place = current().engine.place(CudaPlace.name)
    if not (isinstance(place, CudaPlace) and hasattr(array, "__cuda_array_interface__")):
        return torch.as_tensor(array, device=device)
    place.adopt(torch_on_gpu)
    with behind(place):
        copied = torch.as_tensor(array, device=device).clone()
    place.catch_up()
    if copied.is_cuda:  # and not of a parameter that has left the GPU
        _use_here(copied)
    return copied


class Room:
    """Where a result goes whose size the engine knows first: as many elements as it asks for.

    ``like`` is what was handed in at ``place``; the result has its dtype, and its shape behind the
    first dimension.
    """

    def __init__(self, like: torch.Tensor, place: str) -> None:
        self._dtype, self._name, self._device = like.dtype, dtype_of(like), like.device
        self._trailing = tuple(like.shape[1:])
        self._place = current().engine.place(place)
        self._made: torch.Tensor | None = None

    @property
    def output(self) -> Callable[[int], Array] | None:
        """What to submit as the output: None for host memory, of which the engine has its own."""
        return self._make if isinstance(self._place, CudaPlace) else None

    def filled(self, output: Array, rows: int) -> torch.Tensor:
        """Return the result, of which the engine's handle has the ``output``, as a tensor."""
        shape = (rows, *self._trailing)
        if self._made is None:
            return as_tensor(output, self._name, shape)
        _use_here(self._made)
        return self._made.view(shape)

    def _make(self, numel: int) -> Array:
        # On the engine's stream, where it is written first: that one need not wait for another.
        with behind(self._place):
            try:
                self._made = torch.empty(numel, dtype=self._dtype, device=self._device)
            except torch.cuda.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
        return _view(self._made)


class TorchOnGpu:
    """What the engine asks torch for: its current stream, and memory from its caching allocator."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        allocator = cupy.cuda.PythonFunctionAllocator(self._take, _give_back)
        self._allocate: Callable[[int], Any] = allocator.malloc

    def stream(self, device: int) -> int:
        """Return the pointer of the calling thread's current stream."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def allocator(self) -> Callable[[int], Any]:
        """Return an allocator for CuPy."""
        return self._allocate

    def _take(self, nbytes: int, device: int) -> int:
        # Torch hands the memory out again on this stream alone, where the engine has used it.
        stream = int(self._cupy.cuda.get_current_stream().ptr)
        try:
            return int(torch.cuda.caching_allocator_alloc(nbytes, device, stream))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


@functools.cache  # once is enough
def _warn_of(gpu: int | None, own: int) -> None:
    log.warning(
        "tensors on GPU %s go through host memory, because this rank's is GPU %d: call "
        "torch.cuda.set_device(hvd.local_rank()) before anything is on a GPU",
        gpu,
        own,
    )


def _give_back(pointer: int, device: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
    if not ending():  # when Python ends, the names that this needs may be gone before the arrays
        torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]


def torch_on_gpu() -> TorchOnGpu:
    """Return torch as the owner of tensors on a GPU."""
    import cupy

    return TorchOnGpu(cupy)


def _use_here(tensor: torch.Tensor) -> None:
    """Let torch know that its current stream uses memory that another one has asked for."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _gpu_of(tensor: torch.Tensor) -> int | None:
    """Return the number of the GPU that a tensor lies on."""
    return tensor.get_device() if tensor.is_cuda else None


def _view(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor's memory as a CuPy array, which keeps the tensor alive.

    Not by DLPack, whose export would put CuPy's current stream in order with torch's.
    """
    import cupy

    kind, count = storage(dtype_of(tensor)), tensor.numel()
    nbytes, device = kind.itemsize * count, tensor.get_device()
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, device)
    array: Array = cupy.ndarray((count,), kind, cupy.cuda.MemoryPointer(memory, 0))
    return array
