"""What breaks between ranks that live, or outlives a rank: all raise one error, and soon."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
