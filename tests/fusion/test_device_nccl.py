"""The engine over NCCL's communicator, with stand-ins for the GPU and for NCCL's library."""

import threading
import types

import numpy as np
import pytest
from standin import Gpu, array_module, on_gpu
from standin.nccl import StandIn, World
from standin.ranks import Framework

import ringlet.ring.nccl as module
from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.cuda_place import CudaPlace
from ringlet.ring import ReduceOp
from ringlet.ring.control_open import open_control
from ringlet.ring.local import run_local
from ringlet.ring.nccl import NcclCommunicator

SPECS = ["none", "int8 | ef", "topk | ef", "block_topk", "threshold", "powersgd", "randomk"]
SHAPE = (30, 41)


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_of_every_kind_over_nccl(size, monkeypatch):
    """Where sums are formed in rank order, as here, results are those of host memory."""
    made, world = {}, World(size)
    monkeypatch.setattr(module, "_requirements", lambda: made[threading.get_ident()])

    def rank_main(host):
        gpu = Gpu()
        library = StandIn(world, host.rank, lambda: gpu.current().ptr)
        made[threading.get_ident()] = library, types.SimpleNamespace(cuda=gpu.cuda)
        comm = NcclCommunicator(host, 0)
        place = CudaPlace(array_module(gpu), comm.device)
        place.adopt(lambda: Framework(gpu))
        engine = Engine(comm, lambda _, handler: open_control(host, handler), Limits(), [place])
        found = {"cuda": [], "host": []}
        try:
            for where, outs in found.items():
                for i, spec in enumerate(SPECS):
                    x = np.random.default_rng([i, host.rank]).standard_normal(SHAPE[0] * SHAPE[1])
                    x = x.astype(np.float32)
                    request = Request(f"{spec}.{where}", shape=SHAPE, spec=spec, place=where)
                    with gpu.train:
                        x = on_gpu(gpu, x) if where == "cuda" else x
                        out = engine.submit(request, x, None, parse(spec)).wait(60)
                        outs.append(out.get() if where == "cuda" else out)
            with gpu.train:
                word = on_gpu(gpu, np.array([host.rank], np.int64))
                most = Request("m", "allreduce", "int64", (1,), ReduceOp.MAX, place="cuda")
                assert engine.submit(most, word).wait(60).get().tolist() == [size - 1]
        finally:
            engine.shutdown()
        assert {"AllReduce", "AllGather"} <= set(library.seen)
        assert ("Send" in library.seen) == (size > 2)
        return found

    for found in run_local(rank_main, size):
        for spec, on_device, expected in zip(SPECS, found["cuda"], found["host"], strict=True):
            if spec not in ("powersgd", "randomk"):  # whose names say what is drawn
                np.testing.assert_array_equal(on_device, expected, spec)
            assert np.isfinite(on_device).all()
