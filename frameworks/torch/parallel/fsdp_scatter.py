"""The reduce-scatter of one FSDP2 module, with payloads instead of gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from ringlet.compressors import Compressor
from ringlet.job.process_sets import InvalidArgument
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.parallel import fsdp_pieces
from ringlet.torch.parallel.fsdp_params import (
    Reduced,
    lengths,
    reduced,
    span_key,
    torchs_own,
)
from ringlet.torch.parallel.fsdp_pieces import Piece
from ringlet.torch.parallel.fsdp_reduction import FsdpReduction
from ringlet.torch.parallel.fsdp_routes import FsdpRoutes
from ringlet.torch.parallel.fsdp_transport import GroupTransports


def _divisor(op: Any, size: int) -> float:
    """Return what FSDP wants the sum over ``size`` ranks to be divided by."""
    if op == dist.ReduceOp.AVG:
        return size
    if op == dist.ReduceOp.PREMUL_SUM:  # after set_gradient_divide_factor
        return 1.0 / float(op.__getstate__()[1])
    if op != dist.ReduceOp.SUM:
        raise InvalidArgument(f"compressed reduce-scatter sums or averages; FSDP asks for {op}")
    return 1.0


def _inner(key: str) -> str:
    """Return a shard's ``span_key`` as keys of what is remembered end: without the first group."""
    return key.removeprefix("0.")


class CheckedReduceScatter(ReduceScatter):
    """One FSDP module's own reduce-scatter, once its ranks know that none of them compresses."""

    def __init__(self, module: FSDPModule, transports: GroupTransports) -> None:
        default = DefaultReduceScatter()
        self.own, self._transports = torchs_own(module, "_reduce_scatter_comm", default), transports

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for FSDP's inputs and outputs."""
        return self.own.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    @untraced
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Do what torch would have done. Raises Mismatch, on all ranks, where some compress.

        What a compressor of parameters raises, on any rank, all raise when backward ends.
        """
        transport, replicas = self._transports.of_all(group, sys._getframe(1))
        if self._transports.gathers:
            self._transports.expect(transport, replicas)
        return self.own(output_tensor, input_tensor, group, op, async_op)


class CompressedReduceScatter(FsdpReduction["Reduced | None"], ReduceScatter):
    """One FSDP2 module's reduce-scatter, in which each parameter's shards are compressed alone.

    FSDP hands over, for every rank, its shards of all parameters, one behind the other.
    Quantisation buckets start anew with each of them.
    """

    def __init__(
        self, routes: FsdpRoutes, name: str, module: FSDPModule, transports: GroupTransports
    ) -> None:
        found = routes.of_shards(module)
        super().__init__([*found.values(), routes.unknown], name, transports)
        self._by_key = {_inner(key): compressor for key, compressor in found.items()}
        self._unknown = routes.unknown
        self.own = torchs_own(module, "_reduce_scatter_comm", DefaultReduceScatter())
        self._module = module

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for FSDP's inputs and outputs."""
        return torch.empty(*size, dtype=dtype, device=device)

    @untraced
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Overwrite ``output_tensor`` with this rank's part of the sum, or average, over ranks.

        What a compressor raises, on any rank, is raised on all of them when backward ends.
        """
        caller = sys._getframe(1)
        transport, replicas = self.transports.of_all(group, caller)
        divisor = _divisor(op, transport.comm.size)
        params = reduced(self._module, output_tensor.numel(), caller)
        self.reduce(output_tensor, input_tensor, transport, divisor, params, replicas)

    def whole(self, params: Reduced | None, n: int) -> tuple[Reduced | None, int]:
        """Return all parameters that may have a gradient, and how many elements a rank's are."""
        if params is None:
            return None, n
        spans = params.every
        return Reduced(params.group, spans, every=spans), sum(b - a for a, b in spans)

    def divided(
        self, now: dict[Compressor, Compressor], params: Reduced | None, n: int, size: int
    ) -> list[list[Piece]]:
        """Return the same pieces for each rank: one, where it is not known of which parameters."""
        if params is None:
            only = [now[self._unknown]]
            return [fsdp_pieces.divided([(0, n)], only, lambda first, end: f"?{n}")] * size
        group = params.group

        def key(first: int, end: int) -> str:
            return _inner(span_key(group, first, end))

        used = [now[self._by_key[key(*span)]] for span in params.spans]
        return [fsdp_pieces.divided(params.spans, used, key)] * size

    def compressor_of(self, key: str) -> Compressor:
        """Return the compressor of what is remembered under ``key``."""
        return self._by_key.get(key.partition(".")[2], self._unknown)

    def expects(self, keys: Iterable[str]) -> dict[str, int | None]:
        """Return those of a checkpoint's ``keys`` under which something can be remembered here.

        With each is of how many elements, where that is known.
        """
        known: dict[str, int | None] = {_inner(key): n for key, n in lengths(self._module).items()}
        inner = {key: key.partition(".")[2] for key in keys}  # behind the destination
        return {k: known.get(i) for k, i in inner.items() if i in known or i.startswith("?")}
