"""The search: Bayesian optimisation by the package ``bayesian-optimization``, and a random one."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from ringlet.fusion.autotune.space import SWITCHES

# Where the search looks first, by place between 0 and 1: spread, so that the model has a shape.
_FIRST = {
    "fusion_threshold": (0.62, 0.85, 0.35, 0.95),
    "cycle_time": (0.3, 0.55, 0.8, 0.1),
    "streams": (0.67, 0.33, 1.0, 0.0),
    "cache": (1.0, 1.0, 0.0, 1.0),
    "hierarchical": (1.0, 0.0, 1.0, 0.0),
}
_SCALES = (0.2, 4.0)  # over which a limit may matter, as a share of its range: less fits the noise


class Search(Protocol):
    """Proposes places between 0 and 1 for each name, and learns what they score."""

    def ask(self) -> dict[str, float]:
        """Return where to look next."""

    def tell(self, place: dict[str, float], score: float) -> None:
        """Learn a score: more is better, and only ratios of scores matter."""


class BayesianSearch:
    """A Gaussian process over the logarithms of scores, and expected improvement.

    Switches are integers of the same space, and every name has a length scale of its own, so that
    those that matter little do not blur the rest. ``noise`` is the standard deviation of a score,
    as a share of the scores' spread. Raises ImportError when the package is missing.
    """

    def __init__(self, tuned: Sequence[str], seed: int = 0, noise: float = 0.05) -> None:
        try:
            from bayes_opt import BayesianOptimization
            from bayes_opt.acquisition import ExpectedImprovement
            from sklearn.gaussian_process.kernels import Matern
        except ImportError:
            raise ImportError(
                "autotuning needs bayesian-optimization: pip install 'ringlet[tune]'"
            ) from None

        class Sampled(ExpectedImprovement):  # type: ignore[misc, unused-ignore]
            def suggest(self, *args: Any, **options: Any) -> Any:
                # Refining the best of 10000 places takes a second of the rank's time, for nothing.
                return super().suggest(*args, **options | {"n_smart": 0})

        self._tuned = list(tuned)
        self._first = [
            dict(zip(tuned, places, strict=True))
            for places in zip(*(_FIRST[name] for name in tuned), strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # integers are said to be experimental
            self._optimizer: Any = BayesianOptimization(
                f=None,
                pbounds={n: (0, 1, int) if n in SWITCHES else (0.0, 1.0) for n in tuned},
                acquisition_function=Sampled(xi=0.01),
                random_state=seed,
                verbose=0,
                allow_duplicate_points=True,
            )
        kernel = Matern([0.5] * len(self._tuned), _SCALES, nu=2.5)
        self._optimizer.set_gp_params(alpha=noise**2, kernel=kernel, n_restarts_optimizer=1)

    def ask(self) -> dict[str, float]:
        """Return the next of the first places, then where most improvement is expected."""
        if self._first:
            return self._first.pop(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's own fit may not converge
            found = self._optimizer.suggest()
        return {name: float(found[name]) for name in self._tuned}

    def tell(self, place: dict[str, float], score: float) -> None:
        """Learn a score."""
        exact = {n: round(place[n]) if n in SWITCHES else place[n] for n in self._tuned}
        self._optimizer.register(params=exact, target=math.log(max(score, 1e-9)))


class RandomSearch:
    """Looks anywhere: what the other one is to be compared with."""

    def __init__(self, tuned: Sequence[str], seed: int = 0) -> None:
        self._tuned, self._random = list(tuned), random.Random(seed)

    def ask(self) -> dict[str, float]:
        """Return a place from a uniform distribution."""
        return {name: self._random.random() for name in self._tuned}

    def tell(self, place: dict[str, float], score: float) -> None:
        """Learn nothing."""
