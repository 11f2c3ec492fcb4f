"""Modifiers: compressors that change how the compressor to their left works."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringlet.compressors.base.contract import (
    Compressor,
    Exchange,
    Part,
    Payload,
    Traits,
    keeps,
)
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.options import wrapped


class Modifier(Compressor):
    """Base of modifiers: wraps the compressor in ``inner`` and passes everything on to it.

    ``Int8() | ErrorFeedback()`` is ``ErrorFeedback(inner=Int8())``. A subclass that overrides
    ``compress`` or ``decompress`` is encoded and decoded by these alone, unless it overrides what
    is faster too. ``ctx.state`` is one dict for both: keep there what you remember under names
    that what you wrap does not use.
    """

    inner: Compressor | None = wrapped()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner is None or not self.is_bound():
            return
        self._refuse_rounds()
        if keeps(self, Modifier, "at"):
            for later in self.inner.over_steps():
                if later is not self.inner:
                    self._refuse(later)

    def _refuse(self, later: Compressor) -> None:
        """Raise what wrapping ``later``, a step's compressor, would raise; of that step alone."""
        then = object.__new__(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(then, field.name, getattr(self, field.name))
        object.__setattr__(then, "inner", later)
        then.validate()
        then._refuse_rounds()

    def _refuse_rounds(self) -> None:
        inner = self.wrapped_compressor
        if inner.traits().combine == "rounds" and self._passed_over(
            "exchange", "compress", "decompress"
        ):
            raise CompressorError(
                f"{inner} exchanges in rounds, without payloads, and {self.label()} changes "
                "payloads alone: it would do nothing. Define exchange(x, out, ctx, local) in it, "
                "too, or wrap another compressor"
            )

    def _passed_over(self, method: str, *basic: str) -> bool:
        """Whether ``method`` is left to the wrapped compressor, but not what it stands for."""
        return keeps(self, Modifier, method) and not keeps(self, Modifier, *basic)

    @property
    def wrapped_compressor(self) -> Compressor:
        """The compressor to the left; CompressorError when there is none."""
        if self.inner is None:
            raise CompressorError(
                f"{self.label()!r} modifies the compressor to its left, and there is none; "
                f"write for example 'int8 | {self.label()}'"
            )
        return self.inner

    def is_bound(self) -> bool:
        """Whether there is a compressor to the left, all the way down."""
        return self.inner is not None and self.inner.is_bound()

    def behind(self, first: Compressor) -> Compressor:
        """Return ``first | self``: wrap ``first``, below whatever is wrapped already."""
        inner = first if self.inner is None else first | self.inner
        return self.replace(inner=inner)

    def traits(self) -> Traits:
        """Return the wrapped compressor's traits."""
        return self.wrapped_compressor.traits()

    def layout(self, n: int) -> tuple[Part, ...]:
        """Return the wrapped compressor's layout."""
        return self.wrapped_compressor.layout(n)

    def chained_part(self) -> str | None:
        """Return the wrapped compressor's part."""
        return self.wrapped_compressor.chained_part()

    def chained_count(self, payload: Payload, n: int) -> int:
        """Return the wrapped compressor's count."""
        return self.wrapped_compressor.chained_count(payload, n)

    def divergence(self) -> str | None:
        """Return the wrapped compressor's reason."""
        return self.wrapped_compressor.divergence()

    def rotated_divergence(self) -> str | None:
        """Return the wrapped compressor's reason."""
        return self.wrapped_compressor.rotated_divergence()

    def refuse_second_memory(self) -> None:
        """Raise CompressorError where a memory of payloads is not the only one, or diverges."""
        traits = self.wrapped_compressor.traits()
        if traits.combine == "rounds":
            raise CompressorError(
                f"{self.inner} exchanges in rounds; {self.label()} needs a payload to decode. "
                "Use 'ef'"
            )
        if traits.stateful:
            raise CompressorError(
                f"{self.inner} remembers what it lost; {self.label()} takes its place"
            )
        self.refuse_divergence()

    def refuse_divergence(self) -> None:
        """Raise CompressorError if a memory of what was lost would grow without bound."""
        inner = self.wrapped_compressor
        for now in (inner, inner.at(0)):  # a schedule may begin with harder compression
            reason = now.divergence()
            if reason is not None:
                whole = f"'{inner} | scaled{str(self).removeprefix(str(inner))}'"
                reason = reason.replace(f"'{inner} | scaled'", whole)
                raise CompressorError(f"{self.label()} behind {now} would diverge: {reason}")

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress with the wrapped compressor."""
        return self.wrapped_compressor.compress(x, ctx)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Encode with the wrapped compressor."""
        if self._passed_over("encode_into", "compress"):
            super().encode_into(x, payload, ctx)
        else:
            self.wrapped_compressor.encode_into(x, payload, ctx)

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode with the wrapped compressor."""
        self.wrapped_compressor.decompress(payload, out, ctx)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Accumulate with the wrapped compressor."""
        if self._passed_over("accumulate", "decompress"):
            super().accumulate(payload, out, ctx)
        else:
            self.wrapped_compressor.accumulate(payload, out, ctx)

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Sum with the wrapped compressor."""
        if self._passed_over("sum_into", "decompress", "accumulate"):
            super().sum_into(payloads, out, ctx)
        else:
            self.wrapped_compressor.sum_into(payloads, out, ctx)

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange as the wrapped compressor does."""
        yield from self.wrapped_compressor.exchange(x, out, ctx, local)

    def finish(self, out: Array, ctx: Context) -> None:
        """Finish as the wrapped compressor does."""
        self.wrapped_compressor.finish(out, ctx)

    def consolidate(self, states: Sequence[State]) -> State:
        """Consolidate as the wrapped compressor does, and what is remembered here."""
        return super().consolidate(states) | self.wrapped_compressor.consolidate(states)

    def regrouped(self, state: State) -> State:
        """Go on with what the wrapped compressor does, and what is remembered here."""
        inner = self.wrapped_compressor
        of_inner = inner.traits().gradient_units
        own = {k: v for k, v in super().regrouped(state).items() if k not in of_inner}
        return own | inner.regrouped(state)

    def units_size(self, name: str, n: int) -> int:
        """Return the wrapped compressor's, of what that one remembers."""
        inner = self.wrapped_compressor
        return inner.units_size(name, n) if name in inner.traits().gradient_units else n

    def uncompressed(self) -> Compressor | None:
        """Return the wrapped compressor's."""
        return self.wrapped_compressor.uncompressed()

    def over_steps(self) -> Sequence[Compressor]:
        """Wrap what the wrapped compressor may be; this alone where ``at`` is another."""
        if self.inner is None or not keeps(self, Modifier, "at"):
            return [self]
        every = self.inner.over_steps()
        return [self if now is self.inner else self.replace(inner=now) for now in every]

    def at(self, step: int) -> Compressor:
        """Wrap what the wrapped compressor's schedule says."""
        now = self.wrapped_compressor.at(step)
        return self if now is self.inner else self.replace(inner=now)

    def warm_up(self, ctx: Context) -> None:
        """Warm the wrapped compressor up, and what is done to it."""
        self.wrapped_compressor.warm_up(ctx)
        precompile(self, ctx)

    def __str__(self) -> str:
        own = super().__str__()
        return own if self.inner is None else f"{self.inner} | {own}"

    def __repr__(self) -> str:
        own = super().__repr__()
        return own if self.inner is None else f"{self.inner!r} | {own}"


def finishes(compressor: Compressor) -> bool:
    """Whether the compressor, or one inside it, defines finish() rather than passing it on."""
    inside = [part for part in vars(compressor).values() if isinstance(part, Compressor)]
    own = type(compressor).finish not in (Compressor.finish, Modifier.finish)
    return own or any(map(finishes, inside))
