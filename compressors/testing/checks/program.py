"""Checks of what a process has once: it belongs to the user's program, and to no plugin."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import locale
import logging
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, Context, Workspace
from ringlet.compressors.testing.checks.declared import names_in
from ringlet.compressors.testing.checks.isolation import OTHERS, classes
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.other_process import are_ours
from ringlet.compressors.testing.tools.replaced import environment
from ringlet.compressors.testing.tools.simulate import by_payload, simulate

_N, _LARGE = 1000, (1 << 17) + 3
_CALLS = 6  # in each of which there is one more of what is never given back
_UNSEEN = 2345  # a step that no check has taken: what is kept for a step is not there already
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_COLLECTIONS = (list, dict, set, deque, bytearray)
_LONG = (tuple, str, bytes, np.ndarray)  # what grows by being made anew
_CACHE = functools._lru_cache_wrapper
_OPEN = Path("/dev/fd")  # files that this process has open, where there is such a folder
_ALL = locale.LC_ALL
_FILTERS, _VARIABLES = "the filters of warnings", "os.environ"
# What importing a library for the first time may change, and no plugin is blamed for.
_BY_IMPORTS = (_FILTERS, _VARIABLES)


class _Mark(Warning):
    """Of a filter that stands first until a plugin puts one before it."""


@needs(*PURE)
def check_leaves_the_program_alone(compressor: Compressor) -> None:
    """Warnings, random numbers, NumPy's errors and the number of threads are set once in a process,
    by the user's program: a plugin that sets them changes what has nothing to do with it, and what
    it never gives back ends a run after days.

    Leave np.random.seed(), np.seterr(), warnings.filterwarnings(), logging.basicConfig(),
    signal.signal(), os.environ and the like to the user, at the top of a module too. What
    np.errstate(...) or warnings.catch_warnings() sets lasts as long as its with-block. Print
    nothing. What NumPy warns of, such as the logarithm of 0, avoid by np.where(x == 0, 1, x), or
    put into such a block where it is meant. Start threads once, in a pool, close what is opened,
    and keep no list, dict or object on the class or in the module that grows with every call, nor
    an lru_cache without a limit. Scratch memory of ctx.workspace has one name, and no ctx.step in
    it.
    """
    with known_surroundings():
        _calls(compressor)  # whose first one may compile, and start threads that stay
    with known_surroundings():
        changed = _changed_by_calls(compressor)
    modules = {cls.__module__ for cls in classes(compressor)}
    if not are_ours(modules):
        # What is set at the first call alone shows where there was none.
        there = OTHERS[0].ask(modules, _changed_by_calls, compressor, _name_torch(modules))
        changed += [what for what in there if what not in _BY_IMPORTS]
        again = OTHERS[0].ask(modules, _changed_by_importing, modules)
        assert not again, (
            f"importing {again[0][0]} changes {again[0][1]}, on which the user's program relies"
        )
    assert not changed, f"a call changes {changed[0]}, on which the user's program relies"
    with known_surroundings():
        said = _said_by_calls(compressor)
    assert not said, (
        f"a call prints {said[:60]!r}, which every rank would for every tensor in every step; use "
        "logging.getLogger(__name__).debug(...), which is quiet until the user asks for it"
    )
    with known_surroundings():
        warned = _warned_of_zeros(compressor)
    assert not warned, (
        f"a call warns of {warned!r} where some values are 0, or all are, as gradients of many "
        "layers are: it ends a program that takes warnings for errors"
    )
    _check_given_back(compressor)


def _said_by_calls(compressor: Compressor) -> str:
    """Return the first line that calls print which are not the first ones."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        _calls(compressor)
    return (told.getvalue().strip().splitlines() or [""])[0]


def _warned_of_zeros(compressor: Compressor) -> str:
    """Return the first RuntimeWarning of ordinary values, some of which are 0, or all of them."""
    x = gaussian(_N, 1)
    x[::3] = 0
    half = x.copy()
    half[: _N // 2] = 0  # whole blocks, as of rows of an embedding that are not used
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        for values in (x, half, np.zeros_like(x)):
            simulate(compressor, [values], step=1)
    return next((str(w.message) for w in told if issubclass(w.category, RuntimeWarning)), "")


def _changed_by_calls(compressor: Compressor, with_torch: bool = False) -> list[str]:
    """Return what calls change; of PyTorch too, which the first of them may import."""
    if with_torch:
        importlib.import_module("torch")
    before = _surroundings()
    _calls(compressor)
    after = _surroundings()
    return [what for what in before if before[what] != after[what]]


def _name_torch(modules: set[str]) -> bool:
    """Whether functions of plugins' modules use PyTorch, which is there in the user's program."""
    return "torch" in sys.modules and any("torch" in names_in(sys.modules[m]) for m in modules)


def _changed_by_importing(modules: set[str]) -> list[tuple[str, str]]:
    """Return what the statements of plugins' modules change, and in which.

    They are executed again: what they import is there already, and is blamed for nothing.
    """
    found: list[tuple[str, str]] = []
    for name in sorted(modules - {"__main__"}):
        if are_ours({name}):
            continue
        with known_surroundings():
            before = _surroundings()
            with contextlib.suppress(Exception):  # who has no place to be found again
                importlib.reload(sys.modules[name])
            after = _surroundings()
        found += [(name, what) for what in before if before[what] != after[what]]
    return found


def _calls(compressor: Compressor) -> None:
    x = gaussian(_N, 1)
    with contextlib.suppress(Exception):  # which another check tells
        compressor.warm_up(Context(shape=(_N,), numel=_N))
    simulate(compressor, [x], step=1)
    if by_payload(compressor):  # two exchanges in one thread restore each other's np.errstate
        simulate(compressor, [x, -2 * x], step=1)
    spoiled = x.copy()
    spoiled[7] = np.nan
    for rare in (gaussian(_LARGE, 1), spoiled):  # which take a way of their own
        with contextlib.suppress(Exception):
            simulate(compressor, [rare], step=1)


def _surroundings() -> dict[str, object]:
    """Return what a process has once, by what it is called."""
    found: dict[str, object] = {
        "NumPy's own generator (np.random)": pickle.dumps(np.random.get_state()),
        "Python's own generator (random)": random.getstate(),
        "what np.seterr() sets": repr(np.geterr()),
        "what np.set_printoptions() sets": repr(np.get_printoptions()),
        _FILTERS: repr(warnings.filters),
        _VARIABLES: repr(sorted(os.environ.items())),
        "the working directory (os.chdir)": os.getcwd(),
        "what gc.disable() or gc.set_threshold() sets": repr((gc.isenabled(), gc.get_threshold())),
        "what logging.disable() sets": repr(logging.root.manager.disable),
        "the root logger (logging.basicConfig)": (logging.root.level, list(logging.root.handlers)),
        "what sys.setrecursionlimit() sets": repr(sys.getrecursionlimit()),
        "what sys.setswitchinterval() sets": sys.getswitchinterval(),
        "what is called for exceptions (sys.excepthook)": (sys.excepthook, threading.excepthook),
        "what signals do (signal.signal)": _signals(),
        "what locale.setlocale() sets": locale.setlocale(_ALL),
        "who may read new files (os.umask)": _mask(),
    }
    if hasattr(os, "sched_getaffinity"):
        found["the cores to run on (os.sched_setaffinity)"] = os.sched_getaffinity(0)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_rng_state"):
        state = torch.get_rng_state().numpy().tobytes()
        found["PyTorch's own generator (torch.manual_seed)"] = state
        found["what torch.set_num_threads() sets"] = torch.get_num_threads()
        found["what torch.set_default_dtype() sets"] = str(torch.get_default_dtype())
        found["what torch.set_grad_enabled() sets"] = torch.is_grad_enabled()
        found["what torch.use_deterministic_algorithms() sets"] = (
            torch.are_deterministic_algorithms_enabled()
        )
    return found


def _signals() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _mask() -> int:
    mask = os.umask(0o077)  # there is no other way to ask
    os.umask(mask)
    return mask


@contextlib.contextmanager
def known_surroundings() -> Iterator[None]:
    """Set what plugins set by mistake to what none of them does; restore it at the end."""
    folder, collects, disabled = os.getcwd(), gc.isenabled(), logging.root.manager.disable
    generators, mask, signals = (np.random.get_state(), random.getstate()), _mask(), _signals()
    level, handlers, words = logging.root.level, [*logging.root.handlers], locale.setlocale(_ALL)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    switches = _switches()
    with (
        warnings.catch_warnings(),
        np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
        np.printoptions(precision=7, suppress=False),
        environment(),
    ):
        os.umask(0o067)  # which nobody sets
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", _Mark)
        for name in _THREADS:
            os.environ.pop(name, None)
        gc.enable()
        logging.disable(logging.NOTSET)
        np.random.seed(271_828)
        random.seed(271_828)
        try:
            yield
        finally:
            os.chdir(folder)
            os.umask(mask)
            if cores is not None:
                os.sched_setaffinity(0, cores)
            locale.setlocale(_ALL, words)
            _put_back(signals)
            logging.root.setLevel(level)
            logging.root.handlers[:] = handlers
            (gc.enable if collects else gc.disable)()
            logging.disable(disabled)
            np.random.set_state(generators[0])
            random.setstate(generators[1])
            _put_back_switches(switches)


def _switches() -> tuple[Any, ...] | None:
    """Return what is set of PyTorch; None where it is not imported."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_rng_state"):
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    return torch.get_num_threads(), dtype, grad, deterministic


def _put_back_switches(before: tuple[Any, ...] | None) -> None:
    """Set of PyTorch what was set, or is where it is imported: the user's models go by it."""
    now = _switches()
    if now is None or now == before:
        return
    torch: Any = sys.modules["torch"]
    threads, dtype, grad, deterministic = before or (now[0], torch.float32, True, False)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)


def _put_back(signals: dict[int, Any]) -> None:
    """Let signals do what they did; only the main thread can say so, and change it before."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, before in signals.items():
        if before is not None and signal.getsignal(number) != before:  # None: a library's, in C
            signal.signal(number, before)


class _Counted(Workspace):
    """Scratch memory that counts under how many names there is some."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def array(self, name: str, n: int, dtype: npt.DTypeLike = np.float32) -> Array:
        self.names.add(name)
        return super().array(name, n, dtype)


def _check_given_back(compressor: Compressor) -> None:
    """Raise AssertionError where every call leaves something behind."""
    counted = []
    x, room = gaussian(_N, 1), _Counted()
    for call in range(_CALLS + 1):
        simulate(compressor, [x], step=_UNSEEN + call, workspace=room)
        files = len(os.listdir(_OPEN)) if _OPEN.is_dir() else 0
        counted.append({"a thread": threading.active_count(), "an open file": files})
        counted[-1]["an array of ctx.workspace under another name"] = len(room.names)
        counted[-1] |= {f"something in {n}": items for n, items in _collections(compressor).items()}
    for what in counted[0]:
        found = [count.get(what, 0) for count in counted]
        grown = all(later > earlier for earlier, later in pairwise(found))
        assert not grown, f"every call leaves {what} behind: {found[0]} became {found[-1]}"


def _collections(compressor: Compressor) -> dict[str, int]:
    """Return how much is in what plugins' classes and modules hold, by their names."""
    owners: dict[str, dict[str, Any]] = {}
    modules = set[str]()
    for cls in classes(compressor):
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] not in ("ringlet", "builtins", "abc", "typing"):
                modules.add(base.__module__)
                owners[base.__qualname__] = dict(vars(base))
                owners[base.__module__] = dict(vars(sys.modules.get(base.__module__, object)))
    return {
        f"{owner}.{name}": _items(value, modules)
        for owner, held in owners.items()
        for name, value in list(held.items())
        if not name.startswith("__") and _holds(value, modules)
    }


def _holds(value: Any, modules: set[str]) -> bool:
    """Whether something may grow: a collection, or an object of a plugin's own class."""
    grows = isinstance(value, (*_COLLECTIONS, *_LONG, _CACHE))
    return grows or (type(value).__module__ in modules and hasattr(value, "__dict__"))


def _items(value: Any, modules: set[str], depth: int = 3) -> int:
    """Return the number of items in a collection or an object, and in those that it holds."""
    if isinstance(value, _CACHE):
        kept = value.cache_info()
        return kept.currsize if kept.maxsize is None else 0
    if isinstance(value, _LONG):
        return int(value.size) if isinstance(value, np.ndarray) else len(value)
    if not depth or not _holds(value, modules):
        return 0
    held = value if isinstance(value, _COLLECTIONS) else vars(value)
    inside = list(held.values() if isinstance(held, dict) else held)
    return len(inside) + sum(_items(each, modules, depth - 1) for each in inside)


CHECKS = (check_leaves_the_program_alone,)
