"""Names for parameters, and the mistakes that people make with them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import torch

from ringlet.compressors import Compressor, Router
from ringlet.ring.callers import outside
from ringlet.torch.tensors.views import check_whole

Named = Iterable[tuple[str, torch.nn.Parameter]]

# What torch.compile, FSDP1 and activation checkpointing put into names.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def name_parameters(
    param_groups: list[dict[str, Any]], named_parameters: Named | None
) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters of an optimizer's groups by name, in the order of the names.

    Without ``named_parameters`` names are those that the optimizer was made with, if it was made of
    ``model.named_parameters()``, else positions in the parameter groups. Names of
    parameters that the optimizer does not hold are left out, with a warning if they are trainable.
    Raises ValueError for repeated names, and parameters named twice or not at all; TypeError for
    those that FSDP1 has sharded.
    """
    if named_parameters is None:
        named_parameters = _own_names(param_groups)
        return {name: p for name, p in named_pairs(named_parameters) if p.requires_grad}
    groups = [group["params"] for group in param_groups]
    held = {id(p) for params in groups for p in params}
    trainable = {id(p) for params in groups for p in params if p.requires_grad}
    named = named_pairs(named_parameters)
    if trainable and not named:
        raise ValueError(
            "named_parameters is empty: a generator serves once; call model.named_parameters() anew"
        )
    _refuse_repeated(named)
    _warn_of_extra(named, held)
    _refuse_unnamed(groups, named, held)
    return {name: p for name, p in named if id(p) in trainable}


def _refuse_repeated(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for a name of two parameters, or a parameter of two names."""
    _refuse("named_parameters repeats names", _repeated(name for name, _ in named))
    twice = set(_repeated(id(p) for _, p in named))
    _refuse(
        "named_parameters names one parameter several times",
        [name for name, p in named if id(p) in twice],
    )


def _warn_of_extra(named: Sequence[tuple[str, torch.Tensor]], held: Container[int]) -> None:
    """Warn of trainable parameters that the optimizer, by the ids ``held``, does not hold."""
    extra = [name for name, p in named if id(p) not in held and p.requires_grad]
    if extra:
        warnings.warn(
            f"named_parameters names {len(extra)} trainable parameter(s) that the optimizer "
            f"does not hold, the first {extra[0]!r}; their gradients are not reduced by it",
            stacklevel=outside(),
        )


def _refuse_unnamed(
    groups: Sequence[Sequence[torch.Tensor]],
    named: Sequence[tuple[str, torch.Tensor]],
    held: Set[int],
) -> None:
    """Raise ValueError for trainable parameters in ``groups`` that have no name."""
    known = {id(p) for _, p in named}
    unnamed = [
        f"group {i}, position {j}, shape {list(p.shape)}"
        for i, params in enumerate(groups)
        for j, p in enumerate(params)
        if p.requires_grad and id(p) not in known
    ]
    if unnamed and not any(p.requires_grad for _, p in named):
        raise ValueError(
            "named_parameters has only tensors without gradients, such as a state_dict's; pass "
            "model.named_parameters()"
        )
    if unnamed and held.isdisjoint(known):
        raise ValueError(
            "named_parameters are of another model than the optimizer's parameters: make the "
            "optimizer with the model that is trained, after whatever replaces its parameters"
        )
    _refuse("the optimizer holds parameters that named_parameters does not name", unnamed)


def _own_names(param_groups: list[dict[str, Any]]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return parameters with the names that torch keeps of them, or with their positions."""
    names = [name for group in param_groups for name in group.get("param_names", ())]
    held = [p for group in param_groups for p in group["params"]]
    if len(names) != len(held) or len(set(names)) < len(names):
        sizes = [len(group["params"]) for group in param_groups]
        names = [f"param.{i}.{j}" for i, size in enumerate(sizes) for j in range(size)]
    return list(zip(names, held, strict=True))


def named_pairs(named_parameters: Any) -> list[tuple[str, Any]]:
    """Return names with parameters. Raises ValueError for what is no ``named_parameters()``.

    Raises TypeError for parameters that FSDP1 has sharded.
    """
    if isinstance(named_parameters, torch.nn.Module):
        raise ValueError("named_parameters must be model.named_parameters(), not the model")
    if isinstance(named_parameters, str):
        raise ValueError(
            f"named_parameters must be model.named_parameters(), not {named_parameters!r}; "
            f"a spec goes behind it: compression={named_parameters!r}"
        )
    if isinstance(named_parameters, Mapping):
        named_parameters = named_parameters.items()
    one = isinstance(named_parameters, torch.Tensor) or not isinstance(named_parameters, Iterable)
    named = [named_parameters] if one else list(named_parameters)
    if any(not (isinstance(pair, tuple) and len(pair) == 2) for pair in named):
        raise ValueError(
            "named_parameters must be (name, parameter) tuples, as model.named_parameters() gives"
        )
    _refuse(
        "names of parameters must be strings",
        [repr(name) for name, _ in named if not isinstance(name, str)],
    )
    for name, p in named:
        check_whole(p, f"parameter {name!r}")
    return named


def routed(router: Router, name: str, depth: int) -> Compressor:
    """Return what ``router`` has for a parameter, whose ``name`` may hold names of wrappers.

    ``depth`` is what ``wrapped_in`` says of all names of the model.
    """
    return router(*_aliases(name, depth))


def wrapped_in(names: Iterable[str]) -> int:
    """Return in how many DistributedDataParallel (and their like) a model's parameters are.

    Each puts ``module`` before all names. Where only some begin so, the model has a module of its
    own that is called that.
    """
    least: int | None = None
    for name in names:
        parts = [*_parts(name), ""]
        found = next(i for i, part in enumerate(parts) if part != "module")
        found = min(found, len(parts) - 2)  # the last is the parameter
        least = found if least is None else min(least, found)
    return least or 0


def plain(name: str, depth: int) -> str:
    """Return what a parameter is called in a model that nothing was put around."""
    return ".".join(_parts(name)[depth:])


def warn_of_unmatched(router: Router, names: Iterable[str]) -> None:
    """Warn of patterns in a mapping that match no parameter: they are likely misspelt."""
    listed = list(names)
    depth = wrapped_in(listed)
    lost = router.unmatched(alias for name in listed for alias in _aliases(name, depth))
    if lost and listed:
        each = ("matches", "compresses") if len(lost) == 1 else ("match", "compress")
        warnings.warn(
            f"compression: {', '.join(map(repr, lost))} {each[0]} no parameter, and {each[1]} "
            f"nothing. Names are such as {', '.join(map(repr, listed[:3]))}",
            stacklevel=outside(),
        )


def _aliases(name: str, depth: int) -> tuple[str, ...]:
    """Return ``name``, and what it is without the names that wrappers of modules add."""
    short = plain(name, depth)
    return (name,) if short == name else (name, short)


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in _WRAPPERS]


def _repeated(items: Iterable[object]) -> list[object]:
    return [item for item, count in Counter(items).items() if count > 1]


def _refuse(what: str, culprits: Iterable[object]) -> None:
    listed = list(culprits)
    if listed:
        shown = ", ".join(str(item) for item in listed[:6])
        more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
        raise ValueError(f"{what}: {shown}{more}")


def grouped_names(
    named: dict[str, torch.nn.Parameter], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[str]]:
    """Return names that travel together; ValueError for parameters that are not there or twice."""
    if groups is None:
        return []
    names = list(named)
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be at least 0, got {groups}")
        # As in Horovod: the first groups are one longer. ``numbered_groups`` spreads what is left.
        each, extra = divmod(len(names), max(groups, 1))
        ends = [i * each + min(i, extra) for i in range(groups + 1)]
        return [names[a:b] for a, b in pairwise(ends) if b > a]
    if not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups is a number, or a list of lists of parameters")
    name_of = {id(p): name for name, p in named.items()}
    found = [[name_of.get(id(p), "") for p in group] for group in groups]
    flat = [name for group in found for name in group]
    if "" in flat:
        raise ValueError("groups holds a parameter that the optimizer does not train")
    _refuse("groups holds parameters several times", _repeated(flat))
    return found
