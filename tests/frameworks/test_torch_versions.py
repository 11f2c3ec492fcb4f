"""What older versions of torch lack is asked for where it is used, and said by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What torch has got since the oldest version that is accepted, 2.6: modules' names, by module.
LACKING = {
    "2.6": {
        "torch.distributed.fsdp._fully_shard._fsdp_api": ["ReduceScatter", "AllGather", "Comm"],
        "torch.distributed.fsdp": [],
    },
    "without FSDP2": {
        "torch.distributed.fsdp._fully_shard._fsdp_api": ["ReduceScatter", "AllGather", "Comm"],
        "torch.distributed.fsdp": ["FSDPModule", "fully_shard"],
    },
}

PROGRAM = """
import importlib, sys
import torch
import torch.distributed.fsdp as fsdp
for module, names in {lacking!r}.items():
    for name in names:
        delattr(importlib.import_module(module), name)
for name in ("set_custom_reduce_scatter", "set_all_reduce_hook"):
    delattr(getattr(fsdp, "FSDPModule", type("Gone", (), {{name: None}})), name)
import ringlet.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "int8 | ef"
)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
for call, group in ((hvd.compress_fsdp, ()), (hvd.compress_hsdp, (None,))):
    try:
        call(model, "int8", *group)
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("version", LACKING)
def test_torch_without_newer_names(version):
    program = PROGRAM.format(lacking=LACKING[version])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["compress_fsdp", "compress_hsdp"]
    assert all("install a newer torch" in line for line in lines)
