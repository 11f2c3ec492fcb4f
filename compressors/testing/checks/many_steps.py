"""Checks of what is remembered over many steps, and of whose it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.testing.checks.one_call import PURE
from ringlet.compressors.testing.checks.training import with_feedback
from ringlet.compressors.testing.tools.inputs import gaussian
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
            (out, _) = simulate(compressor, _pair(now, 2), states, 2, shape=now)
        except CompressorError:
            continue
        except Exception as error:
            error.add_note(f"That is {what}.")
            raise
        assert np.isfinite(out).all(), f"{what} comes out as NaN or Inf"


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
    such as entries of one cell of a sketch, do not take the first ones in every step.
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
    check_memory_stays_bounded,
    check_every_element_has_its_turn,
    check_late_steps_and_large_seeds,
)
