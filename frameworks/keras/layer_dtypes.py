"""Giving a Keras model, once it is made, the dtypes of a precision policy.

Keras casts when a layer is called: inputs and, on the way, variables become what the layer's dtype
policy computes in. Variables are float32 in any case. So a layer's policy can be set afterwards, up
to the first graph that is traced from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from ringlet.precision import Policy, parse_policy
from ringlet.precision.appliers import Applier, register_applier
from ringlet.ring.callers import public

M = TypeVar("M")

_NORMS = {
    "BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization",
    "UnitNormalization", "Normalization",
}  # fmt: skip
_FUNCTIONS = ("train_function", "test_function", "predict_function")


@public
def apply_precision(model: M, precision: str | Policy) -> M:
    """Let a Keras model's layers compute as a policy says, in place, and return the model.

    ``model`` is built and not compiled yet. Norm layers and those that the policy's ``keep`` names
    compute in float32, the others in its dtype. A pattern is matched with the names of variables
    within the model, such as "tower.head.kernel" or "tower/head/kernel", with the names of layers
    and with their classes. A layer is kept if it is named, or all of its variables are, and then
    with all layers inside of it. One that is a composite of others counts as named only where a
    pattern is spelt like its class or its name, without wildcards; names that Keras gave to
    composites are no part of their layers' names.

    In a model that was made under ``set_precision``, layers that were made with dtype="float32"
    stay so as well. Raises ValueError for a model that is compiled, traced or not built, for layers
    that are quantised or of another dtype, and for trainable variables that are not float32.
    """
    return parse_policy(precision).apply(model)


def give(model: Any, policy: Policy) -> None:
    """Do what ``apply_precision`` says."""
    target = policy.keras_dtype()
    layers = [layer for layer in _all(model) if _computes(layer)]
    _refuse(model, layers, policy)
    if target == "float32":
        return
    wide = {id(layer) for layer in _kept(model, policy)}
    # Was it made under set_precision, so that layers of float32 were told to be?
    told = any(layer.dtype_policy.name == target for layer in layers if layer is not model)
    for layer in layers:
        if id(layer) in wide:
            layer.dtype_policy = "float32"
        elif layer is model or not told:
            layer.dtype_policy = target


def _refuse(model: Any, layers: list[Any], policy: Policy) -> None:
    title = f"policy {policy.name!r}"
    if getattr(model, "compiled", False) or any(getattr(model, f, None) for f in _FUNCTIONS):
        raise ValueError(
            f"{title}: the model {model.name!r} is compiled, or has been called by predict: what "
            "was traced would not change. Apply a policy first, or load with compile=False"
        )
    if not model.built:
        raise ValueError(
            f"{title}: {model.name!r} has no variables yet; begin it with keras.Input, or build it"
        )
    for layer in layers:
        name, dtype = layer.dtype_policy.name, policy.keras_dtype()
        if name not in ("float32", dtype):
            raise ValueError(
                f"{title} is for layers of float32 or {dtype}; {layer.path or layer.name!r} is of "
                f"{name!r} already"
            )
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise ValueError(f"{title} has no use for {variable.path!r}, which is {variable.dtype}")


def _kept(model: Any, policy: Policy) -> Iterator[Any]:
    """Yield the layers that compute in float32; those with two names if one of these is kept."""

    def visit(layer: Any, place: tuple[str, ...]) -> Iterator[Any]:
        if _stays(layer, place, policy):
            yield from _all(layer)
            return
        inside = _children(layer)
        if not isinstance(layer, keras.layers.RNN):  # its cell is of its dtype
            for child in inside:
                yield from visit(child, place + _shown(layer))

    for child in _children(model) or [model]:
        yield from visit(child, ())


def _stays(layer: Any, place: tuple[str, ...], policy: Policy) -> bool:
    kind = type(layer).__name__
    whole = (*place, layer.name)
    if _NORMS & {base.__name__ for base in type(layer).__mro__}:
        return True
    if _children(layer):
        if {kind, layer.name, ".".join(whole), "/".join(whole)} & set(policy.keep):
            return True
    elif _keeps(policy, whole, kind):
        return True
    named = list(_variables(layer, place))
    return bool(named) and all(_keeps(policy, name, kind) for name, kind in named)


def _variables(layer: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield names of variables in and below a layer, and the class of the layer that has them."""
    inside = _children(layer)
    owner = place + (_shown(layer) if inside else (layer.name,))
    own = {id(v) for child in inside for v in child.weights}
    for variable in layer.weights:
        if id(variable) not in own:
            yield (*owner, variable.name), type(layer).__name__
    for child in inside:
        yield from _variables(child, owner)


def _keeps(policy: Policy, name: tuple[str, ...], kind: str) -> bool:
    return policy.keeps(".".join(name), kind) or policy.keeps("/".join(name), kind)


def _shown(layer: Any) -> tuple[str, ...]:
    """Return a composite's name as part of others; nothing if Keras made it from the class."""
    plain = re.sub(r"_\d+$", "", layer.name).replace("_", "")
    return () if plain == type(layer).__name__.lower().replace("_", "") else (layer.name,)


def _computes(layer: Any) -> bool:
    """Whether a dtype policy means something to a layer: not for inputs, and look-ups by number."""
    return "float" in layer.compute_dtype and not isinstance(layer, keras.layers.InputLayer)


def _all(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=True))


def _children(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=False, recursive=False))


def _given(model: Any, policy: Policy) -> bool:
    if not isinstance(model, keras.layers.Layer):
        return False
    give(model, policy)
    return True


register_applier("keras", Applier(_given))
