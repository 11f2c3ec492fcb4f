"""Horovod's arguments of an allreduce or a reduce-scatter, as one value for all adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringlet.compressors import Compressor, NoCompression
from ringlet.fusion import Request
from ringlet.fusion.requests.legality import check_request
from ringlet.job.process_sets import ProcessSet
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.compression import around, as_compressor, legacy
from ringlet.shared.requests import (
    SUMS,
    Factors,
    check_nameable,
    reduce_op,
    reduced_as,
    scatter_gradient,
    scattered_as,
    scattered_types,
)


@dataclass(frozen=True)
class Reduction:
    """What was asked for, but for the tensors; ``single`` if that is no group of them."""

    op: ReduceOp
    factors: Factors
    name: str | None
    process_set: ProcessSet
    compressor: Compressor = NoCompression()  # noqa: RUF009 - it is immutable
    cast: Any = None  # of Horovod's kind, around the operation
    single: bool = False

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Reduction:
        """Return what a function with Horovod's arguments is called with: its ``locals()``."""
        cast = legacy(given["compression"])
        return cls(
            reduce_op(given.get("average"), given["op"]),
            (given["prescale_factor"], given["postscale_factor"]),
            given["name"],
            given["process_set"],
            NoCompression() if cast else as_compressor(given["compression"]),
            cast,
            "tensor" in given,
        )

    def run(
        self, tensors: Sequence[Any], reduce: Callable[[Sequence[Any], Reduction], list[Any]]
    ) -> list[Any]:
        """Return ``reduce(tensors, self)``, with the cast, if there is one, around it."""
        if self.cast is None:
            return reduce(tensors, self)
        plain = replace(self, cast=None)
        return around(self.cast, tensors, lambda small: reduce(small, plain))

    def kind(self, operation: str) -> str:
        """Return what its own name begins with, where it was given none."""
        return operation if self.single else f"grouped_{operation}"

    def check_name(self) -> None:
        """Raise ValueError where a compressor needs a name, and there is none."""
        if self.name is None:
            check_nameable(self.compressor)

    def summed(self) -> Compressor:
        """Return the compressor of what travels: minima and the like are cast before."""
        return self.compressor if self.op in SUMS else NoCompression()

    def wires(self, dtypes: Sequence[str]) -> list[str]:
        """Return the dtypes in which an allreduce's tensors are handed in."""
        return [reduced_as(dtype, self.op, self.compressor) for dtype in dtypes]

    def scattered_wires(self, dtypes: Sequence[str]) -> list[str]:
        """Return the dtypes in which tensors are reduce-scattered."""
        return scattered_types(dtypes, scattered_as(self.compressor))

    def check(self, operation: str, wires: Sequence[str]) -> None:
        """Raise TypeError or ValueError for what is not defined, before anything is run."""
        before, behind = self.factors
        for wire in wires:
            name = self.name or operation
            asked = Request(name, operation, wire, (1,), self.op, prescale=before, postscale=behind)
            check_request(asked, 1)

    def alike(self) -> dict[str, Any]:
        """Return what all requests of the tensors say."""
        return {
            "op": self.op,
            "prescale": self.factors[0],
            "postscale": self.factors[1],
            "process_set": self.process_set.number(),
        }

    def backward(self, stop: str) -> Reduction:
        """Return how an allreduce's gradients are reduced.

        Raises LookupError where there are none; ``stop`` is the framework's way out.
        """
        if self.op not in SUMS:
            raise _no_gradient("allreduce", self.op, stop)
        return replace(self, name=self.gradient_name(), compressor=NoCompression())

    def scatter_factor(self, stop: str) -> float:
        """Return what a reduce-scatter's gradient is multiplied by. Raises as ``backward``."""
        factor = scatter_gradient(self.op, self.factors, self.process_set)
        if factor is None:
            raise _no_gradient("reducescatter", self.op, stop)
        return factor

    def gradient_name(self) -> str | None:
        """Return the name under which its gradients travel."""
        return None if self.name is None else f"{self.name}.grad"


def _no_gradient(operation: str, op: ReduceOp, stop: str) -> LookupError:
    return LookupError(
        f"{operation} with op={op.name.title()} has no gradient; wrap its input in {stop}(...)"
    )
