"""Names that other libraries have for the same, and what stands for them here."""

from __future__ import annotations

import difflib
import sys

_TORCH = "torch.distributed"
# What is written there: whose it is, and what to write instead.
_NAMES = {
    "DistributedDataParallel": (
        "torch's",
        "keep torch.nn.parallel.DistributedDataParallel, with hvd.ddp_hook(...) as its hook, or "
        "wrap the optimizer: hvd.DistributedOptimizer(...)",
    ),
    "DDP": ("torch's", "see hvd.ddp_hook(...) and hvd.DistributedOptimizer(...)"),
    "FullyShardedDataParallel": ("torch's", "use fully_shard and hvd.compress_fsdp(...)"),
    "fully_shard": ("torch's", "keep it, and call hvd.compress_fsdp(model, ...)"),
    "init_process_group": (_TORCH, "hvd.init()"),
    "destroy_process_group": (_TORCH, "hvd.shutdown()"),
    "new_group": (_TORCH, "hvd.add_process_set([...])"),
    "get_rank": (_TORCH, "hvd.rank()"),
    "get_local_rank": ("DeepSpeed's", "hvd.local_rank()"),
    "get_world_size": (_TORCH, "hvd.size()"),
    "world_size": (_TORCH, "hvd.size()"),
    "all_reduce": (_TORCH, "hvd.allreduce_(...) in place, or hvd.allreduce(...)"),
    "all_gather": (_TORCH, "hvd.allgather(...)"),
    "all_gather_into_tensor": (_TORCH, "hvd.allgather(...)"),
    "all_gather_object": (_TORCH, "hvd.allgather_object(...)"),
    "all_to_all": (_TORCH, "hvd.alltoall(...)"),
    "reduce_scatter": (_TORCH, "hvd.reducescatter(...)"),
    "reduce_scatter_tensor": (_TORCH, "hvd.reducescatter(...)"),
    "reduce": (_TORCH, "hvd.allreduce(...), whose result all ranks get"),
    "broadcast_object_list": (_TORCH, "hvd.broadcast_object(...)"),
    "monitored_barrier": (_TORCH, "hvd.barrier()"),
    "initialize": ("DeepSpeed's", "hvd.init(), and hvd.DistributedOptimizer(...)"),
    "init_distributed": ("DeepSpeed's", "hvd.init()"),
    "run": ("horovod.run", "ringlet.run(...), or `ringlet run` in a shell"),
}
# What other adapters of ours have, and this one does in its own way.
_ELSEWHERE = {
    "ringlet.jax": {
        "DistributedOptimizer": "optax.chain(hvd.reduce_gradients(...), optax.adam(1e-3))",
        "DistributedGradientTape": "hvd.reduce_gradients(...), in an optax.chain",
        "Compression": 'a spec, as in hvd.reduce_gradients("fp16")',
        "DiLoCo": "hvd.reduce_gradients(...) in every step; DiLoCo is PyTorch's, in ringlet.torch",
        "OneBitAdam": "hvd.reduce_gradients(...) before optax's; OneBitAdam is ringlet.torch's",
        "broadcast_parameters": "params = hvd.broadcast_pytree(params, root_rank=0)",
        "broadcast_variables": "params = hvd.broadcast_pytree(params, root_rank=0)",
        "broadcast_optimizer_state": "state = hvd.broadcast_pytree(state, root_rank=0)",
    },
}


def no_such_name(module: str, name: str) -> AttributeError:
    """Return the error for a ``name`` that ``module``, an adapter, has not."""
    told = f"module {module!r} has no attribute {name!r}"
    there: list[str] = getattr(sys.modules[module], "__all__", [])
    if name in _NAMES:
        whose, instead = _NAMES[name]
        owner = f"{whose}" if whose.endswith("'s") else f"of {whose}"
        told += f", which is {owner}; here: {instead}"
    elif instead := _ELSEWHERE.get(module, {}).get(name, ""):
        told += f"; here: {instead}"
    elif near := difflib.get_close_matches(name, there, 1):
        told += f"; did you mean {near[0]!r}?"
    return AttributeError(told)
