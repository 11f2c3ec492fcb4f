"""Gradient compressors: the contract, the registry, and the built-in ones.

A compressor is a small frozen class; see ``Compressor``. It is chosen by a spec string such as
``"topk(ratio=0.01) | int8 | ef"``; see ``parse``.
"""

if __name__ != "ringlet.compressors":  # a bare `import compressors` would be a second registry
    raise ImportError("import this package as ringlet.compressors, not as compressors")

import importlib
import pkgutil

from ringlet.compressors.base.chain import Chain
from ringlet.compressors.base.contract import Compressor, Exchange, Part, Payload, Round, Traits
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Context, Workspace
from ringlet.compressors.core.errors import (
    CompressorError,
    InputError,
    OptionError,
    PayloadError,
    SpecError,
    UnknownCompressor,
)
from ringlet.compressors.core.options import option
from ringlet.compressors.core.remembered import remembered
from ringlet.compressors.dense.casts import BF16, FP16
from ringlet.compressors.dense.lossless import Lossless
from ringlet.compressors.dense.none import NoCompression
from ringlet.compressors.lowrank.powersgd import ACPSGD, PowerSGD
from ringlet.compressors.modifiers.ef import ErrorFeedback, ServerErrorFeedback
from ringlet.compressors.modifiers.ef21 import EF21
from ringlet.compressors.modifiers.hadamard import Hadamard
from ringlet.compressors.modifiers.minsize import MinSize
from ringlet.compressors.modifiers.momentum import MomentumCorrection
from ringlet.compressors.modifiers.scaled import Scaled
from ringlet.compressors.modifiers.warmup import Warmup
from ringlet.compressors.quantizers.fp8 import FP8
from ringlet.compressors.quantizers.microscaling import MXFP4, MXFP6, MXFP8
from ringlet.compressors.quantizers.natural import Natural
from ringlet.compressors.quantizers.nvfp4 import NVFP4
from ringlet.compressors.quantizers.onebit import OneBit, SignSGD
from ringlet.compressors.quantizers.quantize import QSGD, Int4, Int8, MaxNorm, MinMax
from ringlet.compressors.quantizers.shared_int import SharedInt, TernGradShared
from ringlet.compressors.quantizers.terngrad import TernGrad
from ringlet.compressors.sparsifiers.blocktopk import BlockTopK
from ringlet.compressors.sparsifiers.estimate import SIDCo, TopKSampled
from ringlet.compressors.sparsifiers.randomk import RandomK
from ringlet.compressors.sparsifiers.threshold import Threshold
from ringlet.compressors.sparsifiers.topk import TopK
from ringlet.compressors.specs.parser import parse, resolve
from ringlet.compressors.specs.registry import built_in, lookup, names, register
from ringlet.compressors.specs.routes import Router

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
    "remembered",
    "resolve",
]


# Every module of these rooms registers what it holds; what the list above lacks is found here.
for _room in ("dense", "quantizers", "sparsifiers", "lowrank", "modifiers"):
    _package = importlib.import_module(f"{__name__}.{_room}")
    for _module in pkgutil.iter_modules(_package.__path__):
        importlib.import_module(f"{_package.__name__}.{_module.name}")
for _class in built_in().values():
    globals()[_class.__name__] = _class
__all__ += [_class.__name__ for _class in built_in().values() if _class.__name__ not in __all__]
