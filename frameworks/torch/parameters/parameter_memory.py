"""What this rank's compressors remember of a model's parameters: see ``Memory``.

It outlives a new compression, another optimizer for the same parameters, and the job, by way of
checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ringlet.compressors import BF16, FP16, Compressor, NoCompression, Router
from ringlet.compressors.states import (
    bare,
    carry_over,
    counts_in_common,
    of_gradient,
    prescale,
    rescale,
)
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.callers import outside
from ringlet.ring.dtypes import Array
from ringlet.shared.memory import Memory, at_work, unchanged_on_error
from ringlet.shared.residual_store import PREDIVIDE, is_own, predivided, remembered
from ringlet.torch.parameters import checkpoint
from ringlet.torch.parameters.frozen import is_still
from ringlet.torch.parameters.naming import routed, warn_of_unmatched, wrapped_in
from ringlet.torch.tensors.placement import from_engine


class ParameterMemory(Memory):
    """The memory of ``parameters``, by name, that ``router`` has compressors for.

    What it holds is of gradients divided by ``predivide``.
    """

    compressor_of: Callable[[str], Compressor]

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        router: Router,
        averages: bool,
        process_set: ProcessSet,
        predivide: float = 1.0,
    ) -> None:
        self.parameters, self._process_set = parameters, process_set
        self._depth = wrapped_in(parameters)
        super().__init__(self._routed(router), averages, predivide)
        self.states = {name: {} for name in parameters}
        self._first = router
        self.changed: Router | None = None  # what ``change`` was given last
        self.loaded = checkpoint.Loaded.NOTHING  # since ranks agreed on it last
        # The parameters of which it is in common, with a checksum of what is for every rank.
        self.loaded_in_common: tuple[tuple[str, str], ...] = ()

    def compressors(self, router: Router | None = None) -> dict[str, Compressor]:
        """Return what compresses each parameter's gradient, or would do so by ``router``."""
        compressor_of = self.compressor_of if router is None else self._routed(router)
        return {name: compressor_of(name) for name in self.parameters}

    def inherit(self, before: ParameterMemory, factor: float) -> None:
        """Go on with what ``before`` remembers of the same parameters, under whatever names.

        ``factor`` is the loss scale of this memory over that of ``before``.
        """
        old_names = {id(p): name for name, p in before.parameters.items()}
        with at_work():
            for name, p in self.parameters.items():
                if (old := old_names.get(id(p))) is None:
                    continue
                state = self.states[name] = before.states[old]
                then, now = before.compressor_of(old), self.compressor_of(name)
                carry_over(state, then, now, *before._reduction)
                if factor != 1.0:
                    rescale(state, now, factor)
        self._convert(before.predivide)

    def change(self, router: Router) -> None:
        """Go on with other compressors. The first rank warns of what is forgotten."""
        warn_of_unmatched(router, self.parameters)
        self.changed = router
        before, self.compressor_of = self.compressor_of, self._routed(router)
        lost = []
        with at_work():
            for name, state in self.states.items():
                then, now = before(name), self.compressor_of(name)
                forgotten = carry_over(state, then, now, *self._reduction)
                if forgotten:
                    lost.append(f"{now} forgets {forgotten} of {name!r}, which {then} kept")
        self.note(self.loaded)
        if lost and current().rank == 0:
            more = f"; and so on of {len(lost) - 1} more" if len(lost) > 1 else ""
            warnings.warn(f"set_compression: {lost[0]}{more}", stacklevel=outside())

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Return a context after which, if it raises, this memory is what it was before it."""
        kept = self.compressor_of, self.changed, self.loaded, self.loaded_in_common
        try:
            with unchanged_on_error(self.states):
                yield
        except BaseException:
            self.compressor_of, self.changed, self.loaded, self.loaded_in_common = kept
            raise

    def follow(self, changed: Router | None) -> None:
        """Go on with the compressors of another rank: what it ``changed`` to, or began with."""
        if str(changed) != str(self.changed):
            self.change(self._first if changed is None else changed)
            self.changed = changed

    def take_owed(self, name: str) -> Array | None:
        """Return what is held back of a parameter's gradient, flat, and remember nothing of it."""
        state = self.states[name]
        if bare(state):
            return None
        with self.lock, at_work():
            found: Array | None = of_gradient(state, self.compressor_of(name), *self._reduction)
            for key in state.keys() - {"step"}:
                del state[key]
        return found

    def pay_back(self) -> bool:
        """Add to the gradients what is held back of them, and hold it back no more.

        Return whether that is all: nothing is added to frozen parameters, which it would move.
        """
        still = {name for name, p in self.parameters.items() if is_still(p)}
        paid = self.take_residuals([name for name in self.parameters if name not in still])
        for name, residual in paid.items():
            p = self.parameters[name]
            owed = from_engine(residual, p.device).reshape(p.shape) * self.predivide
            with torch.no_grad():
                if p.grad is not None and p.grad.is_sparse:
                    owed = owed.to_sparse(p.grad.sparse_dim())
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = (owed + grad).to(p.dtype)
        return all(bare(self.states[name]) for name in still)

    # -- checkpoints ------------------------------------------------------------------------------

    def saved(self, step: int) -> dict[str, Any] | None:
        """Return what is remembered, and ``step``, for a checkpoint.

        None where nothing depends on either, because all gradients travel as they are, or cast.
        """
        plain = all(isinstance(c, NoCompression | FP16 | BF16) for c in self.compressors().values())
        if plain and not remembered(self.states):
            return None
        runtime = current()
        with at_work():
            where = runtime.rank, runtime.size, step
            record = checkpoint.saved(self.states, *where, self.compressors())
        return record | {PREDIVIDE: self.predivide}

    def load(self, kept: Mapping[str, Any] | None) -> int:
        """Go on with what this rank ``saved``; return the step.

        Warns, and starts anew, if it is another rank's, or None.
        """
        rank, size = current().rank, current().size
        if kept is not None:
            kept = checkpoint.renamed(kept, self.parameters)
        then = self._predivided(kept)
        # In an elastic job a process set may not be there again yet: then it is of those before.
        among, averages, _ = self._reduction
        where, how = (self.states, kept, rank, size), (averages, among, then)
        step = checkpoint.restore(*where, self._tensors(), *how)
        self._convert(then)
        ours = kept is not None and is_own(kept, rank, size)
        holds = kept is not None and remembered(kept["states"])
        self.note(checkpoint.Loaded.OWN if ours and holds else checkpoint.Loaded.OTHER)
        return step

    def load_shards(self, shards: Sequence[Mapping[str, Any]]) -> int:
        """Go on with what all ranks of an earlier job ``saved``; return the step."""
        runtime = current()
        shards = [checkpoint.renamed(shard, self.parameters) for shard in shards]
        where = self.states, shards, runtime.rank, runtime.size
        then = self._predivided(shards[0])
        how = self.averages, self._size(), then
        step = checkpoint.reshard(*where, self._tensors(), *how)
        self._convert(then)
        self.note(checkpoint.Loaded.OWN)
        return step

    @property
    def recounted(self) -> bool:
        """Whether something was loaded since ranks agreed last, and they have to count alike."""
        return self.loaded is not checkpoint.Loaded.NOTHING and bool(self.counts_in_common())

    def counts_in_common(self) -> list[tuple[str, int]]:
        """Return how often tensors were compressed of which ranks must have counted the same."""
        states = sorted(self.states.items())
        needed = [(n, state) for n, state in states if counts_in_common(self.compressor_of(n))]
        return [(name, int(state.get("step", 0))) for name, state in needed]

    def agreed(self) -> None:
        """Note that ranks have agreed on what each has loaded."""
        self.note(checkpoint.Loaded.NOTHING)

    # -- inside -----------------------------------------------------------------------------------

    def note(self, loaded: checkpoint.Loaded) -> None:
        """Note what was ``loaded``, before a step adds to it."""
        self.loaded = loaded
        self.loaded_in_common = ()
        if loaded is not checkpoint.Loaded.NOTHING:
            names = self.in_common()
            with at_work():
                kept = [checkpoint.factors(self.states[n], self.compressor_of(n)) for n in names]
            self.loaded_in_common = tuple(zip(names, kept, strict=True))

    def _routed(self, router: Router) -> Callable[[str], Compressor]:
        return partial(routed, router, depth=self._depth)

    def _size(self) -> int:
        return self._process_set.size()

    @property
    def _reduction(self) -> tuple[int, bool, float]:
        """What states are of: so many ranks, whether those average, and what they predivide by."""
        return self.among or self._size(), self.averages, self.predivide

    def _predivided(self, kept: Mapping[str, Any] | None) -> float:
        """Return by what gradients were divided; older files do not say, and are taken as ours."""
        return predivided(kept or {}, self.predivide)

    def _convert(self, then: float) -> None:
        """Make of what is held back of gradients divided by ``then`` what it is here."""
        if then != self.predivide:
            with at_work():
                for name, state in self.states.items():
                    prescale(state, self.compressor_of(name), then / self.predivide)

    def _tensors(self) -> dict[str, checkpoint.Tensor]:
        return {name: (self.compressor_of(name), p.numel()) for name, p in self.parameters.items()}
