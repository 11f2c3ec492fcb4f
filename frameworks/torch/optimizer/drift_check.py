"""Whether ranks began with the same parameters, settings and steps: else models drift apart."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.callers import outside
from ringlet.torch.ops.replica_check import Comparison

# What else is compared, which no parameter is called.
_SETTINGS, _STEPS = "", "."


class DriftCheck:
    """Compares ``parameters``, settings and steps after the first step, and warns on one rank.

    Nobody waits for it: ranks may wait for several optimizers, and in any order.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.groups: Sequence[Mapping[str, Any]] | None = None  # in place of those ``look`` gets
        self._comparison: Comparison | None = None
        self._begun = False

    def look(
        self,
        groups: Sequence[Mapping[str, Any]],
        steps: Mapping[str, int],
        label: str,
        ranks: ProcessSet,
    ) -> None:
        """After a step: begin to compare, or tell what was found. Collective at the first call.

        ``groups`` are the optimizer's, ``steps`` what compressors have counted, by parameter.
        """
        if not self._begun:
            self._begun = True
            others = {
                _SETTINGS: _digest(_settings(self.groups or groups)),
                _STEPS: _digest(repr(sorted(steps.items()))),
            }
            self._comparison = Comparison({**self.parameters, **others}, f"{label}.alike", ranks)
        elif self._comparison is not None and self._comparison.done():
            odd, self._comparison = self._comparison.difference(), None
            if odd is not None and current().rank == min(ranks.ranks or [0]):
                _warn(odd)


def _digest(text: str) -> torch.Tensor:
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return torch.tensor([int.from_bytes(digest, "big")])


def _settings(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the plain settings of parameter groups, as text."""
    kinds = (float, int, str, tuple)
    plain = [
        {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in g.items()}
        for g in groups
    ]
    return repr([sorted((k, v) for k, v in g.items() if isinstance(v, kinds)) for g in plain])


def _warn(odd: str) -> None:
    what, call = f"parameter {odd!r} differs", "parameters(model.state_dict()"
    if odd == _SETTINGS:
        what = "the optimizer's settings, such as lr, differ"
        call = "optimizer_state(optimizer"
    elif odd == _STEPS:
        what = (
            "the number of steps that compressors have seen, as after loading on one rank, differs"
        )
        call = "optimizer_state(optimizer"
    warnings.warn(
        f"{what} between ranks since the first step, so that their models drift apart: call "
        f"hvd.broadcast_{call}, root_rank=0) on all ranks before training",
        stacklevel=outside(),
    )
