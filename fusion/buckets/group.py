"""A declared group: tensors that are reduced together in every step, such as a model's gradients.

Members are handed in, in any order, and buckets travel as they become complete; then the step ends,
on all ranks alike: it was reduced, or it failed. Which member travels in which bucket is in
``group_plan``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringlet.fusion.buckets.bucket import SPREAD, Bucket
from ringlet.fusion.buckets.bucket_owner import BucketOwner
from ringlet.fusion.buckets.group_plan import GroupPlanner
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.fusion.devices.host import Mark, collect
from ringlet.fusion.errors import DuplicateName, refuse_forked
from ringlet.fusion.limits import Limits
from ringlet.fusion.peers import Peers
from ringlet.fusion.planning.member import Member
from ringlet.fusion.recording.events import Trace
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.requests.identity_values import neutral
from ringlet.fusion.requests.legality import check_values, lies_well
from ringlet.fusion.requests.request import Request
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch

Ready = Callable[["Group", int, int], None]  # group, bucket, epoch
Abandon = Callable[["Group", str], None]  # group, why


class _StepAtHand:
    """What has come so far of the step at hand: each step, and each plan, begins a new one."""

    __slots__ = ("awaited", "begun", "handed_in", "noted", "phantoms", "submitted", "unfinished")

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.begun = False  # whether any member was noted
        self.noted: list[str] = []  # to be submitted, when a bucket has all of its members
        self.awaited = [len(bucket.members) for bucket in buckets]  # members that were not noted
        self.submitted: set[str] = set()
        self.handed_in: dict[str, float] = {}  # when members were, while somebody observes
        self.unfinished = len(buckets)  # buckets that are not reduced
        self.phantoms = 0  # buckets that went without this rank's values, which has joined


class Group(BucketOwner):
    """One step at a time: every member is submitted once, then ``wait`` collects the results.

    ``step`` is that of the members' schedules, and counts on. ``turn`` counts the steps since the
    declaration, the same on all ranks; ``epoch`` those that failed, as far as this rank has heard.
    ``early`` says that members come while others are still computed, last declared first.
    """

    def __init__(
        self,
        name: str,
        number: int,
        members: Sequence[Member],
        peers: Peers,
        limits: Limits,
        ready: Ready,
        abandoned: Abandon,
        step: int = 0,
        early: bool = False,
    ) -> None:
        self.name, self.number, self.peers = name, number, peers
        self.title = name
        self.epoch = self.turn = 0
        self.step = step
        self.finite = True  # whether the last step's results were, under a loss scale
        self.unplanned: BaseException | None = None  # why the step at hand has the plan of the last
        self._planner = GroupPlanner(members, peers, limits, early)
        self.plan = self._planner.first(step)
        self.members, self.buckets, self._slots = self.plan
        self._now = _StepAtHand(self.buckets)
        self._ready, self._abandoned = ready, abandoned
        self.lock = threading.RLock()  # held while members are handed in, and a step ends
        self._ended = threading.Condition(self.lock)
        self._pid = os.getpid()
        self._observed = False  # whether somebody observes
        self._failures: dict[int, Exception] = {}  # by turn: steps that `wait` has not told of
        self._broken: Exception | None = None
        self._outcome: Exception | None = None  # of the last step that was collected
        self._told = False  # whether the last thing that the caller heard was a step's failure
        self._marks: list[Mark] = []  # the ends of what was enqueued since ``wait`` has collected

    def _go_on_at(self, step: int, turn: int) -> None:
        """Let ``step`` be the one at hand, unless a signal's handler has done so meanwhile."""
        last = self.turn
        anew = self.unplanned is not None
        following = self._planner.following(self.plan, step, turn, anew)
        now = _StepAtHand(following.plan.buckets)
        if self.turn != last:
            return
        # Nothing is called from here on, so that no signal comes between.
        self._planner.tunings = following.tunings
        self.plan, self.unplanned = following.plan, following.unplanned
        self.members, self.buckets, self._slots = following.plan
        self._now, self.step, self.turn = now, step, turn

    def unscale(self, unscaling: Unscaling | None) -> None:
        """Take a loss scale off results in host memory from now on, and see if they are finite."""
        self._planner.unscaling = unscaling
        for bucket in self.buckets:
            bucket.unscaling = unscaling

    def submit(self, name: str, values: Array, output: Array | None = None) -> None:
        """Hand in this step's ``values`` (flat); the result goes to ``output``, or in place.

        In host memory the result of 16-bit values may be float32, which sums are not rounded for.
        Both belong to the engine until ``wait`` returns. Raises DuplicateName when the member was
        handed in before in this step, ValueError when its size is not the declared one, and
        TypeError for another dtype. After a failure of the step it does nothing: ``wait`` tells.
        """
        self.submit_all([(name, values, output)])

    def submit_all(self, tensors: Sequence[tuple[str, Array, Array | None]]) -> None:
        """Hand in several members (name, values, output): see ``submit``.

        Of those behind one that is refused none is handed in.
        """
        complete: list[int] = []
        epoch = self.epoch
        try:
            with self.lock:
                self._told = False
                if (self._failures or self._broken) and self._error is not None:
                    return
                epoch = self.epoch
                self._take(tensors, complete)
        finally:
            for index in complete:
                self._ready(self, index, epoch)

    def note(self, name: str) -> list[str]:
        """Note that a member can be submitted; return what to submit now, if anything.

        That is all that was noted, once some bucket has all of its members: one ``submit_all`` then
        costs less than to submit each when it comes, and no bucket waits longer. ``due`` returns
        what is left.
        """
        with self.lock:
            now, whole = self._now, False
            self._told, now.begun = False, True
            now.noted.append(name)
            if self._observed:
                now.handed_in[name] = time.perf_counter()
            for _, index in self._slots[name].pieces:
                left = now.awaited[index] = now.awaited[index] - 1
                whole = whole or left == 0
            return self._due() if whole else []

    def due(self) -> list[str]:
        """Return the members that were noted, and are not yet to be submitted."""
        with self.lock:
            return self._due()

    def _due(self) -> list[str]:
        due, self._now.noted = self._now.noted, []
        return due

    def _take(
        self, tensors: Sequence[tuple[str, Array, Array | None]], complete: list[int]
    ) -> None:
        """Give members their arrays; add buckets that have all of them to ``complete``."""
        submitted, slots, buckets = self._now.submitted, self._slots, self.buckets
        ready: dict[str, Any] = {}  # of each place: what was enqueued so far is before all of them
        for name, values, output in tensors:
            fit, place, pieces = slots[name]
            if name in submitted:
                raise DuplicateName(f"{name!r} was submitted twice in one step of {self.title!r}")
            fits = (values.shape, values.dtype) == fit
            if not (fits and (place is not None or lies_well(values, output is None))):
                self._refuse(self.members[name].request, values, output is None)
            submitted.add(name)
            if self._observed:
                self._now.handed_in.setdefault(name, time.perf_counter())
            mark = None
            if place is not None:
                mark = ready[place.name] if place.name in ready else place.ready()
                ready[place.name] = mark
            for piece, index in pieces:
                piece.take(values, values if output is None else output, mark)
                bucket = buckets[index]
                bucket.missing -= 1
                if bucket.missing == 0:
                    complete.append(index)

    def _refuse(self, request: Request, values: Array, in_place: bool) -> None:
        if values.size != request.numel:
            raise ValueError(
                f"{request.name!r} has {values.size} elements in step {self.step} of "
                f"{self.title!r}; it was declared with shape {list(request.shape)}, which is "
                f"{request.numel}. Declare again what has changed its shape"
            )
        check_values(request, values, in_place)

    def missing(self) -> list[str]:
        """Return the members not yet submitted in this step, in order of declaration."""
        with self.lock:
            submitted = self._now.submitted
            if len(submitted) == len(self.members):
                return []
            return [name for name in self.members if name not in submitted]

    @property
    def ended(self) -> bool:
        """Whether the step at hand was reduced, or failed."""
        return self._now.unfinished == 0 or self._error is not None

    @property
    def told(self) -> bool:
        """Whether the last that the caller heard was that the step failed."""
        return self._told

    @property
    def in_step(self) -> bool:
        """Whether something was submitted, or noted, that ``wait`` has not collected."""
        return bool(self._now.begun or self._now.submitted)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every bucket is reduced; then the next step may begin.

        Raises what went wrong, the same on every rank, or TimeoutError after ``timeout`` seconds;
        EngineClosed in a forked child. After a TimeoutError, or a signal, it can be repeated.
        """
        refuse_forked(self._pid)
        with self._ended:
            error, marks = self._collect(self.turn, timeout)
        _settle(marks, error)

    def disown(self) -> None:
        """Note, between steps, that the last one's results are not used, nor to be compared."""
        with self.lock:
            for bucket in self.buckets:
                bucket.digest = 0

    def restart(self, step: int) -> None:
        """Go on at ``step``; between steps, and on all ranks alike."""
        with self.lock:
            if self.in_step:
                raise RuntimeError(f"group {self.title!r} cannot go on at another step in mid-step")
            for bucket in self.buckets:  # states may be another job's by now
                bucket.settle()
            self._go_on_at(step, self.turn)

    def acknowledge(self) -> None:
        """Note that the caller begins a new step: ``abandon`` gives that one up."""
        with self.lock:
            self._told = False

    def abandon(self, why: str) -> bool:
        """Give up the step at hand on all ranks: elsewhere ``wait`` raises, telling ``why``.

        That is the step that was begun, or the next one if none was; but nothing, and False, where
        ``wait`` has just told that the step failed, on this rank too. Afterwards the next step may
        begin. Raises RuntimeError if all ranks have reduced the step already, which ``wait`` then
        collects.
        """
        with self._ended:
            if self._told:
                self._told = False
                return False
            turn = self.turn
            if self._error is None and self._now.unfinished:
                self._abandoned(self, why)
                self._ended.wait_for(lambda: self.turn != turn or self.ended)
            error = self._error if self.turn == turn else self._outcome
            if error is None:
                raise RuntimeError(
                    f"step {self.step} of {self.title!r} was reduced on all ranks before this rank "
                    f"gave it up ({why}); take it, or restore a checkpoint on all ranks"
                )
            error, marks = self._collect(turn)
            self._told = False
        _settle(marks, self._broken and error)
        return True

    def let_go(self, why: str) -> None:
        """Let the step at hand fail on all ranks, which ``wait`` tells, without waiting for it."""
        self._abandoned(self, why)

    # -- called by the engine's thread ----------------------------------------------------------

    def urgency(self, index: int) -> float:
        """Return how soon the next forward pass needs a bucket: first the one planned last."""
        return index

    def begin_bucket(self, index: int) -> Trace:
        """Begin a bucket's work in the step at hand; return where its costs will be."""
        return self.buckets[index].begin(self.turn + SPREAD * index)

    def digest_to_vote(self, index: int) -> int:
        """Return the digest of what the bucket's sums gave in the last step, once a step."""
        bucket = self.buckets[index]
        return 0 if bucket.more else bucket.last_digest

    def average_over(self, index: int, contributors: int) -> None:
        """Let a bucket's means be over so many ranks in this step."""
        for member in self.buckets[index].members:
            member.contributors = contributors

    def retune(self, limits: Limits) -> None:
        """Plan with other limits from the first step on that no rank can have begun.

        All ranks are told at one point of the order in which steps end and fail, so that they find
        the same one.
        """
        with self.lock:
            ended = self.turn if self._now.unfinished == 0 else self.turn - 1
            due = max([ended, *self._failures]) + 2  # a rank may have begun the one before
            self._planner.retune(due, limits.fusion_threshold, limits.hierarchical)

    def halve(self, turn: int, biggest: int) -> str:
        """Plan smaller buckets from ``turn`` on, which no rank has begun; say so.

        ``biggest`` is what the rank without memory told of its own plan: this rank may be some
        failed steps behind it, where buckets are larger.
        """
        with self.lock:
            threshold = self._planner.halve(turn, biggest)
        return f"from the next step on buckets have at most {threshold} bytes; repeat the step"

    def retire(self) -> None:
        """Let the step at hand go, which has ended or was not begun: the caller is gone."""
        with self.lock:
            if self.in_step:
                self._collect(self.turn, 0.0)

    def note_times(self, on: bool) -> None:
        """Note from now on when members are handed in, or stop that."""
        with self.lock:
            if on != self._observed:
                self._now.handed_in.clear()
                self._observed = on

    def observed(self, index: int, recorder: Recorder) -> None:
        """Tell of a bucket that was exchanged, while somebody observes."""
        bucket, at = self.buckets[index], self._now.handed_in
        names = [member.request.name for member in bucket.members]
        submitted = {name: at[name] for name in names if name in at}
        recorder.exchanged(self.title, self.step, index, bucket, submitted)
        if bucket.done and self._now.unfinished <= 1 and not bucket.phantom:
            recorder.step_done(self.title, self.step, min(at.values(), default=time.perf_counter()))

    def submit_zeros(self, index: int) -> bool:
        """Stand in for a rank that has joined; False if the bucket has this rank's own values.

        What is left of its residuals still takes part.
        """
        with self.lock:
            bucket = self.buckets[index]
            if bucket.phantom or bucket.missing != len(bucket.members):
                return False
            bucket.phantom = True
            with bucket.place.at_work():
                xp = bucket.place.xp
                for member in bucket.members:
                    member.input = member.output = neutral(member.request, member.numel, xp)
            return True

    def bucket_done(self, index: int) -> None:
        """Count a bucket whose outputs are filled."""
        with self.lock:
            bucket = self.buckets[index]
            if bucket.phantom:
                bucket.phantom = False
                self._now.phantoms += 1
                if self._now.phantoms == len(self.buckets):
                    self._begin()  # the others' next step, whose plan may be another
                return
            self._now.unfinished -= 1
            if bucket.mark is not None:
                self._marks.append(bucket.mark)
            if self._now.unfinished == 0:
                self._ended.notify_all()

    def fail(self, error: Exception, turn: int | None = None) -> None:
        """End the step ``turn`` with ``error``; this one and all later ones if that is None.

        Submissions of the failed step are dropped. The step may be one that this rank has not
        begun: others can be ahead by steps that failed.
        """
        with self.lock:
            self.epoch += 1
            here = turn == self.turn and self._now.unfinished > 0
            if turn is None or (not here and turn <= self.turn):
                later = error if turn is None else self._drifted(turn, error)
                self._broken = self._broken or later
            else:
                self._failures[turn] = error
            if here or turn is None:
                for bucket in self.buckets:
                    bucket.fail()
                    bucket.phantom = False
                    if bucket.mark is not None:
                        self._marks.append(bucket.mark)
            self._ended.notify_all()

    def pass_over(self) -> None:
        """Let failed steps go by in which this rank, which has joined, had nothing of its own."""
        with self.lock:
            while not self.in_step and self._failures.pop(self.turn, None) is not None:
                self._begin()

    def _drifted(self, turn: int, error: Exception) -> Exception:
        step = self.step + turn - self.turn
        return Mismatch(
            f"step {step} of {self.title!r} failed on other ranks after rank {self.peers.rank} had "
            f"finished it, so that replicas may differ: {error}. Restore the last checkpoint"
        )

    @property
    def _error(self) -> Exception | None:
        """What ended the step at hand, if anything did: its own failure comes first."""
        failure = self._failures.get(self.turn)
        return failure or (self._broken if self._now.unfinished else None)

    def _collect(
        self, turn: int, timeout: float | None = None
    ) -> tuple[Exception | None, list[Mark]]:
        """Wait for the end of the step ``turn``; return what ended it, and its marks.

        Another thread, or a signal's handler, may collect it first; then the next step has begun.
        """
        if not self._ended.wait_for(lambda: self.turn != turn or self.ended, timeout):
            raise TimeoutError(f"group {self.title!r} has not finished within {timeout} s")
        if self.turn != turn:
            return self._outcome, []
        error = self._outcome = self._error
        self.finite = all(bucket.finite for bucket in self.buckets)
        self._begin()  # first: where a signal interrupts this, the step can be collected again
        self._failures.pop(turn, None)
        self._told = error is not None
        self._ended.notify_all()
        marks, self._marks = self._marks, []
        return error, marks

    def _begin(self) -> None:
        self._go_on_at(self.step + 1, self.turn + 1)


def _settle(marks: Sequence[Mark], error: Exception | None) -> None:
    """Put what the caller enqueues from now on behind a step; then raise ``error``, if any."""
    try:
        collect(marks, error)
    finally:
        for mark in marks:
            mark.release()
