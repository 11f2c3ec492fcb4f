"""Checks of what several ranks have together: the mean, as exactly as the traits promise."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ringlet.compressors.base.chain import Chain
from ringlet.compressors.base.contract import Compressor, Payload
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.quantizers.quantize import Int8
from ringlet.compressors.quantizers.shared_int import SharedInt
from ringlet.compressors.testing.checks.many_steps import near_one
from ringlet.compressors.testing.checks.training import with_feedback
from ringlet.compressors.testing.tools.equality import same, same_payload
from ringlet.compressors.testing.tools.inputs import far_apart, gaussian, heavy_tailed, spiky
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import (
    by_payload,
    context,
    decode,
    encode,
    in_halves,
    simulate,
    takes_local,
)

_STEPS = 24
_N = 2000
_COUNTED = 4  # ranks, each of which has the only gradient in its turn
_TURNS = 1000  # steps in which each of 64 elements is sent, if one is in every step
_MANY = 130  # ranks, each of which sends something at some time
_FEW = 200
_EXACT = 1e-5  # of its length: how far off what is summed over a turn may be by rounding
_SIZES = (2, 9, 33, 130)
_EVERY_SIZE = (*range(1, 18), 33)  # of worlds in which all have one gradient
_DRAWN_SIZES = (2, 8, 9, 33)
_ALIKE = 1000  # ranks with one gradient, of which a sum is known without them


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "another_process_agrees",
    "replicas_agree",
    "sums_on_the_wire",
    "mean_of_equal_gradients",
    "points_the_same_way",
    "unbiased",
    "contraction",
    "every_shape_and_name",
)
def check_mean_of_ranks(compressor: Compressor) -> None:
    """What training sees is the mean over ranks: its error must be within what the traits promise
    for one rank, and at least no larger than the ranks' own errors together.

    Round(values, "sum") gives a sum: divide it by ctx.size. Quantise by a scale that all ranks have
    received, not by this rank's own. Yield an array of your own, or one of
    ctx.workspace.held(n), and not one of ctx.workspace.array. Copy what is received before the next
    yield, if it is needed then. Declare a delta or omega only if it holds for every x.
    """
    if type(compressor.at(0)).finish is not Compressor.finish and not _averages(compressor):
        return  # the result is no mean, such as a vote
    delta, omega = compressor.at(0).traits().delta, compressor.at(0).traits().omega
    sets = [_alike(size) for size in (2, 3, 8)]
    if not by_payload(compressor) and delta is None and omega is None:
        sets.append(_unlike(3))  # of which a scale in common can be one rank's only
    for gradients in sets:
        size = len(gradients)
        lengths = [_norm(x) for x in gradients]
        mean = np.mean(np.asarray(gradients, np.float64), axis=0)
        errors = []
        for step in range(_STEPS if omega or delta else 4):
            outs = _at_step(compressor, gradients, step)
            assert all(same(out, outs[0]) for out in outs), f"{size} ranks hold different results"
            errors.append(float(np.square(outs[0] - mean).sum()))
        error = float(np.sqrt(np.mean(errors)))
        # The triangle inequality: the error of a mean is at most the mean of the errors.
        if delta is not None:
            bound, claim = np.sqrt(1 - delta) * np.mean(lengths), f"for delta={delta:.4g}"
        elif omega is not None:
            bound, claim = np.sqrt(omega) * np.mean(lengths) * 1.1, f"for omega={omega:.4g}"
        else:
            alone = [_alone(compressor, x) for x in gradients]
            # Where ranks share a scale, it is the largest's, and each has a share of its levels.
            lost = np.mean(alone) if by_payload(compressor) else size * np.max(alone)
            bound, claim = 1.5 * lost, "by what single ranks lose"
            if error > bound and by_payload(compressor):
                bound += 1.5 * _left_to_others(compressor, gradients)
        assert error <= bound + 2e-3 * np.mean(lengths), (
            f"the mean of {size} ranks is off by {error:.4g}, the bound {claim} is {bound:.4g} "
            f"(the mean's own norm is {_norm(mean):.4g}){_at_the_end(outs[0] - mean)}"
        )


def _at_the_end(error: Array) -> str:
    """Return what is to be said where the last elements alone are off."""
    off = np.flatnonzero(np.abs(error) > 0.01 * np.abs(error).max())
    if off.min() < 0.9 * error.size:
        return ""
    return (
        f": elements from {off.min()} to {off.max()} of {error.size} are off, others are not; "
        "ctx.size need not divide x.size"
    )


@needs("mean_of_ranks", "points_the_same_way")
def check_many_ranks(compressor: Compressor) -> None:
    """A sum over ranks that fits its integers with eight of them wraps round, or leaves no levels,
    with a hundred: a job that grows then trains on noise.

    Send codes of at most the integer's largest divided by ctx.size, and a wider integer where that
    leaves too few; CompressorError refuses more ranks than there is room for. Where each rank sends
    its share of the entries, that is one at least: max(1, k // ctx.size).
    """
    x = gaussian(_FEW, 1)
    large = np.abs(x) >= np.float32(0.5) * np.abs(x).max()
    keeps_signs, something = True, False
    # Who gathers decodes everybody's: 33 times 33 payloads are enough.
    for size in _SIZES[:-1] if compressor.at(1).traits().combine == "gather" else _SIZES:
        gradients = [x + gaussian(_FEW, 10 + rank, 0.1) for rank in range(size)]
        try:
            outs = simulate(compressor, gradients, step=1)
        except CompressorError:
            return
        except Exception as error:
            error.add_note(f"That is with {size} ranks.")
            raise
        assert np.isfinite(outs).all(), f"the mean of {size} ranks is NaN or Inf"
        assert all(same(out, outs[0]) for out in outs), f"{size} ranks hold different results"
        kept = bool((outs[0][large] * x[large] >= 0).all())
        keeps_signs &= kept or size > _SIZES[0]  # or it is not that kind of code
        assert kept or not keeps_signs, (
            f"among {size} ranks with nearly the same gradient some of its largest values come out "
            "with the other sign, which they do not among fewer: a sum wraps round"
        )
        sent = float(np.square(outs[0], dtype=np.float64).sum())
        assert sent or not something, (
            f"among {size} ranks with nearly the same gradient the result is 0, among fewer it is "
            "not: what each of them sends is rounded down to nothing"
        )
        something = something or bool(sent)
        along = float(outs[0].astype(np.float64) @ x)
        assert not sent or along > 0, (
            f"the mean of {size} ranks points away from the gradient that nearly all of them have"
        )
    if not by_payload(compressor):
        with suppress(CompressorError):
            simulate(compressor, [x], step=1, alike=_ALIKE)
    _check_every_size(compressor)


def _check_every_size(compressor: Compressor) -> None:
    """Raise AssertionError where some number of equal ranks makes results larger or smaller."""
    x, first, now = gaussian(400, 6), 0.0, compressor.at(1)
    if by_payload(now) and not now.traits().predivide:
        one, other = (encode(now, x, context(x, rank=r, size=4, step=1)) for r in (0, 2))
        if not same_payload(one, other):
            _check_drawn_sizes(compressor, x)
            return
    for size in _EVERY_SIZE:
        try:
            out = simulate(compressor, [x] * size, step=1)[0]
        except CompressorError:
            return  # it says for how many there is room
        along = float(np.dot(out.astype(np.float64), x))
        first = first or along
        assert first <= 0 or 0.7 < along / first < 1.4, (
            f"{size} equal ranks get {along / first:.3g} times what one rank gets"
        )


def _check_drawn_sizes(compressor: Compressor, x: Array) -> None:
    """Raise AssertionError where noise of their own leaves many ranks less, or more, than few."""
    along = []
    for size in _DRAWN_SIZES:
        try:
            outs = [simulate(compressor, [x] * size, step=step)[0] for step in range(1, 5)]
        except CompressorError:
            return  # it says for how many there is room
        along.append(float(np.sum(outs, axis=0, dtype=np.float64) @ x))
        if along[0] <= 0 or not 0.6 < along[min(1, len(along) - 1)] / along[0] < 1.6:
            return  # each sends a share of the entries, the more ranks the smaller
        assert 0.6 < along[-1] / along[0] < 1.6, (
            f"{size} equal ranks get {along[-1] / along[0]:.3g} times what {_DRAWN_SIZES[0]} get"
        )


@needs(*PURE, "decoding_is_the_same_everywhere", "unbiased")
def check_noise_averages_out(compressor: Compressor) -> None:
    """Unbiased noise pays because it cancels: the mean over W ranks has a W-th of one rank's
    variance, but only if ranks draw on their own. ctx.rng() does, unless it is shared.

    Draw from ctx.rng() or ctx.uniform(n), not from a generator seeded with the seed or step alone.
    """
    traits = compressor.traits()
    if not traits.omega or traits.combine != "gather":
        return  # what is summed on the wire may have to be drawn alike
    x = gaussian(_N, 3)
    variance = {}
    for size in (1, 6):
        outs = [simulate(compressor, [x] * size, step=step)[0] for step in range(4 * _STEPS)]
        variance[size] = float(np.mean([np.square(out - x.astype(float)).sum() for out in outs]))
    assert variance[6] <= 1.6 * variance[1] / 6 + 1e-9 * _norm(x) ** 2, (
        f"over 6 ranks the variance falls to {variance[6] / variance[1]:.3g} of one rank's, not "
        "to a sixth: ranks draw the same noise"
    )


def _averages(compressor: Compressor) -> bool:
    """Whether finishing leaves the mean of what is constant as it is, as EF21's first step does."""
    x = np.full(64, 3, np.float32)
    return bool(np.allclose(simulate(compressor, [x])[0], x, rtol=0.2))


def _alike(size: int) -> list[Array]:
    """Return gradients that are mostly one, so that a sum is no mean; the second is larger."""
    common = heavy_tailed(_N, 1)
    found = [common + gaussian(_N, 10 + rank, 0.3) for rank in range(size)]
    found[1:2] = [x * np.float32(4) for x in found[1:2]]
    return found


def _unlike(size: int) -> list[Array]:
    """Return gradients that have nothing in common, each of which is much larger than the next."""
    return [gaussian(_N, 20 + rank, 16.0**-rank) for rank in range(size)]


def _at_step(compressor: Compressor, gradients: list[Array], step: int) -> list[Array]:
    shape = (40, 50)
    if compressor.traits().stateful or not by_payload(compressor):
        step = 0  # of a first step something is known
    return simulate(compressor.at(0), gradients, step=step, shape=shape)


@needs(*PURE, "points_the_same_way", "non_finite_stays_visible", "sums_on_the_wire")
def check_scales_with_its_values(compressor: Compressor) -> None:
    """Gradients carry a loss scale through compression, which is taken off the result, and shrink
    by orders of magnitude while a model trains: a step or threshold that fits one run is wrong in
    the next.

    Take scales from the values, such as their largest magnitude, without adding an epsilon, and
    send and remember them as float32, which float16 does not replace: it holds 6e-8 to 65504. The
    scale of a block of zeros is 0, and not 1, where it is sent. What goes by absolute sizes on
    purpose declares traits: scales=False.
    """
    if not compressor.traits().scales:
        return
    powers = (4, -4) if in_halves(compressor) else (4, -4, 16, -16, 40, -40)
    holes = heavy_tailed(3000, 9)
    holes[640:1600] = 0  # whole blocks of zeros, which a scale of their own must leave zeros
    for x in (gaussian(3000, 8), heavy_tailed(3000, 9), holes):
        for size in (1, 2):  # what a rank sends alone may be another code's
            one = _after_steps(compressor, x, size)
            for power in powers:
                by = np.float32(2.0**power)
                more = _after_steps(compressor, by * x, size)
                close = np.allclose(more / by, one, rtol=1e-2, atol=1e-3 * float(np.abs(x).max()))
                times = str(int(by)) if power == 4 else f"2^{power}"
                assert close, (
                    f"{times} times the values do not give {times} times the result"
                    f"{' of two ranks' if size > 1 else ''}: take the scale from the values, or "
                    "declare scales=False"
                )


def _after_steps(compressor: Compressor, x: Array, size: int) -> Array:
    """Return the result for equal ``x``, of a third step where something is remembered."""
    steps = range(3) if compressor.traits().stateful else range(1, 2)
    states = [State() for _ in range(size)]
    return [simulate(compressor, [x] * size, states, step)[0] for step in steps][-1]


@needs("traits_are_traits", "compresses_a_tensor")
def check_every_rank_takes_part(compressor: Compressor) -> None:
    """A round is a collective: a rank that leaves it out, because it has only zeros or an overflow,
    leaves the others waiting for ever.

    Yield the same rounds, of the same lengths, on every rank, whatever its values are.
    """
    if by_payload(compressor):
        return
    n = 2000
    overflow = gaussian(n, 1)
    overflow[7] = np.inf
    found: list[list[tuple[str, str, int]]] = []
    special = [np.zeros(n, np.float32), spiky(n, 2), gaussian(n, 3, 1e30), overflow]
    for shape in ((n,), (40, 50)):
        for other in special:
            with np.errstate(all="ignore"):
                found.append([])
                simulate(compressor, [gaussian(n, 4), other], shape=shape, rounds=found[-1])
        idle: list[tuple[str, str, int]] = []
        simulate(compressor, special[:1] * 2, shape=shape, rounds=idle)
        assert found[-1] == idle, (
            f"where all ranks have zeros alone they exchange {idle}, otherwise {found[-1]}: how "
            "many rounds there are, and of what, must not depend on values"
        )


@needs("mean_of_ranks", "every_rank_takes_part", "scales_with_its_values")
def check_shares_make_the_mean(compressor: Compressor) -> None:
    """Error feedback behind rounds keeps what a rank's share of the result lacks of its gradient:
    if the mean of the shares is not the result, something is lost or fed back twice.

    Where ``local`` is given, write to it what of the result stands for this rank's own x, and not
    the mean: what x became on the wire, decoded. What something chained behind makes of values is
    left in a third argument: mean = yield Round(values, "mean", values), then read values. Where a
    result has no shares, as a vote has none, divergence() says that nothing can be fed back.
    """
    while isinstance(compressor, ErrorFeedback):  # which asks for the shares
        compressor = compressor.wrapped_compressor
    if by_payload(compressor) or compressor.divergence():
        return  # nobody asks for shares
    shares: list[Array] = []
    if not compressor.traits().gradient_units:  # which may feed back by itself, to all ranks alike
        simulate(compressor, [heavy_tailed(2000, 1), *np.zeros((2, 2000), "f4")], shares=shares)
        most, others = _norm(shares[0]), max(map(_norm, shares[1:]))
        assert others <= 0.5 * most, (
            f"||local|| is {others:.3g} on ranks that gave zeros alone, {most:.3g} on the one that "
            "gave all the rest: it is not of this rank's own x"
        )
    _check_shares(compressor)


def _check_shares(compressor: Compressor, when: str = "") -> None:
    # What is fed back by itself, to all ranks alike, is nobody's share.
    steps = 1 if compressor.traits().gradient_units else 4
    for shape, size in (((2000,), 3), ((40, 50), 3), ((40, 50), 1), ((1993,), 2)):
        states: list[State] = [{} for _ in range(size)]
        for step in range(steps):
            n = int(np.prod(shape))
            gradients = [heavy_tailed(n, 3 * step + rank) for rank in range(size)]
            shares: list[Array] = []
            out = simulate(compressor, gradients, states, step, shape=shape, shares=shares)[0]
            mean = np.mean(np.asarray(shares, np.float64), axis=0)
            close = np.allclose(mean, out, rtol=1e-3, atol=1e-4 * float(np.abs(out).max()))
            assert close, (
                f"{when}the mean of what {size} ranks left in local in step {step} is not the "
                f"result: it is off by {float(np.abs(mean - out).max()):.3g}"
            )


@needs(*PURE, "large_tensors", "shares_make_the_mean")
def check_can_be_chained(compressor: Compressor) -> None:
    """'| int8' behind a compressor that says which of its arrays holds values must find them, on
    every rank, or training stops at its first step.

    Return the name of a float32 array that compress sends from chained_part(), or None, and from
    chained_count(payload, n) how many values it has. In rounds, mean = yield Round(values, "mean",
    values) leaves in values what became of them: read them there for ``local``, or return None from
    chained_part().
    """
    if not by_payload(compressor):
        if not isinstance(compressor, (Chain, Modifier)) and compressor.chained_part() is not None:
            _check_shares(compressor | SharedInt(), "with '| shared_int' behind it ")
        return
    last = compressor
    while isinstance(last, Chain):  # what is behind a chain goes behind its last part
        last = last.second
    cls = type(last)
    said = any(
        getattr(cls, name) not in (getattr(Compressor, name), getattr(Modifier, name))
        for name in ("chained_part", "chained_count")
    )
    usual = compressor.compress(gaussian(2000, 1), context(gaussian(2000, 1)))
    floats = "values" in usual and usual["values"].dtype == np.float32
    if floats and not said and not compressor.traits().fixed_size:
        _check_places_are_counted(compressor, usual)
    part = compressor.chained_part() if said or (floats and "indices" in usual) else None
    if part is None:
        return
    others = (gaussian(n, n) for n in (1993, 2008, 2009, 100, 7))  # which fill no blocks
    for x in (gaussian(2000, 1), spiky(2000, 2), gaussian(1, 3), far_apart()[0], *others):
        payload = compressor.compress(x, context(x))
        assert part in payload, f"chained_part() says {part!r}, compress sends {sorted(payload)}"
        array = payload[part]
        assert array.dtype == np.float32, f"{part!r} is of {array.dtype}, not float32"
        rest = {name: other for name, other in payload.items() if name != part}
        try:
            count = compressor.chained_count(rest, x.size)
        except KeyError as error:
            raise AssertionError(
                f"chained_count() looks for payload[{error}], and is given {sorted(rest)} alone: "
                f"{part!r} is what another one has compressed by then"
            ) from None
        assert count == array.size, (
            f"chained_count() says {count} values of {x.size} elements, compress sends {array.size}"
        )
    if not isinstance(compressor, (Chain, Modifier)):
        _check_values(compressor, part)


def _check_places_are_counted(compressor: Compressor, payload: Payload) -> None:
    """Raise AssertionError where places come under another name than the one that is counted."""
    if "indices" in payload or isinstance(compressor, (Chain, Modifier)):
        return
    few = payload["values"].size // 2
    for name, array in payload.items():
        places = array.dtype.kind in "iu" and array.itemsize > 1 and array.size > few > 0
        assert not places, (
            f"'| int8' behind it would compress 'values', and look for their number in 'indices', "
            f"of which there are none: define chained_count(payload, n) by payload[{name!r}]"
        )


def _check_values(compressor: Compressor, part: str) -> None:
    """Raise AssertionError where values a little off make something else of the result."""
    try:
        chained = compressor | Int8()
    except CompressorError:
        return  # who declares it is told
    x = gaussian(2000, 1)
    alone, behind = (simulate(which, [x])[0] for which in (compressor, chained))
    off = _norm(behind - alone.astype(np.float64))
    assert off <= 0.05 * _norm(alone), (
        f"with '| int8' behind it the result is off by {off / (_norm(alone) or 1):.3g} of its "
        f"length: {part!r} holds something else than values, such as a count, which belongs into "
        "an array of its own; or return None from chained_part()"
    )


def _alone(compressor: Compressor, x: Array) -> float:
    """Return what a single rank loses, in the steps in which several ranks are looked at."""
    known = compressor.traits().stateful or not by_payload(compressor)
    outs = [_at_step(compressor, [x], step)[0] for step in range(1 if known else 4)]
    return float(np.sqrt(np.mean([_norm(out - x.astype(np.float64)) ** 2 for out in outs])))


def _left_to_others(compressor: Compressor, gradients: list[Array]) -> float:
    """Return what a rank loses on average of entries that it sends when it is alone.

    Ranks may send a part each, in turn. Others must arrive as they do from one rank, and so must
    all in the mean over a turn, where ranks send more than their part while it is theirs.
    """
    now, size = compressor.at(0), len(gradients)
    left, in_turn = [], []
    for rank, x in enumerate(gradients):
        alone = simulate(now, [x])[0]
        outs = [_sent(now, x, rank, size, step) for step in range(size)]
        gone = (outs[0] == 0) & (alone != 0)
        if np.array_equal(outs[0][~gone], alone[~gone]):
            left.append(_norm(x[gone]))
        off = _norm(np.mean(outs, axis=0, dtype=np.float64) - alone)
        if off <= _EXACT * _norm(alone):
            in_turn.append([_norm(out - x.astype(np.float64)) for out in outs])
    if len(left) == size:
        return float(np.mean(left))
    return float(np.mean(in_turn, axis=0).max()) if len(in_turn) == size else 0.0


def _sent(now: Compressor, x: Array, rank: int, size: int, step: int) -> Array:
    """Return what one of so many ranks sends of ``x``, decoded."""
    ctx = context(x, rank=rank, size=size, step=step)
    return decode(now, encode(now, x, ctx), x.size, ctx)


def _norm(x: Array) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).sum()))


@needs("mean_of_ranks")
def check_every_rank_counts(compressor: Compressor) -> None:
    """A mean over ranks has a share of each: a rank whose gradient never comes through trains on
    the others' data alone, and its own NaN is seen by nobody.

    Send of every rank what is sent of the first, or let ranks take turns by ctx.step % ctx.size:
    whatever only some ranks send, all of them need. Where each sends a part of its own, it is
    another part in the next step: (ctx.rank + ctx.step) % ctx.size.
    """
    zeros = np.zeros(_N, np.float32)
    came = []
    for rank in range(_COUNTED):
        gradients = [gaussian(_N, 1) if rank == other else zeros for other in range(_COUNTED)]
        states: list[State] = [{} for _ in gradients]
        outs = [
            simulate(compressor, gradients, states, step, shape=(40, 50))[0]
            for step in range(2 * _COUNTED)
        ]
        came.append(_norm(np.asarray(outs, np.float64)))
    least, most = int(np.argmin(came)), int(np.argmax(came))
    assert came[least] > 0 or not came[most], (
        f"where rank {least} of {_COUNTED} alone has a gradient the result is 0 in all of "
        f"{2 * _COUNTED} steps, which it is not where rank {most} has it"
    )
    if by_payload(compressor) and came[most]:
        x = gaussian(_N, 1)
        for rank in range(_MANY):
            sends = any(_sends(compressor, x, rank, step) for step in range(2 * _MANY))
            if not sends and not rank:
                break  # so many have no room, of which another check knows
            assert sends, f"rank {rank} of {_MANY} sends nothing in any of {2 * _MANY} steps"
    _check_places_of_ranks(compressor)


def _check_places_of_ranks(compressor: Compressor) -> None:
    """Raise AssertionError where a rank never sends some elements, though a lone one does."""
    while isinstance(compressor, ErrorFeedback):
        compressor = compressor.wrapped_compressor
    if compressor.traits().stateful or not compressor.traits().scales:
        return
    if not by_payload(compressor) and not takes_local(compressor):
        return  # there is no error feedback, which another check tells
    wrapped = with_feedback(compressor)
    if wrapped is compressor or _never_sent(wrapped, 0, 1).size:
        return  # it would diverge, or another check tells
    for rank in range(3):
        never = _never_sent(wrapped, rank, 3)
        assert not never.size, (
            f"of 64 elements of rank {rank} of 3, {never.size} were never sent in {_TURNS} steps "
            f"of error feedback, the first of them element {never[0]}; of a lone rank all are"
        )


def _never_sent(wrapped: Compressor, rank: int, size: int) -> Array:
    """Return which of the first of 64 elements do not come that one rank alone has."""
    x = near_one(64)
    gradients = [x if rank == other else np.zeros_like(x) for other in range(size)]
    states, waiting = [State() for _ in gradients], np.arange(x.size) < 48
    for step in range(_TURNS):
        waiting &= ~(simulate(wrapped, gradients, states, step)[0] * x > 0)
        if not waiting.any():
            break
    return np.flatnonzero(waiting)


def _sends(compressor: Compressor, x: Array, rank: int, step: int) -> bool:
    """Whether one rank of many sends something in a step."""
    return bool(_sent(compressor.at(step), x, rank, _MANY, step).any())


CHECKS = (
    check_every_rank_counts,
    check_every_rank_takes_part,
    check_mean_of_ranks,
    check_many_ranks,
    check_noise_averages_out,
    check_scales_with_its_values,
    check_shares_make_the_mean,
    check_can_be_chained,
)
