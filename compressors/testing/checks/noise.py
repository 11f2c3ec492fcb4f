"""Checks of random numbers: whose they are, and what comes of the smallest and the largest."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.replaced import replaced
from ringlet.compressors.testing.tools.simulate import by_payload, context, decode, encode, simulate

_N, _BETWEEN = 2000, 600  # values, and from one that is not 0 to the next
_STEP = 3
# What two calls differ by that must not draw the same, and what it is called.
_OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("seeds 0 and 1", {"seed": 1}),
    ("seeds 0 and 65536", {"seed": 1 << 16}),
    ("tensors 'layer10.weight' and 'layer10.bias'", {"name": "layer10.bias"}),
    ("tensors 'layer10.weight' and 'layer11.weight'", {"name": "layer11.weight"}),
    ("tensors 'layer10.weight' and 'layer01.weight'", {"name": "layer01.weight"}),
    ("steps 3 and 2", {"step": _STEP - 1}),
    ("steps 3 and 65539", {"step": _STEP + (1 << 16)}),
)
_RANKS, _TURNS = 6, 3
_PERIOD = 5  # ranks, after which a turn of theirs begins anew
_AGAIN = 40  # steps, in which any turn comes again
_ALL, _CHANGED = 0.9, 0.2  # entries; random rounding changes a third from step to step
_FEW = 40  # entries that go in two steps: by chance half of them more or less is 3 deviations
_GRADIENTS, _COMMON = 48, 4.0  # half of all is 24 times what luck explains


@needs(*PURE, "points_the_same_way", "extreme_values", "unbiased")
def check_noise_at_its_ends(compressor: Compressor) -> None:
    """ctx.uniform(n) stays below 1 by so little that a sum is rounded up: the largest code plus
    noise is then one more, which wraps round to the smallest for a few elements in a million.

    Clip after the noise is added: xp.minimum(xp.floor(x / step + noise), 127).astype("int8").
    """
    x = gaussian(_N, 1)
    alone = np.sign(x) * (np.arange(_N) % _BETWEEN == 7)  # as long as all of a block together
    if not all(_keeps_signs(compressor, v, step) for v in (x, alone) for step in range(_STEP)):
        return  # it is not that kind of code
    for end in (np.nextafter(np.float32(1), np.float32(0)), np.float32(0)):

        def drawn(ctx: Context, n: int, shared: bool = False, at: Any = end) -> Array:
            return np.full(n, at, np.float32)

        with replaced(Context, uniform=drawn):
            assert all(_keeps_signs(compressor, v, 0) for v in (x, alone)), (
                f"where ctx.uniform(n) gives {end!r} some of the largest values come out with the "
                "other sign: a code wraps round"
            )


def _keeps_signs(compressor: Compressor, x: Array, step: int) -> bool:
    out = simulate(compressor, [x], step=step)[0]
    large = np.abs(x) >= np.float32(0.5) * np.abs(x).max()
    return bool((out[large] * x[large] >= 0).all())


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "unbiased",
    "noise_averages_out",
    "local_is_written",
    "late_steps_and_large_seeds",
)
def check_noise_is_drawn_anew(compressor: Compressor) -> None:
    """Errors of random rounding cancel because they have nothing to do with each other: tensors,
    steps, ranks and runs that draw the same numbers add them up instead.

    Draw from ctx.rng() or ctx.uniform(n), which know seed, name, step, stage and rank, in full. Who
    seeds a generator of his own makes its key of ctx.key().
    """
    compressor = _without_feedback(compressor)
    traits = compressor.at(0).traits()
    if traits.stateful:
        return  # what differs by the step may go by turns
    if traits.omega is None:
        _check_noise_of_one_rank(compressor)
        return
    usual = _drawn(compressor)
    if same(usual, _drawn(compressor, step=_STEP + 1)):
        return  # nothing is drawn
    others = list(_OTHERS)
    if traits.granularity is not None and traits.combine == "gather" and traits.fixed_size:
        others.append(("stages 1 and 2", {"stage": 2}))
    if by_payload(compressor) and not same(usual, _drawn(compressor, rank=1)):
        others += [(f"ranks 0 and {rank}", {"rank": rank}) for rank in (2, 8, 64)]
    for what, fields in others:
        assert not same(usual, _drawn(compressor, **fields)), f"{what} draw the same numbers"
    if by_payload(compressor):
        next_rank = _drawn(compressor, rank=1)
        for what, fields in (("seed", {"seed": 1}), ("step", {"step": _STEP + 1})):
            assert same(usual, next_rank) or not same(next_rank, _drawn(compressor, **fields)), (
                f"rank 1 draws what rank 0 draws with the next {what}: the two are added up"
            )


def _without_feedback(compressor: Compressor) -> Compressor:
    while isinstance(compressor, ErrorFeedback):  # which makes up for noise, and does not excuse it
        compressor = compressor.wrapped_compressor
    return compressor


def _check_noise_of_one_rank(compressor: Compressor) -> None:
    """Raise AssertionError where noise that is a rank's own is another tensor's, step's or rank's.

    Nothing is promised of its size, so that not all that changes is noise: which entries go may be
    a turn of ranks and steps.
    """
    if not by_payload(compressor) and compressor.divergence():
        return  # nobody asks for shares
    usual, other = _own(compressor)
    if same(usual, other) or same(usual, _own(compressor, step=_STEP + 1)[0]):
        return  # ranks have it in common, or it stays
    if same(usual, _own(compressor, step=_STEP + _PERIOD)[0]):
        return  # the ranks' turn
    if same(usual, _own(compressor, seed=1)[0]) and not _looks_drawn(compressor):
        return
    for what, fields in _OTHERS:
        assert not same(usual, _own(compressor, **fields)[0]), f"{what} draw the same numbers"
    if by_payload(compressor):
        for rank in (2, 8, 64):
            assert not same(_drawn(compressor), _drawn(compressor, rank=rank)), (
                f"ranks 0 and {rank} draw the same numbers"
            )
    for what, fields in (("seed", {"seed": 1}), ("step", {"step": _STEP + 1})):
        assert not same(other, _own(compressor, **fields)[0]), (
            f"rank 1 draws what rank 0 draws with the next {what}: the two are added up"
        )


def _looks_drawn(compressor: Compressor) -> bool:
    """Whether no step is like another: in what becomes of entries, or in which go, as by chance.

    What goes by turns comes again, and at once or never with what goes in another step.
    """
    steps = np.asarray([_own(compressor, step=step)[0] for step in range(_AGAIN)])
    pairs = np.triu_indices(_AGAIN, 1)
    if (steps != 0).mean() > _ALL:
        return all((steps[one] != steps[two]).mean() > _CHANGED for one, two in np.transpose(pairs))
    sent = (steps != 0).astype(np.float32)
    share = sent.mean(axis=1)
    by_chance = np.outer(share, share)[pairs] * _N
    together = (sent @ sent.T)[pairs]
    return bool(by_chance.min() > _FEW and (np.abs(together - by_chance) < by_chance / 2).all())


def _own(compressor: Compressor, **fields: Any) -> tuple[Array, Array]:
    """Return what becomes of one tensor on two ranks, for each of its own."""
    x = gaussian(_N, 2)
    given: dict[str, Any] = {"name": "layer10.weight", "step": _STEP} | fields
    now = compressor.at(0)
    if not by_payload(compressor):
        shares: list[Array] = []
        simulate(now, [x] * _PERIOD, shares=shares, **given)
        return shares[0], shares[1]
    found = []
    for rank in (0, 1):
        ctx = context(x, size=_PERIOD, rank=rank, **given)
        found.append(decode(now, encode(now, x, ctx), _N, ctx))
    return found[0], found[1]


def _drawn(compressor: Compressor, **fields: Any) -> Array:
    """Return what becomes of one tensor under another seed, name, step, stage or rank."""
    x = gaussian(_N, 2)
    given: dict[str, Any] = {"name": "layer10.weight", "step": _STEP} | fields
    if not by_payload(compressor):
        return simulate(compressor.at(0), [x, gaussian(_N, 3)], **given)[0]
    now, ctx = compressor.at(0), context(x, size=65, **given)
    return decode(now, encode(now, x, ctx), _N, ctx)


@needs("shares_make_the_mean", "noise_averages_out", "every_rank_counts")
def check_ranks_draw_their_own(compressor: Compressor) -> None:
    """The mean is worth more than one rank's gradient because errors cancel, in rounds too: if all
    ranks round with the same numbers, they do not.

    Take ctx.uniform(n) and ctx.rng() as they are for noise; with shared=True draw what all ranks
    must have alike, such as which entries travel.
    """
    compressor = _without_feedback(compressor)
    traits = compressor.at(0).traits()
    if traits.stateful or compressor.divergence() or _goes_by_turns(compressor):
        return
    if by_payload(compressor):
        if traits.combine == "gather" and not traits.omega:  # of which another check knows
            _check_errors_cancel(compressor.at(0))
        return
    alone = together = 0.0
    for step in range(4):
        gradients = [gaussian(_N, _RANKS * step + rank) for rank in range(_RANKS)]
        shares: list[Array] = []
        simulate(compressor.at(0), gradients, step=step, shares=shares)
        errors = np.asarray(shares, np.float64) - np.asarray(gradients, np.float64)
        alone += float(np.square(errors).sum()) / _RANKS
        together += float(np.square(errors.mean(axis=0)).sum())
    assert together <= 2 * alone / _RANKS + 1e-9, (
        f"the error of the mean of {_RANKS} ranks has {together / alone:.3g} of one rank's energy, "
        "not a sixth: ranks draw the same noise"
    )
    _check_magnitudes(compressor.at(0))


def _goes_by_turns(compressor: Compressor) -> bool:
    """Whether steps differ and come again, with any seed: what one rounds up the next rounds down.

    Ranks have that in common, and steps make up for it. Noise that comes again so soon shows where
    errors have something in common.
    """
    usual = _own(compressor)[0]
    if same(usual, _own(compressor, step=_STEP + 1)[0]):
        return False
    again = any(same(usual, _own(compressor, step=_STEP + k)[0]) for k in range(2, _PERIOD + 1))
    return again and same(usual, _own(compressor, seed=1)[0])


def _check_magnitudes(compressor: Compressor) -> None:
    """Raise AssertionError where all ranks round magnitudes up at once.

    Of values of both signs such errors cancel, which they do not where ranks agree. What is not
    sent in every step may be a choice that ranks have in common, and so may a projection.
    """
    gradients = [np.abs(gaussian(_N, rank)) for rank in range(_RANKS)]
    steps = []
    for step in range(2 * _TURNS):
        shares: list[Array] = []
        simulate(compressor, gradients, step=step, shares=shares)
        steps.append(np.asarray(shares, np.float64))
    found = np.asarray(steps)  # by step, rank and element
    sent = (found != 0).all(axis=(0, 1))
    errors = (found - found.mean(axis=0))[:, :, sent]
    alone = float(np.square(errors).sum()) / _RANKS
    together = float(np.square(errors.mean(axis=1)).sum())
    if together <= 2 * alone / _RANKS + 1e-9 or 10 * sent.sum() < _N:
        return
    # A projection that ranks have in common does to the mean what it does to each of them.
    means = [np.mean(gradients, axis=0)] * _RANKS
    moved = 0.0
    for step in range(2 * _TURNS):
        of_mean = simulate(compressor, means, step=step)[0]
        moved += float(np.square(of_mean - found[step].mean(axis=0))[sent].sum())
    assert moved <= together / 2, (
        f"of values of one sign the noise in the mean of {_RANKS} ranks has {together / alone:.3g} "
        "of one rank's energy, not a sixth: ranks draw the same noise"
    )


def _check_errors_cancel(compressor: Compressor) -> None:
    """Raise AssertionError where errors of ranks have more in common than those of steps have."""
    if same(*(_error(compressor, 0, {"step": step}) for step in (1, 2))):
        return  # nothing is drawn
    # Where magnitudes are rounded, errors have the signs of values, by which they may cancel.
    for signed in (True, False):
        together = dict.fromkeys(("rank", "step"), 0.0)
        for turn in range(_TURNS):
            for differs in together:
                errors = [
                    _error(compressor, place, {"seed": turn, differs: place}, signed)
                    for place in range(_RANKS)
                ]
                together[differs] += float(np.square(np.mean(errors, axis=0)).sum())
        assert together["rank"] <= 2 * together["step"] + 1e-9, (
            f"the error of the mean of {_RANKS} ranks has "
            f"{together['rank'] / together['step']:.3g} times the energy that it has where they "
            "draw other numbers: ranks draw the same noise"
        )


def _error(
    compressor: Compressor, place: int, fields: dict[str, Any], signed: bool = True
) -> Array:
    x = gaussian(_N, place) if signed else np.abs(gaussian(_N, place))
    ctx = context(x, size=_RANKS, **fields)
    return decode(compressor, encode(compressor, x, ctx), _N, ctx) - x


@needs("ranks_draw_their_own", "noise_is_drawn_anew", "both_signs_arrive")
def check_errors_have_nothing_in_common(compressor: Compressor) -> None:
    """What is lost of one gradient is made up for by others, of other ranks and steps: an element
    that is always rounded up, whatever it is, drifts away with every step.

    Draw noise anew in every step and on every rank: ctx.uniform(n), and no table of noise that is
    kept. Without noise round to the nearest, xp.rint, and neither down nor up.
    """
    now = compressor.at(0)
    traits = now.traits()
    if traits.combine != "sum":
        _check_noise_is_not_kept(_without_feedback(now))
    if not by_payload(now) or traits.stateful or traits.combine == "sum":
        return
    total, energy = np.zeros(_N), 0.0
    for turn in range(_GRADIENTS):
        error = _error(now, turn, {"step": turn, "rank": turn % 2})
        total += error
        energy += float(np.square(error, dtype=np.float64).sum())
    common = float(np.square(total).sum()) / (energy or 1.0)  # 1, where errors are independent
    assert common <= _COMMON, (
        f"errors of {_GRADIENTS} gradients that are independent add up to {common:.3g} times the "
        "energy that luck explains: they go the same way at the same elements"
    )


def _check_noise_is_not_kept(compressor: Compressor) -> None:
    """Raise AssertionError where each rank has noise of its own, the same in all steps."""
    if compressor.traits().stateful or (not by_payload(compressor) and compressor.divergence()):
        return  # results depend on more than noise, or nobody asks for shares
    usual, other = _own(compressor)
    if same(usual, other) or same(usual, _own(compressor, seed=1)[0]):
        return  # ranks have it in common, or nothing is drawn
    assert not same(usual, _own(compressor, step=_STEP + 1)[0]), (
        f"steps {_STEP} and {_STEP + 1} draw the same noise: what is rounded up is rounded up in "
        "every step"
    )


CHECKS = (
    check_noise_at_its_ends,
    check_noise_is_drawn_anew,
    check_ranks_draw_their_own,
    check_errors_have_nothing_in_common,
)
