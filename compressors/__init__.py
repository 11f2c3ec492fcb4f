"""Gradient compressors: the contract, the registry, and the built-in ones.

A compressor is a small frozen class; see ``Compressor``. It is chosen by a spec string such as
``"topk(ratio=0.01) | int8 | ef"``; see ``parse``.
"""

if __name__ != "ringlet.compressors":  # a bare `import compressors` would be a second registry
    raise ImportError("import this package as ringlet.compressors, not as compressors")

from ringlet.compressors.casts import BF16, FP16
from ringlet.compressors.chain import Chain
from ringlet.compressors.context import Context, Workspace
from ringlet.compressors.contract import Compressor, Exchange, Part, Payload, Round, Traits
from ringlet.compressors.ef import ErrorFeedback
from ringlet.compressors.errors import (
    CompressorError,
    OptionError,
    PayloadError,
    SpecError,
    UnknownCompressor,
)
from ringlet.compressors.modifier import Modifier
from ringlet.compressors.none import NoCompression
from ringlet.compressors.options import option
from ringlet.compressors.quantize import QSGD, Int4, Int8, MaxNorm, MinMax
from ringlet.compressors.registry import lookup, names, register
from ringlet.compressors.routes import Router
from ringlet.compressors.spec import parse, resolve
from ringlet.compressors.topk import TopK

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "Chain",
    "Compressor",
    "CompressorError",
    "Context",
    "ErrorFeedback",
    "Exchange",
    "Int4",
    "Int8",
    "MaxNorm",
    "MinMax",
    "Modifier",
    "NoCompression",
    "OptionError",
    "Part",
    "Payload",
    "PayloadError",
    "Round",
    "Router",
    "SpecError",
    "TopK",
    "Traits",
    "UnknownCompressor",
    "Workspace",
    "lookup",
    "names",
    "option",
    "parse",
    "register",
    "resolve",
]
