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
from ringlet.shared.drift import CURE_OF_JOINS, Drift
from ringlet.torch.ops.replica_check import sums_of_bits

# What else is compared, which no parameter is called.
_SETTINGS, _STEPS = "", "."


class DriftCheck:
    """Compares ``parameters``, settings and steps of ``ranks`` after the first step. See ``Drift``.

    And parameters and settings again later: a scheduler that goes by a metric of each rank's own
    gives each its own lr. ``label`` is what the optimizer is called on all of these ranks.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], label: str, ranks: ProcessSet
    ) -> None:
        self._parameters = parameters
        self._label, self._ranks = label, ranks
        self._drift, self._joins = Drift(_warn), current().joins
        self._drift.restart(label, ranks)

    def look(
        self, groups: Sequence[Mapping[str, Any]], steps: Callable[[], Mapping[str, int]]
    ) -> None:
        """After a step: begin to compare, or tell what was found. Collective where it begins.

        ``groups`` are the optimizer's, ``steps`` tells what compressors have counted, by tensor.
        """
        joins = current().joins
        if joins != self._joins:  # the steps that ranks had taken before differ
            self._joins = joins
            self._drift.restart(self._label, self._ranks, joined=True)
        self._drift.ended()
        if self._drift.due:
            compared = {**self._parameters, _SETTINGS: _digest(_settings(groups))}
            if self._drift.steps == 1 and not joins:  # which let some count fewer
                compared[_STEPS] = _digest(repr(sorted(steps().items())))
            names = sorted(compared)  # ranks may name them in another order
            self._drift.compare(names, sums_of_bits([compared[name] for name in names]))


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


def _warn(names: Sequence[str], step: int, joined: bool) -> None:
    odd = names[0]
    what, call = f"parameter {odd!r} differs", "parameters(model.state_dict()"
    if joined:
        what = "the optimizer's settings, such as lr, differ" if odd == _SETTINGS else what
        when = "since the first step behind join(), so that their models drift apart"
        warnings.warn(f"{what} between ranks {when}: {CURE_OF_JOINS}", stacklevel=outside())
        return
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
