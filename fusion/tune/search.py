"""The search: Bayesian optimisation by the package ``bayesian-optimization``, and a random one."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

# Where the search looks first, by place between 0 and 1: spread, so that the model has a shape.
_FIRST = ((0.62, 0.3), (0.85, 0.55), (0.35, 0.8), (0.95, 0.1))


class Search(Protocol):
    """Proposes places between 0 and 1 for each name, and learns what they score."""

    def ask(self) -> dict[str, float]:
        """Return where to look next."""

    def tell(self, place: dict[str, float], score: float) -> None:
        """Learn a score: more is better, and only ratios of scores matter."""


class BayesianSearch:
    """A Gaussian process over the logarithms of scores, and expected improvement.

    ``noise`` is the standard deviation of a score, as a share of the scores' spread. Raises
    ImportError when the package is missing.
    """

    def __init__(self, tuned: Sequence[str], seed: int = 0, noise: float = 0.1) -> None:
        try:
            from bayes_opt import BayesianOptimization
            from bayes_opt.acquisition import ExpectedImprovement
        except ImportError:
            raise ImportError(
                "autotuning needs bayesian-optimization: pip install 'ringlet[tune]'"
            ) from None
        self._tuned = list(tuned)
        self._first = [dict(zip(BOTH, place, strict=True)) for place in _FIRST]
        self._optimizer: Any = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(tuned, (0.0, 1.0)),
            acquisition_function=ExpectedImprovement(xi=0.01),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimizer.set_gp_params(alpha=noise**2)

    def ask(self) -> dict[str, float]:
        """Return the next of the first places, then where most improvement is expected."""
        if self._first:
            place = self._first.pop(0)
            return {name: place[name] for name in self._tuned}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's own fit may not converge
            found = self._optimizer.suggest()
        return {name: float(found[name]) for name in self._tuned}

    def tell(self, place: dict[str, float], score: float) -> None:
        """Learn a score."""
        self._optimizer.register(params=place, target=math.log(max(score, 1e-9)))


class RandomSearch:
    """Looks anywhere: what the other one is to be compared with."""

    def __init__(self, tuned: Sequence[str], seed: int = 0) -> None:
        self._tuned, self._random = list(tuned), random.Random(seed)

    def ask(self) -> dict[str, float]:
        """Return a place from a uniform distribution."""
        return {name: self._random.random() for name in self._tuned}

    def tell(self, place: dict[str, float], score: float) -> None:
        """Learn nothing."""


BOTH = ("fusion_threshold", "cycle_time")
