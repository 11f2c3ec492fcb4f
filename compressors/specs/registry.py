"""The registry: compressors by name, built in, registered at run time, or from other packages.

Other packages announce a compressor in the entry-point group ``ringlet.compressors``; it is
imported when its name is first used. A class that nobody announced is found by ``MODULE:NAME``.
"""

from __future__ import annotations

import importlib
import keyword
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TypeGuard, TypeVar

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.errors import (
    CompressorError,
    UnknownCompressor,
    did_you_mean,
    more_of,
)
from ringlet.compressors.specs.announced import announced, origin, rivals

GROUP = "ringlet.compressors"

C = TypeVar("C", bound=Compressor)

_registered: dict[str, type[Compressor]] = {}
_revision = 0
# What others call what is here; by its letters alone float32 would be taken for float16.
_ALSO_CALLED = {
    "float": "none",
    "float32": "none",
    "fp32": "none",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "error_feedback": "ef",
    "natural_compression": "natural",
    "efsignsgd": "onebit | ef",
    "dgc": "topk(ratio=0.001) | momentum_correction",
}
_OPERATIONS = ("adasum", "average", "max", "min", "product", "sum")


def name_problem(name: object) -> str | None:
    """Return why nothing can be registered as ``name``; None if it can be."""
    if not isinstance(name, str):
        return f"@register wants a name, as in @register('sign'), not {name!r}"
    if not name.isidentifier() or name != name.lower():
        near = re.sub(r"[^\w]+", "_", name).lower()
        hint = f"; write {near!r}" if near.isidentifier() and not keyword.iskeyword(near) else ""
        return f"a compressor's name is a lower-case identifier, not {name!r}{hint}"
    if keyword.iskeyword(name):
        return f"a compressor's name cannot be {name!r}, a word of Python's, which no spec can read"
    return None


def register(name: str) -> Callable[[type[C]], type[C]]:
    """Register the decorated compressor class as ``name`` for spec strings.

    Raises CompressorError if the name is no identifier or belongs to another class. A class of
    the same module and qualified name replaces its former self, as when a notebook cell runs again.
    """
    if (problem := name_problem(name)) is not None:
        raise CompressorError(problem)

    def add(cls: type[C]) -> type[C]:
        if not (isinstance(cls, type) and issubclass(cls, Compressor)):
            raise CompressorError(f"@register({name!r}) wants a subclass of Compressor, got {cls}")
        other = _registered.get(name)
        if other is not None and _place(other) != _place(cls):
            raise CompressorError(
                f"compressor {name!r} is {_place(other)} already; {_place(cls)} needs another name"
            )
        cls.spec_name = name
        _registered[name] = cls
        global _revision
        _revision += 1
        return cls

    return add


def lookup(name: str, imports: bool = True) -> type[Compressor]:
    """Return the class registered as ``name``, importing its plugin if need be.

    ``MODULE:NAME`` is a class that need not be registered; without ``imports`` its module has to
    have been imported. Raises UnknownCompressor with the closest known name, and CompressorError
    where a module does not import or has no such class.
    """
    if ":" in name:
        module, inside = name.split(":", 1)
        if not imports and module not in sys.modules:
            raise CompressorError(f"{module} has not been imported")
        return _imported(module, inside)
    if name in _registered:
        return _registered[name]
    found = [entry for entry in _plugins() if entry.name == name]
    if who := rivals(found):
        raise CompressorError(f"compressor {name!r} is offered by several packages: {who}")
    if found:
        return _load(found[0])
    known = names()
    unread = "".join(f". {what}" for what in announced(GROUP)[1])
    meant = _ALSO_CALLED.get(name.lower())
    if meant:
        hint = f"; did you mean {meant!r}?"
    elif name.lower() in _OPERATIONS:
        hint = f"; that is an operation, op=hvd.{name.title()}, and no compressor."
    else:
        hint = did_you_mean(name, known) or "."
    raise UnknownCompressor(
        f"unknown compressor {name!r}{hint} Known: {', '.join(known)}. A plugin's name is known "
        f"once its module is imported; MODULE:NAME imports it{unread}"
    )


def revision() -> int:
    """Return a number that grows whenever a class is registered."""
    return _revision


def names() -> list[str]:
    """Return every known name, plugins included, sorted.

    Not what packages announce by names that no spec can read.
    """
    announced = (entry.name for entry in _plugins())
    return sorted({*_registered, *(name for name in announced if name.isidentifier())})


def built_in() -> dict[str, type[Compressor]]:
    """Return Ringlet's own compressors by name, sorted."""
    own = {name: cls for name, cls in _registered.items() if cls.__module__.startswith(f"{GROUP}.")}
    return dict(sorted(own.items()))


def _imported(module: str, name: str) -> type[Compressor]:
    try:
        found: object = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, pytest.skip and the like are no Exceptions
        file = module.removesuffix(".py")
        hint = "" if file == module else f"; a module, not a file: write {f'{file}:{name}'!r}"
        if not hint and isinstance(error, ModuleNotFoundError) and _within(error.name, module):
            hint = "; install it on every host, or put the folder that it is in into PYTHONPATH"
        raise CompressorError(
            f"{module} does not import: {type(error).__name__}: {error}{more_of(error)}{hint}"
        ) from error
    for attribute in name.split("."):
        within, found = found, getattr(found, attribute, None)
        if found is None:
            inside = getattr(within, "__dict__", {})
            classes = [n for n, value in inside.items() if _is_compressor(value)]
            hint = did_you_mean(attribute, classes)
            raise CompressorError(f"{module} has no compressor {name!r}{hint}")
    if not _is_compressor(found):
        raise CompressorError(f"{module} has no compressor {name!r}: that is {_told(found)}")
    return found


def _within(missing: str | None, module: str) -> bool:
    """Whether the module that is ``missing`` is ``module``, or a package above it."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _told(found: object) -> str:
    """Return what somebody found in the place of a class, the same on every rank."""
    cls = type(found)
    if isinstance(found, Compressor):
        place = f"{cls.__module__}:{cls.__qualname__}"
        return f"{found!r}, which is no class; write its class and options, as in {place!r}"
    if found is Compressor:
        return "the class that compressors are derived from; write the name of yours"
    article = "an" if cls.__name__[0] in "aeiou" else "a"
    what = f"{article} {cls.__name__}"
    if isinstance(found, type):
        what = f"the class {found.__name__}"
    return f"{what}, not a class derived from ringlet.compressors.Compressor"


def _is_compressor(value: object) -> TypeGuard[type[Compressor]]:
    return isinstance(value, type) and issubclass(value, Compressor) and value is not Compressor


def _load(entry: metadata.EntryPoint) -> type[Compressor]:
    which = f"compressor {entry.name!r} of package {origin(entry)}"
    wanted = f"write MODULE:NAME of a subclass of Compressor, as in {entry.name} = 'mine:Mine'"
    if entry.pattern.match(entry.value) is None:
        raise CompressorError(f"{which} is {entry.value!r} among its entry points; {wanted}")
    try:
        cls = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, pytest.skip and the like are no Exceptions
        raise CompressorError(
            f"{which} does not import: {type(error).__name__}: {error}{more_of(error)}"
        ) from error
    if entry.name not in _registered:  # the module may have used @register itself
        if not _is_compressor(cls):
            raise CompressorError(f"{which} is {entry.value!r}: that is {_told(cls)}; {wanted}")
        try:
            register(entry.name)(cls)
        except CompressorError as error:
            raise CompressorError(f"{which} cannot be used: {error}") from None
    return _registered[entry.name]


def _plugins() -> Sequence[metadata.EntryPoint]:
    return announced(GROUP)[0]


def _place(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
