"""Horovod's elastic interface: training that goes on when ranks are lost, or come.

``ringlet run --min-np`` starts such jobs. In others the same scripts run unchanged, on a world that
stays as it is: there a lost rank ends the job.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ringlet.fusion.errors import EngineClosed
from ringlet.job import objects, session, topology
from ringlet.ring.errors import PeerLost, RingError
from ringlet.ring.rendezvous import epochs

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "run"]

R = TypeVar("R")


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come, or go: ``run`` goes on with other ranks, from where training is."""

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync


class State(ABC):
    """What training can go back to; subclasses say how it is saved, restored and synchronised."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have ``on_reset`` call these."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Start over with other ranks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save, and let ranks come and go. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks, where hosts have come or go. Collective.

        ``run`` then goes on with other ranks, from where training is. Does nothing in a job whose
        ranks stay.
        """
        if not epochs.is_elastic():
            return
        changed = epochs.changes() if topology.rank() == 0 else 0
        if topology.size() > 1:
            changed = objects.broadcast_object(changed, name="elastic.changes")
        if changed:
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


class ObjectState(State):
    """Objects, as attributes: those that ``kwargs`` names, at first with its values.

    Objects that have ``state_dict`` and ``load_state_dict`` stay, and their states are kept; others
    are copied. ``bcast_object`` and ``get_rank`` are accepted for Horovod's sake.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = objects.broadcast_object,
        get_rank: Callable[[], int] = topology.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._broadcast, self._names = bcast_object, list(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keep copies of all objects or their states."""
        self._saved = {name: copy.deepcopy(_content(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        """Go back to what was saved last."""
        for name, content in self._saved.items():
            self._put(name, copy.deepcopy(content))

    def sync(self) -> None:
        """Take over rank 0's objects, and save them. Collective."""
        mine = {name: _content(getattr(self, name)) for name in self._plain()}
        for name, content in self._broadcast(mine).items():
            self._put(name, content)
        self.save()

    def _plain(self) -> list[str]:
        """Names of what travels as pickled objects."""
        return self._names

    def _put(self, name: str, content: Any) -> None:
        value = getattr(self, name)
        if _has_state(value):
            value.load_state_dict(content)
        else:
            setattr(self, name, content)


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a ``State``, which is synchronised.

    When ranks are lost the state is the last commit's again; ranks are numbered anew, the state is
    synchronised and the function called again. So too, without going back, when hosts have changed
    (``State.check_host_updates``). A process for which there is no rank any more ends, with 0.

    In a job whose ranks stay, an error of their communication is raised, with the state as it was
    committed last, so that a caller can store it.
    """

    @functools.wraps(func)
    def synchronised(state: State, *args: Any, **kwargs: Any) -> R:
        again = False
        while True:
            try:
                if again:
                    session.init_again()
                    state.on_reset()
                state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                if not epochs.is_elastic():
                    raise
            except RingError as error:
                if session.is_initialized():
                    state.restore()
                if not epochs.is_elastic() or not _by_others(error):
                    raise
                epochs.note_lost(getattr(error, "ranks", ()))
            again = True

    return synchronised


def _by_others(error: RingError) -> bool:
    """Whether ``error`` comes of a rank that was lost, or left to be numbered anew."""
    return isinstance(error, PeerLost | EngineClosed)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    return value.state_dict() if _has_state(value) else value
