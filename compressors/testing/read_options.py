"""A check of options that nobody reads: it looks at the code of a plugin, and runs nothing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cached_property, partial, partialmethod
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.options import options_of
from ringlet.compressors.testing.checks.declared import names_used
from ringlet.compressors.testing.tools.named_check import needs

# What reads attributes whose names stand nowhere.
_BY_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter", "eval"})
_LIBRARIES = frozenset({"ringlet", *sys.stdlib_module_names})
_INSTALLED = "/site-packages/", "/dist-packages/"


@needs(
    "is_a_value",
    "nothing_is_declared_in_vain",
    "schedule_goes_by_the_step",
    "options_at_their_ends",
    "other_dtypes_are_refused",
)
def check_options_are_read(compressor: Compressor) -> None:
    """A user who sets an option that nothing looks at compares runs that are one and the same.

    Read it as self.NAME where it is to count, or leave it away.
    """
    for made in _plugins(compressor):
        own = [cls for cls in made.__mro__ if not _is_library(cls.__module__)]
        packages = {cls.__module__.partition(".")[0] for cls in own}
        used: set[str] = set()
        for module in _modules(own, packages):
            used.update(_read(module, made, packages))
        if not used.isdisjoint(_BY_ANY_NAME) or any(map(_is_opaque, own)):
            continue
        theirs = [cls for cls in made.__mro__ if cls not in own and issubclass(cls, Compressor)]
        known = {n for cls in theirs if cls is not Compressor for n in options_of(cls)}
        for name in options_of(made).keys() - known:  # Ringlet's own classes read theirs
            assert name in used, (
                f"nothing looks at the option {name!r} of {made.__name__}: whatever a user gives "
                f"for it, results are the same; read self.{name}, or leave it away"
            )


def _plugins(compressor: Compressor) -> Iterator[type[Compressor]]:
    if not _is_library(type(compressor).__module__):
        yield type(compressor)
    for inner in vars(compressor).values():
        if isinstance(inner, Compressor):
            yield from _plugins(inner)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _modules(own: list[type], packages: set[str]) -> list[ModuleType]:
    """Return the modules of classes, those that they take something from, and so on."""
    found: dict[str, ModuleType] = {}
    waiting = [cls.__module__ for cls in own]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in found or not _is_theirs(name, packages):
            continue
        found[name] = module
        waiting += [_home(value) for value in list(vars(module).values())]
    return list(found.values())


def _is_theirs(name: str, packages: set[str]) -> bool:
    """Whether a module may be the plugin's: of its package, or a file beside it."""
    if not name or _is_library(name):
        return False
    if name.partition(".")[0] in packages:
        return True
    # Not as an attribute: some modules import others when they are asked for any.
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__") or ""
    return not any(part in file for part in _INSTALLED)


def _home(value: Any) -> str:
    """Return the module that something is, or is of; "" where it does not say."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType | type):
        return str(value.__module__)
    found = inspect.getattr_static(value, "__module__", None)
    return found if isinstance(found, str) else ""


def _read(module: ModuleType, made: type, packages: set[str]) -> Iterator[str]:
    """Yield the names that a module's functions use, but those of other compressors."""
    for value in list(vars(module).values()):
        inside: list[Any] = [value]
        if not _is_theirs(_home(value) or module.__name__, packages):
            continue
        if isinstance(value, type):
            if issubclass(value, Compressor) and not issubclass(made, value):
                continue
            inside = list(vars(value).values())
        for each in inside:
            for code in _codes(each):
                yield from names_used(code)


def _codes(value: Any, depth: int = 4) -> Iterator[CodeType]:
    """Yield the code of a function, and of those in a table, a decorator or a property."""
    if isinstance(value, dict | list | tuple | set):
        within = list(value.values() if isinstance(value, dict) else value)
    elif isinstance(value, property):
        within = [value.fget]
    elif isinstance(value, cached_property | partial | partialmethod):
        within = [value.func]
    elif isinstance(value, staticmethod | classmethod):
        within = [value.__func__]
    elif isinstance(value, FunctionType):
        # Dataclasses' own read all options, and what Ringlet puts around a method says nothing.
        library = _is_library(str(value.__globals__.get("__name__")))
        if value.__code__.co_filename != "<string>" and not library:
            yield value.__code__
        within = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
    else:
        within = []
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    for each in (wrapped, *within) if depth else ():
        yield from _codes(each, depth - 1)


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_opaque(cls: type) -> bool:
    """Whether a class has methods in which no names can be looked for: compiled ones."""
    for value in vars(cls).values():
        plain = isinstance(value, type | FunctionType | GetSetDescriptorType | MemberDescriptorType)
        acts = callable(value) or hasattr(type(value), "__get__")
        if acts and not plain and next(_codes(value), None) is None:
            return True
    return False


CHECKS = (check_options_are_read,)
