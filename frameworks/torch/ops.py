"""Collectives on torch tensors, under Horovod's names and arguments.

Operations without a name get one from a counter, so ranks must call those in the same order.
Asynchronous forms return a handle for ``synchronize``.
"""

from __future__ import annotations

import torch

from ringlet.compressors.routes import Spec
from ringlet.fusion import Request
from ringlet.ring.communicator import ReduceOp
from ringlet.runtime import current
from ringlet.torch.compression import as_compressor
from ringlet.torch.handles import Handle, differentiable
from ringlet.torch.tensors import as_tensor, check, dtype_of, flat


def poll(handle: Handle) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return handle.done()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for an asynchronous operation and return its result."""
    return handle.wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Spec = None,
) -> Handle:
    """Combine ``tensor`` over all ranks, in place. See ``allreduce``."""
    return _allreduce(
        tensor, tensor, average, name, op, prescale_factor, postscale_factor, compression
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Spec = None,
) -> Handle:
    """Combine ``tensor`` over all ranks into a new tensor. See ``allreduce``."""
    check(tensor)
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return _allreduce(
        tensor, output, average, name, op, prescale_factor, postscale_factor, compression
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return ``tensor`` combined over all ranks: averaged, or by ``op``. Differentiable.

    ``compression`` is a spec; one that remembers (``ef``) needs a ``name``. Raises Mismatch,
    the same on every rank, when ranks pass different shapes, dtypes or arguments.
    """
    chosen, factors = reduce_op(average, op), (prescale_factor, postscale_factor)

    def start(x: torch.Tensor) -> Handle:
        return allreduce_async(x, None, name, chosen, *factors, compression)

    def backward(grad: torch.Tensor, handle: Handle) -> torch.Tensor:
        if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(f"allreduce with op={chosen.name.title()} has no gradient")
        return allreduce_async(grad, None, f"{handle.name}.grad", chosen, *factors).wait()

    return differentiable(tensor, start, backward)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Spec = None,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks in place, and return it. See ``allreduce``."""
    return allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, compression
    ).wait()


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Start an ``allgather``."""
    check(tensor)
    runtime = current()
    dtype, shape = dtype_of(tensor), tuple(tensor.shape)
    request = Request(name or runtime.unnamed("allgather"), "allgather", dtype, shape)
    operation = runtime.engine.submit(request, flat(tensor.contiguous()))
    return Handle(operation, lambda h: as_tensor(h.output, dtype, (sum(h.sizes), *shape[1:])))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return every rank's ``tensor`` behind one another along the first dimension. Differentiable.

    First dimensions may differ between ranks; the others, and the dtype, may not (Mismatch).
    """

    def backward(grad: torch.Tensor, handle: Handle) -> torch.Tensor:
        first = sum(handle.sizes[: current().rank])
        return _summed(grad, handle)[first : first + handle.sizes[current().rank]]

    return differentiable(tensor, lambda x: allgather_async(x, name), backward)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a ``broadcast_``."""
    check(tensor)
    runtime = current()
    if not 0 <= root_rank < runtime.size:
        raise ValueError(f"root_rank must be a rank, 0 to {runtime.size - 1}; got {root_rank}")
    request = Request(
        name or runtime.unnamed("broadcast"),
        "broadcast",
        dtype_of(tensor),
        tuple(tensor.shape),
        root=root_rank,
    )
    staged = tensor.detach().contiguous()
    operation = runtime.engine.submit(request, flat(staged))
    return Handle(operation, lambda _: _unstage(staged, tensor))


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a ``broadcast``."""
    check(tensor)
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return rank ``root_rank``'s ``tensor``; shapes and dtypes must agree (Mismatch).

    Differentiable: the root's gradient is the sum over all ranks, the others' zero.
    """

    def backward(grad: torch.Tensor, handle: Handle) -> torch.Tensor:
        total = _summed(grad, handle)
        return total if current().rank == root_rank else torch.zeros_like(total)

    return differentiable(tensor, lambda x: broadcast_async(x, root_rank, name), backward)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite ``tensor`` with rank ``root_rank``'s, and return it."""
    return broadcast_async_(tensor, root_rank, name).wait()


def barrier() -> None:
    """Return once every rank has called it."""
    runtime = current()
    operation = runtime.engine.submit(
        Request(runtime.unnamed("barrier"), "barrier"), flat(torch.empty(0))
    )
    operation.wait()


def _allreduce(
    tensor: torch.Tensor,
    output: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    compression: Spec,
) -> Handle:
    check(tensor)
    runtime = current()
    compressor = as_compressor(compression)
    if name is None and compressor.traits().stateful:
        raise ValueError(
            f"compression={str(compressor)!r} remembers what it did to each tensor, so the tensor "
            "needs a name: pass name=..."
        )
    request = Request(
        name or runtime.unnamed("allreduce"),
        "allreduce",
        dtype_of(tensor),
        tuple(tensor.shape),
        reduce_op(average, op),
        str(compressor),
        prescale=prescale,
        postscale=postscale,
    )
    source = tensor.detach().contiguous()
    target = output.detach() if output.is_contiguous() else source
    operation = runtime.engine.submit(request, flat(source), flat(target), compressor)
    return Handle(operation, lambda _: _unstage(target, output))


def reduce_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the op that Horovod's two ways of naming it mean; ValueError if both are used."""
    if average is not None and op is not None:
        raise ValueError("pass op or average (which is deprecated), not both")
    if op is not None:
        return ReduceOp(op)
    return ReduceOp.SUM if average is False else ReduceOp.AVERAGE


def _summed(grad: torch.Tensor, handle: Handle) -> torch.Tensor:
    return allreduce_async(grad, name=f"{handle.name}.grad", op=ReduceOp.SUM).wait()


def _unstage(staged: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous stand-in back into the tensor it stood for, if it is not the same."""
    if staged.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(staged)
    return tensor
