"""What a hook for DistributedDataParallel knows of its model, and remembers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.specs.edition import edition
from ringlet.compressors.specs.routes import Router, Routes, Spec
from ringlet.compressors.states import bare, fit, forget_shared, shared
from ringlet.fusion import Engine, Request
from ringlet.fusion.negotiation.validation import differing
from ringlet.job.elastic import warn_of_paid
from ringlet.job.session import Runtime, current, is_initialized
from ringlet.precision.reduction import carrier
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.compression import as_router
from ringlet.shared.residual_store import put, warn_of_common, warn_of_misfits
from ringlet.torch.elastic.epoch_group import AGAIN
from ringlet.torch.elastic.hook_memory import HookMemory, kept_for
from ringlet.torch.parallel.ddp_names import BucketPlaces, checksum, is_place, names_in_ddp
from ringlet.torch.parallel.group_runtimes import refuse_other_ranks
from ringlet.torch.parallel.hooked_backward import HookedBackward
from ringlet.torch.parallel.memory_order import MemoryOrders
from ringlet.torch.parameters import checkpoint
from ringlet.torch.parameters.naming import routed, warn_of_unmatched, wrapped_in
from ringlet.torch.tensors.placement import place_of
from ringlet.torch.tensors.views import dtype_of

_ADVICE = (
    "Save state_dict() of the hook's state, the first thing that ddp_hook returns, on every rank, "
    "and load each rank's own, or pass all ranks' to its load_sharded()"
)

_ORDERS = "orders"  # in a checkpoint

_NAMES = "pass named_parameters=model.named_parameters() on all ranks, or on none"


class DdpState:
    """What a hook knows of its model: the compressors, and names for the parameters.

    DDP tells a hook no names. Parameters get theirs from ``named_parameters``, or from the model
    that the hook is found to be registered with, on all ranks; else from the place in which a hook
    first sees them, which is the same on every rank, and outlasts DDP's rebuilding of its buckets.
    Compressors' memory is kept by name, for each rank alone.
    """

    def __init__(
        self,
        compression: Spec | Routes,
        named_parameters: Mapping[str, torch.Tensor] | None,
        runtime: Runtime,
        reduction: str = "wire",
        group: Any = None,
    ) -> None:
        self.group = group
        self._reduction = reduction
        self._router: Router = as_router(compression)
        self._runtime = runtime
        self._label = runtime.unnamed("ddp").replace(".noname.", ".")
        self._names: dict[int, str] = {}  # by the ids of parameters, while those live
        self._taken: dict[str, bool] = {}  # all names, and whether they remember something
        self._requests: dict[str, tuple[Request, Compressor]] = {}
        self._seen: list[weakref.ref[torch.Tensor]] = []  # which take the names of dead ones away
        self._given: dict[str, int] = {}  # names that are known, and how many elements they have
        self._depth = 0
        self._call(named_parameters or {})
        self._told = frozenset(self._given)  # those that ``named_parameters`` has told
        self._searched = False  # whether the model was looked for that tells them
        self._places = BucketPlaces()
        self._by_place = False  # whether what was loaded is of places, and of no names
        self._unclaimed = False  # whether what was loaded may be of parameters that are not there
        if named_parameters:
            warn_of_unmatched(self._router, named_parameters)
        elif self._router.by_name:
            raise ValueError(
                "a mapping from names of parameters needs named_parameters="
                "model.named_parameters(): DDP tells a hook no names"
            )
        self._elastic = is_elastic()
        if self._elastic:
            of_epochs.add(self)
        else:
            states = runtime.engine.states
            finalizer = weakref.finalize(self, _forget, states, self._label, self._taken)
            finalizer.atexit = False
        self._orders = MemoryOrders()
        self._looked = False  # whether the model's process group is known to be the hook's
        self._alike = False  # whether ranks know what they have loaded
        self._filled = False  # whether a state was loaded before that
        self._furthest = 0  # the step from which tensors without memory count, where ranks differed
        self.reduced = 0  # buckets, which ranks count alike
        self._loaded = ""  # after how many of them a state was loaded last, and which
        self.backward = HookedBackward()

    @property
    def engine(self) -> Engine:
        """What reduces the gradients, over the ranks of DDP's process group."""
        return self._runtime.engine

    @property
    def stale(self) -> bool:
        """Whether ranks have changed since this was made."""
        return self._elastic and not self.of_job

    @property
    def of_job(self) -> bool:
        """Whether the ranks are the job's, and not others beside it."""
        return is_initialized() and current() is self._runtime

    def label(self, p: torch.Tensor | None, otherwise: str) -> str:
        """Return the name under which a parameter without compression travels."""
        known = None if p is None else self._names.get(id(p))
        return f"{self._label}.{known or otherwise}"

    def request(
        self, p: torch.Tensor, grad: torch.Tensor, otherwise: str
    ) -> tuple[Request, Compressor]:
        """Return what is asked for the gradient of ``p``, and its compressor.

        A parameter that has no name yet gets the one given.
        """
        memory, own = self._kept(p)
        name = self._names.get(id(p)) or self._name(p, own or otherwise)
        dtype, shape, place = dtype_of(grad), tuple(grad.shape), place_of(grad, engine=self.engine)
        known = self._requests.get(name)
        asked = None if known is None else (known[0].dtype, known[0].shape, known[0].place)
        if known is None:
            self._claim(name, self._places.see(otherwise))
        if known is None or asked != (dtype, shape, place):
            declared, numel = routed(self._router, name, self._depth), grad.numel()
            exact = self._runtime.engine.sums_in_float32(dtype)
            compressor, collective = carrier(declared, dtype, numel, self._reduction, exact)
            full, op, spec = f"{self._label}.{name}", ReduceOp.AVERAGE, str(compressor)
            request = Request(
                full,
                "allreduce",
                dtype,
                shape,
                op,
                spec,
                collective,
                place=place,
                loaded=self._loaded,
                edition=edition(compressor),
            )
            known = self._requests[name] = (request, compressor)
            self._taken[name] = compressor.traits().stateful
            if memory is not None:
                self._adopt(memory, own, declared, request)
            self._orders.see(name, p, shape)
            self._settle(name, request, compressor)
            if self._furthest:
                self.engine.states.setdefault(request.key, {}).setdefault("step", self._furthest)
        frozen = self._taken[name] and not p.requires_grad  # or some deliver what others do not
        if known[0].frozen != frozen:
            known = self._requests[name] = replace(known[0], frozen=frozen), known[1]
        return known

    def _kept(self, p: torch.Tensor) -> tuple[HookMemory | None, str]:
        """Return what keeps the memory of a parameter when ranks change, and its name there."""
        if not self._elastic:
            return None, ""
        kept = kept_for(p)
        if kept is None:
            raise RuntimeError(
                f"ddp_hook: a parameter of shape {list(p.shape)} belongs to no model of a "
                "TorchState, which would keep what compression holds back when ranks change: "
                f"{AGAIN}"
            )
        return kept

    def _adopt(self, memory: HookMemory, own: str, declared: Compressor, request: Request) -> None:
        """Go on with what an earlier hook has remembered, or with what was loaded into this one."""
        self.backward.enlist(memory)
        with self.engine.at_work():
            state, given = memory.adopt(own, declared), self.engine.states.get(request.key)
            if given:
                put(state, given)
        self.engine.states[request.key] = state
        self.engine.bring(state, request.place)

    def look(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError where DDP's process group has other ranks than the hook's.

        Replicas would part, or gradients of several models be mixed, without a word. Raises
        ValueError where the names that were given are of other parameters than a bucket's
        ``parameters``: these would be compressed by no pattern but "*", and not be found by what
        is loaded.
        """
        if not self._looked:
            refuse_other_ranks(self, self.group)
            self._looked = True
        if not self._told:
            return
        unnamed = [p for p in parameters if id(p) not in self._names]
        if unnamed:
            raise ValueError(
                f"ddp_hook: named_parameters does not name {len(unnamed)} parameter(s) that "
                f"DistributedDataParallel reduces, the first of shape {list(unnamed[0].shape)}: "
                "pass those of the model that is trained, after whatever replaces its parameters"
            )

    def agree(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before the first bucket: let ranks begin alike with what they have loaded. Collective.

        Where they have not loaded the same of what they have in common, it is forgotten, with a
        warning: replicas would part. Where they count other steps, all go on from the last. Raises
        Mismatch, on all ranks, where they name parameters otherwise, and would wait for each other.
        Where hooks before this one have reduced the model of ``parameters``, those of its first
        bucket, ranks that have loaded something are newcomers if others have not: they forget it.
        ``agree_on_loaded`` does this where an optimizer's state is broadcast,
        ``StepAgreement.compare`` behind a step of an optimizer's.
        """
        runtime = self._runtime
        if self._alike:
            return
        found = self._search(parameters)
        if runtime.size == 1:
            self._learn(found)
            return
        with self.engine.at_work():
            states = self._states()
            by = {name: routed(self._router, name, self._depth) for name in states}
            held = [name for name, state in states.items() if shared(state, by[name])]
            furthest = max((int(state.get("step", 0)) for state in states.values()), default=0)
            sums = checkpoint.checksums(states, by)
        names = (len(self._told), checksum(self._told)), checksum(found)
        told = np.zeros((runtime.size, 8), np.int64)  # a row of zeros is of one that has joined
        told[runtime.rank] = 1, *names[0], *sums, furthest, names[1], self._filled
        shape, whole = (told.size,), told.reshape(-1)
        request = Request(f"{self._label}.loaded", dtype="int64", shape=shape, op=ReduceOp.MAX)
        self.engine.submit(request, whole, at_once=True).wait()
        given = {i: f"{n} ({sum_:08x})" for i, (here, n, sum_, *_) in enumerate(told) if here}
        if wrong := differing("ddp_hook: numbers of names, and their checksums,", given):
            raise Mismatch(f"{wrong}; {_NAMES}")
        self._alike = True
        told = told[told[:, 0] == 1]
        if len({*told[:, -2]}) == 1:
            self._learn(found)
        went_on = self._elastic and any(kept[0].step for kept in map(kept_for, parameters) if kept)
        if went_on and len({*told[:, -1]}) > 1:
            if self._filled:
                self._empty(states)
            told = told[told[:, -1] == 0]
        _, _, _, common, steps, counts, _, _ = told.T
        if len({*zip(common, steps, strict=True)}) == 1:
            return
        with self.engine.at_work():
            for name in held:
                forget_shared(states[name], by[name])
            if len(set(steps)) > 1:  # shared random numbers and schedules depend on it
                self._furthest = int(counts.max())
                for state in states.values():
                    state["step"] = self._furthest
        warn_of_common(held, _ADVICE)

    def expect(self, p: torch.Tensor, mean: torch.Tensor) -> None:
        """Let the gradient of ``p`` be ``mean``, also where DDP does not write it, if that matters.

        It does where compressors remember something: what earlier steps held back, and this one has
        sent, would be lost.
        """
        if self._taken[self._names[id(p)]]:
            self.backward.expect(p, mean)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's compressors remember, for ``torch.save``: one file a rank."""
        with self._runtime.engine.at_work():
            states, runtime = self._states(), self._runtime
            compressors = {name: routed(self._router, name, self._depth) for name in states}
            where = runtime.rank, runtime.size
            record = checkpoint.saved(states, *where, compressors=compressors)
            return record | {_ORDERS: self._orders.saved()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank saved. Warns, and starts anew, if it is another rank's."""
        (state,) = given = self._renamed([checkpoint.hooks_record(state)])
        states = self._states_like(given)
        where = self._runtime.rank, self._runtime.size
        checkpoint.restore(states, state, *where, self._tensors(states), advice=_ADVICE)
        self._lay_out(given)
        self._bring(states)

    def load_sharded(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what all ranks of an earlier job saved, of however many.

        Each rank passes all ranks' ``state_dict()``, as to DistributedOptimizer's method. Raises
        ValueError unless every rank's is there once.
        """
        records = [checkpoint.hooks_record(each) for each in checkpoint.every_rank(states)]
        states = self._renamed(records)
        own = self._states_like(states)
        where = self._runtime.rank, self._runtime.size
        checkpoint.reshard(own, states, *where, self._tensors(own))
        self._lay_out(states)
        self._bring(own)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        with self._runtime.engine.at_work():
            return checkpoint.norm(self._states())

    def __deepcopy__(self, memo: Any) -> DdpState:
        """Return itself: of a model that is copied DDP keeps this, and asks no hook any more."""
        return self

    def __reduce__(self) -> tuple[type[KeptState], tuple[dict[str, Any]]]:
        """Be pickled, by itself or with a model, as what ``state_dict`` returns."""
        return KeptState, (self.state_dict(),)

    def watch(self) -> bool:
        """Let this backward pass end with what has failed; False where none is under way."""
        return self.backward.watch(self._drop_unclaimed)

    def _search(self, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the names of the model that holds ``parameters``, where nobody has told any.

        In an elastic job a TorchState has them. Looks once: it goes through all that there is.
        """
        if self._searched or self._given or self._elastic:
            return {}
        self._searched = True
        return names_in_ddp(self, parameters)

    def _learn(self, found: Mapping[str, torch.Tensor]) -> None:
        """Call parameters by the names ``found``, also in what was loaded already.

        Warns of what was loaded of others, or does not fit, which is forgotten.
        """
        if not found:
            return
        self._call(found)
        held = self._states()
        names = checkpoint.renamed({"states": {name: name for name in held}}, found)["states"]
        self._by_place = not any(name in found for name in names)
        strange = []
        for name, before in names.items():
            kept = name in found or (self._by_place and is_place(name))
            strange += self._move(before, name if kept else None)
        warn_of_misfits(strange)

    def _claim(self, name: str, place: str) -> None:
        """Let a parameter go on with what was saved of its ``place`` by a hook without names."""
        if self._by_place and name in self._given:
            warn_of_misfits(self._move(place, name))

    def _drop_unclaimed(self) -> None:
        """Forget what was loaded of parameters that DDP has not got, and warn of it."""
        if not self._unclaimed:
            return
        self._unclaimed = self._by_place = False
        strange = []
        for name in self._states().keys() - self._taken.keys():
            strange += self._move(name, None)
        warn_of_misfits(sorted(strange))

    def _move(self, before: str, name: str | None) -> list[str]:
        """Keep the state ``before`` under ``name``, or forget it; return in words what is lost."""
        states = self.engine.states
        with self.engine.at_work():
            state = states.pop(f"{self._label}.{before}", None)
            if state is None:
                return []
            self._orders.rename(before, name)
            if name is None:
                return [] if bare(state) else [f"{before!r} is not in this job"]
            states[f"{self._label}.{name}"] = state
            compressor, numel = self._tensors([name])[name]
            told = fit(state, None, compressor, numel, self._runtime.size)
        return [f"{name!r} {what}" for what in told]

    def _renamed(self, states: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return states under this job's names, where the parameters' names were given."""
        return [
            checkpoint.renamed(state, self._given) if self._given else state for state in states
        ]

    def _states_like(self, given: Sequence[Mapping[str, Any]]) -> dict[str, State]:
        """Return the states, with new ones for what is ``given`` of this job and not there yet."""
        for name in dict.fromkeys(name for each in given for name in each["states"]):
            if not self._given or name in self._given:
                self._runtime.engine.states.setdefault(f"{self._label}.{name}", {})
        return self._states()

    def _tensors(self, names: Iterable[str]) -> dict[str, checkpoint.Tensor]:
        """Return what compresses each gradient, and how many elements it has if that is known."""
        numels = self._given | {name: asked.numel for name, (asked, _) in self._requests.items()}
        return {name: (routed(self._router, name, self._depth), numels.get(name)) for name in names}

    def _lay_out(self, given: Sequence[Mapping[str, Any]]) -> None:
        """After a load: let states be in the order of this job's gradients, as far as it is known.

        A file of before that was told says nothing.
        """
        for each in given:
            if _ORDERS in each:
                for name in self._orders.load(each["states"], each[_ORDERS]):
                    self._settle(name, *self._requests[name])

    def _empty(self, states: Mapping[str, State]) -> None:
        """Forget ``states`` of a checkpoint: the ranks that this one joins have gone on from it."""
        with self.engine.at_work():
            if checkpoint.norm(states):
                warn_of_paid()
            for state in states.values():
                put(state, {})

    def _settle(self, name: str, request: Request, compressor: Compressor) -> None:
        state = self.engine.states.get(request.key)
        if state is not None:
            self._orders.settle(name, state, compressor, self._runtime.size)

    def _bring(self, states: Mapping[str, State]) -> None:
        """After a load: let states lie where they are used, and ranks compare whether all loaded.

        Before the first step they ``agree`` on it.
        """
        self._filled = self._unclaimed = True
        if self._alike:
            by = {name: routed(self._router, name, self._depth) for name in states}
            common, steps = checkpoint.checksums(states, by)
            self._loaded = f"{self.reduced + 1} ({common ^ steps:08x})"
        for name, (request, _) in self._requests.items():
            if name in states:
                self._runtime.engine.bring(states[name], request.place)
        self._requests = {
            name: (replace(request, loaded=self._loaded), compressor)
            for name, (request, compressor) in self._requests.items()
        }

    def _states(self) -> dict[str, State]:
        start = f"{self._label}."
        found = self._runtime.engine.states.items()
        return {k.removeprefix(start): v for k, v in found if str(k).startswith(start)}  # type: ignore[attr-defined]

    def _call(self, named: Mapping[str, torch.Tensor]) -> None:
        """Call parameters by these names."""
        self._given = {name: _numel(p) for name, p in named.items()}
        self._depth = wrapped_in(self._given)
        for name, p in named.items():
            self._name(p, name)

    def _name(self, p: torch.Tensor, name: str) -> str:
        if name in self._taken:  # with static_graph all of the first step's buckets have one number
            name = f"{name}.{len(self._taken)}"
        self._taken[name] = False
        names, own = self._names, id(p)
        names[own] = name
        self._seen.append(weakref.ref(p, lambda _: names.pop(own, None)))
        return name


def _numel(p: torch.Tensor) -> int:
    """Return how many real numbers the gradient of a parameter has."""
    return p.numel() * (2 if p.is_complex() else 1)


class KeptState:
    """What a pickle of a hook's state is loaded as: a new hook's state can take over from it."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Return what the pickled state's ``state_dict()`` returned."""
        return self._kept

    def watch(self) -> bool:
        """Raise RuntimeError: there is no job behind this."""
        raise RuntimeError(
            "this hook's state was loaded from a pickle, which has no connections: register "
            "ddp_hook(...) anew, and pass state_dict() of this one to its state's load_state_dict()"
        )


of_epochs: weakref.WeakSet[DdpState] = weakref.WeakSet()  # those made in an elastic job


def _forget(states: dict[Any, State], label: str, names: Iterable[str]) -> None:
    """Let go of what compressors remember for a model that is gone."""
    for name in names:
        state = states.get(f"{label}.{name}")
        if state is not None:
            state.clear()
