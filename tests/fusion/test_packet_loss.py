"""Links that lose packets: the results are those of links that do not, and nobody is given up."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import netns
import pytest

pytest.importorskip("torch")
missing = netns.unavailable(copied=True)
pytestmark = [
    pytest.mark.preloaded("torch"),
    pytest.mark.skipif(missing is not None, reason=str(missing)),
]
WORKER = Path(__file__).with_name("worker_hashes.py")
STEPS = 10


def hashes(loss):
    """Return what the ranks of a job on three hosts print, whose links lose packets."""
    with netns.Hosts(3, loss=loss) as hosts:
        words = [sys.executable, "-m", "ringlet", "run", "-np", "3", "--transport", "gloo"]
        words += ["-H", hosts.slots(1), "--rsh", hosts.rsh, "--network-interface", netns.INTERFACE]
        words += [sys.executable, str(WORKER), str(STEPS)]
        done = subprocess.run(
            hosts.command(0, words), capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "lost" not in done.stderr
    return re.findall(r"hash (\w+)", done.stdout)


@pytest.fixture(scope="module")
def undisturbed():
    """Return what the ranks print where no packet is lost."""
    return hashes(0.0)


@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_results_are_bit_equal_and_nobody_is_given_up(undisturbed, loss, record_property):
    began = time.monotonic()
    found = hashes(loss)
    took = time.monotonic() - began
    record_property("measured", f"{loss:.0%} lost: {STEPS} steps, bit-equal, in {took:.0f} s")
    assert len(set(undisturbed)) == 1
    assert found == undisturbed
