"""Checks of what is remembered over many steps, and of whose it is."""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.testing.checks.training import with_feedback
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed, spiky
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.plugin_code import lengths_named
from ringlet.compressors.testing.tools.simulate import (
    by_payload,
    context,
    decode,
    encode,
    in_halves,
    simulate,
)

_STEPS = range(4, 9)
_ROUND_NUMBERS = (1_008_000, 2_016_000)  # steps that are multiples of 7, 50, 64, 100, 1000
# By shape: what was remembered of, and the tensor that finds it.
_OTHERS = (((40, 50), (30, 40)), ((30, 40), (40, 50)), ((2000,), (1200,)), ((1200,), (2000,)))
_LONG, _GROWN = 200, 1000.0
_EARLY = 24  # steps with which late ones are compared
_EACH = 260  # steps, in each of which it is the same: beyond what an 8-bit counter counts
_POWERS = (-40, 20)  # of two, by which gradients are smaller and larger in late steps
_PLACES = 3072  # elements, each of which is to be sent; another check looks at what fills no block
# Half of them are sent in so few steps, or it takes too long; the rest in so many times as many,
# and not before so many: half of the signs that a projection returns are right by chance.
_FEW_STEPS, _PATIENCE, _AT_LEAST = 12, 20, 200
_OUTLIER, _SMALL = 100.0, 0.01  # one value, and about how large the others are
_TAIL = 16  # elements at the end, for which another check looks
_TURNS = 1000  # steps in which each of 64 elements is sent, if one is in every step
_COUNTED = (10, 110, 210)  # steps between which what grows now and then, by its own count, grows
_AGED, _AGED_SHAPE = 32, (8, 10)  # steps after which a part of what is remembered is handed on
_GOES_ON, _LOUDER = 8, 2.5  # steps that follow, in which nothing may be so many times as long
_MOVED = 12  # steps in which something of what is remembered is sent, though gradients are zeros


@needs(*PURE, "resumes_from_a_checkpoint")
def check_memory_does_not_grow(compressor: Compressor) -> None:
    """A run takes millions of steps: what grows by a little in each of them ends it, and fills
    checkpoints before.

    Keep a fixed number of arrays of fixed lengths in ctx.state: a running mean in place of a list,
    and no name with ctx.step in it.
    """
    if not compressor.traits().stateful:
        return
    states: list[State] = [{}, {}]
    sizes = []
    for step in range(_STEPS.stop):
        gradients = [gaussian(2000, 2 * step + rank) for rank in (0, 1)]
        simulate(compressor, gradients, states, step, shape=(40, 50))
        sizes.append(_bytes(states[0]))
    grown = [after - before for before, after in pairwise(sizes)]
    assert min(grown[_STEPS.start :]) <= 0, (
        f"what is remembered grows by {grown[-1]} bytes in every step"
    )
    for step in _ROUND_NUMBERS:
        for counted in (step - 1, step):  # from 0 or from 1
            with suppress(Exception):  # of late steps, which another check tells
                simulate(compressor, gradients, states, counted, shape=(40, 50))
        sizes.append(_bytes(states[0]))
    assert sizes[-1] <= sizes[-2], (
        f"what is remembered grows by {sizes[-1] - sizes[-2]} bytes from step {_ROUND_NUMBERS[0]} "
        f"to {_ROUND_NUMBERS[1]}, though not in the {_STEPS.stop} first ones"
    )
    _check_grows_by_no_count(compressor)
    before = described(states[0])
    zeros, few, spoiled = np.zeros(2000, np.float32), spiky(2000, 1), gaussian(2000, 3)
    spoiled[7] = np.nan
    for step, x in enumerate((few, zeros, heavy_tailed(2000, 2), spoiled), _STEPS.stop):
        with np.errstate(all="ignore"):
            simulate(compressor, [x, x], states, step, shape=(40, 50))
        after = described(states[0])
        for name in sorted(before.keys() | after.keys()):
            was, became = before.get(name, "nothing"), after.get(name, "nothing")
            assert was == became, (
                f"ctx.state[{name!r}] was {was}, and is {became} after a step with other values: "
                "what is kept must not go by values, or no checkpoint fits"
            )


def _check_grows_by_no_count(compressor: Compressor) -> None:
    """Raise AssertionError where what is remembered grows every so many steps, 100 at most."""
    x, states, sizes = gaussian(16, 1), [State()], list[int]()
    for step in range(_COUNTED[-1] + 1):
        simulate(compressor, [x], states, step, shape=(4, 4))
        if step in _COUNTED:
            sizes.append(_bytes(states[0]))
    assert not sizes[0] < sizes[1] < sizes[2], (
        f"what is remembered of 16 elements has {', '.join(map(str, sizes))} bytes after steps "
        f"{', '.join(map(str, _COUNTED))}: it grows now and then"
    )


def described(state: Any, name: str = "") -> dict[str, str]:
    """Return the dtype and length of every array in ``state`` by its name; numbers are alike."""
    if isinstance(state, dict):
        parts = [described(value, f"{name}.{key}" if name else key) for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    if np.shape(state) == ():
        return {name: "a string" if isinstance(state, str) else "a number"}
    return {name: f"{state.dtype}{list(np.shape(state))}"}


@needs(*PURE, "memory_does_not_grow", "pieces_remember_their_own")
def check_memory_fits_its_tensor(compressor: Compressor) -> None:
    """A vocabulary that grows leaves a tensor of the same name and another size, and a checkpoint
    may hold one: what is remembered of it must not be taken for this one's.

    Look at the size of what ctx.state holds: average = ctx.state.get("average"), and begin anew if
    average is None or average.size != ctx.numel. CompressorError refuses it, which
    ringlet.compressors.remembered does for you.
    """
    if not compressor.traits().stateful:
        return
    for before, now in _OTHERS:
        states: list[State] = [{}, {}]
        for step in range(2):
            simulate(compressor, _pair(before, step), states, step, shape=before)
        what = f"after a tensor of shape {list(before)}, one of shape {list(now)}"
        try:
            kept = copy.deepcopy(states)
            (out, _) = simulate(compressor, _pair(now, 2), states, 2, shape=now)
        except CompressorError:
            continue
        except Exception as error:
            error.add_note(f"That is {what}.")
            raise
        assert np.isfinite(out).all(), f"{what} comes out as NaN or Inf"
        fresh: list[State] = [{}, {}]
        new = simulate(compressor, _pair(now, 2), fresh, 2, shape=now)[0]
        # A number, or a table of one length for all tensors, is no other tensor's.
        fitting = [_fitting(*pair) for pair in zip(kept, fresh, strict=True)]
        with_those = simulate(compressor, _pair(now, 2), fitting, 2, shape=now)[0]
        assert same(out, new) or same(out, with_those), (
            f"{what} gets another result than one of which nothing is remembered: memory that is "
            "not as long as the tensor was taken for its own"
        )


def _fitting(state: State, like: State) -> State:
    """Return what of ``state`` is as long as what ``like`` has under the same name."""
    found: State = {}
    for name, value in state.items():
        if name not in like:
            continue
        if isinstance(value, dict) and isinstance(like[name], dict):
            found[name] = _fitting(value, like[name])
        elif np.shape(value) == np.shape(like[name]):
            found[name] = copy.deepcopy(value)
    return found


@needs(
    "gradient_units", "memory_fits_its_tensor", "memory_does_not_grow", "one_overflow_is_survived"
)
def check_memory_moves_to_other_ranks(compressor: Compressor) -> None:
    """Where ranks join or leave, what they remembered is made into what the others go on with: a
    list of another length, or one that was changed meanwhile, is nobody's memory.

    Return new arrays from consolidate(states), as long as those it was given, or leave the mean to
    the base class; a state may be empty. regrouped(state) returns what of one state is still right
    beside ranks that remember nothing: not what all have in common. What gradient_units does not
    name is dropped: what stays has to make sense without it. Have neither ctx.rank nor
    ctx.size in a name in ctx.state, both of which change.
    """
    ctx = Context(shape=(40, 50), numel=2000, size=2)
    compressor.warm_up(ctx)  # before the first step, which has left nothing yet
    if not compressor.traits().stateful:
        return
    states: list[State] = [{}, {}, {}]
    for step in range(2):
        gradients = [gaussian(2000, 3 * step + rank) for rank in range(3)]
        simulate(compressor, gradients, states, step, shape=(40, 50))
    made: list[tuple[str, State, list[State]]] = []
    for count in (1, 2, 3):
        given = copy.deepcopy(states[:count])
        what = f"consolidate() of {count} state{'s' * (count > 1)}"
        made.append((what, compressor.consolidate(given), given))
    given = copy.deepcopy(states[:1])
    made.append(("regrouped()", compressor.regrouped(given[0]), given))
    given = [*copy.deepcopy(states[:2]), {}]
    made.append(
        ("consolidate() of a rank's that is empty", compressor.consolidate(given), given[:2])
    )
    assert not described(compressor.regrouped({})), "regrouped({}) is something made of nothing"
    lengths = described(states[0])
    for what, found, after in made:
        unchanged = all(_alike(*pair) for pair in zip(after, states, strict=False))
        assert unchanged, f"{what} changes what it is given, which others go on with"
        for state in after if what.startswith("consolidate") else ():
            assert not _shares(found, state), (
                f"{what} returns an array of a state that it was given, which two ranks would "
                "then write to; return a copy"
            )
        for name, length in described(found).items():
            assert lengths.get(name, length) == length, (
                f"{what} returns {name!r} as {length}, ranks remember {lengths[name]}"
            )
        for name in compressor.traits().gradient_units:
            array = found.get(name)
            assert not isinstance(array, np.ndarray) or array.flags.writeable, (
                f"{what} returns a {name!r} that is not writeable: where the loss scale changes, "
                "what gradient_units names is multiplied in place; leave its flags as they are"
            )
        gradients = [gaussian(2000, 9), gaussian(2000, 10)]
        try:
            held = [copy.deepcopy(found), copy.deepcopy(found)]
            out = simulate(compressor, gradients, held, 2, shape=(40, 50))[0]
        except Exception as error:
            error.add_note(f"That is with what {what} returned.")
            raise
        assert np.isfinite(out).all(), f"with what {what} returned the result is NaN or Inf"
    _check_nobody_is_left_out(compressor, states)
    _check_comes_out_elsewhere(compressor, states[0])
    _check_part_makes_sense(compressor)
    apart = [copy.deepcopy(compressor.regrouped(copy.deepcopy(states[0]))), State()]
    one, other = simulate(compressor, gradients, apart, 2, shape=(40, 50))
    assert same(one, other), (
        "a rank that goes on with what regrouped() returned and one that begins anew hold "
        "different results: it returns what all ranks have to have in common; return {}"
    )


def _check_nobody_is_left_out(compressor: Compressor, states: list[State]) -> None:
    """Raise AssertionError where a consolidated memory is no mean of what ranks remember."""
    found = compressor.consolidate(copy.deepcopy(states))
    units = [n for n in compressor.traits().gradient_units if np.shape(found.get(n, 0.0)) != ()]
    for name in compressor.traits().gradient_units:
        kept = [state[name] for state in states if np.shape(state.get(name, 0.0)) != ()]
        alike = all(_alike(kept[0], other) for other in kept)
        assert name in found or len(kept) < len(states) or alike, (
            f"consolidate() of {len(states)} states returns no {name!r}, of which each rank has "
            "one of its own: what they remember is lost"
        )
    for name in units:
        if not all(np.shape(state.get(name, ())) == np.shape(found[name]) for state in states):
            continue
        lengths = [float(np.linalg.norm(s[n])) for s in states for n in units if n in s]
        length = float(np.linalg.norm(found[name]))
        assert length <= 1.1 * max(lengths), (
            f"consolidate() of {len(states)} states returns a {name!r} that is {length:.3g} long, "
            f"of the ranks' none is longer than {max(lengths):.3g}: every rank goes on with what "
            "it returns, so that it is the mean, not the sum"
        )
        for rank, state in enumerate(states):
            if all(_alike(state[name], other[name]) for other in states):
                continue
            changed = copy.deepcopy(states)
            changed[rank][name] = changed[rank][name] * np.float32(-1)
            assert not _alike(compressor.consolidate(changed), found), (
                f"consolidate() of {len(states)} states returns the same whatever {name!r} of rank "
                f"{rank} is: what that rank remembers is lost"
            )


def _check_comes_out_elsewhere(compressor: Compressor, state: State) -> None:
    """Raise AssertionError where what rank 0 of 3 remembers is never sent of rank 1 of 2."""
    came = []
    for rank, size in ((0, 3), (1, 2)):
        states: list[State] = [{} for _ in range(size)]
        states[rank] = copy.deepcopy(compressor.regrouped(copy.deepcopy(state)))
        zeros = [np.zeros(2000, np.float32)] * size
        steps = range(2, 2 + _MOVED)
        came.append(
            any(simulate(compressor, zeros, states, s, shape=(40, 50))[0].any() for s in steps)
        )
    assert came[1] or not came[0], (
        f"in {_MOVED} steps with gradients of zeros what rank 0 of 3 remembers is sent, but "
        "nothing of it where that rank goes on as rank 1 of 2: what it is found by in ctx.state is "
        "the old ctx.rank or ctx.size"
    )


def _check_part_makes_sense(compressor: Compressor) -> None:
    """Raise AssertionError where what is left of a memory gives more than all of it, and than none.

    An average that goes on without the count of its steps, say, which it is to be divided by.
    """
    x = gaussian(int(np.prod(_AGED_SHAPE)), 1)
    states: list[State] = [{}, {}]
    for step in range(2):
        simulate(compressor, [x, x], states, step, shape=_AGED_SHAPE)
    if not _dropped(compressor.consolidate(copy.deepcopy(states)), states[0]) and not _dropped(
        compressor.regrouped(copy.deepcopy(states[0])), states[0]
    ):
        return
    for step in range(2, _AGED):
        simulate(compressor, [x, x], states, step, shape=_AGED_SHAPE)
    together = compressor.consolidate(copy.deepcopy(states))
    apart = [compressor.regrouped(state) for state in copy.deepcopy(states)]
    most = max(_longest(compressor, x, held) for held in (states, [State(), State()]))
    for what, held in (
        ("consolidate()", [together, copy.deepcopy(together)]),
        ("regrouped()", apart),
    ):
        dropped = _dropped(held[0], states[0])
        if not dropped:
            continue
        times = _longest(compressor, x, held) / (most or 1.0)
        assert times <= _LOUDER, (
            f"after {_AGED} equal gradients what {what} returned makes the result {times:.3g} "
            f"times as long as the whole memory does, or none: {', '.join(dropped)} is dropped, "
            "and the rest stays. Name it in gradient_units if it is in those units; or return it "
            f"from {what} too; or drop all of it together, and return {{}}"
        )


def _dropped(found: State, state: State) -> list[str]:
    """Return what of ``state`` is not in ``found``, if something of it is."""
    names, left = described(state), described(found)
    return [f"ctx.state[{name!r}]" for name in names if name not in left] if left else []


def _longest(compressor: Compressor, x: Array, states: list[State]) -> float:
    """Return the length of the longest result of some more steps."""
    held, steps = copy.deepcopy(states), range(_AGED, _AGED + _GOES_ON)
    outs = (simulate(compressor, [x, x], held, step, shape=_AGED_SHAPE)[0] for step in steps)
    return max(float(np.linalg.norm(out.astype(np.float64))) for out in outs)


def _shares(a: Any, b: Any) -> bool:
    """Whether some array of a state lies in memory of another one's."""
    if isinstance(a, dict):
        return any(_shares(value, b) for value in a.values())
    if isinstance(b, dict):
        return any(_shares(a, value) for value in b.values())
    arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return arrays and bool(np.shares_memory(a, b))


def _alike(a: Any, b: Any) -> bool:
    """Whether two states hold the same."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    return bool(np.array_equal(a, b))


@needs("own_feedback_adds_up")
def check_memory_stays_bounded(compressor: Compressor) -> None:
    """What is remembered of gradients must not outgrow them: it would be all that is sent, until it
    is Inf.

    Take out of what is remembered no more than is in it, and each part once: where entries share a
    cell, a scale or a place, the estimates of all of them must not be subtracted. Let averages
    forget: kept += (x - kept) * share.
    """
    if not compressor.traits().stateful:
        return
    states: list[State] = [{}, {}]
    for step in range(_LONG):
        gradients = _pair((40, 50), step)
        simulate(compressor, gradients, states, step, shape=(40, 50))
    for name in compressor.traits().gradient_units:
        length = float(np.linalg.norm(np.asarray(states[0].get(name, 0.0), np.float64)))
        times = length / float(np.linalg.norm(gradients[0]))
        assert times <= _GROWN, (
            f"after {_LONG} steps ctx.state[{name!r}] is {times:.3g} times as long as a gradient"
        )


@needs("feedback_stays_bounded", "local_is_written", "both_signs_arrive")
def check_every_element_has_its_turn(compressor: Compressor) -> None:
    """With error feedback everything is sent at some time: an element that never is, however large
    its residual grows, is a parameter that is not trained.

    Select by magnitude, xp.abs(x), and where at random, anew in every step: ctx.rng(), called once,
    for two calls give the same numbers. A threshold
    that follows the values must leave some of equal values to send. Among equals that stay equal,
    such as entries of one cell of a sketch, do not take the first ones in every step. What a fixed
    projection leaves out, such as how a block differs from its mean, is never sent, and steps of a
    norm of all values lose more than there was where these are many: say so by divergence().
    """
    while isinstance(compressor, ErrorFeedback):  # whose decay may let what is small wait
        compressor = compressor.wrapped_compressor
    traits = compressor.traits()
    wrapped = compressor if traits.stateful else with_feedback(compressor)
    if wrapped is compressor and not traits.stateful:
        return  # what would diverge
    x = near_one(64)
    states: list[State] = [{}]
    waiting, anything = np.arange(x.size) < x.size - _TAIL, False
    for step in range(_TURNS):
        if traits.stateful:  # what feeds less than everything back may always prefer the same
            x = gaussian(x.size, step)
        (out,) = simulate(wrapped, [x], states, step)
        waiting &= ~(out * x > 0)
        anything = anything or bool(out.any())
        if not waiting.any():
            if traits.scales:
                check_sent_at_all(wrapped, 64)
            if not traits.stateful:
                _check_places(wrapped)
            return
    never = int(waiting.sum())
    if not traits.scales and never == x.size - _TAIL:
        return  # what goes by absolute sizes may be meant for larger ones
    if traits.stateful and never < x.size // 2:
        return  # it may be slow, but it chooses anew
    likely = (
        "send at least one entry, max(1, k), and take steps from the largest magnitude: half of "
    )
    likely += "one that comes of a norm of all may be more than each of them"
    assert anything, (
        f"of {x.size} elements the result is 0 in every one of {_TURNS} steps of error feedback; "
        f"{likely}"
    )
    signs = "both" if (x[waiting] > 0).any() and (x[waiting] < 0).any() else "only one"
    raise AssertionError(
        f"of {x.size} elements of about 1 and -1, {never} were never sent in {_TURNS} steps of "
        f"error feedback; {signs} of the signs are among them"
    )


def near_one(n: int) -> Array:
    """Return values of about 1 and -1, no two of them equal."""
    signs = np.where(gaussian(n, 1) < 0, -1, 1)
    return (signs * (1 + np.random.default_rng(2).random(n) / 8)).astype(np.float32)


def check_sent_at_all(compressor: Compressor, n: int) -> None:
    """Raise AssertionError where nothing is ever sent of ``n`` equal elements."""
    x, states = np.full(n, 3, np.float32), [State()]
    for step in range(_TURNS):
        if (simulate(compressor, [x], states, step)[0] > 0).any():
            return
    what = "a tensor of one element" if n == 1 else f"{n} elements that are all equal"
    raise AssertionError(
        f"of {what} nothing was sent in {_TURNS} steps of error feedback: send at least one "
        "entry, max(1, k), and what is left to send where the range of values is 0"
    )


def _check_places(wrapped: Compressor) -> None:
    """Raise AssertionError where some of many elements wait much longer than others."""
    x, states = near_one(_PLACES), [State()]
    waiting, half = np.ones(_PLACES, bool), _FEW_STEPS
    for step in range(_PATIENCE * (_FEW_STEPS + 1)):
        (out,) = simulate(wrapped, [x], states, step, shape=(_PLACES // 64, 64))
        waiting &= ~(out * x > 0)
        left = int(waiting.sum())
        half = min(half, step) if 2 * left < _PLACES else half
        if not left or (half == _FEW_STEPS and step > half):
            return
        assert step <= max(_PATIENCE * (half + 1), _AT_LEAST), (
            f"of {_PLACES} elements of about 1 and -1, half were sent in {half + 1} steps of error "
            f"feedback, and {left} not in {step}, the first of them element "
            f"{np.flatnonzero(waiting)[0]}: it is never sent"
        )


@needs(
    "every_element_has_its_turn",
    "non_finite_stays_visible",
    "scales_with_its_values",
    "padding_does_not_leak",
)
def check_large_values_are_sent(compressor: Compressor) -> None:
    """A value far above the others must come through with error feedback, or its parameter is
    hardly trained while its residual grows for ever.

    Take a scale from all values that it is for: of a sample, or of a quantile, the largest are cut
    off for good. Or say by divergence() that nothing can be fed back.
    """
    while isinstance(compressor, ErrorFeedback):  # whose decay may forget what waits
        compressor = compressor.wrapped_compressor
    if compressor.traits().stateful or not compressor.traits().scales:
        return
    wrapped = with_feedback(compressor)
    if wrapped is compressor:
        return  # what would diverge
    for place in (77, 110):  # which few samples take
        x, states = gaussian(200, 1, _SMALL), [State()]
        x[place], sent = _OUTLIER, 0.0
        for step in range(1, _TURNS + 1):
            sent += float(simulate(wrapped, [x], states, step)[0][place])
            share = sent / (_OUTLIER * step)
            if step >= _FEW_STEPS and share >= 0.5:
                break
        assert share >= 0.5, (
            f"of element {place} of {x.size}, which is {_OUTLIER:.0f} where others are about "
            f"{_SMALL}, {share:.3g} of what was given was sent in {_TURNS} steps of error "
            "feedback: it is cut off"
        )


@needs(*PURE, "another_process_agrees", "every_rank_counts", "scales_with_its_values")
def check_late_steps_and_large_seeds(compressor: Compressor) -> None:
    """Steps, seeds and ranks grow large: what does not fit an integer ends a run after weeks, or
    with somebody else's seed, or on the 257th rank.

    Draw from ctx.rng() or ctx.uniform(n) in place of generators of your own, and keep ctx.step and
    ctx.seed out of 16- and 32-bit integers, ctx.rank out of 8-bit ones. What begins after a number
    of steps, such as a phase behind a warm-up, sends the gradient as well, of any length, and NaN.
    Where it loses more on purpose, let at(step) return what to use from then on.
    """
    x = gaussian(2000, 1)
    early = [_elsewhere(compressor, x, {"step": step}) for step in range(_EARLY)]
    usual, always = max(_off(out, x) for out in early), all(out.any() for out in early)
    spoiled = x.copy()
    spoiled[1000] = np.nan
    with np.errstate(all="ignore"):
        visible = not np.isfinite(_elsewhere(compressor, spoiled, {})).all()
    for fields in ({"step": 70_000}, {"step": 5_000_000_000}, {"seed": 1 << 62}, {"rank": 1000}):
        late: dict[str, Any] = fields
        try:
            out = _elsewhere(compressor, x, late)
            few = [_elsewhere(compressor, gaussian(n, n), late) for n in (0, 1)]
            with np.errstate(all="ignore"):
                seen = not np.isfinite(_elsewhere(compressor, spoiled, late)).all()
        except Exception as error:
            error.add_note(f"That is with {late}.")
            raise
        assert np.isfinite(np.concatenate([out, *few])).all(), (
            f"with {late} the result is NaN or Inf"
        )
        assert seen or not visible, f"with {late} NaN vanished, and in step 0 it does not"
        assert out.any() or not always, f"with {late} nothing is sent, and in other steps there is"
        if compressor.at(late.get("step", 0)) != compressor.at(0):
            continue  # a schedule loses less, or more
        assert _off(out, x) <= 1.5 * usual + 1e-6, (
            f"with {late} the result is off by {_off(out, x):.3g} of its length, by at most "
            f"{usual:.3g} in {_EARLY} other steps"
        )
        known = compressor.traits().scales and not in_halves(compressor)  # which have a range
        for power in _POWERS if known else ():
            by = np.float32(2.0**power)
            off = _off(_elsewhere(compressor, by * x, late), by * x)
            assert off <= 1.5 * usual + 1e-2, (
                f"with {late} the result of 2^{power} times the values is off by {off:.3g} of its "
                f"length, and otherwise by at most {usual:.3g}"
            )
    named = {step for n in lengths_named(compressor) for step in (n - 1, n, 2 * n - 1)}
    for step in (*range(_EACH), *sorted(named)):  # some things are done every so many steps
        if compressor.at(step) != compressor.at(0):
            continue
        out = early[step] if step < _EARLY else _elsewhere(compressor, x, {"step": step})
        likeness, several = _likeness(out, x), max(int(np.count_nonzero(out)), 1)
        assert likeness >= -min(4 / np.sqrt(several), 0.9), (
            f"in step {step} what is decoded points away from what went in (their cosine is "
            f"{likeness:.3f})"
        )
        assert out.any() or not always, (
            f"in step {step} nothing is sent, and in the first {_EARLY} steps there is"
        )
        assert _off(out, x) <= 1.5 * usual + 1e-6, (
            f"in step {step} the result is off by {_off(out, x):.3g} of its length, by at most "
            f"{usual:.3g} in the first {_EARLY} steps"
        )


def _likeness(out: Array, x: Array) -> float:
    """Return the cosine of two vectors; 0 where one is."""
    lengths = float(np.linalg.norm(out) * np.linalg.norm(x))
    return float(out.astype(np.float64) @ x) / lengths if lengths else 0.0


def _elsewhere(compressor: Compressor, x: Array, fields: dict[str, Any]) -> Array:
    """Return what another rank has of ``x``, which was compressed with ``fields``."""
    if not by_payload(compressor):
        return simulate(compressor, [x], **{k: v for k, v in fields.items() if k != "rank"})[0]
    now = compressor.at(fields.get("step", 0))
    sent = encode(now, x, context(x, **{"size": 1001, **fields}))
    there = context(x, **{"size": 1001, **fields, "rank": 1})
    out = decode(now, sent, x.size, there)
    now.finish(out, there)
    return out


def _off(out: Array, x: Array) -> float:
    return float(np.linalg.norm(out.astype(np.float64) - x) / np.linalg.norm(x))


def _pair(shape: tuple[int, ...], step: int) -> list[Array]:
    return [gaussian(int(np.prod(shape)), 2 * step + rank) for rank in (0, 1)]


def _bytes(state: Any) -> int:
    """Return the bytes of all arrays, names, numbers and strings."""
    if isinstance(state, dict):
        return sum(len(name) + _bytes(value) for name, value in state.items())
    return len(state) if isinstance(state, str) else int(np.asarray(state).nbytes)


CHECKS = (
    check_memory_does_not_grow,
    check_memory_fits_its_tensor,
    check_memory_moves_to_other_ranks,
    check_memory_stays_bounded,
    check_every_element_has_its_turn,
    check_large_values_are_sent,
    check_late_steps_and_large_seeds,
)
