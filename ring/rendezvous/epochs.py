"""The epochs of an elastic job, as one of its processes sees them: asking for a rank in the next.

The launcher decides (``ringlet.ring.elastic``); questions and answers lie in the job's store. Names
there: ``elastic/ask/M`` is what member M asked last, ``elastic/answer/M/N`` the answer to its N-th
question, ``elastic/met/M`` in which epoch it met the others last, ``elastic/knows/M`` that it has
the state that they train on, ``elastic/changes`` how often hosts have changed, ``elastic/specs``
(a list, as JSON) what the ranks' compressors are, ``elastic/held/M`` the norm of what those of
member M hold back, and whether another has a copy, ``elastic/taken`` an epoch and what its ranks
took over from those that are gone. With which code a member ends is in a ``loss_report``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlet.ring.errors import RingError
from ringlet.ring.wire.keys import MEMBER
from ringlet.ring.wire.kv_client import client
from ringlet.ring.wire.kv_store import Op

EPOCH = "RINGLET_EPOCH"
CHANGES = "elastic/changes"
SPECS = "elastic/specs"
TAKEN = "elastic/taken"


class Dismissed(RingError):
    """This process has no rank in the next epoch: its host has gone, or the job is over."""


@dataclass
class _Past:
    """What this process has asked for so far."""

    questions: int = 0
    lost: tuple[int, ...] = ()  # ranks of the present epoch
    changes: int = 0  # of hosts that it has been told of


_past = _Past()


@dataclass(frozen=True)
class Question:
    """A member asks for a rank in the next epoch, for the ``number``-th time.

    ``lost`` are the ranks of its present epoch that it has lost.
    """

    number: int
    lost: tuple[int, ...]

    def pack(self) -> bytes:
        """Return this as a value for the store."""
        return json.dumps({"question": self.number, "lost": self.lost}).encode()

    @classmethod
    def unpack(cls, value: bytes) -> Question | None:
        """Return what was packed; None where no program of ours says so."""
        try:
            asked: dict[str, Any] = json.loads(value)
            return cls(int(asked["question"]), tuple(int(rank) for rank in asked["lost"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


def is_elastic() -> bool:
    """Whether this process belongs to an elastic job."""
    return MEMBER in os.environ


def present() -> int:
    """Return the number of the present epoch, from 1 on; 0 in a job that is not elastic."""
    return int(os.environ[EPOCH]) if is_elastic() and EPOCH in os.environ else 0


def ask_name(member: int) -> str:
    """Return the name under which a member asks."""
    return f"elastic/ask/{member}"


def answer_name(member: int, question: int) -> str:
    """Return the name of an answer."""
    return f"elastic/answer/{member}/{question}"


def met_name(member: int) -> str:
    """Return the name under which a member says in which epoch it has met the others."""
    return f"elastic/met/{member}"


def knows_name(member: int) -> str:
    """Return the name under which a member says that it has taken over the others' state."""
    return f"elastic/knows/{member}"


def held_name(member: int) -> str:
    """Return the name under which a member says what it holds back."""
    return f"elastic/held/{member}"


def meeting(epoch: int) -> str:
    """Return what the names begin with by which ranks of an epoch meet."""
    return f"ringlet/epoch/{epoch}/"


def note_lost(ranks: Iterable[int]) -> None:
    """Remember which ranks of the present epoch were lost, for the launcher to end them."""
    _past.lost = tuple(ranks)


def take_rank(env: MutableMapping[str, str]) -> None:
    """Ask for a rank in the next epoch, wait, and put what the launcher says into ``env``.

    Raises Dismissed where there is none for this process, LaunchError when the launcher is gone.
    """
    member, connection = int(env[MEMBER]), client(env)
    _past.questions += 1
    question = Question(_past.questions, _past.lost)
    connection.ask(Op.SET, ask_name(member).encode(), question.pack())
    name = answer_name(member, _past.questions)
    answer: dict[str, Any] = json.loads(connection.ask(Op.GET, name.encode(), timeout=None))
    connection.ask(Op.DELETE, name.encode())
    if "dismissed" in answer:
        raise Dismissed(answer["dismissed"])
    _past.lost, _past.changes = (), answer.pop("changes")
    env.update({f"RINGLET_{key.upper()}": str(value) for key, value in answer.items()})


def changes() -> int:
    """Return how often hosts have changed since this process got its rank. Asks the launcher."""
    return int(client().ask(Op.GET, CHANGES.encode())) - _past.changes


def tell_met() -> None:
    """Let the launcher know that this process hears the other ranks' signs of life from now on."""
    name = met_name(int(os.environ[MEMBER]))
    client().tell(Op.SET, name.encode(), os.environ[EPOCH].encode())


def met_epoch(told: bytes | None) -> int | None:
    """Return the epoch that ``tell_met`` has told; None where no program of ours says so."""
    told = told or b""
    return int(told) if told.isdigit() and len(told) < 10 else None


def tell_known() -> None:
    """Let the launcher know that others may take over the state of training from this process."""
    client().tell(Op.SET, knows_name(int(os.environ[MEMBER])).encode(), b"1")


def tell_specs(specs: Sequence[str]) -> None:
    """Let newcomers know how the ranks compress."""
    client().ask(Op.SET, SPECS.encode(), json.dumps(specs).encode())


def told_specs() -> list[str] | None:
    """Return how the ranks compress that train already, None before. Asks the launcher."""
    specs: list[str] | None = json.loads(client().ask(Op.GET, SPECS.encode()))
    return specs


def tell_held(norm: float, copied: bool = False) -> None:
    """Let the launcher know what would be lost of gradients with this process: its norm.

    Unless another has a ``copied`` one.
    """
    name = held_name(int(os.environ[MEMBER]))
    client().tell(Op.SET, name.encode(), json.dumps([norm, copied]).encode())


def tell_taken(epoch: int, taken: Sequence[Sequence[float]]) -> None:
    """Let the launcher know what the ranks of an epoch have taken over from ranks that are gone.

    Each of ``taken`` is a member, the rank that it had, the norm of what it held back, how many
    steps ago that was, and the rank that has it now.
    """
    client().ask(Op.SET, TAKEN.encode(), json.dumps([epoch, taken]).encode())
