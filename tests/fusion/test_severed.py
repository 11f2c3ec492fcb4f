"""What breaks between ranks that live, or outlives a rank: all raise one error, and soon."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from engines import with_engines

from ringlet.fusion import Request, background_loop
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.requests.request import dumps
from ringlet.ring import PeerLost, pipeline

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_severed.py")
pytest.importorskip("torch")
SOON = 20.0  # seconds, on a busy machine; gloo itself gives up after 100


def told(record_property, folder, case, n):
    """Run the worker; return what was raised, without its times, and the longest of these."""
    process = subprocess.Popen(
        [sys.executable, WORKER, folder, case, str(n)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RINGLET_HEARTBEAT": "2"},
        start_new_session=True,  # the child that lives on ends with its group
    )
    try:
        process.wait(240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, err
    lines = [re.fullmatch(r"([\d.]+) (.*)", line) for line in out.splitlines()]
    assert all(lines), out
    longest = max(float(line[1]) for line in lines)
    record_property("measured", f"{case}, {n} values: raised within {longest:.1f} s")
    return [line[2] for line in lines], longest


@pytest.mark.parametrize(("case", "n"), [("reset", 4), ("reset", 1 << 20), ("cut", 1 << 25)])
def test_a_connection_that_breaks_is_named_by_its_two_ranks(record_property, tmp_path, case, n):
    texts, longest = told(record_property, tmp_path, case, n)
    assert len(texts) == 3
    (text,) = set(texts)
    assert text.startswith("PeerLost [1, 2]: the connection between rank 1 and rank 2 broke")
    assert longest < SOON


@pytest.mark.parametrize("n", [4, 1 << 20])
@pytest.mark.parametrize("case", ["forked", "cloned"])
def test_a_killed_rank_is_named_although_its_child_lives(record_property, tmp_path, case, n):
    texts, longest = told(record_property, tmp_path, case, n)
    assert len(texts) == 2
    (text,) = set(texts)
    assert text.startswith("PeerLost [1]: rank 1 is gone: ")
    assert longest < SOON


@pytest.mark.parametrize("case", ["frozen", "killed"])
def test_a_rank_that_is_lost_in_the_middle_of_a_message_is_named(record_property, tmp_path, case):
    texts, longest = told(record_property, tmp_path, case, 1 << 24)
    assert len(texts) == 2
    (text,) = set(texts)
    assert text.startswith("PeerLost [1]: rank 1 is gone: ")
    assert longest < 8.0  # gloo does not tell who waits for the rest of the message


@pytest.mark.parametrize("shows", ["in the connection", "on rank 0"])
def test_what_ends_an_exchange_shows_while_all_exchanges_are_waited_for(monkeypatch, shows):
    """They were waited for without a look: two ranks that lost each other waited for ever."""
    monkeypatch.setattr(pipeline, "LOOK_S", 0.05)
    monkeypatch.setattr(background_loop, "LOOK_S", 0.05)
    monkeypatch.setattr(pipeline, "_PATIENCE_S", 0.2)  # for the lane, which waits on
    go_on = threading.Event()

    def body(engine):
        comm, exchanges = engine._worker.sets[0].comm, engine._worker.pipeline
        begun, ended, drain = threading.Event(), threading.Event(), exchanges.drain

        def wait(*args, **kwargs):
            begun.set()
            go_on.wait(20)

        def ending():
            if shows == "in the connection":
                ended.set()
            elif engine.rank == 0:
                engine._control.send(m.SEVERED + dumps([[1], "cut"]))
            drain()

        comm.allreduce, exchanges.drain = wait, ending
        comm.severed = lambda: [1 - engine.rank] if ended.is_set() else []
        handle = engine.submit(Request("x", shape=(1 << 20,)), np.ones(1 << 20, np.float32))
        assert begun.wait(20)
        engine.extensions.call_soon(lambda: None)
        with pytest.raises(PeerLost) as caught:
            handle.wait(10)
        go_on.set()
        return str(caught.value), caught.value.ranks

    found = with_engines(2, body)
    assert found[0] == found[1]
    assert found[0][0].startswith("the connection between rank 0 and rank 1 broke")
    assert found[0][1] == (0, 1)
