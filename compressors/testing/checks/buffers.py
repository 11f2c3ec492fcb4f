"""Checks of memory that a compressor is lent: what it reads, writes, and must not keep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from ringlet.compressors.base.contract import Compressor, Exchange, Payload, storage
from ringlet.compressors.core.context import Array, State, Workspace
from ringlet.compressors.core.errors import InputError
from ringlet.compressors.core.payload import padded
from ringlet.compressors.testing.tools.equality import check_apart, same, same_payload
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, large, vectors
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.plugin_code import lengths_named
from ringlet.compressors.testing.tools.simulate import (
    by_payload,
    context,
    encode,
    simulate,
    takes_local,
)

_MARKS = 0xA5, 0x5A
_MILLION = (1 << 20) + 3
_REMEMBERING = "in a step that finds something in ctx.state; write x = x + kept, not x += kept"
_LATER = (*range(1, 25), 70_000)  # steps in which the input is looked at again
_QUEUE = 20  # payloads that wait together


@needs("compresses_a_tensor")
def check_other_dtypes_are_refused(compressor: Compressor) -> None:
    """Gradients of other types are widened to float32 by the engine: a codec that takes them as
    they are would send other bytes than it declares, or integers and complex numbers as nonsense.

    Define compress in the body of the class: it then refuses them by itself.
    """
    if not by_payload(compressor):
        return
    x = gaussian(2000, 0)
    wrong: list[Any] = [x.astype(d) for d in ("f8", "f2", "i4", "i8", "u2", "c8", "?")]
    wrong += [x[::2], x.reshape(40, 50), x.reshape(40, 50).T, list(map(float, x))]
    for value in wrong:
        what = f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
        raised: Exception | None = None
        try:
            compressor.compress(value, context(x))
        except Exception as error:
            raised = error
        assert raised is not None, f"{what} is compressed without an error"
        kind = type(raised).__name__
        assert isinstance(raised, InputError), f"{what} fails with {kind}, not InputError"
        assert "float32" in str(raised), f"the error about {what} does not name float32"


@needs("every_length", "fixed_size")
def check_leaves_its_input_alone(compressor: Compressor) -> None:
    """The input is the framework's gradient, in memory that is used again: whoever changes it
    changes the training, and what refers to it changes while it is kept or waits to be sent.

    Compute into new arrays, and copy what is kept or sent: x.copy(), x[places], not x itself, out,
    local, what encode_into fills, what a round received, a view of these, or scratch of
    ctx.workspace. What is kept stays in ctx.state, and ctx itself nowhere.
    """
    stays = partial(_stays if by_payload(compressor) else _stays_in_rounds, compressor)
    for_all(vectors(), stays)
    for step in _LATER:
        try:
            stays(gaussian(70, step), step)
        except AssertionError as error:
            error.add_note(f"That is in step {step}.")
            raise
        except Exception:
            return  # which another check tells
    options = dict(vars(compressor))
    if by_payload(compressor):
        _check_payloads_may_wait(compressor)
        _check_large_ones_may_wait(compressor)
    for n in lengths_named(compressor):  # it may do something else from one of them on
        for x in (large()[:n], large()[: n + 1]):
            _check_unchanged(compressor, x)
    simulate(compressor, [gaussian(2000, 0)])
    assert vars(compressor) == options, "compressing changed the compressor itself"
    _check_takes_what_is_read_only(compressor)
    _check_lets_go(compressor)


def _stays_in_rounds(compressor: Compressor, x: Array, step: int = 0) -> None:
    """Raise AssertionError where an exchange in rounds changes ``x``, or keeps what was lent."""
    before, x = x, x.copy()
    state, workspace = State(), Workspace()
    (out,) = simulate(compressor, [x], [state], step=step, workspace=workspace)
    assert same(x, before), "the input was modified"
    if state:
        (out,) = simulate(compressor, [x], [state], step=step + 1, workspace=workspace)
        assert same(x, before), f"the input was modified {_REMEMBERING}"
    _check_no_scratch(state, "ctx.state", workspace)
    check_apart(state, "ctx.state", x, "the input")
    check_apart(state, "ctx.state", out, "out, which is used again")


def _stays(compressor: Compressor, x: Array, step: int = 0) -> None:
    """Raise AssertionError where compressing changes ``x``, keeps it, or sends it itself."""
    before, x, state = x, x.copy(), State()
    now = compressor.at(step)
    ctx = context(x, state, step=step)
    payload = now.compress(x, ctx)
    assert same(x, before), "the input was modified"
    encode(now, x, context(x, step=step))
    assert same(x, before), "the input was modified by encode_into"
    _check_no_scratch(state, "ctx.state", ctx.workspace)
    check_apart(state, "ctx.state", x, "the input")
    for name, array in payload.items():
        what = f"payload array {name!r}"
        scratch = ctx.workspace.lends(array)
        assert not scratch, f"{what} is scratch of ctx.workspace; copy it"
        check_apart(array, what, x, "the input")
        check_apart(state, "ctx.state", array, f"{what}, which travels later")
    (out,) = simulate(compressor, [x], [state], step=step)
    assert same(x, before), f"the input was modified {_REMEMBERING}"
    check_apart(state, "ctx.state", out, "out, which is used again")


def _check_payloads_may_wait(compressor: Compressor) -> None:
    """Raise AssertionError where payloads share memory, or change while others are made."""
    zeros = np.zeros(2000, np.float32)  # of which some make a payload once and for all
    for tensors in ((zeros, zeros), (gaussian(2000, 0), gaussian(2000, 1))):
        one, two = (compressor.compress(x, context(x)) for x in tensors)
        for name in one.keys() & two.keys():
            check_apart(one[name], f"payload array {name!r}", two[name], "another tensor's")
    before = {name: array.copy() for name, array in one.items()}
    for seed in range(_QUEUE):
        compressor.compress(gaussian(2000, seed), context(tensors[0]))
    assert same_payload(one, before), (
        f"a payload changes while {_QUEUE} others are made, for which it may have to wait"
    )


def _check_takes_what_is_read_only(compressor: Compressor) -> None:
    """Raise an error where a gradient is refused that nobody may write to."""
    x = gaussian(2000, 0)
    simulate(compressor, [x])
    x.flags.writeable = False
    try:
        simulate(compressor, [x])
    except Exception as error:
        error.add_note(
            "That is with an x that cannot be written to, as JAX's cannot: let what takes it only "
            "read, such as a kernel without a signature of its own, or give that a copy."
        )
        raise


def _check_unchanged(compressor: Compressor, before: Array) -> None:
    """Raise AssertionError where a tensor that is as long is changed."""
    x = before.copy()
    with suppress(Exception):  # which another check tells
        simulate(compressor, [x])
    assert same(x, before), f"the input was modified, of {x.size} elements"


def _check_large_ones_may_wait(compressor: Compressor) -> None:
    """Raise AssertionError where the payload of a large tensor changes after it was returned."""
    x = large()[:_MILLION]
    one = compressor.compress(x, context(x))
    for name, array in one.items():
        check_apart(array, f"payload array {name!r} of {_MILLION} elements", x, "the input")
    before = {name: array.copy() for name, array in one.items()}
    two = compressor.compress(x[::-1].copy(), context(x))
    for name in one.keys() & two.keys():
        what = f"payload array {name!r} of {_MILLION} elements"
        check_apart(one[name], what, two[name], "another tensor's")
    assert same_payload(one, before), (
        f"a payload of {_MILLION} elements changes after compress has returned it"
    )


def _check_lets_go(compressor: Compressor) -> None:
    """Raise AssertionError where something outlives the call that it was handed for."""
    if not by_payload(compressor) and not takes_local(compressor):
        return  # another check tells
    state: State = {}
    for step in range(2):
        lent = _lent(compressor.at(step), state, step)
        if any(held() is not None for _, held in lent):
            gc.collect()  # what only refers to itself is not kept
        for what, held in lent:
            kept = held()
            if isinstance(kept, np.ndarray):
                check_apart(state, "ctx.state", kept, f"{what}, which is used again")
            assert kept is None, (
                f"{what} is still held after the call, outside of ctx.state: in a global, on the "
                "class, in a cache or in a closure"
            )


def _lent(compressor: Compressor, state: State, step: int) -> list[tuple[str, ref[Any]]]:
    """Call all that there is once; return what was handed for the calls alone, and its names."""
    n, lent = 2000, list[tuple[str, Any]]()

    def handed(what: str, made: Any) -> Any:
        lent.append((what, made))
        return made

    x, out = handed("the input", gaussian(n, step)), handed("out", np.zeros(n, np.float32))
    ctx = handed("ctx", context(x, state, step=step))
    before = dict(vars(ctx))
    ways = [False] if compressor.traits().gradient_units else [False, True]
    for fed in ways:  # what feeds back by itself has nothing behind it that does
        residual = handed("the residual of error feedback", np.ones(n, np.float32))
        if not by_payload(compressor):
            local = handed("local", np.zeros(n, np.float32))
            run = (
                compressor.exchange_feedback(x, out, residual, 1.0, ctx, local)
                if fed
                else compressor.exchange(x, out, ctx, local)
            )
            _received(run, handed)
            continue
        if not compressor.traits().fixed_size:
            payload = (
                compressor.compress_feedback(x, residual, 1.0, ctx)
                if fed
                else compressor.compress(x, ctx)
            )
        else:
            payload = {
                name: handed(f"payload[{name!r}] of encode_into", np.zeros(count, storage(dtype)))
                for name, dtype, count in compressor.layout(n)
            }
            if fed:
                compressor.feedback_into(x, residual, 1.0, payload, ctx)
            else:
                compressor.encode_into(x, payload, ctx)
        received = {
            name: handed(f"payload[{name!r}] of decompress", array.copy())
            for name, array in payload.items()
        }
        compressor.decompress(received, out, ctx)
        compressor.accumulate(received, out, ctx)
        compressor.sum_into([received, received], out, ctx)
    compressor.finish(out, ctx)
    lost = ": what is put into another dict is lost; write ctx.state[...] = ..."
    for name, value in vars(ctx).items():
        assert before.get(name, ctx) is value, (
            f"a call sets ctx.{name}, which is the engine's{lost if name == 'state' else ''}"
        )
    return [(what, ref(made)) for what, made in lent]


def _received(run: Exchange, handed: Callable[[str, Any], Any]) -> None:
    """Run the exchange of a single rank, which receives what it yields."""
    with suppress(StopIteration):
        asked = next(run)
        while True:
            asked = run.send(handed("what a round received", asked.values.copy()))


def _check_no_scratch(kept: Any, what: str, workspace: Workspace) -> None:
    if isinstance(kept, dict):
        for key, value in kept.items():
            _check_no_scratch(value, f"{what}[{key!r}]", workspace)
    elif isinstance(kept, np.ndarray):
        scratch = workspace.lends(kept)
        assert not scratch, f"{what} is scratch of ctx.workspace, which others overwrite; copy it"


@needs(*PURE)
def check_results_are_float32_at_every_precision(compressor: Compressor) -> None:
    """Values that half precision holds come from a narrower gradient and go back into one: they
    must be treated as any float32, whatever their trailing bits.

    Do not go by the bits of a value's mantissa.
    """
    if not by_payload(compressor):
        return
    x = gaussian(2000, 1)
    for narrow in (x.astype("f2").astype("f4"), _bfloat16(x)):
        out = np.full(x.size, np.nan, np.float32)
        payload = compressor.compress(narrow, context(narrow))
        compressor.decompress(payload, out, context(narrow))
        assert out.dtype == np.float32, f"out became {out.dtype}"
        assert np.isfinite(out).all(), "values of half precision decode to NaN or Inf"


@needs(*PURE)
def check_writes_only_where_it_should(compressor: Compressor) -> None:
    """Outputs and payloads are pieces of shared buffers: a byte too many is a neighbour's gradient,
    and an array that is replaced instead of filled never travels.

    Fill what is given, as long as it is: payload[name][...] = values, out[:] = values.
    """
    if not by_payload(compressor):
        return

    def body(x: Array) -> None:
        payload = compressor.compress(x, context(x))
        if compressor.traits().fixed_size:
            payload, again = (_filled(compressor, x, mark) for mark in _MARKS)
            assert same_payload(payload, again), (
                "encode_into does not fill the arrays it is given; write payload[name][...] = ..."
            )
        before = {name: array.copy() for name, array in payload.items()}
        for method in (compressor.decompress, compressor.accumulate, _summing(compressor)):
            room = np.full(x.size + 16, 7, np.float32)
            with np.errstate(all="ignore"):
                method(payload, room[8 : 8 + x.size], context(x))
            assert (room[:8] == 7).all(), "decoding writes before out"
            assert (room[8 + x.size :] == 7).all(), "decoding writes behind out"
            assert same_payload(payload, before), "decoding changes the payload"

    for_all(vectors(), body)


def _filled(compressor: Compressor, x: Array, mark: int) -> Payload:
    """Return the payload that encode_into writes into a buffer whose bytes are all ``mark``."""
    layout = compressor.layout(x.size)
    ends = np.cumsum([0, *(8 + padded(a.elements * 8) for a in layout)]).tolist()
    buffer = np.full(ends[-1] + 8, mark, np.uint8)
    payload, inside = {}, np.zeros(buffer.size, bool)
    for (name, dtype, elements), end in zip(layout, ends, strict=False):
        size = elements * storage(dtype).itemsize
        payload[name] = buffer[end + 8 : end + 8 + size].view(storage(dtype))
        inside[end + 8 : end + 8 + size] = True
    slots = dict(payload)
    compressor.encode_into(x, payload, context(x))
    assert (buffer[~inside] == mark).all(), "encode_into writes beyond a payload's arrays"
    return slots


def _summing(compressor: Compressor) -> Any:
    def total(payload: Payload, out: Array, ctx: Any) -> None:
        compressor.sum_into([payload, payload], out, ctx)

    return total


def _bfloat16(x: Array) -> Array:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


CHECKS = (
    check_other_dtypes_are_refused,
    check_leaves_its_input_alone,
    check_results_are_float32_at_every_precision,
    check_writes_only_where_it_should,
)
