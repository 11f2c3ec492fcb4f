"""The conformance kit for policies: built-ins pass it, and a gallery of mistakes does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ringlet.compressors import Compressor, register
from ringlet.precision import (
    DynamicScale,
    LossScale,
    Policy,
    StaticScale,
    parse_policy,
    registered_policies,
)
from ringlet.precision.testing import CheckFailed, all_checks, check_policy

pytestmark = pytest.mark.preloaded("torch")

BUILT_IN = [
    *registered_policies(), "fp16(static=1024)", "amp_fp16(interval=3)", "bf16(reduction='wire')",
    "fp8_wire(format='e5m2')",
]  # fmt: skip


@pytest.mark.parametrize("spec", BUILT_IN)
def test_built_in_policies_conform(spec):
    check_policy(spec)


@register("precision_kit_hides")
class Hides(Compressor):
    def compress(self, x, ctx):
        return {"values": np.nan_to_num(x, posinf=0, neginf=0)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


@dataclass(frozen=True)
class Unlike(DynamicScale):
    """A scale of which one thing is wrong."""

    wrong: str = ""

    def after(self, overflow):
        now = super().after(overflow)
        if self.wrong == "grows" and overflow:
            return replace(now, scale=self.scale * 2)
        if self.wrong == "shrinks" and not overflow:
            return replace(now, scale=self.scale / 2 if self.scale > 2 else self.scale)
        if self.wrong == "thirds" and overflow:
            return replace(now, scale=self.scale / 3 if self.scale > 1 else self.scale)
        return now

    def state_dict(self):
        state = super().state_dict()
        if self.wrong == "forgets":
            del state["clean"]
        if self.wrong == "arrays":
            state["scale"] = np.float32(state["scale"])
        return state


class Zero(LossScale):
    """A scale that ends at 0."""

    def __post_init__(self):
        pass

    def after(self, overflow):
        return Zero(self.scale / 2**600 if overflow else self.scale)


class Moody(StaticScale):
    """A scale that is not the same on two ranks."""

    def after(self, overflow):
        return replace(self, scale=float(2 ** np.random.default_rng().integers(0, 30)))


class Mutable(Policy):
    """A policy that can be changed."""

    __setattr__ = object.__setattr__


def half(**options):
    given = {"name": "half", "parameters": "float16", "scale": DynamicScale(interval=3)}
    return Policy(**given | options)


def lied(what, value):
    policy = half()
    policy.__dict__[what] = value
    return policy


GALLERY = {
    "is_a_value": Mutable("half"),
    "has_a_name_that_can_be_written": half(name="half head"),
    "options_have_defaults": replace(parse_policy("fp32"), name="kit_changes"),
    "dtypes_go_together": lied("compute", "bfloat16"),
    "float16_has_a_loss_scale": Policy("half", "float16"),
    "norms_stay_in_float32": half(keep=("*.bias",)),
    "patterns_keep_some_and_not_all": half(keep=("*norm*", "*")),
    "scale_is_positive_and_finite": half(scale=Zero(1.0)),
    "scale_changes_by_powers_of_two": half(scale=Unlike(wrong="thirds")),
    "overflow_never_grows_the_scale": half(scale=Unlike(wrong="grows")),
    "clean_steps_never_shrink_the_scale": half(scale=Unlike(wrong="shrinks")),
    "scale_is_pure": half(scale=Moody(2.0)),
    "scale_survives_a_checkpoint": half(scale=Unlike(wrong="forgets", interval=3)),
    "compression_keeps_overflow_visible": half(compression="precision_kit_hides"),
}


def test_every_check_has_a_policy_that_fails_it():
    assert list(GALLERY) == [check.name for check in all_checks()]


@pytest.mark.parametrize("name", GALLERY)
def test_mistakes_are_found_and_explained(name, monkeypatch):
    from ringlet.precision import policies

    changing = iter(range(99))
    monkeypatch.setitem(policies._factories, "kit_changes", lambda: Policy(f"odd{next(changing)}"))
    (check,) = (check for check in all_checks() if check.name == name)
    with pytest.raises(CheckFailed, match=f"fails {name!r}") as caught:
        check(GALLERY[name])
    assert f"Why it matters: {check.why}" in str(caught.value)


def test_all_that_is_wrong_is_told_at_once():
    broken = half(name="a b", compression="no_such", scale=Unlike(wrong="arrays"))
    with pytest.raises(CheckFailed) as caught:
        check_policy(broken)
    text = str(caught.value)
    for name in ("has_a_name", "compression_keeps", "scale_survives"):
        assert f"fails '{name}" in text
    assert "unknown compressor 'no_such'" in text


def ringlet(*args, cwd=None):
    command = [sys.executable, "-m", "ringlet", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


def test_on_the_command_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ringlet.precision import Policy\n"
        "def careless():\n"
        "    return Policy('careless', 'float16')\n"
    )
    ran = ringlet("check", "--policy", "mine:careless", cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "  FAILED  float16_has_a_loss_scale" in ran.stdout
    assert "Why it matters: Gradients below 6e-8" in ran.stdout
    assert "  ok      is_a_value" in ran.stdout
    for target, says in (("fp61", "did you mean 'fp16'"), ("json:nothing", "has no policy")):
        ran = ringlet("check", "--policy", target)
        assert ran.returncode == 2
        assert says in ran.stderr
        assert "Traceback" not in ran.stderr
