"""Gentle compression at first.

Exponential ramps as in Lin et al., "Deep gradient compression", ICLR 2018; dense steps first as in
Tang et al., "1-bit Adam", ICML 2021, and PowerSGD's practice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.errors import OptionError
from ringlet.compressors.core.options import option, options_of
from ringlet.compressors.dense.none import NoCompression
from ringlet.compressors.specs.registry import register


@register("warmup")
class Warmup(Modifier):
    """Send ``dense`` steps uncompressed, then ramp an option to its value over ``steps`` steps.

    The option named ``ramp`` goes from ``start`` to its own value in ``stages`` equal factors:
    ``topk(ratio=0.001) | warmup(steps=4000)`` keeps 25 %, 6.3 %, 1.6 %, 0.4 % for 1000 steps each,
    then 0.1 %. Integers are rounded. Steps are those of an optimizer; of a tensor that is reduced
    by itself, as in ``ddp_hook``, they are how often it was. What is wrapped compresses as without
    a warm-up when it is called directly: schedules are followed through ``at``.
    """

    steps: int = option(0, ge=0, doc="steps of the ramp, after the dense ones")
    ramp: str = option("ratio", doc="option of the wrapped compressor that changes")
    start: float = option(0.25, gt=0, doc="its first value")
    stages: int = option(4, ge=1, le=64, doc="values it takes before its own")
    dense: int = option(0, ge=0, doc="steps without compression, at the beginning")

    def validate(self) -> None:
        """Refuse a ramp that some stage of the wrapped compressor would not take."""
        if self.steps and self.is_bound():
            for stage in range(self.stages):
                _stage(self, stage)

    def at(self, step: int) -> Compressor:
        """Return no compression, the stage of the ramp, or what is wrapped; then its schedule."""
        if step < self.dense:
            return _dense(self)
        if step < self.dense + self.steps:
            stage = (step - self.dense) * self.stages // self.steps
            return _stage(self, stage).at(step)
        return self.wrapped_compressor.at(step)

    def over_steps(self) -> Sequence[Compressor]:
        """Return no compression, the stages of the ramp, and what is wrapped over its steps."""
        dense = [_dense(self)] if self.dense else []
        ramp = [_stage(self, stage) for stage in range(self.stages if self.steps else 0)]
        later = [*ramp, self.wrapped_compressor]
        return [*dense, *(now for stage in later for now in stage.over_steps())]


@lru_cache(maxsize=4096)
def _dense(warmup: Warmup) -> Compressor:
    """Return what compresses nothing."""
    return warmup.uncompressed() or NoCompression()


@lru_cache(maxsize=4096)
def _stage(warmup: Warmup, stage: int) -> Compressor:
    """Return the wrapped compressor as it is in a stage of the ramp."""
    name, inner = warmup.ramp, warmup.wrapped_compressor
    owners = _owners(inner, name)
    if len(owners) != 1:
        found = "several options" if owners else "no option"
        raise OptionError(f"warmup: {inner} has {found} {name!r} to ramp")
    final = getattr(owners[0], name)
    if type(final) not in (int, float) or not final > 0:
        raise OptionError(f"warmup: {name}={final!r} of {inner} is no number above 0 to ramp to")
    value = warmup.start * (final / warmup.start) ** (stage / warmup.stages)
    return _replaced(inner, name, round(value) if isinstance(final, int) else value)


def _owners(compressor: Compressor, name: str) -> list[Compressor]:
    """Return what has an option ``name``, here or further in."""
    here = [compressor] if name in options_of(type(compressor)) else []
    return here + [owner for part in _parts(compressor).values() for owner in _owners(part, name)]


def _replaced(compressor: Compressor, name: str, value: Any) -> Compressor:
    changes: dict[str, Any] = {}
    for field, part in _parts(compressor).items():
        changed = _replaced(part, name, value)
        if changed is not part:
            changes[field] = changed
    if name in options_of(type(compressor)):
        changes[name] = value
    return compressor.replace(**changes) if changes else compressor


def _parts(compressor: Compressor) -> dict[str, Compressor]:
    """Return the compressors that ``compressor`` is made of, by field."""
    return {name: part for name, part in vars(compressor).items() if isinstance(part, Compressor)}
