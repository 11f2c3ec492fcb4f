"""Checks of what lies outside of one thread: other processes, and calls in between."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Exchange, Payload
from ringlet.compressors.core.context import Array, Workspace
from ringlet.compressors.testing.checks.one_call import PURE, by_payload, same, same_payload
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.other_process import OtherProcess
from ringlet.compressors.testing.tools.simulate import context, decode, encode, simulate

_N = 3000
_POINTS = 40
_OURS = Path(__file__).parents[2]
_OTHER = OtherProcess()


@needs(*PURE, "is_a_value", "decoding_is_the_same_everywhere", "every_rank_takes_part")
def check_another_process_agrees(compressor: Compressor) -> None:
    """Ranks are processes: one that decodes a payload knows nothing of the process that made it,
    and Python's hash() and the order of a set differ between the two.

    Send what decompress needs; draw what both sides need from ctx.rng(shared=True); use sorted()
    for the order of names and zlib.crc32 for hashes, and neither hash(), id() nor os.getpid().
    """
    sent = _sent(compressor)
    here = answer(compressor, sent)
    modules = {cls.__module__ for cls in _classes(compressor)}
    there = _OTHER.ask(modules, answer, compressor, sent)
    assert same(here["result"], there["result"]), (
        "another process decodes the payload to something else"
        if by_payload(compressor)
        else "another process gets something else out of the same exchange"
    )
    if by_payload(compressor):
        assert same_payload(here["payload"], there["payload"]), (
            "another process compresses the same values to another payload"
        )


def answer(compressor: Compressor, sent: Payload | None) -> dict[str, Any]:
    """Return what this process makes of ``sent``, and of the same values."""
    x = heavy_tailed(_N, 1)
    if sent is None:
        return {"result": simulate(compressor, [x, heavy_tailed(_N, 2)], step=2)[0]}
    ctx = context(x, rank=1, size=4, step=2)
    result = decode(compressor, sent, x.size, ctx)
    return {"result": result, "payload": _sent(compressor)}


def _sent(compressor: Compressor) -> Payload | None:
    x = heavy_tailed(_N, 1)
    if not by_payload(compressor):
        return None
    return encode(compressor, x, context(x, rank=1, size=4, step=2))


def _classes(compressor: Compressor) -> set[type]:
    found = {type(compressor)}
    for inner in vars(compressor).values():
        if isinstance(inner, Compressor):
            found |= _classes(inner)
    return found


@needs(*PURE, "another_process_agrees")
def check_calls_may_interleave(compressor: Compressor) -> None:
    """Several tensors are compressed at a time, on several threads: what a call keeps anywhere but
    in its own variables and its context is overwritten by another in the middle of it.

    Take scratch memory from ctx.workspace, which every thread has for itself, and keep nothing in
    a global or on the class.
    """
    files = {
        method.__code__.co_filename
        for cls in _classes(compressor)
        for base in cls.__mro__
        for method in map(_inside, vars(base).values())
        if method is not None and not Path(method.__code__.co_filename).is_relative_to(_OURS)
    }
    if not by_payload(compressor) or not files:
        return
    x = gaussian(_N, 1)
    lines = _interrupt(lambda: _call(compressor, x), lambda: None, files, -1)[2]
    for y in (heavy_tailed(_N - 700, 2), heavy_tailed(_N, 3)):
        expected = _call(compressor, x), _call(compressor, y, "y")
        for at in sorted({lines * point // _POINTS for point in range(_POINTS)}):
            one, other, _, place = _interrupt(
                lambda: _call(compressor, x), partial(_call, compressor, y, "y"), files, at
            )
            for got, alone in ((one, expected[0]), (other, expected[1])):
                assert got is None or _equal(got, alone), (
                    "a call gives something else if another one runs in the middle of it, at "
                    f"{place}"
                )


@needs(*PURE, "every_rank_takes_part")
def check_exchanges_may_interleave(compressor: Compressor) -> None:
    """Between what an exchange yields and what it receives, other tensors' exchanges run: what is
    yielded travels meanwhile, and must stay as it is.

    Yield a new array, or one of ctx.workspace.held(n): none that is kept in a global, on the class
    or by its length.
    """
    if by_payload(compressor):
        return
    now = compressor.at(0)
    for shape in ((40, 50), (2000,)):
        given, room = [gaussian(2000, 1), gaussian(2000, 2)], Workspace()
        alone = [
            simulate(compressor, [x], name=str(place), shape=shape)[0]
            for place, x in enumerate(given)
        ]
        outs = [np.full(2000, np.nan, np.float32) for _ in given]
        runs = [
            now.exchange(x, out, context(x, name=str(place), shape=shape, workspace=room))
            for place, (x, out) in enumerate(zip(given, outs, strict=True))
        ]
        _take_turns(runs)
        assert all(map(same, outs, alone)), (
            "an exchange gives something else if another tensor's runs between its rounds"
        )


def _take_turns(runs: list[Exchange]) -> None:
    """Run exchanges of a single rank in turn; AssertionError where what was yielded changes."""
    yielded: dict[int, tuple[Array, Array]] = {}
    going = dict(enumerate(runs))
    while going:
        for place, run in list(going.items()):
            received = yielded[place][1].copy() if place in yielded else None
            try:
                asked = next(run) if received is None else run.send(received)
            except StopIteration:
                del going[place]
                yielded.pop(place, None)
                continue
            if received is not None:  # it is valid until the next yield
                received.fill(np.nan if received.dtype.kind == "f" else -77)
            yielded[place] = asked.values, asked.values.copy()
            for values, before in yielded.values():
                assert same(values, before), (
                    "what an exchange has yielded changes while another tensor's goes on"
                )


def _inside(method: Any) -> Any:
    method = getattr(method, "__wrapped__", method)
    return method if hasattr(method, "__code__") else None


def _call(compressor: Compressor, x: Array, name: str = "x") -> tuple[Payload, Array]:
    ctx = context(x, name=name)
    payload = encode(compressor, x, ctx)
    return payload, decode(compressor, payload, x.size, ctx)


def _equal(a: tuple[Payload, Array], b: tuple[Payload, Array]) -> bool:
    return same_payload(a[0], b[0]) and same(a[1], b[1])


def _interrupt(
    outer: Callable[[], Any], inner: Callable[[], Any], files: set[str], at: int
) -> tuple[Any, Any, int, str]:
    """Run ``inner`` on another thread before line ``at`` that ``outer`` executes of ``files``.

    Returns both results, how many lines there were, and where the place was.
    """
    lines, place, found = 0, "its start", None

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal lines, place
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            if lines == at:
                place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
                thread = threading.Thread(target=run, daemon=True)
                thread.start()
                thread.join(1)  # it waits for us where a lock makes calls follow each other
            lines += 1
        return trace

    def run() -> None:
        nonlocal found
        found = inner()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = outer()
    finally:
        sys.settrace(before)
    return result, found, lines, place


CHECKS = (
    check_another_process_agrees,
    check_calls_may_interleave,
    check_exchanges_may_interleave,
)
