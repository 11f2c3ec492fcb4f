"""Eager tensors on a GPU that reach the engine as they are, without the host.

TensorFlow tells nobody its compute stream, so nothing can be ordered behind it but by waiting:
exporting a tensor makes the host wait for all that was enqueued there, and the host waits for the
engine's stream before TensorFlow sees a result. Between the two nothing else touches the memory.
Results are written into new tensors of TensorFlow's, which nobody else has seen: it frees them in
the order of its own stream.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ringlet.fusion.devices.cuda import CudaPlace
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array, storage

log = logging.getLogger("ringlet")

_NEW = ("float16", "bfloat16", "float32", "float64", "int64")  # TensorFlow makes these on a GPU

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = (
    ctypes.c_void_p,
    (
        ctypes.py_object,
        ctypes.c_char_p,
    ),
)


class PlacedTensors(NamedTuple):
    """Tensors' memory, flat, and the tensors that results go to, at ``place``."""

    place: CudaPlace
    sources: list[Array]
    results: list[Any]
    targets: list[Array]

    def copy(self) -> None:
        """Copy sources to targets, before all that is submitted from now on."""
        with self.place.at_work():
            for source, target in zip(self.sources, self.targets, strict=True):
                target[...] = source

    def run(self, submit: Callable[[list[Array], list[Array], str], None]) -> list[Any]:
        """Return the results of ``submit(sources, targets, place)``, which waits for handles."""
        submit(self.sources, self.targets, self.place.name)
        self.place.finish()
        return self.results


def direct(tensors: Sequence[Any], op: ReduceOp | None) -> PlacedTensors | None:
    """Return the way of dense tensors that need not be staged; None if one of them has to be.

    ``op`` is None for what only moves them. They go directly in eager mode, over NCCL, if all of
    them lie on this rank's GPU and are of types that NCCL reduces and TensorFlow makes there. Waits
    for TensorFlow's work. A function of dtypes, devices and the transport, so that ranks with alike
    tensors agree.
    """
    place = current().engine.place(CudaPlace.name)
    if not isinstance(place, CudaPlace) or not tf.executing_eagerly():
        return None
    if not all(_suits(tensor, op, place) for tensor in tensors):
        return None
    results = [_empty_like(tensor) for tensor in tensors]
    if not all(_on_gpu(result) for result in results):
        return None  # this TensorFlow makes them in host memory
    exported = [_export(tensor) for tensor in (*tensors, *results)]
    found = {_gpu_of(place, pointer) for pointer, _ in exported if pointer}
    if not found <= {place.device}:
        _warn_of(tuple(sorted(found)), place.device)
        return None
    both = zip((*tensors, *results), exported, strict=True)
    arrays = [_array(place, tensor, *where) for tensor, where in both]
    return PlacedTensors(place, arrays[: len(tensors)], results, arrays[len(tensors) :])


def _suits(tensor: Any, op: ReduceOp | None, place: CudaPlace) -> bool:
    name = tensor.dtype.name
    return name in _NEW and _on_gpu(tensor) and (op is None or place.reduces(name, op))


def _on_gpu(tensor: Any) -> bool:
    return bool(tf.DeviceSpec.from_string(tensor.backing_device).device_type == "GPU")


def _empty_like(tensor: Any) -> Any:
    with tf.device(tensor.backing_device):
        return tf.raw_ops.Empty(shape=tensor.shape.as_list(), dtype=tensor.dtype, init=False)


def _export(tensor: Any) -> tuple[int, Any]:
    """Return where a tensor's memory begins, 0 if it has none, and what keeps it alive.

    The host waits for TensorFlow's stream. DLPack's structure begins with the address; the number
    of the device that follows is TensorFlow's own, which others need not share.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    managed = _capsule_pointer(capsule, b"dltensor")
    return ctypes.c_void_p.from_address(managed).value or 0, capsule


def _gpu_of(place: CudaPlace, pointer: int) -> int:
    """Return the number of the GPU whose memory this is."""
    return int(place.xp.cuda.runtime.pointerGetAttributes(pointer).device)


def _array(place: CudaPlace, tensor: Any, pointer: int, keeper: Any) -> Array:
    kind, count = storage(tensor.dtype.name), int(tensor.shape.num_elements())
    cupy = place.xp
    memory = cupy.cuda.UnownedMemory(pointer, kind.itemsize * count, keeper, place.device)
    array: Array = cupy.ndarray((count,), kind, cupy.cuda.MemoryPointer(memory, 0))
    return array


@functools.cache  # once is enough
def _warn_of(gpus: tuple[int, ...], own: int) -> None:
    log.warning(
        "tensors on GPU %s go through host memory, because this rank's is GPU %d: call "
        "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') before anything is on a GPU",
        ", ".join(map(str, gpus)),
        own,
    )
