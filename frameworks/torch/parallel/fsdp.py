"""Compression inside FSDP: of gradients, which are reduced, and of FSDP2's gathered parameters.

fully_shard(model)
ringlet.torch.compress_fsdp(model, "int8", gather="int8")
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from ringlet.compressors import Compressor, NoCompression
from ringlet.compressors.core.context import State
from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.process_sets import InvalidArgument
from ringlet.shared.compression import as_router
from ringlet.torch.ops.entry_points import public
from ringlet.torch.parallel.fsdp_params import levels
from ringlet.torch.parallel.fsdp_reduction import (
    FsdpReduction,
    check_scatterable,
    note_reduction,
)
from ringlet.torch.parallel.fsdp_routes import FsdpRoutes, described
from ringlet.torch.parallel.fsdp_transport import (
    GroupTransports,
    check_model,
    is_sharded,
    labelled,
    sharded_modules,
)
from ringlet.torch.parameters import checkpoint

log = logging.getLogger("ringlet")

_ADVICE = "Save state_dict() of what compress_fsdp returns on every rank, and load each rank's own"


class FsdpState:
    """The compressed reductions of a model, by FSDP module, and what they remember."""

    def __init__(self, made: Sequence[FsdpReduction[Any]], transports: GroupTransports) -> None:
        self._made, self._transports = made, transports

    def __len__(self) -> int:
        return len(self._serving())

    def __iter__(self) -> Iterator[FsdpReduction[Any]]:
        return iter(self._serving())

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's compressors remember, for ``torch.save``: one file a rank."""
        step = max((each.step for each in self._serving()), default=0)
        with self._transports.at_work():
            where = dist.get_rank(), dist.get_world_size()
            return checkpoint.saved(self._states(), *where, step, self._compressors())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank saved. Warns, and starts anew, if it is another rank's.

        So it does when the number of ranks has changed: shards are others then. Warns, too, of what
        does not fit how this model is sharded, which is forgotten.
        """
        state = checkpoint.hooks_record(state)
        # A piece's elements are part of its name, so that another piece is not taken for it.
        numels: dict[str, int | None] = {}
        for each in self._serving():
            each.step, each.loaded = int(state["step"]), True
            named = [key.rpartition("/") for key in state["states"]]
            for key, n in each.expects(k for name, _, k in named if name == each.name).items():
                each.states.setdefault(key, {})
                numels[f"{each.name}/{key}"] = n
        tensors = {name: (c, numels.get(name)) for name, c in self._compressors().items()}
        where = dist.get_rank(), dist.get_world_size()
        checkpoint.restore(self._states(), state, *where, tensors, advice=_ADVICE)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        with self._transports.at_work():
            return checkpoint.norm(self._states())

    def _compressors(self) -> dict[str, Compressor]:
        return {
            f"{each.name}/{key}": each.compressor_of(key)
            for each in self._serving()
            for key in each.states
        }

    def _states(self) -> dict[str, State]:
        states = ((each.name, each.states) for each in self._serving())
        return {f"{name}/{key}": s for name, kept in states for key, s in kept.items()}

    def _serving(self) -> list[FsdpReduction[Any]]:
        """Return those that still compress. Raises InvalidArgument if others do in their place."""
        serving = [each for each in self._made if not each.replaced]
        if self._made and not serving:
            raise InvalidArgument(
                "compress_fsdp has been called again for this model, which has replaced these "
                "compressors: save and load what the last call has returned"
            )
        return serving


@public
def compress_fsdp(
    module: torch.nn.Module,
    compression: Spec | Routes | Any = None,
    gather: Spec | Routes | Any = None,
) -> FsdpState:
    """Compress what every FSDP module inside ``module`` exchanges. Return an object with residuals.

    ``compression`` is for gradients, ``gather`` for parameters. Each is a spec, a compressor, or a
    mapping from name patterns to specs, first match first: ``{"*norm*": "none", "*": "int8"}``.
    Payloads have to be of fixed size. None sends values as torch does.

    All ranks compute with decoded parameters. The owner of a shard also keeps it unrounded, and
    updates that one. FSDP1 (``FullyShardedDataParallel``) gathers parameters as they are. If it is
    called again, the new compressors take the place of the old ones, and begin without residuals.

    Raises InvalidArgument

    - where there is no FSDP module, or one that is replicated and not sharded;
    - where torch is too old for FSDP2's hooks (before 2.9);
    - for a compressor of gradients whose payloads cannot be scattered: sparsifiers of variable
      size, low rank, shared scales, and what has to see the whole result (ef21, signsgd);
    - for a compressor of parameters that remembers, has a schedule, or loses more than a tenth of
      their squared norm, and for any of FSDP1's parameters.

    Later errors are raised on all ranks. The first forward, or FSDP1's first backward, raises
    Mismatch where ranks compress differently. At its end ``backward`` raises Mismatch where ranks
    have used different parameters of a module, and what a compressor of gradients has raised on
    any rank. The gradients are of no use then; training may go on. ``forward`` raises what a
    compressor of parameters raises.
    """
    check_model(module, "compress_fsdp")
    from ringlet.torch.parallel.fsdp1 import compress_flat, flat_modules  # imports all of FSDP1

    router, gathering = as_router(compression), as_router(gather)
    routes, gathered = FsdpRoutes(router, module), FsdpRoutes(gathering, module)
    gathers = gathered.compresses
    told = described(router) + (f", gather={described(gathering)}" if gathers else "")
    flat = list(flat_modules(module))
    modules = [] if flat else sharded_modules(module, "set_custom_reduce_scatter", "compress_fsdp")
    if compression is None and gather is None and dist.get_rank() == 0:
        log.warning(
            "compress_fsdp compresses nothing: name a compressor of gradients, gather=... one of "
            "parameters, or both, such as compress_fsdp(model, 'int8', gather='int8')"
        )
    for each in router.compressors:
        check_scatterable(each)
    transports = GroupTransports(told, module, [each for _, each in modules], gathers=gathers)
    if not flat:
        return FsdpState(_compress_sharded(routes, gathered, modules, transports), transports)
    if any(map(is_sharded, module.modules())):
        raise InvalidArgument(
            "there are modules of FSDP1 and of FSDP2 here, which compress_fsdp does not take "
            "together; shard all of the model with fully_shard(model)"
        )
    if gathers:
        raise InvalidArgument(
            "FSDP1 has no hook for the parameters that it gathers, so gather= needs FSDP2: shard "
            "the model with fully_shard(model) in place of FullyShardedDataParallel(model)"
        )
    reductions = compress_flat(routes, labelled(flat), transports)
    routes.warn()
    return FsdpState(reductions, transports)


def _compress_sharded(
    routes: FsdpRoutes,
    gathered: FsdpRoutes,
    modules: list[tuple[str, Any]],
    transports: GroupTransports,
) -> list[FsdpReduction[Any]]:
    """Let FSDP2 modules compress; return the reductions of their gradients."""
    from ringlet.torch.parallel.fsdp_gather import (  # what older torch lacks
        CheckedAllGather,
        CompressedAllGather,
        check_gatherable,
    )
    from ringlet.torch.parallel.fsdp_scatter import CheckedReduceScatter, CompressedReduceScatter

    if transports.gathers:
        for gathering in gathered.compressors:
            check_gatherable(gathering)
    for name, each in modules if routes.compresses or transports.gathers else ():
        if levels(each)[0] == 1 < levels(each)[1]:
            raise InvalidArgument(
                f"{name or 'the module'} is replicated and not sharded, so that there is no "
                "reduce-scatter to compress; use DistributedDataParallel with hvd.ddp_hook, or "
                "shard it over the mesh of one replica and call hvd.compress_hsdp"
            )
    made: list[FsdpReduction[Any]] = []
    for name, each in labelled(modules):
        # What no rank can have compressed, such as a module of several meshes, is not checked.
        with nullcontext() if transports.gathers else suppress(ValueError):
            each.set_custom_all_gather(
                CompressedAllGather(gathered, name, each, transports)
                if transports.gathers
                else CheckedAllGather(each, transports)
            )
        if any(not isinstance(by, NoCompression) for by in routes.of_shards(each).values()):
            reduction = CompressedReduceScatter(routes, name, each, transports)
            each.set_custom_reduce_scatter(reduction)
            note_reduction(each, reduction)
            made.append(reduction)
        else:
            note_reduction(each, None)
            with suppress(ValueError):
                each.set_custom_reduce_scatter(CheckedReduceScatter(each, transports))
    routes.warn()
    gathered.warn()
    return made
