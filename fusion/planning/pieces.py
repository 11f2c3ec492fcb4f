"""Pieces of large tensors, so that one of them is on the wire while another one is encoded.

How a tensor is divided is a function of the tensor and its compressor alone, never of what else
travels. Pieces begin where a payload may be cut (``Traits.granularity``), share the tensor's state,
and are compressed as the ranges of it that they are.
"""

from __future__ import annotations

from ringlet.compressors import NoCompression
from ringlet.compressors.base.nesting import overrides
from ringlet.fusion.planning.member import Member, PieceCount

PIECE = 2 << 20  # elements


def divide(member: Member) -> list[Member]:
    """Return the pieces that ``member`` travels in: often itself alone."""
    if member.numel < 2 * PIECE or isinstance(member.compressor, NoCompression):
        return [member]
    granularity = member.compressor.traits().granularity
    cuttable = member.strategy in ("sum", "scatter_reduce") and granularity is not None
    if not cuttable or overrides(member.compressor, "finish"):
        return [member]
    assert granularity is not None
    each = -(-PIECE // granularity) * granularity
    starts = range(0, member.numel, each)
    progress = PieceCount(len(starts))
    return [member.piece(start, min(start + each, member.numel), progress) for start in starts]
