"""Compression inside DistributedDataParallel: a communication hook.

model = DistributedDataParallel(model)
model.register_comm_hook(*ringlet.torch.ddp_hook("topk(ratio=0.01) | ef"))
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.fusion import Handle
from ringlet.fusion.devices.host import Place
from ringlet.job.elastic import refuse_in_elastic_job
from ringlet.precision import Policy, parse_policy
from ringlet.torch.elastic.epoch_group import AGAIN, STALE, EpochGroup
from ringlet.torch.ops.entry_points import public, untraced
from ringlet.torch.ops.sparse_allreduce import sparse_allreduce_async
from ringlet.torch.parallel.ddp_state import DdpState, KeptState, of_epochs
from ringlet.torch.parallel.group_runtimes import runtime_of
from ringlet.torch.parameters.naming import named_pairs
from ringlet.torch.precision.policy_checks import acts
from ringlet.torch.tensors.placement import HOST, behind, flat_at, packed
from ringlet.torch.tensors.views import check, unstage

_ONE_BY_ONE = (
    "torch.compile with torch._dynamo.config.optimize_ddp = 'python_reducer' gives hooks one "
    "gradient at a time, which ddp_hook does not take: leave optimize_ddp as it is by default, "
    "without compiled autograd"
)

_FSDP1 = (
    "FullyShardedDataParallel hands its hooks one flat gradient, which ddp_hook does not take: "
    "leave out register_comm_hook and call hvd.compress_fsdp(model, spec)"
)


@public
def ddp_hook(
    compression: Spec | Routes = None,
    named_parameters: Any = None,
    process_group: Any = None,
    precision: str | Policy | None = None,
) -> tuple[DdpState, Callable[[DdpState, Any], torch.futures.Future[torch.Tensor]]]:
    """Return (state, hook) for ``DistributedDataParallel.register_comm_hook``. Collective.

    - ``compression`` is a spec, a compressor, or a mapping of name patterns to specs. A mapping
      needs ``named_parameters``.
    - ``named_parameters`` is ``model.named_parameters()``.
    - ``process_group`` (default: torch's) has to be DDP's; the ranks are those of it. It carries
      the payloads where ``ringlet.init`` was not called. Where the job has other ranks, the group
      gets connections of its own.
    - ``precision`` is a policy such as ``"amp_bf16"``. A hook takes two things from it: the dtype
      in which sums accumulate, and the compression of the wire if ``compression`` is None.

    Raises ValueError for a policy with masters or a loss scale: these belong to an optimizer.

    Gradients accumulate under ``no_sync`` as in plain DDP. If one rank fails in ``backward``, all
    ranks raise its error.

    In an elastic job DDP's process group has to be ``elastic.process_group()``, and a
    ``TorchState`` has to hold the bare model. It keeps residuals for the next hook, when ranks have
    changed. Raises InvalidArgument, a ValueError, for another group there.
    """
    foreign = dist.is_available() and dist.is_initialized() if process_group is None else True
    if foreign and not isinstance(process_group, EpochGroup):
        what = "ddp_hook over a process group of torch's own"
        refuse_in_elastic_job(what, "it ends with any of its ranks", AGAIN)
    if any(state.stale for state in of_epochs):
        gc.collect()  # DDPs that were dropped: hooks of theirs are still on the parameters
    named = None if named_parameters is None else dict(named_pairs(named_parameters))
    policy = parse_policy(precision)
    if acts(policy):
        what = "float32 masters" if policy.masters else "a loss scale"
        raise ValueError(
            f"policy {policy.name!r} has {what}, which a hook cannot bring: use "
            "DistributedOptimizer without DDP, or precision='amp_bf16'; beside a "
            "torch.amp.GradScaler pass a compression, and no precision"
        )
    compression = policy.compression if compression is None else compression
    # Connections of our own: DDP's collectives and the engine's thread must not interleave.
    runtime = runtime_of(process_group)
    state = DdpState(compression, named or None, runtime, policy.reduction, process_group)
    return state, reduce_bucket


@untraced
def reduce_bucket(
    state: DdpState, bucket: Any, shard: torch.Tensor | None = None
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP's over the ranks: the hook itself.

    FSDP1, which is refused, gives the sum's ``shard`` as well.
    """
    _refuse_other_hooks(state, bucket, shard)
    buffer = bucket.buffer()
    devices = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    watched = state.watch()
    try:
        _hand_in(state, bucket, future, watched)
    except Exception as error:  # raised from here, it would leave DDP unusable: see HookedBackward
        state.backward.failed(error)
        future.set_result(buffer)
    if not watched:  # of a rank that has no more data, for which DDP calls the hook by itself
        future.wait()
        state.backward.end()
    return future


reduce_bucket.__annotations__ = {}  # DDP compares them with types, and ours are strings


def _refuse_other_hooks(state: object, bucket: Any, shard: torch.Tensor | None) -> None:
    """Raise RuntimeError or TypeError for calls that are none of DDP's with a state of ours."""
    if isinstance(bucket, tuple):
        raise RuntimeError(_ONE_BY_ONE)
    if not isinstance(state, DdpState | KeptState):
        raise TypeError(
            "ddp_hook returns a state and a hook that belong together: register both, with "
            f"model.register_comm_hook(*hvd.ddp_hook(spec)), not the hook with {state!r}"
        )
    if shard is not None or isinstance(bucket, torch.Tensor):
        raise RuntimeError(_FSDP1)


def _hand_in(
    state: DdpState, bucket: Any, future: torch.futures.Future[torch.Tensor], watched: bool
) -> None:
    """Let ``future`` have the bucket's mean when it is there; raise what stands against it."""
    state.look(bucket.parameters())
    buffer = bucket.buffer()
    if buffer.is_sparse:
        future.set_result(_sparse_mean(state, bucket))
        return
    check(buffer, "the gradient bucket")
    if state.stale:
        raise RuntimeError(STALE)
    state.agree(bucket.parameters())
    items, staged = [], []
    for i, (p, grad) in enumerate(_slices(bucket, buffer)):
        request, compressor = state.request(p, grad, f"bucket{bucket.index()}.{i}")
        # The views are parts of the bucket's buffer, so that the result lies where DDP wants it.
        staged.append((packed(grad, request.place), grad))
        if watched:
            state.expect(p, grad)
        items.append((request, flat_at(staged[-1][0], request.place), None, compressor))
    handles = state.engine.submit_all(items)
    place = state.engine.place(items[0][0].place if items else HOST)
    delivery = _Delivery(state, future, buffer, handles, staged, place)
    for handle in handles:
        handle.then(delivery.count)


class _Delivery:
    """Gives DDP the ``buffer`` of a bucket, once all of its gradients are reduced, or failed.

    They are ``staged``: what was reduced, at ``place``, with the part of the buffer that it is for.
    """

    def __init__(
        self,
        state: DdpState,
        future: torch.futures.Future[torch.Tensor],
        buffer: torch.Tensor,
        handles: Sequence[Handle],
        staged: Sequence[tuple[torch.Tensor, torch.Tensor]],
        place: Place | None,
    ) -> None:
        self._state, self._future, self._buffer = state, future, buffer
        self._handles, self._staged, self._place = handles, staged, place
        self._left, self._lock = len(handles), threading.Lock()

    def count(self) -> None:
        """Note, on any thread, that one of the gradients has come; deliver with the last one."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            # The future is behind what torch's current stream holds: of this thread the default
            # one, on which tensors are copied back, or the engine's, which has the result.
            with behind(self._place):
                for handle in self._handles:
                    handle.wait()
                for ours, grad in self._staged:
                    unstage(ours, grad)
                self._state.reduced += 1
                self._future.set_result(self._buffer)
        except Exception as error:
            self._state.backward.failed(error)
            self._future.set_result(self._buffer)


def _slices(bucket: Any, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the bucket's parameters with their parts of its buffer, of whose dtype they are.

    Those of complex parameters are real, with one more dimension of size 2. DDP's own views are of
    the first half of these. Raises RuntimeError where the buffer holds something else.
    """
    found, start = [], 0
    for p in bucket.parameters():
        doubled = p.is_complex() and not buffer.is_complex()
        shape = (*p.shape, 2) if doubled else tuple(p.shape)
        numel = math.prod(shape)
        found.append((p, shape, slice(start, start + numel)))
        start += numel
    if start != buffer.numel():
        raise RuntimeError(
            f"DDP's bucket {bucket.index()} has {buffer.numel()} elements, its parameters have "
            f"{start}: this version of torch, {torch.__version__}, lays gradients out in a way "
            "that ddp_hook does not know"
        )
    return [(p, buffer[place].view(shape)) for p, shape, place in found]


def _sparse_mean(state: DdpState, bucket: Any) -> torch.Tensor:
    """Return the mean of a bucket that is one parameter's sparse gradient: its rows are gathered.

    DDP without a hook does the same. Waits for it, in the order in which DDP has its buckets.
    """
    rows = bucket.buffer()
    if not state.of_job:
        total: torch.Tensor = rows.coalesce()
        dist.all_reduce(total, group=state.group)
        return total.div_(dist.get_world_size(state.group))
    name = state.label(next(iter(bucket.parameters()), None), f"bucket{bucket.index()}")
    return sparse_allreduce_async(rows, name).wait().coalesce()
