"""`ringlet node`: N identical commands that find each other without a remote shell."""

import contextlib
import itertools
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched_jobs import until
from node_commands import SECRET, ended, node

from ringlet.ring.elastic.arriving_nodes import ArrivingNodes
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.placed import node_rendezvous
from ringlet.ring.placed.node_rendezvous import NodeRendezvous, own_name
from ringlet.ring.placed.whereabouts import PORT, Whereabouts, whereabouts
from ringlet.ring.processes.torchrun import free_port
from ringlet.ring.wire.entry import enter
from ringlet.ring.wire.framing import derive
from ringlet.ring.wire.keys import job_key
from ringlet.ring.wire.launch_link import Kind

pytestmark = pytest.mark.preloaded("torch")
KEY = {"RINGLET_SECRET": SECRET}
SUM = (
    "import os, torch, ringlet.torch as hvd; hvd.init();"
    "total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum);"
    "print(hvd.rank(), hvd.size(), hvd.local_rank(), os.environ.get('OWN'),"
    " float(total[0]))"
)


def test_nodes_find_each_other_and_ranks_keep_their_nodes_environment():
    port = free_port()
    # The one that others look for comes last.
    nodes = [
        node(i, 3, port, sys.executable, "-c", SUM, env={"OWN": f"own{i}"}, slots=1 + (i == 1))
        for i in (2, 1, 0)
    ]
    ends = [ended(process) for process in nodes]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert ends[0][1] == ends[1][1] == ""
    lines = sorted(re.findall(r"\[\d\]<stdout>: ?(.*)", ends[2][1]))
    assert lines == [
        "0 4 0 own0 6.0",
        "1 4 0 own1 6.0",
        "2 4 1 own1 6.0",
        "3 4 0 own2 6.0",
    ]


def test_every_node_ends_with_the_code_of_the_rank_that_failed():
    port = free_port()
    code = "import os, sys; sys.exit(7 if os.environ['RINGLET_RANK'] == '3' else 0)"
    ends = [ended(p) for p in [node(i, 2, port, sys.executable, "-c", code) for i in (0, 1)]]
    assert [code for code, _, _ in ends] == [7, 7]
    assert re.search(r"rank 3 on \S+ exited with code 7", ends[0][2])


def test_ranks_of_a_node_that_is_gone_are_named_and_all_nodes_end():
    port = free_port()
    wait = "import time; print('there', flush=True); time.sleep(120)"
    first, second = (node(i, 2, port, sys.executable, "-c", wait, slots=1) for i in (0, 1))
    for _ in range(2):
        assert "there" in first.stdout.readline()
    second.kill()
    code, _, err = ended(first)
    assert code != 0
    assert "rank 1 on" in err
    ended(second)


def test_a_signal_to_another_node_reaches_its_ranks():
    port = free_port()
    wait = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5));"
        "print('there', flush=True); time.sleep(120)"
    )
    first, second = (node(i, 2, port, sys.executable, "-c", wait, slots=1) for i in (0, 1))
    for _ in range(2):
        assert "there" in first.stdout.readline()
    second.send_signal(signal.SIGTERM)
    code, _, err = ended(first)
    assert code == 5, err
    assert "rank 1 on" in err
    assert ended(second)[0] == 5


def test_nohup_holds_for_the_ranks_of_another_node():
    port = free_port()
    wait = (
        "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('on', flush=True));"
        "print('there', flush=True)\nwhile True: signal.pause()"
    )
    nohup = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"']
    first = node(0, 2, port, sys.executable, "-c", wait, slots=1)
    second = node(1, 2, port, sys.executable, "-c", wait, slots=1, by=nohup)
    for _ in range(2):
        assert "there" in first.stdout.readline()
    second.send_signal(signal.SIGHUP)
    pending = re.compile(r"ShdPnd:\s*0*\n")  # what comes at once may be taken in another order
    until(lambda: pending.search(Path(f"/proc/{second.pid}/status").read_text()))
    second.send_signal(signal.SIGUSR1)
    assert "[1]<stdout>: on" in first.stdout.readline()
    second.send_signal(signal.SIGTERM)
    code, _, err = ended(first)
    assert code == 128 + signal.SIGTERM, err
    assert "rank 1 on" in err
    ended(second)


def sent_away(number, count, **given):
    """Fail unless such a node is refused by the first of two, which is told of no other."""
    secret = derive(job_key(KEY), "nodes")
    with NodeRendezvous(2, "127.0.0.1", port := free_port(), secret, 1) as first:
        stranger = node(number, count, port, "true", **given)
        while stranger.poll() is None:
            first.serve(0.05)
        code, _, err = ended(stranger)
        assert code == 2
        assert "RINGLET_SECRET and --nodes have to be the same for every node" in err
        late = r"node 1 of 2 did not come to 127\.0\.0\.1:\d+ within 0\.1 s"
        with pytest.raises(LaunchError, match=late):
            first.gather(0.1)


def test_a_node_with_another_secret_is_not_let_in():
    sent_away(1, 2, secret="another" * 5)


@pytest.mark.parametrize(
    "body",
    [
        b"5", b"[" * 200_000, b'["x",1e999]', b'["\\ud800",1]', b'["a b",1]', b'["x",true]',
        b'["x\\u001b[31m",1]', b'["x",3000000]', b'["x",0]', b'["h/1",1]', b'{"x":1}', b"\xff",
    ],
)  # fmt: skip
def test_a_node_that_says_nonsense_of_itself_is_sent_away(body):
    with NodeRendezvous(2, "127.0.0.1", 0, b"s" * 32, 1) as rendezvous:
        channel = came(rendezvous, body)
        assert (rendezvous.channels, set(rendezvous.names)) == ({}, {0})
        good = came(rendezvous, b'["host-1.x_y",2]')
        assert rendezvous.names[1] == ("host-1.x_y", 2)
        channel.close()
        good.close()


def test_a_node_that_comes_twice_is_told_why_it_has_to_go():
    with NodeRendezvous(2, "127.0.0.1", 0, b"s" * 32, 1) as rendezvous:
        first = came(rendezvous, b'["a",1]')
        second = came(rendezvous, b'["b",1]')
        assert (rendezvous.names[1], rendezvous.replaced) == (("b", 1), [1])
        assert first.wait(60)
        assert [kind for kind, _ in first.receive()] == [Kind.REPLACED]
        first.close()
        second.close()


def test_a_node_of_an_elastic_job_that_has_gone_is_named_once():
    """Its ranks end as those of a host do that a script leaves out: without a word of their own."""
    with ArrivingNodes(3, "127.0.0.1", 0, b"s" * 32, 1) as rendezvous:
        channel = came(rendezvous, b'["a",1]')
        assert rendezvous.look(1.0) == ([Host(own_name(), 1), Host("a", 1)], "")
        channel.close()
        assert came_to_an_end(rendezvous, 1) == "node 1 has gone, and takes its ranks along"
        assert rendezvous.look(1e9) == (None, "")


def came_to_an_end(rendezvous, node):
    """Return what is said of a node that has gone, once the rendezvous has heard of it."""
    limit = time.monotonic() + 60
    for now in itertools.count(2.0):
        _, said = rendezvous.look(now)
        if node not in rendezvous.names:
            return said
        assert time.monotonic() < limit
    return None


def came(rendezvous, body):
    """Let a node say ``body``; return its end once the rendezvous has heard it."""
    address, before = rendezvous._listener.address, rendezvous.channels.get(1)
    found = []
    node = threading.Thread(target=lambda: found.append(enter(address, b"s" * 32, 1)))
    node.start()
    limit = time.monotonic() + 60
    while rendezvous.channels.get(1) is before:
        rendezvous.serve(0.01)
        assert time.monotonic() < limit
    node.join(60)
    found[0].send(Kind.NODE, body)
    while 1 in rendezvous.channels and 1 not in rendezvous.names:
        found[0].flush()
        rendezvous.serve(0.01)
        assert time.monotonic() < limit
    return found[0]


def test_numbers_of_nodes_that_do_not_fit_are_said():
    sent_away(5, 8)
    code, _, err = ended(node(0, 2, free_port(), "--slots", "5000", "true"))
    assert code == 2
    assert "--slots 5000: a node takes 1 to 4096 ranks" in err


def test_a_first_node_that_does_not_come_is_said():
    began = time.monotonic()
    code, _, err = ended(node(1, 2, free_port(), "--start-timeout", "2", "true"))
    assert code == 2
    assert "node 1 did not reach node 0 within 2 s" in err
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.9\r\n" * 9])
def test_every_address_of_the_first_node_is_tried(monkeypatch, greeting):
    """Of two networks one may lead elsewhere, or to somebody who says nothing."""
    monkeypatch.setattr(node_rendezvous, "ADDRESS", 0.2)
    monkeypatch.setattr(node_rendezvous, "addresses_of", lambda _: ["127.0.0.3", "127.0.0.1"])
    secret, port, channels = b"s" * 32, free_port(), []
    with (
        NodeRendezvous(2, "127.0.0.1", port, secret, 1) as first,
        socket.create_server(("127.0.0.3", port)) as other,
    ):

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = other.accept()
                    channels.append(sock)
                    sock.sendall(greeting)

        answering = threading.Thread(target=answer)
        answering.start()
        came = threading.Thread(
            target=lambda: channels.append(
                node_rendezvous._reach(1, "first", port, secret, timeout=60)
            )
        )
        came.start()
        limit = time.monotonic() + 60
        while not first.channels and time.monotonic() < limit:
            first.serve(0.1)
        assert list(first.channels) == [1]
        came.join(60)
        other.shutdown(socket.SHUT_RDWR)
        answering.join(60)
    for each in channels:
        each.close()


def test_a_first_node_may_wait_for_so_long_that_it_means_never():
    with NodeRendezvous(2, "127.0.0.1", port := free_port(), b"s" * 32, 1) as first:
        with socket.create_connection(("127.0.0.1", port)):
            first.serve(1e12)
        first.serve(1e12)


def test_a_first_node_on_loopback_that_waits_in_vain_says_what_to_look_at():
    code, _, err = ended(node(0, 2, free_port(), "--start-timeout", "1", "true"))
    assert code == 2
    assert "node 1 of 2 did not come to 127.0.0.1:" in err
    assert "Other hosts cannot reach this address" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["true"], "--nodes and --node and --first are missing"),
        (["--nodes", "2", "--node", "2", "--first", "x", "true"], "not below --nodes 2"),
        (["--nodes", "two", "true"], "--nodes takes a number of at least 1, not 'two'"),
        (["--port", "70000", "true"], "--port takes a number from 1 to 65535, not '70000'"),
        (["--nodes", "2", "--node", "0", "--first", "x", "true"], "RINGLET_SECRET is not set"),
        (["--nodes", "1"], "a command is missing: ringlet node --slots 2 python train.py"),
        (["--nodes", "1", "--transport", "goo", "true"], "Did you mean 'gloo'"),
        (
            ["--nodes", "2", "--node", "1", "--first", "host0:29500", "true"],
            "--first takes a host without a port: --first host0 --port 29500",
        ),
        (["--first", "[fd00::1]:7", "true"], "without a port: --first fd00::1 --port 7"),
        (["--first", "fd00::1", "true"], "--nodes and --node are missing"),
    ],
)
def test_what_is_missing_or_wrong_is_a_sentence(words, said):
    ran = subprocess.run(
        [sys.executable, "-m", "ringlet", "node", *words], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_first_node_that_cannot_listen_says_what_to_do():
    with pytest.raises(LaunchError, match=r"--first has to name node 0, which is this one"):
        NodeRendezvous(2, "192.0.2.1", 0, b"s" * 32, 1)  # of nobody: it is for documents
    said = r"in use. Where another job .* another --port"
    with (
        NodeRendezvous(2, "127.0.0.1", port := free_port(), b"s" * 32, 1),
        pytest.raises(LaunchError, match=said),
    ):
        NodeRendezvous(2, "127.0.0.1", port, b"s" * 32, 1)


def test_one_node_needs_nobody():
    words = ["--nodes", "1", "--slots", "2", sys.executable, "-c", SUM]
    ran = subprocess.run(
        [sys.executable, "-m", "ringlet", "node", *words], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "1 2 1 None 1.0" in ran.stdout


SLURM = {
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "host", "service", "expected"),
    [
        ({}, "here", None, Whereabouts()),
        (SLURM, "gpu08", None, Whereabouts(3, 1, "gpu07", 10373)),
        (TRAINJOB, "x", None, Whereabouts(2, 1, "job-node-0-0.job", 29500, 4)),
        ({"JOB_COMPLETION_INDEX": "3"}, "a-b-3", "svc", Whereabouts(None, 3, "a-b-0.svc")),
        (
            {"JOB_COMPLETION_INDEX": "11"}, "a-11.svc.ns.svc.cluster.local", None,
            Whereabouts(None, 11, "a-0.svc.ns.svc.cluster.local", PORT),
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, "other", "svc", Whereabouts(None, 3, None)),
    ],
)  # fmt: skip
def test_what_batch_systems_say_of_nodes(env, host, service, expected):
    assert whereabouts(env, host, service) == expected


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, "srun --ntasks-per-node=1"),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "auto"}, "numProcPerNode"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX='' is not a whole number"),
    ],
)
def test_what_batch_systems_say_wrongly(env, said):
    with pytest.raises(LaunchError, match=said):
        whereabouts(env, "job-0", "svc")
