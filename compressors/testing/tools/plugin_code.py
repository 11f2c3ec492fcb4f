"""The code of a plugin: its classes, the modules that it is of, and the lengths that it names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial, partialmethod
from types import CellType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

from ringlet.compressors.base.contract import Compressor

_LIBRARIES = frozenset({"ringlet", *sys.stdlib_module_names})
_INSTALLED = "/site-packages/", "/dist-packages/"
# Of shorter ones other checks try many; longer ones take too long.
_NAMED = range(256, (1 << 22) + 1)
_MOST = 8  # numbers, or words, that are looked at
_PLAIN = frozenset({str, bytes, bool, int, float, complex, NoneType})  # of no module, with no code
_WORD = 40  # characters of a word


def plugins(compressor: Compressor) -> Iterator[type[Compressor]]:
    """Yield the classes that are not Ringlet's of ``compressor`` and of what it wraps."""
    if not is_library(type(compressor).__module__):
        yield type(compressor)
    for inner in vars(compressor).values():
        if isinstance(inner, Compressor):
            yield from plugins(inner)


def is_library(module: str) -> bool:
    """Whether a module is Ringlet's or Python's."""
    return module.partition(".")[0] in _LIBRARIES


def modules_of(own: list[type], packages: set[str]) -> list[ModuleType]:
    """Return the modules of classes, those that they take something from, and so on."""
    found: dict[str, ModuleType] = {}
    waiting = [cls.__module__ for cls in own]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in found or not is_theirs(name, packages):
            continue
        found[name] = module
        waiting += [home(value) for value in list(vars(module).values())]
    return list(found.values())


def is_theirs(name: str, packages: set[str]) -> bool:
    """Whether a module may be the plugin's: of its package, or a file beside it."""
    if not name or is_library(name):
        return False
    if name.partition(".")[0] in packages:
        return True
    # Not as an attribute: some modules import others when they are asked for any.
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__") or ""
    return not any(part in file for part in _INSTALLED)


def home(value: Any) -> str:
    """Return the module that something is, or is of; "" where it does not say."""
    if type(value) in _PLAIN:
        return ""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType | type):
        return str(value.__module__)
    found = inspect.getattr_static(value, "__module__", None)
    return found if isinstance(found, str) else ""


def codes_of(value: Any, depth: int = 4) -> Iterator[CodeType]:
    """Yield the code of a function, and of those in a table, a decorator or a property."""
    if type(value) in _PLAIN:
        return
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
        library = is_library(str(value.__globals__.get("__name__")))
        if value.__code__.co_filename != "<string>" and not library:
            yield value.__code__
        within = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
    else:
        within = []
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    for each in (wrapped, *within) if depth else ():
        yield from codes_of(each, depth - 1)


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def own_classes(made: type[Compressor]) -> list[type]:
    """Return the classes that ``made`` is of, but Ringlet's and Python's."""
    return [cls for cls in made.__mro__ if not is_library(cls.__module__)]


def functions_of(module: ModuleType, made: type, packages: set[str]) -> Iterator[Any]:
    """Yield what a module's functions and classes hold, but those of other compressors."""
    for value in list(vars(module).values()):
        if not is_theirs(home(value) or module.__name__, packages):
            continue
        if not isinstance(value, type):
            yield value
        elif not issubclass(value, Compressor) or issubclass(made, value):
            yield from list(vars(value).values())


def names_used(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals that some code uses, also in functions inside."""
    for each in _with_inner(code):
        yield from each.co_names


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def lengths_named(compressor: Compressor) -> list[int]:
    """Return whole numbers in the code of plugins, at which it may do something else.

    They are constants of their methods and of functions that these use, and what classes and
    modules hold under names that stand there. The largest of them, if they are many.
    """
    found: set[int] = set()
    for code, values in _code_of(compressor):
        found.update(_whole([*code.co_consts, *values]))
    return sorted(found)[-_MOST:]


def words_beside(compressor: Compressor, attribute: str) -> list[str]:
    """Return the strings, of a line at most, in code of plugins that uses this ``attribute``."""
    found: set[str] = set()
    for code, values in _code_of(compressor):
        if attribute not in code.co_names:
            continue
        for value in (*code.co_consts, *values):
            within = value if isinstance(value, tuple | list | set | frozenset) else [value]
            found.update(each for each in within if isinstance(each, str) and _is_word(each))
    return sorted(found)[:_MOST]


def uses(compressor: Compressor, names: Collection[str]) -> bool:
    """Whether the code of plugins uses an attribute or a global of one of these ``names``."""
    return any(name in names for code, _ in _code_of(compressor) for name in names_used(code))


def _code_of(compressor: Compressor) -> Iterator[tuple[CodeType, list[Any]]]:
    """Yield the code of plugins' methods and of functions that these use.

    With what classes and modules hold under the names that stand there.
    """
    for made in plugins(compressor):
        own = own_classes(made)
        packages = {cls.__module__.partition(".")[0] for cls in own}
        spaces = {cls.__module__: _space(cls.__module__) for cls in own}
        held = [vars(cls) for cls in own]
        codes = [code for each in held for value in each.values() for code in codes_of(value)]
        for code in codes:  # to which those of functions are added that they use
            used = [each for each in code.co_consts if isinstance(each, CodeType)]
            beside: list[Any] = []
            for name in code.co_names:
                values = [space[name] for space in (*held, *spaces.values()) if name in space]
                beside += values
                for value in values:
                    module = home(value)
                    if isinstance(value, FunctionType | ModuleType) and is_theirs(module, packages):
                        spaces.setdefault(module, _space(module))
                        used += codes_of(value)
            yield code, beside
            codes += [each for each in used if each not in codes]


def _space(module: str) -> Mapping[str, Any]:
    return getattr(sys.modules.get(module), "__dict__", {})


def _whole(values: Iterable[Any]) -> Iterator[int]:
    return (value for value in values if type(value) is int and value in _NAMED)


def _is_word(text: str) -> bool:
    return 0 < len(text) <= _WORD and text.isprintable() and " " not in text
