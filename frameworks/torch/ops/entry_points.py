"""What torch's compiler does where it comes to a function of Ringlet's: it calls it as it is.

Whoever compiles a whole training step, and not the model alone, has torch look into all that the
step calls. Of what communicates it can make no graph, and would compile it line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ringlet.ring import callers

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_compiler: Any = torch._C._dynamo.eval_frame  # of which torch.compile is made


def untraced(function: F) -> F:
    """Let ``torch.compile`` neither look into ``function`` nor into what that calls: a decorator.

    ``torch.compiler.disable`` does the same, but takes a second to import in every rank, and puts
    a frame of its own between callers and ``function``. Before torch 2.7 frames that ``function``
    calls, and its own where C++ calls it, are compiled all the same: slowly, with the same results.
    """
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "Ringlet communicates there"
    mark = getattr(_compiler, "set_code_exec_strategy", None)
    if mark is not None:
        skip = _compiler._FrameAction.SKIP
        mark(marks.__code__, _compiler._FrameExecStrategy(skip, skip))
    return function


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as users call it, and as their compiled steps do: a decorator."""
    return untraced(callers.public(function))
