"""Those who call: what is wrong with their calls, in a short traceback that ends at their line."""

from __future__ import annotations

import difflib
import dis
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ringlet.ring.log import level_from

P = ParamSpec("P")
R = TypeVar("R")

# What torch.distributed, DeepSpeed and Keras call arguments, and what these are here.
_ELSEWHERE = {
    "backend": ("transport",),
    "group": ("process_set", "process_group"),
    "process_group": ("process_set",),
    "reduce_op": ("op",),
    "src": ("root_rank",),
    "root": ("root_rank",),
    "params": ("named_parameters",),
    "model_parameters": ("named_parameters",),
    "gradient_accumulation_steps": ("backward_passes_per_step",),
    "compressor": ("compression",),
    "timeout": ("start_timeout",),
    "nprocs": ("np",),
    "nproc_per_node": ("np",),
}
_CUT = "_ringlet_cut"  # an attribute of errors whose traceback ended in a public function
_BETWEEN = ("ringlet", "functools", "contextlib")  # packages whose frames tell a caller nothing


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as users call it: a decorator.

    A keyword that it has not is answered with the one that was probably meant, and with all that
    there are. An error that Ringlet raises on purpose, with none but its own frames below the
    user's line, comes without these; at the log level "debug" they stay.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return function(*args, **kwargs)
            except AttributeError as error:
                if text := _no_process_set(error, function, args, kwargs):
                    raise _whole(TypeError(text)) from None
                raise
        except Exception as error:
            _improve(error, function, kwargs)
            raise

    return call


def _improve(error: Exception, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Say more of arguments that do not fit, and cut the traceback of what is the user's mistake.

    Apart from ``public``: a frame that names a traceback of its own would live, with the user's
    tensors, until garbage is collected.
    """
    below = error.__traceback__ and error.__traceback__.tb_next
    if below is None and isinstance(error, TypeError) and _CUT not in vars(error):
        error.args = (_better(function, kwargs, str(error)),)
    if (below is None or _on_purpose(error, below)) and not debugging():
        error.__traceback__ = None  # a bare raise adds no frame of its own
        vars(error)[_CUT] = True


def _whole(error: TypeError) -> TypeError:
    """Return ``error`` as one that says all there is to say, as those of public functions do."""
    vars(error)[_CUT] = True
    return error


def _no_process_set(
    error: AttributeError,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Return what is wrong where ``error`` came of a ``process_set`` that is none, else nothing."""
    nothing = object()
    given = inspect.signature(function).bind(*args, **kwargs).arguments.get("process_set", nothing)
    if given is not error.obj:
        return ""
    return no_process_set(given)


def no_process_set(given: object) -> str:
    """Return what is wrong with ``given`` in the place of a process set."""
    known = "what add_process_set() has returned, or global_process_set"
    return f"process_set is {known}, not {given!r}"


def outside() -> int:
    """Return the ``stacklevel`` at which a warning names the line that called into Ringlet."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level


def no_such_keyword(function: str, keyword: str, known: list[str]) -> str:
    """Return what is wrong with ``keyword``, which ``function`` has not."""
    near = [name for name in _ELSEWHERE.get(keyword, ()) if name in known]
    near = near or difflib.get_close_matches(keyword, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (
        f"{function}() got an unexpected keyword argument {keyword!r}{hint} "
        f"There are: {', '.join(known)}"
    )


def _better(function: Callable[..., Any], kwargs: dict[str, Any], said: str) -> str:
    """Return what Python ``said`` of arguments that do not fit, or more than that."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    known = [each.name for each in found if each.kind not in kinds and each.name != "self"]
    strange = [name for name in kwargs if name not in known]
    name: str = getattr(function, "__name__", "")
    if strange:
        return no_such_keyword(name, strange[0], known)
    return f"{said}. {name}() takes: {', '.join(known)}" if known else said


def _on_purpose(error: Exception, traceback: TracebackType) -> bool:
    """Whether Ringlet's own code raised the error, and nobody else's ran in between."""
    if isinstance(error, AssertionError):  # a fault of ours, which looks like a raise
        return False
    last = traceback
    while True:
        if _package(last.tb_frame.f_globals) not in _BETWEEN:
            return False
        if last.tb_next is None:
            break
        last = last.tb_next
    if _CUT in vars(error):  # by one public function, which another one has called
        return True
    # What Python itself raises, in the midst of an expression, is a fault of ours.
    raised = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return raised and _package(last.tb_frame.f_globals) == "ringlet"


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def debugging() -> bool:
    """Whether errors come with what others than the user have to see, at the log level "debug"."""
    try:
        asked = level_from(os.environ)
    except ValueError:  # told of by ``init``
        asked = None
    level = logging.getLogger("ringlet").getEffectiveLevel()
    return min(level, level if asked is None else asked) <= logging.DEBUG
