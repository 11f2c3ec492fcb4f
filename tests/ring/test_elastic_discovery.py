"""Hosts that a script prints, and what it may do wrong."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from ringlet.ring.control.heartbeat import state_of
from ringlet.ring.elastic import discovery as module
from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.driver import Driver, _Attended
from ringlet.ring.elastic.rules import Rules
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.rank_table import RankTable
from ringlet.ring.wire.addresses import split_port
from ringlet.ring.wire.listener import Listener


@pytest.fixture
def looking(tmp_path, monkeypatch):
    """Return a function that looks, through a script that prints a file, until it has run."""
    monkeypatch.setattr(module, "PERIOD", 0.0)
    said = tmp_path / "said"
    found = []

    def look(text, script="cat {}", slots=1):
        said.write_text(text)
        if not found:
            found.append(Discovery(script.format(said), slots))
        limit = time.monotonic() + 60
        for runs in (True, False):
            while (found[0]._process is None) == runs:
                result = found[0].look(time.monotonic())
                assert time.monotonic() < limit
        return result

    yield look
    for each in found:
        each.close()


def test_hosts_are_told_when_they_change(looking):
    assert looking("a:2\nb\n\n", slots=3) == ([Host("a", 2), Host("b", 3)], "")
    assert looking("a:2\nb\n") == (None, "")
    assert looking("b:1\n") == ([Host("b", 1)], "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "printed no host"),
        ("a b\n", "printed what names no host: its output: expected host:slots, not 'a b'"),
        ("a:0\n", "host a has no slots"),
        ("a:2\nb:8080\n", "its output: host b has 8080 slots, and each would get a rank"),
        ("a\nb\na:2\n", "printed host a twice"),
        ("-oProxyCommand=x\n", "not '-oProxyCommand=x'"),
    ],
)
def test_what_makes_no_sense_is_told_once_and_changes_nothing(looking, text, complaint):
    assert looking("a:2\n")[0] == [Host("a", 2)]
    hosts, said = looking(text)
    assert hosts is None
    assert complaint in said
    assert said.endswith("; the hosts stay as they were")
    assert looking(text) == (None, "")
    assert looking("a:2\n") == (None, "")
    assert complaint in looking(text)[1]  # it had worked in between


def test_a_script_that_fails_is_told_with_its_last_line(looking):
    hosts, said = looking("", "echo first; echo 'no token' >&2; exit 4; {}")
    assert hosts is None
    assert "exited with code 4; it said: no token; the hosts stay" in said


def test_what_a_script_writes_to_its_standard_error_names_no_host(looking):
    found = looking("a:2\n", "echo Done. >&2; echo several words >&2; cat {}")
    assert found == ([Host("a", 2)], "")


def test_a_script_ends_with_its_launcher(tmp_path):
    told = tmp_path / "pid"
    program = (
        "import time; from ringlet.ring.elastic.discovery import Discovery\n"
        f"d = Discovery('echo $$ > {told}.new; mv {told}.new {told}; exec sleep 600')\n"
        "d.look(0.0); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program])
    limit = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    script = int(told.read_text())
    launcher.kill()
    launcher.wait()
    while state_of(script) not in "XZ":
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_script_that_does_not_end_is_ended(looking, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    assert "did not end within 0.2 s" in looking("", "sleep 1000; {}")[1]


@pytest.mark.parametrize("redirected", ["", " >&2"])
def test_a_script_that_prints_without_end_is_ended(looking, redirected):
    """Else it would fill the disk for as long as it may run."""
    said = looking("", "yes" + redirected + "; {}")
    assert said[0] is None
    assert "printed more than 1 MiB; the hosts stay as they were" in said[1]


@pytest.mark.parametrize("missing", ["room", "folder"])
def test_where_a_run_cannot_be_prepared_the_hosts_stay(tmp_path, monkeypatch, missing):
    """No room for what it prints, or this process's own folder was removed."""
    monkeypatch.setattr(module, "PERIOD", 0.0)
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    found, hosts, limit = Discovery("echo a:2"), None, time.monotonic() + 60
    while hosts is None and time.monotonic() < limit:
        hosts, _ = found.look(time.monotonic())
    assert hosts == [Host("a", 2)]

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if missing == "room":
        monkeypatch.setattr(module.tempfile, "TemporaryFile", full)
    else:
        folder.rmdir()
    hosts, said = found.look(time.monotonic())
    assert hosts is None
    assert "the hosts stay as they were" in said
    found.close()


def test_a_script_that_cannot_be_killed_is_not_waited_for_and_not_run_again(monkeypatch):
    """As one that waits for a file server which does not answer."""
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    monkeypatch.setattr(module, "PERIOD", 0.0)
    monkeypatch.setattr(module, "KILLED", 0.1)
    killed = []
    monkeypatch.setattr(module.processes, "signal_group", lambda pid, number: killed.append(pid))
    found, said, limit = Discovery("exec sleep 1000"), "", time.monotonic() + 60
    try:
        while not said and time.monotonic() < limit:
            _, said = found.look(time.monotonic())
        assert "did not end within 0.1 s" in said
        assert [found.look(time.monotonic()) for _ in range(3)] == [(None, "")] * 3
        assert len(killed) == 1
    finally:
        os.kill(killed[0], signal.SIGKILL)
    while found._process is None and time.monotonic() < limit:  # it has ended: the next one runs
        assert found.look(time.monotonic()) == (None, "")
    monkeypatch.undo()
    found.close()


def test_a_list_stays():
    listed = Discovery(None, hosts=[Host("a", 1)])
    assert [listed.look(now)[0] for now in (0.0, 1.0)] == [[Host("a", 1)], None]
    assert listed.patience(1.0) is None


@pytest.mark.parametrize("script", ["", " "])
def test_an_empty_script_is_refused(script):
    """As an unset variable of a shell makes it; it was taken for this process's own folder."""
    with pytest.raises(LaunchError, match="--host-discovery-script is empty: it takes a command"):
        Discovery(script)


def test_a_folder_that_has_the_name_of_a_command_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "programs" / "hosts").parent.mkdir()
    (tmp_path / "programs" / "hosts").write_text("#!/bin/sh\necho a:2\n")
    (tmp_path / "programs" / "hosts").chmod(0o755)
    (tmp_path / "hosts").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    found, hosts, limit = Discovery("hosts"), None, time.monotonic() + 60
    while hosts is None and time.monotonic() < limit:
        hosts, _ = found.look(time.monotonic())
    assert hosts == [Host("a", 2)]


def refused(script, words):
    """Fail unless looking by ``script`` ends the job, with an error that says ``words``."""
    found, limit = Discovery(script), time.monotonic() + 60

    def look():
        while time.monotonic() < limit:
            found.look(time.monotonic())

    with pytest.raises(LaunchError, match=words):
        look()
    found.close()


def test_a_folder_instead_of_a_script_ends_the_job(tmp_path):
    refused(str(tmp_path), "cannot be run: .* such as ./hosts.sh")


@pytest.mark.parametrize(("mode", "words"), [(None, "not found"), (0o644, "ermission denied")])
def test_a_script_that_is_not_there_or_not_executable_ends_the_job(tmp_path, mode, words):
    script = tmp_path / "hosts.sh"
    if mode is not None:
        script.write_text("#!/bin/sh\necho a:2\n")
        script.chmod(mode)
    refused(str(script), f"cannot be run: .*{words}.* such as ./hosts.sh")


def test_a_script_that_names_no_interpreter_is_the_shells(tmp_path):
    script = tmp_path / "hosts of mine"
    script.write_text("echo a:2\necho b\n")
    script.chmod(0o755)
    found, hosts = Discovery(str(script)), None
    limit = time.monotonic() + 60
    while hosts is None and time.monotonic() < limit:
        hosts, said = found.look(time.monotonic())
        assert not said
    assert hosts == [Host("a", 2), Host("b", 1)]


def test_a_script_that_can_no_longer_be_started_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PERIOD", 0.0)
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\n")
    script.chmod(0o755)
    found = Discovery(str(script))
    hosts, limit = None, time.monotonic() + 60
    while hosts is None and time.monotonic() < limit:
        hosts, _ = found.look(time.monotonic())
    assert hosts == [Host("a", 2)]
    script.write_text("#!/no/such/interpreter\n")
    hosts, said = found.look(time.monotonic())
    assert hosts is None
    assert "cannot be started: No such file" in said
    broken = Discovery(str(script))
    with pytest.raises(LaunchError, match="cannot be started"):
        broken.look(time.monotonic())


class Notes:
    """A printer that keeps what it is told."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)

    def write(self):
        pass

    def close(self):
        pass


def test_no_host_in_time_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PERIOD", 0.0)
    discovery = Discovery("exit 3")
    discovery.look(0.0)
    discovery._process.wait(60)  # which may take longer than 0.5 s
    driver = Driver(["true"], Rules(1, 1, timeout=0.5), discovery, "gloo", {}, Reach())
    notes = Notes()
    with pytest.raises(LaunchError, match=r"named no host within 0.5 s \(--elastic-timeout\)"):
        driver.run(notes, verbose=False)
    assert ["exited with code 3" in said for said in notes.said] == [True]


@pytest.mark.parametrize(
    ("hosts", "folder", "where", "files"),
    [([Host("localhost", 2)], None, "", ""),
     ([Host("localhost", 2), Host("127.0.0.1", 1)], None,
      " on localhost (2 slots), 127.0.0.1 (1 slot),", ""),
     ([Host("node1", 2)], "out", " on node1 (2 slots),",
      "; what process N prints is in out/rank.N too")],
)  # fmt: skip
def test_the_first_line_says_what_is_started_where(monkeypatch, hosts, folder, where, files):
    discovery = Discovery(None, hosts=hosts)
    driver = Driver(["a", "b\nc"], Rules(2, 1), discovery, "gloo", {}, Reach("false"))
    monkeypatch.setattr(driver, "_open", Mock(side_effect=LaunchError("that is enough")))
    notes = Notes()
    notes.directory = folder
    with pytest.raises(LaunchError, match="enough"):
        driver.run(notes, verbose=True)
    start = "2 ranks at first, at least 1,"
    assert notes.said == [f"{start}{where} over gloo: a 'b c'{files}"]


class Starting:
    """A wrapper that reports only when the job is over."""

    def __init__(self, address):
        self.address, self.found = address, None

    def poll(self):
        return None

    def part(self):
        pass

    def end(self, seconds):
        assert seconds > 0
        try:
            socket.create_connection(split_port(self.address)).close()
        except OSError as error:
            self.found = error


def test_who_reports_when_the_job_is_over_is_not_waited_for():
    """It found a port where nobody answered, and was killed five seconds later."""
    driver = Driver(["true"], Rules(1, 1), Discovery("true"), "gloo", {}, Reach())
    driver._listener = Listener(1)
    driver._rank_table = RankTable([], Notes(), driver._task)
    late = Starting(driver._listener.address)
    driver._attended[0] = _Attended(late)
    driver._release()
    assert isinstance(late.found, ConnectionRefusedError)


def test_a_host_elsewhere_cannot_join_a_job_on_loopback():
    driver = Driver(["true"], Rules(1, 1), Discovery("true"), "gloo", {}, Reach("false"))
    driver._printer, driver._local = Notes(), True
    hosts = [Host("localhost", 1), Host("node1", 2)]
    assert driver._reachable(hosts) == hosts[:1]
    (said,) = driver._printer.said
    assert said.startswith("host node1 cannot join: the hosts at the start were this one alone")
