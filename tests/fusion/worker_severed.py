"""Three ranks between which something breaks: ``worker_severed.py FOLDER CASE SIZE``.

``reset``: the connection of ranks 1 and 2 ends, and all live; ``cut``: while messages are on their
way, and as between ranks that are all far apart. ``forked`` and ``cloned``: rank 1 is
killed while a child of it lives, made by Python or by C, which runs none of Python's hooks. Ranks
reduce SIZE elements until then. ``frozen`` and ``killed``: rank 1 is stopped, or killed, while
ranks gather SIZE elements, so many that it is in the middle of a message. Each survivor prints what
it raised, and how long that took.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
from torch.distributed import FileStore

from ringlet.fusion import Engine, Request
from ringlet.ring import RingError
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.gloo import GlooCommunicator

SIZE = 3


def live_on():
    """Do nothing, as a child that holds whatever its parent had open."""
    while True:
        signal.pause()


def cut(comm):
    """End the connections between ranks 1 and 2."""
    for descriptor in comm._connections.to(2):
        comm._connections.cut(descriptor)


def break_something(case, comm, folder):
    """Do what the case is about, on rank 1."""
    if case in ("forked", "cloned"):
        # Neither call lets go of the interpreter's lock: the child's only thread has it.
        child = os.fork() if case == "forked" else ctypes.PyDLL(None).fork()
        if child == 0:
            live_on()
        (folder / "child").write_text(str(child))
    (folder / "when").write_text(repr(time.monotonic()))
    if case in ("frozen", "killed"):
        number = signal.SIGSTOP if case == "frozen" else signal.SIGKILL
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        return
    if case == "reset":
        cut(comm)
    elif case == "cut":
        threading.Timer(0.05, cut, (comm,)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class Clock:
    """Measures time without that in which this process stood still, as on a machine that stalls."""

    def __init__(self):
        self.stood = []  # when each of these stretches ended, and how long it was
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while True:
            before = time.monotonic()
            time.sleep(0.05)
            now = time.monotonic()
            if now - before > 0.5:
                self.stood.append((now, now - before))

    def since(self, when):
        """Return the seconds since ``when`` (monotonic)."""
        now = time.monotonic()
        return now - when - sum(min(length, end - when) for end, length in self.stood if end > when)


def train(folder, case, n, rank):
    """Reduce until something is raised."""
    clock = Clock()
    store = FileStore(str(folder / "store"), SIZE)
    comm = GlooCommunicator(store, rank, SIZE, timeout=100.0, host="127.0.0.1")
    if case == "cut":
        comm._nearest, comm._delay, comm._spread = 0.01, 0.01, True
    engine = Engine(comm, open_control)
    x, y = np.ones(n, np.float32), np.ones(n, np.float32)
    try:
        for step in range(100_000):
            if rank == 1 and step == (20 if case in ("reset", "forked", "cloned") else 2):
                break_something(case, comm, folder)
            if case in ("frozen", "killed"):
                engine.submit(Request("g", "allgather", shape=(n,)), x).wait(90)
                continue
            if case == "cut":
                engine.submit(Request("x", shape=(n,)), x).wait(90)
                continue
            handles = [
                engine.submit(Request("x", shape=(n,)), x),
                engine.submit(Request("y", shape=(n,)), y),
                engine.submit(Request("z", "broadcast", shape=(n,), root=step % SIZE), x.copy()),
            ]
            for handle in handles:
                handle.wait(90)
    except RingError as error:
        took = clock.since(float((folder / "when").read_text()))
        line = f"{took:.2f} {type(error).__name__} {list(error.ranks)}: {error}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
    engine.shutdown()
    comm.close()


def main():
    folder, case, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(folder, case, n, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    codes = []
    for rank in (0, 2, 1):
        if rank == 1 and case == "frozen":
            os.kill(children[rank], signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1]))
    assert codes == [0, 0, 0 if case in ("reset", "cut") else -signal.SIGKILL], codes


if __name__ == "__main__":
    main()
