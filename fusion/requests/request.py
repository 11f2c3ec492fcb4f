"""What a rank asks for under a name: the part of a submission that all ranks must agree on."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import STORED, storage

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")


@dataclass(frozen=True)
class Request:
    """One named operation on one tensor, by the ranks of one process set.

    ``spec`` is the compressor as text, ``collective`` "auto" or a forced way to move compressed
    payloads, ``root`` the sending rank of a broadcast (its rank within the process set). Values
    are multiplied by ``prescale`` before they are compressed and by ``postscale`` after they are
    combined. ``splits`` are the rows that an all-to-all sends to each rank. The ``group_size``
    requests that name the same ``group`` are executed together or not at all. ``place`` is where
    the tensor lies: "host", or "cuda" where the transport moves memory of a GPU. ``loaded`` tells
    when, in the asker's own count, what compressors remember was loaded last, and which; "" before
    the first. ``edition`` tells versions of a plugin apart. ``frozen`` is what the asker holds
    still, so that it would not take what is held back for it.
    """

    name: str
    kind: str = "allreduce"
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.AVERAGE
    spec: str = "none"
    collective: str = "auto"
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = 0
    splits: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    place: str = "host"
    loaded: str = ""
    edition: str = ""
    frozen: bool = False
    key: Hashable = field(init=False, repr=False, compare=False, default=None)
    """What must not be in flight twice: the name, within its process set."""
    fit: tuple[tuple[int], np.dtype[Any] | None] = field(
        init=False, repr=False, compare=False, default=((0,), None)
    )
    """Shape and dtype of the flat array that holds its elements; no dtype for one unknown."""
    prototype: Request | None = field(init=False, repr=False, compare=False, default=None)
    """What it has in common with others of its series, where ``numbered`` has made it."""
    number: int = field(init=False, repr=False, compare=False, default=-1)
    """Its number in that series."""

    def __post_init__(self) -> None:
        """Make plain values of NumPy's and others', on the thread of whoever asks."""
        if not isinstance(self.name, str):
            raise TypeError(f"a tensor's name is a string, not {self.name!r}")
        plain = self.__dict__  # the quick way to set attributes of a frozen instance
        plain["root"] = operator.index(self.root)
        plain["process_set"] = operator.index(self.process_set)
        plain["group_size"] = operator.index(self.group_size)
        plain["shape"] = tuple(map(operator.index, self.shape))
        plain["splits"] = tuple(map(operator.index, self.splits))
        plain["prescale"] = float(self.prescale)
        plain["postscale"] = float(self.postscale)
        plain["key"] = self.name if self.process_set == 0 else (self.process_set, self.name)
        plain["fit"] = (math.prod(self.shape),), STORED.get(self.dtype)

    def __hash__(self) -> int:
        return hash(self.name)

    def numbered(self, number: int) -> Request:
        """Return the call ``number`` of the series whose prefix is this one's name."""
        made: Request = object.__new__(Request)
        plain = self.__dict__.copy()  # all else was checked when this one was made
        plain.pop("_text", None)
        plain["name"] = name = f"{self.name}{number}"
        plain["key"] = name if self.process_set == 0 else (self.process_set, name)
        plain["prototype"], plain["number"] = self, number
        _set(made, "__dict__", plain)
        return made

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.fit[0][0]

    @property
    def nbytes(self) -> int:
        """Bytes before compression."""
        return self.numel * self.storage.itemsize

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype of the arrays."""
        return storage(self.dtype)

    def to_list(self) -> list[Any]:
        """Return what travels to the coordinator."""
        return list(_VALUES(self))

    @property
    def text(self) -> str:
        """What ``to_list`` returns, as JSON; made once."""
        plain = self.__dict__
        if "_text" not in plain:
            plain["_text"] = dumps(self.to_list()).decode()
        return str(plain["_text"])

    @classmethod
    def from_list(cls, values: list[Any]) -> Request:
        """Rebuild a request from ``to_list``."""
        name, kind, dtype, shape, op, *more = values
        *plain, splits, group, group_size, place, loaded, edition, frozen = more
        every = *plain, tuple(splits), group, group_size, place, loaded, edition, frozen
        return cls(name, kind, dtype, tuple(shape), ReduceOp(op), *every)


_VALUES = operator.attrgetter(*(each.name for each in fields(Request) if each.init))
_set = object.__setattr__  # which a frozen instance does not have
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def dumps(value: Any) -> bytes:
    """Encode a control message's body."""
    return _ENCODER.encode(value).encode()


def loads(data: bytes) -> Any:
    """Decode a control message's body."""
    return json.loads(data)
