"""The table of cases over process groups of torch.distributed, in real processes."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ringlet.ring import TransportUnavailable
from ringlet.ring.dtypes import INTEGERS
from ringlet.ring.transports.local import run_local
from ringlet.ring.transports.torch_group import TorchCommunicator

pytestmark = pytest.mark.preloaded("torch", whole_end=True)

WORKER = Path(__file__).with_name("worker_collectives.py")


@pytest.mark.parametrize("size", [2, 4])
def test_the_table_of_cases(size, tmp_path):
    out = tmp_path / "digests.json"
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, "torch", out, tmp_path / "store", str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * size, "\n".join(outputs)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    digests = json.loads(out.read_text())
    local = run_local(runpy.run_path(str(WORKER))["play_all"], size)[0]
    exact = [case for case in local if any(f"dtype='{name}'" in case for name in INTEGERS)]
    assert {case: digests[case] for case in exact} == {case: local[case] for case in exact}


def test_without_a_group_the_error_says_what_to_call():
    assert not dist.is_initialized()
    with pytest.raises(TransportUnavailable, match="init_process_group"):
        TorchCommunicator()


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'ringlet\[torch\]'"):
        TorchCommunicator()
