"""The gradient of one FSDP module, reduced to shards with payloads in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from ringlet.compressors import Compressor, Context
from ringlet.compressors.base.nesting import overrides
from ringlet.compressors.core.context import State
from ringlet.fusion import CompressionFailed
from ringlet.fusion.devices.host import Place
from ringlet.job.process_sets import InvalidArgument
from ringlet.ring.dtypes import Array
from ringlet.torch.parallel.backward_outcome import BackwardFailure, Stage, part, told
from ringlet.torch.parallel.fsdp_pieces import LayoutFailed, Piece
from ringlet.torch.parallel.fsdp_transport import GroupTransport, GroupTransports
from ringlet.torch.tensors.placement import HOST, flat_at, packed, place_of

Params = TypeVar("Params", bound=Hashable)  # which parameters a reduction is of
_Layout = tuple[list[list[Piece]], int]  # pieces for each rank, and bytes that go to it


def check_scatterable(compressor: Compressor) -> None:
    """Raise InvalidArgument unless ``compressor`` serves in a reduce-scatter."""
    traits = compressor.traits()
    if not traits.fixed_size or traits.combine == "rounds":
        raise InvalidArgument(
            f"{str(compressor)!r} cannot compress a reduce-scatter, whose pieces have a fixed size "
            "and one receiver each; use a cast, a quantiser, topk or block_topk"
        )
    if overrides(compressor, "finish"):
        raise InvalidArgument(
            f"{str(compressor)!r} cannot compress a reduce-scatter: it has to see the result, of "
            "which a rank gets its shard alone; use ef in place of ef21, onebit in place of signsgd"
        )


_REDUCTION = "_ringlet_reduction"  # an attribute of FSDP modules


def note_reduction(module: Any, reduction: FsdpReduction[Any] | None) -> None:
    """Remember what reduces the gradients of ``module`` from now on; None: what is not ours."""
    before = module.__dict__.get(_REDUCTION)
    if before is not None:
        before.replaced = True
    module.__dict__[_REDUCTION] = reduction


class FsdpReduction(ABC, Generic[Params]):
    """One FSDP module's gradient, of which each rank gets its shard of the sum over ranks.

    FSDP hands over one flat tensor, with as many elements for every rank. What goes to a rank is
    compressed by who sends it, in pieces, each on its own; small ones travel as they are. Sums are
    formed in float32, in rank order. With error feedback a rank keeps a residual of the whole
    unsharded gradient: 4 bytes an element of the module. Needs ``compressors`` of fixed size whose
    payloads are decoded to be summed, in every step of a schedule.
    """

    def __init__(
        self, compressors: Iterable[Compressor], name: str, transports: GroupTransports
    ) -> None:
        self.name = name
        distinct = {each: each for each in compressors}
        self.states: dict[str, State] = {}  # by destination and first element
        self.step = 0
        self.transports = transports
        self.loaded = False  # what is remembered, so that it lies in host memory
        self.replaced = False  # by what compresses the module now
        # What each is in this step; None where a rank has none.
        self.now: dict[Compressor, Compressor] | None = distinct
        self.scheduled = any(overrides(each, "at") for each in distinct)
        self._declared = list(distinct)
        self._rooms: dict[tuple[tuple[Compressor, ...], Params, int], int] = {}
        self._layouts: dict[tuple[tuple[Compressor, ...], Params, int], _Layout] = {}

    @abstractmethod
    def whole(self, params: Params, n: int) -> tuple[Params, int]:
        """Return all that a reduction of ``params``, ``n`` elements a rank, is sometimes part of.

        It is the same on all ranks, also where they come with gradients of different parameters.
        """

    @abstractmethod
    def divided(
        self, now: dict[Compressor, Compressor], params: Params, n: int, size: int
    ) -> list[list[Piece]]:
        """Return the pieces of the ``n`` elements that go to each of ``size`` ranks.

        ``now`` is what each compressor is in this step.
        """

    @abstractmethod
    def compressor_of(self, key: str) -> Compressor:
        """Return the compressor of what is remembered under ``key``."""

    @abstractmethod
    def expects(self, keys: Iterable[str]) -> dict[str, int | None]:
        """Return those of a checkpoint's ``keys`` under which something can be remembered here.

        With each is of how many elements, where that is known.
        """

    def reduce(
        self,
        output: torch.Tensor,
        gradient: torch.Tensor,
        transport: GroupTransport,
        divisor: float,
        params: Params,
        replicas: GroupTransport | None = None,
    ) -> None:
        """Overwrite ``output`` with this rank's part of the sum over ranks, over ``divisor``.

        What a compressor raises, on any rank, is raised on all of them when backward ends.
        """
        self.transports.expect(transport, replicas)
        if self.scheduled:
            self._agree_on_schedules(transport)
        if self.now is None:
            output.zero_()
            return
        where = place_of(gradient, engine=transport)
        comm, place = transport.comm, transport.places[where]
        wide = packed(gradient.detach().float(), where)
        device = "cpu" if where == HOST else output.device
        result = torch.empty(output.shape, dtype=torch.float32, device=device)
        values, total = flat_at(wide, where), flat_at(result, where)
        for state in self.states.values() if self.loaded else ():
            place.bring(state)
        self.loaded = False
        layout = self._layout_of(transport, params, total.size)
        if layout is None:
            output.zero_()
            return
        ready = place.ready()
        with place.at_work():
            place.after([ready])
            self._reduce(transport, place, values, total, *layout)
            mark = place.done([values, total])
        if mark is not None:
            mark.collect()
            mark.release()  # torch's stream is behind, on which their memory is used again
        output.copy_(result / divisor)
        self.transports.outcome.count(comm, self.name, self.step, params)
        self.step += 1

    def plan(self) -> BackwardFailure | None:
        """Take what a schedule has for the step at hand; return what it raised, if it did."""
        self.now, now = None, dict[Compressor, Compressor]()
        for each in self._declared:
            try:
                now[each] = each.at(self.step)
                check_scatterable(now[each])
            except InvalidArgument as error:
                return BackwardFailure(Stage.PLAN, InvalidArgument.__name__, str(error))
            except BaseException as error:
                return self._failure(Stage.PLAN, each, each.at, self.name, error)
        self.now = now
        return None

    def planned(self) -> str:
        """Return what ranks have to have alike in the step at hand."""
        now = ", ".join(map(str, (self.now or {}).values()))
        return f"{self.name} {self.step} {now}\n"

    def _agree_on_schedules(self, transport: GroupTransport) -> None:
        """Take this step's compressors, once a backward pass for all modules of a ``transport``."""
        outcome, modules = self.transports.outcome, list(transport.users)
        if transport.planned == outcome.passes:
            modules = []
        if self not in transport.users:
            transport.users[self] = None
            modules.append(self)
        if not modules:
            return
        transport.planned = outcome.passes
        failures = [failure for failure in (each.plan() for each in modules) if failure]
        plans = "".join(each.planned() for each in modules)
        found = outcome.agreed(transport.comm, next(iter(failures), None), self.step, plans)
        if found is not None:
            outcome.note(found)
            for each in modules:
                each.now = None

    def _layout_of(self, transport: GroupTransport, params: Params, n: int) -> _Layout | None:
        """Return how what goes to each rank is divided, and how many bytes that is.

        Nothing where dividing fails here; None where some rank cannot tell how many bytes.
        """
        assert self.now is not None
        known = tuple(self.now.values()), params, n
        layout = self._layouts.get(known)
        if layout is None:
            nbytes = self._room_of(transport, params, n)
            if nbytes is None:
                return None
            try:
                pieces = self.divided(self.now, params, n, transport.comm.size)
            except LayoutFailed as failed:
                self.transports.outcome.note(self._layout_failure(failed), failed.__cause__)
                return [], nbytes
            layout = self._layouts[known] = pieces, nbytes
        return layout

    def _room_of(self, transport: GroupTransport, params: Params, n: int) -> int | None:
        """Return how many bytes go to each rank; None where some rank cannot tell.

        They suffice for all parameters, so that ranks which use different ones exchange as much.
        """
        now = self.now
        assert now is not None
        whole = self.whole(params, n)
        known = tuple(now.values()), *whole
        nbytes = self._rooms.get(known)
        if nbytes is None:
            failure = None
            try:
                nbytes = max(
                    each[-1].end for each in self.divided(now, *whole, transport.comm.size)
                )
            except LayoutFailed as failed:
                failure = self._layout_failure(failed)
            told = part(self.name, whole[0])
            failure = self.transports.outcome.agreed(transport.comm, failure, self.step, "", told)
            if failure is not None:
                self.transports.outcome.note(failure)
                return None
            assert nbytes is not None
            self._rooms[known] = nbytes
        return nbytes

    def _reduce(
        self,
        transport: GroupTransport,
        place: Place,
        values: Array,
        total: Array,
        pieces: list[list[Piece]],
        nbytes: int,
    ) -> None:
        comm, n, workspace = transport.comm, total.size, place.workspace
        send = workspace.array("send", nbytes * comm.size, np.uint8)
        receive = workspace.array("receive", nbytes * comm.size, np.uint8)
        failed = not pieces
        for rank in range(comm.size):
            own, out = values[rank * n : (rank + 1) * n], send[rank * nbytes : (rank + 1) * nbytes]
            for piece in [] if failed else pieces[rank]:
                context = self._context(rank, piece, transport, place)
                given = own[piece.start : piece.stop], piece.payload(out), context
                failed = failed or self._fails(Stage.ENCODE, piece, "encode_into", *given)
        if failed:
            send[...] = 0  # the others wait for as many bytes
        comm.alltoall(send, receive)
        arrived = [receive[rank * nbytes : (rank + 1) * nbytes] for rank in range(comm.size)]
        for piece in [] if failed else pieces[comm.rank]:
            context = self._context(comm.rank, piece, transport, place)
            payloads = [piece.payload(part) for part in arrived]
            out = total[piece.start : piece.stop]
            failed = failed or self._fails(Stage.DECODE, piece, "sum_into", payloads, out, context)
        if failed:
            total[...] = 0

    def _fails(self, stage: Stage, piece: Piece, method: str, *given: Any) -> bool:
        """Whether a compressor's ``method`` raises something, which is noted."""
        function = getattr(piece.compressor, method)
        try:
            function(*given)
        except BaseException as error:  # such as SystemExit, or a panic of Rust's
            what = f"tensor {given[-1].name!r} {list(given[-1].shape)}"
            failure = self._failure(stage, piece.compressor, function, what, error)
            self.transports.outcome.note(failure, error)
            return True
        return False

    def _layout_failure(self, failed: LayoutFailed) -> BackwardFailure:
        by, error = failed.compressor, failed.__cause__ or failed
        return self._failure(Stage.PLAN, by, by.layout, self.name, error)

    def _failure(
        self,
        stage: Stage,
        compressor: Compressor,
        function: Callable[..., object],
        what: str,
        error: BaseException,
    ) -> BackwardFailure:
        failed = CompressionFailed.of(compressor, function, what, error)
        return BackwardFailure(stage, CompressionFailed.__name__, told(failed))

    def _context(
        self, destination: int, piece: Piece, transport: GroupTransport, place: Place
    ) -> Context:
        key = f"{destination}.{piece.key}"
        size = piece.stop - piece.start
        return Context(
            name=f"{self.name}.{key}",
            shape=(size,),
            numel=size,
            state=self.states.setdefault(key, {}),
            step=self.step,
            rank=transport.comm.rank,
            size=transport.comm.size,
            seed=transport.seed,
            xp=place.xp,
            workspace=place.workspace,
        )
