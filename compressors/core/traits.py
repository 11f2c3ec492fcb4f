"""What compressors declare: the arrays they send, the rounds they exchange, what they promise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.errors import CompressorError

Payload = dict[str, Array]


class Part(NamedTuple):
    """One array of a fixed-size payload: its name, dtype (by name) and number of elements."""

    name: str
    dtype: str
    elements: int


class _Round(NamedTuple):
    values: Array
    op: Literal["mean", "sum", "max"] = "mean"


class Round(_Round):
    """One combination over all ranks: flat ``values`` (float32 or a signed integer), and how.

    ``op`` is "mean" (of floats alone), "sum" or "max". ``share`` is an array as long that holds
    the same values, or ``values`` itself: a compressor chained behind leaves there what became of
    them. None: nobody looks at them again. Raises CompressorError for any other ``op``, and for the
    mean of integers, which no integer holds.
    """

    share: Array | None

    def __new__(
        cls,
        values: Array,
        op: Literal["mean", "sum", "max"] = "mean",
        share: Array | None = None,
    ) -> Self:
        """Check that ``values`` can be combined so."""
        if op not in ("mean", "sum", "max"):
            raise CompressorError(f"Round: op must be 'mean', 'sum' or 'max', not {op!r}")
        dtype = getattr(values, "dtype", None)
        if op == "mean" and dtype is not None and dtype.kind != "f":
            raise CompressorError(
                f"Round: the mean of {dtype} values would be rounded; yield Round(values, 'sum') "
                "and divide what you receive by ctx.size in float32"
            )
        made = super().__new__(cls, values, op)
        made.share = share
        return made


Exchange = Generator[Round, Array, None]


@functools.cache
def storage(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds ``dtype`` in memory: uint16 for bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a compressor promises. The conformance kit tests what is declared here.

    combine
        "sum": payloads add up on the wire, and decoding the sum is the sum of the decoded.
        "gather": payloads must be decoded before they are added.
        "rounds": there are no payloads; ``exchange`` says what ranks combine, round by round.
    fixed_size
        The payload's arrays depend on the number of elements alone; ``layout`` gives them.
    granularity
        Compressing a piece that starts at a multiple of this many elements gives the same as
        compressing the tensor and cutting the payload there. None: a tensor is never cut.
    omega
        Unbiased with E||C(x) - x||^2 <= omega ||x||^2. None: biased, or unbounded.
    delta
        Contractive: E||C(x) - x||^2 <= (1 - delta) ||x||^2. None: not claimed.
    stateful
        Results depend on what earlier steps left in ``ctx.state``.
    gradient_units
        Names in ``ctx.state`` of what is in units of the gradient: residuals, momenta, estimates.
        They are flat float32 arrays of as many elements as the tensor, or as ``units_size`` says,
        or numbers. They are multiplied where a loss scale changes, and averaged where the number
        of ranks does; what is not named is left alone, and forgotten.
    predivide
        Averages divide before compressing, so that sums on the wire stay in range.
    scales
        Values that are twice as large give results twice as large, and so does any power of two.
        False where results, or what is sent, go by absolute sizes: a loss scale would change them.
    min_size
        Tensors with fewer elements travel uncompressed.
    in_place
        ``exchange`` writes to ``out`` only after it has last looked at ``x``, so that both may be
        one array: the engine then saves a copy of every result.
    """

    combine: Literal["sum", "gather", "rounds"] = "gather"
    fixed_size: bool = False
    granularity: int | None = None
    omega: float | None = None
    delta: float | None = None
    stateful: bool = False
    gradient_units: tuple[str, ...] = ()
    predivide: bool = False
    scales: bool = True
    min_size: int = 1024
    in_place: bool = False

    def __post_init__(self) -> None:
        if self.combine not in ("sum", "gather", "rounds"):
            raise CompressorError(
                f"Traits: combine must be 'sum', 'gather' or 'rounds', not {self.combine!r}"
            )
