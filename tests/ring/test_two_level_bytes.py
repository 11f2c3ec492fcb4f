"""How few bytes leave a host over two levels, counted on its interface."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

netns = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "netns.py"))
missing = netns["unavailable"]()
pytestmark = [
    pytest.mark.preloaded("torch"),
    pytest.mark.skipif(missing is not None, reason=str(missing)),
]

WORKER = Path(__file__).with_name("worker_bytes.py")
N = 200_000  # as there
SLACK = 16 << 10  # barriers, seals and agreements


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The bytes that one of two hosts with two ranks each sends, by what is done."""
    pytest.importorskip("torch")
    store, interface = tmp_path_factory.mktemp("gloo") / "store", netns["INTERFACE"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    with netns["Hosts"](2) as hosts:
        ranks = [
            hosts.popen(
                rank // 2,
                [sys.executable, str(WORKER), interface, str(store), str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
            )
            for rank in range(4)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * 4, "\n".join(outputs)
    return json.loads(outputs[0].splitlines()[-1])


# Bytes a host sends, as multiples of those reduced: dense float32, or one payload.
EXPECTED = {
    "dense, two levels, block": 1.0,
    "dense, two levels, dealt": 1.0,
    "dense, flat, block": 1.5,  # a ring leaves a host once
    "dense, flat, dealt": 3.0,  # and here at every step
    "scatter-reduce, flat": 2.0,
    "scatter-reduce, two levels": 1.0,
    "all-gather, flat": 4.0,
    "all-gather, two levels": 1.0,
}


@pytest.mark.parametrize("what", EXPECTED)
def test_the_bytes_are_those_of_the_formulas(sent, what):
    nbytes = EXPECTED[what] * N * (4 if what.startswith("dense") else 1)
    assert nbytes <= sent[what] <= 1.1 * nbytes + SLACK


@pytest.mark.parametrize(
    ("flat", "levels"),
    [
        ("dense, flat, dealt", "dense, two levels, dealt"),
        ("scatter-reduce, flat", "scatter-reduce, two levels"),
        ("all-gather, flat", "all-gather, two levels"),
    ],
)
def test_two_levels_send_no_more_than_a_local_size_th(sent, flat, levels):
    assert sent[levels] <= sent[flat] / 2 + SLACK


def test_dense_two_levels_send_as_little_as_can_be_sent(sent):
    """Each of two hosts has to learn the other's sum, so no scheme sends less than one a host."""
    assert sent["dense, two levels, block"] <= 1.1 * 4 * N + SLACK < sent["dense, flat, block"]
