"""Which collective moves a compressor's payloads: a function of its traits and the ranks alone.

It never depends on what else travels, so that a tensor's result does not either.
"""

from __future__ import annotations

from typing import Literal

from ringlet.compressors import Compressor, CompressorError, NoCompression
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import FLOATS

Strategy = Literal["sum", "allgather", "scatter_reduce", "rounds"]
COLLECTIVES = ("auto", "sum", "allgather", "scatter_reduce")


def effective(compressor: Compressor, dtype: str, numel: int) -> Compressor:
    """Return what a tensor really travels with: uncompressed if it is small or not floating."""
    if dtype not in FLOATS or numel < max(1, compressor.traits().min_size):
        return NoCompression()
    return compressor


def choose(compressor: Compressor, size: int, forced: str = "auto") -> Strategy:
    """Return how payloads of ``compressor`` are combined over ``size`` ranks.

    Payloads that add up ride the allreduce. Others are gathered, unless they can be cut into
    shards: then from 3 ranks on reducing each shard on one rank moves fewer bytes. Raises
    CompressorError when ``forced`` is not legal for the compressor's traits.
    """
    traits = compressor.traits()
    shardable = traits.fixed_size and traits.granularity is not None
    if forced not in COLLECTIVES:
        raise CompressorError(f"collective {forced!r} is not one of {', '.join(COLLECTIVES)}")
    if traits.combine == "sum" and (not traits.fixed_size or len(compressor.layout(1)) != 1):
        raise CompressorError(
            f"{compressor} declares that its payloads add up; then they must be of fixed size "
            "and consist of one array"
        )
    if traits.combine == "rounds":
        if forced != "auto":
            raise CompressorError(f"{compressor} exchanges in rounds; {forced!r} cannot be forced")
        return "rounds"
    if forced == "auto":
        if traits.combine == "sum":
            return "sum"
        return "scatter_reduce" if shardable and size > 2 else "allgather"
    if forced == "sum" and traits.combine != "sum":
        raise CompressorError(f"payloads of {compressor} do not add up, so they cannot be summed")
    if forced == "scatter_reduce" and not shardable:
        raise CompressorError(
            f"payloads of {compressor} cannot be cut into shards (traits: fixed_size="
            f"{traits.fixed_size}, granularity={traits.granularity}), which scatter_reduce needs"
        )
    if forced == "allgather":
        return "allgather"
    return "sum" if forced == "sum" else "scatter_reduce"


def check_op(compressor: Compressor, op: ReduceOp) -> None:
    """Raise CompressorError unless ``op`` is defined for compressed tensors."""
    if not isinstance(compressor, NoCompression) and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise CompressorError(f"op={op.name.title()} needs compression='none', not {compressor}")
