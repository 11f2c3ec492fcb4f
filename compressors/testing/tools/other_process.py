"""Another process to ask: one that knows nothing of this one, and hashes otherwise.

It is started once. A fork of it loads the modules of a plugin, which may take seconds, and answers
each question about them in a fork of its own: no plugin finds there what another one, or an earlier
question, has left. What is asked of Ringlet's own compressors it answers itself: they leave nothing
but kernels, which need not be loaded a second time.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np

from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.quantizers.quantize import Int8
from ringlet.compressors.testing.tools.simulate import simulate

_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
_CHILD += "from ringlet.compressors.testing.tools.other_process import serve; serve()"
_PATIENCE = 120.0  # seconds for an answer, which may begin with compiling kernels
_FORK, _STAY = b"f", b"s"  # what a question begins with
_READY = b"ready"
_TASKS = Path("/proc/self/task")  # those of libraries too, OpenMP's for example
_NOT_EDITED = {"ringlet", *sys.stdlib_module_names}
_INSTALLED = "/site-packages/", "/dist-packages/"
_HEAD = 8  # bytes before a message, which say how long it is


def are_ours(modules: set[str]) -> bool:
    """Whether all ``modules`` are Ringlet's own."""
    return all(map(_is_ours, modules))


def _is_ours(module: str) -> bool:
    """Whether a module is of Ringlet's own."""
    return module.startswith("ringlet.")


class OtherProcess:
    """A child that hashes with ``seed``, and with another one where this process does itself.

    It lives until this process ends.
    """

    def __init__(self, seed: int = 1) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork of that has no child
        self._told: IO[bytes] | None = None

    def begin(self) -> None:
        """Start it, unless it runs, and do not wait for it: several start side by side."""
        with self._lock:
            self._started()

    def ask(self, modules: set[str], function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)`` as computed there; AssertionError where that fails.

        Everything is pickled; ``modules`` are those that it takes to load ``args``.
        """
        theirs = sorted(m for m in modules if not _is_ours(m))  # ours are found by their names
        files = [(m, getattr(sys.modules[m], "__file__", None)) for m in theirs]
        kernels = "numba" in sys.modules and 0 < len(theirs) < len(modules)
        needed = pickle.dumps(_Needed(_path(), files, kernels, _SOURCES.now() if theirs else []))
        question = pickle.dumps((needed, pickle.dumps((function, args))))
        question = (_FORK if theirs else _STAY) + question
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                _write(child.stdin, question)
                ready = select.select([child.stdout], [], [], _PATIENCE)[0]
                reply = _read(child.stdout) if ready else None
            except BrokenPipeError:
                reply = b""
            if not reply:
                why = f"gave no answer in {_PATIENCE:.0f} s" if reply is None else "ended"
                told = self._close(kill=True)
                raise AssertionError(f"another process that was asked {why}: {told}")
        error, result = pickle.loads(reply)
        assert not error, f"another process cannot use it:\n{error}"
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        child = self._child
        if child is not None and self._owner == os.getpid() and child.poll() is None:
            return child
        if self._owner != os.getpid():
            atexit.register(self._close)
        else:
            self._close()
        mine = os.environ.get("PYTHONHASHSEED") == str(self._seed)
        seed = str(self._seed + 100 * mine)
        self._told = tempfile.TemporaryFile()  # noqa: SIM115, as long as the child
        child = self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._told,
            env={**os.environ, "PYTHONHASHSEED": seed},
            process_group=0,
        )
        self._owner = os.getpid()
        assert child.stdin is not None
        pickle.dump(_path(), child.stdin)
        child.stdin.flush()
        return child

    def _close(self, kill: bool = False) -> str:
        """End the child; return the end of what it said."""
        child, told = self._child, self._told
        if child is None or told is None or self._owner != os.getpid():
            return ""
        if kill:
            _kill(child)
        try:
            child.communicate(timeout=5)  # which ends its input, and with that the child
        except (subprocess.TimeoutExpired, BrokenPipeError):
            _kill(child)
            child.wait()
        self._child = self._told = None
        with told:
            told.seek(0)
            return told.read().decode(errors="replace").strip()[-2000:]


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and its forks, one of which may have no end of its own."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def serve() -> None:
    """Answer questions until there are no more: what the child does."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a plugin prints is no answer
    # Once: plugins draw and checks are made of these, and each fork would load them.
    for name in ("numpy.random", "ringlet.compressors.testing.catalogue"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what forks share
    loaded: _Loaded | None = None
    while question := _read(source):
        needed, asked = pickle.loads(question[1:])
        if question[:1] == _STAY:
            _write(answers, _load_all(needed) or _answer(asked))
            continue
        if loaded is not None and loaded.needed != needed:
            loaded.close()
            loaded = None
        if loaded is None and pickle.loads(needed).kernels and (wrong := _load_kernels()):
            _write(answers, wrong)
            continue
        loaded = loaded or _Loaded(needed)
        _write(answers, loaded.answer(asked))
    if loaded is not None:
        loaded.close()


class _Needed(NamedTuple):
    """What it takes to answer a question."""

    path: list[str]
    files: list[tuple[str, str | None]]  # of modules, by their names
    kernels: bool  # whether there are some of Ringlet's own beside a plugin
    sources: list[tuple[str, int]]  # and when they were changed


class _Loaded:
    """A fork that has loaded what is ``needed``, a ``_Needed``.

    It stands for others that need the same, pickled: as long as nobody has changed a source.
    """

    def __init__(self, needed: bytes) -> None:
        self.needed = needed
        (asking, question), (answering, answer) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(question)
                os.close(answering)
                with os.fdopen(asking, "rb") as source, os.fdopen(answer, "wb") as answers:
                    self._serve(source, answers)
            finally:
                os._exit(0)  # also where nobody listens any more: the caller's frames are another's
        os.close(asking)
        os.close(answer)
        self._questions, self._answers = os.fdopen(question, "wb"), os.fdopen(answering, "rb")
        # Forks of it would be without threads that modules start: they load all by themselves.
        self._usable = _read(self._answers) == _READY

    def answer(self, asked: bytes) -> bytes:
        """Return the answer to a question."""
        if not self._usable:
            return _in_a_fork(lambda: _load_all(self.needed) or _answer(asked))
        _write(self._questions, asked)
        return _read(self._answers)

    def close(self) -> None:
        """End it."""
        with self._questions, self._answers:
            pass
        os.waitpid(self._pid, 0)

    def _serve(self, source: IO[bytes], answers: IO[bytes]) -> None:
        wrong = _load_all(self.needed)
        gc.freeze()
        _write(answers, _READY if _threads() == 1 else b"has threads")
        while asked := _read(source):
            _write(answers, wrong or _in_a_fork(partial(_answer, asked)))


def _threads() -> int:
    """Return how many threads this process has; where nobody can tell, how many are Python's."""
    return len(os.listdir(_TASKS)) if _TASKS.is_dir() else threading.active_count()


def _in_a_fork(function: Callable[[], bytes]) -> bytes:
    """Return what ``function`` returns in a fork, or, pickled, that it ended before."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with os.fdopen(writing, "wb") as out:
                out.write(function())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as found:
        reply = found.read()
    status = os.waitpid(pid, 0)[1]
    return reply or pickle.dumps((f"it ended with status {status}", None))


def _load_all(needed: bytes) -> bytes:
    """Load modules; return what went wrong, as an answer, or nothing."""
    try:
        what = pickle.loads(needed)
        sys.path[:] = what.path
        for name, file in what.files:
            _load(name, file)
    except BaseException:
        return pickle.dumps((traceback.format_exc().strip(), None))
    return b""


@cache
def _load_kernels() -> bytes:
    """Load Numba and kernels that stand beside plugins; return what went wrong, as an answer.

    Before there are forks: they share them, and have none of the threads that SciPy starts.
    """
    try:
        simulate(Int8() | ErrorFeedback(), [np.ones(64, np.float32)])
    except BaseException:
        return pickle.dumps((traceback.format_exc().strip(), None))
    gc.collect()
    gc.freeze()
    return b""


def _answer(asked: bytes) -> bytes:
    """Return what went wrong, or nothing, and the result; pickled."""
    try:
        function, args = pickle.loads(asked)
        return pickle.dumps(("", function(*args)))
    except BaseException:
        return pickle.dumps((traceback.format_exc().strip(), None))


def _load(name: str, file: str | None) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file) if file else None
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


class _Sources:
    """The files of modules that nobody has installed, and when they were changed."""

    def __init__(self) -> None:
        self._known: tuple[list[str], list[ModuleType], list[str]] = [], [], []

    def now(self) -> list[tuple[str, int]]:
        """Return them; a look at each of thousands of modules only where others are loaded."""
        names, modules = [*sys.modules], [*sys.modules.values()]
        *known, files = self._known
        if known != [names, modules]:
            files = sorted(_editable(zip(names, modules, strict=True)))
            self._known = names, modules, files
        found = []
        for file in files:
            with suppress(OSError):  # it may be of an archive, or gone
                found.append((file, os.stat(file).st_mtime_ns))
        return found


def _editable(modules: Iterable[tuple[str, ModuleType]]) -> set[str]:
    files = set()
    for name, module in modules:
        # Not as an attribute: some modules import others when they are asked for any.
        file = getattr(module, "__dict__", {}).get("__file__")
        if file and name.partition(".")[0] not in _NOT_EDITED:
            files.add(file)
    return {file for file in files if not any(place in file for place in _INSTALLED)}


_SOURCES = _Sources()


def _path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(_HEAD, "little") + message)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """Return a message; nothing where the other side has ended."""
    head = stream.read(_HEAD)
    return stream.read(int.from_bytes(head, "little")) if len(head) == _HEAD else b""
