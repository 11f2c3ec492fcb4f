"""No compression."""

from __future__ import annotations

from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.specs.registry import register

_TRAITS = Traits("sum", fixed_size=True, granularity=1, omega=0.0, delta=1.0, min_size=0)


@register("none")
class NoCompression(Compressor):
    """Send values as they are, in the dtype they have."""

    def traits(self) -> Traits:
        """Sums on the wire, exact, can be cut anywhere."""
        return _TRAITS

    def layout(self, n: int) -> tuple[Part, ...]:
        """n values."""
        return (Part("values", "float32", n),)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Return a copy: a payload never aliases its input."""
        return {"values": x.copy()}

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Copy the values."""
        payload["values"][...] = x

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the values."""
        out += payload["values"]

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Copy the values."""
        out[...] = payload["values"]
