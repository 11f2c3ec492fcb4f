"""All checks of the kit, in the order in which they are run."""

from __future__ import annotations

from ringlet.compressors.testing import read_options
from ringlet.compressors.testing.checks import (
    batches,
    buffers,
    claims,
    declared,
    fed_back,
    isolation,
    launches,
    magnitudes,
    many_steps,
    noise,
    one_call,
    overrides,
    program,
    ranks,
    stages,
    tensor_sizes,
    training,
)
from ringlet.compressors.testing.option_values import check_of_options
from ringlet.compressors.testing.passed_on import check_of_modifiers
from ringlet.compressors.testing.schedules import check_of_schedules
from ringlet.compressors.testing.shapes import check_of_shapes
from ringlet.compressors.testing.tools.named_check import Named


def all_checks() -> list[Named]:
    """Return every check of the kit, each behind those that it needs."""
    modules = (
        declared, one_call, buffers, magnitudes, overrides, launches, batches, isolation, program,
        claims, tensor_sizes, stages, training, ranks, noise, many_steps, fed_back, read_options,
    )  # fmt: skip
    checks = _behind_needs([Named(c) for module in modules for c in module.CHECKS])
    further = (check_of_schedules, check_of_shapes, check_of_options, check_of_modifiers)
    return [*checks, *(Named(check_of(checks)) for check_of in further)]


def _behind_needs(checks: list[Named]) -> list[Named]:
    ordered: dict[str, Named] = {}
    waiting = checks
    while waiting:
        ready = [c for c in waiting if all(n in ordered for n in c.needs)]
        assert ready, f"needed in a circle, or missing: {waiting}"
        ordered[ready[0].name] = ready[0]
        waiting = [c for c in waiting if c is not ready[0]]
    return list(ordered.values())
