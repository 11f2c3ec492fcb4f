"""Editions of plugins: what tells two versions of one class apart, for ranks to compare."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from ringlet.compressors.base.contract import Compressor

_known: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_last: tuple[Compressor | None, str] = (None, "")  # neighbours, and calls in a row, share theirs


def edition(compressor: Compressor) -> str:
    """Return which sources the plugins in ``compressor`` have: "" where there are none.

    A spec names a class and the options that are not the default ones; what the class does, and
    what its defaults are, only its source tells.
    """
    global _last
    known, text = _last
    if known is not compressor:
        found = dict.fromkeys(text for cls in _classes(compressor) if (text := _of_class(cls)))
        text = ", ".join(found)
        _last = compressor, text
    return text


def _classes(compressor: Compressor) -> Iterator[type]:
    yield type(compressor)
    for inner in vars(compressor).values():
        if isinstance(inner, Compressor):
            yield from _classes(inner)


def _of_class(cls: type) -> str:
    found = _known.get(cls)
    if found is None:
        modules = dict.fromkeys(base.__module__ for base in cls.__mro__ if base is not object)
        own = [name for name in modules if name.partition(".")[0] != "ringlet"]
        texts = [(name, _source(name, cls)) for name in own]
        found = _known[cls] = ", ".join(
            f"{name} of source {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
            for name, text in texts
            if text
        )
    return found


def _source(module: str, cls: type) -> str:
    """Return the source of a module, of a script that of the class; "" where there is none."""
    loaded = sys.modules.get(module)
    try:
        if module != "__main__" and loaded is not None:
            return inspect.getsource(loaded)
        return "".join(inspect.getsource(b) for b in cls.__mro__ if b.__module__ == module)
    except Exception:  # of what was compiled, typed in, or sent from elsewhere
        return ""
