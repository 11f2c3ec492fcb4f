"""Shapes: what compresses matrices another way than vectors has to keep to the rules in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.testing.tools import simulate as simulation
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import CheckFailed, Named, needs, what_failed
from ringlet.compressors.testing.tools.replaced import replaced
from ringlet.compressors.testing.tools.simulate import shaped, simulate

# What is looked at in a few milliseconds, of flat tensors otherwise.
_LOOKED_AT = (
    "fills_its_output", "leaves_its_input_alone", "deterministic",
    "decoding_is_the_same_everywhere", "replicas_agree", "points_the_same_way", "extreme_values",
    "non_finite_stays_visible", "scales_with_its_values", "both_signs_arrive",
    "mean_of_equal_gradients", "sums_on_the_wire", "unbiased", "contraction", "memory_is_declared",
    "resumes_from_a_checkpoint", "feedback_telescopes", "feedback_stays_bounded",
    "late_steps_and_large_seeds", "values_may_grow", "values_may_shrink",
)  # fmt: skip
_WITHOUT_ELEMENTS = ((0, 5), (5, 0), (2, 0, 3))
_STEPS = (0, 1, 100_000)
_N, _SHAPES = 3600, (
    (60, 60), (45, 80), (15, 16, 15), (20, 20, 3, 3), (60, 60, 1, 1), (10, 6, 12, 5),
    (6, 5, 4, 5, 6),
)  # fmt: skip
_MANY, _THREE = 70_000, 3  # rows, or columns: more than 16 bits count
_MUCH = 0.5  # the cosine of a flat tensor with which others are compared
_LOUD, _FEW = 1000, 10  # times as large as the rest is one of so many rows, or columns, or more
_LEAKS = 0.5  # of the energy of that one: what comes out of the rest by another one's scale


def check_of_shapes(checks: Sequence[Named]) -> Callable[[Compressor], None]:
    """Return a check that runs the quick ones of ``checks`` on tensors that are not flat."""
    looked_at = [check for check in checks if check.name in _LOOKED_AT]

    @needs(
        *_LOOKED_AT,
        "every_shape_and_name",
        "one_overflow_is_survived",
        "granularity",
        "large_tensors",
    )
    def check_every_shape_keeps_promises(compressor: Compressor) -> None:
        """A layer's weight is a matrix, or has four dimensions, and its bias is a vector: what goes
        by ctx.shape compresses them in different ways, each of which has to keep to the rules.

        Look at what is done where ctx.shape has as many dimensions. A matrix may have no rows, or
        no columns, where x.reshape(ctx.shape[0], -1) fails: write x.reshape(ctx.shape[0],
        x.size // max(1, ctx.shape[0])). Where a row or a column has a scale, undo in decompress
        what compress has reshaped or transposed. An embedding has more rows than 16 bits count, and
        a flat tensor may have as many columns.
        """
        if not _goes_by_shape(compressor):
            return
        for shape in _WITHOUT_ELEMENTS:
            try:
                simulate(compressor, [gaussian(0, 0)] * 2, shape=shape)
            except Exception as error:
                error.add_note(f"That is a tensor of shape {shape}, which has no elements.")
                raise
        _check_directions(compressor)
        _check_many_rows(compressor)
        _check_scales(compressor)
        for what, shaping in (("matrices", _matrix), ("tensors of four dimensions", _of_four)):
            for check in looked_at:
                try:
                    with shaped(shaping):
                        check(compressor)
                except CheckFailed as failure:
                    told = what_failed(failure)
                    raise AssertionError(f"where all are {what} {told}") from failure

    return check_every_shape_keeps_promises


def _goes_by_shape(compressor: Compressor) -> bool:
    """Whether a call looks at ``ctx.shape``."""
    asked: list[bool] = []

    class Watched(Context):
        def __getattribute__(self, name: str) -> Any:
            if name == "shape":
                asked.append(True)
            return super().__getattribute__(name)

    with replaced(simulation, Context=Watched):
        for step in _STEPS:
            with suppress(Exception):  # which another check tells
                x = gaussian(2000, step)
                simulate(compressor, [x, x], step=step, shape=(40, 50))
    return bool(asked)


def _check_directions(compressor: Compressor) -> None:
    """Raise AssertionError where the elements of some shape come out in another order."""
    flat, *found = [_likeness(compressor, shape) for shape in ((_N,), *_SHAPES)]
    for shape, likeness in zip(_SHAPES, found, strict=True):
        # Of m values in any order the cosine is about 1 / sqrt(m).
        assert likeness > 4 / np.sqrt(_N) or flat < _MUCH, (
            f"what comes out of a tensor of shape {shape} has nothing to do with what went in "
            f"(their cosine is {likeness:.3f}, of a flat one {flat:.3f}): elements are in another "
            "order"
        )


def _check_many_rows(compressor: Compressor) -> None:
    """Raise AssertionError where rows and columns behind the 65536th come out elsewhere."""
    for shape, what in (((_MANY, _THREE), "rows"), ((_THREE, _MANY), "columns")):
        far = np.zeros(shape, bool)
        far[(slice(None),) * shape.index(_MANY) + (slice(1 << 16, None),)] = True
        places = far.reshape(-1)
        flat, likeness = (_likeness(compressor, s, places) for s in ((far.size,), shape))
        assert likeness > 4 / np.sqrt(places.sum()) or flat < _MUCH, (
            f"of a matrix of shape {shape} whose first 65536 {what} are 0, what comes out has "
            f"nothing to do with what went in (their cosine is {likeness:.3f}, of a flat one "
            f"{flat:.3f}): a number of {what} does not fit its 16 bits"
        )


def _check_scales(compressor: Compressor) -> None:
    """Raise AssertionError where a scale is applied to other rows or columns than its own."""
    for shape in _SHAPES:
        for axis in sorted({0, 1, len(shape) - 1}):
            if shape[axis] < _FEW:
                continue
            place = shape[axis] // 3
            loud = np.zeros(shape, bool)
            loud[(slice(None),) * axis + (place,)] = True
            most = _LEAKS * _energy(np.where(loud.reshape(-1), _loud(loud, 0), 0))
            leaks = _leak(compressor, shape, loud)
            # In flat tensors there is a scale for all, say: then the rest is as coarse as there.
            assert leaks <= most or leaks <= 4 * _leak(compressor, (_N,), loud), (
                f"of a tensor of shape {shape}, of whose axis {axis} number {place} is {_LOUD} "
                "times as large as the others, these come out about as large as that one: a scale "
                "is applied to other rows or columns than the ones that it was made of"
            )


def _leak(compressor: Compressor, shape: tuple[int, ...], loud: Array) -> float:
    """Return the energy of what comes out of the elements that are not ``loud``, in the mean."""
    outs = [simulate(compressor, [_loud(loud, s)], step=s, shape=shape)[0] for s in range(4)]
    return float(np.mean([_energy(out[~loud.reshape(-1)]) for out in outs]))


def _loud(loud: Array, step: int) -> Array:
    return gaussian(_N, step) * np.where(loud.reshape(-1), np.float32(_LOUD), np.float32(1))


def _energy(x: Array) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def _likeness(compressor: Compressor, shape: tuple[int, ...], where: Array | None = None) -> float:
    """Return the cosine of what goes in and what comes out, in the mean of a few steps."""
    found, n = [], int(np.prod(shape))
    for step in range(4):
        x = gaussian(n, step)
        if where is not None:
            x *= where
        out = simulate(compressor, [x], step=step, shape=shape)[0].astype(np.float64)
        lengths = float(np.linalg.norm(out) * np.linalg.norm(x))
        found.append(float(out @ x) / lengths if lengths else 0.0)
    return float(np.mean(found))


def _matrix(n: int) -> tuple[int, ...]:
    """Return rows and columns, about as many of each as there can be."""
    rows = max((k for k in range(1, int(np.sqrt(n)) + 1) if n % k == 0), default=1)
    return rows, n // rows


def _of_four(n: int) -> tuple[int, ...]:
    """Return a shape such as that of a convolution's weight."""
    rows, columns = _matrix(n)
    return *_matrix(rows), *_matrix(columns)
