"""Checks of what lies outside of one thread: other processes, and calls in between."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Exchange, Payload
from ringlet.compressors.core.context import Array, Workspace
from ringlet.compressors.testing.tools.equality import same, same_payload
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.other_process import OtherProcess, are_ours
from ringlet.compressors.testing.tools.plugin_code import modules_of, own_classes, plugins
from ringlet.compressors.testing.tools.replaced import environment, replaced
from ringlet.compressors.testing.tools.simulate import by_payload, context, decode, encode, simulate

_N, _LARGE = 3000, (1 << 17) + 3
_POINTS = 40
_OURS = Path(__file__).parents[2]
# Two processes have the same order of a set of two strings by chance, every second time. With these
# seeds, nine of ten pairs of the names that payloads have are not in the same order in all three.
OTHERS = OtherProcess(1), OtherProcess(2), OtherProcess(9)
_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS",
    "RINGLET_RANK", "RINGLET_SIZE", "RINGLET_LOCAL_RANK", "RINGLET_LOCAL_SIZE",
    "RINGLET_CROSS_RANK", "RINGLET_CROSS_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


@needs(*PURE, "is_a_value", "decoding_is_the_same_everywhere", "every_rank_takes_part")
def check_another_process_agrees(compressor: Compressor) -> None:
    """Ranks are processes: one that decodes a payload knows nothing of the process that made it,
    and Python's hash() and the order of a set differ between the two.

    Send what decompress needs; draw what both sides need from ctx.rng(shared=True); use sorted()
    for the order of names and zlib.crc32 for hashes, and neither hash(), id() nor os.getpid(). Go
    by nothing that hosts do not have alike: how many cores there are, what the host is called, what
    stands in os.environ. What a cache keeps it must find by all that it was made of: seed, step,
    name, stage, rank and length.
    """
    sent = _sent(compressor)
    here = answer(compressor, sent)
    modules = {cls.__module__ for cls in classes(compressor)}
    others = OTHERS[: 1 if are_ours(modules) else None]
    for other in others:
        other.begin()
    for other in others:
        there = other.ask(modules, elsewhere, compressor, sent)
        for what, value in here["promises"].items():
            found = there["promises"].get(what)
            assert value == found, f"another process finds {what} {found!r}, this one {value!r}"
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
    found: dict[str, Any] = {"promises": _promises(compressor)}
    if sent is None:
        return found | {"result": simulate(compressor, [x, heavy_tailed(_N, 2)], step=2)[0]}
    ctx = context(x, rank=1, size=4, step=2)
    result = decode(compressor.at(2), sent, x.size, ctx)
    return found | {"result": result, "payload": _sent(compressor)}


def _promises(compressor: Compressor) -> dict[str, Any]:
    """Return what the engine goes by before it compresses anything, which ranks compare."""
    found: dict[str, Any] = {}
    for step in (0, 2, 100_000):
        now = compressor.at(step)
        found[f"in step {step}"] = repr(now)
        for field in dataclasses.fields(now.traits()):
            found[f"in step {step} {field.name}"] = getattr(now.traits(), field.name)
        if by_payload(now) and now.traits().fixed_size:
            found[f"in step {step} layout({_N})"] = now.layout(_N)
    return found


def elsewhere(compressor: Compressor, sent: Payload | None) -> dict[str, Any]:
    """Return the same on what looks like another host, where another tensor was there before."""
    host = "elsewhere"
    with (
        replaced(os, cpu_count=lambda: 7),
        _other_cores(),
        replaced(socket, gethostname=lambda: host),
        replaced(platform, node=lambda: host),
        environment(HOSTNAME=host, **dict.fromkeys(_VARIABLES, "3")),
    ):
        simulate(compressor, [heavy_tailed(_N, 3)] * 2, step=2, name="before")
        return answer(compressor, sent)


@contextmanager
def _other_cores() -> Iterator[None]:
    """Let libraries that are loaded say, too, that there are as many cores as another host has."""
    with ExitStack() as stack:
        for module in (sys.modules.get("numba"), sys.modules.get("torch")):
            if "get_num_threads" in getattr(module, "__dict__", {}):
                stack.enter_context(replaced(module, get_num_threads=lambda: 7))
        if hasattr(os, "sched_getaffinity"):
            stack.enter_context(replaced(os, sched_getaffinity=lambda _: set(range(7))))
        yield


def _sent(compressor: Compressor) -> Payload | None:
    x = heavy_tailed(_N, 1)
    if not by_payload(compressor):
        return None
    return encode(compressor.at(2), x, context(x, rank=1, size=4, step=2))


def classes(compressor: Compressor) -> set[type]:
    """Return the classes of ``compressor`` and of all that it is made of."""
    found = {type(compressor)}
    for inner in vars(compressor).values():
        if isinstance(inner, Compressor):
            found |= classes(inner)
    return found


@needs(*PURE, "another_process_agrees", "exchanges_may_interleave", "leaves_the_program_alone")
def check_calls_may_interleave(compressor: Compressor) -> None:
    """Several tensors are compressed at a time, on several threads: what a call keeps anywhere but
    in its own variables and its context is overwritten by another in the middle of it.

    Take scratch memory from ctx.workspace, which every thread has for itself, and keep nothing in
    a global or on the class.
    """
    files = {
        method.__code__.co_filename
        for cls in classes(compressor)
        for base in cls.__mro__
        for method in map(_inside, vars(base).values())
        if method is not None and not Path(method.__code__.co_filename).is_relative_to(_OURS)
    }
    # What helpers in other files of the plugin keep is overwritten just so.
    for made in plugins(compressor):
        own = own_classes(made)
        packages = {cls.__module__.partition(".")[0] for cls in own}
        files.update(filter(None, (m.__dict__.get("__file__") for m in modules_of(own, packages))))
    if not files:
        return
    x = gaussian(_N, 1)
    lines = _interrupt(lambda: _call(compressor, x), lambda: None, files, set())[2]
    # A simulated exchange takes longer than a call.
    others = (heavy_tailed(_N - 700, 2), heavy_tailed(_N, 3))[0 if by_payload(compressor) else 1 :]
    for y in others:
        count = _POINTS if by_payload(compressor) else _POINTS // 4
        points = {lines * point // count for point in range(count)}
        disturbed = partial(_disturbed, compressor, x, y, files)
        place = disturbed(points)
        if place:  # look for the first that does it alone
            place = next(filter(None, (disturbed({at}) for at in sorted(points))), place)
        assert not place, (
            f"a call gives something else if another one runs in the middle of it, at {place}"
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
    for shape in ((40, 50), (2000,), (_LARGE,)):
        n, room = int(np.prod(shape)), Workspace()
        given = [gaussian(n, 1), gaussian(n, 2)]
        alone = [
            simulate(compressor, [x], name=str(place), shape=shape)[0]
            for place, x in enumerate(given)
        ]
        outs = [np.full(n, np.nan, np.float32) for _ in given]
        runs = [
            now.exchange(x, out, context(x, name=str(place), shape=shape, workspace=room))
            for place, (x, out) in enumerate(zip(given, outs, strict=True))
        ]
        _take_turns(runs)
        assert all(map(same, outs, alone)), (
            f"an exchange of {n} elements gives something else if another tensor's runs between "
            "its rounds"
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
                    f"what an exchange has yielded, {values.size} {values.dtype}, changes while "
                    "another tensor's goes on"
                )


def _inside(method: Any) -> Any:
    method = getattr(method, "__wrapped__", method)
    return method if hasattr(method, "__code__") else None


def _call(compressor: Compressor, x: Array, name: str = "x") -> tuple[Payload, Array]:
    """Return what is sent of ``x``, and what is made of that in every way that is overridden."""
    if not by_payload(compressor):
        return {}, simulate(compressor, [x], name=name)[0]
    ctx, cls = context(x, name=name), type(compressor)
    payload = encode(compressor, x, ctx)
    decoded = decode(compressor, payload, x.size, ctx)
    found = [decoded]
    if cls.accumulate is not Compressor.accumulate:
        found.append(decoded.copy())
        compressor.accumulate(payload, found[-1], ctx)
    if cls.sum_into is not Compressor.sum_into:
        found.append(np.empty_like(decoded))
        compressor.sum_into([payload, payload], found[-1], ctx)
    return payload, np.concatenate(found)


def _equal(a: tuple[Payload, Array], b: tuple[Payload, Array]) -> bool:
    return same_payload(a[0], b[0]) and same(a[1], b[1])


def _disturbed(
    compressor: Compressor, x: Array, y: Array, files: set[str], points: set[int]
) -> str:
    """Return a place at which calls for ``x`` and ``y`` disturb each other; "" for none.

    The one for ``y`` runs before each of the lines ``points`` of the one for ``x``.
    """
    alone, other = _call(compressor, x), _call(compressor, y, "y")
    outer, inner = partial(_call, compressor, x), partial(_call, compressor, y, "y")
    result, found, _, place = _interrupt(outer, inner, files, points)
    fine = _equal(result, alone) and all(_equal(each, other) for each in found)
    return "" if fine else place


def _interrupt(
    outer: Callable[[], Any], inner: Callable[[], Any], files: set[str], points: set[int]
) -> tuple[Any, list[Any], int, str]:
    """Run ``inner`` on another thread before lines that ``outer`` executes of ``files``.

    ``points`` says before which. Returns the result of ``outer``, those of ``inner`` that came to
    an end, how many lines there were, and where the last of the places was.
    """
    lines, place, found = 0, "its start", list[Any]()
    asked, ended = SimpleQueue[bool](), SimpleQueue[None]()

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal lines, place
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            if lines in points:
                place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
                asked.put(True)
                with suppress(Empty):  # it waits for us where a lock makes calls follow each other
                    ended.get(timeout=1)
            lines += 1
        return trace

    def run() -> None:
        while asked.get():
            with suppress(Exception):  # which another check tells
                found.append(inner())
            ended.put(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = outer()
    finally:
        sys.settrace(before)
        asked.put(False)
    thread.join(1)
    return result, found, lines, place


CHECKS = (
    check_another_process_agrees,
    check_calls_may_interleave,
    check_exchanges_may_interleave,
)
