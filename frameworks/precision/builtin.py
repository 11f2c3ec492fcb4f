"""The policies that come with Ringlet."""

from __future__ import annotations

from ringlet.compressors.specs.parser import resolve
from ringlet.precision.policies import register_policy
from ringlet.precision.policy import KEPT, Policy
from ringlet.precision.scaler import DynamicScale, LossScale, StaticScale

Patterns = tuple[str, ...]


@register_policy("fp32")
def fp32(reduction: str = "float32") -> Policy:
    """Everything in float32."""
    return Policy("fp32", reduction=reduction)


@register_policy("bf16")
def bf16(keep: Patterns = KEPT, reduction: str = "float32") -> Policy:
    """bfloat16 parameters with float32 masters: float32's range, so there is no loss scale."""
    return Policy("bf16", "bfloat16", "bf16", keep, reduction=reduction)


@register_policy("fp16")
def fp16(
    static: float | None = None,
    init: float = 65536.0,
    interval: int = 2000,
    keep: Patterns = KEPT,
    reduction: str = "float32",
) -> Policy:
    """float16 parameters with float32 masters; the loss scale is ``static``, or dynamic."""
    scale = _scale(static, init, interval)
    return Policy("fp16", "float16", "fp16", keep, scale, reduction=reduction)


@register_policy("amp_bf16")
def amp_bf16(keep: Patterns = KEPT, reduction: str = "float32") -> Policy:
    """float32 parameters, of which layers compute in bfloat16."""
    return Policy("amp_bf16", "float32", "bf16", keep, compute="bfloat16", reduction=reduction)


@register_policy("amp_fp16")
def amp_fp16(
    static: float | None = None,
    init: float = 65536.0,
    interval: int = 2000,
    keep: Patterns = KEPT,
    reduction: str = "float32",
) -> Policy:
    """float32 parameters, of which layers compute in float16; a loss scale as with ``fp16``."""
    scale = _scale(static, init, interval)
    return Policy("amp_fp16", "float32", "fp16", keep, scale, "float16", reduction)


@register_policy("fp8_wire")
def fp8_wire(format: str = "e4m3") -> Policy:
    """float32 everywhere but on the wire, by a codec of Ringlet's own: no framework needs FP8."""
    wire = f"fp8(format={format!r}) | ef"
    resolve(wire)  # which raises SpecError, a ValueError, for another format
    return Policy("fp8_wire", "float32", wire)


def _scale(static: float | None, init: float, interval: int) -> LossScale:
    if static is not None:
        return StaticScale(float(static))
    return DynamicScale(scale=float(init), interval=interval)
