"""What tests/fork_server.py starts is what the interpreter would have started."""

import json
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fork_server
import netns
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.preloaded("torch")
missing = netns.unavailable()

TELL = """
import json, os, sys
print(json.dumps({
    "preloaded": "torch" in sys.modules, "parent": os.getppid(), "argv": sys.argv,
    "name": __name__, "cwd": os.getcwd(), "own": os.environ.get("OWN"), "path": sys.path[0],
    "leads": os.getsid(0) == os.getpid(), "open": sorted(map(int, os.listdir("/proc/self/fd"))),
}))
"""


def told(*words, **options):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_program_is_forked_and_finds_what_it_would_find(tmp_path):
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    found = told(script, "a", "-b", cwd=tmp_path, env=os.environ | {"OWN": "x"})
    assert found.pop("open")[:3] == [0, 1, 2]
    assert found == {
        "preloaded": True, "parent": os.getpid(), "argv": [str(script), "a", "-b"],
        "name": "__main__", "cwd": str(tmp_path), "own": "x", "path": str(tmp_path),
        "leads": False,
    }  # fmt: skip


def test_what_does_not_end_in_time_is_told():
    inner = "import sys; print('up', flush=True); sys.stdin.read()"
    code = f"import sys, subprocess as s; s.Popen([sys.executable, '-c', {inner!r}], stdin=s.PIPE)"
    code += ".wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"  # both run, however long that takes
        with pytest.raises(subprocess.TimeoutExpired) as raised:
            process.communicate(timeout=0.1)
        process.kill()
    (note,) = raised.value.__notes__
    first, *processes = note.splitlines()
    assert first.startswith("Load: ")
    assert len(processes) == 2
    assert processes[0].endswith(code)
    assert processes[1].endswith(inner)


def test_flags_sessions_and_descriptors():
    reader, writer = os.pipe()
    found = told("-P", "-c", TELL, "z", start_new_session=True, pass_fds=[writer])
    os.close(reader)
    os.close(writer)
    assert (found["preloaded"], found["argv"], found["leads"]) == (True, ["-c", "z"], True)
    assert found["path"] != ""
    assert set(found["open"]) - {0, 1, 2} <= {writer, *range(3, 5)}  # one lists the folder


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no more')", 1, "no more\n"),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit; atexit.register(print, 'bye'); print('x')", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("def f(): 1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
    ],
)  # fmt: skip
def test_it_ends_as_the_interpreter_would(program, code, said):
    command = [sys.executable, "-c", program]
    forked = subprocess.run(command, capture_output=True, text=True)
    usual = fork_server.USUAL(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = usual.communicate()
    assert (forked.returncode, forked.stdout) == (usual.returncode, out)
    assert forked.returncode == code
    last = [text.splitlines(keepends=True)[-1:] for text in (forked.stderr, err, said)]
    assert last[0] == last[1] == last[2]
    assert "fork_server" not in forked.stderr


def test_programs_of_two_servers_are_children_of_who_started_them():
    """Whether a process takes in orphans is a setting of the process: servers take turns."""
    first = subprocess.Popen.server_of("")
    second = fork_server.Server("torch", "", first)

    def codes(server):
        program = fork_server.Program([sys.executable, "-c", "raise SystemExit(3)"])
        for _ in range(20):
            pid = server.start(program, dict(os.environ), os.getcwd(), {0: 0, 1: 1, 2: 2}, False)
            yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda server: list(codes(server)), (first, second)))
    second.close()
    assert found == [[3] * 20] * 2


def test_it_is_one_programs_own_signal_that_ends_it():
    program = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "env"), [(["-I"], {}), ([], {"PYTHONHASHSEED": "0"}), ([], {"NUMBA_OPT": "3"})]
)
def test_what_is_decided_at_the_start_is_started_as_usual(flags, env):
    assert not told(*flags, "-c", TELL, env=os.environ | env)["preloaded"]


def test_what_it_starts_forks_its_own_programs():
    program = (
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    )
    found = told("-c", program, TELL.replace('"parent": os.getppid()', '"parent": 0'))
    assert found["preloaded"]


def test_torchrun_which_has_threads_forks_its_ranks(tmp_path):
    script = tmp_path / "tell.py"
    script.write_text(TELL.replace('"leads"', '"run": os.environ["TORCHELASTIC_RUN_ID"], "leads"'))
    words = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-id", "mine"]
    words += ["--rdzv-endpoint", "127.0.0.1:0", str(script), "a"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as torchrun:
        found = json.loads(torchrun.communicate(timeout=120)[0])
    assert torchrun.returncode == 0
    assert (found["preloaded"], found["parent"], found["run"]) == (True, torchrun.pid, "mine")
    assert (found["argv"], found["open"][:3]) == ([str(script), "a"], [0, 1, 2])


def test_the_kernel_tells_its_own_command_line_and_environment():
    program = "import time; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, "a b"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"OWN": "x"}
    ) as process:
        assert process.stdout.readline() == b"up\n"
        proc = Path("/proc", str(process.pid))
        words = (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        variables = (proc / "environ").read_bytes().rstrip(b"\0").split(b"\0")
        process.kill()
    assert words == [os.fsencode(word) for word in command]
    assert dict(v.split(b"=", 1) for v in variables) == os.environb | {b"OWN": b"x"}


@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.parametrize("forked", [False, True])
def test_what_a_rigs_remote_shell_runs_enters_the_host(forked):
    show = "import os, socket, sys; print('torch' in sys.modules, socket.gethostname()); "
    show += (
        "print(os.getcwd(), *sorted(os.listdir('/sys/class/net')), os.environ['OWN'], sys.argv[1:])"
    )
    line = f"cd / && exec {shlex.join(['env', 'OWN=a b', sys.executable, '-c', show, 'x y'])}"
    popen = subprocess.Popen if forked else fork_server.USUAL
    with netns.Hosts(2) as hosts:
        for name, asked in (("node0", "node0"), ("node1", "10.77.0.2")):
            process = popen([hosts.rsh, asked, line], stdout=subprocess.PIPE, text=True)
            said = process.communicate(timeout=120)[0].splitlines()
            assert said == [f"{forked} {name}", "/ lo v0 a b ['x y']"]


ENDING = """
import atexit, threading
import torch


class Told:
    def __del__(self):
        print("gone", flush=True)


atexit.register(print, "bye")
own = Told()
threading.Timer(0.1, lambda: print("thread", flush=True)).start()
"""


@pytest.mark.parametrize("whole", ["", "1"])
def test_its_end_waits_for_threads_and_is_rid_of_what_is_its_own(monkeypatch, whole):
    monkeypatch.setenv(fork_server.WHOLE_END, whole)
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["thread", "bye", "gone"]
