"""Streams, events and memory of a GPU that is none: what is out of order raises.

Every stream has a vector clock. An event carries the clock of the stream that it was recorded on,
and a stream that waits for it learns it. Whoever touches memory must know of the last write to it,
and before writing of all reads since.
"""

import itertools
import threading
import types
import weakref


class OutOfOrder(AssertionError):
    """Memory was touched before something that it had to wait for."""


class CUDARuntimeError(RuntimeError):
    """What CuPy raises, with the code of the error."""


class Gpu:
    """One rank's GPU. ``busy`` keeps events from being done; counters say what happened."""

    def __init__(self):
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.streams, self.events = {}, weakref.WeakValueDictionary()
        self.local = threading.local()
        self.busy = False
        self.failed = 0  # the code of an error that stays
        self.empties = self.copies = self.reads = 0
        self.finished = {}  # times by stream, up to which the host has waited
        self.train = Stream(self)  # the framework's
        self.cuda = types.SimpleNamespace(
            Stream=lambda non_blocking: Stream(self),
            Event=lambda disable_timing: Event(self),
            get_current_stream=self.current,
            runtime=types.SimpleNamespace(
                getDevice=lambda: 0,
                eventRecord=self._record,
                streamWaitEvent=self._wait,
                eventQuery=self._query,
                CUDARuntimeError=CUDARuntimeError,
                deviceGetPCIBusId=lambda number: f"{id(self)}",
            ),
        )

    def current(self):
        """Return the stream that is current in this thread; there is no default one."""
        stack = getattr(self.local, "stack", None)
        if not stack:
            raise OutOfOrder("memory of the GPU is touched outside of any stream")
        return stack[-1]

    def _record(self, event, stream):
        self.events[event].record(self.streams[stream])

    def _query(self, event):
        assert event in self.events
        return self.failed or (600 if self.busy else 0)

    def _wait(self, stream, event):
        with self.lock:
            waiting, known = self.streams[stream], self.events[event].clock
            if known is None:
                raise OutOfOrder("a stream waits for an event that was never recorded")
            for other, time in known.items():
                waiting.clock[other] = max(time, waiting.clock.get(other, 0))


class Stream:
    """A queue of work, which is done at once; what counts is what it knows to be done before."""

    def __init__(self, gpu):
        self.gpu, self.ptr = gpu, next(gpu.numbers)
        self.clock = {self.ptr: 0}
        gpu.streams[self.ptr] = self

    def __enter__(self):
        if not hasattr(self.gpu.local, "stack"):
            self.gpu.local.stack = []
        self.gpu.local.stack.append(self)
        return self

    def __exit__(self, *_):
        self.gpu.local.stack.pop()


class Event:
    """A point of a stream's work."""

    def __init__(self, gpu):
        self.gpu, self.ptr, self.clock = gpu, next(gpu.numbers), None
        gpu.events[self.ptr] = self

    def record(self, stream):
        with self.gpu.lock:
            self.clock = dict(stream.clock)

    def synchronize(self):
        self.gpu.finished.update(self.clock)


class Memory:
    """An allocation, and who has touched it."""

    def __init__(self, gpu):
        self.gpu, self.writer, self.readers = gpu, None, {}

    def touch(self, write):
        """Read or write on the current stream."""
        gpu = self.gpu
        with gpu.lock:
            stream = gpu.current()
            before = [self.writer] if self.writer else []
            before += self.readers.items() if write else []
            for other, time in before:
                if stream.clock.get(other, 0) < time:
                    what = "written" if write else "read"
                    raise OutOfOrder(
                        f"stream {stream.ptr} has {what} memory without waiting for stream {other}"
                    )
            now = stream.clock[stream.ptr] = stream.clock[stream.ptr] + 1
            if write:
                self.writer, self.readers = (stream.ptr, now), {}
            else:
                self.readers[stream.ptr] = now
