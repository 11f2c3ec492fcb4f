"""Chains: one compressor applied to the values that another one sends."""

from __future__ import annotations

import dataclasses

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, Traits
from ringlet.compressors.errors import CompressorError
from ringlet.compressors.options import wrapped


class Chain(Compressor):
    """``first | second``: the ``values`` of first's payload travel compressed by second.

    ``"topk(ratio=0.01) | int8"`` sends indices as they are and values in 8 bits.
    """

    first: Compressor = wrapped()
    second: Compressor = wrapped()

    def validate(self) -> None:
        """Refuse what cannot be chained."""
        for side in (self.first, self.second):
            if not side.is_bound():
                raise CompressorError(f"{side.label()!r} modifies what stands to its left: {self}")
        for side in (self.first, self.second):
            if side.traits().combine == "rounds":
                raise CompressorError(f"{side} exchanges in rounds, which cannot be chained")
        if self.first.traits().stateful:
            raise CompressorError(
                f"{self.first} remembers what its payloads decode to, which {self.second} behind "
                f"it would change; write the modifier last: '... | {self.second} | ...'"
            )
        if self.first.traits().combine == "sum":
            raise CompressorError(
                f"{self.first} sends values that are summed on the wire; "
                f"{self.second} behind it would have to be decoded first. Use one of the two"
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
        return dataclasses.replace(
            Traits(),
            fixed_size=first.fixed_size and second.fixed_size,
            stateful=first.stateful or second.stateful,
            min_size=max(first.min_size, second.min_size),
        )

    def layout(self, n: int) -> tuple[Part, ...]:
        """Return first's arrays with its values replaced by second's arrays."""
        parts: list[Part] = []
        for part in self.first.layout(n):
            if part.name == "values":
                inner = self.second.layout(part.elements)
                parts += [
                    part._replace(name=f"values.{p.name}", dtype=p.dtype, elements=p.elements)
                    for p in inner
                ]
            else:
                parts.append(part)
        return tuple(parts)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress with first, then its values with second."""
        payload = dict(self.first.compress(x, ctx))
        name = self.first.chained_part(payload)
        values = payload.pop(name)
        inner = self.second.compress(values, ctx.child("chain", values.size))
        return payload | {f"{name}.{key}": array for key, array in inner.items()}

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode second's arrays into first's values, then those."""
        outer = {name: a for name, a in payload.items() if "." not in name}
        inner = {name.partition(".")[2]: a for name, a in payload.items() if "." in name}
        count = self._count(outer, out.size)
        values = ctx.workspace.array("chain", count)
        self.second.decompress(inner, values, ctx.child("chain", count))
        self.first.decompress(outer | {"values": values}, out, ctx)

    def at(self, step: int) -> Compressor:
        """Chain what both sides' schedules say."""
        first, second = self.first.at(step), self.second.at(step)
        unchanged = first is self.first and second is self.second
        return self if unchanged else Chain(first=first, second=second)

    def warm_up(self, ctx: Context) -> None:
        """Warm both sides up."""
        self.first.warm_up(ctx)
        self.second.warm_up(ctx)

    def _count(self, outer: Payload, n: int) -> int:
        if self.first.traits().fixed_size:
            return next(p.elements for p in self.first.layout(n) if p.name == "values")
        return next(iter(outer.values())).size

    def __str__(self) -> str:
        return f"{self.first} | {self.second}"

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"
