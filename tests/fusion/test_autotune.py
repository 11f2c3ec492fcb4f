"""Autotuning: the search finds good places, and all ranks change their limits at the same point."""

import csv
import math
import threading
import time
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request, StepAbandoned
from ringlet.fusion.autotune import tuner as tuner_module
from ringlet.fusion.autotune.search import BayesianSearch, RandomSearch
from ringlet.fusion.autotune.space import BOUNDS, from_unit, to_unit
from ringlet.fusion.autotune.tuned_limits import names
from ringlet.fusion.autotune.tuner import Autotuner
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

SIZES = [700, 3000, 5000, 1200, 2500, 900]


def declare(engine, spec="int8 | ef"):
    requests = [Request(f"t{i}", shape=(n,), spec=spec) for i, n in enumerate(SIZES)]
    return engine.declare("g", requests, [parse(spec)] * len(SIZES), [{} for _ in SIZES])


def step(engine, group, number):
    arrays = {
        f"t{i}": np.random.default_rng([engine.rank, number, i]).standard_normal(n, np.float32)
        for i, n in enumerate(SIZES)
    }
    for name in reversed(arrays):
        group.submit(name, arrays[name])
    group.wait(60)
    return [array.tobytes() for array in arrays.values()]


NUMBERS = ["fusion_threshold", "cycle_time"]


@given(st.sampled_from(NUMBERS), st.floats(0, 1))
def test_places_and_settings_are_one_to_one(name, place):
    setting = from_unit({name: place})
    low, high = BOUNDS[name]
    assert low <= setting[name] <= high
    assert to_unit(setting, [name])[name] == pytest.approx(place, abs=0.01)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_whole_numbers_and_switches_have_places_of_their_own(streams, cache, hierarchical):
    asked = {"streams": streams, "cache": cache, "hierarchical": hierarchical}
    setting = from_unit(asked)
    assert [type(value) for value in setting.values()] == [int, bool, bool]
    assert setting["streams"] in range(1, 9)
    place = to_unit(setting, list(asked))
    assert from_unit(place) == setting
    assert abs(place["streams"] - streams) < 0.2
    assert place["cache"] == (cache >= 0.5)


def test_settings_beyond_the_bounds_have_the_place_of_the_bound():
    """A user may have set a threshold of 0, which fuses nothing, and tune from there."""
    for name, (low, high) in BOUNDS.items():
        assert to_unit({name: low}, [name]) == {name: 0.0}
        assert to_unit({name: high}, [name]) == {name: 1.0}
    assert to_unit(
        {"fusion_threshold": 0, "cycle_time": 0.0}, ["fusion_threshold", "cycle_time"]
    ) == {
        "fusion_threshold": 0.0,
        "cycle_time": 0.0,
    }
    assert to_unit({"cycle_time": 1.0}, ["cycle_time"]) == {"cycle_time": 1.0}


def test_every_number_of_streams_can_be_reached():
    assert {from_unit({"streams": i / 50})["streams"] for i in range(51)} == set(range(1, 9))


def test_only_what_is_lossless_can_be_tuned():
    assert names("cycle_time, fusion_threshold") == NUMBERS
    assert names("all") == list(BOUNDS)
    assert names("all,-cache, -streams") == [*NUMBERS, "hierarchical"]
    with pytest.raises(ValueError, match="'compression' is not one of fusion_threshold"):
        names("compression")


def test_all_is_what_makes_a_difference_and_the_rest_is_refused_by_name():
    def tuned(engine):
        return engine.limits.autotune, engine.limits.hierarchical

    def refused(comm, name):
        with pytest.raises(ValueError, match=f"'{name}' cannot be tuned here") as caught:
            Engine(comm, open_control, Limits(autotune=name, cache_capacity=0))
        return str(caught.value)

    all_here = "fusion_threshold,cycle_time,streams,cache"
    assert with_engines(2, tuned, autotune="all") == [(all_here, False)] * 2
    assert with_engines(1, tuned, autotune="all") == [("fusion_threshold,cycle_time,cache", False)]
    few = "fusion_threshold,cycle_time,streams"
    assert with_engines(2, tuned, autotune="all", cache_capacity=0)[0] == (few, False)
    for size, name, remedy in [
        (2, "hierarchical", "set RINGLET_HIERARCHICAL_ALLREDUCE=1"),
        (2, "cache", "raise RINGLET_CACHE_CAPACITY"),
        (1, "streams", "leave it out"),
    ]:
        (text,) = set(run_local(refused, size, name))
        assert remedy in text


def trials(search, tuned, score, seed, samples=29):
    """Return after how many samples, from the worst corner on, one was within 10% of the best."""
    rng = np.random.default_rng(seed)
    corners = [dict(zip(tuned, c, strict=True)) for c in product((0.0, 1.0), repeat=len(tuned))]
    place = min(corners, key=score)
    for sample in range(1, samples + 1):
        if score(place) >= 0.9:
            return sample
        search.tell(place, score(place) * rng.lognormal(0, 0.03))
        place = to_unit(from_unit(search.ask()), tuned)
    return samples + 1


def bump(place):
    x, y = place["fusion_threshold"], place["cycle_time"]
    return (0.2 + math.exp(-((x - 0.72) ** 2 / 0.03 + (y - 0.15) ** 2 / 0.06))) / 1.2


def with_few_streams(place):
    x, y = place["fusion_threshold"], place["cycle_time"]
    score = (0.25 + math.exp(-((x - 0.5) ** 2 / 0.08 + (y - 0.3) ** 2 / 0.1))) / 1.25
    score *= math.exp(-((place["streams"] - 1 / 3) ** 2) / 0.5)
    return score * (1 if place["cache"] else 0.8) * (0.7 if place["hierarchical"] else 1)


def with_two_levels(place):
    x, y = place["fusion_threshold"], place["cycle_time"]
    score = (0.25 + math.exp(-((x - 0.72) ** 2 / 0.05 + (y - 0.15) ** 2 / 0.08))) / 1.25
    score *= math.exp(-((place["streams"] - 2 / 3) ** 2) / 0.8)
    return score * (1 if place["cache"] else 0.85) * (1 if place["hierarchical"] else 0.7)


@pytest.mark.parametrize(
    ("tuned", "score"),
    [(NUMBERS, bump), (list(BOUNDS), with_few_streams), (list(BOUNDS), with_two_levels)],
)
def test_bayesian_optimisation_beats_random_search(tuned, score):
    pytest.importorskip("bayes_opt")
    bayes = [trials(BayesianSearch(tuned, seed), tuned, score, seed) for seed in range(2)]
    chance = [trials(RandomSearch(tuned, seed), tuned, score, seed) for seed in range(20)]
    assert max(bayes) < 30
    assert np.mean(bayes) < np.mean(chance)


@given(data=st.data())
@settings(max_examples=15)
def test_all_ranks_plan_anew_at_the_same_step(data):
    """Another threshold at any time changes no result, and the plan in the same step everywhere."""
    thresholds = data.draw(st.lists(st.integers(1, 60_000), min_size=1, max_size=4))
    delays = data.draw(st.lists(st.floats(0, 0.002), min_size=12, max_size=12))

    def body(engine, tune):
        group = declare(engine)
        results, hashes = [], []
        for number in range(16):
            if tune and engine.rank == 0 and number % 3 == 0 and number // 3 < len(thresholds):
                engine.tuning.announce({"fusion_threshold": thresholds[number // 3]})
            time.sleep(delays[(number * (engine.rank + 1)) % 12])
            hashes.append(group.plan.hash)
            results += step(engine, group, number)
        late = engine.declare("late", [Request("l", shape=(9,))], [parse("none")], [{}])
        return results, hashes, engine.limits.fusion_threshold, late._planner.tunings[0].threshold

    plain = with_engines(3, lambda engine: body(engine, False))
    tuned = with_engines(3, lambda engine: body(engine, True))
    assert all(rank[0] == plain[0][0] for rank in [*plain, *tuned])
    assert len({tuple(rank[1]) for rank in tuned}) == 1
    assert {rank[2:] for rank in tuned} == {(thresholds[-1], thresholds[-1])}


def test_plans_change_while_a_rank_has_joined_and_steps_fail():
    def body(engine):
        group = declare(engine, "none")
        step(engine, group, 0)
        if engine.rank == 2:
            engine.join()
        else:
            for number in range(1, 12):
                if engine.rank == 0 and number == 2:
                    engine.tuning.announce({"fusion_threshold": 4000})
                if number == 4:  # given up by rank 1: rank 2 must count it too
                    if engine.rank == 1:
                        group.submit("t0", np.ones(SIZES[0], np.float32))
                        group.abandon("a test")
                    else:
                        with pytest.raises(StepAbandoned):
                            step(engine, group, number)
                else:
                    step(engine, group, number)
            engine.join()
        return [step(engine, group, 20 + i) for i in range(3)], group.plan.hash, len(group.buckets)

    results = with_engines(3, body)
    assert len({repr(result) for result in results}) == 1
    assert results[0][2] >= len(SIZES) - 1


def test_it_ends_with_the_best_setting_everywhere_and_logs(tmp_path):
    pytest.importorskip("bayes_opt")
    log = tmp_path / "tune.csv"

    def body(engine):
        group = declare(engine, "none")
        number = 0
        done = np.zeros(1, np.float32)
        while not done[0]:
            number += 1
            step(engine, group, number)
            done[0] = engine.rank == 0 and engine.tuning.tuner.frozen
            done = engine.submit(Request("done", shape=(1,)), done).wait(60)
        for extra in range(8):
            step(engine, group, extra)
        tuner = engine.tuning.tuner
        return engine.limits, group.plan.hash, tuner.tried if tuner else None

    tune = {"autotune": "all", "autotune_log": str(log)}
    small = {"autotune_samples": 6, "autotune_steps": 2, "autotune_warmup": 1}
    results = with_engines(2, body, fusion_threshold=1 << 16, cycle_time=0.02, **tune, **small)
    assert len({limits for limits, _, _ in results}) == 1
    assert len({digest for _, digest, _ in results}) == 1
    limits, _, tried = results[0]
    best, score = max(tried, key=lambda pair: pair[1])
    assert {name: getattr(limits, name) for name in BOUNDS} == best
    rows = list(csv.DictReader(log.open()))
    assert [row["sample"] for row in rows] == ["1", "2", "3", "4", "5", "6", "0"]
    assert ",".join(rows[0]) == (
        "sample,cycle_time_ms,fusion_threshold,streams,cache,hierarchical,score_bytes_per_s"
    )
    first = {"cycle_time_ms": "20.000", "fusion_threshold": str(1 << 16), "streams": "4"}
    assert first | {"cache": "1", "hierarchical": "0"} == dict(list(rows[0].items())[1:-1])
    assert {row["hierarchical"] for row in rows} == {"0"}  # there are no levels here
    assert rows[-1]["fusion_threshold"] == str(best["fusion_threshold"])
    assert float(rows[-1]["score_bytes_per_s"]) == pytest.approx(score, abs=1)


@pytest.mark.parametrize("buckets", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_scores_do_not_depend_on_how_many_buckets_there_are(monkeypatch, buckets, steps):
    """A window begins and ends behind the same bucket: it is of whole steps."""
    now, scores = [0.0], []
    monkeypatch.setattr(tuner_module.time, "perf_counter", lambda: now[0])
    limits = Limits(autotune="cycle_time", autotune_steps=steps, autotune_warmup=0)
    tuner = Autotuner(limits, lambda _: None)
    monkeypatch.setattr(tuner, "_window_done", lambda score, key: scores.append(score) or done(key))
    done = partial(tuner._settle, 0)
    try:
        for _ in range(60):
            now[0] += 0.9  # seconds of computing, and a burst of buckets behind it
            for index in range(buckets):
                now[0] += 0.1 / buckets
                member = SimpleNamespace(nbytes=100 / buckets, name=f"t{index}")
                tuner.bucket_done(
                    SimpleNamespace(owner="g", bucket=SimpleNamespace(members=[member]))
                )
    finally:
        tuner.close()
    assert len(scores) >= 3
    assert scores == pytest.approx([100.0] * len(scores))


def test_a_search_that_fails_leaves_the_best_that_was_tried(caplog):
    over, applied = threading.Event(), []

    class Failing:
        asked = 0

        def ask(self):
            self.asked += 1
            return {"cycle_time": 0.9}

        def tell(self, place, score):
            if self.asked == 2:
                raise ValueError("no such place")

    limits = Limits(autotune="cycle_time")
    tuner = Autotuner(limits, applied.append, over.set, Failing())
    for score in (5.0, 1.0, 2.0):
        tuner._scored.put(score)
    assert over.wait(60)
    assert "autotuning has failed and ends" in caplog.text
    assert applied == [from_unit({"cycle_time": 0.9})] * 2 + [{"cycle_time": limits.cycle_time}]


def test_a_missing_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(ImportError, match=r"pip install 'ringlet\[tune\]'"):
        BayesianSearch(["cycle_time"])
