"""Whether numbers that are declared hold: omega (unbiased), delta, the fixed size, units.

The engine believes them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.quantizers.quantize import Int8
from ringlet.compressors.states import rescale
from ringlet.compressors.testing.checks.one_call import check_fits_layout
from ringlet.compressors.testing.tools.equality import same, same_payload
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed, spiked, vectors
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import (
    by_payload,
    context,
    decode,
    encode,
    scatter,
    simulate,
    summed,
)

_DRAWS = 400
_FEW = 40
_SEVERAL = 24  # values whose order tells something
_POWERS = (-50, -80, -100, 60)  # below 2^-119 a 127th of a value is no normal number any more
_OFTEN = 25  # draws in which an element is there that is drawn as often as others
_MANY, _SUMS = 1 << 18, 20  # elements whose errors are added up, and how often
# Every second of so many elements is 2^-8, every fourth 2^-5; how often they are drawn; so many
# small ones at least would have come if their chance went by their square: as 2^-5's do, over 64.
_MIXED, _SQUARED, _WOULD_COME = 1 << 14, 64, 12
_SPIKED = 1024
_LONG_SPIKED, _FAR_BELOW, _FEW_LONG = 1 << 17, (3, 5, 8, 10, 13), 3
# Spikes that are fewer than a thousandth, which some cut off, and draws of all that may be seen.
_APART, _SEEN = 4099, 12
_LATER = (1, 10, 100, 1000, 100_000)
_LONG = 100_003  # elements, of which a fixed number is a smaller share
_STEPS = 5
_SCALE = 64.0  # by which a loss scale changes


def _adverse() -> Iterator[tuple[str, Array]]:
    """Yield vectors on which claims that were measured on Gaussians break, and what they are."""
    for period in (8, 64, 512, _SPIKED):
        for below in (1, 2, 3, 4, 6, 8, 10, 13):
            what = f"one spike of 1 in {period} values of 2^-{below}"
            yield what, spiked(_SPIKED, period, below)
    one = np.zeros(_SPIKED, np.float32)
    one[_SPIKED // 2] = -3
    yield "a single value", one


@needs(*PURE, "decoding_is_the_same_everywhere")
def check_points_the_same_way(compressor: Compressor) -> None:
    """A step along the decoded gradient must go down: a decoder that reads bits or entries in
    another order than they were written, or with another sign, goes anywhere.

    Decode one element, and see where it comes out: is a set bit plus or minus on both sides, does
    packbits count bits from the same end as unpackbits, do indices count from 0, does the largest
    code fit its integer type, and are a payload's arrays taken by their names?
    """
    check_direction(compressor, 0.9)


def check_direction(compressor: Compressor, most: float) -> None:
    """Raise AssertionError where what comes out has nothing to do with what went in.

    Their cosine is above what it is by chance, of which ``most`` is asked for.
    """
    n = 20_000
    for step, x in enumerate((gaussian(n, 1), heavy_tailed(n, 2), gaussian(n, 3))):
        out = simulate(compressor, [x], step=step, shape=(100, 200))[0].astype(np.float64)
        _check_cosine(x, out, most)
    for large in (1000, -1000):
        for place in (0, 777, 2999):
            x = gaussian(3000, 3)
            x[place] = large
            came = float(simulate(compressor, [x])[0][place])
            assert came * large >= 0, (
                f"{large} among small values comes out as {came:.4g}: the largest code does not "
                "fit its integer type"
            )


def _check_cosine(x: Array, out: Array, most: float) -> None:
    sent = np.where(out != 0, x.astype(np.float64), 0)
    lengths = float(np.linalg.norm(out) * np.linalg.norm(sent))
    likeness = float((out * sent).sum()) / lengths if lengths else 1.0
    # Of m values in any order the cosine is about 1 / sqrt(m), of a few it may be anything.
    several = np.count_nonzero(out)
    chance = min(4 / np.sqrt(several), most) if several > _SEVERAL else 0.0
    assert likeness >= -chance, (
        f"what is decoded points away from what went in (their cosine is {likeness:.3f}): a sign "
        "is turned round"
    )
    assert likeness > chance or not chance, (
        f"what is decoded has nothing to do with what went in (their cosine is {likeness:.3f}): "
        "elements, bits or indices are in another order"
    )


@needs("every_length")
def check_fixed_size(compressor: Compressor) -> None:
    """Buffers of fixed-size payloads are laid out before anything is compressed: an array of
    another length or dtype would overwrite its neighbour's bytes.

    Send what layout(n) says whatever the values are, or leave fixed_size away.
    """
    traits = compressor.traits()
    if not traits.fixed_size or not by_payload(compressor):
        return

    def body(x: Array) -> None:
        check_fits_layout(compressor, compressor.compress(x, context(x)), x.size)

    for_all(vectors(), body)
    x = gaussian(2000, 1)
    for step in _LATER:
        now = compressor.at(step)
        if not now.traits().fixed_size or not by_payload(now):
            continue  # it promises something else from then on
        try:
            check_fits_layout(now, now.compress(x, context(x, step=step)), x.size)
        except AssertionError as error:
            raise AssertionError(f"in step {step} {error}") from error


@needs(*PURE, "decoding_is_the_same_everywhere")
def check_sums_on_the_wire(compressor: Compressor) -> None:
    """combine="sum" lets the network add payloads: decoding must carry over to the sum.

    What all ranks must have in common before sums mean anything, such as a scale or the places of
    values, comes from ctx.rng(shared=True), or from a round before: combine="rounds", and
    scale = yield Round(own, "max") in exchange(). What is not linear takes combine="gather".
    """
    if compressor.traits().combine != "sum":
        return
    # What is cut off below a threshold, or beyond one, is no sum either.
    for size, scale in ((2, 1.0), (3, 1.0), (5, 1.0), (3, 2.0**-4), (3, 2.0**-8)):
        # Before finish(), which may be anything, such as the majority's sign.
        now, given = compressor.at(0), [gaussian(2000, seed, scale) for seed in range(size)]
        contexts = [context(x, rank=rank, size=size) for rank, x in enumerate(given)]
        payloads = [encode(now, x, ctx) for x, ctx in zip(given, contexts, strict=True)]
        parts = [decode(now, payload, 2000, contexts[0]).astype(np.float64) for payload in payloads]
        total = summed(now, payloads, 2000)
        got = decode(now, total, 2000, contexts[0]).astype(np.float64) / size
        expected = np.mean(parts, axis=0)
        largest = max(float(np.abs(part).max()) for part in parts)
        close = np.allclose(got, expected, rtol=0.02, atol=0.02 * largest)
        assert close, f"decoding the sum of {size} payloads is not the sum of the decoded"


@needs(*PURE, "points_the_same_way", "extreme_values")
def check_unbiased(compressor: Compressor) -> None:
    """omega promises E C(x) = x and E||C(x) - x||^2 <= omega ||x||^2: convergence proofs, and the
    choice of a learning rate, rest on both.

    Declare the omega of the worst x, not of a usual one; most often that is a spike among small
    values. Round at random without bias: floor(x / step + ctx.uniform(n)), with all bits of numbers
    that ctx.step changes, and floor rather than a cast, which rounds towards zero. If it holds for
    values of one size alone, there is an epsilon or a fixed step in the scale: leave it away.
    """
    omega = compressor.traits().omega
    if omega is None:
        return
    for what, x in _adverse():
        energy = float(np.square(x, dtype=np.float64).sum())
        lost = [float(np.square(_draw(compressor, x, s) - x).sum()) for s in range(_FEW)]
        share, luck = float(np.mean(lost)) / energy, 4 * float(np.std(lost)) / energy / _FEW**0.5
        assert share - luck <= omega * 1.02 + 1e-9, (
            f"E||C(x) - x||^2 is {share:.4g} ||x||^2 of {what}, declared are {omega:.4g}"
        )
    for below in _FAR_BELOW:  # what shares a scale with one spike, however many it is
        x = spiked(_LONG_SPIKED, _LONG_SPIKED, below)
        energy = float(np.square(x, dtype=np.float64).sum())
        lost = [float(np.square(_draw(compressor, x, s) - x).sum()) for s in range(_FEW_LONG)]
        assert np.mean(lost) / energy <= omega * 1.1 + 4 * np.std(lost) / energy + 1e-9, (
            f"E||C(x) - x||^2 is {np.mean(lost) / energy:.4g} ||x||^2 of one spike of 1 in "
            f"{_LONG_SPIKED} values of 2^-{below}, declared are {omega:.4g}: if it grows with the "
            "length, give every so many elements a scale of their own, or declare none"
        )
    _check_spikes(compressor)
    ordinary = gaussian(1500, 7)
    for what, x in (
        ("of a Gaussian", ordinary),
        ("of heavy tails", heavy_tailed(1500, 8)),
        ("of equal values", np.ones(1500, np.float32)),
        ("of values 2^-40 times as large", ordinary * np.float32(2.0**-40)),
        ("of values 2^40 times as large", ordinary * np.float32(2.0**40)),
        ("of 31 equal values", np.ones(31, np.float32)),
        ("as ctx.stage 2", ordinary),
    ):
        stage = 2 if "stage" in what else 1
        if stage == 2 and (compressor.traits().granularity is None or not by_payload(compressor)):
            continue
        energy = float(np.square(x, dtype=np.float64).sum())
        total, spread, came = np.zeros(x.size), 0.0, np.zeros(x.size, np.int64)
        for step in range(_DRAWS):
            drawn = _draw(compressor, x, step, stage)
            total += drawn
            came += drawn != 0
            spread += float(np.square(drawn - x).sum()) / _DRAWS
        assert spread <= omega * energy * 1.1 + 1e-9 * energy, (
            f"E||C(x) - x||^2 is {spread / energy:.4g} ||x||^2 {what}, declared are {omega:.4g}"
        )
        # The mean of T draws is off by spread / T in square, if there is no bias.
        off = float(np.square(total / _DRAWS - x).sum())
        assert off <= 4 * spread / _DRAWS + 1e-9 * energy, (
            f"the mean of {_DRAWS} draws {what} is off by {np.sqrt(off / energy):.3g} ||x||, noise "
            f"explains {np.sqrt(spread / _DRAWS / energy):.3g}: it is biased"
        )
        never = np.flatnonzero(came == 0) if "equal" in what else np.zeros(0)
        assert not never.size or came.mean() < _OFTEN, (
            f"element {never[0]} of {x.size} equal ones is 0 in all {_DRAWS} draws: it is never "
            "drawn"
        )
    _check_sums(compressor)
    _check_small_ones(compressor)


def _few_spikes() -> tuple[str, Array]:
    """Return a long vector with a few equal spikes, and what it is."""
    x = spiked(_LONG_SPIKED, _APART, 8)
    return f"{np.count_nonzero(x == 1)} spikes of 1 in {_LONG_SPIKED} values of 2^-8", x


def _check_spikes(compressor: Compressor) -> None:
    """Raise AssertionError where a few large ones of many values come out otherwise in the mean."""
    what, x = _few_spikes()
    places = np.flatnonzero(x == 1)
    draws = np.array([_draw(compressor, x, step)[places] for step in range(_SEEN)])
    if np.count_nonzero(draws) < _OFTEN:
        return  # of what hardly ever comes the mean may be anything
    spread = float(np.square(draws - 1).sum()) / _SEEN
    off = float(np.square(draws.mean(axis=0) - 1).sum())
    assert off <= 4 * spread / _SEEN + 1e-9 * places.size, (
        f"in the mean of {_SEEN} draws {what} come out as {draws.mean():.3g}: it is biased; take "
        "the scale from the largest magnitude, and cut nothing off"
    )


def check_few_draws(compressor: Compressor) -> None:
    """Raise AssertionError where a few draws show that ``omega`` does not hold."""
    omega = compressor.traits().omega
    if omega is None:
        return
    for what, x in (
        ("a Gaussian", gaussian(1500, 7)),
        (f"one spike of 1 in {_SPIKED} values of 2^-8", spiked(_SPIKED, _SPIKED, 8)),
    ):
        energy = float(np.square(x, dtype=np.float64).sum())
        draws = [_draw(compressor, x, step) for step in range(_FEW)]
        lost = [float(np.square(draw - x).sum()) for draw in draws]
        spread, luck = float(np.mean(lost)), 4 * float(np.std(lost)) / _FEW**0.5
        assert spread <= omega * energy * 1.1 + luck + 1e-9 * energy, (
            f"E||C(x) - x||^2 is {spread / energy:.4g} ||x||^2 of {what}, declared are {omega:.4g}"
        )
        off = float(np.square(np.mean(draws, axis=0) - x).sum())
        # Of a spike one element decides, whose mean luck may put anywhere.
        assert "Gaussian" not in what or off <= 4 * spread / _FEW + 1e-9 * energy, (
            f"the mean of {_FEW} draws of {what} is off by {np.sqrt(off / energy):.3g} ||x||, "
            f"noise explains {np.sqrt(spread / _FEW / energy):.3g}: it is biased"
        )


def _check_sums(compressor: Compressor) -> None:
    """Raise AssertionError where errors of many elements have a sign in common."""
    x = gaussian(_MANY, 5)
    signs = np.sign(x)
    sums = []
    for step in range(_SUMS):
        error = _draw(compressor, x, step) - x
        sums.append((error.sum(), float(error @ signs)))
    for which, found in zip(("", " away from or towards zero"), np.transpose(sums), strict=True):
        luck = float(np.std(found, ddof=1)) / _SUMS**0.5
        mean = float(np.mean(found))
        assert abs(mean) <= 6 * luck + 1e-7 * float(np.abs(x).sum()), (
            f"errors of {_MANY} elements add up to {mean:.4g}{which} in the mean of {_SUMS} draws, "
            f"luck explains {luck:.3g}: it is biased, by a little in every element"
        )


def _check_small_ones(compressor: Compressor) -> None:
    """Raise AssertionError where small values beside large ones come out otherwise in the mean."""
    x = np.ones(_MIXED, np.float32)
    x[1::2], x[2::4] = 2.0**-8, 2.0**-5
    draws = [_draw(compressor, x, step) for step in range(_SUMS)]
    came, middle = (sum(np.count_nonzero(d[k]) for d in draws) for k in (np.s_[1::2], np.s_[2::4]))
    if came < _OFTEN and 2 * middle / _SQUARED < _WOULD_COME:
        return  # of what hardly ever comes the mean may be anything
    total = float(x[1::2].sum(dtype=np.float64))
    found = [float((d[1::2].astype(np.float64) - x[1::2]).sum()) for d in draws]
    luck, mean = float(np.std(found, ddof=1)) / _SUMS**0.5, float(np.mean(found))
    assert abs(mean) <= 6 * luck + 1e-5 * total, (
        f"values of 2^-8 among others of 1 come out as {1 + mean / total:.3g} of what they are in "
        f"the mean of {_SUMS} draws, luck explains {luck / total:.2g}: it is biased; leave out no "
        "small values, and give each of them a chance to come, however small that is"
    )


@needs(*PURE, "points_the_same_way", "extreme_values")
def check_contraction(compressor: Compressor) -> None:
    """delta promises E||C(x) - x||^2 <= (1 - delta) ||x||^2: without it error feedback may
    diverge.

    Declare the delta of the worst x, not of a usual one: a sign keeps 2 / pi of a Gaussian's
    energy, and 1 / n of a spike's. Leave it away if nothing holds for every x.
    """
    delta = compressor.traits().delta
    if delta is None:
        return
    usual = gaussian(_SPIKED, 1)
    at_random = not same(_draw(compressor, usual, 0), _draw(compressor, usual, 1))
    uneven = [(f"{n} equal values", np.full(n, 3, np.float32)) for n in (67, 113, 1279)]
    for what, x in (*_adverse(), *uneven):
        _check_lost(compressor, x, delta, at_random, f"||x||^2 of {what}")
    signs = np.where(gaussian(_LONG, 1) < 0, -1, 1).astype(np.float32)
    _check_lost(compressor, signs, delta, at_random, f"||x||^2 of {_LONG} values of 1 and -1")
    what, x = _few_spikes()
    _check_lost(compressor, x, delta, at_random, f"||x||^2 of {what}")
    for_all(
        [x for x in vectors() if 1e-26 < float(np.square(x, dtype=np.float64).sum()) < 1e30],
        lambda x: _check_lost(compressor, x, delta, at_random, "||x||^2"),
    )


@needs("contraction", "scales_with_its_values")
def check_contraction_at_every_size(compressor: Compressor) -> None:
    """delta holds for every x, for small gradients late in training too: what is all lost because
    a square or a quotient is too small for float32 is nothing that contracts.

    Divide by the largest magnitude before squaring, and compare with no number but 0. What goes by
    absolute sizes on purpose declares traits: scales=False.
    """
    delta = compressor.traits().delta
    if delta is None or not compressor.traits().scales:
        return
    usual = gaussian(_SPIKED, 2)
    at_random = not same(_draw(compressor, usual, 0), _draw(compressor, usual, 1))
    for power in _POWERS:
        by = np.float32(2.0**power)
        for what, x in (("a Gaussian", usual * by), ("equal values", np.full(_SPIKED, by))):
            of = f"||x||^2 of {what} times 2^{power}"
            _check_lost(compressor, x, delta, at_random, of)


def _check_lost(compressor: Compressor, x: Array, delta: float, at_random: bool, what: str) -> None:
    squares = np.square(x, dtype=np.float64)
    energy = float(squares.sum()) or 1.0

    draws = [_draw(compressor, x, step) for step in range(_FEW if at_random else 1)]
    lost = [float(np.square(draw - x).sum()) / energy for draw in draws]
    mean, error = float(np.mean(lost)), 6 * float(np.std(lost)) / np.sqrt(len(lost))
    if at_random:  # what is kept now and then may not have been kept in any of these draws
        error += 4 / _FEW * float(squares.max()) / energy
    assert mean - error <= (1 - delta) + 1e-5, (
        f"||C(x) - x||^2 is {mean:.4g} {what}, declared are at most {1 - delta:.4g}"
    )


@needs(*PURE, "nothing_is_declared_in_vain")
def check_memory_is_declared(compressor: Compressor) -> None:
    """A compressor that remembers needs a name for its tensor and a place in the checkpoint: the
    engine asks for them only where ``stateful`` says so, and keeps what is in ctx.state.

    Write traits(self): return Traits(stateful=True), or remember nothing: '| ef' remembers for you
    what was not sent. Put what is remembered into the dict that ctx.state is: ctx.state["kept"] =
    ...
    """
    if compressor.traits().stateful:
        _check_anything_is_kept(compressor)
        return
    state: dict[str, Any] = {}
    first, other = gaussian(2000, 9), gaussian(2000, 10)
    # What remembers a size or a place shows it where values shrink, grow, or are others.
    for step, x in enumerate((first, first, first * 64, first / 64, other, first)):
        x = x.astype(np.float32)
        if by_payload(compressor):
            remembering = encode(compressor, x, context(x, state, step=step))
            agree = same_payload(remembering, encode(compressor, x, context(x, step=step)))
        else:
            held, none = (simulate(compressor, [x], kept, step)[0] for kept in ([state], None))
            agree = same(held, none)
        assert agree, "the result depends on earlier steps, but traits() does not say stateful=True"


def _check_anything_is_kept(compressor: Compressor) -> None:
    """Raise AssertionError where a compressor that says that it remembers does not."""
    states: list[State] = [{}, {}]
    traits = compressor.at(0).traits()
    cut = traits.granularity is not None and traits.fixed_size and traits.combine == "gather"
    for step in range(_STEPS):
        gradients = [gaussian(2000, 2 * step + rank) for rank in (0, 1)]
        simulate(compressor, gradients, states, step, shape=(40, 50))
        if cut and not any(states):  # some remember what is lost of sums alone
            scatter(compressor, gradients, states, step)
    for step in (*_LATER, 999_999):
        if not any(states):  # some begin after a number of steps, or with every so many
            simulate(compressor, gradients, states, step, shape=(40, 50))
    assert any(states), (
        f"traits() says stateful=True, and ctx.state is empty after {_STEPS} steps, and after "
        "later ones: what is kept in a copy of it is lost"
    )


@needs(*PURE, "memory_is_declared")
def check_parts_keep_apart(compressor: Compressor) -> None:
    """What stands behind one another has one ctx.state: what two parts keep there under one name,
    each overwrites for the other.

    Begin the names with your own, as in ctx.state["clip.most"], and use no modifier twice.
    """
    owners: dict[str, str] = {}
    for part in _parts(compressor):
        state: State = {}
        simulate(part, [gaussian(2000, 1)], [state], shape=(40, 50))
        for key in sorted(state.keys() - {"step"}, key=str):
            other = owners.setdefault(key, "")
            assert not other, f"{part.label()} and {other} both keep ctx.state[{key!r}]"
            owners[key] = part.label()


def _parts(compressor: Compressor) -> Iterator[Compressor]:
    """Yield the modifiers, each around a compressor that remembers nothing, and the innermost."""
    while isinstance(compressor, Modifier):
        with suppress(CompressorError):  # what that one cannot stand behind
            yield compressor.replace(inner=Int8())
        compressor = compressor.wrapped_compressor
    yield compressor


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "memory_is_declared",
    "pieces_remember_their_own",
    "memory_does_not_grow",
    "scales_with_its_values",
)
def check_gradient_units(compressor: Compressor) -> None:
    """A loss scale that changes multiplies gradients, and with them what gradient_units names in
    ctx.state: whatever else is in their units would be added to gradients of another size.

    Name in traits(self) what ctx.state holds in units of the gradient: Traits(stateful=True,
    gradient_units=("velocity",)).
    """
    traits = compressor.traits()
    units = traits.gradient_units
    named = isinstance(units, tuple) and all(isinstance(name, str) for name in units)
    assert named, f"gradient_units is a tuple of names in ctx.state, not {units!r}"
    assert traits.stateful or not units, "gradient_units names a state, stateful says there is none"
    if not traits.stateful or not traits.scales:
        return
    for n in (2001, 2007, 1):  # which fill no blocks
        state = State()
        simulate(compressor, [gaussian(n, n)], [state], name=str(n))
        _check_units_size(compressor, state, n)
    for shape in ((40, 50), (2000,)):
        given: dict[str, Any] = {"name": str(shape), "shape": shape}
        states: list[State] = [{}, {}]
        for step in range(3):
            gradients = [gaussian(2000, 2 * step), gaussian(2000, 2 * step + 1)]
            simulate(compressor, gradients, states, step=step, **given)
        for name in states[0].keys() & set(units):
            lengths = np.shape(states[0][name])
            _check_units_size(compressor, states[0], 2000)
            kind = np.asarray(states[0][name]).dtype
            assert not lengths or kind == np.float32 or kind.kind not in "fc", (
                f"ctx.state[{name!r}] is an array of {kind}: what gradient_units names is float32"
            )
            writable = not lengths or states[0][name].flags.writeable
            assert writable, (
                f"ctx.state[{name!r}] is not writeable: where the loss scale changes, what "
                "gradient_units names is multiplied in place; leave its flags as they are"
            )
        gradients = [gaussian(2000, 7), gaussian(2000, 8)]
        for step in range(3, 3 + _SEVERAL):
            saved = copy.deepcopy(states)
            expected = simulate(compressor, gradients, states, step=step, **given)[0]
            if expected.any():
                break
        else:
            continue  # nothing comes, which another check tells
        for by, times in ((_SCALE, f"{_SCALE:.0f} times"), (1 / _SCALE, f"1 / {_SCALE:.0f} times")):
            scaled = copy.deepcopy(saved)
            for state in scaled:
                rescale(state, compressor, by)
            others = [x * np.float32(by) for x in gradients]
            got = simulate(compressor, others, scaled, step=step, **given)[0] / np.float32(by)
            off = float(np.abs(got - expected).max() / np.abs(expected).max())
            assert off < 1e-3, (
                f"gradients {times} as large give a result that is off by {off:.2g} of the "
                f"largest, though {list(units)} of {_names(states[0])} were multiplied as well: "
                "name in gradient_units what is in units of the gradient, and nothing else"
            )


def _check_units_size(compressor: Compressor, state: State, n: int) -> None:
    """Raise AssertionError where what is remembered has another length than is said."""
    for name in state.keys() & set(compressor.traits().gradient_units):
        lengths, size = np.shape(state[name]), compressor.units_size(name, n)
        assert lengths in ((), (size,)), (
            f"of a tensor of {n} elements ctx.state[{name!r}] is an array of shape "
            f"{list(lengths)}, and units_size({name!r}, {n}) says {size}: what gradient_units "
            "names is a flat array of as many elements as the tensor, or as units_size(name, n) "
            "says, or a number, for a checkpoint's is forgotten where it is not"
        )


@needs(*PURE)
def check_results_may_replace_values(compressor: Compressor) -> None:
    """in_place=True lets the engine give ``exchange`` one array as ``x`` and as ``out``: what looks
    at ``x`` after it has written to ``out`` would then see something else.

    Write to out at the end, after the last look at x, or leave in_place away.
    """
    traits = compressor.traits()
    if traits.combine != "rounds" or not traits.in_place:
        return
    states: list[list[dict[str, Any]]] = [[{}, {}], [{}, {}]]
    for shape in ((40, 50), (2000,)):
        for step in range(3):
            gradients = [gaussian(2000, 2 * step), gaussian(2000, 2 * step + 1)]
            given: dict[str, Any] = {"step": step, "name": str(shape), "shape": shape}
            own, kept = list[Array](), list[Array]()
            apart = simulate(compressor, gradients, states[0], **given, shares=own)
            within = simulate(compressor, gradients, states[1], **given, shares=kept, in_place=True)
            pairs = [("result", (apart[0], within[0]))]
            if np.allclose(np.mean(own, axis=0), apart[0], rtol=1e-3, atol=1e-4):  # or told already
                pairs.append(("local", (own[0], kept[0])))
            for what, pair in pairs:
                assert same(*pair), (
                    f"step {step} of shape {shape} gives another {what} if out is x itself, but "
                    "traits() says in_place=True"
                )
        states = [[{}, {}], [{}, {}]]


def _names(state: State) -> list[str]:
    inner = [name for value in state.values() if isinstance(value, dict) for name in _names(value)]
    return sorted([name for name, value in state.items() if not isinstance(value, dict)] + inner)


def _draw(compressor: Compressor, x: Array, step: int, stage: int = 1) -> Array:
    if not by_payload(compressor):  # what one rank's exchange makes of its gradient
        return simulate(compressor, [x], step=step)[0].astype(np.float64)
    payload = encode(compressor, x, context(x, step=step, stage=stage))
    decoded = decode(compressor, payload, x.size, context(x, step=step, stage=stage))
    return decoded.astype(np.float64)


CHECKS = (
    check_fixed_size,
    check_points_the_same_way,
    check_sums_on_the_wire,
    check_unbiased,
    check_contraction,
    check_contraction_at_every_size,
    check_memory_is_declared,
    check_parts_keep_apart,
    check_gradient_units,
    check_results_may_replace_values,
)
