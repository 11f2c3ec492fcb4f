"""Names that MXNet 1.9.1 asks NumPy for when it is imported, and that NumPy 2 no longer has."""

from __future__ import annotations

from typing import Any

import numpy as np

_SAME = {
    "NAN": np.nan, "NaN": np.nan, "Inf": np.inf, "PINF": np.inf, "NINF": -np.inf,
    "PZERO": 0.0, "NZERO": -0.0, "product": np.prod, "sometrue": np.any, "alltrue": np.all,
    "round_": np.round, "in1d": np.isin, "object": object, "float": float, "int": int,
    "complex": complex, "str": str,
}  # fmt: skip
# MXNet offers these in mxnet.np, and calls none of them.
_OFFERED = ("mirr", "npv", "pmt", "ppmt", "pv", "rate", "msort", "trapz")


def restore() -> None:
    """Set those names in NumPy that it lacks; another call does nothing."""
    for name, value in _SAME.items():
        if name not in vars(np):
            setattr(np, name, value)
    for name in _OFFERED:
        if name not in vars(np):
            setattr(np, name, _removed(name))


def _removed(name: str) -> Any:
    def removed(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"NumPy {np.__version__} has no {name} any more")

    return removed
