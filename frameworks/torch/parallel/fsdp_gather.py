"""The all-gather of one FSDP2 module, with payloads instead of parameters.

Gathers quantised weights as in Wang et al., "ZeRO++: extremely efficient collective communication
for giant model training", ICLR 2024.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from ringlet.compressors import BF16, FP16, Compressor, Context, NoCompression
from ringlet.compressors.base.nesting import overrides
from ringlet.compressors.core.payload import padded
from ringlet.fusion import CompressionFailed
from ringlet.fusion.devices.convert import from_float32, to_float32
from ringlet.fusion.devices.host import Place
from ringlet.job.process_sets import InvalidArgument
from ringlet.ring.communicator import Communicator
from ringlet.ring.dtypes import Array
from ringlet.torch.elastic.hook_memory import NO_BACKWARD
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.parallel.backward_outcome import compression_failed, told
from ringlet.torch.parallel.fsdp_params import placed, torchs_own
from ringlet.torch.parallel.fsdp_pieces import LayoutFailed, Piece, divided
from ringlet.torch.parallel.fsdp_routes import FsdpRoutes
from ringlet.torch.parallel.fsdp_transport import GroupTransport, GroupTransports
from ringlet.torch.tensors.placement import HOST, flat_at, packed, place_of
from ringlet.torch.tensors.views import dtype_of

log = logging.getLogger("ringlet")

# What holds values of each dtype that is taken.
_TAKEN: dict[torch.dtype, Compressor] = {
    torch.float32: NoCompression(),
    torch.float16: FP16(),
    torch.bfloat16: BF16(),
}
_HEAD = padded(1)  # bytes before a rank's payloads, which tell whether it has any
_MOST = 0.1  # of a parameter's squared norm that compression may lose

_Shards = tuple[tuple[int, Compressor], ...]  # elements that a rank has of each parameter, by what


def check_gatherable(compressor: Compressor) -> None:
    """Raise InvalidArgument unless ``compressor`` serves for parameters."""
    traits, name = compressor.traits(), repr(str(compressor))
    if not traits.fixed_size or traits.combine == "rounds":
        raise InvalidArgument(
            f"gather={name} cannot compress an all-gather, in which every rank sends as many bytes "
            "and nothing is summed; use a cast or a quantiser, such as gather='int8'"
        )
    if traits.stateful:
        raise InvalidArgument(
            f"gather={name} remembers what earlier steps have lost, but of parameters nothing is "
            "lost: their owner keeps them unrounded, and updates those; leave out error feedback: "
            "gather='int8'"
        )
    if overrides(compressor, "finish"):
        raise InvalidArgument(
            f"gather={name} cannot compress an all-gather: it has to see a sum, and parameters are "
            "not summed; use a cast or a quantiser, such as gather='int8'"
        )
    if overrides(compressor, "at"):
        raise InvalidArgument(
            f"gather={name} has a schedule, and parameters are gathered several times a step; "
            "pass the compressor that the schedule ends with"
        )
    lost = _lost(compressor)
    if not lost <= _MOST:
        raise InvalidArgument(
            f"gather={name} loses {lost:.0%} of a parameter's squared norm, in every step anew; "
            "use a cast or a quantiser, such as gather='int8'"
        )


def _lost(compressor: Compressor) -> float:
    """Return how much of Gaussian values is lost, of their squared norm."""
    x = np.random.default_rng(1).standard_normal(4096, dtype=np.float32)
    out, ctx = np.empty_like(x), Context(name="gather", shape=x.shape, numel=x.size)
    compressor.decompress(compressor.compress(x.copy(), ctx), out, ctx)
    return float(np.square(out - x).sum() / np.square(x).sum())


class CheckedAllGather(AllGather):
    """One FSDP module's own all-gather, once its ranks know that none of them compresses it."""

    def __init__(self, module: FSDPModule, transports: GroupTransports) -> None:
        self.own = torchs_own(module, "_all_gather_comm", DefaultAllGather())
        self._transports = transports

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for FSDP's outputs."""
        return self.own.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    @untraced
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Do what torch would have done. Raises Mismatch, on all ranks, where some compress."""
        self._transports.of(group)
        return self.own(output_tensor, input_tensor, group, async_op)


class CompressedAllGather(CheckedAllGather):
    """One FSDP module's all-gather: a rank compresses its shards, and all decode everybody's.

    The owner decodes its own, too, so that all ranks compute with the same parameters. It updates
    its shard as that is: errors do not add up, and nothing is remembered. Every parameter's shard
    is compressed on its own; small ones travel as they are. So does a module whose parameters have
    several dtypes, or another one than a float of 32 or 16 bits, and what would not get smaller.

    Random numbers are the same in all steps, so that forward and backward see the same parameters.
    """

    def __init__(
        self, routes: FsdpRoutes, name: str, module: FSDPModule, transports: GroupTransports
    ) -> None:
        super().__init__(module, transports)
        self.name, self._unknown = name, routes.unknown
        self._by_param = {id(param): routes.of_param(param) for _, _, param in placed(module)}
        self._pieces: dict[tuple[torch.dtype, _Shards], list[Piece]] = {}
        self._begun = False

    @untraced
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Overwrite ``output_tensor`` with what all ranks' ``input_tensor`` decode to, by rank.

        Raises Mismatch, on all ranks, where some compress otherwise, and CompressionFailed where a
        compressor raises on some rank.
        """
        transport = self._transports.of(group)
        shards = self._shards(sys._getframe(1), input_tensor.numel())
        pieces = self._pieces_of(transport.comm, input_tensor.dtype, shards)
        if pieces is None:
            output_tensor.zero_()
            return None
        if not pieces:
            return self.own(output_tensor, input_tensor, group, async_op)
        where = place_of(input_tensor, None, engine=transport)
        staged = where == HOST and output_tensor.device.type != "cpu"
        result = torch.empty_like(output_tensor, device="cpu") if staged else output_tensor
        place, dtype = transport.places[where], dtype_of(input_tensor)
        values, total = flat_at(packed(input_tensor, where), where), flat_at(result, where)
        ready = place.ready()
        with place.at_work():
            place.after([ready])
            self._gather(transport, place, values, total, dtype, pieces)
            mark = place.done([values, total])
        if mark is not None:
            mark.collect()
            mark.release()  # torch's stream is behind, on which their memory is used again
        if staged:
            output_tensor.copy_(result)
        return None

    def _shards(self, frame: FrameType, n: int) -> _Shards:
        """Return how many of ``n`` elements each parameter has, and its compressor.

        FSDP hands over one flat tensor. Whose it is its function knows, whose ``frame`` is given.
        """
        sizes, params = map(frame.f_locals.get, ("inp_split_sizes", "fsdp_params"))
        if not isinstance(sizes, list) or sum(sizes) != n:
            return ((n, self._unknown),)
        if not isinstance(params, list) or len(params) != len(sizes):
            params = [None] * len(sizes)
        found = (self._by_param.get(id(each), self._unknown) for each in params)
        return tuple(zip(sizes, found, strict=True))

    def _pieces_of(
        self, comm: Communicator, dtype: torch.dtype, shards: _Shards
    ) -> list[Piece] | None:
        """Return how a rank's shards are divided; nothing where they travel as they are.

        None where that fails on some rank, of which the end of a backward pass tells.
        """
        pieces = self._pieces.get((dtype, shards))
        if pieces is None:
            failure = None
            try:
                pieces = self._divide(dtype, shards)
            except LayoutFailed as failed:
                by, error = failed.compressor, failed.__cause__ or failed
                found = self._failed(by, by.layout, self.name, error)
                failure = compression_failed(found)
            failure = self._transports.outcome.agreed(comm, failure, 0, "")
            if failure is not None:
                self._raise(comm, CompressionFailed(failure.text))
                return None
            assert pieces is not None
            self._pieces[dtype, shards] = pieces
        return pieces

    def _divide(self, dtype: torch.dtype, shards: _Shards) -> list[Piece]:
        sizes, compressors = zip(*shards, strict=True)
        if all(isinstance(each, NoCompression) for each in compressors):
            return []
        if dtype not in _TAKEN:
            if dist.get_rank() == 0:
                log.warning(
                    "compress_fsdp: parameters of %s travel as they are: gather takes modules "
                    "whose parameters are all of float32, or all of one float of 16 bits, and not "
                    "%s",
                    self.name,
                    "several dtypes together" if dtype == torch.uint8 else dtype,
                )
            return []
        ends = np.cumsum([0, *sizes]).tolist()
        spans = list(pairwise(ends))
        exact = _TAKEN[dtype]
        pieces = divided(spans, compressors, lambda first, end: f"{first}:{end}", exact)
        smaller = pieces[-1].end + _HEAD < ends[-1] * dtype.itemsize
        return pieces if smaller else []

    def _gather(
        self,
        transport: GroupTransport,
        place: Place,
        values: Array,
        total: Array,
        dtype: str,
        pieces: Sequence[Piece],
    ) -> None:
        comm = transport.comm
        workspace, n, nbytes = place.workspace, values.size, _HEAD + pieces[-1].end
        send = workspace.array("send", nbytes, np.uint8)
        receive = workspace.array("receive", nbytes * comm.size, np.uint8)
        wide = to_float32(values, dtype, workspace, "gathered")
        failure, self._transports.owed = self._transports.owed, None
        for piece in pieces:
            given = wide[piece.start : piece.stop], piece.payload(send[_HEAD:])
            failure = failure or self._failure(transport, place, piece, "encode_into", *given)
        send[:_HEAD] = failure is not None
        comm.allgather(send, receive)
        # On a GPU only once: to look at what has arrived makes the host wait.
        looks, self._begun = not (place.ordered and self._begun), True
        if looks:
            failed = receive.reshape(comm.size, nbytes)[:, 0] != 0
            failure = self._told(comm, int(failed.argmax()), failure) if failed.any() else None
        if failure is not None:
            self._raise(comm, failure)
            total[...] = 0
            return
        for rank in range(comm.size):
            part = receive[rank * nbytes + _HEAD : (rank + 1) * nbytes]
            out = total[rank * n : (rank + 1) * n]
            decoded = out if dtype == "float32" else workspace.array("gathered", n)
            for piece in pieces:
                sent = piece.payload(part), decoded[piece.start : piece.stop]
                failure = failure or self._failure(transport, place, piece, "decompress", *sent)
            if decoded is not out:
                from_float32(decoded, out, dtype, workspace)
        if failure is not None:
            total[...] = 0
            if not looks:
                self._raise(comm, failure)
            self._transports.owed = failure  # others hear of it in the next exchange

    def _failure(
        self, transport: GroupTransport, place: Place, piece: Piece, method: str, *given: Any
    ) -> CompressionFailed | None:
        """Call a compressor's ``method``; return what it raises, as all ranks are to raise it."""
        size, function = piece.stop - piece.start, getattr(piece.compressor, method)
        name = f"{self.name}.{piece.key}"
        ctx = Context(
            name=name,
            shape=(size,),
            numel=size,
            rank=transport.comm.rank,
            size=transport.comm.size,
            seed=transport.seed,
            xp=place.xp,
            workspace=place.workspace,
        )
        try:
            function(*given, ctx)
        except BaseException as error:  # such as SystemExit, or a panic of Rust's
            what = f"parameter shard {name!r} [{size}]"
            return self._failed(piece.compressor, function, what, error)
        return None

    def _failed(
        self,
        compressor: Compressor,
        function: Callable[..., object],
        what: str,
        error: BaseException,
    ) -> CompressionFailed:
        """Return what all ranks are to raise for what ``function`` has raised here."""
        failure = CompressionFailed(told(CompressionFailed.of(compressor, function, what, error)))
        failure.__cause__ = error
        return failure

    def _told(
        self, comm: Communicator, first: int, own: CompressionFailed | None
    ) -> CompressionFailed:
        """Return what all ranks raise where rank ``first`` tells of a failure. Collective."""
        said = comm.broadcast_bytes(str(own).encode() if comm.rank == first else None, first)
        failure = CompressionFailed(said.decode())
        failure.__cause__ = None if own is None else own.__cause__
        return failure

    def _raise(self, comm: Communicator, failure: CompressionFailed) -> None:
        """Raise ``failure``: at once, or when a backward pass ends that is under way."""
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            self._transports.outcome.expect(comm)
            self._transports.outcome.note(compression_failed(failure), failure.__cause__)
        elif isinstance(failure.__cause__, KeyboardInterrupt):
            raise failure.__cause__
        else:
            raise failure
