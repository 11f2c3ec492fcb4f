"""Names of variables: what compressors are chosen by, and what they remember is filed under."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ringlet.compressors import Router

log = logging.getLogger("ringlet")


def name_of(variable: Any, place: int = 0) -> str:
    """Return a variable's path in its model, or its name, or its place among others."""
    path = getattr(variable, "path", None)
    if isinstance(path, str) and path:
        return path
    try:
        name = str(variable.name)
    except Exception:  # eager tensors have the attribute, and raise
        return f"source.{place}"
    return name.partition(":")[0] or f"source.{place}"


def assignable(variables: object) -> list[Any]:
    """Return ``variables`` as a list. Raises TypeError for what cannot be overwritten."""
    if not isinstance(variables, Iterable) or hasattr(variables, "assign"):
        what = type(variables).__name__
        raise TypeError(f"variables are a list, such as model.variables, not a {what}")
    listed = list(variables)
    for each in listed:
        if not hasattr(each, "assign"):
            raise TypeError(
                f"broadcast_variables overwrites variables, such as model.variables, which a "
                f"{type(each).__name__} is not"
            )
    return listed


def alike(name: str, other: str) -> bool:
    """Whether two names can be those of one variable in a model that was built and then loaded.

    Keras leaves Sequential models out of what it loads: "sequential/dense/kernel" comes back as
    "dense/kernel", and "adam/sequential_dense_kernel_momentum" as "adam/dense_kernel_momentum".
    """
    short, long = sorted((name, other), key=len)
    if short == long or long.endswith(f"/{short}"):
        return True
    owner, _, last = short.rpartition("/")
    owner_too, _, last_too = long.rpartition("/")
    return bool(owner) and owner == owner_too and last_too.endswith(f"_{last}")


def identity(variable: Any) -> int:
    """Return what tells variables apart: that of TensorFlow's own, or torch's, in a Keras variable.

    On JAX there is none inside: a Keras variable has another array after each step, or None.
    """
    inside = getattr(variable, "_value", None)
    lasts = hasattr(inside, "assign") or hasattr(inside, "requires_grad_")
    return id(inside if lasts else variable)


def refuse_overwritten(variables: Sequence[Any], what: str) -> None:
    """Raise ValueError where a gradient is a new value: no mean, sum or compressor is meant for it.

    Keras makes such variables in ``quantize("float8")``: scales, and the largest values of late.
    """
    for i, variable in enumerate(variables):
        if getattr(variable, "overwrite_with_gradient", False) is True:
            raise ValueError(
                f"{what}: the gradient of {name_of(variable, i)!r} is its new value "
                "(overwrite_with_gradient), and ranks would average or compress it as a gradient. "
                "Layers after quantize('float8') have such variables: train without that, for "
                "example in mixed_bfloat16"
            )


def cohorts(variables: Sequence[Any], groups: int | Sequence[Sequence[Any]] | None) -> list[str]:
    """Return, for each variable, the name of the group that it travels in; "" for any.

    ``groups`` is how many groups to make, or lists of variables. Raises ValueError for groups that
    are no such thing, or share a variable.
    """
    if groups is None or (isinstance(groups, int) and groups == 0):
        return [""] * len(variables)
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be a positive number or lists of variables: {groups}")
        return numbered_groups(len(variables), groups)
    of: dict[int, str] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Iterable) or hasattr(group, "assign"):
            raise ValueError("groups is a number, or a list of lists of variables")
        for variable in group:
            if of.setdefault(identity(variable), str(number)) != str(number):
                raise ValueError(f"{name_of(variable)!r} is in more than one of the groups")
    return [of.get(identity(variable), "") for variable in variables]


def numbered_groups(count: int, groups: int) -> list[str]:
    """Return in which of ``groups`` each of ``count`` variables is, as even as they can be."""
    return [str(i * min(groups, count) // count) for i in range(count)]


def local_variables(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, or of several.

    Raises TypeError for what is no layer, and ValueError for one that is not built yet: it has no
    variables, and those that it gets later would count as everyone's.
    """
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in listed:
        if not hasattr(layer, "trainable_variables"):
            raise TypeError(f"local_layers are Keras layers, not {type(layer).__name__}")
        if not getattr(layer, "built", True):
            name = getattr(layer, "name", type(layer).__name__)
            raise ValueError(
                f"local_layers: {name!r} is not built, and has no variables yet: build it first, "
                "by build(input_shape) or by calling the model, as ranks would average its "
                "gradients otherwise"
            )
    return [variable for layer in listed for variable in layer.trainable_variables]


def warn_of_other_groups(
    groups: Any, chosen: Sequence[str], variables: Sequence[Any], title: str
) -> None:
    """Warn of ``groups`` of which ``cohorts`` has ``chosen`` none: of another model's variables.

    Not of groups of what is frozen, or of nothing.
    """
    if not isinstance(groups, Iterable):
        return
    lost = [
        number
        for number, group in enumerate(groups)
        if str(number) not in chosen and any(getattr(v, "trainable", True) for v in group)
    ]
    if lost:
        log.warning(
            "%s: groups %s hold none of the variables that it reduces, and do nothing: those are "
            "such as %s. List variables of the model that is trained",
            title,
            ", ".join(map(str, lost)),
            ", ".join(repr(name_of(variable, i)) for i, variable in enumerate(variables[:3])),
        )


def warn_of_unmatched(router: Router, names: Sequence[str]) -> None:
    """Warn of patterns in a mapping that match none of ``names``: they are likely misspelt."""
    if lost := router.unmatched(names):
        log.warning(
            "compression: %s %s none of the variables that have gradients, and %s nothing; "
            "names are such as %s",
            ", ".join(map(repr, lost)),
            *(("matches", "compresses") if len(lost) == 1 else ("match", "compress")),
            ", ".join(map(repr, names[:3])),
        )
