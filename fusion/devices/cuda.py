"""Tensors on a GPU: compressed, moved and decoded on a side stream, without the host.

The engine's thread enqueues everything on one stream of its own. Events order that stream and the
framework's: one recorded where a tensor is handed in, which the side stream waits for, and one
behind the last use of it, which the framework's stream waits for. The host waits for neither.

What lies in fusion buffers and scratch arrays is used on the side stream alone, so that reusing a
buffer needs no event. Tensors belong to the framework, whose allocator may hand their memory out
again once nobody refers to them: a mark refers to them until its work is over, or until it is
released because the framework's stream, on which the memory would be used again, waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import numpy as np

from ringlet.compressors.core.context import State
from ringlet.fusion.devices.host import Place
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.pipeline import Steps
from ringlet.ring.transports.gpu import on_device, over, reduced

log = logging.getLogger("ringlet")

_LEAVING_S = 10.0  # how long to wait for the GPU at the end

# Side streams with CuPy's module and the GPU, all that were made and those that are free. They are
# used again and never destroyed: torch's allocator has memory for each one, and asks it later.
_made: list[tuple[Any, int, Any]] = []
_idle: list[tuple[Any, int, Any]] = []
_streams_lock = threading.Lock()


class Framework(Protocol):
    """Whose tensors they are."""

    def stream(self, device: int) -> int:
        """Return the pointer of the calling thread's current stream."""

    def allocator(self) -> Callable[[int], Any] | None:
        """Return what CuPy shall allocate with: the framework's pool, so that there is only one."""


class _Unknown:
    """No framework: CuPy's memory, and the current stream of CuPy in the calling thread."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def stream(self, device: int) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def allocator(self) -> Callable[[int], Any] | None:
        return None


class CudaMark:
    """The end of work on the side stream; keeps ``arrays`` alive for it."""

    def __init__(self, place: CudaPlace, event: Any, arrays: Iterable[Array]) -> None:
        self._place, self._event = place, event
        self._arrays = tuple(arrays)

    def collect(self) -> None:
        """Let the framework's current stream wait for the work."""
        self._place.wait_for(self._event)

    def release(self) -> None:
        """Refer to the arrays no more."""
        self._arrays = ()

    @property
    def reached(self) -> bool:
        """Whether the work is over; asks the GPU without waiting."""
        return self._place.passed(self._event)

    @property
    def over(self) -> bool:
        """Whether nobody's memory is needed any more."""
        return not self._arrays or self.reached


class CudaPlace(Place):
    """GPU number ``device``, used through ``cupy``, the module.

    Nothing is held in reserve: memory that lacks after the ranks have agreed to go ahead is an
    error on all of them.
    """

    name: ClassVar[str] = "cuda"
    ordered: ClassVar[bool] = True

    def __init__(self, cupy: Any, device: int) -> None:
        self._cuda, self.device = cupy.cuda, device
        self._framework: Framework = _Unknown(cupy)
        self._adopted = False
        self._held: deque[CudaMark] = deque()
        self._side = _side_stream(self._cuda, device)
        super().__init__(cupy)

    def adopt(self, make: Callable[[], Framework]) -> None:
        """Work for the tensors of the framework that ``make`` returns; the first one counts."""
        if not self._adopted:
            self._framework, self._adopted = make(), True

    def reduces(self, dtype: str, op: ReduceOp) -> bool:
        """Whether tensors of ``dtype`` can be reduced here; others have to be staged."""
        return op is not ReduceOp.ADASUM and reduced(dtype)

    @property
    def stream(self) -> int:
        """The pointer of the side stream."""
        return int(self._side.ptr)

    def address(self, array: Array) -> int:
        """Return the device pointer."""
        return int(array.__cuda_array_interface__["data"][0])  # type: ignore[attr-defined]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Make the side stream current, and the framework's memory, in the calling thread."""
        with on_device(self._cuda, self.device), self._side, self._memory():
            yield

    def steps(self, steps: Steps) -> Steps:
        """Take the steps at work: collectives are enqueued like kernels, so no lane is needed."""
        with self.at_work():
            yield from steps

    def ready(self) -> Any:
        """Record an event on the framework's current stream."""
        with on_device(self._cuda, self.device):
            event = self._cuda.Event(disable_timing=True)
            self._cuda.runtime.eventRecord(event.ptr, self._framework.stream(self.device))
        return event

    def after(self, ready: Iterable[Any]) -> None:
        """Let the side stream wait for events."""
        for event in ready:
            if event is not None:
                self._cuda.runtime.streamWaitEvent(self.stream, event.ptr)

    def done(self, arrays: Iterable[Array]) -> CudaMark:
        """Record an event on the side stream. Called at work, on the engine's thread."""
        while self._held and self._held[0].over:
            self._held.popleft().release()
        event = self._cuda.Event(disable_timing=True)
        event.record(self._side)
        mark = CudaMark(self, event, arrays)
        self._held.append(mark)
        return mark

    def wait_for(self, event: Any) -> None:
        """Let the framework's current stream wait for ``event``."""
        with on_device(self._cuda, self.device):
            self._cuda.runtime.streamWaitEvent(self._framework.stream(self.device), event.ptr)

    def passed(self, event: Any) -> bool:
        """Whether ``event`` is over. Raises CuPy's error of a GPU that failed."""
        return over(self._cuda, event)

    def catch_up(self) -> None:
        """Let the framework's current stream wait for all work so far. From any thread."""
        self.wait_for(self._recorded())

    def finish(self) -> None:
        """Wait, on the host, for all work so far: for frameworks that do not tell their stream."""
        self._recorded().synchronize()

    def bring(self, state: State) -> None:
        """Copy what lies in host memory to the GPU, on the side stream."""
        with self.at_work():
            self._bring(state)

    def to_host(self, array: Array) -> Array:
        """Copy to host memory, behind all work so far; waits for it."""
        with self.at_work():
            copied: Array = array.get()  # type: ignore[attr-defined]
        return copied

    def close(self) -> None:
        """Wait for the side stream, whose work may still write to tensors."""
        deadline = time.monotonic() + _LEAVING_S
        try:
            with self.at_work():
                last = self.done(())
            while not last.reached:
                if time.monotonic() > deadline:
                    log.warning("GPU %d is still at work on tensors", self.device)
                    return
                time.sleep(0.001)
            _idle.append((self._cuda, self.device, self._side))
        except Exception as error:  # of a device that is lost: other places are to be closed too
            log.warning("GPU %d does not answer: %s", self.device, error)
        self._held.clear()

    def _recorded(self) -> Any:
        """Return an event behind all work so far."""
        with on_device(self._cuda, self.device):
            event = self._cuda.Event(disable_timing=True)
            event.record(self._side)
        return event

    def _bring(self, state: State) -> None:
        for key, value in state.items():
            if isinstance(value, dict):
                self._bring(value)
            elif isinstance(value, np.ndarray):
                state[key] = self.xp.asarray(value)

    def _memory(self) -> AbstractContextManager[object]:
        allocator = self._framework.allocator()
        if allocator is None:
            return nullcontext()
        used: AbstractContextManager[object] = self._cuda.using_allocator(allocator)
        return used


def _side_stream(cuda: Any, device: int) -> Any:
    """Return a stream that a closed place has left, or a new one."""
    with _streams_lock:
        for place, (module, number, stream) in enumerate(_idle):
            if module is cuda and number == device:
                del _idle[place]
                return stream
    with on_device(cuda, device):
        # Not blocking: nothing that others put on the default stream shall hold it up.
        stream = cuda.Stream(non_blocking=True)
    _made.append((cuda, device, stream))
    return stream
