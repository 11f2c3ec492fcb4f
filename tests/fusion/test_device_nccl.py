"""The engine over NCCL's communicator, with stand-ins for the GPU, and NCCL's library or torch."""

import contextlib
import threading
import types

import numpy as np
import pytest
import torch
from standin import Gpu, array_module, on_gpu
from standin.nccl import StandIn, World
from standin.ranks import Framework
from standin.torch_groups import Group

import ringlet.ring.transports.nccl as module
from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.devices.cuda import CudaPlace
from ringlet.ring import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports import torch_nccl
from ringlet.ring.transports.local import LocalWorld, run_local
from ringlet.ring.transports.nccl import NcclCommunicator
from ringlet.ring.transports.torch_nccl import TorchNcclCommunicator

SPECS = ["none", "int8 | ef", "topk | ef", "block_topk", "threshold", "powersgd", "randomk"]
SHAPE = (30, 41)


def library_of(monkeypatch, size):
    """Return what makes a communicator over NCCL's library, and the names of its operations."""
    made, world = {}, World(size)
    monkeypatch.setattr(module, "_requirements", lambda: made[threading.get_ident()])

    def join(host, gpu):
        library = StandIn(world, host.rank, lambda: gpu.current().ptr)
        made[threading.get_ident()] = library, types.SimpleNamespace(cuda=gpu.cuda)
        return NcclCommunicator(host, 0), library.seen

    return join, ("AllReduce", "AllGather", "Send")


def group_of_torch(monkeypatch, size):
    """Return the same over a process group of torch's."""
    moving = LocalWorld(size)

    def tensor(_, array, number):
        array.memory.touch(write=True)
        return torch.from_numpy(array.raw.view(np.uint8))

    monkeypatch.setattr(torch_nccl, "_tensor", tensor)
    monkeypatch.setattr(torch_nccl, "_on_current_stream", lambda *_: contextlib.nullcontext())

    def join(host, gpu):
        group = Group(moving.communicators[host.rank], lambda: gpu.current() is not gpu.train)
        return TorchNcclCommunicator(host, group, 0), group.calls

    return join, ("allreduce", "allgather", "alltoall")


@pytest.mark.parametrize(("way", "size"), [(library_of, 2), (library_of, 3), (group_of_torch, 3)])
def test_buckets_of_every_kind_over_nccl(way, size, monkeypatch):
    """Where sums are formed in rank order, as here, results are those of host memory."""
    join, (summing, gathering, exchanging) = way(monkeypatch, size)

    def rank_main(host):
        gpu = Gpu()
        comm, seen = join(host, gpu)
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
        assert {summing, gathering} <= set(seen)
        assert (exchanging in seen) == (size > 2)
        return found

    for found in run_local(rank_main, size):
        for spec, on_device, expected in zip(SPECS, found["cuda"], found["host"], strict=True):
            if spec not in ("powersgd", "randomk"):  # whose names say what is drawn
                np.testing.assert_array_equal(on_device, expected, spec)
            assert np.isfinite(on_device).all()
