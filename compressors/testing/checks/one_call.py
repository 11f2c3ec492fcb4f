"""Checks of one call: it takes any tensor, sends all that is needed, leaves nothing to chance."""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import numpy as np

from ringlet.compressors.base.chain import Chain
from ringlet.compressors.base.contract import Compressor, Payload, storage
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array
from ringlet.compressors.core.payload import check_payload, deserialise, serialise, serialised_size
from ringlet.compressors.core.threads import MIN_ELEMENTS, limited
from ringlet.compressors.quantizers.shared_int import SharedInt
from ringlet.compressors.testing.tools.equality import check_apart, same, same_payload
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import (
    FURTHER_LENGTHS,
    LENGTHS,
    gaussian,
    vectors,
)
from ringlet.compressors.testing.tools.named_check import PURE, SOUND, needs
from ringlet.compressors.testing.tools.other_time import abroad, later, slowly
from ringlet.compressors.testing.tools.plugin_code import uses, words_beside
from ringlet.compressors.testing.tools.simulate import (
    Overflow,
    by_payload,
    context,
    decode,
    encode,
    simulate,
    takes_local,
)
from ringlet.compressors.testing.tools.uninitialised import uninitialised_as

_WAITS = 10  # seconds until an exchange has surely begun
# Of 720 elements.
_SHAPES = ((6, 120), (1, 720), (720, 1), (8, 9, 10), (4, 5, 6, 6), (2, 3, 4, 5, 6), (1, 1, 720, 1))
_NAMES = (
    "",
    "layer/3.weight:0 (tied)",
    "Schl\u00fcssel.\u91cd\u307f",
    "block." * 60,
    "layers.31.mlp.1.bias",
)
# What starts threads of a plugin's own; and how often it is tried, as chance decides who is first.
_POOLS = frozenset({"ThreadPoolExecutor", "ThreadPool", "Thread", "as_completed"})
_TRIES = 12
_HOURS = (2, 8, 14, 20)  # by which clocks are ahead of Greenwich's
_MANY = 24  # steps until what is counted in the state has become another number
_ALIKE = ((0, 1), (2, 3), (0, 4))  # of five runs, those that found the same in memory
# What lies beside a tensor, as bytes: huge values of either sign, NaN, and zeros in between.
_BESIDE, _ROOM = (0x00, 0x00, 0x7F, 0xFE, 0xFF, 0x00), 256


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
        _check_looks_in_time(compressor, x)
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


def _check_looks_in_time(compressor: Compressor, x: Array) -> None:
    """Raise AssertionError where what was received in a round is used after the next yield."""
    came, again = (simulate(compressor, [x]) for _ in range(2))
    lasting = simulate(compressor, [x], lasting=True)
    assert not same(came[0], again[0]) or same(came[0], lasting[0]), (
        "exchange looks at what it received after the next yield, when something else lies there; "
        "copy that: votes = (yield Round(signs, 'sum')).copy()"
    )


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
            left = (
                "out is not overwritten: 'out = ...' binds a new array, write out[:] = ..., and "
                "do not return before that"
            )
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
    assert takes_local(compressor), (
        "exchange() takes no local, which is given where error feedback asks for it"
    )
    for n in (2000, 1993, 13, 1):  # which fill whole blocks, or do not
        shares: list[Array] = []
        x = gaussian(n, 0)
        simulate(compressor, [x], shares=shares)
        left = int(np.isnan(shares[0]).sum())
        assert not left, f"{left} of {n} elements of local are not overwritten"
        assert same(x, gaussian(n, 0)), "the input is modified where local is asked for"
    if not isinstance(compressor, (Chain, Modifier)) and compressor.chained_part() is not None:
        x = gaussian(2000, 0)
        simulate(compressor | SharedInt(), [x], shares=[])
        assert same(x, gaussian(2000, 0)), (
            "the input is modified with '| shared_int' behind it, which leaves in the third "
            "argument of Round what became of it; give a copy"
        )


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


@needs("compresses_a_tensor", "scratch_does_not_matter")
def check_nothing_beside_is_read(compressor: Compressor) -> None:
    """Tensors and payloads are pieces of larger buffers: what lies beside one belongs to another,
    and differs from rank to rank and from run to run.

    End where x ends, and a payload's array, in a kernel too, which nothing else stops there:
    range(start, min(start + block, x.size)).
    """
    found: dict[int, list[tuple[Payload, Array]]] = {}
    for n in (1, 100, 2050):
        if not _overwrites(compressor, gaussian(n, n)):
            return  # what is left of out is whatever was there, which every_length tells
        results: list[tuple[Payload, Array]] = []
        for mark in _BESIDE:
            with np.errstate(all="ignore"), suppress(Exception):  # which another check tells
                results.append(_called_beside(compressor, gaussian(n, n), mark))
        if len(results) == len(_BESIDE):
            found[n] = results
    for results in found.values():
        for sent, out in (results[1], results[-1]):
            if not same_payload(sent, results[0][0]) or not same(out, results[0][1]):
                return  # something else is wrong, which another check tells
    for n, results in found.items():
        for sent, out in results:
            what = f"of {n} elements, where something else lies beside"
            assert same_payload(sent, results[0][0]), (
                f"compress gives another payload {what} x: a kernel reads before or behind x"
            )
            assert same(out, results[0][1]), (
                f"results differ {what} x, or beside an array of the payload: a kernel reads "
                "before or behind it"
            )


def _overwrites(compressor: Compressor, x: Array) -> bool:
    """Whether decompress writes every element of its output, as far as it can be called."""
    outs = np.zeros(x.size, np.float32), np.ones(x.size, np.float32)
    with np.errstate(all="ignore"), suppress(Exception):  # which another check tells
        payload = compressor.compress(x, context(x)) if by_payload(compressor) else {}
        for out in outs if payload else ():
            compressor.decompress(payload, out, context(x))
        return not payload or same(*outs)
    return True


def _called_beside(compressor: Compressor, x: Array, mark: int) -> tuple[Payload, Array]:
    """Return what is sent, and what is decoded, where bytes ``mark`` lie beside all arrays."""
    x = _amid(x, mark)
    if not by_payload(compressor):
        return {}, simulate(compressor, [x, x])[0]
    payload = compressor.compress(x, context(x))
    sent = {name: array.copy() for name, array in payload.items()}
    beside = {name: _amid(array, mark) for name, array in sent.items()}
    outs = [_amid(np.zeros(x.size, np.float32), mark) for _ in range(3)]
    compressor.decompress(beside, outs[0], context(x))
    compressor.accumulate(beside, outs[1], context(x))
    compressor.sum_into([beside, beside], outs[2], context(x))
    return sent, np.concatenate(outs)


def _amid(array: Array, mark: int) -> Array:
    """Return a copy of a flat ``array`` that lies in the middle of bytes ``mark``."""
    room = np.full(array.nbytes + 2 * _ROOM, mark, np.uint8)
    place = room[_ROOM : _ROOM + array.nbytes].view(array.dtype)
    place[:] = array
    return place


@needs(
    "compresses_a_tensor", "scratch_does_not_matter", "nothing_beside_is_read", "sums_of_ranks_fit"
)
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
    the time: what is to end in time goes by a number of rounds. Keep what is remembered in
    ctx.state, not in a global, on the class or on self.
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
    for hours in _HOURS:  # ranks may be in other time zones, and on slower machines
        with later(100_001), abroad(hours), slowly(hours):
            second = result(hours)
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
    it: a model whose layers fit neither ends at its first step, or never trains one of them.

    Take len(ctx.shape) as it comes: ctx.shape[0] and x.size // ctx.shape[0] make a matrix of any
    but a scalar, which x is already flat for. Put no name into an array of fixed length:
    zlib.crc32(ctx.name.encode()) stands for one.
    """
    fields: list[dict[str, Any]] = [{"shape": shape} for shape in _SHAPES]
    fields += [{"name": name} for name in (*_NAMES, *_names_told(compressor))]
    arrives: dict[str, bool] = {}
    lengths: dict[str, float] = {}
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
        if "name" in given:
            arrives[given["name"]] = bool(np.any(outs))
            lengths[given["name"]] = float(np.linalg.norm(outs[0].astype(np.float64)))
    usual = float(np.median([lengths[name] for name in _NAMES]))
    longest = max(lengths, key=lambda name: lengths[name])
    assert lengths[longest] <= 3 * usual or not usual, (
        f"a tensor named {longest!r} comes out {lengths[longest] / usual:.3g} times as long as the "
        "same one under other names: what compress does by ctx.name, decompress has to know too"
    )
    lost = [name for name, some in arrives.items() if not some]
    assert not lost or len(lost) == len(arrives), (
        f"nothing of a tensor named {lost[0]!r} arrives, and of others it does"
    )


def _names_told(compressor: Compressor) -> list[str]:
    """Return names of tensors that begin and end with words in code that looks at names."""
    words = words_beside(compressor, "name")
    return [form.format(word) for word in words for form in ("{}.0.weight", "model.0.{}")]


def _check_two_apart(compressor: Compressor, x: Array, given: dict[str, Any]) -> None:
    """Raise AssertionError where payloads of two tensors of a shape lie in the same memory."""
    if not by_payload(compressor):
        return
    one, two = (compressor.compress(y, context(y, **given)) for y in (x, -2 * x))
    for name in one.keys() & two.keys():
        what = f"payload array {name!r} of a tensor with {given}"
        check_apart(one[name], what, two[name], "another tensor's")


@needs(*PURE)
def check_threads_change_nothing(compressor: Compressor) -> None:
    """Ranks may have different numbers of cores, and must still agree bit for bit.

    Cut work at places that do not depend on the number of threads, and keep nothing outside
    ctx.state: what is kept elsewhere, by id(ctx.state), say, makes the next call another one.
    """
    n = 5 * MIN_ELEMENTS // 2
    x, results = gaussian(n, 3), list[Array]()
    for _ in range(_TRIES if uses(compressor, _POOLS) else 0):
        results.append(simulate(compressor, [x])[0])
        assert same(results[0], results[-1]), (
            "the same tensor gives different results: add up what threads return in the order in "
            "which work was handed out, as map() returns it, and not as_completed()"
        )
    one, four = _with_threads(compressor, x, 1), _with_threads(compressor, x, 4)
    assert same(one, four), "one thread and four threads give different results"


def _with_threads(compressor: Compressor, x: Array, threads: int) -> Array:
    with limited(threads):
        return simulate(compressor, [x])[0]


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
    state: dict[str, Any] = {}
    for step in range(_MANY):
        x = gaussian(3000 if step < 3 else 300, 5)
        if step == 3:
            state = {}  # of another length
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
    check_nothing_beside_is_read,
    check_every_length,
    check_fills_its_output,
    check_payload_travels,
    check_deterministic,
    check_every_shape_and_name,
    check_threads_change_nothing,
    check_decoding_is_the_same_everywhere,
)
