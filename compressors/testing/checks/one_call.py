"""Checks of one call: nothing hidden, nothing aliased, nothing left to chance."""

from __future__ import annotations

import gc
import inspect
import random
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np

from ringlet.compressors.base.chain import Chain
from ringlet.compressors.base.contract import Compressor, Exchange, Payload, storage
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, State, Workspace
from ringlet.compressors.core.payload import check_payload, deserialise, serialise, serialised_size
from ringlet.compressors.core.threads import MIN_ELEMENTS, limited
from ringlet.compressors.quantizers.shared_int import SharedInt
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import (
    FURTHER_LENGTHS,
    LENGTHS,
    gaussian,
    large,
    special,
    vectors,
)
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.other_time import later
from ringlet.compressors.testing.tools.simulate import (
    Overflow,
    context,
    decode,
    encode,
    simulate,
)
from ringlet.compressors.testing.tools.uninitialised import uninitialised_as

# Without these, whatever else is found says nothing new.
SOUND = (
    "every_length",
    "leaves_its_input_alone",
    "fills_its_output",
    "payload_travels",
    "fixed_size",
)
PURE = (*SOUND, "deterministic")
_MILLION = (1 << 20) + 3
_REMEMBERING = "in a step that finds something in ctx.state; write x = x + kept, not x += kept"
_LATER = (*range(1, 25), 70_000)  # steps in which the input is looked at again
_QUEUE = 20  # payloads that wait together
_WAITS = 10  # seconds until an exchange has surely begun
# As bits: a usual NaN, Inf, -Inf, and NaNs that rounding to fewer bits makes other numbers of.
_NOT_FINITE = (
    0x7FC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000,
)  # fmt: skip
# Of 720 elements.
_SHAPES = ((6, 120), (1, 720), (720, 1), (8, 9, 10), (4, 5, 6, 6), (2, 3, 4, 5, 6), (1, 1, 720, 1))
_NAMES = (
    "",
    "layer/3.weight:0 (tied)",
    "Schl\u00fcssel.\u91cd\u307f",
    "block." * 60,
    "layers.31.mlp.1.bias",
)
_ALIKE = ((0, 1), (2, 3), (0, 4))  # of five runs, those that found the same in memory


def same(a: Array, b: Array) -> bool:
    """Whether two arrays are equal bit for bit, any NaN being as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def same_payload(a: Payload, b: Payload) -> bool:
    """Whether two payloads hold the same arrays."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def by_payload(compressor: Compressor) -> bool:
    """Whether there are payloads: not for compressors that exchange in rounds."""
    return compressor.traits().combine != "rounds"


@needs("traits_are_traits", "schedule_goes_by_the_step")
def check_compresses_a_tensor(compressor: Compressor) -> None:
    """A gradient goes in, flat arrays travel, a gradient comes out: before that works, nothing else
    can be looked at.

    compress(x, ctx) returns a dict of flat arrays, as layout(n) says where there is one, and
    decompress(payload, out, ctx) overwrites out: out[:] = ...; see docs/own-compressor.md.
    ctx.shape has any number of dimensions, none too, and x is flat.
    """
    x = gaussian(2000, 0)
    if not by_payload(compressor):
        rounds = compressor.exchange(x.copy(), np.empty_like(x), context(x))
        assert isinstance(rounds, Generator), (
            "exchange is no generator: ranks combine nothing; write p = yield Round(values, 'mean')"
        )
        (out,) = simulate(compressor, [x])
        assert np.isfinite(out).all(), (
            "exchange leaves NaN in out: it does not overwrite all of it, or it looks at what it "
            "received after the next yield, when something else lies there; copy that"
        )
        _check_two_may_wait(compressor, x)
        return
    payload = compressor.compress(x.copy(), context(x))
    check_payload(compressor.label(), payload)
    for name, array in payload.items():
        assert type(array) is np.ndarray, (
            f"compress returns {name!r} as a {type(array).__name__}, of which the plain array "
            f"travels: what else it holds is lost; send np.asarray({name})"
        )
    if compressor.traits().fixed_size:
        check_fits_layout(compressor, payload, x.size)
        payload = encode(compressor, x.copy(), context(x))
    before = {name: array.copy() for name, array in payload.items()}
    outs = []
    for held in (0, 1):
        out = np.full(x.size, held, np.float32)
        compressor.decompress(payload, out, context(x))
        outs.append(out)
        assert same_payload(payload, before), (
            "decoding changes the payload, which others decode too; work on a copy"
        )
    check_overwritten(*outs)


def _check_two_may_wait(compressor: Compressor, x: Array) -> None:
    """Raise AssertionError where a second exchange cannot begin while the first one waits."""
    ended = threading.Event()

    def begin() -> None:
        waiting = []
        for name in ("one", "another"):
            ctx = context(x, name=name, size=2)
            waiting.append(compressor.exchange(x.copy(), np.empty_like(x), ctx))
            with suppress(Exception):  # which other checks tell
                next(waiting[-1])
        for rounds in waiting:
            rounds.close()
        ended.set()

    # A lock that is waited for cannot be given up, so that a thread waits in place of this one.
    threading.Thread(target=begin, daemon=True).start()
    assert ended.wait(_WAITS), (
        f"an exchange that begins while another tensor's waits for its round has not come to the "
        f"round in {_WAITS} seconds: hold no lock, or what else is taken once, over a yield"
    )


def check_fits_layout(compressor: Compressor, payload: Payload, n: int) -> None:
    """Raise AssertionError unless ``payload`` is what ``layout(n)`` says."""
    layout = compressor.layout(n)
    names = [part.name for part in layout]
    assert sorted(payload) == sorted(names), (
        f"compress returns {sorted(payload)}, layout says {sorted(names)}"
    )
    for name, dtype, elements in layout:
        array = payload[name]
        fits = array.dtype == storage(dtype) and array.size == elements
        found = f"{array.dtype}[{array.size}], layout says {dtype}[{elements}]"
        cure = f"; convert it: .astype({dtype!r})" if array.dtype != storage(dtype) else ""
        assert fits, f"compress returns {name!r} as {found} for n={n}{cure}"


def check_overwritten(zeros: Array, ones: Array) -> None:
    """Raise AssertionError where results show that ``out`` held 0, and 1, before."""
    if same(zeros, ones):
        return
    left = "some elements of out are not overwritten"
    with np.errstate(all="ignore"):
        if (zeros == 0).all() and (ones == 1).all():
            left = "out is not overwritten: 'out = ...' binds a new array, write out[:] = ..."
        elif np.allclose(ones - 1, zeros, atol=1e-5, equal_nan=True):
            left = "out is added to, not overwritten; write out[:] = ..., not out += ..."
        else:
            places = np.flatnonzero((zeros == 0) & (ones == 1))
            left = f"{places.size} of {zeros.size} elements of out are not overwritten, the first "
            left += f"at {places[:1]}; begin with out[:] = 0"
    raise AssertionError(left)


@needs("compresses_a_tensor")
def check_local_is_written(compressor: Compressor) -> None:
    """Where there are rounds, '| ef' learns from ``local`` what was sent of this rank's gradient,
    and keeps the rest.

    Take it, def exchange(self, x, out, ctx, local=None), and unless it is None overwrite all of it
    with what of the result stands for this rank's own x: begin with local[:] = 0 where only some
    entries travel. Leave x as it is.
    """
    if by_payload(compressor):
        return
    assert _takes_local(compressor), (
        "exchange() takes no local, which is given where error feedback asks for it"
    )
    shares: list[Array] = []
    x = gaussian(2000, 0)
    simulate(compressor, [x], shares=shares)
    left = int(np.isnan(shares[0]).sum())
    assert not left, f"{left} of 2000 elements of local are not overwritten"
    assert same(x, gaussian(2000, 0)), "the input is modified where local is asked for"
    if not isinstance(compressor, (Chain, Modifier)) and compressor.chained_part() is not None:
        simulate(compressor | SharedInt(), [x], shares=[])
        assert same(x, gaussian(2000, 0)), (
            "the input is modified with '| shared_int' behind it, which leaves in the third "
            "argument of Round what became of it; give a copy"
        )


def _takes_local(compressor: Compressor) -> bool:
    taken = list(inspect.signature(compressor.exchange).parameters.values())
    return len(taken) >= 4 or any(p.kind is p.VAR_POSITIONAL for p in taken)


@needs("compresses_a_tensor")
def check_sums_of_ranks_fit(compressor: Compressor) -> None:
    """What rounds add up is added up in the type that it is yielded in: where a sum does not fit
    it, the largest values come out with the other sign.

    Yield codes of at most the integer's largest divided by ctx.size, or convert them to a wider
    integer before: codes.astype("int32").
    """
    x = gaussian(2000, 0)
    for size in (2, 3, 8):
        try:
            simulate(compressor, [x] * size)
        except Overflow:
            raise
        except Exception:
            return  # which another check tells


@needs("compresses_a_tensor")
def check_scratch_does_not_matter(compressor: Compressor) -> None:
    """Fresh and borrowed memory holds what somebody left there: a result that shows it differs from
    rank to rank.

    Clear it, padding above all: xp.zeros in place of xp.empty, and rows[x.size:] = 0 in an array
    of ctx.workspace. Two arrays of ctx.workspace need two names.
    """
    found: dict[int, list[Array]] = {}
    for n in (1, 100, 3000):
        results: list[Array] = []
        with np.errstate(all="ignore"), suppress(Exception):
            simulate(compressor, [gaussian(n, 1), gaussian(n, 2)])  # which compiles kernels
        for mark in (0x00, 0x00, 0xFF, 0xFF, 0x00):
            with uninitialised_as(mark), np.errstate(all="ignore"), suppress(Exception):
                results.append(simulate(compressor, [gaussian(n, 1), gaussian(n, 2)])[0])
        if len(results) == 5:
            found[n] = results
    if not all(same(kept[a], kept[b]) for kept in found.values() for a, b in _ALIKE):
        return  # something else is wrong, which another check tells; a single element may hide it
    for n, kept in found.items():
        assert same(kept[0], kept[2]), (
            f"{n} elements give other results where np.empty or ctx.workspace.array held something "
            "else before"
        )


@needs("compresses_a_tensor", "scratch_does_not_matter", "sums_of_ranks_fit")
def check_every_length(compressor: Compressor) -> None:
    """Biases have one element, shards can be empty, and few layers are a multiple of anything.

    An empty x has no largest element: write x.max() if x.size else 0, and min(k, x.size) of what is
    selected. What is divided by may be zero: where(scale > 0, x / scale, 0). ctx.size, the number
    of ranks, need not divide x.size; ctx.shape of a scalar is (), so that x.size is what to go by.
    """
    failing: list[int] = []
    first: Exception | None = None
    for n in LENGTHS:
        x = gaussian(n, n)
        try:
            if by_payload(compressor):
                payload = compressor.compress(x.copy(), context(x))
                check_payload(compressor.label(), payload)
                if compressor.traits().fixed_size:
                    check_fits_layout(compressor, payload, n)
                outs = np.zeros(n, np.float32), np.ones(n, np.float32)
                for out in outs:
                    compressor.decompress(payload, out, context(x))
                check_overwritten(*outs)
            for size in (1, 3):
                # Of the shapes of one element a scalar's is the one that is forgotten.
                out = simulate(compressor, [x] * size, shape=() if n == 1 else None)[0]
                assert out.shape == (n,), f"{n} elements became {out.shape}"
                assert np.isfinite(out).all(), f"{n} finite elements decode to {out}"
        except Exception as error:
            failing.append(n)
            first = first or error
    for n in () if first is not None else FURTHER_LENGTHS:
        x = gaussian(n, n)
        try:
            out = simulate(compressor, [x])[0]
            assert np.isfinite(out).all(), f"{n} finite elements decode to {out}"
            if by_payload(compressor) and compressor.traits().fixed_size:
                check_fits_layout(compressor, compressor.compress(x, context(x)), n)
        except Exception as error:
            error.add_note(f"It fails with {n} elements, and not with every number of them.")
            raise
    if first is not None:
        works = "" if len(failing) == len(LENGTHS) else ", and not with others"
        if len(failing) > len(LENGTHS) - 3:
            works += ": it is not the empty tensor, but nearly every one"
        first.add_note(f"It fails with {', '.join(map(str, failing))} elements{works}.")
        raise first


@needs("every_length", "fixed_size")
def check_leaves_its_input_alone(compressor: Compressor) -> None:
    """The input is the framework's gradient, in memory that is used again: whoever changes it
    changes the training, and what refers to it changes while it is kept or waits to be sent.

    Compute into new arrays, and copy what is kept or sent: x.copy(), x[places], not x itself, out,
    local, what encode_into fills, what a round received, a view of these, or scratch of
    ctx.workspace. What is kept stays in ctx.state, and ctx itself nowhere.
    """

    def body(x: Array, step: int = 0) -> None:
        before, given = x.copy(), x.copy()
        state: dict[str, Any] = {}
        if not by_payload(compressor):
            workspace = Workspace()
            (out,) = simulate(compressor, [given], [state], step=step, workspace=workspace)
            assert same(given, before), "the input was modified"
            if state:
                (out,) = simulate(compressor, [given], [state], step=step + 1, workspace=workspace)
                assert same(given, before), f"the input was modified {_REMEMBERING}"
            _check_no_scratch(state, "ctx.state", workspace)
            _check_apart(state, "ctx.state", given, "the input")
            _check_apart(state, "ctx.state", out, "out, which is used again")
            return
        now = compressor.at(step)
        ctx = context(given, state, step=step)
        payload = now.compress(given, ctx)
        assert same(given, before), "the input was modified"
        encode(now, given, context(given, step=step))
        assert same(given, before), "the input was modified by encode_into"
        _check_no_scratch(state, "ctx.state", ctx.workspace)
        _check_apart(state, "ctx.state", given, "the input")
        for name, array in payload.items():
            what = f"payload array {name!r}"
            scratch = ctx.workspace.lends(array)
            assert not scratch, f"{what} is scratch of ctx.workspace; copy it"
            _check_apart(array, what, given, "the input")
            _check_apart(state, "ctx.state", array, f"{what}, which travels later")
        (out,) = simulate(compressor, [given], [state], step=step)
        assert same(given, before), f"the input was modified {_REMEMBERING}"
        _check_apart(state, "ctx.state", out, "out, which is used again")

    for_all(vectors(), body)
    for step in _LATER:
        try:
            body(gaussian(70, step), step)
        except AssertionError as error:
            error.add_note(f"That is in step {step}.")
            raise
        except Exception:
            return  # which another check tells
    options = dict(vars(compressor))
    if by_payload(compressor):
        zeros = np.zeros(2000, np.float32)  # of which some make a payload once and for all
        for tensors in ((zeros, zeros), (gaussian(2000, 0), gaussian(2000, 1))):
            one, two = (compressor.compress(x, context(x)) for x in tensors)
            for name in one.keys() & two.keys():
                _check_apart(one[name], f"payload array {name!r}", two[name], "another tensor's")
        before = {name: array.copy() for name, array in one.items()}
        for seed in range(_QUEUE):
            compressor.compress(gaussian(2000, seed), context(tensors[0]))
        assert same_payload(one, before), (
            f"a payload changes while {_QUEUE} others are made, for which it may have to wait"
        )
        _check_large_ones_may_wait(compressor)
    simulate(compressor, [gaussian(2000, 0)])
    assert vars(compressor) == options, "compressing changed the compressor itself"
    _check_takes_what_is_read_only(compressor)
    _check_lets_go(compressor)


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


def _check_large_ones_may_wait(compressor: Compressor) -> None:
    """Raise AssertionError where the payload of a large tensor changes after it was returned."""
    x = large()[:_MILLION]
    one = compressor.compress(x, context(x))
    for name, array in one.items():
        _check_apart(array, f"payload array {name!r} of {_MILLION} elements", x, "the input")
    before = {name: array.copy() for name, array in one.items()}
    two = compressor.compress(x[::-1].copy(), context(x))
    for name in one.keys() & two.keys():
        what = f"payload array {name!r} of {_MILLION} elements"
        _check_apart(one[name], what, two[name], "another tensor's")
    assert same_payload(one, before), (
        f"a payload of {_MILLION} elements changes after compress has returned it"
    )


def _check_lets_go(compressor: Compressor) -> None:
    """Raise AssertionError where something outlives the call that it was handed for."""
    if not by_payload(compressor) and not _takes_local(compressor):
        return  # another check tells
    state: State = {}
    for step in range(2):
        lent = _lent(compressor.at(step), state, step)
        if any(held() is not None for _, held in lent):
            gc.collect()  # what only refers to itself is not kept
        for what, held in lent:
            kept = held()
            if isinstance(kept, np.ndarray):
                _check_apart(state, "ctx.state", kept, f"{what}, which is used again")
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


def _check_apart(kept: Any, what: str, array: Array, other: str) -> None:
    if isinstance(kept, dict):
        for key, value in kept.items():
            _check_apart(value, f"{what}[{key!r}]", array, other)
    elif isinstance(kept, np.ndarray) and kept.size and array.size:
        assert not np.shares_memory(kept, array), f"{what} shares memory with {other}; copy it"


@needs("every_length", "fixed_size")
def check_payload_travels(compressor: Compressor) -> None:
    """What is returned is what travels: flat arrays of plain dtypes, equal after the journey.

    Put everything that decompress needs into the payload's arrays.
    """

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        payload = compressor.compress(x, context(x))
        check_payload(compressor.label(), payload)
        buffer = np.empty(serialised_size(payload), np.uint8)
        serialise(payload, buffer)
        received = deserialise(buffer)
        assert same_payload(received, payload), "the payload is not the same after the journey"
        n = x.size
        here, there = (decode(compressor, p, n, context(x)) for p in (payload, received))
        assert same(here, there), "the received payload decodes to something else"

    for_all(vectors(), body)


@needs("every_length", "fixed_size")
def check_fills_its_output(compressor: Compressor) -> None:
    """Output arrays are reused: an element that is not written keeps a gradient of another step.

    Overwrite all of out: begin with out[:] = 0 where only some entries travel.
    """

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        payload = encode(compressor, x, context(x))
        zeros, ones = np.zeros(x.size, np.float32), np.ones(x.size, np.float32)
        for out in (zeros, ones):
            compressor.decompress(payload, out, context(x))
        check_overwritten(zeros, ones)

    for_all(vectors(), body)


@needs(*SOUND)
def check_deterministic(compressor: Compressor) -> None:
    """A run must be reproducible from its seed: random numbers come from ctx.rng(), and nothing is
    remembered anywhere but in ctx.state.

    Draw from ctx.rng(), or ctx.uniform(n), and use neither NumPy's nor Python's own generators nor
    the time. Keep what is remembered in ctx.state, not in a global, on the class or on self.
    """
    x, other = gaussian(3000, 1), gaussian(500, 2)

    def result(noise: int) -> list[Array]:
        np.random.seed(noise)  # what a plugin might use by mistake
        random.seed(noise)
        simulate(compressor, [other * noise], step=noise, name="another")
        states: list[dict[str, Any]] = [{}, {}]
        steps = [simulate(compressor, [x, -2 * x], states, step) for step in range(3)]
        return [out for outs in steps for out in outs]

    first = result(1)
    with later(100_001):
        second = result(2)
    assert all(map(same, first, second)), (
        "the same gradients, states and steps gave different results"
    )
    one, another = (simulate(compressor, [gaussian(3000, seed)], step=9)[0] for seed in (3, 4))
    assert not one.any() or not same(one, another), (
        "two different gradients of one tensor in one step gave the same result: something is "
        "remembered that must not be, or scratch memory is used twice under one name"
    )


@needs(*PURE, "every_rank_takes_part")
def check_every_shape_and_name(compressor: Compressor) -> None:
    """A convolution's weight has four dimensions, and a tensor is called what its framework calls
    it: a model whose layers fit neither ends at its first step.

    Take len(ctx.shape) as it comes: ctx.shape[0] and x.size // ctx.shape[0] make a matrix of any
    but a scalar, which x is already flat for. Put no name into an array of fixed length:
    zlib.crc32(ctx.name.encode()) stands for one.
    """
    fields: list[dict[str, Any]] = [{"shape": shape} for shape in _SHAPES]
    fields += [{"name": name} for name in _NAMES]
    for given in fields:
        x, before = gaussian(720, 1), gaussian(720, 1)
        states: list[dict[str, Any]] = [{}, {}]
        try:
            for step in range(2):
                outs = simulate(compressor, [x, -2 * before], states, step, **given)
        except Exception as error:
            error.add_note(f"That is a tensor with {given}.")
            raise
        assert same(x, before), (
            f"the input is modified where a tensor has {given}: x.reshape(...) is a view of it; "
            "compute into a new array"
        )
        _check_two_apart(compressor, x, given)
        assert np.isfinite(outs).all(), f"a tensor with {given} comes out as NaN or Inf"


def _check_two_apart(compressor: Compressor, x: Array, given: dict[str, Any]) -> None:
    """Raise AssertionError where payloads of two tensors of a shape lie in the same memory."""
    if not by_payload(compressor):
        return
    one, two = (compressor.compress(y, context(y, **given)) for y in (x, -2 * x))
    for name in one.keys() & two.keys():
        what = f"payload array {name!r} of a tensor with {given}"
        _check_apart(one[name], what, two[name], "another tensor's")


@needs(*PURE)
def check_threads_change_nothing(compressor: Compressor) -> None:
    """Ranks may have different numbers of cores, and must still agree bit for bit.

    Cut work at places that do not depend on the number of threads.
    """
    n = 5 * MIN_ELEMENTS // 2
    x = gaussian(n, 3)
    results = []
    for threads in (1, 4):
        with limited(threads):
            results.append(simulate(compressor, [x])[0])
    assert same(*results), "one thread and four threads give different results"


@needs(*PURE, "points_the_same_way", "the_last_element_counts")
def check_non_finite_stays_visible(compressor: Compressor) -> None:
    """Loss scaling finds overflow by looking at reduced gradients: a codec that turns Inf or NaN
    into an ordinary number hides it, and the step that should be skipped is taken.

    Let a NaN or Inf anywhere in x come out as NaN or Inf somewhere: a scale of x.max() becomes NaN
    or Inf by itself, and 0 * Inf is NaN; do not use nan_to_num, clip or fmax on the way. What
    sends a selection counts NaN as largest.
    """
    for bits in _NOT_FINITE:
        for n, place in ((1, 0), (70, 69), (3000, 1234)):
            _check_visible(compressor, gaussian(n, 4), place, bits)
    for n, place in ((3000, 0), (_MILLION, _MILLION // 2), (_MILLION, _MILLION - 1)):
        x = large()[:n].copy() if n == _MILLION else gaussian(n, 4)
        _check_visible(compressor, x, place, _NOT_FINITE[0])
    for bad in (np.nan, np.inf):  # a run that has diverged has nothing else
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [np.full(3000, bad, np.float32)])
        assert not np.isfinite(out).all(), f"3000 elements that are all {bad} vanished"
    for one, other in ((np.inf, -np.inf), (np.nan, np.inf)):
        x = gaussian(3000, 4)
        x[[7, 1234]] = one, other
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [x])
        assert not np.isfinite(out).all(), (
            f"{one} at element 7 and {other} at element 1234 of 3000 vanished together, and not by "
            "themselves"
        )


@needs(
    "non_finite_stays_visible",
    "one_overflow_is_survived",
    "second_stage",
    "another_process_agrees",
)
def check_sums_keep_what_is_not_finite(compressor: Compressor) -> None:
    """The engine adds up by sum_into and accumulate, and owners of shards compress sums again, as
    ctx.stage 2: NaN that is lost there is an overflow that nobody sees.

    Add all that decompress gives: do not leave codes of 0 out of a sum, whose scale may be NaN, and
    use neither nansum nor nan_to_num. Compress in the second stage as in the first.
    """
    if not by_payload(compressor):
        return
    spoiled, sound = gaussian(3000, 4), gaussian(3000, 5)
    spoiled[1234] = np.nan
    traits = compressor.traits()
    cut = traits.granularity is not None and traits.fixed_size and traits.combine == "gather"
    with np.errstate(all="ignore"):
        if cut:
            ctx = context(spoiled, size=3, stage=2)
            out = decode(compressor, encode(compressor, spoiled, ctx), 3000, ctx)
            assert not np.isfinite(out).all(), "NaN vanished as ctx.stage 2: in the mean of a shard"
        ctx = context(spoiled, size=3)
        payloads = [encode(compressor, x, context(x, size=3)) for x in (sound, spoiled, sound)]
        total, added = np.zeros(3000, np.float32), sound.copy()
        compressor.sum_into(payloads, total, ctx)
        compressor.accumulate(payloads[1], added, ctx)
    for what, out in (("sum_into", total), ("accumulate", added)):
        assert not np.isfinite(out).all(), f"NaN vanished in {what} of a payload that has it"


def _check_visible(compressor: Compressor, x: Array, place: int, bits: int) -> None:
    """Raise AssertionError where what is not finite leaves no trace; ``x`` is written to."""
    x.view(np.uint32)[place] = bits
    with np.errstate(all="ignore"):
        (out,) = simulate(compressor, [x])
    if not np.isfinite(out).all():
        return
    x[place], n = 1e4, x.size
    came = float(simulate(compressor, [x])[0][place])
    assert came > 0, (
        f"element {place} of {n} is lost, whatever it is: 10000 comes out as {came:.4g} there, and "
        "NaN or Inf vanishes with it"
    )
    bad = np.array([bits], np.uint32).view(np.float32)[0]
    raise AssertionError(f"{bad} (0x{bits:08x}) at element {place} of {n} vanished")


@needs(*PURE, "points_the_same_way")
def check_extreme_values(compressor: Compressor) -> None:
    """Gradients are zero, tiny and huge at times; finite numbers must not turn into NaN, and zeros
    must not turn into garbage.

    Guard divisions: all of x may be zero, and a scale may be too small to divide by. Put 1 in the
    place of a scale of 0 where it divides, and not where it is sent. Clip an exponent to its
    integer type: float32 has values down to 2^-149. Do not refuse NaN and Inf: they show an
    overflow, whose step is skipped.
    """

    def body(x: Array) -> None:
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [x])
        if np.isfinite(x).all() and (np.abs(x) < 2.0**15).all():
            assert np.isfinite(out).all(), f"finite values decode to {out}"

    for_all(special(), body)
    subnormal = np.float32(2.0**-149) * np.arange(-700, 700, dtype=np.float32)
    with np.errstate(all="ignore"):
        (out,) = simulate(compressor, [subnormal])
    assert not compressor.traits().scales or not (np.abs(out) > 2.0**64).any(), (
        f"{subnormal.size} values below 2^-139 come out as up to {np.abs(out).max():.4g}: an "
        "exponent does not fit its integer type"
    )
    for n in (1, 70, 3000) if compressor.traits().scales else ():
        (out,) = simulate(compressor, [np.zeros(n, np.float32)])
        assert not out.any(), (
            f"{n} zeros come out as {out[np.flatnonzero(out)[0]]:.4g}; where results go by "
            "absolute sizes, declare scales=False"
        )


@needs(*PURE)
def check_decoding_is_the_same_everywhere(compressor: Compressor) -> None:
    """Every rank decodes everybody's payloads: if the result depended on the rank that decodes or
    on what it remembers, replicas would drift apart.

    Send what decompress needs in the payload; numbers that both sides draw come from
    ctx.rng(shared=True), which ranks have in common. Noise that decompress takes off again is a
    rank's own: send which rank's, and draw it from dataclasses.replace(ctx, rank=...).
    """
    if not by_payload(compressor):
        return
    x = gaussian(3000, 5)
    state: dict[str, Any] = {}
    for step in range(3):
        payload = encode(compressor, x, context(x, state, rank=1, size=4, step=step))
        outs = [
            decode(compressor, payload, x.size, context(x, held, rank=rank, size=4, step=step))
            for rank, held in ((1, state), (0, {}), (3, {}))
        ]
        assert same(outs[0], outs[1]), "another rank decodes the payload to something else"
        assert same(outs[1], outs[2]), "another rank decodes the payload to something else"


CHECKS = (
    check_compresses_a_tensor,
    check_local_is_written,
    check_sums_of_ranks_fit,
    check_scratch_does_not_matter,
    check_every_length,
    check_leaves_its_input_alone,
    check_fills_its_output,
    check_payload_travels,
    check_deterministic,
    check_every_shape_and_name,
    check_extreme_values,
    check_threads_change_nothing,
    check_non_finite_stays_visible,
    check_sums_keep_what_is_not_finite,
    check_decoding_is_the_same_everywhere,
)
