"""Horovod's elastic interface: training that goes on when ranks are lost, or come.

``ringlet run --min-np`` starts such jobs. In others the same scripts run unchanged, on a world that
stays as it is: there a lost rank ends the job.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from ringlet.fusion import Request
from ringlet.fusion.errors import EngineClosed
from ringlet.job import objects, session, topology
from ringlet.job.process_sets import InvalidArgument
from ringlet.job.residual_copies import Copies, Holder, refuse_sets
from ringlet.ring.callers import outside
from ringlet.ring.collectives.checksum import checksum
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import PeerLost, ProtocolError, RingError
from ringlet.ring.rendezvous import epochs

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "run"]

log = logging.getLogger("ringlet")
R = TypeVar("R")
_NAMES = 2  # by which a rank knows its state, at most
_SHOWN = 60  # characters of what was not expected


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come, or go: ``run`` goes on with other ranks, from where training is."""

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync


class _HostMessages:
    """Whether the next commit lets ranks come or go, in the words of a queue of Horovod's."""

    def empty(self) -> bool:
        """Return whether nothing has changed. Asks the launcher; True in a job whose ranks stay."""
        return not epochs.is_elastic() or epochs.changes() == 0


class State(ABC):
    """What training can go back to; subclasses say how it is saved, restored and synchronised.

    ``bcast_object`` and ``get_rank`` are accepted for Horovod's sake.
    """

    _copies: Copies | None = None  # of what compression holds back, in an elastic job

    def __init__(
        self,
        bcast_object: Callable[..., Any] = objects.broadcast_object,
        get_rank: Callable[[], int] = topology.rank,
    ) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    @property
    def _host_messages(self) -> _HostMessages:
        """What programs of Horovod's look at to wait for a change of hosts."""
        return _HostMessages()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have ``on_reset`` call these."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Start over with other ranks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save, and let ranks come and go. Collective.

        All ranks have come here before any of them saves: where one is lost in the step before this
        one, whoever has finished that would go back to another commit than the others.
        """
        changed = self._hosts_have_changed()
        self.save()
        if epochs.is_elastic():
            if self._copies is not None:  # on all ranks, whatever each of them knows of its own
                self._copies.send()
            if (norm := self.held_back()) is not None:
                epochs.tell_held(norm, self._copies is not None)
        if changed:
            self._let_ranks_change()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks, where hosts have come or go. Collective.

        ``run`` then goes on with other ranks, from where training is. Does nothing in a job whose
        ranks stay.
        """
        if self._hosts_have_changed():
            self._let_ranks_change()

    def _hosts_have_changed(self) -> bool:
        """Whether rank 0 has heard of hosts that come or go. Collective, in an elastic job."""
        if not epochs.is_elastic():
            return False
        changed = 0
        if topology.rank() == 0:
            changed = epochs.changes()
            runtime = session.current()
            specs = runtime.engine.specs
            if specs != runtime.extras.get("specs"):  # for newcomers
                epochs.tell_specs(specs)
                runtime.extras["specs"] = specs
        return bool(_largest("elastic.changes", changed))

    def _let_ranks_change(self) -> NoReturn:
        if self._copies is not None:
            self._copies.renew()  # of those, too, that leave now
        raise HostsUpdatedInterrupt

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in this process's memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Take over rank 0's state. Collective."""

    def reset(self) -> None:  # noqa: B027 - for subclasses that have to
        """Prepare for other ranks."""

    def held_back(self) -> float | None:
        """Return the norm of what compression holds back on this rank alone; None if unknown."""
        return None

    def holders(self) -> Sequence[Holder]:
        """Return what keeps the memory of compressors; TypeError where that is not known."""
        raise TypeError(
            f"{type(self).__name__} knows no compressors, whose memory could be copied: use "
            "elastic.run without redundancy=1, or return the reducers in holders()"
        )

    def keep_steps(self) -> None:
        """From now on be ready for ``take_back``; TypeError where that cannot be."""
        raise self._only_to_commits()

    def take_back(self) -> None:
        """Undo, on this rank, what a step that has failed did so far."""
        raise self._only_to_commits()

    def content(self) -> Any:
        """Return what survivors must have in common to go on: dicts, lists, arrays, objects."""
        raise self._only_to_commits()

    def _only_to_commits(self) -> TypeError:
        return TypeError(
            f"{type(self).__name__} can only go back to commits: use elastic.run without "
            'resume="step", or say in keep_steps(), take_back() and content() how it goes on'
        )


class ObjectState(State):
    """Objects, as attributes: those that ``kwargs`` names, at first with its values.

    Objects that have ``state_dict`` and ``load_state_dict`` stay, and their states are kept; others
    are copied. One that takes the place of another is saved as it is put there.
    ``sync`` takes over what ``bcast_object`` returns of rank 0's. ``get_rank`` is accepted for
    Horovod's sake.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = objects.broadcast_object,
        get_rank: Callable[[], int] = topology.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._synchronised = False  # whether this rank has had the state that ranks agreed on
        self._broadcast, self._names = bcast_object, list(kwargs)
        self._saved: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; save an object with a state of its own that replaces another."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if value is not before and name in self.__dict__.get("_saved", ()) and _has_state(value):
            self._saved[name] = self._copied(_content(value), None)  # what is saved is another's

    def save(self) -> None:
        """Keep copies of all objects or their states."""
        for name in self._names:
            value = getattr(self, name)
            room = self._saved.get(name) if _has_state(value) else None
            self._saved[name] = self._copied(_content(value), room)

    def restore(self) -> None:
        """Go back to what was saved last."""
        for name, content in self._saved.items():
            self._put(name, copy.deepcopy(content))

    def sync(self) -> None:
        """Take over rank 0's objects, and save them. Collective.

        A newcomer to an elastic job forgets what compression held back in a checkpoint that it has
        loaded: the others pay that.
        """
        mine = {name: _content(getattr(self, name)) for name in self._plain()}
        for name, content in self._broadcast(mine).items():
            self._put(name, content)
        if epochs.is_elastic():
            # Where a rank is lost now, all are to go back to the same commit.
            began = _largest("elastic.synchronised", int(self._synchronised))
            if began and not self._synchronised and self.forget_held():
                warn_of_paid()
        self._synchronised = True
        self.save()

    def keep_steps(self) -> None:
        """Nothing: objects do not change before a step has succeeded."""

    def take_back(self) -> None:
        """Nothing."""

    def content(self) -> Any:
        """Return all objects, or their states."""
        return {name: _content(getattr(self, name)) for name in self._names}

    def forget_held(self) -> bool:
        """Forget what compressors remember on this rank; return whether something was held back.

        How often each tensor was compressed stays known.
        """
        return False

    def _copied(self, content: Any, room: Any) -> Any:
        """Return a copy of ``content``; ``room`` is the last one of the same state, or None."""
        return copy.deepcopy(content)

    def _plain(self) -> list[str]:
        """Names of what travels as pickled objects."""
        return self._names

    def _put(self, name: str, content: Any) -> None:
        value = getattr(self, name)
        if _has_state(value):
            value.load_state_dict(content)
        else:
            setattr(self, name, content)


def warn_of_paid() -> None:
    """Warn a newcomer of what is forgotten of the checkpoint that it has loaded."""
    warnings.warn(
        "what compression held back in the checkpoint that this rank has loaded is forgotten: the "
        "ranks that it joins have gone on from it, and pay it",
        stacklevel=outside(),
    )


def refuse_in_elastic_job(what: str, why: str, instead: str) -> None:
    """Raise InvalidArgument, on every rank, if this job is elastic, where ``what`` cannot be."""
    if epochs.is_elastic():
        raise InvalidArgument(f"{what} does not go together with an elastic job: {why}; {instead}")


def run(
    func: Callable[..., R] | None = None, *, resume: str = "commit", redundancy: int = 0
) -> Any:
    """Decorate a training function whose first argument is a ``State``, which is synchronised.

    When ranks are lost, the state goes back to the last commit. Ranks are numbered anew, the state
    is synchronised, and the function is called again. When hosts have changed
    (``State.check_host_updates``), the same happens without going back. A process for which there
    is no rank any more ends, with exit code 0.

    With ``resume="step"`` only the step in which ranks were lost is done again, if all survivors
    still hold the same state. If they differ, because some had finished the step, they go back to
    the commit. Reset callbacks are called behind that. The function may then begin at any step, so
    the state has to hold all that counts steps or batches. Compressors' memory is copied before
    each step. Raises TypeError for a state that cannot do this.

    With ``redundancy=1`` another rank keeps a copy of each rank's residuals, as they are at each
    commit. The copy travels during the steps that follow. It is as large as the gradients in
    float32. When a rank is lost, or leaves, the keeper adds the copy to its own residuals: all
    ranks together still owe the same to the mean of gradients. Raises TypeError for a state that
    knows no compressors, and InvalidArgument where an optimizer reduces over a process set.

    In a job whose ranks stay, an error of their communication is raised. The state is then as it
    was committed last, so that a caller can store it.

    Raises TypeError for what is no function, and when it is called without a ``State``.
    """
    if resume not in ("commit", "step"):
        raise ValueError(f'resume must be "commit" or "step", not {resume!r}')
    if redundancy not in (0, 1):
        raise ValueError(f"redundancy must be 0 or 1 copies, not {redundancy!r}")
    if func is None:
        return functools.partial(run, resume=resume, redundancy=redundancy)
    if not callable(func):
        raise TypeError(f"elastic.run decorates a function, train(state), and not {func!r}")

    @functools.wraps(func)
    def synchronised(state: State, *args: Any, **kwargs: Any) -> R:
        _check_state(func, state)
        training = _Training(state, resume, redundancy)
        while True:
            try:
                training.join()
                result = _called(func, state, *args, **kwargs)
                training.leave()
                return result
            except HostsUpdatedInterrupt:
                if not training.elastic:
                    raise
            except RingError as error:
                if not training.goes_on(error):
                    raise

    return synchronised


def _check_state(func: object, state: object) -> None:
    """Raise TypeError unless ``state``, the first argument of ``func``, is a State."""
    if not isinstance(state, State):
        called = getattr(func, "__name__", "the function")
        raise TypeError(
            f"the first argument of {called} is a state, such as TorchState(model, optimizer, "
            f"batch=0), not a {type(state).__name__}"
        )


class _Training:
    """One call of a function that ``run`` has decorated: with what this rank joins others."""

    def __init__(self, state: State, resume: str, redundancy: int) -> None:
        self.elastic = epochs.is_elastic()
        self._state = state
        self._keeps = resume == "step" and self.elastic
        self._joined = False  # whether ranks have met, and others have to number them anew
        self._common = False  # whether all have had one state
        self._own: list[str] = []  # names of the state that this rank goes on with, if it can
        self._agreed: list[str] = []  # its name among survivors that have not all joined yet
        self._copies: Copies | None = None
        if resume == "step":
            state.keep_steps()
            _fingerprint(state.content())  # what cannot be compared is to be found out now
        if redundancy:
            refuse_sets(state.holders())  # or there is none, in whatever job
            self._copies = state._copies = Copies(state.holders) if self.elastic else None

    def join(self) -> None:
        """Let all ranks that there are now have one state. Collective."""
        again, self._joined = self._joined, True
        if again:
            told = session.init_again(self._own).states
            if self._keeps:
                self._go_back_unless_alike(told)  # first: it would undo what callbacks do
            self._state.on_reset()
        self._state.sync()
        if self.elastic and not self._common:
            epochs.tell_known()
        self._own, self._agreed, self._common = [], [], True
        if self._copies is not None:
            _share(self._state, self._copies)

    def _go_back_unless_alike(self, told: Sequence[Any]) -> None:
        """Go back to the last commit where survivors hold different states.

        ``told`` are, by rank, the names of each one's. One in common is enough: if ranks were lost
        while they joined, the callbacks of some may have changed what all had agreed on.
        """
        states = _checked_names(told)
        common: set[str] = set.intersection(*states) if states else set()
        own, self._own, self._agreed = self._own, [], []
        if states and not own:
            return  # it takes over what the others have
        self._agreed = [min(common, default=f"epoch {epochs.present()}")]
        if common:
            log.info("survivors hold the same state: on from the step at hand")
        elif states:
            log.info("survivors hold different states: back to the last commit")
            self._state.restore()

    def leave(self) -> None:
        """End what travels beside the steps. Collective."""
        if self._copies is not None:
            self._copies.collect()

    def goes_on(self, error: RingError) -> bool:
        """Put the state back to where training can go on; whether it does, with other ranks."""
        others = _by_others(error)
        if self._keeps and others:
            self._state.take_back()
            if self._common:
                self._own = [*self._agreed, _fingerprint(self._state.content())]
        elif session.is_initialized():
            self._state.restore()
        if not self.elastic or not others:
            return False
        epochs.note_lost(getattr(error, "ranks", ()))
        return True


def in_function(runtime: session.Runtime) -> bool:
    """Whether this rank is inside the function that ``run`` decorates, where all ranks are then."""
    return bool(runtime.extras.get(_INSIDE))


_INSIDE = "elastic.function"  # in a runtime's extras


def _called(func: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    inside = session.current().extras
    inside[_INSIDE] = True
    try:
        return func(*args, **kwargs)
    finally:
        inside[_INSIDE] = False


def _largest(name: str, value: int) -> int:
    """Return the largest of all ranks' values, once all have come here. Collective."""
    told = np.array([value], np.int64)
    if topology.size() > 1:  # one short message, which every commit waits for
        request = Request(name, "allreduce", "int64", (1,), ReduceOp.MAX)
        session.current().engine.submit(request, told, at_once=True).wait()
    return int(told[0])


def _share(state: State, copies: Copies) -> None:
    """Take over what ranks held back that are gone, and make new copies. Collective."""
    copies.collect()
    if copies.settle():
        state.save()
    copies.renew()
    copies.report()


def _checked_names(told: Sequence[Any]) -> list[set[str]]:
    """Return what ranks told by which names they know their states, of those that have one.

    Raises ProtocolError, the same on every rank, where one told something else.
    """
    for rank, names in enumerate(told):
        fits = isinstance(names, list) and len(names) <= _NAMES
        if not fits or not all(isinstance(name, str) for name in names):
            raise ProtocolError(
                f"elastic.state: rank {rank} sent {repr(names)[:_SHOWN]} where fingerprints are "
                "expected; do all ranks run the same program and the same version of Ringlet?"
            )
    return [set(names) for names in told if names]


def _fingerprint(content: Any) -> str:
    """Return a hash of dicts, lists, tuples and arrays by their values, and of pickled objects."""
    hashed = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            hashed.update(b"{%d" % len(value))
            for key in sorted(value, key=repr):
                hashed.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            hashed.update(b"[%d" % len(value))
            for each in value:
                add(each)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            hashed.update(f"{value.dtype}{value.shape}".encode())
            found = checksum(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            hashed.update(found.to_bytes(8, "little"))
        else:
            hashed.update(objects.dumps(value))

    add(content)
    return hashed.hexdigest()


def _by_others(error: RingError) -> bool:
    """Whether ``error`` comes of a rank that was lost, or left to be numbered anew."""
    return isinstance(error, PeerLost | EngineClosed)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    return value.state_dict() if _has_state(value) else value
