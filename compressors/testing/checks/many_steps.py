"""Checks of what is remembered over many steps, and of whose it is."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.testing.checks.one_call import PURE, same
from ringlet.compressors.testing.checks.training import with_feedback
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed, spiky
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import simulate

_STEPS = range(4, 9)
# By shape: what was remembered of, and the tensor that finds it.
_OTHERS = (((40, 50), (30, 40)), ((30, 40), (40, 50)), ((2000,), (1200,)), ((1200,), (2000,)))
_LONG, _GROWN = 200, 1000.0
_TAIL = 16  # elements at the end, for which another check looks
_TURNS = 1000  # steps in which each of 64 elements is sent, if one is in every step


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
    before = described(states[0])
    zeros, few = np.zeros(2000, np.float32), spiky(2000, 1)
    for step, x in enumerate((few, zeros, heavy_tailed(2000, 2)), _STEPS.stop):
        simulate(compressor, [x, x], states, step, shape=(40, 50))
        after = described(states[0])
        for name in sorted(before.keys() | after.keys()):
            was, became = before.get(name, "nothing"), after.get(name, "nothing")
            assert was == became, (
                f"ctx.state[{name!r}] was {was}, and is {became} after a step with other values: "
                "what is kept must not go by values, or no checkpoint fits"
            )


def described(state: Any, name: str = "") -> dict[str, str]:
    """Return the dtype and length of every array in ``state`` by its name; numbers are alike."""
    if isinstance(state, dict):
        parts = [described(value, f"{name}.{key}" if name else key) for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    if np.shape(state) == ():
        return {name: "a string" if isinstance(state, str) else "a number"}
    return {name: f"{state.dtype}{list(np.shape(state))}"}


@needs(*PURE, "resumes_from_a_checkpoint", "pieces_remember_their_own")
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


@needs("gradient_units", "memory_fits_its_tensor", "memory_does_not_grow")
def check_memory_moves_to_other_ranks(compressor: Compressor) -> None:
    """Where ranks join or leave, what they remembered is made into what the others go on with: a
    list of another length, or one that was changed meanwhile, is nobody's memory.

    Return new arrays from consolidate(states), as long as those it was given, or leave the mean to
    the base class. regrouped(state) returns what of one state is still right.
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
    lengths = described(states[0])
    for what, found, after in made:
        unchanged = all(_alike(*pair) for pair in zip(after, states, strict=False))
        assert unchanged, f"{what} changes what it is given, which others go on with"
        for name, length in described(found).items():
            assert lengths.get(name, length) == length, (
                f"{what} returns {name!r} as {length}, ranks remember {lengths[name]}"
            )
        gradients = [gaussian(2000, 9), gaussian(2000, 10)]
        try:
            held = [copy.deepcopy(found), copy.deepcopy(found)]
            out = simulate(compressor, gradients, held, 2, shape=(40, 50))[0]
        except Exception as error:
            error.add_note(f"That is with what {what} returned.")
            raise
        assert np.isfinite(out).all(), f"with what {what} returned the result is NaN or Inf"


def _alike(a: Any, b: Any) -> bool:
    """Whether two states hold the same."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    return bool(np.array_equal(a, b))


@needs("gradient_units", "memory_fits_its_tensor", "one_overflow_is_survived")
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


@needs("feedback_stays_bounded", "local_is_written")
def check_every_element_has_its_turn(compressor: Compressor) -> None:
    """With error feedback everything is sent at some time: an element that never is, however large
    its residual grows, is a parameter that is not trained.

    Select by magnitude, xp.abs(x), and where at random, anew in every step: ctx.rng(), called once,
    for two calls give the same numbers. A threshold
    that follows the values must leave some of equal values to send. Among equals that stay equal,
    such as entries of one cell of a sketch, do not take the first ones in every step. What a fixed
    projection leaves out, such as how a block differs from its mean, is never sent: say so by
    divergence().
    """
    while isinstance(compressor, ErrorFeedback):  # whose decay may let what is small wait
        compressor = compressor.wrapped_compressor
    traits = compressor.traits()
    wrapped = compressor if traits.stateful else with_feedback(compressor)
    if wrapped is compressor and not traits.stateful:
        return  # what would diverge
    x = np.where(gaussian(64, 1) < 0, -1, 1) * (1 + np.random.default_rng(2).random(64) / 8)
    x = x.astype(np.float32)
    states: list[State] = [{}]
    waiting, anything = np.arange(x.size) < x.size - _TAIL, False
    for step in range(_TURNS):
        if traits.stateful:  # what feeds less than everything back may always prefer the same
            x = gaussian(x.size, step)
        (out,) = simulate(wrapped, [x], states, step)
        waiting &= ~(out * x > 0)
        anything = anything or bool(out.any())
        if not waiting.any():
            return
    never = int(waiting.sum())
    if not traits.scales and never == x.size - _TAIL:
        return  # what goes by absolute sizes may be meant for larger ones
    if traits.stateful and never < x.size // 2:
        return  # it may be slow, but it chooses anew
    assert anything, (
        f"the result is 0 in every one of {_TURNS} steps of error feedback; if something that was "
        "received in a round decides about it, copy that before the next yield"
    )
    signs = "both" if (x[waiting] > 0).any() and (x[waiting] < 0).any() else "only one"
    raise AssertionError(
        f"of {x.size} elements of about 1 and -1, {never} were never sent in {_TURNS} steps of "
        f"error feedback; {signs} of the signs are among them"
    )


@needs(*PURE, "another_process_agrees")
def check_late_steps_and_large_seeds(compressor: Compressor) -> None:
    """Step numbers and seeds grow large: what does not fit an integer ends a run after weeks, or
    with somebody else's seed.

    Draw from ctx.rng() or ctx.uniform(n) in place of generators of your own, and keep ctx.step and
    ctx.seed out of 16- and 32-bit integers.
    """
    x = gaussian(2000, 1)
    for fields in ({"step": 70_000}, {"step": 5_000_000_000}, {"seed": 1 << 62}):
        late: dict[str, Any] = fields
        try:
            (out,) = simulate(compressor, [x], **late)
        except Exception as error:
            error.add_note(f"That is with {late}.")
            raise
        assert np.isfinite(out).all(), f"with {late} the result is NaN or Inf"


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
    check_late_steps_and_large_seeds,
)
