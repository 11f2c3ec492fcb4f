"""A cost model of the collectives, fitted to a short measurement, that predicts what was not.

Every collective is a sum of terms, each a constant times something known beforehand. For n bytes
before compression, of which the fraction r travels, P ranks, L of them on each of H = P / L hosts:

    allreduce       2(P-1) alpha + 2(P-1)/P n beta + (P-1)/P n gamma
    allgather       2(P-1) alpha + (P-1) r n beta + n encode + P n decode
    scatter_reduce  3(P-1) alpha + 2(P-1)/P r n beta + (1 + 1/P) n encode + 2 n decode
    two_level       2(L-1) alpha_local + 2(L-1)/L n beta_local + (L-1)/L n gamma
                    + scatter_reduce of n / L bytes among H ranks

(two_level with r = 1 has an allreduce between hosts instead). One alpha of each compressed
collective is for what ranks tell each other of the payloads they received. Ranks that are far apart
(``Communicator.all_far``) send to all others at once: their P - 1 messages cost one alpha. For the
terms see
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005. Nothing here knows of congestion, stragglers or caches: ranges are those of the
measurement's own scatter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from ringlet.ring.dtypes import Array

COLLECTIVES = ("allreduce", "allgather", "scatter_reduce", "two_level")
_DRAWS = 200  # refits behind a range


@dataclass(frozen=True)
class Constants:
    """What machine, network and codec cost: seconds a message, or seconds a byte."""

    alpha: float = 0.0  # a message between hosts
    beta: float = 0.0  # a byte between hosts
    gamma: float = 0.0  # a byte added to another
    encode: float = 0.0  # a byte compressed, of those before compression
    decode: float = 0.0  # a byte restored, of those before compression
    alpha_local: float = 0.0  # a message inside a host
    beta_local: float = 0.0  # a byte inside a host


@dataclass(frozen=True)
class Workload:
    """One collective: ``nbytes`` before compression, over ``ranks``, ``local_size`` a host.

    ``ratio`` is the fraction of bytes that travels: 0.25 for int8 of float32. ``far``: the delays
    of a rank's messages to the others overlap. Raises ValueError for an unknown collective, and for
    ranks that do not fill their hosts.
    """

    collective: str
    nbytes: float
    ranks: int
    ratio: float = 1.0
    local_size: int = 1
    far: bool = False

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise ValueError(f"collective must be one of {known}, not {self.collective!r}")
        if self.ranks < 1 or self.local_size < 1 or self.ranks % self.local_size:
            raise ValueError(f"{self.ranks} ranks do not fill hosts of {self.local_size}")
        if self.nbytes < 0 or self.ratio < 0:
            raise ValueError(f"nbytes and ratio are at least 0, not {self.nbytes}, {self.ratio}")

    def terms(self) -> Constants:
        """Return what each constant is multiplied by."""
        n, p, r = self.nbytes, self.ranks, self.ratio
        others = min(1, p - 1) if self.far else p - 1
        if self.collective == "allreduce":
            return Constants(2 * others, 2 * (p - 1) / p * n, (p - 1) / p * n)
        if self.collective == "allgather":
            return Constants(2 * others, (p - 1) * r * n, 0.0, n, p * n)
        if self.collective == "scatter_reduce":
            return Constants(3 * others, 2 * (p - 1) / p * r * n, 0.0, (1 + 1 / p) * n, 2 * n)
        share = self.local_size
        kind = "allreduce" if r == 1.0 else "scatter_reduce"
        between = Workload(kind, n / share, p // share, r, far=self.far).terms()
        return Constants(
            between.alpha,
            between.beta,
            between.gamma + (share - 1) / share * n,
            between.encode,
            between.decode,
            2 * (share - 1),
            2 * (share - 1) / share * n,
        )

    def seconds(self, constants: Constants) -> float:
        """Return what it takes."""
        return float(np.dot(astuple(self.terms()), astuple(constants)))


@dataclass(frozen=True)
class Measurement:
    """What ``workload`` took: a median over repetitions, of the slowest rank."""

    workload: Workload
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Seconds, and the range that holds 90% of what the measurement's scatter allows."""

    seconds: float
    low: float
    high: float


class Model:
    """Fitted ``constants``, and the relative ``residuals`` that they left."""

    def __init__(self, measurements: Sequence[Measurement], seed: int = 0) -> None:
        times = np.array([m.seconds for m in measurements])
        if not measurements or not (times > 0).all():
            raise ValueError("a fit needs measurements, all of them longer than 0 seconds")
        terms = np.array([astuple(m.workload.terms()) for m in measurements], np.float64)
        found = _solve(terms, times)
        fitted = terms @ found
        self.constants = Constants(*(float(x) for x in found))
        self.residuals = times / np.where(fitted > 0, fitted, times) - 1.0
        # A fit hides as much of the scatter as it has constants. Short jobs scatter more than long
        # ones, so every measurement keeps its own residual, with either sign (a wild bootstrap).
        free = max(1, len(measurements) - int(np.count_nonzero(found)))
        self._scatter = np.clip(self.residuals * np.sqrt(len(measurements) / free), -0.9, 9.0)
        self._fitted = np.where(fitted > 0, fitted, times)
        self._seed = seed
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (_DRAWS, len(measurements)))
        drawn = np.maximum(fitted * (1.0 + signs * self._scatter), 0.1 * times)
        self._others = np.array([_solve(terms, row) for row in drawn])

    def predict(self, workload: Workload) -> Prediction:
        """Return what ``workload`` should take."""
        seconds = workload.seconds(self.constants)
        distance = np.abs(np.log(self._fitted / max(seconds, 1e-9)))
        alike = self._scatter[np.argsort(distance)[: max(4, distance.size // 3)]]
        noise = np.random.default_rng(self._seed).choice([*alike, *-alike], _DRAWS)
        possible = self._others @ np.array(astuple(workload.terms())) * np.maximum(1.0 + noise, 0.1)
        low, high = (float(x) for x in np.quantile(possible, [0.05, 0.95]))
        return Prediction(seconds, min(low, seconds), max(high, seconds))


def fit(measurements: Iterable[Measurement], seed: int = 0) -> Model:
    """Fit the constants by least squares of relative errors; none is below zero.

    Constants of which no measurement tells anything stay 0: measure every collective and level that
    is to be predicted, with two rank counts and sizes that differ a hundredfold. Ranges come from
    refits to residuals of random sign, drawn with ``seed``. Raises ValueError without measurements,
    or when one took no time.
    """
    return Model(list(measurements), seed)


def project(
    model: Model, nbytes: float, ranks: Sequence[int], ratio: float = 1.0, local_size: int = 1
) -> dict[tuple[str, int], Prediction]:
    """Predict every collective for every number of ranks, by (collective, ranks).

    The allreduce is uncompressed. Two levels are left out where a host has one rank.
    """
    table: dict[tuple[str, int], Prediction] = {}
    for collective, count in itertools.product(COLLECTIVES, ranks):
        if collective == "two_level" and local_size == 1:
            continue
        fraction = 1.0 if collective == "allreduce" else ratio
        per_host = local_size if collective == "two_level" else 1
        table[collective, count] = model.predict(
            Workload(collective, nbytes, count, fraction, per_host)
        )
    return table


def _solve(terms: Array, times: Array) -> Array:
    """Minimise the relative error over constants of at least 0, by trying which ones are above.

    With seven constants that is at most 127 small systems, and needs no solver.
    """
    rows = terms / times[:, None]
    scale = np.abs(rows).max(axis=0)
    known = [i for i in range(len(fields(Constants))) if scale[i] > 0]
    gram_all = (rows / np.where(scale > 0, scale, 1.0)).T
    gram, target = gram_all @ gram_all.T, gram_all.sum(axis=1)
    best, least = np.zeros(scale.size), float(times.size)
    for count in range(1, len(known) + 1):
        for chosen in map(list, itertools.combinations(known, count)):
            part = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen], rcond=1e-12)[0]
            if (part < 0).any():
                continue
            error = float(part @ gram[np.ix_(chosen, chosen)] @ part - 2 * part @ target[chosen])
            if error + times.size < least - 1e-12:
                least = error + times.size
                best = np.zeros(scale.size)
                best[chosen] = part / scale[chosen]
    return best
