"""Starts Python programs by forking a process that has imported their frameworks already.

A rank of PyTorch takes 1.5 s of processor time until it has imported what it needs, one of
TensorFlow 3 s. A test file that starts many of them says so::

    pytestmark = pytest.mark.preloaded("torch")        # or "tensorflow", or "jax"

While its tests run, ``subprocess`` starts Python programs here: a server, which has imported the
framework once, forks for each of them, and what it forks starts its own programs in the same way.
So the launcher, the wrappers of ranks and the ranks are the processes that they always are, with
the parents, sessions, descriptors, signals and exit codes that they would have, and with their own
command line and environment in ``/proc``. What a rig's remote shell would run on one of its hosts
(benchmarks/netns.py) is forked too, and enters the host by itself. What differs: they share one
hash seed, and at their end they wait for threads, call what ``atexit`` holds and let go of what
the program made, but leave imported modules as they are, unless the mark says ``whole_end=True``.
To take the frameworks apart, module by module and operator by operator, is most of what a short
program costs.

A program runs as usual, by ``exec``, where a fork could not give it what it asks for: other flags
than -P and -u, variables that are read when the frameworks are imported, no interpreter of ours.
Of these variables some make another server: those that say which Keras it is, and on what.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import inspect
import io
import json
import os
import pickle
import runpy
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

OURS = ["ringlet.torch", "ringlet.ring.functions.call", "pytest", "encodings.idna"]
LAUNCHER = [
    "ringlet.ring.command.cli",
    "ringlet.ring.hosts.batch_hosts",
    "ringlet.ring.launch.machine",
]
TORCH = ["torch._dynamo", "torch.distributed.fsdp", *OURS, *LAUNCHER]
JAX = ["ringlet.jax", "jax.experimental.buffer_callback", "jaxlib.mlir.dialects.mhlo"]
DIGITS = "sklearn.datasets"  # which examples and tests that train import
FRAMEWORKS = {
    "torch": [*TORCH, DIGITS],
    "tensorflow": [*TORCH, DIGITS, "ringlet.tensorflow", "ringlet.keras", *JAX],
    "jax": [*TORCH, DIGITS, *JAX, "orbax.checkpoint", "flax.nnx"],
}
# What is imported instead, or as well, where these variables are set.
VARIANTS = {
    "KERAS_BACKEND=torch": [*TORCH, "torch._inductor.compile_fx", "ringlet.keras"],
    "KERAS_BACKEND=jax": [*TORCH, *JAX, "ringlet.keras"],
    "TF_USE_LEGACY_KERAS=1": [*FRAMEWORKS["tensorflow"], "tf_keras"],
}
# Their kernels are loaded in advance too.
SPECS = ("none", "fp16", "bf16", "int8 | ef", "topk(ratio=0.05) | ef", "powersgd")

# Read by the interpreter, or by a framework when it is imported.
READ_EARLY = (
    *("PYTHON", "NUMBA_", "TF_", "KERAS_", "TORCH", "PYTORCH_", "CUDA_", "XLA_", "JAX_", "MKL_"),
    *("OMP_", "OPENBLAS_", "ATEN_", "LD_", "KMP_", "GOMP_", "ABSL_", "LC_", "LANG", "VIRTUAL_ENV"),
)
# These are, but a forked process can still do as they say. XLA reads its flags when it first runs.
DONE_LATE = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")
# torchrun sets these for its ranks, who read them when they make groups.
READ_LATE = ("TORCHELASTIC_", "TORCH_NCCL_")
# Frameworks set these themselves, when they are imported.
SET_BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
# What is the same as nothing.
DEFAULTS = {"KERAS_BACKEND": "tensorflow"}
# The launcher's wrappers run with one thread of OpenBLAS, and say nothing of it to their ranks.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

# Programs that start others when they have threads already, from which no process should fork: a
# process that they fork first does it for them.
WITH_THREADS = ("torch.distributed.run",)

# A server is started with so many bytes more of arguments, and of environment, than it needs: there
# the kernel finds the ones of what it forks.
ROOM = 1 << 16

# Set: programs take apart at their end what was imported before the fork too.
WHOLE_END = "FORK_SERVER_WHOLE_END"

KEPT: list[BaseException] = []  # what has ended this process's program
USUAL = getattr(subprocess.Popen, "usual", subprocess.Popen)  # a server may be forked itself
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MADV_COLLAPSE = 25
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
libc = ctypes.CDLL(None, use_errno=True)
SIZE = struct.Struct("!I")


class Host(NamedTuple):
    """A host of a rig: its name, and the network namespace that it is."""

    name: str
    namespace: str

    def enter(self) -> None:
        """Move this process there, as ``ip netns exec`` and ``unshare --uts`` do."""
        with open(f"/run/netns/{self.namespace}") as place:
            _check(libc.setns(place.fileno(), CLONE_NEWNET))
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
        _check(libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None))
        _check(libc.umount2(b"/sys", MNT_DETACH))
        _check(libc.mount(self.namespace.encode(), b"/sys", b"sysfs", 0, None))
        socket.sethostname(self.name)


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Program:
    """What a command line asks the interpreter to run: a module, a string, or a script."""

    def __init__(self, command: list[str], host: Host | None = None) -> None:
        self.command, self.host = command, host
        self.kind, self.what, self.argv = "", "", command[1:]
        self.safe_path = False
        self.unbuffered = False
        while self.argv and self.argv[0] in ("-P", "-u"):
            flag = self.argv.pop(0)
            self.safe_path |= flag == "-P"
            self.unbuffered |= flag == "-u"
        if self.argv and self.argv[0] in ("-m", "-c"):
            self.kind = self.argv.pop(0)
            self.what = self.argv[0] if self.argv else ""
            if self.kind == "-c" and self.argv:
                self.argv[0] = "-c"
        elif self.argv and not self.argv[0].startswith("-"):
            self.kind, self.what = "file", self.argv[0]

    def run(self) -> None:
        """Run it as the interpreter's main program, in this process."""
        sys.argv[:] = self.argv
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = main
        if not self.safe_path:
            first = {
                "-m": os.getcwd(),
                "-c": "",
                "file": os.path.dirname(os.path.realpath(self.what)),
            }
            sys.path.insert(0, first[self.kind])
        if self.kind == "-m":
            runpy._run_module_as_main(self.what)  # what ``python -m`` calls
            return
        name = "<string>" if self.kind == "-c" else self.what
        if self.kind == "file":
            main.__file__ = self.what
            main.__cached__ = None
            source: str | bytes = Path(self.what).read_bytes()
        else:
            source = self.what
        exec(compile(source, name, "exec"), main.__dict__)


def early(env: dict[str, str]) -> dict[str, str]:
    """Return those variables of ``env`` that a program would read before it runs."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_EARLY)
        and not name.startswith(READ_LATE)
        and name not in (*DONE_LATE, *SET_BY_IMPORTS)
        and {**ONE_THREAD, **DEFAULTS}.get(name) != value
    }


EARLY = early(dict(os.environ))  # what this process has read
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class Start(NamedTuple):
    """What is to be started: a command, its environment and folder, and where (None: here)."""

    words: list[str]
    env: dict[str, str]
    cwd: str | None
    host: Host | None = None


def on_host(start: Start) -> Start:
    """Return what a rig's remote shell runs, and on which host; else ``start`` itself."""
    shell, *rest = start.words
    told = Path(shell).with_name("hosts.json")
    if Path(shell).name != "rsh" or len(rest) < 2 or not told.is_file():
        return start
    hosts = json.loads(told.read_text())
    words, env, cwd = shlex.split(" ".join(rest[1:])), dict(start.env), start.cwd
    if words[0] == "cd" and words[2] == "&&":
        cwd, words = words[1], words[3:]
    if words[0] != "exec" or rest[0] not in hosts:
        return start
    del words[0]
    if words[0] == "env":
        del words[0]
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = value
    return Start(words, env, cwd, Host(*hosts[rest[0]]))


def forkable(start: Start) -> Program | None:
    """Return the program that ``start`` names if a fork can stand in for it, else None."""
    words, env, cwd, host = start
    if words[0] != sys.executable or any("\0" in each for each in (*words, *env.values())):
        return None
    program = Program(words, host)
    here = Path() if cwd is None else Path(cwd)
    if not program.kind or not here.is_dir() or variant(env) is None:
        return None
    if program.kind == "file" and not (here / program.what).is_file():
        return None
    return program


def variant(env: dict[str, str]) -> str | None:
    """Return which of VARIANTS ``env`` asks for, "" for none; None where no server is like that."""
    wanted = early(env)
    if any(wanted.get(name) != value for name, value in EARLY.items()):
        return None
    more = [f"{name}={value}" for name, value in wanted.items() if name not in EARLY]
    return "" if not more else more[0] if len(more) == 1 and more[0] in VARIANTS else None


def become(
    program: Program,
    env: dict[str, str],
    cwd: str | None,
    descriptors: dict[int, int],
    new_session: bool,
    prepare: object = None,
) -> None:
    """Turn this forked process into ``program``'s; never returns.

    ``descriptors`` tells which of the descriptors that are open here (values) is which there.
    """
    code = 255
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, usual)
        gc.freeze()  # what nobody refers to may hold descriptors that are closed below: it stays
        _place(descriptors)
        if cwd is not None:
            os.chdir(cwd)
        if new_session:
            os.setsid()
        if program.host is not None:
            program.host.enter()
        if callable(prepare):
            prepare()
        os.environ.clear()
        os.environ.update(env)
        _show(program.command, env)
        _see_environment(program)
        if program.what in WITH_THREADS:
            Popen.starter = Starter()
            atexit.register(Popen.starter.close)
        code = _ending(program)
    except BaseException:
        traceback.print_exc()
    finally:
        if os.environ.get(WHOLE_END):
            ctypes.pythonapi.Py_Exit(code)
        _end(code)


def _end(code: int) -> None:
    """End this process as the interpreter does, but for what it does with imported modules."""
    own = sys.modules["__main__"].__dict__
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        for do in (threading._shutdown, atexit._run_exitfuncs, own.clear, gc.collect):
            try:
                do()
            except BaseException:
                traceback.print_exc()
        code = code if _flush() else 120
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()
    finally:
        os._exit(code)


def _place(descriptors: dict[int, int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    top = max([*descriptors, *descriptors.values(), 2]) + 1
    above = {new: fcntl.fcntl(old, fcntl.F_DUPFD, top) for new, old in descriptors.items()}
    for new, old in above.items():
        os.dup2(old, new, inheritable=True)
    for number in range(3, top):
        if number not in above:
            with contextlib.suppress(OSError):
                os.close(number)
    os.closerange(top, os.sysconf("SC_OPEN_MAX"))


def _show(command: list[str], env: dict[str, str]) -> None:
    """Have ``/proc`` tell ``command`` and ``env`` of this process, as if it had been started so."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    bounds = list(map(int, fields[45:49]))  # as proc(5) counts: arg_start to env_end
    for start, end, words in (
        (*bounds[:2], command),
        (*bounds[2:], [f"{name}={value}" for name, value in env.items()]),
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(text) > end - start:
            raise ValueError(f"a fork server has room for {end - start} bytes, not for {len(text)}")
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _see_environment(program: Program) -> None:
    """Do what the interpreter does of the environment when it starts."""
    env = os.environ
    buffered = not (program.unbuffered or env.get("PYTHONUNBUFFERED"))
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = open(number, "wb", buffering=-1 if buffered else 0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors=errors,
            write_through=not buffered,
            line_buffering=name == "stderr" or raw.isatty(),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = given + [path for path in sys.path if path not in PATHS]
    sys.path_importer_cache.clear()  # empty in a server: to tell each of hundreds takes longer
    importlib.invalidate_caches()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", env.get("JAX_PLATFORMS") or None)
    if torch := sys.modules.get("torch"):
        if env.get("OMP_NUM_THREADS", "").isdecimal():
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        # After a fork autograd makes a new engine on first use: two threads both free the old one.
        torch.zeros(1, requires_grad=True).exp()


def _ending(program: Program) -> int:
    """Run ``program``; return its exit code, with what went wrong on the standard error."""
    try:
        program.run()
    except SystemExit as ending:
        # The interpreter lets go of it when no code runs any more.
        ending.__context__ = ending.__cause__ = None
        KEPT.append(ending.with_traceback(None))
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 0xFF
        _flush()
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _flush()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            _flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _flush() -> bool:
    """Write what is buffered; return whether all of it could be written."""
    written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            written = False
    return written


class Popen(USUAL):
    """``subprocess.Popen`` that forks where it can."""

    usual = USUAL
    # Returns the server of a variant; None: this process is one that was forked itself.
    server_of: Callable[[str], Server] | None = None
    starter: Server | None = None  # which such a process has if it is one of WITH_THREADS

    def communicate(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Do as ever; where the time is up, the error has a note of what is still running."""
        try:
            return super().communicate(*args, **options)
        except subprocess.TimeoutExpired as error:
            if self.server_of is not None:  # in a test, not in a program that one has started
                error.add_note(importlib.import_module("process_tree").tell(self.pid))
            raise

    def _execute_child(self, *args: object) -> None:
        usual = super()._execute_child
        given = inspect.signature(usual).bind(*args).arguments
        start = _asked(given)
        program = None if start is None else forkable(start)
        alone = len(os.listdir("/proc/self/task")) == 1
        server = self.starter if self.server_of is None and not alone else None
        other = (given["executable"], given["gid"], given["gids"], given["uid"])
        if (
            start is None
            or program is None
            or given["shell"]
            or any(value is not None for value in other)
            or given["umask"] != -1
            or given["process_group"] not in (None, -1)
            or (self.server_of is None and variant(start.env))
            or (self.server_of is None and not alone and server is None)
            or ((self.server_of or server) and given["preexec_fn"] is not None)
        ):
            usual(*args)
            return
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        descriptors = {number: number for number in given["pass_fds"]}
        for number, name in ((0, "p2cread"), (1, "c2pwrite"), (2, "errwrite")):
            descriptors[number] = number if given[name] == -1 else given[name]
        env, cwd = start.env, None if start.cwd is None else os.path.abspath(start.cwd)
        try:
            _flush()
            session = bool(given["start_new_session"])
            if self.server_of is not None:
                server = self.server_of(variant(env) or "")
            if server is not None:
                self.pid = server.start(
                    program, env, os.getcwd() if cwd is None else cwd, descriptors, session
                )
            else:
                self.pid = os.fork()
                if self.pid == 0:
                    become(program, env, cwd, descriptors, session, given["preexec_fn"])
            self._child_created = True
        finally:
            self._close_pipe_fds(*(given[name] for name in ends))


def _asked(given: dict[str, Any]) -> Start | None:
    """Return what ``subprocess`` was asked to start; None where that is a shell's to read."""
    if not isinstance(given["args"], (list, tuple)):
        return None
    env = os.environ if given["env"] is None else given["env"]
    cwd = None if given["cwd"] is None else os.fsdecode(given["cwd"])
    # Not by dict: pytest deletes a variable of its own while a thread may start something.
    found = {name: value for name in list(env) if (value := env.get(name)) is not None}
    return on_host(Start([os.fsdecode(word) for word in given["args"]], found, cwd))


class Server:
    """A process that has imported ``framework`` and forks programs, whose parent is this one.

    ``which`` is one of VARIANTS, or empty. It is forked from ``base`` itself, if there is one.
    """

    # One of all servers: whether this process takes in orphans is a setting of the process.
    _lock = threading.Lock()

    def __init__(self, framework: str, which: str = "", base: Server | None = None) -> None:
        self._link, end = socket.socketpair()
        command = [sys.executable, __file__, which or framework, str(end.fileno())]
        env = {**os.environ, **ONE_THREAD, "OMP_NUM_THREADS": "1"}
        if which:
            name, _, value = which.partition("=")
            env[name] = value
        with end:
            if base is None:
                command, env = [*command, "-" * ROOM], env | {"FORK_SERVER_ROOM": "-" * ROOM}
                self._wait = USUAL(command, pass_fds=[end.fileno()], env=env).wait
            else:
                descriptors = {number: number for number in (0, 1, 2, end.fileno())}
                pid = base.start(Program(command), env, os.getcwd(), descriptors, False)
                self._wait = functools.partial(os.waitpid, pid, 0)

    def start(
        self,
        program: Program,
        env: dict[str, str],
        cwd: str,
        descriptors: dict[int, int],
        new_session: bool,
    ) -> int:
        """Start ``program`` as a child of this process; return its process id."""
        numbers = list(descriptors)
        request = pickle.dumps((program, env, cwd, numbers, new_session))
        with self._lock:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._link, [SIZE.pack(len(request))], list(descriptors.values()))
                self._link.sendall(request)
                return SIZE.unpack(_exactly(self._link, SIZE.size))[0]
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        self._link.close()
        self._wait()


class Starter(Server):
    """A server that this process forks, and that is as this process is now."""

    def __init__(self) -> None:
        self._link, end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._link.close()
                serve(end)
            finally:
                os._exit(0)
        end.close()
        self._wait = functools.partial(os.waitpid, pid, 0)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := link.recv(size - len(data))):
            raise EOFError("the fork server has ended")
        data += more
    return data


def serve(link: socket.socket) -> None:
    """Fork programs until the other side of ``link`` closes."""
    while True:
        size, rights, _, _ = link.recvmsg(SIZE.size, socket.CMSG_SPACE(64 * 4))
        if not size:
            return
        received = array.array("i")
        for _, _, data in rights:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
        size += _exactly(link, SIZE.size - len(size)) if len(size) < SIZE.size else b""
        request = _exactly(link, SIZE.unpack(size)[0])
        program, env, cwd, numbers, new_session = pickle.loads(request)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:  # its end makes the program a child of whoever asked
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                os.close(tell)
                while os.getppid() == parent:
                    time.sleep(0.0005)
                descriptors = dict(zip(numbers, received, strict=True))
                become(program, env, cwd, descriptors, new_session)
            os.write(tell, SIZE.pack(pid))
            os._exit(0)
        os.close(tell)
        pid = os.read(told, SIZE.size)
        os.close(told)
        os.waitpid(between, 0)
        for number in received:
            os.close(number)
        link.sendall(pid)


def _collapse_pages() -> None:
    """Put this process's memory into huge pages, where Linux (6.1) can: to fork takes a third then.

    The kernel copies an entry for each page that was written, and lets go of it when the fork ends.
    """
    size = 1 << 21
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode = line.split()[:5]
        if access != "rw-p" or inode != "0":
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for place in range(-(-start // size) * size, end - size + 1, size):
            libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), MADV_COLLAPSE)


def main() -> None:
    """Import the framework and serve."""
    which, number = sys.argv[1:3]
    sys.modules["fork_server"] = sys.modules["__main__"]  # what requests are pickled by
    Program.__module__ = Host.__module__ = "fork_server"
    sys.path.pop(0)  # this file's folder
    gc.disable()  # what is imported stays
    for name in {**FRAMEWORKS, **VARIANTS}[which]:
        # make test-huggingface's environment is without scikit-learn, and trains on no digits.
        if name != DIGITS or importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    importlib.import_module("ringlet.job.warm_up").warm_up(SPECS)
    subprocess.Popen = Popen
    weakref.finalize._registry.clear()  # a thousand operators of torch's, each asked at the end
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 50, 50)  # the usual ones took a tenth of what programs take
    _collapse_pages()
    serve(socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
