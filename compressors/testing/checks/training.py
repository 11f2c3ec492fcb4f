"""Checks over many steps and ranks: what a training run relies on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, State, Workspace
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.modifiers.scaled import Scaled
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed, large, vectors
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import by_payload, context, decode, encode, simulate

# Residuals this many times as long as a gradient are growing: without a bound, 300 steps show it.
_DIVERGED = 1000.0
_GROWN, _LONG_STEPS = 30.0, 10  # the same of long tensors, in as many steps
_ROUNDS = 60  # steps of feedback in rounds, where what grows grows by a factor
_SETTLED, _SPOILED = 20, (2, 4, 6)  # steps until results are compared, and those that overflow
_STRAY = 0.1
# Of two ranks: the ends of what is made anew every 50 or 100 steps, and of warm-ups.
_LATE = (199, 200, 255, 256, 499, 500, 511, 512, 999, 1000, 1023, 1024, 9999, 10_000)
_LONG_RUN = (*range(130), *_LATE)


def with_feedback(compressor: Compressor) -> Compressor:
    """Return ``compressor | ef``, scaled before where it would diverge otherwise.

    It is ``compressor`` where neither can be made, now or of what a schedule uses later.
    """
    if not diverges(compressor):
        return compressor | ErrorFeedback()
    for now in (compressor, *compressor.over_steps()):
        traits = now.traits()
        if traits.omega is None or traits.combine == "rounds" or traits.stateful:
            return compressor
    return compressor | Scaled() | ErrorFeedback()


def diverges(compressor: Compressor) -> bool:
    """Whether error feedback behind it would diverge in some step, by what it says of itself."""
    return any(now.divergence() for now in (compressor, *compressor.over_steps()))


@needs(*PURE, "decoding_is_the_same_everywhere", "fast_paths_agree", "every_rank_takes_part")
def check_replicas_agree(compressor: Compressor) -> None:
    """The first promise: after every step all ranks hold the same bits.

    Let nothing that ends in the result depend on ctx.rank or on a rank's own values, but for what
    is sent or yielded. What all must draw alike, such as the hashes of a sketch, comes from
    ctx.rng(shared=True): without it every rank draws its own.
    """
    for size in (1, 2, 3, 4):
        states: list[State] = [{} for _ in range(size)]
        for step in range(4):
            gradients = [heavy_tailed(2500, 10 * step + rank) for rank in range(size)]
            outs = simulate(compressor, gradients, states, step)
            agree = all(same(out, outs[0]) for out in outs)
            assert agree, f"after step {step} the {size} ranks hold different results"
    if by_payload(compressor) and not _finishes(compressor):
        return  # all decode the same payloads
    states = [{}, {}]
    for step in _LONG_RUN:
        try:
            gradients = [gaussian(400, 2 * step + rank) for rank in (0, 1)]
            one, other = simulate(compressor, gradients, states, step)
        except Exception as error:
            error.add_note(f"That is in step {step}.")
            raise
        assert same(one, other), f"after step {step} the 2 ranks hold different results"


def _finishes(compressor: Compressor) -> bool:
    """Whether something is done to results, by this compressor or what it wraps."""
    while isinstance(compressor, Modifier):
        if type(compressor).finish is not Modifier.finish:
            return True
        compressor = compressor.wrapped_compressor
    return type(compressor).finish is not Compressor.finish


@needs(*PURE, "sums_on_the_wire", "replicas_agree")
def check_mean_of_equal_gradients(compressor: Compressor) -> None:
    """When all ranks have the same gradient, its mean is that gradient: more ranks must not make
    the result larger or smaller than one rank's own.

    Leave the division to the engine: decode what was encoded, whatever ctx.size is. If it
    is so already, look for what goes by ctx.rank, such as how many values are sent. In rounds,
    Round(values, "sum") gives a sum: divide it by ctx.size, or ask for the "mean". Codes that add
    up on the wire need a type that their sum fits.
    """
    x, now = gaussian(3000, 6), compressor.at(1)
    if not by_payload(now) or now.traits().predivide:
        one, four = (simulate(compressor, [x] * size, step=1)[0] for size in (1, 4))
        along = [float(np.dot(out.astype(np.float64), x)) for out in (one, four)]
        assert along[0] <= 0 or 0.5 < along[1] / along[0] < 2, (
            f"four equal ranks get {along[1] / along[0]:.3g} times what one rank gets"
        )
        return
    payloads = [encode(now, x, context(x, rank=r, size=4, step=1)) for r in (0, 2)]
    if not all(same(payloads[0][name], payloads[1][name]) for name in payloads[0]):
        return  # ranks draw their own noise
    one = simulate(compressor, [x], step=1)[0]
    four = simulate(compressor, [x] * 4, step=1)[0]
    close = np.allclose(four, one, rtol=1e-2, atol=1e-2 * float(np.abs(x).max()))
    assert close, "the mean over four equal ranks differs from one rank's result"


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "points_the_same_way",
    "memory_is_declared",
    "fused_feedback_agrees",
    "extreme_values",
)
def check_feedback_telescopes(compressor: Compressor) -> None:
    """Error feedback converges because nothing is lost: what was sent plus what is held back is
    what went in.

    Leave the residual to '| ef', and take scratch memory under names of your own: "feedback" and
    "decoded" are the engine's.
    """
    if not by_payload(compressor) or compressor.traits().stateful:
        return
    wrapped = with_feedback(compressor)
    if wrapped is compressor:
        return

    def body(x: Array) -> None:
        if not x.size or np.abs(x).max() > 1e4:
            return
        state: State = {}
        sent, given, largest = np.zeros(x.size), np.zeros(x.size), 0.0
        for step in range(4):
            gradient = (x * (1 + step)).astype(np.float32)
            payload = encode(wrapped, gradient, context(gradient, state, step=step))
            decoded = decode(wrapped, payload, x.size, context(gradient, step=step))
            sent += decoded
            given += gradient
            held = state["residual"]
            # What is added in float32 is rounded at the size of the largest of all.
            largest = max(largest, *(float(np.abs(a).max()) for a in (decoded, given, held)))
        off = float(np.abs(sent + held - given).max())
        assert off <= 2e-5 * largest + 1e-30, f"sent + held back is off by {off:.3g}"

    for_all(vectors(), body)


@needs(
    "feedback_telescopes", "contraction", "unbiased", "local_is_written", "every_rank_takes_part"
)
def check_feedback_stays_bounded(compressor: Compressor) -> None:
    """A residual that grows without bound is a memory of stale gradients that ends in divergence;
    contractive compressors cannot do that (Karimireddy et al., 2019), and others must say so by
    divergence(), for users to be told when they declare it.

    Send no more than there is: contract, as top-k does, rather than multiply what is sent; declare
    omega, so that '| scaled | ef' is told to users, or return the reason from divergence().
    """
    if diverges(compressor) or compressor.traits().gradient_units:
        return
    if not by_payload(compressor):
        _check_bounded_in_rounds(compressor)
        return
    if compressor.traits().stateful:
        return
    wrapped, largest, n = compressor | ErrorFeedback(), 0.0, 1500
    delta = compressor.traits().delta
    state: State = {}
    bound = np.sqrt(4 * (1 - delta)) / delta if delta else _DIVERGED
    for step in range(300):
        x = gaussian(n, step)
        encode(wrapped, x, context(x, state, step=step))
        largest = max(largest, float(np.linalg.norm(x)))
        norm = float(np.linalg.norm(state["residual"]))
        if norm <= bound * largest * 1.01 + 1e-6 * largest:  # and what is rounded
            continue
        claim = f"the bound for delta={delta:.3g}" if delta else "where divergence() is None it"
        grown = f"||residual|| is {norm:.3g} at step {step}, {claim} is at most"
        most = int(np.argmax(np.abs(state["residual"])))
        alone = 2 * np.square(state["residual"][most], dtype=float) > norm**2
        where = f"; most of it is of element {most} of {n}: look at what becomes of that one"
        raise AssertionError(f"{grown} {bound * largest:.3g}{where * bool(alone)}")


@needs("feedback_stays_bounded", "every_part_of_a_large_tensor", "scales_with_its_values")
def check_long_residuals_stay_bounded(compressor: Compressor) -> None:
    """Residuals of short tensors may stay bounded where those of a layer of a million grow with
    every step: levels of a norm of the whole tensor lie further apart the longer it is.

    Take the largest magnitude in place of a norm, or a scale for every so many values, or return
    the reason from divergence().
    """
    traits = compressor.traits()
    if diverges(compressor) or traits.gradient_units or not by_payload(compressor):
        return
    if traits.stateful or traits.delta or not traits.scales:
        return
    wrapped = compressor | ErrorFeedback()
    lost = _lost_of(compressor, 1 << 18)
    if lost <= 0.5 or lost <= 1.5 * _lost_of(compressor, 1500):
        return
    if _lost_of(compressor, 1 << 20) <= 1:
        return
    state: State = {}
    x = large()[: 1 << 20]
    for step in range(_LONG_STEPS):
        encode(wrapped, x.copy(), context(x, state, step=step))
        times = float(np.linalg.norm(state["residual"]) / np.linalg.norm(x))
        assert times <= _GROWN, (
            f"of {x.size} elements ||residual|| is {times:.3g} times the gradient's at step "
            f"{step}, though divergence() is None and that of 1500 elements does not grow: levels "
            "of a norm of the whole tensor lie too far apart where it is long"
        )


def _lost_of(compressor: Compressor, n: int) -> float:
    """Return ||C(x) - x|| / ||x|| of so many elements."""
    x = large()[:n].copy()
    out = decode(compressor, encode(compressor, x, context(x)), n, context(x))
    return float(np.linalg.norm(out - x) / np.linalg.norm(x))


def _check_bounded_in_rounds(compressor: Compressor) -> None:
    wrapped, states, largest = compressor | ErrorFeedback(), [State(), State()], 0.0
    for step in range(_ROUNDS):
        gradients = [gaussian(600, 2 * step + rank) for rank in (0, 1)]
        simulate(wrapped, gradients, states, step, shape=(20, 30))
        largest = max(largest, *(float(np.linalg.norm(x)) for x in gradients))
        norm = float(np.linalg.norm(states[0]["residual"]))
        assert norm <= _DIVERGED * largest, (
            f"||residual|| is {norm:.3g} at step {step}, {norm / largest:.3g} times the largest "
            "gradient's, though divergence() is None"
        )


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "non_finite_stays_visible",
    "feedback_telescopes",
    "replicas_agree",
    "every_rank_takes_part",
    "every_rank_counts",
    "sums_on_the_wire",
)
def check_one_overflow_is_survived(compressor: Compressor) -> None:
    """Mixed precision overflows now and then, and skips the step: whatever a compressor remembers
    must not be poisoned by it for the rest of the run.

    Keep the old value where the new one is not finite, xp.copyto(kept, new,
    where=xp.isfinite(new)), and zeros where nothing is kept yet. What is sent has to be NaN then,
    what is kept must not be. What must fit what other ranks keep changes in finish(), or after the
    last round, where all see what was spoiled. Round(values, "max") may lose NaN: send Inf in its
    place. Where one rank chooses what others send, add every rank's (0 * x).sum() to a round.
    """
    wrapped = compressor if compressor.traits().stateful else with_feedback(compressor)
    few = [7, 2222]
    spoiled: list[tuple[float, int, int, Any]] = [(np.nan, 1, 1, few), (np.inf, 1, 1, few)]
    if not by_payload(compressor):  # ranks may have parts that change from step to step
        spoiled += [(np.nan, 0, 1, few), (np.nan, 1, 2, few), (np.nan, 0, 2, few)]
    spoiled.append((np.nan, 1, 0, few))  # a loss scale begins too high
    spoiled.append((np.nan, 1, 1, slice(None)))  # more than is sent of it, and cleared by that
    for bad, where, when, places in spoiled:
        states: list[State] = [{}, {}]
        what = f"{bad} on rank {where} of two" if places is few else f"a gradient that is all {bad}"
        for step in range(5):
            gradients = [gaussian(3000, 2 * step + rank) for rank in (0, 1)]
            if step == when:
                gradients[1 - where][few] = 0  # so that it is not chosen by the other
                gradients[where][places] = bad
            with np.errstate(all="ignore"):
                out = simulate(wrapped, gradients, states, step, shape=(50, 60))[0]
            assert step != when or not np.isfinite(out).all(), (
                f"{what} vanished in step {when}: it would not be skipped"
            )
            if step > when:
                assert np.isfinite(out).all(), f"step {step} suffers from {what} in step {when}"
        for state in states:
            assert _finite(state), f"what is remembered holds {bad} for good"
    _check_overflows_of_both(wrapped)
    if not compressor.traits().stateful:
        return
    clean, after = (_strayed(compressor, overflows) for overflows in (False, True))
    assert after <= 1.5 * clean + _STRAY, (
        f"after a step that one rank's NaN spoiled, results of {_SETTLED} steps with equal "
        f"gradients are off by {after:.3g} of their length, {clean:.3g} without it: memories no "
        "longer fit together"
    )


def _check_overflows_of_both(wrapped: Compressor) -> None:
    """Raise AssertionError where what is not finite on two ranks cancels."""
    for bad in ((np.nan, np.nan), (np.inf, -np.inf)):
        gradients = [gaussian(3000, rank) for rank in (0, 1)]
        for x, value in zip(gradients, bad, strict=True):
            x[7] = value
        with np.errstate(all="ignore"):
            out = simulate(wrapped, gradients, shape=(50, 60))[0]
        assert not np.isfinite(out).all(), (
            f"{bad[0]} on one rank and {bad[1]} on the other vanished: it would not be skipped; "
            "count how many ranks have one, and neither with a sign nor modulo 2"
        )


def _strayed(compressor: Compressor, overflows: bool) -> float:
    """Return how far the last results are from a mean that stands still, of its length."""
    states: list[State] = [{}, {}]
    still = [gaussian(1500, rank) for rank in (0, 1)]
    mean = np.mean(still, axis=0, dtype=np.float64)
    outs = np.zeros(1500)
    for step in range(2 * _SETTLED):
        gradients = [x.copy() for x in still]
        if step in _SPOILED and overflows:
            gradients[1][7] = np.nan
        with np.errstate(all="ignore"):
            out = simulate(compressor, gradients, states, step, shape=(30, 50))[0]
        if step >= _SETTLED:
            outs += out / np.float64(_SETTLED)
    return float(np.linalg.norm(outs - mean) / np.linalg.norm(mean))


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "memory_is_declared",
    "replicas_agree",
    "finish_is_passed_on",
)
def check_resumes_from_a_checkpoint(compressor: Compressor) -> None:
    """A run that was interrupted goes on as if it had not been: all memory is in ctx.state, as
    arrays, numbers, strings and dicts of them, which a checkpoint can hold.

    Keep arrays, numbers, strings and dicts of them in ctx.state, and make anew what else is needed.
    """
    gradients = [[gaussian(2000, 2 * step + r) for r in (0, 1)] for step in range(6)]

    def go_on(states: list[State], first: int) -> list[Array]:
        return [simulate(compressor, gradients[s], states, s)[0] for s in range(first, 6)]

    states: list[State] = [{}, {}]
    for step in range(3):
        simulate(compressor, gradients[step], states, step)
    for state in states:
        _check_plain(state, "state")
    saved = copy.deepcopy(states)
    original, resumed = go_on(states, 3), go_on(saved, 3)
    assert all(map(same, original, resumed)), "a restored run gives other results"


@needs(*PURE, "decoding_is_the_same_everywhere")
def check_tensors_do_not_mix(compressor: Compressor) -> None:
    """One compressor serves every layer: what it remembers of one must not leak into another.

    Keep nothing but in ctx.state, which is the tensor's own, and there copies: scratch memory of
    ctx.workspace is everybody's.
    """
    x = [gaussian(1800, seed) for seed in range(3)]
    y = [heavy_tailed(700, seed) for seed in range(3)]
    alone: list[State] = [{}]
    expected = [simulate(compressor, [x[s]], alone, s, "x")[0] for s in range(3)]
    own: list[State] = [{}]
    other: list[State] = [{}]
    room = Workspace()
    for step in range(3):
        simulate(compressor, [y[step]], other, step, "y", workspace=room)
        out = simulate(compressor, [x[step]], own, step, "x", workspace=room)[0]
        assert same(out, expected[step]), "another tensor's steps changed this tensor's results"


def _finite(state: Any) -> bool:
    if isinstance(state, dict):
        return all(_finite(value) for value in state.values())
    array = np.asarray(state)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


# What torch.save, orbax and Keras hold, all three of them.
_NUMBERS = frozenset(
    np.dtype(code).name
    for code in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()  # noqa: SIM905
)
_ARRAYS = _NUMBERS | {"complex64", "complex128"}


def _check_plain(state: Any, where: str) -> None:
    if isinstance(state, dict):
        for key, value in state.items():
            assert isinstance(key, str), f"{where} has the key {key!r}; keys are strings"
            _check_plain(value, f"{where}[{key!r}]")
        return
    if isinstance(state, str):
        return
    if isinstance(state, bool | int | float) and not isinstance(state, np.generic):
        fits = not isinstance(state, int) or -(1 << 63) <= state < 1 << 63
        assert fits, f"{where} is {state}, beyond the 64 bits that a checkpoint holds"
        return
    dtype, bare = getattr(state, "dtype", None), isinstance(state, np.generic)
    assert dtype is not None, f"{where} is a {type(state).__name__}, which a checkpoint cannot hold"
    names = _NUMBERS if bare else _ARRAYS
    usual = isinstance(dtype, np.dtype) and dtype.isnative and dtype.name in names
    assert usual, (
        f"{where} is {'a number' if bare else 'an array'} of dtype {dtype}, which a checkpoint "
        "cannot hold; keep records as an array for each field, dates as int64, and texts as str"
    )
    plain = bare or not isinstance(state, np.ndarray) or type(state) is np.ndarray
    assert plain, f"{where} is a {type(state).__name__}, of which a checkpoint holds the array only"


CHECKS = (
    check_replicas_agree,
    check_mean_of_equal_gradients,
    check_feedback_telescopes,
    check_feedback_stays_bounded,
    check_long_residuals_stay_bounded,
    check_one_overflow_is_survived,
    check_resumes_from_a_checkpoint,
    check_tensors_do_not_mix,
)
