"""Many tensors a call in host memory: what a small one costs is mostly the calls around its kernel.

What is computed for a tensor does not depend on what shares its call: results are those of the
methods that take a single tensor, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.lengths import check_parts
from ringlet.compressors.core.traits import Part, Payload

Kernel = Callable[..., None]
Residual = Callable[[int, Context], Array | None]


def no_residual(n: int, ctx: Context) -> None:
    """Return None: nothing is fed back."""


class Batched(NamedTuple):
    """Kernels for any number of tensors (flat float32) a call; all of one stage.

    ``encode(tensors, payloads, decay)`` and ``decode(outs, payloads, scale)`` take tables of
    addresses as ``kernels.cpu.quantizers.quantize`` has them, and ``encode_fed`` renews residuals
    too. ``names`` are the payload's arrays, three at most, in the kernels' order. Kernels that draw
    no random numbers are given a key of 0.
    """

    label: Callable[[], str]  # of the compressor
    layout: Callable[[int], Sequence[Part]]
    names: tuple[str, ...]
    encode: Kernel
    encode_fed: Kernel
    decode: Kernel
    draws: bool = False
    residual: Residual = no_residual
    decay: float = 1.0

    def table(self, payloads: Sequence[Payload], lengths: Sequence[int]) -> Array:
        """Return where payloads of so many elements lie; of use as long as they are there.

        Raises PayloadError for one that is not of its layout.
        """
        rows, names = [], self.names
        for payload, n in zip(payloads, lengths, strict=True):
            check_parts(self.label, self.layout(n), payload)
            row = [n, *(address(payload[name], len(payload[name])) for name in names)]
            rows.append(row + [0] * (4 - len(row)))
        return np.array(rows, np.uint64).reshape(len(rows), 4)

    def values(self, x: Array, ctx: Context) -> tuple[int, int, int, int]:
        """Return a tensor's row for ``encode_into``, whose residual belongs to it, if it has one.

        It tells where ``x`` and the residual lie, which have to stay there. Raises CompressorError
        for arrays with gaps, and where what is remembered does not fit.
        """
        n = x.size
        held = self.residual(n, ctx)
        at = 0 if held is None else address(held, n)
        return address(x, n), at, ctx.key() if self.draws else 0, ctx.offset

    def encode_into(self, rows: Sequence[tuple[int, int, int, int]], payloads: Array) -> None:
        """Encode what ``values`` told of each tensor, into the payloads of a ``table``."""
        if not rows:
            return
        tensors = np.array(rows, np.uint64)
        kernel = self.encode_fed if rows[0][1] else self.encode
        kernel(tensors, payloads, np.float32(self.decay))

    def sum_into(self, outs: Sequence[int], tables: Sequence[Array], scale: float = 1.0) -> None:
        """Overwrite outputs, which lie at ``outs``, with scale * the sum of payloads, in order."""
        if outs:
            self.decode(np.array(outs, np.uint64), np.stack(tables), np.float32(scale))


def address(array: Any, n: int) -> int:
    """Return where the ``n`` elements of an array lie, one behind the other."""
    seen = array.__array_interface__
    if seen["strides"] is not None or seen["shape"] != (n,):
        raise CompressorError(f"kernels take flat arrays without gaps, not {list(seen['shape'])}")
    address: int = seen["data"][0]
    return address
