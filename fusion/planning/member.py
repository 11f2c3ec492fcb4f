"""A tensor as a member of a fusion bucket: its request, its compressor, what that remembers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ringlet.compressors import (
    Compressor,
    CompressorError,
    Context,
    NoCompression,
    Part,
    Workspace,
)
from ringlet.compressors.base.nesting import is_plugin, overrides
from ringlet.compressors.core.context import SECOND_STAGE, State
from ringlet.compressors.states import reclaim
from ringlet.fusion.devices.convert import from_float32, to_float32
from ringlet.fusion.devices.host import Place
from ringlet.fusion.errors import CompressionFailed, raised_by_a_signal, tensors_in_words
from ringlet.fusion.limits import UNKNOWN, Link
from ringlet.fusion.planning.strategy import Strategy, check_op, choose, effective
from ringlet.fusion.requests.request import Request
from ringlet.ring.communicator import ReduceOp, owner_offset
from ringlet.ring.dtypes import FLOATS, Array

Result = TypeVar("Result")


class PieceCount:
    """Counts the pieces of one tensor, whose step ends with the last of them."""

    def __init__(self, pieces: int) -> None:
        self._pieces = self._left = pieces

    def finish(self) -> bool:
        """Count a piece; return whether it was the last."""
        self._left -= 1
        if self._left:
            return False
        self._left = self._pieces
        return True

    def restart(self) -> None:
        """Count anew."""
        self._left = self._pieces


_UNWRITTEN = np.uint32(0x7FC05EED)  # a NaN that no decoder writes

_NOTHING: Array = np.empty(0, np.float32)


def _ends(array: Array) -> Array:
    """Return the bits of the first element and the last one, of a flat float32 array."""
    return array[:: max(1, array.size - 1)].view(np.uint32)


@dataclass(eq=False)
class Member:
    """One tensor in a plan, or a piece of one: its elements from ``start`` on, ``numel`` of them.

    ``input`` and ``output`` are flat arrays at ``place`` and set anew for every step: of the
    request's dtype, or the output of float32. ``ready`` tells where the input is enqueued, at a
    place with an order of its own.
    """

    request: Request
    declared: Compressor
    rank: int
    size: int
    seed: int
    place: Place
    state: State = field(default_factory=dict)
    link: Link = UNKNOWN
    compressor: Compressor = field(init=False)
    strategy: Strategy = field(init=False)
    workspace: Workspace = field(init=False)
    input: Array = field(default_factory=lambda: _NOTHING)
    output: Array = field(default_factory=lambda: _NOTHING)
    ready: Any = None
    whole: Member | None = None  # of a piece
    start: int = 0
    numel: int = -1
    progress: PieceCount | None = None
    clock: State | None = None  # where steps are counted, if not in ``state``
    apart: bool = False  # whether it shares no bucket with what follows no schedule
    however_small: bool = False  # whether it is compressed whatever its size: a part of a tensor is
    contributors: int = 0  # ranks whose own values this step's mean is to be of; 0 for all
    _contexts: dict[tuple[int, int, int], Context] = field(default_factory=dict)
    _finishes: bool | None = None
    _narrow: Array | None = None  # the output, while the result is held in float32
    _then: Member | None = None  # this member as it was in the last step that was asked for
    foreign: bool = field(init=False)  # a plugin's, in host memory: it is looked after
    encoded: bool = field(init=False)  # compressed, straight into a fusion buffer
    summed: bool = field(init=False)  # added up as it travels
    nbytes: int = field(init=False)  # before compression: what counts for the fusion threshold
    prescale: float = field(init=False)  # what values are multiplied by before they are compressed
    postscale: float = field(init=False)  # what the sum over ranks is multiplied by
    divisor: int = field(init=False)  # what the sum of integers over ranks is divided by
    stream: Hashable = field(init=False)  # members of one stream may share a fusion buffer

    def __post_init__(self) -> None:
        if self.whole is None:
            self.numel = self.request.numel
        self.workspace = self.place.workspace
        check_op(self.declared, self.request.op)
        used = self.declared
        if not self.however_small:
            used = effective(self.declared, self.request.dtype, self.request.numel)
        forced = self.request.collective if used is self.declared else "auto"
        self.compressor = used
        self.strategy = choose(used, self.size, forced, self.request.numel, self.link)
        self.encoded = not isinstance(used, NoCompression)
        self.summed = self.strategy == "sum"
        self.foreign = self.encoded and not self.place.ordered and is_plugin(used)
        self.nbytes = self.numel * self.request.storage.itemsize
        self.prescale = self.request.prescale * (1.0 / self.size if self._predivided() else 1.0)
        self.postscale, self.divisor = self.rescaling(self.size)
        self.stream = self._stream()

    @cached_property
    def scheduled(self) -> bool:
        """Whether the declared compressor follows a schedule."""
        return overrides(self.declared, "at")

    def at(self, step: int, apart: bool = False) -> Member:
        """Return this member as it is at ``step``: itself, or one with the compressor of then.

        It is one of its own, kept ``apart``, where each rank counts the steps for itself.
        """
        now = self.call(self.declared.at, step)
        if apart:
            return Member(self.request, now, *self._surroundings, apart=True)
        if now is self.declared:
            return self
        if self._then is None or self._then.declared != now:  # it changes in few steps
            self._then = Member(self.request, now, *self._surroundings)
        return self._then

    def kept_apart(self) -> Member:
        """Return this member without its schedule, as one that ranks vote on whatever its size."""
        return Member(self.request, self.declared, *self._surroundings, apart=True)

    def piece(self, start: int, stop: int, progress: PieceCount) -> Member:
        """Return a range of this tensor as a member of its own."""
        return Member(
            self.request,
            self.declared,
            *self._surroundings,
            whole=self,
            start=start,
            numel=stop - start,
            progress=progress,
        )

    @property
    def _surroundings(self) -> tuple[int, int, int, Place, State, Link]:
        return self.rank, self.size, self.seed, self.place, self.state, self.link

    def take(self, values: Array, output: Array, ready: Any = None) -> None:
        """Take this step's arrays of the whole tensor."""
        if self._narrow is not None:  # of a step that was given up
            self._give_back()
        self.ready = ready
        if self.whole is None:
            self.input, self.output = values, output
        else:
            own = slice(self.start, self.start + self.numel)
            self.input, self.output = values[own], output[own]

    def forget(self) -> None:
        """Give the step's arrays up, whose memory somebody else may want."""
        if self._narrow is not None:
            self._give_back()
        self.input = self.output = _NOTHING
        self.ready = None
        if self.whole is not None:
            self.whole.forget()

    @property
    def name(self) -> str:
        """The tensor's name, with the range that a piece is."""
        name = self.request.name
        return name if self.whole is None else f"{name}[{self.start}:{self.start + self.numel}]"

    def _stream(self) -> Hashable:
        wire = _text(self.compressor) if self.encoded else self.request.dtype
        # A group that counts its members is one of requests; without a count it is of neighbours.
        cohort = "" if self.request.group_size else self.request.group
        collective = self.strategy, self.request.collective
        scales = self.prescale, self.postscale
        return (*collective, wire, self.request.op, *scales, cohort, self.request.place, self.apart)

    def rescaling(self, ranks: int) -> tuple[float, int]:
        """Return ``postscale`` and ``divisor``, as they are for a mean over so many ranks."""
        scale = self.request.postscale
        if self.request.op is not ReduceOp.AVERAGE:
            return scale, 1
        if self.request.dtype not in FLOATS:
            return scale, ranks
        return scale * (self.size / ranks if self._predivided() else 1.0 / ranks), 1

    @property
    def makeup(self) -> float:
        """What the mean over all ranks is multiplied by to be one over the contributors."""
        if self.request.op is not ReduceOp.AVERAGE or not self.contributors:
            return 1.0
        return self.size / self.contributors

    @property
    def output_dtype(self) -> str:
        """The dtype of the output: the input's, or float32, where 16 bits are not enough."""
        return "float32" if self.output.dtype == np.float32 else self.request.dtype

    def _predivided(self) -> bool:
        if self.request.op is not ReduceOp.AVERAGE:
            return False
        if not self.encoded:
            return self.request.dtype == "float16"
        return self.compressor.traits().predivide

    def values(self, start: int = 0, stop: int | None = None) -> Array:
        """Return a range of the input as float32, prescaled: itself, or a scratch copy."""
        dtype, factor = self.request.dtype, self.prescale
        return to_float32(self.input[start:stop], dtype, self.workspace, factor=factor)

    def shard(self, part: int, parts: int) -> tuple[int, int]:
        """Return the range of elements that belong to ``part``: whole granules, spread evenly."""
        n = self.numel
        if parts == 1:
            return 0, n
        granule = self.compressor.traits().granularity or 1
        granules = -(-n // granule)
        each, extra = divmod(granules, parts)
        place = (part - owner_offset(self.name, parts)) % parts
        start = place * each + min(place, extra)
        stop = start + each + (place < extra)
        return min(start * granule, n), min(stop * granule, n)

    def context(self, part: int, parts: int, stage: int = 1) -> Context:
        """Return the compressor's surroundings for a part, at this step.

        Stage 1 compresses this rank's gradient; stage 2 compresses again the sum of a shard, and
        remembers its own residual, for that shard alone.
        """
        key = (part, parts, stage)
        ctx = self._contexts.get(key)
        if ctx is None:
            start, stop = self.shard(part, parts)
            ctx = self._contexts[key] = Context(
                name=self.request.name if stage == 1 else self.name,
                shape=self.request.shape,
                numel=self.request.numel if stage == 1 else stop - start,
                state=self.state if stage == 1 else self._of_sum(start),
                rank=self.rank,
                size=self.size,
                seed=self.seed,
                offset=self.start + start if stage == 1 else 0,
                stage=stage,
                xp=self.place.xp,
                workspace=self.workspace,
            )
        ctx.step = self.step
        return ctx

    def _of_sum(self, start: int) -> State:
        """Return what is remembered of the sum of the shard that begins at ``start`` of this."""
        if not self.compressor.traits().stateful:
            return {}  # in the state it would look like something to lose
        of_sum: State = self.state.setdefault(f"{SECOND_STAGE}{self.start + start}", {})
        return of_sum

    def call(self, function: Callable[..., Result], *args: object) -> Result:
        """Call into the compressor; what it raises is told with the tensor's name.

        Raises CompressionFailed; what a signal's handler raised meanwhile, as that is.
        """
        try:
            return function(*args)
        except BaseException as error:  # such as SystemExit, or a panic of Rust's
            if raised_by_a_signal(error):
                raise
            raise CompressionFailed.of(self.compressor, function, self.described, error) from error

    def layout(self, n: int) -> tuple[Part, ...]:
        """Return the arrays of the payload of ``n`` elements. Raises CompressionFailed."""
        return self.call(self.compressor.layout, n)

    def decode(
        self, function: Callable[..., object], payload: object, out: Array, context: Context
    ) -> None:
        """Have the compressor overwrite ``out`` (flat float32) with what ``payload`` decodes to.

        Raises CompressionFailed, also where a plugin writes nothing, in host memory.
        """
        if not self.foreign or not out.size:
            self.call(function, payload, out, context)
            return
        before = _ends(out).copy()
        self.forewarn(out)
        try:
            self.call(function, payload, out, context)
            self.check_written(out, function)
        except CompressionFailed:
            _ends(out)[...] = before  # the mark must not be reduced, should that be tried again
            raise

    def forewarn(self, out: Array) -> None:
        """Mark the ends of ``out``, which a plugin is to overwrite."""
        if self.foreign and out.size:
            _ends(out)[...] = _UNWRITTEN

    def check_written(self, out: Array, function: Callable[..., object]) -> None:
        """Raise CompressionFailed where ``function``, a plugin's, has not overwritten ``out``."""
        if self.foreign and out.size and (_ends(out) == _UNWRITTEN).any():
            error = CompressorError(
                "it left its output unwritten, at least at one end: overwrite all of it, out[:] = "
                "..., for 'out = ...' and what is returned are lost"
            )
            raise CompressionFailed.of(self.compressor, function, self.described, error)

    def reclaim(self, gone: Callable[[str], bool]) -> None:
        """Let the residual go on with what is held back of parts that are ``gone``, by key."""
        average = self.request.op is ReduceOp.AVERAGE
        how = self.size, average, self.request.postscale
        reclaim(self.state, self.compressor, *how, gone)

    @property
    def described(self) -> str:
        """The tensor as errors name it."""
        return named([self])

    @property
    def step(self) -> int:
        """How many times this tensor has been compressed."""
        return int(self.counter.get("step", 0))

    @property
    def counter(self) -> State:
        """Where steps are counted, under "step"."""
        return self.state if self.clock is None else self.clock

    @property
    def finishes(self) -> bool:
        """Whether the compressor wants to see the combined result."""
        if self._finishes is None:
            self._finishes = self.encoded and overrides(self.compressor, "finish")
        return self._finishes

    def widen(self) -> None:
        """Hold a result of 16 bits in float32 until ``narrow``, for a compressor that adds it up.

        Rounding of which the ranks' own memories know nothing would add up as well.
        """
        if self.finishes and self.output.dtype.itemsize == 2 and self._narrow is None:
            self._narrow, self.output = self.output, self.workspace.lend(self.numel)

    def narrow(self) -> None:
        """Round the result to the output's dtype."""
        if self._narrow is not None:
            wide, self.output, self._narrow = self.output, self._narrow, None
            from_float32(wide, self.output, self.output_dtype, self.workspace)
            self.workspace.back(wide)

    def _give_back(self) -> None:
        self.workspace.back(self.output)
        self._narrow = None

    def see(self) -> None:
        """Let the compressor see the combined result, which it may change."""
        if self.finishes and self.numel:
            out = to_float32(self.output, self.output_dtype, self.workspace)
            self.call(self.compressor.finish, out, self.context(0, 1))
            from_float32(out, self.output, self.output_dtype, self.workspace)

    def count(self) -> None:
        """Count the step."""
        if self.progress is None or self.progress.finish():
            self.state["step"] = self.step + 1

    def restart(self) -> None:
        """Forget that parts of a step were finished, because the step was given up."""
        if self.progress is not None:
            self.progress.restart()

    def describe(self) -> str:
        """Return what a plan's hash covers, on a line."""
        piece = f"{self.start} {self.numel}"
        promises = f" {self.compressor.traits()}" if self.foreign else ""
        return f"{self.request.text} {self.strategy} {piece} {_text(self.compressor)}{promises}"


def named(members: Sequence[Member]) -> str:
    """Return the tensors of ``members`` as errors name them: a few, or the only one's shape too."""
    return tensors_in_words((each.request.name for each in members), members[0].request.shape)


_texts: tuple[Compressor, str] = (NoCompression(), "none")  # the last: neighbours share theirs


def _text(compressor: Compressor) -> str:
    """Return a compressor as text, which takes longer to make than all else that plans need."""
    global _texts
    known, text = _texts
    if known is not compressor:
        text = str(compressor)
        _texts = compressor, text
    return text
