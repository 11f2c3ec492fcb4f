"""No compression."""

from __future__ import annotations

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits, keeps
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

    def batched(self) -> Batched | None:
        """Kernels for many tensors a call, of use to modifiers: alone this needs none."""
        if not keeps(self, NoCompression, "compress", "encode_into", "accumulate", "decompress"):
            return None
        from ringlet.compressors.kernels.cpu.common.batched import batch_decoder, batch_encoder
        from ringlet.compressors.kernels.cpu.dense import none

        plain = batch_encoder(none.encode_placed)
        fed = batch_encoder(none.encode_feedback_placed)
        decode = batch_decoder(none.decode_placed)
        return Batched(
            self.label,
            self.layout,
            ("values",),
            lambda *tables: plain(*tables, ()),
            lambda *tables: fed(*tables, ()),
            lambda *tables: decode(*tables, ()),
        )
