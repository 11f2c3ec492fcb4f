"""What a rank asks for under a name: the part of a submission that all ranks must agree on."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from typing import Any

from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import storage

KINDS = ("allreduce", "allgather", "broadcast", "barrier")


@dataclass(frozen=True)
class Request:
    """One named operation on one tensor.

    ``spec`` is the compressor as text, ``collective`` "auto" or a forced way to move compressed
    payloads, ``root`` the sending rank of a broadcast. Values are multiplied by ``prescale``
    before they are compressed and by ``postscale`` after they are combined.
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

    def __post_init__(self) -> None:
        """Make plain values of NumPy's and others', on the thread of whoever asks."""
        if not isinstance(self.name, str):
            raise TypeError(f"a tensor's name is a string, not {self.name!r}")
        object.__setattr__(self, "root", operator.index(self.root))
        object.__setattr__(self, "prescale", float(self.prescale))
        object.__setattr__(self, "postscale", float(self.postscale))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes before compression."""
        return self.numel * storage(self.dtype).itemsize

    def to_list(self) -> list[Any]:
        """Return what travels to the coordinator."""
        return [
            self.name,
            self.kind,
            self.dtype,
            list(self.shape),
            int(self.op),
            self.spec,
            self.collective,
            self.root,
            self.prescale,
            self.postscale,
        ]

    @classmethod
    def from_list(cls, fields: list[Any]) -> Request:
        """Rebuild a request from ``to_list``."""
        name, kind, dtype, shape, op, spec, collective, root, prescale, postscale = fields
        return cls(
            name, kind, dtype, tuple(shape), ReduceOp(op), spec, collective, root, prescale,
            postscale,
        )  # fmt: skip


def dumps(value: Any) -> bytes:
    """Encode a control message's body."""
    return json.dumps(value, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """Decode a control message's body."""
    return json.loads(data)
