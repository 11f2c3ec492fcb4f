"""Compression between the replicas of a model that FSDP2 shards inside each of them.

mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])
ringlet.torch.compress_hsdp(model, "topk(ratio=0.01) | ef", mesh["replicate"].get_group())
"""

from __future__ import annotations

import _thread
import atexit
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.specs.edition import edition
from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.fusion import CompressionFailed, Engine, Request
from ringlet.fusion.requests.handle import Handle
from ringlet.job.process_sets import InvalidArgument
from ringlet.job.session import agreed_terms
from ringlet.job.settings import limits_from, wishes_from
from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous.torch_jobs import connect_group
from ringlet.shared.compression import as_router
from ringlet.torch.ops.entry_points import public, untraced
from ringlet.torch.parallel.backward_outcome import BackwardFailure, Stage
from ringlet.torch.parallel.fsdp_params import Reduced, held, lengths, levels, reduced, span_key
from ringlet.torch.parallel.fsdp_routes import FsdpRoutes, described
from ringlet.torch.parallel.fsdp_transport import (
    GroupTransports,
    check_model,
    labelled,
    sharded_modules,
)
from ringlet.torch.parallel.group_runtimes import check_group, watched
from ringlet.torch.parameters import checkpoint
from ringlet.torch.tensors.placement import HOST, flat_at, packed, place_of
from ringlet.torch.tensors.views import check, dtype_of, unstage

_ADVICE = "Save state_dict() of what compress_hsdp returns on every rank, and load each rank's own"
_AVERAGE = "_ringlet_average"  # an attribute of FSDP modules


class ReplicaAverage:
    """Averages one FSDP module's shard of the gradient over the replicas, in place.

    FSDP hands over one flat tensor: the shards of all parameters, one behind the other. Each is
    compressed on its own, in its own shape, so that none is measured by the gradients of another.
    """

    def __init__(
        self,
        engine: Engine,
        routes: FsdpRoutes,
        name: str,
        module: Any,
        transports: GroupTransports,
    ) -> None:
        self.name, self._transports, self._unknown = name, transports, routes.unknown
        self._by_name = {f"{name}[{key}]": by for key, by in routes.of_shards(module).items()}
        self.places: dict[str, str] = {}  # of shards, by the names under which they travel
        self.count = 0  # averages, which replicas count alike
        self.loaded = ""  # behind so many of them, and one, a state was loaded last, and which
        self.replaced = False  # by what averages the module's gradient now
        self._engine, self._module = engine, weakref.ref(module)  # which holds this

    @untraced
    def __call__(self, shard: torch.Tensor) -> None:
        """Take the output of a reduce-scatter.

        What fails on one rank is raised on all of them when backward ends: of other shards too.
        """
        check(shard, self.name)
        caller = sys._getframe(1)
        group = caller.f_locals.get("reduce_scatter_group")
        if group is not None:
            self._transports.outcome.expect(self._transports.of(group).comm)
        later = self._transports.look()
        if later is not None:
            if group is None:
                raise InvalidArgument(later.text)
            self._transports.outcome.note(later)
        place = place_of(shard, engine=self._engine)
        staged = packed(shard, place)
        params = reduced(self._module(), shard.numel(), caller)
        handles = self._submit(params, dtype_of(shard), flat_at(staged, place), place)
        failed: CompressionFailed | Mismatch | None = None
        for handle in handles:
            try:
                handle.wait()
            except (CompressionFailed, Mismatch) as error:
                failed = failed or error
        if failed is None:
            self.count += 1
            unstage(staged, shard)
            return
        if group is None:
            raise failed
        shard.zero_()
        failure = BackwardFailure(Stage.ENCODE, type(failed).__name__, self._told(failed))
        self._transports.outcome.note(failure, failed)

    def compressor_of(self, name: str) -> Compressor:
        """Return the compressor of what travels under ``name``."""
        return self._by_name.get(name, self._unknown)

    def lengths(self) -> dict[str, int]:
        """Return how many elements the shards of the module's parameters have, by their names."""
        return {f"{self.name}[{key}]": n for key, n in lengths(self._module()).items()}

    def _submit(
        self, params: Reduced | None, dtype: str, values: Array, place: str
    ) -> list[Handle]:
        """Hand in the shard of each parameter, or all of ``values`` where these are not known."""
        pieces: list[tuple[str, tuple[int, ...]]] = [("", (values.size,))]
        if params is not None:
            spans = [f"[{span_key(params.group, *span)}]" for span in params.spans]
            pieces = list(zip(spans, params.shapes, strict=True))
        items, start = [], 0
        for span, shape in pieces:
            name, stop = self.name + span, start + math.prod(shape)
            self.places[name] = place
            compressor = self.compressor_of(name)
            request = Request(
                name, "allreduce", dtype, shape, ReduceOp.AVERAGE, str(compressor),
                group=self.name, group_size=len(pieces), place=place, loaded=self.loaded,
                edition=edition(compressor),
            )  # fmt: skip
            items.append((request, values[start:stop], None, compressor))
            start = stop
        return self._engine.submit_all(items)

    def _told(self, failed: CompressionFailed | Mismatch) -> str:
        """Return an error's text, which names ranks of the replicas, with their ranks of all."""
        origin = self._engine.comm.origin
        if isinstance(failed, CompressionFailed):
            return re.sub(
                r"^rank (\d+):", lambda found: f"rank {origin[int(found[1])]}:", str(failed)
            )
        ranks = ", ".join(f"{rank} is {whole}" for rank, whole in enumerate(origin))
        return (
            f"compress_hsdp: replicas differ: {failed} (ranks are those of replicas; of all ranks "
            f"{ranks}); use the same parameters in a step, compressors and checkpoint in all of "
            "them"
        )


class HsdpState:
    """The averages over replicas of a model, by FSDP module, and what they remember."""

    def __init__(self, made: list[ReplicaAverage], engine: Engine) -> None:
        self._made, self._engine = made, engine

    def __len__(self) -> int:
        return len(self._serving())

    def __getitem__(self, index: int) -> ReplicaAverage:
        return self._serving()[index]

    def __iter__(self) -> Iterator[ReplicaAverage]:
        return iter(self._serving())

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's compressors remember, for ``torch.save``: one file a rank."""
        compressors = self._compressors()
        with self._engine.at_work():
            where = dist.get_rank(), dist.get_world_size()
            return checkpoint.saved(self._states(), *where, compressors=compressors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank saved. Warns, and starts anew, if it is another rank's.

        So it does when the number of ranks has changed: shards are others then. Warns, too, of what
        does not fit how this model is sharded, which is forgotten.
        """
        state, numels = checkpoint.hooks_record(state), dict[str, int]()
        for each in self._serving():
            known = each.lengths()
            for name in [each.name, *known]:
                if name in state["states"]:
                    each.places.setdefault(name, HOST)
                    self._engine.states.setdefault(name, {})
            numels |= known
        states = self._states()
        tensors = {name: (c, numels.get(name)) for name, c in self._compressors().items()}
        where = dist.get_rank(), dist.get_world_size()
        among = self._engine.comm.size
        checkpoint.restore(states, state, *where, tensors, among=among, advice=_ADVICE)
        common, steps = checkpoint.checksums(states, self._compressors())
        for each in self._serving():
            each.loaded = f"{each.count + 1} ({common ^ steps:08x})"
            for name, place in each.places.items():
                if name in states:
                    self._engine.bring(states[name], place)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        self._serving()
        with self._engine.at_work():
            return checkpoint.norm(self._states())

    def _compressors(self) -> dict[str, Compressor]:
        return {name: each.compressor_of(name) for each in self._serving() for name in each.places}

    def _states(self) -> dict[str, State]:
        known = self._engine.states
        return {
            name: known[name] for each in self._serving() for name in each.places if name in known
        }

    def _serving(self) -> list[ReplicaAverage]:
        """Return those that still average. Raises InvalidArgument if others do in their place."""
        serving = [each for each in self._made if not each.replaced]
        if not serving:
            raise InvalidArgument(
                "compress_hsdp has been called again for this model, which has replaced these "
                "compressors: save and load what the last call has returned"
            )
        return serving


class Departure:
    """Ends an engine and its connections. Whoever calls it returns when that is done.

    So does the interpreter's end, when the model's has begun it: it must not end beneath a thread
    that is inside torch, which ends the process with SIGABRT.
    """

    def __init__(self, engine: Engine, comm: Communicator) -> None:
        self._engine, self._comm = engine, comm
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._finalizer: Any = None
        self.averages: list[ReplicaAverage] = []  # by this engine

    def come_with(self, module: torch.nn.Module) -> None:
        """Begin when ``module`` is gone, or at the interpreter's end."""
        # On a thread of its own: leaving takes locks that the finaliser's thread may hold.
        self._finalizer = weakref.finalize(module, _thread.start_new_thread, self, ())
        self._finalizer.atexit = False
        atexit.register(self)

    def __call__(self) -> None:
        """Shut the engine down, and close the connections."""
        if os.getpid() != self._pid:
            return  # a forked child, whose parent goes on with them
        with self._lock:
            self._engine.shutdown()
            self._comm.close()
            atexit.unregister(self)  # which keeps both, as the finaliser does
            if self._finalizer is not None:
                self._finalizer.detach()


@public
def compress_hsdp(
    module: torch.nn.Module, compression: Spec | Routes | Any, replicas: Any
) -> HsdpState:
    """Average gradients over ``replicas``, compressed, after FSDP2's reduce-scatter. Collective.

    - ``module`` is sharded by ``fully_shard`` over a mesh of one dimension, the ranks of one
      replica. It begins with the same parameters in all replicas.
    - ``compression`` is any spec or compressor, or a mapping from name patterns to specs.
    - ``replicas`` is the process group of the ranks that hold the same shard. Payloads travel over
      connections of our own between them. They travel from GPU to GPU where that group uses NCCL
      and CuPy is installed. The engine's settings, such as RINGLET_SEED, are its first rank's.

    Residuals are of shards. ``state_dict`` and ``load_state_dict`` of what is returned carry them,
    for a job with as many ranks. If it is called again, the new compressors take the place of the
    old ones, and begin without residuals.

    Raises InvalidArgument where there is no FSDP2 module, or one that is replicated already or
    tensor parallel, and on all ranks of ``replicas`` where these hold different shards. If one rank
    fails in ``backward``, all ranks raise its error when ``backward`` ends.
    """
    check_model(module, "compress_hsdp")
    modules = sharded_modules(module, "set_all_reduce_hook", "compress_hsdp")
    router = as_router(compression)
    routes = FsdpRoutes(router, module)
    for name, each in modules:
        if levels(each)[1] > 1:
            raise InvalidArgument(
                f"{name or 'the module'} is replicated by torch, which averages over the replicas "
                "itself; shard it over the mesh of one replica: fully_shard(model, "
                "mesh=mesh['shard'])"
            )
        if any(p.device_mesh.ndim > 1 for p in each.parameters()):
            raise InvalidArgument(
                f"{name or 'the module'} is tensor parallel as well: ranks that hold other parts "
                "of its weights would compress otherwise what they have in common; use "
                "hvd.compress_fsdp, which compresses each parameter by itself"
            )
    check_group(replicas, "replicas")
    limits, wishes = limits_from(os.environ), wishes_from(os.environ)
    with watched(replicas, "in hvd.compress_hsdp()"):
        comm = connect_group(replicas)
        try:
            _refuse_other_shards([each for _, each in modules], comm)
            terms = agreed_terms(comm, limits, wishes)
            engine = Engine(terms.comm, open_control, terms.limits, terms.places())
        except BaseException:
            comm.close()
            raise
    leave = Departure(engine, terms.comm)
    leave.come_with(module)
    known = [each for _, each in modules]
    made, transports = [], GroupTransports(described(router), module, known, "compress_hsdp")
    for name, each in labelled(modules):
        made.append(ReplicaAverage(engine, routes, name, each, transports))
        each.set_all_reduce_hook(made[-1])
    _note_averages(known, made, leave)
    routes.warn()
    return HsdpState(made, engine)


def _note_averages(
    modules: Sequence[Any], made: Sequence[ReplicaAverage], leave: Departure
) -> None:
    """Remember what averages the gradients of ``modules`` from now on, and what ends its engine.

    An engine that averages nothing any more ends now. That is so on all of its ranks, which are in
    this call, too: none of them has anything under way.
    """
    leave.averages.extend(made)
    before = [each.__dict__[_AVERAGE] for each in modules if _AVERAGE in each.__dict__]
    for module, average in zip(modules, made, strict=True):
        module.__dict__[_AVERAGE] = average, leave
    for average, _ in before:
        average.replaced = True
    for former in dict.fromkeys(former for _, former in before):
        if all(each.replaced for each in former.averages):
            former()


def _refuse_other_shards(modules: Iterable[Any], comm: Communicator) -> None:
    """Raise InvalidArgument, on all ranks of ``comm``, unless they hold the same shards.

    Collective. Gradients of different parameters would be averaged, without a word.
    """
    own = dict.fromkeys(f"shard {rank} of {size}" for each in modules for rank, size in held(each))
    told = [each.decode() for each in comm.allgather_bytes(", ".join(own).encode())]
    if len(set(told)) > 1:
        shown = "; ".join(f"rank {rank}: {t}" for rank, t in zip(comm.origin, told, strict=True))
        raise InvalidArgument(
            f"compress_hsdp: the ranks of replicas hold different parts of the model ({shown}); "
            "pass the process group of those that hold the same shard, such as "
            "mesh['replicate'].get_group()"
        )
