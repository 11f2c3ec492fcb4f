"""Which collective moves a compressor's payloads: a pure function of tensor, ranks and link.

It never depends on what else travels, so that a tensor's result does not either: the cost model
takes every tensor to travel alone. Ranks are taken to be on hosts of their own.

Without a link the choice is a rule of the traits and the ranks. That is the default, because the
choice decides how results are rounded, and what error feedback remembers: two runs shall not differ
because the network was measured at two moments. Whoever names a link, or has it measured (then
rounded to a power of two), gets the collective that the cost model finds cheaper there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from ringlet.compressors import Compressor, CompressorError, NoCompression
from ringlet.compressors.base.contract import storage
from ringlet.fusion.limits import UNKNOWN, Link
from ringlet.ring.communicator import FAR, ReduceOp
from ringlet.ring.cost.cost_model import Constants, Workload
from ringlet.ring.dtypes import FLOATS

Strategy = Literal["sum", "allgather", "scatter_reduce", "rounds"]
COLLECTIVES = ("auto", "sum", "allgather", "scatter_reduce")
# Seconds a byte of float32, of the median codec in benchmarks/results/kernels.json. What each rank
# measures for itself would not be the same on all of them.
ENCODE, DECODE = 1.2e-10, 4.2e-11


def effective(compressor: Compressor, dtype: str, numel: int) -> Compressor:
    """Return what a tensor really travels with: uncompressed if it is small or not floating."""
    if dtype not in FLOATS or not numel:
        return NoCompression()
    if numel >= compressor.traits().min_size:
        return compressor
    return _uncompressed(compressor)


@lru_cache(maxsize=4096)
def _uncompressed(compressor: Compressor) -> Compressor:
    return compressor.uncompressed() or NoCompression()


def choose(
    compressor: Compressor,
    size: int,
    forced: str = "auto",
    numel: int = 0,
    link: Link = UNKNOWN,
) -> Strategy:
    """Return how payloads of ``compressor`` for ``numel`` elements combine over ``size`` ranks.

    Payloads that add up ride the allreduce. Others are gathered, unless they can be cut into
    shards: then on a known ``link`` by whichever collective the cost model finds cheaper
    (``ringlet.ring.cost.cost_model``), and on an unknown one shard by shard from 3 ranks on, where
    that moves fewer bytes; ``link.prefer`` settles it. Raises CompressorError when ``forced`` is
    not legal for the compressor's traits.
    """
    if type(compressor) is NoCompression and forced in ("auto", "sum"):
        return "sum"
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
        if not shardable:
            return "allgather"
        if link.prefer != "auto":
            return "allgather" if link.prefer == "allgather" else "scatter_reduce"
        if link.bandwidth == 0:
            return "scatter_reduce" if size > 2 else "allgather"
        return cheaper(compressor, numel, size, link)
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


def cheaper(compressor: Compressor, numel: int, size: int, link: Link) -> Strategy:
    """Return what reduces ``numel`` elements sooner: all-gather or scatter-reduce, of fixed size.

    More ranks never turn a scatter-reduce into an all-gather, nor does a larger tensor of the same
    ratio: what the former saves grows with both, and what it costs does not.
    """
    payload = sum(storage(part.dtype).itemsize * part.elements for part in compressor.layout(numel))
    nbytes = 4.0 * numel
    ratio = payload / nbytes if numel else 0.0
    constants = Constants(link.latency, 1 / link.bandwidth, encode=ENCODE, decode=DECODE)
    far = link.latency >= FAR
    gather = Workload("allgather", nbytes, size, ratio, far=far).seconds(constants)
    scatter = Workload("scatter_reduce", nbytes, size, ratio, far=far).seconds(constants)
    return "scatter_reduce" if scatter < gather else "allgather"


def check_op(compressor: Compressor, op: ReduceOp) -> None:
    """Raise CompressorError unless ``op`` is defined for compressed tensors."""
    if not isinstance(compressor, NoCompression) and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise CompressorError(f"op={op.name.title()} needs compression='none', not {compressor}")
