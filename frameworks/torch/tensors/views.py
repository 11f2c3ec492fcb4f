"""Views of torch tensors as the flat NumPy arrays that the engine moves.

The engine's arrays are in host memory: what is on another device is copied there and back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlet.ring.dtypes import Array

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CAST = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_of(tensor: torch.Tensor, what: str = "tensors") -> str:
    """Return the name of the tensor's dtype; TypeError for one that cannot travel."""
    try:
        return _NAMES[tensor.dtype]
    except KeyError:
        remedy = f"use {', '.join(DTYPES)}"
        if tensor.is_complex():
            remedy = (
                "pass torch.view_as_real(tensor); a model with complex parameters trains in "
                "DistributedDataParallel with hvd.ddp_hook"
            )
        raise TypeError(f"{what} of {tensor.dtype} cannot travel: {remedy}") from None


def check(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError unless the engine can move ``tensor``: dense, and with values."""
    if not isinstance(tensor, torch.Tensor):
        several = isinstance(tensor, list | tuple)
        remedy = "several go to a grouped_... form" if several else "see torch.as_tensor(...)"
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}; {remedy}")
    if tensor.is_nested:
        raise TypeError(
            f"{what} is nested: its parts differ in length, so ranks cannot combine it; pass "
            "torch.nested.to_padded_tensor(...) of it, of one size on all ranks"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} is sparse; call .to_dense() first")
    if type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"{what} is a DTensor, of which this rank holds a shard: where FSDP2 made it, use "
            "hvd.compress_fsdp(model, spec) and the optimizer as it is; else pass to_local()"
        )
    if type(tensor) not in _PLAIN and torch.nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"{what} is of a lazy module, and has no shape yet: run the model once on a batch, on "
            "all ranks, and then make the optimizer and broadcast"
        )
    if tensor.device.type == "meta":
        raise TypeError(f"{what} is on the meta device and has no values; materialise it first")
    dtype_of(tensor, what)


def check_whole(p: Any, what: str) -> None:
    """Raise TypeError for a parameter that FSDP1 shards."""
    if getattr(p, "_fsdp_flattened", False):
        raise TypeError(
            f"{what} belongs to a FullyShardedDataParallel, which shards it and reduces its "
            "gradients itself: call hvd.compress_fsdp(model, spec), and use the optimizer as it is"
        )


def taken_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether the engine can move a tensor of a dtype that can travel without a copy of it."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def as_array(tensor: Any) -> Array | None:
    """Return what the engine can move without a copy, as an array of its shape; else None.

    bfloat16 is uint16, by its bits, as ``storage`` says: int16 is a dtype of its own.
    """
    if not (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
    ):
        return None
    if tensor.requires_grad:  # to detach, and to view, lets the engine's thread in
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype not in _NAMES:
        return None
    try:
        array: Array = tensor.numpy()
    except RuntimeError:  # of a nested one, or one with a negative bit, as z.conj().imag has it
        return None
    return array


def as_flat(tensor: torch.Tensor) -> Array | None:
    """Return what the engine can move without a copy, as a flat array; else None.

    bfloat16 is uint16. This is on the way of each gradient, and calls nothing that need not be.
    """
    if not (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
    ):
        return None
    if tensor.requires_grad or tensor.dtype is torch.bfloat16:
        return flat(tensor)
    array: Array = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached: itself where it is, for to detach lets the engine's thread in."""
    return tensor.detach() if tensor.requires_grad else tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, contiguous and in host memory: itself, or a complete copy."""
    plain = without_graph(tensor).resolve_neg()
    if plain.is_cpu:
        return plain if plain.is_contiguous() else plain.contiguous()
    staged = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=plain.is_cuda)
    return staged.copy_(plain)  # waits for the device


def flat(tensor: torch.Tensor) -> Array:
    """Return a contiguous CPU tensor's memory as a flat array; bfloat16 as uint16."""
    tensor = without_graph(tensor)
    if tensor.dtype is torch.bfloat16:
        array: Array = tensor.view(torch.uint16).numpy()
    else:
        array = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


def as_tensor(array: Array, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a flat array as a tensor of ``dtype`` (by name) and ``shape``, sharing memory."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(array).reshape(shape)


def shares_memory(staged: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``staged``, which ``on_host`` has made of ``tensor``, is no copy."""
    return staged.device == tensor.device and staged.data_ptr() == tensor.data_ptr()


def unstage(staged: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a result to where it belongs, unless it is there already."""
    if not shares_memory(staged, tensor) or staged.dtype is not tensor.dtype:
        with torch.no_grad():
            tensor.copy_(staged)
    else:
        note_written(tensor)
    return tensor


def note_written(tensor: torch.Tensor) -> None:
    """Let autograd know that the engine has written to ``tensor``, which torch has not seen."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return 16-bit and float32 tensors, and those in tuples, lists and dicts, as ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _CAST else value
    if type(value) in (tuple, list):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if type(value) is dict:
        return {key: cast(item, dtype) for key, item in value.items()}
    return value
