"""Chains: one compressor applied to the values that another one sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.composed_batches import chained
from ringlet.compressors.base.contract import (
    Compressor,
    Exchange,
    Part,
    Payload,
    Round,
    Traits,
    encoded,
    keeps,
    kept_losses,
)
from ringlet.compressors.base.feedback import scale
from ringlet.compressors.base.modifier import finishes
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.options import wrapped


class Chain(Compressor, joins=True):
    """``first | second``: the values of first's payload travel compressed by second.

    ``"topk(ratio=0.01) | int8"`` sends indices as they are and values in 8 bits. Which array
    holds the values, first's ``chained_part`` says; second's arrays travel as ``values.codes``.
    Where both exchange in rounds, as in ``"powersgd | shared_int"``, second takes the place of
    every round in which first adds float32 values up, or averages them.
    """

    first: Compressor = wrapped()
    second: Compressor = wrapped()

    def validate(self) -> None:
        """Refuse what cannot be chained."""
        for side, other in ((self.first, self.second), (self.second, self.first)):
            if not side.is_bound():
                turned = f"; write '{other} | {side}'" if other.is_bound() else ""
                raise CompressorError(
                    f"{side.label()!r} modifies what stands to its left: {self}{turned}"
                )
        rounds = [side.traits().combine == "rounds" for side in (self.first, self.second)]
        if all(rounds):
            self._validate_rounds()
            return
        if rounds[1]:
            raise CompressorError(
                f"{self.second} exchanges in rounds, which cannot be chained behind the payloads "
                f"of {self.first}, of which every rank's own travels. Use one of the two"
            )
        if rounds[0]:
            raise CompressorError(
                f"{self.first} exchanges in rounds, in which values are added up; {self.second} "
                f"would have to be decoded first. Behind it goes what exchanges in rounds too: "
                f"'{self.first} | shared_int'"
            )
        if names := kept_losses(self.first):
            raise CompressorError(
                f"{self.first} remembers what its payloads decode to, in {names}, which "
                f"{self.second} behind it would change; write a modifier last, as in "
                f"'... | {self.second} | ...', and use any other compressor alone"
            )
        if self.first.traits().combine == "sum":
            raise CompressorError(
                f"{self.first} sends values that are summed on the wire; "
                f"{self.second} behind it would have to be decoded first. Use one of the two"
            )
        if self.first.chained_part() is None:
            raise CompressorError(
                f"nothing can be chained behind {self.first}: it sends no float32 values that "
                f"{self.second} could compress. Use one of the two, or a sparsifier before it: "
                f"'topk | {self.second}'"
            )
        for side, other in ((self.first, self.second), (self.second, self.first)):
            if finishes(side):
                raise CompressorError(
                    f"{side} changes the sum of what ranks sent, in finish(), and together with "
                    f"{other} it would never see one. Use one of the two"
                )
        if kept_losses(self.second):
            raise CompressorError(self._remembers())

    def _validate_rounds(self) -> None:
        if self.second.traits().stateful:
            raise CompressorError(self._remembers())
        if self.first.chained_part() is None:
            raise CompressorError(
                f"nothing can be chained behind {self.first}: what it adds up are integers. Use "
                "one of the two"
            )

    def _remembers(self) -> str:
        return (
            f"{self.second} remembers values, and those of {self.first} stand for something else "
            "in every step; write the modifier last: '... | ef'"
        )

    def is_bound(self) -> bool:
        """Whether both sides can compress."""
        return self.first.is_bound() and self.second.is_bound()

    def behind(self, first: Compressor) -> Compressor:
        """Return ``first | self`` as the chain that the text reads as, from the left."""
        return (first | self.first) | self.second

    def traits(self) -> Traits:
        """Return what is left of both sides' promises."""
        first, second = self.first.traits(), self.second.traits()
        rounds = first.combine == "rounds"
        return dataclasses.replace(
            Traits("rounds", in_place=first.in_place) if rounds else Traits(),
            fixed_size=first.fixed_size and second.fixed_size,
            stateful=first.stateful or second.stateful,
            gradient_units=first.gradient_units + second.gradient_units,
            scales=first.scales and second.scales,
            min_size=max(first.min_size, second.min_size),
        )

    @property
    def part(self) -> str:
        """The array of first's payload that second compresses."""
        name = self.first.chained_part()
        assert name is not None, "validate() refuses it"
        return name

    def chained_part(self) -> str | None:
        """Return second's part, where it has one."""
        inner = self.second.chained_part()
        return None if inner is None else f"{self.part}.{inner}"

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange first's rounds, where they add float32 values up, as second does."""
        rounds, held = self.first.exchange(x, out, ctx, local), ctx.workspace.held
        try:
            asked, place = _next(rounds, None), 0
            while asked is not None:
                (values, op), share = asked, asked.share
                if op == "max" or values.dtype != np.float32:
                    asked = _next(rounds, (yield asked))
                    continue
                inner, n = ctx.child(f"round{place}", values.size), values.size
                with held(n) as combined, held(0 if share is None else n) as own:
                    kept = None if share is None else own
                    yield from self.second.exchange(values, combined, inner, kept)
                    if op == "sum":
                        scale(combined, ctx.size, ctx)
                    if share is not None:
                        share[...] = own
                    asked = _next(rounds, combined)
                place += 1
        finally:
            rounds.close()

    def consolidate(self, states: Sequence[State]) -> State:
        """Consolidate as first does: what second remembers it keeps apart."""
        return self.first.consolidate(states)

    def regrouped(self, state: State) -> State:
        """Go on with what first does."""
        return self.first.regrouped(state)

    def units_size(self, name: str, n: int) -> int:
        """Return first's: what second remembers it keeps apart."""
        return self.first.units_size(name, n)

    def chained_count(self, payload: Payload, n: int) -> int:
        """Return second's count."""
        outer, inner = self._split(payload)
        return self.second.chained_count(inner, self.first.chained_count(outer, n))

    def divergence(self) -> str | None:
        """Return a side's reason."""
        return self.first.divergence() or self.second.divergence()

    def rotated_divergence(self) -> str | None:
        """Return a side's reason."""
        return self.first.rotated_divergence() or self.second.rotated_divergence()

    def layout(self, n: int) -> tuple[Part, ...]:
        """Return first's arrays with its values replaced by second's arrays."""
        parts: list[Part] = []
        for part in self.first.layout(n):
            if part.name == self.part:
                inner = self.second.layout(part.elements)
                parts += [p._replace(name=f"{part.name}.{p.name}") for p in inner]
            else:
                parts.append(part)
        return tuple(parts)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress with first, then its values with second."""
        payload, name = dict(encoded(self.first, x, ctx)), self.part
        if name not in payload:
            last = self.first
            while isinstance(last, Chain):
                last = last.second
            raise CompressorError(
                f"{self.first} sends {sorted(payload)} and no {name!r}, which {self.second} behind "
                f"it would compress; let chained_part() of {last.label()} return which of its "
                "arrays holds float32 values, or None"
            )
        values = payload.pop(name)
        inner = encoded(self.second, values, ctx.child("chain", values.size))
        return payload | {f"{name}.{key}": array for key, array in inner.items()}

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Do the same into the payload's arrays, values in between in scratch memory."""
        outer, inner = self._split(payload)
        with self._values(outer, x.size, ctx) as values:
            self.first.encode_into(x, outer | {self.part: values}, ctx)
            self.second.encode_into(values, inner, ctx.child("chain", values.size))

    def keep_residual(self, target: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        """Let first do it, which may look at what it sent alone."""
        with self._decoded(payload, target.size, ctx) as whole:
            self.first.keep_residual(target, whole, residual, ctx)

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode second's arrays into first's values, then those."""
        with self._decoded(payload, out.size, ctx) as whole:
            self.first.decompress(whole, out, ctx)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode second's arrays into first's values, then add those."""
        with self._decoded(payload, out.size, ctx) as whole:
            self.first.accumulate(whole, out, ctx)

    def batched(self) -> Batched | None:
        """Both sides' kernels for many tensors a call, where both have them."""
        own = keeps(self, Chain, "encode_into", "decompress", "accumulate", "keep_residual")
        if not own or not keeps(self, Compressor, "sum_into", "feedback_into"):
            return None
        first, second = self.first.batched(), self.second.batched()
        if first is None or second is None:
            return None
        if first.memories or second.memories:
            return None
        return chained(self.label, self.layout, self.part, self._count, first, second)

    def at(self, step: int) -> Compressor:
        """Chain what both sides' schedules say; in steps that first sends densely, nothing is."""
        return self._of(self.first.at(step), self.second.at(step))

    def over_steps(self) -> Sequence[Compressor]:
        """Chain what both sides may be."""
        seconds = self.second.over_steps()
        return [self._of(first, second) for first in self.first.over_steps() for second in seconds]

    def _of(self, first: Compressor, second: Compressor) -> Compressor:
        traits = first.traits()
        if traits.combine == "sum" and traits.omega == 0:  # values as they are, added on the wire
            return first
        unchanged = first is self.first and second is self.second
        return self if unchanged else Chain(first=first, second=second)

    def warm_up(self, ctx: Context) -> None:
        """Warm both sides up, and what is between them."""
        self.first.warm_up(ctx)
        self.second.warm_up(ctx)
        precompile(self, ctx)

    def _split(self, payload: Payload) -> tuple[Payload, Payload]:
        """Return the arrays of first, its values left out, and of second."""
        prefix, outer, inner = f"{self.part}.", {}, {}
        for name, array in payload.items():
            if name.startswith(prefix):
                inner[name.removeprefix(prefix)] = array
            else:
                outer[name] = array
        return outer, inner

    def _count(self, n: int) -> int:
        """Return how many values first sends of ``n`` elements, in payloads of fixed size."""
        return next(p.elements for p in self.first.layout(n) if p.name == self.part)

    def _values(self, outer: Payload, n: int, ctx: Context) -> AbstractContextManager[Array]:
        """Lend scratch for first's values, which chains within chains do not share."""
        return ctx.workspace.held(self.first.chained_count(outer, n))

    @contextmanager
    def _decoded(self, payload: Payload, n: int, ctx: Context) -> Iterator[Payload]:
        """Lend first's payload, values included."""
        outer, inner = self._split(payload)
        with self._values(outer, n, ctx) as values:
            self.second.decompress(inner, values, ctx.child("chain", values.size))
            yield outer | {self.part: values}

    def __str__(self) -> str:
        return f"{self.first} | {self.second}"

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


def _next(rounds: Exchange, received: Array | None) -> Round | None:
    """Return the next round; None at the end."""
    try:
        return next(rounds) if received is None else rounds.send(received)
    except StopIteration:
        return None
