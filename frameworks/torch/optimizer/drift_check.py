"""Whether ranks have the same parameters, settings and steps: else models drift apart."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.callers import outside
from ringlet.shared.drift import is_compared
from ringlet.torch.ops.replica_check import Comparison

# What else is compared, which no parameter is called.
_SETTINGS, _STEPS = "", "."


class DriftCheck:
    """Compares ``parameters``, settings and steps after the first step, and warns on one rank.

    And parameters and settings again after 16, 32, 64, ... steps: a scheduler that goes by a metric
    of each rank's own gives each its own lr. Nobody waits for it: ranks may wait for several
    optimizers, and in any order.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._under_way: list[tuple[int, Comparison]] = []  # with the number of steps
        self._steps = 0
        self._warned = False

    def look(
        self,
        groups: Sequence[Mapping[str, Any]],
        steps: Callable[[], Mapping[str, int]],
        label: str,
        ranks: ProcessSet,
    ) -> None:
        """After a step: begin to compare, or tell what was found. Collective where it begins.

        ``groups`` are the optimizer's, ``steps`` tells what compressors have counted, by tensor.
        """
        while self._under_way and self._under_way[0][1].done():
            step, comparison = self._under_way.pop(0)
            odd = comparison.difference()
            if odd is not None and not self._warned and current().rank == min(ranks.ranks or [0]):
                _warn(odd, step)
            self._warned = self._warned or odd is not None
        self._steps += 1
        if is_compared(self._steps):
            compared = {**self._parameters, _SETTINGS: _digest(_settings(groups))}
            if self._steps == 1:  # later on ranks may have joined meanwhile
                compared[_STEPS] = _digest(repr(sorted(steps().items())))
            comparison = Comparison(compared, f"{label}.alike{self._steps}", ranks)
            self._under_way.append((self._steps, comparison))


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


def _warn(odd: str, step: int) -> None:
    what, call = f"parameter {odd!r} differs", "parameters(model.state_dict()"
    if odd == _SETTINGS and step > 1:
        warnings.warn(
            f"the optimizer's settings, such as lr, differ between ranks after {step} steps, so "
            "that their models drift apart: where a scheduler goes by a metric, average that first "
            "(hvd.allreduce)",
            stacklevel=outside(),
        )
        return
    if odd == _SETTINGS:
        what = "the optimizer's settings, such as lr, differ"
        call = "optimizer_state(optimizer"
    elif odd == _STEPS:
        what = (
            "the number of steps that compressors have seen, as after loading on one rank, differs"
        )
        call = "optimizer_state(optimizer"
    when = f"after {step} steps"
    then = (
        "after what changes it on one rank alone. Where a gradient is changed before "
        "synchronize() by way of .grad.data, or of a NumPy view, change .grad itself behind it"
    )
    if step == 1:
        when, then = "since the first step", "before training"
    warnings.warn(
        f"{what} between ranks {when}, so that their models drift apart: call "
        f"hvd.broadcast_{call}, root_rank=0) on all ranks {then}",
        stacklevel=outside(),
    )
