"""What the launcher does with output that cannot be written, and where it lets it be written."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from ringlet.ring.errors import LaunchError
from ringlet.ring.processes.output import STDERR, STDOUT, Printer

HAS_TORCH = importlib.util.find_spec("torch") is not None
DEADLINE = 120.0
RUN = [sys.executable, "-m", "ringlet", "run", "--transport", "gloo"]
PYTHON = [sys.executable, "-I", "-S", "-c"]

needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


@needs_torch
@pytest.mark.parametrize("elastic", [[], ["--min-np", "2"]], ids=["fixed", "elastic"])
@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]], ids=str)
def test_descriptors_that_are_closed_do_not_matter(closed: list[int], elastic: list[str]) -> None:
    """Else the launcher's own sockets have their numbers, and ranks wait for what is printed."""

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    code = "import os\nfor fd in (1, 2): os.write(fd, b'here\\n')\nraise SystemExit(3)"
    done = subprocess.run(
        [*RUN, "-np", "2", *elastic, "--no-prefix", *PYTHON, code],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=close,
    )
    assert done.returncode == 3, done.stderr
    heard = {1: done.stdout, 2: done.stderr}
    for descriptor, text in heard.items():
        assert ("here" in text.splitlines()) == (descriptor not in closed)


@needs_torch
@pytest.mark.parametrize("elastic", [[], ["--min-np", "8"]], ids=["fixed", "elastic"])
def test_a_launcher_takes_the_descriptors_that_it_may_have(
    elastic: list[str], tmp_path: Path
) -> None:
    """Each rank needs several; its program has the limit that it would have without a launcher."""
    code = "import resource as r; print(*r.getrlimit(r.RLIMIT_NOFILE))"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [*RUN, "-np", "8", *elastic, "--no-prefix", "--output-filename", str(tmp_path / "out"),
         sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"20 {hard}"] * 8


@needs_torch
def test_a_time_limit_may_be_so_long_that_it_means_never() -> None:
    words = ["-np", "1", "--min-np", "1", "--elastic-timeout", "31536000", *PYTHON]
    done = subprocess.run(
        [*RUN, *words, "import time; time.sleep(1)"],  # while nothing else is waited for
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def at_most(descriptors: int) -> Callable[[], None]:
    """Return what allows a process that is started so many descriptors."""
    limits = descriptors, descriptors
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@needs_torch
def test_a_launcher_that_may_have_no_more_descriptors_says_so() -> None:
    job = subprocess.Popen(
        [*RUN, "-np", "12", *PYTHON, "import signal; signal.pause()"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=at_most(16),
    )
    assert job.stderr is not None
    said = ""
    try:
        while "allow it more" not in said:
            line = job.stderr.readline()
            assert line, said
            said += line
        job.send_signal(signal.SIGTERM)  # it would wait for those that cannot come
        _, rest = job.communicate(timeout=DEADLINE)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 128 + signal.SIGTERM
    assert "has all of the 16 descriptors that it may have: allow it more" in said
    assert "allow it more" not in rest


@needs_torch
@pytest.mark.parametrize("elastic", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_descriptors_that_are_too_few_to_start_anything_are_told_of(elastic: list[str]) -> None:
    done = subprocess.run(
        [*RUN, "-np", "2", *elastic, *PYTHON, "pass"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=at_most(10),
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ringlet run: the launcher has all of the 10 descriptors"), done.stderr


@needs_torch
@pytest.mark.parametrize("elastic", [[], ["--min-np", "2"]], ids=["fixed", "elastic"])
@pytest.mark.parametrize("stream", [1, 2])
def test_a_full_disk_does_not_end_the_job(stream: int, elastic: list[str], tmp_path: Path) -> None:
    code = (
        "import os\nfor _ in range(50): os.write(%d, b'x' * 99 + b'\\n')\nos.write(%d, b'here\\n')"
    )
    with open(tmp_path / "full", "wb") as full:  # as a disk is that has room for 1000 bytes
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pipes["stdout" if stream == 1 else "stderr"] = full.fileno()
        done = subprocess.run(
            [*RUN, "-np", "2", *elastic, "--no-prefix", *PYTHON, code % (stream, 3 - stream)],
            text=True,
            timeout=DEADLINE,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
            **pipes,
        )
    assert done.returncode == 0
    assert (tmp_path / "full").read_bytes() == b"".join([b"x" * 99 + b"\n"] * 10)
    heard = (done.stderr if stream == 1 else done.stdout).splitlines()
    assert heard.count("here") == 2
    if stream == 1:
        notes = [line for line in heard if line.startswith("ringlet run: ")]
        assert notes == [
            "ringlet run: the standard output: File too large; what cannot be written there"
            " is dropped",
            "ringlet run: output was dropped: 9000 bytes for the standard output",
        ]


@needs_torch
@pytest.mark.parametrize("elastic", [[], ["--min-np", "2"]], ids=["fixed", "elastic"])
def test_a_full_disk_under_the_files_does_not_end_the_job(
    elastic: list[str], tmp_path: Path
) -> None:
    code = "import os\nfor _ in range(50): os.write(1, b'x' * 99 + b'\\n')"
    files = ["--output-filename", str(tmp_path / "out")]
    done = subprocess.run(
        [*RUN, "-np", "2", *elastic, "--no-prefix", *files, *PYTHON, code],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("x" * 99 + "\n") * 100
    notes = [line for line in done.stderr.splitlines() if line.startswith("ringlet run: ")]
    where = f"--output-filename {tmp_path / 'out'}"
    assert notes == [
        f"ringlet run: {where}: File too large; what cannot be written there is dropped",
        f"ringlet run: output was dropped: 8000 bytes for {where}",
    ]
    assert (tmp_path / "out/rank.1/stdout").stat().st_size == 1000


def test_a_disk_that_is_full_only_when_files_are_closed_does_not_end_the_job(
    tmp_path: Path,
) -> None:
    """As over NFS, or under a quota."""
    printer = Printer(2, directory=str(tmp_path))
    odd = Mock(close=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    for place in list(printer._files):
        printer._files[place].close()
        printer._files[place] = odd
    printer.leave(0)
    printer.close()
    assert odd.close.call_count == 4
    where = f"--output-filename {tmp_path}"
    assert printer.losses.summary() == f"output was dropped: some bytes for {where}"


@pytest.mark.parametrize("trap", ["folder", "link", "hard link", "pipe"])
def test_nobody_can_lead_the_files_elsewhere(tmp_path: Path, trap: str) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    victim = mine / "stdout"
    victim.write_text("precious")
    out.mkdir()
    if trap == "folder":
        (out / "rank.0").symlink_to(mine)
    else:
        (out / "rank.0").mkdir()
        place = out / "rank.0" / "stdout"
        if trap == "link":
            place.symlink_to(victim)
        elif trap == "hard link":
            place.hardlink_to(victim)
        else:
            os.mkfifo(place)
    with pytest.raises(LaunchError, match=r"--output-filename .*out, rank\.0") as caught:
        Printer(2, directory=str(out))
    words = {
        "folder": "is a symbolic link, or no folder",
        "link": "is a symbolic link",
        "hard link": "is not an ordinary file of this user alone: remove it",
        "pipe": "",  # the system says something of its own
    }
    assert words[trap] in str(caught.value)
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make links of others")
def test_a_strangers_link_to_an_earlier_runs_folder_is_not_followed(tmp_path: Path) -> None:
    shared, earlier = tmp_path / "shared", tmp_path / "earlier/rank.0"
    earlier.mkdir(parents=True)
    (earlier / "stdout").write_text("precious")
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp is
    (shared / "out").symlink_to(earlier.parent)
    os.chown(shared / "out", 65534, 65534, follow_symlinks=False)
    with pytest.raises(LaunchError, match=r"--output-filename .*out: belongs to another user"):
        Printer(1, directory=str(shared / "out"))
    assert (earlier / "stdout").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make folders of others")
def test_what_ranks_print_is_not_kept_in_a_strangers_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)  # as /tmp is
    (tmp_path / "rank.1").mkdir()
    os.chown(tmp_path / "rank.1", 65534, 65534)
    with pytest.raises(LaunchError, match=r", rank\.1: belongs to another user"):
        Printer(2, directory=str(tmp_path))
    assert not [*(tmp_path / "rank.1").iterdir()]
    Printer(1, directory=str(tmp_path))
    assert (tmp_path / "rank.0" / "stdout").exists()


def test_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")  # which is the user's to decide
    for text in (b"a longer one", b"short"):
        printer = Printer(2, directory=str(tmp_path / "out"))
        printer.feed(1, STDOUT, text)
        printer.feed(0, STDERR, b"!")
        printer.close()
        assert (tmp_path / "real/rank.1/stdout").read_bytes() == text
    assert (tmp_path / "real/rank.0/stderr").read_bytes() == b"!"


LATE = """
import os, sys
from ringlet.ring.processes import rank_wrapper
from ringlet.ring.wire.launch_link import Kind

class Link:  # to a launcher that lets go once the rank is done
    pending, closed, own_address = 0, False, ""
    def __init__(self):
        self.heard, (self.end, self.other) = [], os.pipe()
    def fileno(self):
        return self.end
    def flush(self):
        pass
    def receive(self):
        yield Kind.RELEASE, b""
    def send(self, kind, body=b""):
        self.heard.append((kind, body))
        if kind is Kind.DONE:
            os.write(self.other, b"!")

class Unlucky(rank_wrapper.Wrapper):  # the program writes and ends after each look at its pipes
    def _wait(self):
        ready = super()._wait() if self.code is not None else set()
        if self.code is None:
            os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOWAIT)
        return ready
    def _hear(self):
        return self.done and super()._hear()

link = Link()
command = [sys.executable, "-I", "-S", "-c", "print('late')"]
job = {"command": command, "local_size": 1, "pmi": False}
wrapper = Unlucky(link, job, {}, os.getppid())
wrapper.start({})
assert wrapper.run() == 0
print(b"".join(body for kind, body in link.heard if kind is Kind.STDOUT).decode(), end="")
"""


def test_what_a_program_prints_while_it_ends_is_not_lost() -> None:
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr
