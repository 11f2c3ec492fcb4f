"""Compression between the replicas of a model that FSDP2 shards inside each of them.

mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])
ringlet.torch.compress_hsdp(model, "topk(ratio=0.01) | ef", mesh["replicate"].get_group())
"""

from __future__ import annotations

import _thread
import atexit
import os
import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ringlet.compressors import Compressor
from ringlet.fusion import Engine, Request
from ringlet.process_sets import InvalidArgument
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.connections import connections
from ringlet.ring.control_open import open_control
from ringlet.runtime import agreed_places, limits_from
from ringlet.torch.compression import as_compressor
from ringlet.torch.device import flat_at, packed, place_of
from ringlet.torch.tensors import check, dtype_of, unstage


class ReplicaAverage:
    """Averages one FSDP module's shard of the gradient over the replicas, in place."""

    def __init__(self, engine: Engine, compressor: Compressor, name: str) -> None:
        self._engine, self._compressor, self._name = engine, compressor, name

    def __call__(self, shard: torch.Tensor) -> None:
        """Take the output of a reduce-scatter. What fails on one rank raises on all of them."""
        check(shard, self._name)
        dtype, spec = dtype_of(shard), str(self._compressor)
        op, place = ReduceOp.AVERAGE, place_of(shard, engine=self._engine)
        shape = tuple(shard.shape)
        request = Request(self._name, "allreduce", dtype, shape, op, spec, place=place)
        staged = packed(shard, place)
        self._engine.submit(request, flat_at(staged, place), None, self._compressor).wait()
        unstage(staged, shard)


def compress_hsdp(module: torch.nn.Module, compression: Any, replicas: Any) -> list[ReplicaAverage]:
    """Average gradients over ``replicas``, compressed, after FSDP2's reduce-scatter. Collective.

    ``module`` is sharded by ``fully_shard`` over a mesh of one dimension, the ranks of one replica,
    and begins with the same parameters in all of them. ``replicas`` is the process group of the
    ranks that hold the same shard; payloads travel over connections of our own between them, from
    GPU to GPU where that group uses NCCL and CuPy is installed. Any compressor
    serves. Its residuals are of shards, live as long as the process, and are in no checkpoint:
    training that goes on from one begins with empty ones.

    Raises InvalidArgument where there is no FSDP2 module, or one that is replicated already.
    """
    compressor = as_compressor(compression)
    modules = [(n, m) for n, m in module.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise InvalidArgument("there is no FSDP2 module here; call fully_shard(model) first")
    for name, each in modules:
        if any(p.device_mesh.ndim > 1 for p in each.parameters(recurse=True)):  # type: ignore[attr-defined]
            raise InvalidArgument(
                f"{name or 'the module'} is sharded and replicated by torch, which averages over "
                "the replicas itself; shard it over the mesh of one replica: "
                "fully_shard(model, mesh=mesh['shard'])"
            )
    comm = connections(replicas)
    engine = Engine(comm, open_control, limits_from(os.environ), agreed_places(comm))

    def leave() -> None:
        engine.shutdown()
        comm.close()

    # On a thread of its own: leaving takes locks that the finaliser's thread may hold.
    finalizer = weakref.finalize(module, _thread.start_new_thread, leave, ())
    finalizer.atexit = False
    atexit.register(leave)
    made = []
    for name, each in modules:
        made.append(ReplicaAverage(engine, compressor, name or "root"))
        each.set_all_reduce_hook(made[-1])
    return made
