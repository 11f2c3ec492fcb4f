"""A process group for DistributedDataParallel whose collectives are the job's own.

DDP needs a process group: it compares parameters, and broadcasts parameters and buffers over it.
One of torch's own would have to meet at a store, and would wait for a rank that is lost. This one
has no connections: what DDP asks of it travels over the job's engine, which notices lost ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringlet.fusion.requests.handle import wait_all
from ringlet.job.elastic import in_function
from ringlet.job.process_sets import InvalidArgument
from ringlet.job.session import Runtime, current, is_initialized
from ringlet.ring.communicator import ReduceOp
from ringlet.torch.elastic.hook_memory import NO_BACKWARD, reopen
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.ops.handles import TorchHandle
from ringlet.torch.ops.movements import allgather_async, barrier, broadcast_async_
from ringlet.torch.ops.reductions import allreduce_async_
from ringlet.torch.optimizer.double_reduction import TORCH_GROUP

_OPS = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVERAGE, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX}
_Group: Any = getattr(dist, "ProcessGroup", object)  # which some builds of torch lack
AGAIN = (
    "inside the function that hvd.elastic.run calls, write "
    "model = DistributedDataParallel(state.model, process_group=hvd.elastic.process_group()) and "
    "model.register_comm_hook(*hvd.ddp_hook(spec)), where state is a TorchState of the bare model"
)
STALE = (
    "this DistributedDataParallel was made before ranks changed, and reduces over ranks that are "
    f"gone. Make a new one each time: {AGAIN}"
)


def process_group() -> EpochGroup:
    """Return a process group of all ranks, for DistributedDataParallel: until ranks change.

    To be called inside the function that ``elastic.run`` decorates, in any job: there all ranks
    are at one place. Raises InvalidArgument, a ValueError, elsewhere.
    """
    runtime = current()
    if not in_function(runtime):
        raise InvalidArgument(
            "hvd.elastic.process_group() is of the ranks that there are until ranks change, and "
            f"was called outside of the function that hvd.elastic.run decorates: {AGAIN}"
        )
    runtime.extras[TORCH_GROUP] = True
    return EpochGroup(runtime)


class EpochGroup(_Group):  # type: ignore[misc]
    """All ranks of the job, as long as these stay: broadcast, allreduce, allgather and barrier.

    A collective ends before it returns. Raises what went wrong in its own class, such as PeerLost,
    and RuntimeError once ranks have changed.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.rank, runtime.size)
        self._identity = runtime.identity

    @property
    def runtime(self) -> Runtime:
        """The job's; RuntimeError once ranks have changed."""
        if not is_initialized() or current().identity != self._identity:
            raise RuntimeError(STALE)
        return current()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return what DDP's log says."""
        return "ringlet"

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Overwrite tensors with those of ``opts.rootRank``, by default 0."""
        root = 0 if opts is None else opts.rootRank
        return self._run(tensors, lambda tensor: broadcast_async_(tensor, root))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine tensors in place, by default as sums. Raises ValueError for other operations."""
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        op = next((op for name, op in _OPS.items() if asked == getattr(dist.ReduceOp, name)), None)
        if op is None:
            raise ValueError(f"hvd.elastic.process_group() reduces by {', '.join(_OPS)} only")
        return self._run(tensors, lambda tensor: allreduce_async_(tensor, op=op))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Fill each list of ``outputs`` with all ranks' tensor of ``inputs``."""
        made = zip(outputs, inputs, strict=True)
        rooms = {id(tensor): room for room, tensor in made}

        def start(tensor: torch.Tensor) -> _Rows:
            return _Rows(allgather_async(tensor.reshape(1, -1)), rooms[id(tensor)])

        return self._run(inputs, start)

    def barrier(self, *_: Any) -> Any:
        """Wait for all ranks."""
        assert self.runtime
        barrier()
        return _done([])

    def _run(self, tensors: Any, start: Any) -> Any:
        """Start an operation for each tensor, wait for all, and return torch's handle of it.

        An error in a backward pass is raised at its end: what DDP does there it must do, or its
        hooks would wait for the rest of this pass in the next one.
        """
        given: Sequence[torch.Tensor] = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        assert self.runtime
        try:
            with torch.no_grad():
                handles: list[TorchHandle | _Rows] = [start(tensor) for tensor in given]
                wait_all(handles)
        except Exception as error:
            backward = torch._C._current_graph_task_id()
            if backward == NO_BACKWARD:
                raise
            behind_backward(_raising(error, backward))
        return _done(list(given))


class _Rows:
    """A gather under way, whose rows go to tensors of their own."""

    def __init__(self, handle: TorchHandle, rooms: Sequence[torch.Tensor]) -> None:
        self._handle, self._rooms = handle, rooms

    def wait(self) -> None:
        for room, row in zip(self._rooms, self._handle.wait(), strict=True):
            room.copy_(row.view(room.shape))


def behind_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called behind whatever DDP does at the end of the backward pass at hand."""
    autograd: Any = torch.autograd.Variable._execution_engine
    autograd.queue_callback(untraced(lambda: autograd.queue_callback(call)))


def _raising(error: Exception, backward: int) -> Callable[[], None]:
    @untraced
    def fail() -> None:
        reopen(backward)
        raise error

    return fail


def _done(tensors: list[torch.Tensor]) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)
