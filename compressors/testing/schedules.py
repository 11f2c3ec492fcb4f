"""Schedules: what ``at(step)`` returns is a compressor by itself, and has to keep to the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.testing.checks.isolation import classes
from ringlet.compressors.testing.tools.named_check import CheckFailed, Named, needs
from ringlet.compressors.testing.tools.other_process import are_ours

_STEPS = (0, 1, 10, 100, 1000, 100_000)


def check_of_schedules(checks: Sequence[Named]) -> Callable[[Compressor], None]:
    """Return a check that runs ``checks`` on what a schedule uses later, with other promises."""

    @needs("schedule_goes_by_the_step", "is_a_value", "compresses_a_tensor", "replicas_agree")
    def check_schedule_keeps_promises(compressor: Compressor) -> None:
        """What at(step) returns is used from then on, by the traits that it has itself: what they
        promise has to be true then, too.

        Look at the compressor of that step, alone: ringlet check says the same of it.
        """
        known = [compressor.traits()]
        for step in _STEPS:
            now = compressor.at(step)
            new = classes(now) - classes(compressor)
            if now.traits() in known and not new:
                continue
            known.append(now.traits())
            if are_ours({cls.__module__ for cls in classes(now)}):
                continue
            for check in checks:
                try:
                    check(now)
                except CheckFailed as failure:
                    raise AssertionError(f"in step {step} it is {now}, and {failure}") from failure

    return check_schedule_keeps_promises
