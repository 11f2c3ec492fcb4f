"""The engine's way for tensors on a GPU, with the CUDA sources, compiled for the host, at work.

Arrays and streams are the stand-in's (``tests/standin``): nothing may be read by the host.
"""

import threading

import hostdevice
import numpy as np
import pytest
from standin import DeviceArray, on_gpu, on_ranks

from ringlet.compressors import parse
from ringlet.compressors.kernels.cuda.runtime import device as devices
from ringlet.fusion import Request

SPECS = [
    "none", "fp16", "bf16 | ef", "int8", "int8 | ef", "int4", "fp8", "natural", "onebit | ef",
    "terngrad", "block_topk | ef", "topk | ef", "topk | int8 | ef", "randomk", "shared_int",
    "int8 | hadamard", "mxfp4", "nvfp4", "int8 | ef(dtype='int8', reset=2)",
    "topk | ef(dtype='bf16')",
]  # fmt: skip
SHAPE = (30, 41)


class Kernels(hostdevice.HostDevice):
    """Kernels on the stand-in's arrays, for ranks that are threads."""

    lock = threading.Lock()

    def address(self, array):
        if isinstance(array, DeviceArray):
            array.memory.touch(write=True)  # which of them a kernel only reads, it does not say
            array = array.raw
        return super().address(array)

    def launch(self, *args):
        with self.lock:
            super().launch(*args)


pytestmark = pytest.mark.skipif(hostdevice.COMPILER is None, reason=hostdevice.REASON)


@pytest.fixture
def kernels(monkeypatch):
    """A device for all ranks, whose array module is called "standin_kernels"."""
    found = Kernels(hostdevice.CACHE)
    found.prepare(program for spec in BUCKETS for program in hostdevice.programs(spec))
    monkeypatch.setitem(devices._MAKERS, "standin_kernels", lambda xp: found)
    return found


@pytest.mark.parametrize("hosts", [None, "aabb"])
def test_kernels_give_what_they_give_in_host_memory_and_tell_the_host_nothing(kernels, hosts):
    def body(place):
        def run(engine, gpu):
            requests = [Request(spec, shape=SHAPE, spec=spec, place=place) for spec in SPECS]
            outs = []
            for step in range(2):
                handles = []
                for i, request in enumerate(requests):
                    rng = np.random.default_rng([engine.rank, step, i])
                    x = rng.standard_normal(SHAPE[0] * SHAPE[1]).astype(np.float32)
                    x = on_gpu(gpu, x) if place == "cuda" else x
                    handles.append(engine.submit(request, x, None, parse(request.spec)))
                outs = [handle.wait(120) for handle in handles]
            assert (gpu.reads, gpu.copies) == (0, 0)
            return [out.get() if place == "cuda" else out for out in outs]

        return on_ranks(len(hosts or "abc"), run, module="standin_kernels", hosts=hosts)

    host, device = body("host"), body("cuda")
    assert kernels.launches > 0
    for expected, found in zip(host, device, strict=True):
        for spec, e, f in zip(SPECS, expected, found, strict=True):
            np.testing.assert_array_equal(f.view(np.uint32), e.view(np.uint32), spec)


DTYPES = ["float32", "float16", "bfloat16", "float64"]
# Launches of a pass over up to 32 tensors: to encode, to encode sums again, to decode, on 3 ranks.
BUCKETS = {
    "fp16 | ef": (1, 0, 1), "bf16": (1, 0, 1), "int8": (1, 1, 1), "int8 | ef": (1, 1, 1),
    "qsgd(bits=4) | scaled | ef": (1, 1, 1),
    "block_topk(block=128) | ef": (1, 2, 1), "topk(ratio=0.1) | ef": (12, 0, 5),
}  # fmt: skip


def group_of(engine, spec, dtypes, count, place, n=90):
    """Declare ``count`` small tensors, whose dtypes take turns, in one bucket."""
    spec = f"{spec} | min_size(0)"
    requests = [
        Request(f"{spec} {i}", dtype=dtypes[i % len(dtypes)], shape=(n,), spec=spec, prescale=0.3,
                postscale=2.0, place=place)
        for i in range(count)
    ]  # fmt: skip
    group = engine.declare(spec, requests, [parse(spec) for _ in requests], [{} for _ in requests])
    assert len(group.buckets) == 1
    return group


def step_of(engine, gpu, group, step):
    """Submit a step's gradients of a group; return the results, which lie where they lay."""
    arrays = []
    for i, (name, member) in enumerate(group.members.items()):
        rng = np.random.default_rng([engine.rank, step, i])
        x = rng.standard_normal(member.numel).astype(np.float32)
        if member.request.dtype == "bfloat16":
            x = (x.view(np.uint32) >> 16).astype(np.uint16)
        else:
            x = x.astype(member.request.dtype)
        arrays.append(on_gpu(gpu, x) if member.request.place == "cuda" else x)
        group.submit(name, arrays[-1])
    group.wait(120)
    return arrays


def test_tensors_of_all_dtypes_share_launches_and_give_what_they_give_in_host_memory(kernels):
    asked = dict.fromkeys([*BUCKETS, "sidco(ratio=0.2) | ef"], DTYPES)
    asked |= {"threshold(value=0.2) | ef": DTYPES[:3], "topk_sampled(ratio=0.2)": DTYPES[:2]}
    asked |= {"lossless": DTYPES[:3], "lossless | ef": DTYPES[:1]}

    def body(place):
        def run(engine, gpu):
            outs = []
            for spec, dtypes in asked.items():
                group = group_of(engine, spec, dtypes, 9, place)
                for step in range(2):
                    outs += step_of(engine, gpu, group, step)
            return [out.get() if place == "cuda" else out for out in outs]

        return on_ranks(3, run, module="standin_kernels")

    for expected, found in zip(body("host"), body("cuda"), strict=True):
        for i, (e, f) in enumerate(zip(expected, found, strict=True)):
            assert e.tobytes() == f.tobytes(), [*asked][i // 18]


@pytest.mark.parametrize("count", [5, 33])
def test_a_bucket_takes_a_launch_for_32_tensors_in_every_pass(count, kernels):
    passes, counts = -(-count // 32), {}

    def run(engine, gpu):
        for spec in BUCKETS:
            group = group_of(engine, spec, ["float32"], count, "cuda")
            everybody(engine)  # until then kernels are warmed up
            before = kernels.launches
            everybody(engine)
            step_of(engine, gpu, group, 0)
            everybody(engine)
            counts[spec] = kernels.launches - before
            everybody(engine)
            assert (gpu.reads, gpu.copies) == (0, 0)

    def everybody(engine):
        barrier = Request("b", "barrier")
        engine.submit(barrier, np.empty(0, np.float32)).wait(60)

    on_ranks(3, run, module="standin_kernels")
    for spec, launches in BUCKETS.items():
        encode, again, decode = (each * 3 * passes for each in launches)
        # An owner of shards may have none of them, or fewer than fill a launch.
        assert encode + decode <= counts[spec] <= encode + again + decode, spec
