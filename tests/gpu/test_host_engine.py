"""The engine's way for tensors on a GPU, with the CUDA sources, compiled for the host, at work.

Arrays and streams are the stand-in's (``tests/standin``): nothing may be read by the host.
"""

import threading

import hostdevice
import numpy as np
import pytest
from standin import DeviceArray, on_gpu, on_ranks

from ringlet.compressors import parse
from ringlet.compressors.kernels.cuda import device as devices
from ringlet.fusion import Request

SPECS = [
    "none", "fp16", "bf16 | ef", "int8", "int8 | ef", "int4", "fp8", "natural", "onebit | ef",
    "terngrad", "block_topk | ef", "topk | ef", "topk | int8 | ef", "randomk", "shared_int",
    "int8 | hadamard",
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


@pytest.mark.skipif(hostdevice.COMPILER is None, reason=hostdevice.REASON)
def test_kernels_give_what_they_give_in_host_memory_and_tell_the_host_nothing(monkeypatch):
    kernels = Kernels(hostdevice.CACHE)
    monkeypatch.setitem(devices._MAKERS, "standin_kernels", lambda xp: kernels)

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

        return on_ranks(3, run, module="standin_kernels")

    host, device = body("host"), body("cuda")
    assert kernels.launches > 0
    for expected, found in zip(host, device, strict=True):
        for spec, e, f in zip(SPECS, expected, found, strict=True):
            np.testing.assert_array_equal(f.view(np.uint32), e.view(np.uint32), spec)
