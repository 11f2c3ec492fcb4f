"""Compression of gradients inside FSDP1, ``FullyShardedDataParallel(model)``: a hook of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ringlet.compressors import Compressor, NoCompression
from ringlet.job.process_sets import InvalidArgument
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.parallel import fsdp_pieces
from ringlet.torch.parallel.fsdp_pieces import Piece
from ringlet.torch.parallel.fsdp_reduction import FsdpReduction, note_reduction
from ringlet.torch.parallel.fsdp_routes import FsdpRoutes
from ringlet.torch.parallel.fsdp_transport import GroupTransports


class FlatReduction(FsdpReduction[None]):
    """The reduction of one FSDP1 module, whose parameters are one flat one, cut evenly by ranks.

    The part of each parameter that a rank gets is compressed on its own.
    """

    def __init__(
        self, routes: FsdpRoutes, name: str, module: Any, transports: GroupTransports
    ) -> None:
        self._group, flat = module.process_group, module._handle.flat_param
        names, none = iter(flat._fqns), NoCompression()
        self._by_part = [
            none if padding else routes.of(module, next(names)) for padding in flat._is_padding_mask
        ]
        super().__init__([*self._by_part, none], name, transports)
        self._own = default_hooks.DefaultState(self._group)
        self._numels: tuple[int, ...] = flat._numels_with_padding
        self._size = self._group.size()

    def __call__(self, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        """Overwrite ``shard`` with this rank's part of the mean over ranks.

        Raises Mismatch, on all ranks, where some compress otherwise. What a compressor raises, on
        any rank, is raised on all of them when backward ends.
        """
        transport = self.transports.of(self._group)
        if all(isinstance(each, NoCompression) for each in self._by_part):
            default_hooks.reduce_scatter_hook(self._own, gradient, shard)
        else:
            self.reduce(shard, gradient, transport, self._size, None)

    def whole(self, params: None, n: int) -> tuple[None, int]:
        """Return what it is of in every step: the flat parameter is reduced whole."""
        return params, n

    def divided(
        self, now: dict[Compressor, Compressor], params: None, n: int, size: int
    ) -> list[list[Piece]]:
        """Return the pieces of the ``n`` elements that go to each of ``size`` ranks."""
        made = []
        for rank in range(size):
            spans, compressors = zip(*self._spans(rank, n), strict=True)
            made.append(fsdp_pieces.divided(spans, [now[each] for each in compressors], _key))
        return made

    def compressor_of(self, key: str) -> Compressor:
        """Return the compressor of what is remembered under ``key``."""
        return self._known().get(key, (0, NoCompression()))[1]

    def expects(self, keys: Iterable[str]) -> dict[str, int | None]:
        """Return those of a checkpoint's ``keys`` under which something can be remembered here.

        With each is of how many elements.
        """
        known = self._known()
        return {key: known[key][0] for key in keys if key in known}

    def _known(self) -> dict[str, tuple[int, Compressor]]:
        """Return how many elements each rank gets of a parameter, and the compressor, by key."""
        n = -(-sum(self._numels) // self._size)
        return {
            f"{rank}.{_key(start, stop)}": (stop - start, compressor)
            for rank in range(self._size)
            for (start, stop), compressor in self._spans(rank, n)
        }

    def _spans(self, rank: int, n: int) -> list[tuple[tuple[int, int], Compressor]]:
        """Return where each parameter lies in the ``n`` elements of ``rank``; padding is last."""
        spans, first, end = [], rank * n, 0
        numels, compressors = (*self._numels, self._size * n), (*self._by_part, NoCompression())
        for numel, compressor in zip(numels, compressors, strict=True):
            start, end = end, end + numel
            span = max(start - first, 0), min(end - first, n)
            if span[0] < span[1]:
                spans.append((span, compressor))
        return spans


def _key(start: int, stop: int) -> str:
    return f"{start}:{stop}"


@untraced
def reduce_flat(
    reduction: FlatReduction, gradient: torch.Tensor, shard: torch.Tensor | None = None
) -> None:
    """Average the flat gradient of an FSDP1 module: the hook, whose state is its ``reduction``.

    Without a ``shard`` there is one rank only.
    """
    if shard is not None:
        reduction(gradient, shard)


def flat_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the FSDP1 modules inside ``module``, the outer ones first, by names without FSDP1's."""
    for name, each in module.named_modules():
        if isinstance(each, FullyShardedDataParallel):
            parts = (part for part in name.split(".") if part != "_fsdp_wrapped_module")
            yield ".".join(parts), each


def compress_flat(
    routes: FsdpRoutes, modules: Iterable[tuple[str, Any]], transports: GroupTransports
) -> list[FlatReduction]:
    """Let FSDP1 ``modules`` of one model compress their gradients; return their reductions.

    Raises InvalidArgument for a compressor, or a sharding strategy, that does not serve.
    """
    named = list(modules)
    for name, each in named:
        strategy, instead = each.sharding_strategy, ""
        if "HYBRID" in strategy.name:
            instead = "use fully_shard over a mesh of two dimensions"
        elif strategy == ShardingStrategy.NO_SHARD and each.process_group.size() > 1:
            instead = "use DistributedDataParallel with hvd.ddp_hook"  # a single rank always has it
        if instead:
            raise InvalidArgument(
                f"{name or 'the module'} is of FSDP1 with {strategy.name}, whose gradients "
                f"compress_fsdp cannot compress; {instead}, or FULL_SHARD or SHARD_GRAD_OP"
            )
        if each._comm_hook not in (None, reduce_flat):
            raise InvalidArgument(
                f"{name or 'the module'} has a communication hook already, "
                f"{getattr(each._comm_hook, '__name__', each._comm_hook)}; FSDP1 takes one, so "
                "leave out register_comm_hook"
            )
    made = []
    for name, each in named:
        each.check_is_root()  # what is wrapped around it afterwards is an error, not uncompressed
        each._comm_hook = each._comm_hook_state = None
        note_reduction(each, None)
        if each._handle is None:  # it has no parameters of its own
            continue
        each._comm_hook = reduce_flat
        each._comm_hook_state = FlatReduction(routes, name, each, transports)
        note_reduction(each, each._comm_hook_state)
        made.append(each._comm_hook_state)
    return made
