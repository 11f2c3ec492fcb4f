"""Gradient compressors: the contract, the registry, and the built-in ones.

A compressor is a small frozen class; see ``Compressor``. It is chosen by a spec string such as
``"topk(ratio=0.01) | int8 | ef"``; see ``parse``.
"""

if __name__ != "ringlet.compressors":  # a bare `import compressors` would be a second registry
    raise ImportError("import this package as ringlet.compressors, not as compressors")

from ringlet.compressors.blocktopk import BlockTopK
from ringlet.compressors.casts import BF16, FP16
from ringlet.compressors.chain import Chain
from ringlet.compressors.context import Context, Workspace
from ringlet.compressors.contract import Compressor, Exchange, Part, Payload, Round, Traits
from ringlet.compressors.ef import ErrorFeedback, ServerErrorFeedback
from ringlet.compressors.ef21 import EF21
from ringlet.compressors.errors import (
    CompressorError,
    InputError,
    OptionError,
    PayloadError,
    SpecError,
    UnknownCompressor,
)
from ringlet.compressors.estimate import SIDCo, TopKSampled
from ringlet.compressors.fp8 import FP8
from ringlet.compressors.hadamard import Hadamard
from ringlet.compressors.lossless import Lossless
from ringlet.compressors.microscaling import MXFP4, MXFP6, MXFP8
from ringlet.compressors.minsize import MinSize
from ringlet.compressors.modifier import Modifier
from ringlet.compressors.momentum import MomentumCorrection
from ringlet.compressors.natural import Natural
from ringlet.compressors.none import NoCompression
from ringlet.compressors.nvfp4 import NVFP4
from ringlet.compressors.onebit import OneBit, SignSGD
from ringlet.compressors.options import option
from ringlet.compressors.powersgd import ACPSGD, PowerSGD
from ringlet.compressors.quantize import QSGD, Int4, Int8, MaxNorm, MinMax
from ringlet.compressors.randomk import RandomK
from ringlet.compressors.registry import lookup, names, register
from ringlet.compressors.routes import Router
from ringlet.compressors.scaled import Scaled
from ringlet.compressors.shared import SharedInt, TernGradShared
from ringlet.compressors.sparse import Threshold
from ringlet.compressors.spec import parse, resolve
from ringlet.compressors.terngrad import TernGrad
from ringlet.compressors.topk import TopK
from ringlet.compressors.warmup import Warmup

__all__ = [
    "ACPSGD",
    "BF16",
    "EF21",
    "FP8",
    "FP16",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "NVFP4",
    "QSGD",
    "BlockTopK",
    "Chain",
    "Compressor",
    "CompressorError",
    "Context",
    "ErrorFeedback",
    "Exchange",
    "Hadamard",
    "InputError",
    "Int4",
    "Int8",
    "Lossless",
    "MaxNorm",
    "MinMax",
    "MinSize",
    "Modifier",
    "MomentumCorrection",
    "Natural",
    "NoCompression",
    "OneBit",
    "OptionError",
    "Part",
    "Payload",
    "PayloadError",
    "PowerSGD",
    "RandomK",
    "Round",
    "Router",
    "SIDCo",
    "Scaled",
    "ServerErrorFeedback",
    "SharedInt",
    "SignSGD",
    "SpecError",
    "TernGrad",
    "TernGradShared",
    "Threshold",
    "TopK",
    "TopKSampled",
    "Traits",
    "UnknownCompressor",
    "Warmup",
    "Workspace",
    "lookup",
    "names",
    "option",
    "parse",
    "register",
    "resolve",
]
