"""The cost model: its formulas, its fit, and how well it predicts what it has not seen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring.cost.cost_model import COLLECTIVES, Constants, Measurement, Workload, fit, project

TRUTH = Constants(
    alpha=40e-6,
    beta=9e-9,
    gamma=2e-10,
    encode=2e-10,
    decode=1.5e-10,
    alpha_local=6e-6,
    beta_local=1.5e-10,
)
SIZES = (1 << 14, 1 << 17, 1 << 20, 1 << 23)


def jobs(ranks, sizes):
    for p in ranks:
        for n in sizes:
            yield Workload("allreduce", n, p)
            for ratio in (0.25, 0.01):
                yield Workload("allgather", n, p, ratio)
                yield Workload("scatter_reduce", n, p, ratio)
            yield Workload("two_level", n, p, 1.0, 2)
            yield Workload("two_level", n, p, 0.25, 2)


def measured(ranks, sizes, noise, seed):
    rng = np.random.default_rng(seed)
    return [
        Measurement(job, job.seconds(TRUTH) * float(np.exp(noise * rng.normal())))
        for job in jobs(ranks, sizes)
        if job.seconds(TRUTH) > 0
    ]


def test_the_formulas_give_the_published_example():
    # 400 MB at 100 Gbit/s with 15 us a message; a codec takes about 2 ms.
    wire = Constants(alpha=15e-6, beta=8e-11)
    for ranks, expected in ((8, 56), (512, 79), (4096, 187)):
        assert round(Workload("allreduce", 400e6, ranks).seconds(wire) * 1e3) == expected
    int8 = Constants(alpha=15e-6, beta=8e-11, encode=2e-12, decode=1.5e-12)
    for ranks, expected in ((8, 16), (512, 34), (4096, 141)):
        expected += (ranks - 1) * 15e-3  # what ranks tell each other at the end
        got = Workload("scatter_reduce", 400e6, ranks, 0.25).seconds(int8) * 1e3
        assert got == pytest.approx(expected, abs=1.0)


def test_ranks_that_are_far_apart_pay_a_delay_once():
    wire = Constants(alpha=10e-3)
    for ranks in (2, 4, 64):
        for collective, delays in (("allreduce", 2), ("allgather", 2), ("scatter_reduce", 3)):
            far = Workload(collective, 1e6, ranks, 0.25, far=True)
            assert far.seconds(wire) == pytest.approx(delays * 10e-3)
            near = Workload(collective, 1e6, ranks, 0.25)
            assert near.seconds(wire) == pytest.approx((ranks - 1) * delays * 10e-3)
    assert Workload("allreduce", 1e6, 1, far=True).seconds(wire) == 0


def test_without_noise_the_fit_finds_the_constants():
    model = fit(measured((2, 4), SIZES, 0.0, 0))
    for name, value in vars(TRUTH).items():
        assert getattr(model.constants, name) == pytest.approx(value, rel=1e-3), name
    assert np.abs(model.residuals).max() < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_held_out_sizes_and_rank_counts_are_predicted_within_15_percent(seed):
    model = fit(measured((2, 4), SIZES, 0.05, seed))
    for m in measured((2, 4, 8, 16), (1 << 16, 1 << 22, 1 << 26), 0.0, 0):
        prediction = model.predict(m.workload)
        assert prediction.seconds == pytest.approx(m.seconds, rel=0.15), m.workload
        assert prediction.low <= prediction.seconds <= prediction.high


def test_ranges_hold_most_of_what_happens_and_are_reproducible():
    model = fit(measured((2, 4), SIZES, 0.05, 1), seed=3)
    unseen = measured((4, 8), (1 << 16, 1 << 22), 0.05, 99)
    inside = [model.predict(m.workload) for m in unseen]
    hits = sum(p.low <= m.seconds <= p.high for p, m in zip(inside, unseen, strict=True))
    assert hits >= 0.75 * len(unseen)
    again = fit(measured((2, 4), SIZES, 0.05, 1), seed=3)
    assert [again.predict(m.workload) for m in unseen] == inside


def test_projections_reach_thousands_of_ranks_and_two_levels_win_there():
    model = fit(measured((2, 4, 8), SIZES, 0.03, 0))
    table = project(model, 400e6, (8, 512, 4096), ratio=0.25, local_size=8)
    assert set(table) == {(c, p) for c in COLLECTIVES for p in (8, 512, 4096)}
    flat, two = table["scatter_reduce", 4096], table["two_level", 4096]
    assert two.high < flat.low
    assert table["scatter_reduce", 8].seconds < table["allreduce", 8].seconds
    assert table["allgather", 512].seconds > table["allreduce", 512].seconds  # ratio x ranks > 2
    assert not any(c == "two_level" for c, _ in project(model, 1e6, (8,)))


@settings(max_examples=100)
@given(
    st.sampled_from(COLLECTIVES),
    st.integers(0, 10**9),
    st.integers(1, 64),
    st.integers(1, 8),
    st.floats(0, 1),
)
def test_costs_grow_with_every_argument(collective, nbytes, hosts, local_size, ratio):
    if collective != "two_level":
        local_size = 1

    def cost(**changes):
        given = {"nbytes": nbytes, "ranks": hosts * local_size, "ratio": ratio, **changes}
        return Workload(collective, local_size=local_size, **given).seconds(TRUTH)

    assert 0 <= cost() <= cost(nbytes=nbytes + 1000) * (1 + 1e-12)
    if collective in ("allgather", "allreduce"):
        assert cost() <= cost(ranks=hosts * local_size + local_size) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Workload("reduce", 1, 2), "must be one of allreduce"),
        (lambda: Workload("two_level", 1, 5, 1.0, 2), "5 ranks do not fill hosts of 2"),
        (lambda: Workload("allreduce", -1, 2), "at least 0"),
        (lambda: fit([]), "needs measurements"),
        (lambda: fit([Measurement(Workload("allreduce", 1, 2), 0.0)]), "longer than 0"),
    ],
)
def test_nonsense_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
