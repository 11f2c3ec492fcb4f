"""In what sums over ranks accumulate, apart from what travels.

The transport may add 16-bit values itself and round at every hop (gloo and NCCL between hosts do).
Payloads of a compressor that are decoded are summed in float32: so a 16-bit tensor travels by the
cast codec, which changes none of its values, and shard by shard (scatter-reduce). Where the
transport forms sums in float32 itself, it travels as it is.
"""

from __future__ import annotations

from ringlet.compressors import BF16, FP16, Compressor, NoCompression
from ringlet.fusion.planning.strategy import effective

_CASTS: dict[str, Compressor] = {"float16": FP16(), "bfloat16": BF16()}


def carrier(
    compressor: Compressor, dtype: str, numel: int, reduction: str, exact: bool = False
) -> tuple[Compressor, str]:
    """Return the compressor, and the collective, with which sums accumulate in ``reduction``.

    ``compressor`` is the one asked for, ``dtype`` and ``numel`` the tensor's; ``exact`` says that
    the transport sums ``dtype`` in float32. What does not travel as sums of 16 bits stays as it is,
    and so does everything with "wire"; a cast to the tensor's own dtype is none.
    """
    if dtype in _CASTS and (reduction == "wire" or exact):
        compressor = NoCompression() if compressor == _CASTS[dtype] else compressor
        if exact and isinstance(effective(compressor, dtype, numel), NoCompression):
            return compressor, "auto"
    if reduction == "wire":
        return compressor, "auto"
    if isinstance(effective(compressor, dtype, numel), NoCompression) and dtype in _CASTS:
        compressor = _CASTS[dtype]
    traits = compressor.traits()
    if traits.combine != "sum" or compressor.layout(1)[0].dtype not in _CASTS:
        return compressor, "auto"
    return compressor, "scatter_reduce" if traits.granularity is not None else "allgather"
