"""Compressors of Horovod's kind, and specs: what every adapter takes as ``compression``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ringlet.compressors import Compressor as RingletCompressor
from ringlet.compressors import NoCompression, Router, resolve
from ringlet.compressors.specs.routes import Routes, Spec


class Compressor:
    """Horovod's kind of compressor: a cast before a sum, and back.

    Subclasses may be passed to collectives. An optimizer takes those below, which stand for specs,
    and Ringlet's own, which compress more than a cast can.
    """

    spec: ClassVar[RingletCompressor | None] = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is summed in place of ``tensor``, and what ``decompress`` needs to know."""
        raise TypeError("a compressor of Horovod's kind defines compress(tensor)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the sum in the original's dtype."""
        raise TypeError("a compressor of Horovod's kind defines decompress(tensor, ctx)")


class NoneCompressor(Compressor):
    """Tensors travel as they are: the spec "none"."""

    spec = NoCompression()

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor


def _stands_for(cls: type) -> RingletCompressor | None:
    """Return the spec of one of Horovod's compressors; None where a class casts in its own way."""
    for base in cls.__mro__:
        if "spec" in vars(base):
            return base.spec if issubclass(base, Compressor) else None
        if "compress" in vars(base) or "decompress" in vars(base):
            break
    return None


def legacy(compression: Any) -> type[Compressor] | None:
    """Return a compressor of Horovod's kind that stands for no spec; None for anything else."""
    cls = compression if isinstance(compression, type) else type(compression)
    if issubclass(cls, RingletCompressor) or _stands_for(cls) is not None:
        return None
    both = callable(getattr(cls, "compress", None)) and callable(getattr(cls, "decompress", None))
    return compression if both else None


def around(
    cast: type[Compressor], tensors: Sequence[Any], combine: Callable[[list[Any]], Sequence[Any]]
) -> list[Any]:
    """Return what ``combine`` makes of ``tensors`` that ``cast`` compresses, decompressed again."""
    pairs = [cast.compress(tensor) for tensor in tensors]
    combined = combine([small for small, _ in pairs])
    both = zip(combined, pairs, strict=True)
    return [cast.decompress(tensor, context) for tensor, (_, context) in both]


def as_compressor(compression: Any) -> RingletCompressor:
    """Return one compressor from a spec string, a compressor, one of Horovod's, or None.

    Raises SpecError (a ValueError), and TypeError for any other class.
    """
    plain = compression is None or type(compression) is str
    return resolve(compression if plain else _translated(compression))


def as_router(compression: Spec | Routes | Any) -> Router:
    """Return a router from a spec, a compressor, None, or a mapping of name patterns to specs."""
    return Router(_translated(compression))


def _translated(compression: Any) -> Any:
    cls = compression if isinstance(compression, type) else type(compression)
    if (spec := _stands_for(cls)) is not None:
        return spec
    if legacy(compression) is not None:
        raise TypeError(
            f"{cls.__name__} is one of Horovod's compressors, which see a tensor's sum only; here "
            "use a spec such as 'fp16' or 'int8 | ef', or write a ringlet.compressors.Compressor"
        )
    if isinstance(compression, type):
        call = (
            f"{cls.__name__}()" if issubclass(cls, RingletCompressor) else "'fp16', or 'int8 | ef'"
        )
        raise TypeError(
            f"compression is a spec string or a Compressor instance, not the class "
            f"{cls.__name__}; write {call}"
        )
    return compression
