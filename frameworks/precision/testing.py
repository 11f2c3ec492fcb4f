"""The conformance kit for precision policies: whether one is what the optimizer counts on.

    from ringlet.precision.testing import check_policy

    def test_my_policy():
        check_policy("half_head")

``ringlet check --policy half_head`` runs the same on the command line. A failure says in a sentence
why it matters to whoever trains with the policy.
"""

from __future__ import annotations

import inspect
import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np

from ringlet.compressors import resolve
from ringlet.compressors.testing import CheckFailed, simulate
from ringlet.compressors.testing.runner import failures_of
from ringlet.compressors.testing.tools.named_check import Named
from ringlet.precision.policies import factory_of, parse_policy, registered_policies
from ringlet.precision.policy import DTYPES, REDUCTIONS, Policy
from ringlet.precision.scaler import LossScale

__all__ = ["CheckFailed", "all_checks", "check_policy"]

_COURSES = [list(course) for n in (1, 3, 6) for course in product((False, True), repeat=n)]


def all_checks() -> list[Named]:
    """Return every check of the kit."""
    return [Named(check, parse_policy, lambda p: f"policy {p.name!r}") for check in CHECKS]


def check_policy(policy: Policy | str, checks: Iterable[Named] | None = None) -> None:
    """Run all checks on a policy or spec; raises CheckFailed with everything found."""
    failures = failures_of(policy, all_checks() if checks is None else checks)
    if failures:
        raise CheckFailed("\n\n".join(failures))


def check_is_a_value(policy: Policy) -> None:
    """Ranks and workers carry copies of a policy, and a policy serves several optimizers: equal
    options must mean an equal policy, and training must not change it.
    """
    assert pickle.loads(pickle.dumps(policy)) == policy, "a pickled copy is not equal"
    before = pickle.dumps(policy)
    policy.scale.after(True).after(False)
    assert pickle.dumps(policy) == before, "a step changed the policy"
    try:
        policy.name = policy.name  # type: ignore[misc]
    except AttributeError:
        return
    raise AssertionError("its attributes can be assigned; make it a frozen dataclass")


def check_dtypes_go_together(policy: Policy) -> None:
    """Parameters, computation and sums are of dtypes that frameworks and transports know."""
    for what in ("parameters", "compute"):
        value = getattr(policy, what)
        assert value in DTYPES, f"{what} is {value!r}, none of {', '.join(DTYPES)}"
    assert policy.reduction in REDUCTIONS, f"reduction is {policy.reduction!r}"
    assert policy.compute == policy.parameters or not policy.masters, (
        f"{policy.parameters} parameters cannot compute in {policy.compute}"
    )


def check_float16_has_a_loss_scale(policy: Policy) -> None:
    """Gradients below 6e-8 are zero in float16: without a loss scale most of them are lost."""
    if policy.compute == "float16":
        assert policy.scale.watches, "it computes in float16 and has no loss scale"
    elif not policy.scale.watches:
        assert policy.scale.scale == 1, "its losses are scaled, and gradients never divided"


def check_norms_stay_in_float32(policy: Policy) -> None:
    """Norms divide by small numbers: in 16 bits their statistics overflow or vanish."""
    for name in ("norm.weight", "layers.0.norm1.weight", "model.layernorm.bias"):
        kept = policy.compute == "float32" or policy.keeps(name, "LayerNorm")
        assert kept, f"{name!r} is not kept in float32"


def check_patterns_keep_some_and_not_all(policy: Policy) -> None:
    """A pattern that matches nothing keeps nothing, and one that matches all makes 16 bits vain."""
    for pattern in policy.keep:
        assert isinstance(pattern, str), f"the pattern {pattern!r} is no string"
        assert pattern, "a pattern is empty"
        assert pattern.count("[") == pattern.count("]"), f"the pattern {pattern!r} is not closed"
    weight = "encoder.layers.3.ff.up.weight"
    if policy.compute != "float32":
        assert not policy.keeps(weight, "Linear"), f"{weight!r}, of a Linear layer, is kept too"


def check_scale_is_positive_and_finite(policy: Policy) -> None:
    """Losses are multiplied by the scale, and gradients divided: 0, NaN or Inf ends training."""
    for scale in _met(policy.scale):
        value = scale.scale
        assert isinstance(value, int | float), f"the scale is {value!r}, no number"
        assert value > 0, f"the scale became {value}"
        assert math.isfinite(value), f"the scale became {value}"


def check_scale_changes_by_powers_of_two(policy: Policy) -> None:
    """Residuals follow the scale, and only a power of two changes no bit of them."""
    for now in _met(policy.scale):
        for overflow in (False, True):
            factor = now.after(overflow).scale / now.scale
            assert math.frexp(factor)[0] == 0.5, f"the scale changed by {factor}"


def check_overflow_never_grows_the_scale(policy: Policy) -> None:
    """A scale that grows when gradients overflow skips every step from then on."""
    for now in _met(policy.scale):
        grown = now.after(True).scale
        assert grown <= now.scale, f"after an overflow the scale went from {now.scale} to {grown}"


def check_clean_steps_never_shrink_the_scale(policy: Policy) -> None:
    """A scale that shrinks without an overflow ends where small gradients are zero."""
    for now in _met(policy.scale):
        after = now.after(False).scale
        assert after >= now.scale, f"without an overflow it went from {now.scale} to {after}"


def check_scale_is_pure(policy: Policy) -> None:
    """Every rank moves its own scale: from equal states and steps they must reach equal states."""
    for course in _COURSES:
        one, other = _after(policy.scale, course), _after(policy.scale, course)
        assert one == other, f"the steps {course} led to {one} and to {other}"


def check_scale_survives_a_checkpoint(policy: Policy) -> None:
    """Saved in mid-growth and restored, training must go on as if nothing had happened."""
    for now in _met(policy.scale):
        text = json.dumps(now.state_dict())  # what JSON holds, torch.load(weights_only=True) does
        again = policy.scale.loaded(json.loads(text))
        for course in ([False], [True, False], [False] * 6):
            there, here = _after(again, course), _after(now, course)
            assert there == here, f"{text} was restored as {again}"


def check_compression_keeps_overflow_visible(policy: Policy) -> None:
    """An overflow is found in the reduced gradients: a codec that hides Inf or NaN lets the step be
    taken that should have been skipped.
    """
    compressor = resolve(policy.compression)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.linspace(-1, 1, 3000, dtype=np.float32)
        x[1234] = bad
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [x])
        assert not np.isfinite(out).all(), f"{bad} vanished in {compressor}"


def check_options_have_defaults(policy: Policy) -> None:
    """A policy is chosen by its name alone, as in precision="fp16"."""
    if policy.name not in registered_policies():
        return
    factory = factory_of(policy.name)
    for name, option in inspect.signature(factory).parameters.items():
        assert option.default is not option.empty, f"option {name!r} has no default"
    plain, again = factory(), factory()
    assert plain == again, "two calls without options give different policies"
    assert plain.name == policy.name, f"{policy.name!r} makes a policy named {plain.name!r}"


def check_has_a_name_that_can_be_written(policy: Policy) -> None:
    """Specs, logs and messages name a policy: precision="half_head(scale=64)"."""
    assert policy.name.isidentifier(), f"{policy.name!r} is no identifier"


def _after(scale: LossScale, course: Iterable[bool]) -> LossScale:
    for overflow in course:
        scale = scale.after(overflow)
    return scale


def _met(scale: LossScale) -> list[LossScale]:
    """Return states that are met in training, long runs of one kind included."""
    met = [scale]
    for course in _COURSES:
        now = scale
        for overflow in course:
            now = now.after(overflow)
            met.append(now)
    for overflow in (True, False):
        now = scale
        if not overflow and "interval" in vars(scale):
            now = replace(now, interval=2)  # type: ignore[call-arg]
        for _ in range(300):
            now = now.after(overflow)
            met.append(now)
    return met


CHECKS = (
    check_is_a_value,
    check_has_a_name_that_can_be_written,
    check_options_have_defaults,
    check_dtypes_go_together,
    check_float16_has_a_loss_scale,
    check_norms_stay_in_float32,
    check_patterns_keep_some_and_not_all,
    check_scale_is_positive_and_finite,
    check_scale_changes_by_powers_of_two,
    check_overflow_never_grows_the_scale,
    check_clean_steps_never_shrink_the_scale,
    check_scale_is_pure,
    check_scale_survives_a_checkpoint,
    check_compression_keeps_overflow_visible,
)
