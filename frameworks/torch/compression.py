"""Horovod's names for compressors, beside spec strings."""

from __future__ import annotations

from typing import Any, ClassVar

from ringlet.compressors import FP16, Compressor, NoCompression, Router, resolve
from ringlet.compressors.routes import Routes, Spec


class Compression:
    """``Compression.none`` and ``Compression.fp16``, as in Horovod; specs do the same and more."""

    none: ClassVar[Compressor] = NoCompression()
    fp16: ClassVar[Compressor] = FP16()


def as_compressor(compression: Spec) -> Compressor:
    """Return one compressor from a spec string, a compressor, or None.

    Raises SpecError (a ValueError), and TypeError for a class, which Horovod's compressors are.
    """
    _refuse_classes(compression)
    return resolve(compression)


def as_router(compression: Spec | Routes) -> Router:
    """Return a router from a spec, a compressor, None, or a mapping of name patterns to specs."""
    _refuse_classes(compression)
    return Router(compression)


def _refuse_classes(compression: Any) -> None:
    if isinstance(compression, type):
        call = f"{compression.__name__}()" if issubclass(compression, Compressor) else "'fp16'"
        raise TypeError(
            f"compression is a spec string or a Compressor instance, not the class "
            f"{compression.__name__}; write {call}"
        )
