"""Codecs whose codes are small floats, which ``minifloats.cuh`` rounds to."""

from __future__ import annotations

import dataclasses

from ringlet.compressors.core.minifloats import MiniFloat
from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec
from ringlet.compressors.kernels.cuda.runtime.source import Program


class MiniFloats(BucketedCodec):
    """A codec whose codes are small floats."""

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program, with what rounds to small floats before the codec's own file."""
        made = super().program(kernel, **switches)
        place = made.parts.index(self.name)
        parts = (*made.parts[:place], "common/minifloats", *made.parts[place:])
        return dataclasses.replace(made, parts=parts)


def codec(
    name: str,
    form: MiniFloat,
    bucket: int,
    stochastic: bool,
    kind: type[BucketedCodec] = MiniFloats,
) -> BucketedCodec:
    """Return the codec of the file ``name``, of ``kind``, for a format and rounding."""
    constants: dict[str, int | float] = {
        "MANTISSA": form.mantissa, "LOWEST": form.lowest, "LARGEST": form.largest,
        "INFINITE": form.largest + 1 if form.has_inf else 255, "STOCHASTIC": int(stochastic),
    }  # fmt: skip
    return kind(name, form.bits, bucket, tuple(constants.items()), random=stochastic)
