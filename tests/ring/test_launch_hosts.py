"""Jobs over several hosts, over a remote shell that runs things here."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launched_jobs import (
    DEADLINE,
    MARK,
    PYTHON,
    RINGLET,
    both,
    marked,
    until,
)

from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed, run
from ringlet.ring.hosts.forwarding import forwarded, is_credential
from ringlet.ring.hosts.hosts import Host, Seat, is_here, parse_hosts, read_hostfile, seat
from ringlet.ring.hosts.interfaces import find_interface, launcher_address
from ringlet.ring.hosts.remote import Reach, start_agent
from ringlet.ring.launch.allocation import Allocation
from ringlet.ring.launch.spawn import complaint
from ringlet.ring.launch.start import Started
from ringlet.ring.variables import UNDERSTOOD, VARIABLES

pytestmark = pytest.mark.preloaded("torch")

HOSTS = "localhost:2,127.0.0.2:2"  # the second is reached through the remote shell only


# What is asked for.


def test_hosts_and_slots() -> None:
    assert parse_hosts("a:4, b.example.org:2,c") == [
        Host("a", 4),
        Host("b.example.org", 2),
        Host("c", 1),
    ]
    assert parse_hosts("me@10.0.0.1:3,[fe80::1]:2") == [
        Host("me@10.0.0.1", 3),
        Host("[fe80::1]", 2),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected host:slots, not ''"),
        ("a:4,,b", "expected host:slots, not ''"),
        ("a:x", "not 'a:x'"),
        ("a:0", "host a has no slots"),
        ("a:-1", "not 'a:-1'"),
        ("-oProxyCommand=x:2", "expected host:slots"),
        ("-a:2", "expected host:slots"),
        ("me@-a:2", "expected host:slots"),
        ("a b:2", "not 'a b:2'"),
        ("a:4 b:2", "not 'a:4 b:2'; commas stand between hosts: a:4,b:2"),
        ("$(id):2", "expected host:slots"),
        ("a:2,a:3", "host a is named twice"),
    ],
)
def test_hosts_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hosts(text)
    assert words in str(caught.value)
    assert "--hosts" in str(caught.value)


def test_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# all of them\n\na slots=4  # the big one\nb:2\n  c\nd   slots = 3\n")
    assert read_hostfile(str(file)) == [Host("a", 4), Host("b", 2), Host("c", 1), Host("d", 3)]
    for text, words in (
        ("a\nb slots=x\n", "line 2: expected `host slots=4`"),
        ("a max_slots=2\n", "line 1: expected"),
        ("a:2 slots=2\n", "line 1: expected"),
        ("a slots=0\n", "line 1: host a has no slots"),
        ("#\n", "names no host"),
    ):
        file.write_text(text)
        with pytest.raises(LaunchError, match=words):
            read_hostfile(str(file))
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(str(tmp_path / "absent"))
    file.write_bytes(b"\xef\xbb\xbfa:4\r\nb slots=2\r\n")  # as some editors save it
    assert read_hostfile(str(file)) == [Host("a", 4), Host("b", 2)]


def test_seats_fill_host_after_host() -> None:
    hosts = [Host("a", 2), Host("b", 3)]
    seats = [Seat("a", 0, 2), Seat("a", 1, 2), Seat("b", 0, 2), Seat("b", 1, 2)]
    assert seat(hosts, 4) == seats
    assert seat(hosts, 1) == [Seat("a", 0, 1)]
    too_few = "-np 6 needs 6 slots, but the hosts have 5: a:2, b:3; HOST:SLOTS says how many"
    with pytest.raises(LaunchError, match=too_few):
        seat(hosts, 6)


def test_the_remote_shell() -> None:
    reach = Reach(ssh_port=2222, ssh_identity_file="key", start_timeout=9.5)
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=9", "-p", "2222", "-i", "key"]
    assert reach.shell() == words
    assert "ConnectTimeout=3600" in Reach(start_timeout=1e10).shell()  # ssh refuses such numbers
    assert Reach(rsh="ssh -p 22").shell() == ["ssh", "-p", "22"]
    for wrong in (Reach(rsh="ssh", ssh_port=2), Reach(rsh="ssh 'x"), Reach(rsh=" ")):
        with pytest.raises(LaunchError, match="--rsh"):
            wrong.shell()


def test_a_directory_that_was_removed_is_an_error_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other one would end an elastic job that a host joins."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(LaunchError, match="host a is to work in this directory, which has been"):
        start_agent(["true"], "a", {}, {}, None)


def test_what_is_forwarded() -> None:
    kept = {"PATH": "p", "RINGLET_SEED": "1", "HOROVOD_X": "2", "OMP_NUM_THREADS": "3"}
    private = {"AWS_SECRET_ACCESS_KEY": "x", "RINGLET_API_TOKEN": "y", "HOME": "/root", "LANG": "C"}
    assert forwarded(kept | private) == kept
    assert forwarded(kept | private, ["LANG"]) == kept | {"LANG": "C"}


CREDENTIALS = """TF_VAR_db_password JAX_api_token HOROVOD_Secret TORCH_CREDENTIALS KERAS_PASSWD
    NCCL_token HOROVOD_SECRET_KEY TF_APIKEY RINGLET_SECRET RINGLET_STORE_KEY TF_OAUTH2 TORCH_AUTH
    XLA_ssh_passphrase JAX_HTTP_AUTH_HEADER TF_PROXY_AUTHORIZATION PYTHON_KEYRING_BACKEND
    NCCL_IB_PKEY_PASSWORD"""
SETTINGS = """NCCL_IB_PKEY UCX_IB_PKEY JAX_LEGACY_PRNG_KEY TF_GCS_AUTH_MAX_REQUESTS KERAS_AUTHOR
    TF_AUTHORS XLA_AUTHORITY KERAS_BACKEND PYTHONPATH UCX_KEEPALIVE_INTERVAL NCCL_SOCKET_IFNAME
    HOROVOD_FUSION_THRESHOLD MPIR_CVAR_CH4_OFI_ENABLE_TAGGED FI_PROVIDER PYTHONPASSES"""


def test_credentials_are_not_forwarded_however_they_are_written() -> None:
    names = CREDENTIALS.split()
    assert [name for name in names if not is_credential(name)] == []
    assert forwarded(dict.fromkeys(names, "x")) == {}
    assert forwarded(dict.fromkeys(names, "x"), ["TORCH_AUTH"]) == {"TORCH_AUTH": "x"}


def test_settings_that_only_look_like_credentials_are_forwarded() -> None:
    settings = dict.fromkeys(SETTINGS.split(), "x")
    assert forwarded(settings) == settings


def test_of_our_own_variables_only_secrets_are_credentials() -> None:
    ours = [*VARIABLES, *UNDERSTOOD]
    secret = {"RINGLET_SECRET", "RINGLET_STORE_KEY", "RINGLET_LAUNCHER_SECRET"}
    assert {name for name in ours if is_credential(name)} == secret


def test_interfaces() -> None:
    assert find_interface(["nosuchif0", "lo"]) == ("lo", "127.0.0.1")
    assert launcher_address((), ["127.0.0.2"]) == "127.0.0.1"
    with pytest.raises(LaunchError, match="no network interface nosuchif0 with an address"):
        launcher_address(["nosuchif0"], [])
    assert is_here("localhost")
    assert not is_here("127.0.0.2", resolve=False)
    assert is_here("127.0.0.2")


def test_other_hosts_are_elsewhere_where_any_address_can_be_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with net.ipv4.ip_nonlocal_bind, which load balancers set."""
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None)
    assert is_here("127.0.0.2")
    assert not is_here("198.51.100.7")
    assert not is_here("[2001:db8::7]")


# Real processes.


Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """A remote shell that runs things here, joins its arguments as ssh does, and writes them up."""
    path = tmp_path / "a shell"
    log = shlex.quote(str(tmp_path / "log"))
    path.write_text(f'#!/bin/sh\necho "$@" >> {log}\nshift\ncd /\nexec sh -c "$*"\n')
    path.chmod(0o755)
    return shlex.quote(str(path))


@pytest.fixture
def ringlet(mark: str, shell: str) -> Begin:
    def begin(
        code: str, transport: str, *options: str, rsh: str = shell, **popen: Any
    ) -> subprocess.Popen[bytes]:
        where = ["-H", HOSTS, "--network-interface", "lo", "--rsh", rsh]
        return subprocess.Popen(
            [*RINGLET, "--transport", transport, *where, *options, *PYTHON, code],
            env=os.environ | {MARK: mark} | popen.pop("env", {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **popen,
        )

    return begin


RANK = "import os, sys, signal, json; rank = int(os.environ['RINGLET_RANK'])\n"
SAY = RANK + "print(json.dumps([rank, os.getcwd(), dict(os.environ)]))"


@both
def test_ranks_find_themselves_on_several_hosts(
    ringlet: Begin, mark: str, transport: str, tmp_path: Path
) -> None:
    odd = "a 'quoted' \"thing\" $HOME `id`; \\ \n*"
    folder = tmp_path / "a 'folder'; $HOME"
    folder.mkdir()
    options = ("--no-prefix", "-x", "LOOK", "-x", f"ODD={odd}", "--env", "A=b=c", "-x", "MY_KEY=1")
    env = {"LOOK": "here", "HIDDEN": "x", "OMP_NUM_THREADS": "7"}
    job = ringlet(SAY, transport, *options, env=env, cwd=folder)
    out, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0, err
    told = sorted(json.loads(line) for line in out.splitlines())
    assert [rank for rank, _, _ in told] == [0, 1, 2, 3]
    for rank, cwd, found in told:
        assert cwd == str(folder)
        assert (found["LOOK"], found["ODD"], found["A"], found["MY_KEY"]) == (
            "here",
            odd,
            "b=c",
            "1",
        )
        assert found["OMP_NUM_THREADS"] == "7"
        assert (found["RINGLET_SIZE"], found["RINGLET_LOCAL_SIZE"]) == ("4", "2")
        assert found["RINGLET_LOCAL_RANK"] == str(rank % 2)
        assert found["RINGLET_ADDRESS"] == "127.0.0.1"
        assert found["GLOO_SOCKET_IFNAME"] == "lo"
        assert not any("SECRET" in name or name.startswith("HYDRA") for name in found)
    keys = {found["RINGLET_STORE_KEY"] for _, _, found in told}
    assert len(keys) == 1
    log = (tmp_path / "log").read_text()
    assert log.count("127.0.0.2 cd ") == 1  # one shell for the host
    assert "SECRET" not in log
    assert keys.pop() not in log
    until(lambda: not marked(mark))


@pytest.mark.parametrize("kind", [(), ("-np", "4", "--min-np", "4")], ids=["static", "elastic"])
def test_credentials_go_through_the_remote_shell_and_not_over_the_launchers_link(
    ringlet: Begin, mark: str, kind: tuple[str, ...], tmp_path: Path
) -> None:
    """The link is not encrypted. This shell changes a name where it goes through it."""
    path = tmp_path / "renaming"
    path.write_text('#!/bin/sh\nshift\ncd /\nsed -u s/MY_TOKEN/THEIR_TOKEN/ | sh -c "$*"\n')
    path.chmod(0o755)
    options = (*kind, "--no-prefix", "-x", "MY_TOKEN=a b", "-x", "MINE=c")
    job = ringlet(SAY, "gloo", *options, rsh=shlex.quote(str(path)))
    out, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0, err
    told = sorted(json.loads(line) for line in out.splitlines())
    assert [rank for rank, _, _ in told] == [0, 1, 2, 3]
    names = [(found.get("MY_TOKEN"), found.get("THEIR_TOKEN")) for _, _, found in told]
    assert names == [("a b", None)] * 2 + [(None, "a b")] * 2
    assert all(found["MINE"] == "c" for _, _, found in told)
    until(lambda: not marked(mark))


@both
def test_connect_over_several_hosts(mark: str, shell: str, transport: str) -> None:
    code = (
        "import numpy\nfrom ringlet.ring.rendezvous.connect import connect\n"
        "c = connect(); x = numpy.full(3, c.rank + 1.0, numpy.float32); c.allreduce(x)\n"
        "print(c.name, c.rank, c.size, int(x[0]), flush=True)\n"
    )
    where = f"-np 3 -H {HOSTS} --network-interface lo --transport {transport} --rsh".split()
    done = subprocess.run(
        [*RINGLET, *where, shell, sys.executable, "-c", code],
        env=os.environ | {MARK: mark},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [f"[{r}]<stdout>: {transport} {r} 3 6" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == expected
    until(lambda: not marked(mark))


@both
def test_the_first_failure_is_named_with_its_host(
    ringlet: Begin, mark: str, transport: str
) -> None:
    job = ringlet(RANK + "if rank == 3: sys.exit(5)\nwhile True: signal.pause()", transport)
    _, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 5
    assert b"ringlet run: rank 3 on 127.0.0.2 exited with code 5; ending the other ranks" in err
    until(lambda: not marked(mark))


@both
def test_a_host_that_cannot_be_reached(ringlet: Begin, mark: str, transport: str) -> None:
    job = ringlet("pass", transport, rsh="sh -c 'echo no route >&2; exit 255'")
    _, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 2
    assert b"ringlet run: ranks 2, 3 on 127.0.0.2 did not start: `sh -c" in err
    assert b"127.0.0.2 ...` ended with code 255; it said:\nno route" in err
    until(lambda: not marked(mark))


@both
def test_a_host_that_does_not_answer(ringlet: Begin, mark: str, transport: str) -> None:
    where = ["-H", "127.0.0.2:2", "--start-timeout", "3"]  # ranks here might be late as well
    job = ringlet("pass", transport, *where, rsh="sh -c 'sleep 1000'")
    _, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 2
    assert b" on 127.0.0.2 did not start: 3 s have passed since `sh -c sleep 1000 127.0" in err
    until(lambda: not marked(mark))


def test_of_hosts_those_are_named_that_do_not_answer() -> None:
    hosts, reach = [Host("localhost", 2), Host("127.0.0.2", 2)], Reach("rsh", start_timeout=3)
    site = Allocation(hosts, 4, reach)
    shell: Any = SimpleNamespace(stdin=True)  # a process that has not ended
    started = [Started(shell, "`rsh`", frozenset({2, 3}))]
    assert complaint(site, site.ranks(), started, [2, 3], None, "") == (
        "ranks 2, 3 on 127.0.0.2 did not start: 3 s have passed since `rsh` was started"
        " (see --start-timeout)"
    )


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"hosts": "127.0.0.2:1", "rsh": "sh -c 'sleep 1000'", "start_timeout": 1}, "1 s have"),
        ({"host_discovery_script": "exit 3", "elastic_timeout": 0.5, "np": 1}, "has named no host"),
    ],
    ids=["fixed", "elastic"],
)
def test_a_program_with_more_descriptors_than_select_takes_hears_why_nothing_starts(
    where: dict[str, Any], said: str
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(LaunchError, match=said):
            run(print, transport="gloo", network_interface="lo", **where)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_remote_shell_that_is_not_there(ringlet: Begin, mark: str) -> None:
    job = ringlet("pass", "gloo", rsh="no-such-shell")
    _, err = job.communicate(timeout=DEADLINE)
    assert (job.returncode, err) == (
        2,
        b"ringlet run: cannot start no-such-shell: No such file or directory\n",
    )
    until(lambda: not marked(mark))


def test_an_elastic_job_whose_remote_shell_is_not_there_ends_at_once() -> None:
    elastic = ["-np", "1", "--min-np", "1", "-H", "127.0.0.2:1", "--network-interface", "lo"]
    done = subprocess.run(
        [*RINGLET, *elastic, "--rsh", "no-such-shell", "true"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 1
    assert "did not start: cannot start no-such-shell: No such file" in done.stderr


@pytest.mark.parametrize("elastic", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_an_address_that_this_host_does_not_have_is_said(elastic: list[str]) -> None:
    done = subprocess.run(
        [*RINGLET, "--transport", "gloo", "-H", "far:1", "--rsh", "false", *elastic, "true"],
        env=os.environ | {"RINGLET_ADDRESS": "192.0.2.1"},  # as a container has it of its host
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 2
    said = "ringlet run: cannot listen on 192.0.2.1: Cannot assign requested address; name this"
    assert done.stderr.splitlines()[-1].startswith(said), done.stderr


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM"])
def test_signals_end_ranks_on_another_host(ringlet: Begin, mark: str, name: str) -> None:
    code = "import signal\nprint('up', flush=True)\nsignal.pause()"
    job = ringlet(code, "gloo", "-H", "127.0.0.2:2")
    assert job.stdout is not None
    for _ in range(2):
        assert job.stdout.readline().endswith(b"up\n")
    job.send_signal(getattr(signal, name))
    _, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 128 + getattr(signal, name), err
    until(lambda: not marked(mark))


@both
@pytest.mark.parametrize("who", ["launcher", "agent", "signal"])
def test_nothing_is_left_when_somebody_is_killed(
    ringlet: Begin, mark: str, transport: str, who: str
) -> None:
    family = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    job = ringlet(RANK + family + "os.write(1, b'ready\\n')\nwhile True: signal.pause()", transport)
    assert job.stdout is not None
    for _ in range(4):
        assert job.stdout.readline().endswith(b"ready\n")
    if who == "agent":
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(mark)}
        [agent] = [pid for pid, line in lines.items() if b"ringlet.ring.launch.agent" in line]
        os.kill(agent, signal.SIGKILL)
    elif who == "launcher":
        job.kill()
    else:
        job.terminate()
    job.communicate(timeout=DEADLINE)
    # The agent's end is no failure of a rank's own; what the ranks make of it is not said.
    assert job.returncode in {"launcher": [-9], "signal": [143], "agent": [137, 143]}[who]
    until(lambda: not marked(mark))


def test_output_goes_to_files_too(ringlet: Begin, mark: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code = RANK + "print('out', rank, end=''); print('err', file=sys.stderr)"
    job = ringlet(code, "gloo", "--output-filename", str(folder))
    out, _ = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0
    assert b"[3]<stdout>: out 3\n" in out
    for rank in range(4):
        assert (folder / f"rank.{rank}" / "stdout").read_bytes() == b"out %d" % rank
        assert (folder / f"rank.{rank}" / "stderr").read_bytes() == b"err\n"


@both
def test_run_on_several_hosts(shell: str, transport: str) -> None:
    def place(data: bytes) -> tuple[str, str, int]:
        return os.environ["RINGLET_RANK"], os.environ["MINE"], len(data)

    where: dict[str, Any] = {"hosts": HOSTS, "rsh": shell, "network_interface": "lo"}
    big = bytes(9 << 20)  # more than one piece
    told = run(place, (big,), transport=transport, env={"MINE": "x"}, **where)
    assert told == [(str(r), "x", len(big)) for r in range(4)]

    def fail() -> bytes:
        if os.environ["RINGLET_RANK"] == "2":
            raise ZeroDivisionError("on purpose")
        return bytes(5 << 20)

    with pytest.raises(WorkerFailed, match="rank 2 raised") as caught:
        run(fail, transport=transport, **where)
    assert "ZeroDivisionError: on purpose" in caught.value.traceback


def test_run_says_what_is_wrong_with_hosts() -> None:
    with pytest.raises(LaunchError, match="not both"):
        run(print, hosts="a:1", hostfile="b")
    with pytest.raises(LaunchError, match="as threads here"):
        run(print, hosts="a:1", transport="local")
