"""The plan of a declared group: which tensor travels in which bucket, in which step.

It is a pure function of the order in which the first rank declared the tensors, their sizes, their
compressors in that step and the fusion threshold; not of arrival times. So sums are formed in the
same order in every step and after every restart.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringlet.compressors import Context, Workspace
from ringlet.compressors.core.compile_lock import compile_lock, kernels_of
from ringlet.fusion.buckets.bucket import Bucket
from ringlet.fusion.buckets.factory import make_bucket
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.fusion.devices.host import Place
from ringlet.fusion.errors import CompressionFailed, raised_by_a_signal
from ringlet.fusion.limits import Limits
from ringlet.fusion.peers import Peers
from ringlet.fusion.planning.lookahead import pack
from ringlet.fusion.planning.member import Member
from ringlet.fusion.planning.pieces import divide
from ringlet.ring.collector import paused

log = logging.getLogger("ringlet")

_NOTED_S = 1.0  # until kernels are ready: those on disk are sooner


class MemberSlot(NamedTuple):
    """What a member is to be given, and which pieces of which buckets take it."""

    fit: tuple[Any, Any]
    place: Place | None  # one with an order of its own
    pieces: list[tuple[Member, int]]


class GroupPlan(NamedTuple):
    """Which members travel in which buckets, and what each is to be given."""

    members: dict[str, Member]
    buckets: list[Bucket]
    slots: dict[str, MemberSlot]

    @property
    def hash(self) -> str:
        """A digest of everything that ranks must have in common to run these buckets."""
        plans = b"".join(bucket.plan_of(0).to_bytes(8, "little") for bucket in self.buckets)
        return hashlib.blake2b(plans, digest_size=8).hexdigest()

    @property
    def compression(self) -> str:
        """How many tensors travel by which compressors, in words."""
        counts = Counter(str(member.compressor) for member in self.members.values())
        return ", ".join(f"{number} by {spec}" for spec, number in counts.most_common())

    def warm_up(self) -> None:
        """Compile the compressors' kernels, so that the first step does not have to."""
        once = {(str(m.compressor), m.place.name): m for m in self.members.values() if m.encoded}
        if not once:
            return
        began = time.monotonic()
        with paused():
            for (spec, _), member in once.items():
                place = member.place
                try:
                    with compile_lock(kernels_of(spec)), place.at_work():
                        around = Context(xp=place.xp, workspace=Workspace(place.xp))
                        member.call(member.compressor.warm_up, around)
                except CompressionFailed as error:  # told by the step that needs it, if one does
                    log.warning("%s", error)
        if (took := time.monotonic() - began) >= _NOTED_S:
            log.info("the kernels of %s were ready after %.1f s", self.compression, took)


class Tuning(NamedTuple):
    """The limits that plans have from the step ``turn`` on."""

    turn: int
    threshold: int
    hierarchical: bool


class NextStep(NamedTuple):
    """How a step is to begin."""

    plan: GroupPlan
    unplanned: BaseException | None  # why ``plan`` is that of the step before
    tunings: list[Tuning]  # the planner's from then on


class GroupPlanner:
    """Plans a group's steps: by its members' schedules, and by limits that change.

    ``tunings`` are the limits of the step at hand, and of steps to come. ``unscaling`` takes a loss
    scale off the results of buckets that are planned from now on. ``early`` says that members come
    while others are still computed, last declared first.
    """

    def __init__(
        self, declared: Sequence[Member], peers: Peers, limits: Limits, early: bool
    ) -> None:
        self.tunings = [Tuning(0, limits.fusion_threshold, limits.hierarchical)]
        self.unscaling: Unscaling | None = None
        self._declared, self._peers = list(declared), peers
        self._lookahead, self._verify = limits.lookahead, limits.share
        # Where a sum waits long for another's messages, a bucket more costs more than it hides.
        self._early = early and (len(peers.tracks) > 1 or not peers.comm.base.far)
        distinct = {id(member.declared): member for member in declared}.values()
        self._scheduled = any(member.scheduled for member in distinct)

    def first(self, step: int) -> GroupPlan:
        """Return the plan that the group begins with, at ``step`` of its schedules."""
        return self._plan([member.at(step) for member in self._declared], self.tunings[0])

    def following(self, last: GroupPlan, step: int, turn: int, anew: bool) -> NextStep:
        """Plan ``anew``, or where a schedule or new limits say so: at the same step on every rank.

        What raises is returned as ``unplanned``, for the step that cannot be planned to fail with;
        but what a signal's handler raises is raised. Changes nothing.
        """
        planned, unplanned, tunings = last, None, self.tunings
        while len(tunings) > 1 and tunings[1].turn <= turn:
            anew, tunings = True, tunings[1:]
        if self._scheduled or anew:
            try:
                now = [member.at(step) for member in self._declared]
                before = last.members.values()
                if anew or [m.compressor for m in now] != [m.compressor for m in before]:
                    planned = self._plan(now, tunings[0])
            except BaseException as error:  # a plugin's, such as SystemExit, or a panic of Rust's
                if raised_by_a_signal(error):
                    raise
                unplanned = error
        return NextStep(planned, unplanned, tunings)

    def retune(self, turn: int, threshold: int, hierarchical: bool) -> None:
        """Plan with other limits from ``turn`` on, a step to come."""
        now, *later = self.tunings
        before = [tuning for tuning in later if tuning.turn < turn]
        self.tunings = [now, *before, Tuning(turn, threshold, hierarchical)]

    def halve(self, turn: int, biggest: int) -> int:
        """Plan buckets half as large from ``turn`` on, or half of ``biggest``; return how large."""
        last = self.tunings[-1]
        threshold = max(1, min(last.threshold, biggest) // 2)
        self.retune(turn, threshold, last.hierarchical)
        return threshold

    def _plan(self, members: list[Member], tuning: Tuning) -> GroupPlan:
        """Divide members into buckets, last declared first, as backward produces them."""
        pieces = [piece for member in members for piece in divide(member)]
        packed = pack(list(reversed(pieces)), tuning.threshold, self._lookahead, self._early)
        buckets = [make_bucket(b, self._peers, tuning.hierarchical, self._verify) for b in packed]
        for bucket in buckets:
            bucket.unscaling = self.unscaling
        slots = {
            m.request.name: MemberSlot(m.request.fit, m.place if m.place.ordered else None, [])
            for m in members
        }
        for i, of_bucket in enumerate(packed):
            for piece in of_bucket:
                slots[piece.request.name].pieces.append((piece, i))
        return GroupPlan({member.request.name: member for member in members}, buckets, slots)
