"""The benchmark of kernels measures what it says; over the host device, so that no time counts."""

import json
import sys
import types
from pathlib import Path

import hostdevice
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cuda_codes
import kernels_cuda

SPECS = [
    "int8", "topk", "threshold(value=2.5)", "topk_sampled", "sidco", "lossless", "randomk",
    "shared_int", "powersgd", "int8 | hadamard", "qsgd | scaled", "int8 | ef21",
    "topk | momentum_correction(clip=1.0)",
]  # fmt: skip


class Clock:
    """Stands for CuPy's streams, graphs and events: what is captured runs when it is launched."""

    def __init__(self):
        self.graphs = 0
        self.Event = self.get_current_stream = self.Device = lambda: self
        self.get_elapsed_time = lambda start, end: 1.0

    def Stream(self, non_blocking):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def record(self, stream):
        pass

    synchronize = begin_capture = lambda self: None

    def end_capture(self):
        self.graphs += 1
        return types.SimpleNamespace(launch=lambda stream: None)


@pytest.fixture(scope="module")
def cupy():
    if hostdevice.COMPILER is None:
        pytest.skip(hostdevice.REASON)
    device = hostdevice.HostDevice(hostdevice.CACHE)
    module = hostdevice.array_module(device, "host_benchmark")
    module.cuda = Clock()
    return module


def test_every_kind_of_compressor_is_measured(cupy):
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    for spec in SPECS:
        before = cupy.cuda.graphs
        row = kernels_cuda.measured(cupy, spec, x, 3, 1.0, lambda spec, x: None)
        heads = [head for head in cuda_codes.HEADS if head in row]
        assert "encode" in heads
        assert all(row[head]["launches"] > 0 for head in heads), spec
        assert cupy.cuda.graphs - before == (len(heads) if row["captured"] else 0)


def test_everything_with_kernels_is_measured_by_default():
    from ringlet.compressors.specs import registry

    names = {part.split("(")[0] for spec in kernels_cuda.DEFAULT for part in spec.split(" | ")}
    builtin = {n for n in registry.names() if registry.lookup(n).__module__.startswith("ringlet.")}
    # Nothing to launch, or the same kernels: `with ef` is a column.
    assert builtin - names == {"none", "ef", "server_ef", "min_size", "warmup"}


@pytest.mark.parametrize("spec", ["int8 | ef", "topk | ef"])
def test_buckets_are_measured_both_ways(spec, cupy, tmp_path, monkeypatch):
    row = kernels_cuda.of_bucket(cupy, spec, [40, 1000] * 20, 3)
    for name, found in row.items():
        if name.endswith("many"):
            one_by_one = row[name.replace("many", "one by one")]["launches"]
            assert found["launches"] * 20 == one_by_one or "topk" in spec
            assert found["launches"] < one_by_one / 8
    monkeypatch.setattr(kernels_cuda, "RESULTS", tmp_path)
    kernels_cuda.save({"date": "today"}, [], [row])
    assert json.loads((tmp_path / "kernels_cuda.json").read_text())["buckets"] == [row]
    assert f"| `{spec}` |" in (tmp_path / "kernels_cuda.md").read_text()


def test_a_spec_that_fails_does_not_keep_others_from_being_measured_and_saved(
    cupy, tmp_path, monkeypatch, capsys
):
    def measure(spec):
        if spec == "int4":
            raise RuntimeError("out of memory")
        return {"spec": spec}

    specs = ["int8", "int4", "fp16"]
    rows, failed = kernels_cuda.all_of(cupy, measure, specs, lambda row: row["spec"])
    assert [row["spec"] for row in rows] == ["int8", "fp16"]
    assert failed == {"int4": "RuntimeError: out of memory"}
    monkeypatch.setattr(kernels_cuda, "RESULTS", tmp_path)
    rows = [row | {"captured": True} for row in rows]
    kernels_cuda.save({"date": "today", "failed": failed}, rows, [])
    assert "Failed: `int4`." in (tmp_path / "kernels_cuda.md").read_text()

    def gone():
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(cupy.cuda, "synchronize", gone)
    rows, failed = kernels_cuda.all_of(cupy, measure, specs, lambda row: row["spec"])
    assert [row["spec"] for row in rows] == ["int8"]
    assert "the GPU answers no more: cudaErrorIllegalAddress" in capsys.readouterr().out
