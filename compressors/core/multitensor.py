"""Multi-tensor kernels: how one compressor works on many tensors a launch.

What is computed for a tensor does not depend on what shares its launch: results are those of the
methods that take a single tensor, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.traits import Payload


class Spaced(NamedTuple):
    """Where payloads that are summed lie: each ``stride`` bytes behind the one before."""

    payloads: int
    stride: int


class Encoding(NamedTuple):
    """One tensor to encode: ``n`` values ``x``, into the arrays of ``payload``.

    ``x`` is flat: float32, float16, or bfloat16 as uint16. It is None where sums are encoded:
    ``source`` is the first of their payloads then. ``residual`` (float32) is error feedback's.
    """

    x: Array | None
    n: int
    payload: Payload
    ctx: Context
    source: Payload | None = None
    residual: Array | None = None


class Decoding(NamedTuple):
    """One tensor to decode: ``out`` (flat: float32, float16, bfloat16 as uint16), its payload.

    ``source`` is the first where several payloads are summed.
    """

    out: Array
    source: Payload
    ctx: Context


class Sum(NamedTuple):
    """One tensor to decode: ``out`` as in ``Decoding``, and the payloads whose sum it becomes."""

    out: Array
    payloads: Sequence[Payload]
    ctx: Context


class MultiTensor(Protocol):
    """Kernels that take many tensors a launch; in one call all have one dtype and one stage."""

    def encode(
        self,
        tensors: Sequence[Encoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        decay: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Encode scale * x, plus decay * residual where there is one, which keeps what is lost.

        With ``spaced`` scale * (the sum of payloads, in order) takes the place of scale * x.
        Payloads decode to ``weight`` times what the kernels alone would decode them to.
        """

    def decode(
        self,
        tensors: Sequence[Decoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Overwrite outputs with scale * (the sum of payloads, in order); there is one by default.

        Arithmetic is that of float32; outputs of 16 bits are rounded to nearest even at the end.
        """


class Varying(Protocol):
    """Kernels of payloads whose size the values decide; the host waits once for many tensors.

    ``feeds`` tells whether they read and write residuals.
    """

    feeds: ClassVar[bool]

    def compress(
        self, tensors: Sequence[Encoding], scale: float = 1.0, decay: float = 1.0
    ) -> list[Payload]:
        """Return the payloads of scale * x, plus decay * residual where there is one.

        Tensors are not empty and have one dtype; what is given as their payload is ignored.
        """

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Overwrite outputs, of one dtype, with scale * the sum of equally many payloads each."""
