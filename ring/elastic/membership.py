"""Who belongs to an elastic job, and when its ranks are numbered anew: rules only, no processes.

A member is one process of the program, with a number that is never used again. Members live through
epochs: in each, those that take part have ranks 0, 1, ... An epoch begins once every member of the
last one that is still there has asked for it, because a rank was lost or hosts have changed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ringlet.ring.elastic.rules import Rules
from ringlet.ring.errors import LOST_PEER
from ringlet.ring.hosts.hosts import Host

FENCE = 1.5  # seconds that a member has to come forward which others have lost
LATECOMERS = 30.0  # seconds that ranks which are ready wait for others that are on their way
LEAVE = 5.0  # seconds that a member has to end which belongs to the job no more, or has said so


@dataclass(frozen=True)
class EpochSeat:
    """What a member is told when an epoch begins."""

    epoch: int
    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass
class JobMember:
    """One process. ``local`` is its slot on ``host``; ``rank`` the one of the present epoch.

    Several of these hold at a time. One with a ``limit`` is killed then.

        state      begins when                           what ``decide`` does
        ---------  ------------------------------------  ------------------------------------------
        newcomer   it is started in a free slot; it has  waits for it in the first epoch; later
                   no rank                               lets ranks know once it has asked
        asked      it asks for the next epoch            seats all that have asked, once all ranks
                                                         have, and they are enough
        seated     an epoch begins with it: a rank       waits for it if another rank has asked
        met        it has met the others of that epoch   nothing: they hear if it lives (``late``)
        knows      it has taken over others' state       seats these first; the job is over if
                                                         no rank is left that knows
        dropped    its host has gone or is barred, or    seats it no more, and dismisses it when it
                   there are more than max_np            asks
        dismissed  ``decide`` has sent it away           nothing: ending with 0 is no result then
        ended      its process has ended                 gives its slot to another; begins epochs
                                                         without it
    """

    number: int
    host: str
    local: int
    rank: int | None = None
    seat: EpochSeat | None = None  # the last one that it had
    asked: bool = False  # for the next epoch
    met: bool = False  # the others of the present one
    knows: bool = False  # how far training is
    dropped: bool = False  # it belongs to the job no more, and is to leave
    ended: bool = False
    dismissed: bool = False  # it was told so
    returned: bool = False  # it has ended well
    leaving: int = 0  # the code with which it has said that it ends
    killed: bool = False
    limit: float | None = None  # when it is killed, unless it comes forward or leaves


@dataclass
class Decisions:
    """What is to be done now: members to start, to kill, to give a seat or to send away, a change

    of hosts to tell, and the job's exit code with the reason once it is over.
    """

    start: list[JobMember] = field(default_factory=list)
    kill: list[JobMember] = field(default_factory=list)
    seats: dict[int, EpochSeat] = field(default_factory=dict)  # by member
    dismiss: dict[int, str] = field(default_factory=dict)  # by member: why
    lost: list[int] = field(default_factory=list)  # epochs in which nobody else can meet
    changed: bool = False
    over: tuple[int, str] | None = None
    notes: list[str] = field(default_factory=list)  # for the user


@dataclass
class _Barred:
    """A host that is not used until ``until``; ``times`` it has failed so far."""

    until: float
    times: int


class Membership:
    """The members of a job by ``rules``; whoever uses it tells what happens, and asks ``decide``.

    Times are seconds of one clock. ``draw`` returns a random number in [0, 1). ``start_timeout`` is
    how long those that begin may take to call init, even where ranks may be too few for less.
    """

    def __init__(
        self,
        rules: Rules,
        now: float,
        draw: Callable[[], float] = random.random,
        start_timeout: float = 0.0,
    ) -> None:
        self.rules, self._start_timeout = rules, start_timeout
        self.members: dict[int, JobMember] = {}
        self.epoch = 0
        self._draw = draw
        self._hosts: dict[str, int] = {}  # slots, hosts that have been there longest first
        self._barred: dict[str, _Barred] = {}
        self._wanting = now  # since when there is something to wait for
        self._known = False  # whether any member ever told that it knows how far training is
        self._finished: int | None = None  # who has ended well
        self._failed: tuple[int, str] | None = None  # what ended a rank of the present epoch first,
        self.first_failed: int | None = None  # and which member it was
        self._stopped: tuple[int, str] | None = None  # a user's signal: its code, and in words
        self._told: set[int] = set()  # newcomers that ranks were told of
        self._gathering: float | None = None  # since when one is ready, and is not told of yet
        self._started: float | None = None  # since when there are as many processes as begin
        self._enough: float | None = None  # since when there are enough for the first epoch
        self._unseen = Decisions()  # what happened since the last ``decide``, which was then
        self._decided = now
        self._undecided = False  # whether a member has ended since then

    # -- what happens -----------------------------------------------------------------------------

    def hosts_found(self, hosts: Sequence[Host], now: float) -> None:
        """Note which hosts there are; members of those that have gone do not belong any more."""
        found = {host.name: host.slots for host in hosts}
        kept = {name: found[name] for name in self._hosts if name in found}
        self._hosts = kept | found
        self._let_leave(now)

    def asks(self, number: int, lost: Iterable[int], now: float) -> None:
        """Note that a member asks for the next epoch, having ``lost`` ranks of its present one."""
        member = self.members[number]
        if member.ended:
            return
        member.asked = True
        if not member.dropped:
            member.limit = None
        if not self.epoch and self._enough is None and self._ready() >= self.rules.np:
            self._enough = now
        if not self._resetting(besides=member) and self.epoch:
            self._wanting = now
        # Who was dropped may ask so late that those who stay are numbered anew already.
        ranks = set(lost) if member.rank is not None else set()
        for other in self._present():
            if other.rank in ranks and not other.asked and other.limit is None:
                if self._stopped is not None:
                    continue  # it may be saving, with its connections closed
                other.limit = now + (LEAVE if other.leaving else FENCE)

    def leaves(self, number: int, code: int, now: float) -> None:
        """Note that a member has said that it ends with ``code``: it gets the time for that."""
        member = self.members[number]
        if not member.leaving and member.limit is not None:
            member.limit = now + LEAVE
        member.leaving = code

    def stop(self, code: int, reason: str) -> None:
        """Note that the user ends the job, and all members were told: they may take their time.

        ``code`` and ``reason`` are the job's where no member has a result, or failed.
        """
        if self._stopped is None:
            self._stopped = code, reason
            for member in self.members.values():
                member.limit = None

    def late(self) -> list[int]:
        """Return the ranks' members for which others wait, and whom these do not hear."""
        if self._stopped is not None:  # only the launcher waits for those
            return [m.number for m in self.members.values() if not m.ended and m.limit is None]
        ranked, newcomers = self._ranked(), [m for m in self._present() if m.rank is None]
        if self._finished is not None:  # nor can any that is done
            return [m.number for m in ranked if not m.asked and m.limit is None]
        alone = len(ranked) == 1 and any(m.asked for m in newcomers)
        if not alone and not self._resetting():
            ranked = [m for m in ranked if not m.met]
        return [m.number for m in ranked if not m.asked and m.limit is None]

    def called(self) -> list[int]:
        """Return the members that are to come forward, or to leave, and else are killed."""
        there = [m for m in self.members.values() if not m.ended and m.limit is not None]
        return [m.number for m in there]

    def meets(self, number: int, epoch: int) -> None:
        """Note that a member has met the others of an epoch, and hears from now on if they live."""
        member = self.members[number]
        member.met = member.met or epoch == self.epoch

    def learns(self, number: int, now: float) -> None:
        """Note that a member knows how far training is: it has taken over another's state."""
        member = self.members[number]
        if not member.knows:
            member.knows = self._known = True
            self._let_leave(now)  # who stayed for it

    def silent(self, number: int, now: float) -> None:
        """Note that a member of whom others are waiting gives no sign of life."""
        self.members[number].limit = now + FENCE

    def ended(self, number: int, code: int, how: str, now: float) -> None:
        """Note the end of a member: its exit code as a shell reports it, and ``how`` in words."""
        member = self.members[number]
        if member.ended:
            return
        member.ended = self._undecided = True
        if self.epoch and member.rank is not None:
            self._unseen.lost.append(self.epoch)
        ranked = member.rank is not None
        of_the_job = ranked or not (self.epoch or member.dropped)
        if code == 0 and of_the_job and not member.dismissed:
            member.returned = True
            if self._finished is None:
                self._finished = number
            return
        if member.dropped or (self._finished is not None and self.epoch and not ranked):
            return  # nothing is left to do for newcomers
        name = f"rank {member.rank}" if ranked else f"newcomer {number}"
        if self._is_the_cause(member, code):
            cause = ""
            if member.dismissed and self._finished is not None:
                left = f"{self._finisher()} on {self.members[self._finished].host}"
                cause = f"{left} exited with code 0 while others still needed it, so "
            self._failed = code, f"{cause}{name} on {member.host} {how}"
            self.first_failed = number
        if self._stopped is None:
            self._bar(member, f"{name} on {member.host} {how}", now)

    def _is_the_cause(self, member: JobMember, code: int) -> bool:
        """Whether the job fails, if it does, because ``member`` has ended with ``code``.

        The first to end is the cause, unless that only was the effect of another's end.
        """
        if self.epoch and member.rank is None:
            return False  # a newcomer that fails is no fault of the job
        return self._failed is None or self._failed[0] == LOST_PEER != code

    def _finisher(self) -> str:
        """Return what to call the member that has ended well first."""
        assert self._finished is not None
        rank = self.members[self._finished].rank
        return f"process {self._finished}" if rank is None else f"rank {rank}"

    def returned(self) -> list[int]:
        """Return the members that have ended well, by rank."""
        there = [m for m in self.members.values() if m.returned]
        there.sort(key=lambda m: m.number if m.rank is None else m.rank)
        return [m.number for m in there]

    # -- what is to be done -----------------------------------------------------------------------

    def decide(self, now: float) -> Decisions:
        """Return what is to be done at ``now``."""
        todo, self._unseen = self._unseen, Decisions()
        self._decided, self._undecided = now, False
        self._enforce(todo, now)
        self._dismiss(todo)
        if self._is_over(todo, now):
            return todo
        if self._finished is None and self._stopped is None:
            self._recruit(todo, now)
            self._form(todo, now)
            self._announce(todo, now)
        return todo

    def patience(self, now: float) -> float | None:
        """Return the seconds until time alone makes a difference, None for ever."""
        if self._unseen.changed or self._undecided:  # such as one that could not be started
            return 0.0
        there = [m for m in self.members.values() if not m.ended and not m.killed]
        limits = [m.limit for m in there if m.limit is not None]
        limits += [each.until for each in self._barred.values() if each.until != float("inf")]
        if self._waiting():
            limits.append(self._due()[0])
        limits += [at for at in (self._begins_at, self._tells_at) if at is not None]
        later = [limit for limit in limits if limit > self._decided]
        return max(0.0, min(later) - now) if later else None

    # -- inside -----------------------------------------------------------------------------------

    def _present(self) -> list[JobMember]:
        """Return those that belong to the job and have not ended."""
        return [m for m in self.members.values() if not m.ended and not m.dropped]

    def _ranked(self) -> list[JobMember]:
        """Return those of the present epoch that are still there."""
        return [m for m in self._present() if m.rank is not None]

    def _informed(self) -> list[JobMember]:
        """Return the ranks that know how far training is: all, in programs that never tell."""
        return [m for m in self._ranked() if m.knows or not self._known]

    def _resetting(self, besides: JobMember | None = None) -> bool:
        return any(m.asked for m in self._ranked() if m is not besides)

    def _lost(self) -> list[JobMember]:
        """Return those whom others have lost, and of whose end nothing is known yet."""
        ranked = [m for m in self._ranked() if not m.dropped]
        return [m for m in ranked if not m.asked and m.limit is not None]

    def _waiting(self) -> bool:
        over = self._finished is not None or self._stopped is not None
        return not over and (self.epoch == 0 or self._resetting())

    def _due(self) -> tuple[float, str]:
        """Return when ranks have been too few for too long, and how long that is, in words."""
        named, rules = self.rules.named, self.rules
        due = self._wanting + rules.timeout, f"{rules.timeout:g} s ({named('elastic_timeout')})"
        if self.epoch or self._started is None:
            return due
        told = f"{self._start_timeout:g} s ({named('start_timeout')})"
        return max(due, (self._started + self._start_timeout, told))

    def _ready(self) -> int:
        return sum(m.asked for m in self._present())

    @property
    def _stragglers(self) -> float:
        return min(LATECOMERS, self.rules.timeout)

    @property
    def _begins_at(self) -> float | None:
        """When the first epoch begins without those on their way; None while nobody knows."""
        return None if self.epoch or self._enough is None else self._enough + self._stragglers

    @property
    def _tells_at(self) -> float | None:
        """When ranks are told of the newcomers that are ready; None where none is."""
        return None if self._gathering is None else self._gathering + self._stragglers

    def _usable(self, host: str, now: float) -> bool:
        barred = self._barred.get(host)
        return barred is None or now >= barred.until

    def _leaving(self) -> list[JobMember]:
        """Return the members whose hosts have gone, or have fewer slots."""
        return [m for m in self._present() if m.local >= self._hosts.get(m.host, 0)]

    def _let_leave(self, now: float) -> None:
        """Drop those whose hosts have gone, if somebody stays who knows how far training is.

        Else ranks stay until newcomers are among them.
        """
        if self._finished is not None or self._stopped is not None:
            return
        leaving = self._leaving()
        stays = not self.epoch or any(m not in leaving for m in self._informed())
        for member in leaving:
            if stays or member.rank is None:
                self._drop(member, now, gentle=True)
        # Hosts may be back while others have taken their place.
        staying = [m for m in self._present() if m not in leaving]
        staying.sort(key=lambda m: (not m.knows, m.rank is None, m.rank or 0, m.number))
        for member in staying[self.rules.max_np :] if self.rules.max_np else ():
            self._drop(member, now, gentle=True)

    def _drop(self, member: JobMember, now: float, gentle: bool) -> None:
        """Let a member belong to the job no more: it leaves when ranks are numbered anew."""
        member.dropped = True
        if gentle and member.rank is not None and self.epoch:
            self._unseen.changed = True
        else:
            member.limit = now + LEAVE

    def _bar(self, member: JobMember, what: str, now: float) -> None:
        """Bar a failed member's host, as Horovod's blacklist; others there leave if enough stay."""
        host = member.host
        before = self._barred.get(host, _Barred(now, 0))
        until, text = float("inf"), ""
        if self.rules.cooldown is not None:
            least, most = self.rules.cooldown
            doubled = least * 2.0 ** min(before.times, 64)
            delay = min(most, max(least, doubled + self._draw() * least))
            until, text = now + delay, f" for {delay:.0f} s"
        self._barred[host] = _Barred(until, before.times + 1)
        elsewhere = [m for m in self._ranked() if m.host != host]  # others know nothing yet
        there = [m for m in self._present() if m.host == host]
        enough = len(elsewhere) >= self.rules.min_np and any(
            m in elsewhere for m in self._informed()
        )
        leave = member.rank is not None and bool(there) and enough
        if leave:
            for other in there:
                self._drop(other, now, gentle=False)
        if member.rank is None and before.times & (before.times - 1):
            return  # it was said after 1, 2, 4, 8, ... failures
        rest = ", its other ranks leave" if leave else ""
        count = f" ({before.times + 1} failures there)" if before.times else ""
        self._unseen.notes.append(f"{what}{count}; no rank is started there any more{text}{rest}")

    def _enforce(self, todo: Decisions, now: float) -> None:
        for member in self.members.values():
            if not member.ended and member.limit is not None and now >= member.limit:
                if member.killed:
                    continue
                member.killed = True
                todo.kill.append(member)

    def _dismiss(self, todo: Decisions) -> None:
        """Send away those that ask for an epoch in which they cannot take part."""
        for member in self.members.values():
            if member.ended or not member.asked:
                continue
            if not member.dropped and self._finished is None and self._stopped is None:
                continue
            why = ""
            if not member.dropped and (member.seat is not None or not self.epoch):
                why = self._why_over()  # newcomers left
            todo.dismiss[member.number] = why
            member.asked, member.dismissed = False, True

    def _why_over(self) -> str:
        if self._stopped is not None:
            return self._stopped[1]
        return f"{self._finisher()} has finished, and with it the job"

    def _is_over(self, todo: Decisions, now: float) -> bool:
        if self._stopped is not None:
            if all(m.ended for m in self.members.values()):
                done = (0, "") if self._finished is not None else self._stopped
                todo.over = self._failed or done
            return todo.over is not None
        if self._finished is not None:
            # Newcomers that are still on their way will find nothing to do.
            there = [m for m in self.members.values() if not m.ended]
            there = [m for m in there if m.rank is not None or not self.epoch]
            if not there:
                todo.over = self._failed or (0, "")
            return not there
        if self.epoch and not self._informed():
            # Those who come now would begin anew: nobody is left who knows how far training was.
            todo.over = self._failed or (1, "no rank is left")
        elif self._waiting() and now >= self._due()[0]:
            if self.epoch or self._ready() < self.rules.np:
                todo.over = (1, self._too_few(now))
        elif self._waiting() and not self._may_suffice():
            todo.over = self._failed or (1, self._too_few(now))
        elif (
            self.rules.reset_limit is not None
            and self._resetting()
            and self.epoch > self.rules.reset_limit
            and (self._failed or not self._lost())  # whose end, or being killed, is the cause
        ):
            what = f"{self.rules.named('reset_limit')} {self.rules.reset_limit} is reached"
            code, why = self._failed or (1, "hosts have changed")
            todo.over = (code, f"{why}; {what}")
        return todo.over is not None

    def _needed(self) -> int:
        return self.rules.min_np if self.epoch else self.rules.np

    def _may_suffice(self) -> bool:
        """Whether what is there, or may come by itself, can be enough."""
        barred = {h for h, each in self._barred.items() if each.until == float("inf")}
        open_ = {host: slots for host, slots in self._hosts.items() if host not in barred}
        if not self.rules.fixed and (open_ or not self._hosts):
            return True  # discovery goes on
        used = sum(m.host in open_ for m in self._present())
        free = max(0, sum(open_.values()) - used)
        return len(self._present()) + free >= self._needed()

    def _too_few(self, now: float) -> str:
        named, timeout = self.rules.named, self._due()[1]
        late = [m for m in self._ranked() if not m.asked]
        if late and self.epoch:
            ranks = ", ".join(str(m.rank) for m in late)
            return f"rank {ranks} did not come to be numbered anew within {timeout}"
        slots = sum(n for host, n in self._hosts.items() if self._usable(host, now))
        ready = self._ready()
        silent = [m for m in self._present() if m.rank is None and not m.asked]
        names = ", ".join(f"{m.number} on {m.host}" for m in silent)
        never = f"; process {names} did not call init" if silent else ""
        begins = not self.epoch and self.rules.np != self.rules.min_np
        which = named("np" if begins else "min_np")
        return (
            f"{which} {self._needed()} ranks are needed; {ready} are there, on hosts with {slots} "
            f"usable slots, after {timeout}{never}"
        )

    def _recruit(self, todo: Decisions, now: float) -> None:
        """Start members in slots that nobody has."""
        most = self.rules.max_np
        taken = {(m.host, m.local) for m in self.members.values() if not m.ended}
        count = len(self._present()) - len(self._leaving())
        for host, slots in self._hosts.items():
            if not self._usable(host, now):
                continue
            for local in range(slots):
                if most is not None and count >= most:
                    return
                if (host, local) not in taken:
                    member = JobMember(len(self.members), host, local)
                    self.members[member.number] = member
                    todo.start.append(member)
                    count += 1
                    if self._started is None and len(self._present()) >= self.rules.np:
                        self._started = now

    def _form(self, todo: Decisions, now: float) -> None:
        """Begin an epoch if it may begin, with all that have asked for it."""
        if not self._may_begin(now):
            return
        self.epoch += 1
        taking = [m for m in self._present() if m.asked]
        late = [m for m in self._present() if not m.asked]
        if self.epoch == 1 and late:
            names = ", ".join(f"{m.number} on {m.host}" for m in late)
            todo.notes.append(
                f"{len(taking)} ranks begin; process {names} did not call init, and may come later"
            )
        self._failed, self.first_failed, self._wanting = None, None, now
        self._gathering = None
        self._seat(self._in_order(taking), todo, now)
        if self.epoch > 1:
            ranks = "1 rank" if len(taking) == 1 else f"{len(taking)} ranks"
            todo.notes.append(f"epoch {self.epoch}: {ranks}")
        self._let_leave(now)  # newcomers may know enough from now on: it is told behind the seats

    def _may_begin(self, now: float) -> bool:
        """Whether everybody who has to has asked for the next epoch, and they are enough."""
        if self.epoch:
            all_asked = self._resetting() and all(m.asked for m in self._ranked())
        else:  # more than it needs may come
            at = self._begins_at
            all_asked = all(m.asked for m in self._present()) or (at is not None and now >= at)
        return all_asked and self._ready() >= self._needed()

    def _in_order(self, taking: Iterable[JobMember]) -> list[JobMember]:
        """Return members in the order of their ranks: the host of the first one's state first."""
        first = {host: i for i, host in enumerate(self._hosts)}

        def age(m: JobMember) -> tuple[int, int]:
            """Return what orders members: all take over the state of the first of them."""
            if m.rank is None:
                return 2, first.get(m.host, 0)
            return int(not m.knows), m.rank

        oldest: dict[str, tuple[int, int]] = {}
        for member in taking:
            oldest[member.host] = min(oldest.get(member.host, age(member)), age(member))
        return sorted(taking, key=lambda m: (oldest[m.host], m.host, age(m), m.local))

    def _seat(self, taking: Sequence[JobMember], todo: Decisions, now: float) -> None:
        """Give ``taking`` the ranks of the present epoch, in their order, and others none."""
        for member in self.members.values():
            member.rank = None
            if member.dropped and member.limit is None:
                member.limit = now + LEAVE
        together = Counter(member.host for member in taking)
        seated: Counter[str] = Counter()
        for rank, member in enumerate(taking):
            host = member.host
            member.rank, member.asked, member.met = rank, False, False
            member.seat = EpochSeat(self.epoch, rank, len(taking), seated[host], together[host])
            todo.seats[member.number] = member.seat
            seated[host] += 1

    def _announce(self, todo: Decisions, now: float) -> None:
        """Let the ranks know that newcomers are ready: all that are on their way, at one time.

        So a host costs one change of ranks, however many come there. Who is late by too much comes
        with a change of its own, and nobody waits where ranks are to leave: their host may be gone
        soon.
        """
        if not self.epoch or self._resetting():
            return
        newcomers = [m for m in self._present() if m.rank is None]
        ready = {m.number for m in newcomers if m.asked} - self._told
        if not ready:
            self._gathering = None
            return
        if self._gathering is None:
            self._gathering = now
        urgent = any(m.rank is not None for m in self._leaving())
        late = self._tells_at is not None and now >= self._tells_at
        if urgent or late or all(m.asked for m in newcomers):
            todo.changed, self._gathering = True, None
            self._told |= ready
