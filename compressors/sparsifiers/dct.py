"""Matrices of the orthonormal cosine transform, the same bits on every host.

Libraries round ``cos`` differently, and ranks that transform back by other matrices hold other
parameters: what is needed is worked out in decimals here, whose arithmetic is defined digit by
digit.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np

from ringlet.compressors.core.context import Array

_DIGITS = 60  # of which float64 keeps 17
_SMALL = Decimal(10) ** (2 - _DIGITS)


@lru_cache(maxsize=8)
def cosines(n: int) -> tuple[Array, Array]:
    """Return the orthonormal DCT-II matrix (float32, a coefficient a row), and its transpose."""
    with localcontext(Context(prec=_DIGITS)):
        unit = (Decimal(2) / n).sqrt()
        quarter = [float(value * unit) for value in _quarter(n)]
        constant = float((1 / Decimal(n)).sqrt())
    # The rest of a period of 4 n is what a quarter says, mirrored.
    half = quarter + [0.0 - value for value in reversed(quarter[:-1])]
    period = np.array(half + half[-2:0:-1])
    frequency, place = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix = period[(2 * place + 1) * frequency % (4 * n)]
    matrix[0] = constant
    rows = matrix.astype(np.float32)
    return rows, np.ascontiguousarray(rows.T)


def _quarter(n: int) -> list[Decimal]:
    """Return cos(pi k / 2n) for k from 0 to n, by the addition theorem."""
    first = _cosine(_pi() / (2 * n))
    found = [Decimal(1), first]
    for _ in range(n - 1):
        found.append(2 * first * found[-1] - found[-2])
    found[n] = Decimal(0)
    return found[: n + 1]


def _cosine(x: Decimal) -> Decimal:
    """Return cos(x) by its power series."""
    total = term = Decimal(1)
    power = 0
    while abs(term) > _SMALL:
        power += 2
        term *= -x * x / (power * (power - 1))
        total += term
    return total


def _pi() -> Decimal:
    """Return pi by Machin's formula."""
    return 4 * (4 * _arc_tangent(5) - _arc_tangent(239))


def _arc_tangent(inverse: int) -> Decimal:
    """Return atan(1 / inverse) by its power series."""
    power = total = Decimal(1) / inverse
    odd = 1
    while abs(power) > _SMALL:
        power /= -inverse * inverse
        odd += 2
        total += power / odd
    return total
