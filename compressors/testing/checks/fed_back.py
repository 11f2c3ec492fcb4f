"""Checks of the long run: what comes out is as much as went in, less what is kept meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.core.options import options_of
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.inputs import LARGE, gaussian
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import simulate

_N, _SHAPE = 1500, (30, 50)
_SHAPES = (_SHAPE, (_N,))  # matrices may have a way of their own
_STEPS, _EACH = 5, 130
# Some treat layers in different ways: matrices, and what is called a bias or a norm.
_TENSORS: tuple[dict[str, Any], ...] = (
    {"shape": _SHAPE},
    {"shape": (_N,), "name": "layers.3.bias"},
    {"shape": (10, 6, 5, 5), "name": "layers.3.norm.weight"},
    {"shape": (30, 50, 1), "name": "embedding.weight"},
)
# What some look at by its exponent, or compare with levels that lie just there.
_VALUES: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("1 and -1", np.sign),
    ("powers of two", lambda x: np.ldexp(np.sign(x), np.frexp(x)[1])),
    ("whole numbers", lambda x: np.rint(x * np.float32(2))),
    ("one value in ten, and zeros", lambda x: x * (np.arange(x.size) % 10 == 7)),
)
_DRAWS = range(10_000, 10_016)  # steps at which most schedules have come to their end
_MUCH = 1.5  # times as long as what went in
_ALIKE, _LITTLE = 0.95, 0.6  # the cosine of what differs by its length alone, and how long it is
_ITSELF, _OFF_BY = 0.99, 0.06  # the same of what is hardly changed, and how much longer it may be
_LIKE = 0.5  # the cosine of what has lost much, and still shows how long it should be
_EXACT = 1e-3  # of the largest value of a memory: how far off the sum may be that explains it
_ABOUT, _NEARLY = 0.01, 0.005  # how far off it is where a memory is rounded, and the shares are
_SHRINKS = 1e-3  # of a memory: how much of it rounding may take away, or add, in a step
_SENT = 0.5  # times what is sent: so much of it is taken out of what is kept, at least
_TAKEN = 0.05  # times what is sent, taken out: less is something else than a share of it
_OFF = 0.05  # how far off that may be of values of about 1
# What is added to float32 sums between 2^21 and 2^22 as 0.75, so that some four million of it come
# to 0.94 of their sum; what has to come out at least, and what is x but for its length.
_ROUNDED_OFF, _SMALL, _AS_MUCH, _SAME = 0.8725, 1 << 16, 0.98, 0.999
_NOTHING = 0.01  # of its length: what a part of that sum adds that is not in it
_NAMES = ("residual", "v")  # by which residual_norm() finds what is held back
_WAITING, _SOME = 6, 50  # steps; entries that are sent, and that wait, at least
_NO_SHARE, _LIKEWISE = 0.02, 0.999  # a share that is none; the cosine of shares that are the same


@needs(
    "gradient_units",
    "memory_fits_its_tensor",
    "one_overflow_is_survived",
    "shares_make_the_mean",
)
def check_own_feedback_adds_up(compressor: Compressor) -> None:
    """Error feedback works because nothing is lost: what was sent and what is kept are what went
    in. With a wrong sign, or fed back twice, it makes gradients worse than without.

    Compress p = x + kept, and keep p less what that decodes to: p - decoded, and neither x -
    decoded nor decoded - p. A decay is above 0 and at most 1. Or remember nothing, and leave it to
    '| ef'.
    """
    if compressor.traits().stateful:
        for shape in _SHAPES:
            try:
                _check_own_feedback(compressor, shape)
            except AssertionError as error:
                error.add_note(f"That is of a tensor of shape {shape}.")
                raise


def _check_own_feedback(compressor: Compressor, shape: tuple[int, ...]) -> None:
    state: State = {}
    seen: list[tuple[Array, Array, State]] = []  # what went in, what came out, what was kept before
    for step in range(_STEPS):
        x, kept = gaussian(_N, step), copy.deepcopy(state)
        seen.append((x, simulate(compressor, [x], [state], step, shape=shape)[0], kept))
    units = [name for name in compressor.traits().gradient_units if name in state]
    something = any(np.any(kept.get(name, 0)) for *_, kept in seen[1:] for name in units)
    lost = all(_length(out - x) > _NOTHING * _length(x) for x, out, _ in seen)
    assert something or not units or not lost, (
        f"what ctx.state[{units[0]!r}] holds is 0 after every step, though something is lost in "
        "all of them: clear what was sent, and nothing else"
    )
    full = [n for n in units if np.shape(state[n]) == (_N,)]
    _check_nothing_is_dropped(full, seen, state)
    _check_elsewhere(compressor, full, seen, shape)
    for name in units:
        memories = [kept.get(name, 0.0) for _, _, kept in seen[1:]]
        if all(np.shape(kept) == (_N,) for kept in (*memories, state.get(name, 0.0))):
            _check_adds_up(compressor, name, seen, state, shape)


def _check_nothing_is_dropped(
    units: list[str], seen: list[tuple[Array, Array, State]], state: State
) -> None:
    """Raise AssertionError where a memory has all that was not sent of most elements alone.

    What has it of few is something else, such as an average, or one with a decay.
    """
    unsent = np.sum([x - out.astype(np.float64) for x, out, _ in seen], axis=0)
    for name in units:
        off = np.abs(unsent - state[name])
        dropped = int((off > _NOTHING).sum())
        assert (off <= _EXACT).mean() <= 0.5 or not dropped, (
            f"after {_STEPS} steps ctx.state[{name!r}] holds what was not sent of most elements, "
            f"and not of {dropped}: something is thrown away, such as what is small, or more than "
            "some limit, or is added twice"
        )


def _check_elsewhere(
    compressor: Compressor,
    units: list[str],
    seen: list[tuple[Array, Array, State]],
    shape: tuple[int, ...],
) -> None:
    """Raise AssertionError where a memory of what was not sent is another sum in other runs.

    What it is a sum of shows where all values differ and there is one rank: of what went in, of
    what came out, and of what was kept. It is the same sum of equal values, and on the mean over
    several ranks.
    """
    seen = [step for step in seen if _all_kept(step[2], units)]
    if len(seen) < _STEPS - 1 or not units:
        return
    signs = np.where(gaussian(_N, 9) < 0, np.float32(-1), np.float32(1))
    equals = [[signs * np.float32(1 + step % 2)] for step in range(_STEPS)]
    others = [[gaussian(_N, 3 * step + rank) for rank in range(3)] for step in range(_STEPS)]
    runs = [_run(compressor, gradients, shape) for gradients in (equals, others)]
    if not all(_all_kept(step[2], units) for run in runs for step in run[1:]):
        return
    for name in units:
        shares, off = _explained(_parts(seen[:-1], units), _kept(seen[1:], name))
        if off > _EXACT or shares[1] > -_SENT:
            continue  # something else, of which nothing is said, or what is sent stays in it
        equal, several = (
            int((np.abs(_parts(run[1:-1], units) @ shares - _kept(run[2:], name)) > _OFF).sum())
            for run in runs
        )
        what = f"taken out of ctx.state[{name!r}] without being sent"
        assert not equal, (
            f"where values are equal, {equal} entries are {what}: clear those that were sent, by "
            "their indices, and not all that are as large as the smallest of them"
        )
        assert not several, (
            f"among three ranks {several} entries are {what}, or left in it though they were, as "
            "they are not with one rank: take out what this rank sent, and neither what others "
            "sent nor a share that goes by ctx.size"
        )


def _run(
    compressor: Compressor, steps: list[list[Array]], shape: tuple[int, ...]
) -> list[tuple[Array, Array, State]]:
    """Return means over ranks, by step: what went in, what came out, what was kept before."""
    states: list[State] = [{} for _ in steps[0]]
    seen: list[tuple[Array, Array, State]] = []
    for step in range(len(steps) + 1):
        kept = {
            name: np.mean([np.asarray(state[name], np.float64) for state in states], axis=0)
            for name in compressor.traits().gradient_units
            if name in states[0] and len({np.shape(state.get(name, ())) for state in states}) == 1
        }
        gradients = steps[step % len(steps)]
        out = simulate(compressor, gradients, states, step, shape=shape)[0]
        seen.append((np.mean(gradients, axis=0), out, kept))
    return seen


def _all_kept(state: State, units: list[str]) -> bool:
    return all(np.shape(state.get(name, ())) == (_N,) for name in units)


def _kept(seen: list[tuple[Array, Array, State]], name: str) -> Array:
    return np.concatenate([kept[name] for *_, kept in seen]).astype(float)


def _parts(seen: list[tuple[Array, Array, State]], units: list[str]) -> Array:
    """Return what went in, what came out and what was kept, as columns."""
    columns = [[x for x, _, _ in seen], [out for _, out, _ in seen]]
    columns += [[kept[name] for *_, kept in seen] for name in units]
    return np.stack([np.concatenate(column).astype(float) for column in columns], axis=1)


def _explained(parts: Array, new: Array) -> tuple[Array, float]:
    """Return by what shares of ``parts`` ``new`` is made up, and how far off that is."""
    shares, _, rank, _ = np.linalg.lstsq(parts, new, rcond=1e-4)
    off = float(np.abs(parts @ shares - new).max()) / (float(np.abs(new).max()) or 1.0)
    return shares, off if rank == parts.shape[1] else np.inf


def _check_adds_up(
    compressor: Compressor,
    name: str,
    seen: list[tuple[Array, Array, State]],
    state: State,
    shape: tuple[int, ...],
) -> None:
    """Raise AssertionError where ``name`` is what was not sent, and becomes too much or too little.

    What it is shows in how it follows from the step before: as a sum of what went in, of what was
    lost of that, and of what was kept. Where it follows otherwise, nothing is said of it.
    """
    x, out = (np.concatenate([step[part] for step in seen[1:]]).astype(float) for part in (0, 1))
    kept = np.concatenate([step[2][name] for step in seen[1:]]).astype(float)
    new = np.concatenate([*(step[2][name] for step in seen[2:]), state[name]]).astype(float)
    parts = np.stack([x, x - out, kept], axis=1)
    lengths = np.linalg.norm(parts, axis=0)
    if not lengths.all() or not new.any():
        return
    shares, _, rank, _ = np.linalg.lstsq(parts / lengths, new, rcond=1e-4)
    off = float(np.abs(parts / lengths @ shares - new).max())
    if rank < 3:
        return
    if off > _EXACT * float(np.abs(new).max()):
        if off <= _ABOUT * float(np.abs(new).max()):
            _check_rounds_both_ways(name, parts, shares / lengths, new)
        return
    nothing = np.abs(shares) <= _NOTHING * float(np.linalg.norm(new))
    of_x, of_lost, of_kept = map(float, shares / lengths)
    memory = f"ctx.state[{name!r}]"
    mixed = not nothing[0] and not nothing[1] and abs(of_x + of_lost - of_kept) <= _NOTHING
    assert not mixed or of_lost < _TAKEN, (
        f"{memory} becomes x and what was kept, less {of_lost:.3g} times what was sent: take out "
        "all of that, and no more"
    )
    if nothing[1] and not nothing[0]:
        assert of_kept < 0.9999, (
            f"all gradients are added up in {memory}, of which nothing is ever taken away: what is "
            "sent is not either"
        )
    if not nothing[0] or nothing[1]:
        return  # an average, say
    assert not nothing[2], (
        f"{memory} becomes x less what was sent: what was kept before, and was not sent either, is "
        "lost"
    )
    assert of_kept > 0, f"{memory} is added to x with the wrong sign: what was lost is lost twice"
    assert of_kept <= 1 + _NOTHING, (
        f"{of_kept:.3g} times what was kept before is in {memory}: what was lost once is fed back "
        "more than once"
    )
    alike: list[bool] = []
    for step, (given, result, before) in enumerate(seen):
        if step and result.any():  # in some steps nothing may be sent at all
            without = copy.deepcopy(before)
            without[name] *= np.float32(0)
            (again,) = simulate(compressor, [given], [without], step, shape=shape)
            alike.append(same(again, result))
    assert not alike or not all(alike), (
        f"what was not sent is kept in {memory}, and never sent: the result is the same where "
        "zeros are kept"
    )
    _check_each_step(compressor, name, of_lost, of_kept, shape)


def _check_rounds_both_ways(name: str, parts: Array, shares: Array, new: Array) -> None:
    """Raise AssertionError where what is rounded of what was not sent has a sign in common."""
    of_x, of_lost, of_kept = map(float, shares)
    if max(abs(of_x), abs(of_lost - 1), abs(of_kept - 1)) > _NEARLY:
        return  # an average, or one with a decay
    left = parts[:, 1] + parts[:, 2]
    taken = float(((left - new) @ np.sign(left)) / np.abs(new).sum())
    assert abs(taken) <= _SHRINKS, (
        f"ctx.state[{name!r}] is rounded {'towards' if taken > 0 else 'away from'} zero, by "
        f"{abs(taken):.2g} of it in every step: that adds up in entries that wait for long, and "
        "what is small is never sent; round to the nearest, or at random"
    )


def _check_each_step(
    compressor: Compressor, name: str, of_lost: float, of_kept: float, shape: tuple[int, ...]
) -> None:
    """Raise AssertionError where some later step keeps something else than those before it."""
    state: State = {}
    for step in range(_EACH):
        before = np.array(state.get(name, 0.0), np.float64)
        x = gaussian(_N, step)
        (out,) = simulate(compressor, [x], [state], step, shape=shape)
        expected = of_lost * (x - out.astype(np.float64)) + of_kept * before
        off = int((np.abs(state[name] - expected) > _OFF * max(1.0, np.abs(expected).max())).sum())
        assert step < _STEPS or not off, (
            f"in step {step} {off} of {_N} elements of ctx.state[{name!r}] do not become what they "
            "become in the first steps, what was lost and what was kept: something is thrown away, "
            "or fed back twice"
        )


@needs("own_feedback_adds_up")
def check_what_waits_is_what_is_sent(compressor: Compressor) -> None:
    """An entry that waits keeps what it would have sent: with less it loses gradients, and where
    more is sent than waits, gradients count twice.

    Compute p = x + kept once. Send p at the entries that are chosen, keep p at all others, and
    clear those that were sent: kept[:] = p, then kept[chosen] = 0.
    """
    if not compressor.traits().stateful:
        return
    for shape in _SHAPES:
        state: State = {}
        seen: list[tuple[Array, Array, State, State]] = []
        for step in range(_WAITING):
            x, before = gaussian(_N, step), copy.deepcopy(state)
            out = simulate(compressor, [x], [state], step, shape=shape)[0]
            seen.append((x, out, before, copy.deepcopy(state)))
        units = compressor.traits().gradient_units
        names = [n for n in units if all(np.shape(s.get(n, ())) == (_N,) for *_, s in seen)]
        for name in names:
            if name in _NAMES:
                _check_waits(seen[1:], names, name)


def _check_waits(
    seen: list[tuple[Array, Array, State, State]], names: list[str], name: str
) -> None:
    """Raise AssertionError where entries that wait keep something else than what is sent."""
    columns = ["x", *(f"ctx.state[{each!r}]" for each in names)]
    given = [[x, *(before[each] for each in names)] for x, _, before, _ in seen]
    parts = np.concatenate([np.stack(step, axis=1) for step in given]).astype(np.float64)
    out = np.concatenate([step[1] for step in seen]).astype(np.float64)
    new = np.concatenate([step[3][name] for step in seen]).astype(np.float64)
    sent = out != 0
    if min(sent.sum(), (~sent).sum()) < _SOME or new[sent].any():
        return  # it is no selection, or does not clear what it sends
    waits, comes = _shares(parts[~sent], new[~sent]), _shares(parts[sent], out[sent])
    if waits is None or comes is None:
        return  # they are rounded, say
    own = 1 + names.index(name)
    assert abs(waits[own]) > _NO_SHARE, (
        f"an entry of {columns[own]} that is not sent becomes {_told(waits, columns)}: what it "
        "kept before is lost"
    )
    alike = float(waits @ comes) / float(np.linalg.norm(waits) * np.linalg.norm(comes))
    assert alike > _LIKEWISE, (
        f"an entry that is sent comes out as {_told(comes, columns)}, and {columns[own]} of one "
        f"that waits becomes {_told(waits, columns)}"
    )


def _shares(parts: Array, made: Array) -> Array | None:
    """Return by what shares of its columns ``parts`` makes up ``made``; None if it does not."""
    shares, _, rank, _ = np.linalg.lstsq(parts, made, rcond=1e-4)
    off = float(np.abs(parts @ shares - made).max())
    exact = off <= _EXACT * float(np.abs(made).max())
    return shares if exact and rank == parts.shape[1] and shares.any() else None


def _told(shares: Array, columns: list[str]) -> str:
    told = [f"{s:.2g} * {c}" for s, c in zip(shares, columns, strict=True) if abs(s) > _NO_SHARE]
    return " + ".join(told)


@needs(
    *PURE,
    "feedback_stays_bounded",
    "scales_with_its_values",
    "unbiased",
    "contraction",
    "every_shape_and_name",
)
def check_comes_out_as_long(compressor: Compressor) -> None:
    """A result that is twice the gradient is a learning rate that is twice the user's: training
    goes on, and goes worse.

    Undo in decompress what compress does to x, and leave the division by the number of ranks to the
    engine. Where exponents or levels are looked for, try values that lie just on one. What goes by
    absolute sizes on purpose declares scales=False; what gives more than went in on purpose says by
    divergence() that error feedback must not follow.
    """
    now = compressor.at(0)
    traits, divergence = now.traits(), now.divergence()
    declared = traits.stateful or not traits.scales or traits.omega or traits.delta
    while isinstance(now, Modifier) and type(now).finish is Modifier.finish:
        now = now.wrapped_compressor
    if declared or divergence or type(now).finish is not Compressor.finish:
        return  # which other checks hold it to, or it is no mean
    # An option may ask for another length.
    usual = all(getattr(now, n) == field.default for n, field in options_of(type(now)).items())
    for given in _TENSORS:
        _check_as_long(compressor, gaussian(_N, 1), given, f"a tensor with {given}", usual)
    for what, made in _VALUES:
        _check_as_long(compressor, made(gaussian(_N, 1)), {}, what)


def _check_as_long(
    compressor: Compressor, x: Array, given: dict[str, Any], what: str, usual: bool = False
) -> None:
    """Raise AssertionError where ``x`` comes out longer, or shorter: by a little, if ``usual``."""
    outs = [simulate(compressor, [x], step=step, **given)[0] for step in _DRAWS]
    along = np.array([out.astype(float) @ x for out in outs]) / _length(x) ** 2
    lengths = np.maximum([_length(out) for out in outs], np.finfo("f4").tiny) / _length(x)
    alike = along / lengths
    luck = 4 * float(np.std(along)) / len(_DRAWS) ** 0.5
    times = float(along.mean())
    assert times - luck <= _MUCH, (
        f"what comes out of {what} is {times:.3g} times as long as what went in"
    )
    assert alike.min() < _ALIKE or times + luck >= _LITTLE, (
        f"what comes out of {what} is what went in, but for its length, which is {times:.3g} of it"
    )
    assert not usual or alike.min() < _ITSELF or abs(times - 1) <= _OFF_BY + luck, (
        f"what comes out of {what} is what went in, but {times:.3g} times as long: decompress "
        "multiplies by another number of levels, say, than compress divides by"
    )
    # A part of x, its signs or what is nearest to it would be farther from x if it were longer.
    best = float((lengths / np.maximum(alike, _LIKE)).max())
    assert alike.min() < _LIKE or best >= _LITTLE, (
        f"what comes out of {what} would be nearest to what went in if it were {1 / best:.3g} "
        "times as long"
    )


@needs("comes_out_as_long")
def check_many_add_up(compressor: Compressor) -> None:
    """A float32 sum to which values are added one by one grows no more once they are too small
    beside it: a mean of a large layer is less than that of a small one, in silence.

    Add up in float64, or in blocks, as NumPy's sum() does, and cumsum() and a loop do not.
    """
    if compressor.traits().stateful:
        return
    times = []
    for n in (_SMALL, LARGE):
        x = np.resize(np.sign(gaussian(_SMALL, 1)) * np.float32(_ROUNDED_OFF), n)
        out = simulate(compressor, [x])[0]
        if same(out, x):
            return  # values as they are
        given, came = x.astype(np.float64), out.astype(np.float64)  # or digits go by the threads
        along, length, own = float(came @ given), float(came @ came), float(given @ given)
        if not along > _SAME * (length * own) ** 0.5:
            return  # something else than x, which need not be as long
        times.append(along / own)
    assert _AS_MUCH <= times[1] / times[0] <= 1 / _AS_MUCH, (
        f"{LARGE} values of one magnitude come out {times[1] / times[0]:.3g} times as long as "
        f"{_SMALL} of them: a sum of them is rounded at each of its steps"
    )


def _length(x: Array) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


CHECKS = (
    check_own_feedback_adds_up,
    check_what_waits_is_what_is_sent,
    check_comes_out_as_long,
    check_many_add_up,
)
