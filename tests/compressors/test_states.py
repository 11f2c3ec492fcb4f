"""What becomes of a state where the loss scale, the spec or the number of ranks changes."""

import copy
import dataclasses

import numpy as np
import pytest

from ringlet.compressors import Compressor, Modifier, Traits, option, parse
from ringlet.compressors.states import (
    carry_over,
    fit,
    merged,
    owed,
    prescale,
    reorder,
    rescale,
    resize,
)
from ringlet.compressors.testing import CheckFailed, check_compressor
from ringlet.compressors.testing.checks.claims import check_gradient_units
from ringlet.compressors.testing.tools.named_check import Named
from ringlet.compressors.testing.tools.simulate import simulate

N, SHAPE = 2000, (40, 50)


def normal(seed):
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def trained(spec, size=2, steps=3):
    compressor = spec if isinstance(spec, Compressor) else parse(spec)
    states = [{} for _ in range(size)]
    for step in range(steps):
        simulate(compressor, [normal(9 * step + r) for r in range(size)], states, step, shape=SHAPE)
    return compressor, states


class Heavy(Modifier):
    """Adds half of what came before: a plugin's memory, of a name that nobody could guess."""

    def traits(self):
        inner = self.wrapped_compressor.traits()
        return Traits(inner.combine, inner.fixed_size, stateful=True, gradient_units=("past",))

    def compress(self, x, ctx):
        past = ctx.state.get("past", np.zeros_like(x))
        ctx.state["past"] = x + np.float32(0.5) * past
        return super().compress(ctx.state["past"], ctx)


class Silent(Heavy):
    """The same, and tells nobody."""

    def traits(self):
        return Traits("gather", self.wrapped_compressor.traits().fixed_size, stateful=True)


@pytest.mark.parametrize(
    ("spec", "scaled", "left"),
    [
        ("topk(ratio=0.1) | ef", {"residual"}, set()),
        ("powersgd | ef", {"residual"}, {"right"}),
        ("acpsgd", set(), {"left", "right"}),
        ("topk(ratio=0.1) | momentum_correction", {"u", "v"}, set()),
        ("int8 | ef21", {"worker", "server"}, set()),
        (parse("int8") | Heavy(), {"past"}, set()),
    ],
)
def test_a_loss_scale_multiplies_what_is_in_units_of_the_gradient(spec, scaled, left):
    compressor, (state, _) = trained(spec)
    before = copy.deepcopy(state)
    assert state.keys() == scaled | left
    rescale(state, compressor, 0.25)
    for name in scaled:
        np.testing.assert_array_equal(state[name], before[name] * np.float32(0.25))
    for name in left:
        np.testing.assert_array_equal(state[name], before[name])


def test_parts_and_shards_are_rescaled_as_well():
    compressor = parse("int8 | ef21")
    state = {"step": 3, "worker": np.ones(4), "stage2.1": {"sum": np.ones(2), "known": 2.0}}
    rescale(state, compressor, 2.0)
    assert state["step"] == 3
    assert state["worker"].tolist() == [2.0] * 4
    assert state["stage2.1"]["sum"].tolist() == [2.0, 2.0]
    assert state["stage2.1"]["known"] == 4.0


def test_another_factor_before_the_sum_leaves_alone_what_is_of_results():
    compressor = parse("int4 | ef")
    state = {"residual": np.ones(4, np.float32), "stage2.2": {"residual": np.ones(2, np.float32)}}
    prescale(state, compressor, 0.5)
    assert state["residual"].tolist() == [0.5] * 4
    assert state["stage2.2"]["residual"].tolist() == [1.0] * 2
    state = {"worker": np.ones(4, np.float32), "server": np.ones(4, np.float32)}
    prescale(state, parse("int8 | ef21"), 0.5)
    assert (state["worker"][0], state["server"][0]) == (0.5, 1.0)


@pytest.mark.parametrize(
    "compressor", [parse("int8") | Silent(), parse("topk") | Silent()], ids=str
)
def test_the_kit_finds_what_is_not_named(compressor):
    check = Named(check_gradient_units)
    with pytest.raises(CheckFailed, match=r"\['past'\] were multiplied|of \['past'\]"):
        check_compressor(compressor, [check])


@pytest.mark.parametrize(
    "spec",
    [
        "topk(ratio=0.1) | ef", "fp16 | ef", "powersgd | ef", "acpsgd | ef", "int8 | ef21",
        "topk(ratio=0.1) | momentum_correction", "int4 | hadamard | ef",
    ],
)  # fmt: skip
def test_the_kit_agrees_with_what_is_named(spec):
    check_compressor(spec, [Named(check_gradient_units)])
    check_compressor(parse("int8") | Heavy(), [Named(check_gradient_units)])


class Levelled(Heavy):
    """Remembers a number, or one for each of a few buckets: not what a tensor's array is."""

    buckets: int = option(0, ge=0, doc="how many")

    def compress(self, x, ctx):
        largest = [float(abs(piece).max()) for piece in np.array_split(x, self.buckets or 1)]
        ctx.state["past"] = np.array(largest, np.float32) if self.buckets else largest[0]
        return self.wrapped_compressor.compress(x, ctx)


def test_numbers_fit_and_the_kit_finds_arrays_of_other_shapes():
    compressor, (state, _) = trained(parse("int8") | Levelled())
    kept = dict(state)
    assert kept.keys() == {"past"}
    assert fit(state, str(compressor), compressor, N, 2) == []
    assert state == kept
    check_compressor(compressor, [Named(check_gradient_units)])
    with pytest.raises(CheckFailed, match=r"\['past'\] is an array of shape \[4\]"):
        check_compressor(parse("int8") | Levelled(buckets=4), [Named(check_gradient_units)])


@pytest.mark.parametrize(
    ("before", "after", "kept", "forgotten"),
    [
        ("topk | momentum_correction", "topk(ratio=0.1) | momentum_correction", {"u", "v"}, []),
        ("int8 | ef21", "int8(bucket=64) | ef21", {"worker", "server"}, []),
        ("int8 | ef21", "int8 | ef21", {"worker", "server"}, []),
        ("int8 | ef21", "int4 | ef21", set(), ["server", "worker"]),
        ("topk | momentum_correction", "topk | ef", set(), ["u", "v"]),
        ("powersgd | ef", "powersgd | ef", {"residual", "right"}, []),
    ],
)
def test_memory_goes_on_where_nothing_but_options_changes(before, after, kept, forgotten):
    before, (state, _) = trained(before)
    held = copy.deepcopy(state)
    assert carry_over(state, before, parse(after), 2, True) == forgotten
    assert state.keys() == kept
    for name in kept:
        np.testing.assert_array_equal(state[name], held[name])


def test_a_plugins_memory_goes_on_in_the_share_that_is_compressed():
    class Dividing(Heavy):
        divides: bool = option(False, doc="whether averages divide first")

        def traits(self):
            return dataclasses.replace(super().traits(), predivide=self.divides)

    before, (state, _) = trained(parse("int8") | Dividing())
    held = state["past"].copy()
    assert carry_over(state, before, parse("int8") | Dividing(divides=True), 4, True) == []
    np.testing.assert_array_equal(state["past"], held / 4)


def test_factors_go_on_where_the_rank_changes():
    before, (state, _) = trained("powersgd(rank=8) | ef")
    factor = state["right"].copy()
    assert carry_over(state, before, parse("powersgd(rank=2) | ef"), 2, True) == []
    np.testing.assert_array_equal(state["right"], factor)
    assert carry_over(state, before, parse("acpsgd | ef"), 2, True) == ["right"]
    assert state.keys() == {"residual"}


def test_what_does_not_fit_is_told():
    _, (state, _) = trained("powersgd(rank=8) | ef")
    state["step"] = 3
    told = fit(state, "powersgd(rank=8) | ef", parse("powersgd(rank=2) | ef"), N, 2)
    assert told == ["keeps 2 of the 8 rows of its 'right'"]
    told = fit(state, "powersgd(rank=8) | ef", parse("topk | ef"), N + 1, 2)
    assert told == [
        "was saved by 'powersgd(rank=8) | ef'; 'topk | ef' forgets its ['right']",
        "has 2001 elements; its 'residual', float32[2000], is forgotten",
    ]
    assert state == {"step": 3}
    state = {"step": 1, "past": np.ones(3)}
    told = fit(state, "someone.elses:Plugin", parse("topk | ef"), N, 2)
    assert told == ["was saved by 'someone.elses:Plugin'; 'topk | ef' forgets its ['past']"]
    assert state == {"step": 1}


@pytest.mark.parametrize("spec", ["chosen_by_a_file:Topk | ef", "chosen_by_a_file\u02d0Topk | ef"])
def test_a_saved_spec_imports_no_module(tmp_path, monkeypatch, spec):
    ran = tmp_path / "ran"
    (tmp_path / "chosen_by_a_file.py").write_text(f"open({str(ran)!r}, 'x')")
    monkeypatch.syspath_prepend(tmp_path)
    state = {"step": 1, "past": np.ones(3)}
    (told,) = fit(state, spec, parse("topk | ef"), N, 2)
    assert told.endswith("'topk | ef' forgets its ['past']")
    assert not ran.exists()


def test_a_saved_spec_may_name_what_is_imported_already():
    place = f"{Heavy.__module__}:{Heavy.__qualname__}"
    state = {"step": 1, "past": np.ones(N, np.float32)}
    assert fit(state, f"int8(bucket=64) | {place}", parse(f"int8 | {place}"), N, 2) == []
    assert state.keys() == {"step", "past"}


@pytest.mark.parametrize("spec", ["int8 | ef21", "powersgd | ef"])
def test_nothing_is_left_of_a_tensor_of_another_size(spec):
    compressor, (state, _) = trained(spec)
    sums = np.ones(1000, np.float32)
    state |= {"step": 3, "stage2.0": {"sum": sums, "known": sums}}
    (told,) = fit(state, spec, compressor, N + 1, 2)
    assert "is forgotten" in told
    assert state == {"step": 3}


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("topk | momentum_correction", "u"), ("topk | momentum_correction", "v"),
        ("int8 | ef21", "worker"), ("int8 | ef21", "server"), ("int8 | ef", "residual"),
    ],
)  # fmt: skip
def test_memory_of_another_dtype_is_forgotten_before_a_step_fails_of_it(spec, name):
    for change, told in (
        (lambda array: array.astype(np.float64), "as float64"),
        (lambda array: array.astype(np.float16), "as float16"),
        (lambda array: array.astype(np.int32), "as int32"),
        (lambda array: np.float32(1), "as float"),
        (lambda array: 1.0, "as float"),
        (lambda array: {}, "as dict"),
    ):
        for after in (spec, f"{spec} | min_size(10)"):
            states = trained(spec)[1]
            for state in states:
                state[name] = change(state[name])
                text, *_ = fit(state, spec, parse(after), N, len(states))
                assert text.startswith(f"holds {name!r} {told}")
                assert text.endswith("forgotten")
                assert state.keys() <= {"step"}
            simulate(parse(after), [normal(1), normal(2)], states, step=3, shape=SHAPE)


def test_a_plugin_may_remember_what_is_no_float():
    place = f"{Heavy.__module__}:{Heavy.__qualname__}"
    for held in (np.ones(N, np.int32), 3, np.float64(3), np.ones(N, np.float32)):
        state = {"step": 1, "past": held}
        assert fit(state, None, parse(f"int8 | {place}"), N, 2) == []
        assert state["past"] is held
    state = {"step": 1, "past": np.ones(N)}
    (told,) = fit(state, None, parse(f"int8 | {place}"), N, 2)
    assert told == f"holds 'past' as float64[{N}]; all but its step is forgotten"
    assert state == {"step": 1}


def test_rows_that_are_all_kept_are_told_nobody():
    spec = "powersgd(rank=2) | ef"
    _, (state, _) = trained(spec)
    kept = copy.deepcopy(state)
    assert fit(state, spec, parse("powersgd(rank=8) | ef"), N, 2) == []
    np.testing.assert_equal(state, kept)


def test_what_fits_is_told_nobody():
    compressor, (state, _) = trained("topk(ratio=0.1) | ef")
    kept = copy.deepcopy(state)
    assert fit(state, str(compressor), compressor, N, 2) == []
    assert fit(state, None, compressor, N, 2) == []
    assert fit(state, "topk(ratio=0.5) | ef", compressor, N, 2) == []
    np.testing.assert_equal(state, kept)


@pytest.mark.parametrize("spec", ["topk(ratio=0.1) | ef", "fp16 | ef"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_is_held_back_of_a_mean_is_the_same_among_other_ranks(spec, size):
    compressor, states = trained(spec, size=3)
    new, _ = merged(states, spec, compressor, size)
    # A compressor that divides first holds back shares of the mean, which add up to it.
    divided = compressor.traits().predivide
    before = sum(s["residual"].astype(float) for s in states) / (1 if divided else 3)
    after = new["residual"] * (size if divided else 1)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("spec", ["int4 | ef", "fp16 | ef", "int8 | ef(dtype='int8')"])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("average", [True, False])
def test_so_is_what_is_held_back_of_means_and_sums_of_shards(spec, size, average):
    compressor, states = trained(spec, size=3)
    held = np.linspace(-1, 1, 700).astype(np.float32)
    states[1]["stage2.1000"] = {"step": 3, "residual": held}
    without, _ = merged([s | {"stage2.1000": {}} for s in states], spec, compressor, size, average)
    found, told = merged(states, spec, compressor, size, average)
    more = found["residual"] - without["residual"]
    if not average or compressor.traits().predivide:  # or every rank's is divided once more
        more *= size
    np.testing.assert_allclose(more[1000:1700], held, atol=1e-5)
    assert not more[:1000].any()
    assert not more[1700:].any()
    assert told == []


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("x", np.ones(3, np.float32)), ("-3", np.ones(3, np.float32)), ("1.2", np.ones(3)),
        ("1999", np.ones(3)), ("0", np.ones((2, 3))), ("0", 1.0), ("0", None), ("", np.ones(3)),
        ("03", np.ones(3)), ("9" * 5000, np.ones(3)),
    ],
)  # fmt: skip
def test_what_a_file_tells_of_sums_may_be_anything(key, held):
    compressor, (state, _) = trained("int4 | ef")
    before = state["residual"].copy()
    for part in ({"residual": held}, held):
        told = state | {f"stage2.{key}": part}
        resize(told, compressor, 2, 2, average=True)
        np.testing.assert_array_equal(told["residual"], before)


ONES = np.ones(500, np.float32)
SHARD = "shard.500.1000.2000.2.0123abcd"


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("shard.0", ONES), ("shard.500.1000.2000.2", ONES), (f"{SHARD}0", ONES), (SHARD, 1.0),
        (SHARD, ONES[:499]), (SHARD, ONES.reshape(2, 250)), (SHARD, None),
        ("shard.500.1000.2001.2.0123abcd", ONES), ("shard.500.1000.2000.0.0123abcd", ONES),
        ("shard.1000.500.2000.2.0123abcd", ONES), ("shard.1501.2001.2000.2.0123abcd", ONES),
        (f"shard.500.1000.{10**17}.2.0123abcd", ONES), (f"shard.{'9' * 5000}.2.2.2.0123abcd", ONES),
        ("shard.0500.1000.2000.2.0123abcd", ONES), ("shard.500.1000.-9.2.0123abcd", ONES),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_what_a_file_tells_of_shards_may_be_anything(key, held, whole):
    compressor, (state, _) = trained("int4 | ef")
    before = state.pop("residual").copy()
    if whole:
        state["residual"] = before.copy()
    elif "2001" in key:
        return  # it may be of a tensor of that size
    for part in ({"residual": held}, held):
        told = state | {key: part}
        resize(told, compressor, 2, 2, average=True)
        assert told.keys() == {*state} - {"step"}
        if whole:
            np.testing.assert_array_equal(told["residual"], before)


def test_no_residual_is_made_of_nothing():
    state = {"step": 1, "stage2.0": {"residual": np.empty(0, np.float32)}}
    resize(state, parse("int4 | ef"), 2, 3, average=True)
    assert state == {"step": 1}


def test_what_is_held_back_of_shards_over_two_levels_is_in_the_hosts_units():
    """Two hosts of two ranks: a mean inside a host is of two, that between hosts of two more."""
    sums = np.full(100, 3.0, np.float32)
    state = {SHARD: {"residual": ONES, "stage2.200": {"residual": sums}}}
    for average, times, of_sums in ((True, 2.0, 4.0), (False, 1.0, 1.0)):
        found = owed(state, parse("int4 | ef"), 4, average)["residual"]
        expected = np.zeros(2000)
        expected[500:1000] = times
        expected[700:800] += 3 * of_sums
        np.testing.assert_array_equal(found, expected)
    assert state[SHARD].keys() == {"residual", "stage2.200"}


def test_of_shards_of_another_size_or_an_older_version_nothing_is_left():
    for spec in ("int4 | ef", "int8 | ef"):
        state = {"step": 3, "shard.0": {"residual": ONES}}
        (told,) = fit(state, spec, parse("int4 | ef"), 2000, 4)
        assert told == "is of a Ringlet that told no elements of ['shard.0'], which are forgotten"
        assert state == {"step": 3}
        state = {"step": 3, SHARD: {"residual": ONES}}
        (told,) = fit(state, spec, parse("int4 | ef"), 3000, 4)
        assert told == "has 3000 elements; that of shards of 2000 is forgotten"
        assert state == {"step": 3}
        state = {"step": 3, SHARD: {"residual": ONES}, "shard.0": {"stage2.0": {}}}
        assert fit(state, spec, parse("int4 | ef"), 2000, 4) == []
        assert state.keys() == {"step", SHARD if spec == "int4 | ef" else "residual"}


def test_what_other_ranks_can_not_go_on_with_over_two_levels_is_told():
    for spec in ("int8 | ef21", "topk | momentum_correction"):
        _, (state, _) = trained(spec)
        found, told = merged([{SHARD: state}] * 4, spec, parse(spec), 2)
        assert told == [f"was reduced over two levels; its {sorted(state)} are forgotten"]
        assert found == {}
    spec = "int4 | ef"
    found, told = merged([{"shard.0": {"residual": ONES}}] * 4, spec, parse(spec), 2)
    assert (found, told) == ({}, ["was reduced over two levels; its ['residual'] are forgotten"])
    found, told = merged([{SHARD: {"residual": ONES}}] * 4, spec, parse(spec), 2)
    assert told == []
    assert found["residual"][500:1000].tolist() == [2.0] * 500


@pytest.mark.parametrize(
    ("after", "average", "factor"),
    [("int8 | ef", True, 1.0), ("fp16 | ef", True, 0.25), ("fp16 | ef", False, 1.0)],
)
def test_another_spec_goes_on_with_what_is_held_back_of_sums(after, average, factor):
    _, (state, _) = trained("int4 | ef")
    before, held = state["residual"].copy(), np.ones(700, np.float32)
    state["stage2.1000"] = {"residual": held, "step": 3}
    assert carry_over(state, parse("int4 | ef"), parse(after), 4, average) == []
    before[1000:1700] += held * np.float32(4 if average else 1)  # a mean among four ranks
    np.testing.assert_allclose(state["residual"], before * np.float32(factor), rtol=1e-6)
    assert not any(key.startswith("stage2") for key in state)


def test_what_no_spec_can_write_goes_on_among_other_ranks():
    class Local(Heavy):
        """Nothing else, where no import finds it."""

    compressor, states = trained(parse("int8") | Local(), size=3)
    new, _ = merged(states, str(compressor), compressor, 2)
    np.testing.assert_allclose(new["past"], sum(s["past"] for s in states) / 3, atol=1e-6)


def test_momenta_and_estimates_go_on_among_other_ranks():
    spec = "topk(ratio=0.1) | momentum_correction"
    compressor, states = trained(spec, size=3)
    new, _ = merged(states, spec, compressor, 2)
    for name in ("u", "v"):
        np.testing.assert_allclose(new[name], sum(s[name] for s in states) / 3, atol=1e-6)
    compressor, states = trained("int8 | ef21", size=3)
    states[0]["server"] += 1  # as if sums in shards were behind
    new, _ = merged(states, "int8 | ef21", compressor, 2)
    np.testing.assert_array_equal(new["worker"], new["server"])
    np.testing.assert_allclose(new["worker"], sum(s["worker"] for s in states) / 3, atol=1e-6)
    for spec, after in (("int8 | ef21", parse("int8 | ef")), ("someone.elses:Plugin", compressor)):
        told = f"was saved by {spec!r}; {str(after)!r} forgets its ['server', 'worker']"
        assert merged(states, spec, after, 2) == ({}, [told])
    states[1]["worker"] = states[1]["worker"][:-1]
    _, told = merged(states, "int8 | ef21", compressor, 2)
    assert told == ["has another size on some ranks; its ['worker'] are forgotten"]


@pytest.mark.parametrize("spec", ["int8 | ef", "topk(ratio=0.1) | ef", "momentum_correction"])
@pytest.mark.parametrize("average", [True, False])
def test_among_other_ranks_a_rank_keeps_what_is_in_units_of_its_gradient(spec, average):
    compressor, states = trained(spec if "ef" in spec else f"topk(ratio=0.1) | {spec}")
    for state in states:
        units = compressor.traits().gradient_units
        before = {name: np.copy(state[name]) for name in units if name in state}
        assert before
        state["stage2.0"] = {"sum": np.ones(3, np.float32)}  # a server's
        resize(state, compressor, 2, 3, average)
        assert set(state) - {"step"} == set(before)
        for name, array in before.items():
            np.testing.assert_array_equal(state[name], array)


def test_among_other_ranks_a_share_of_the_mean_is_another_share():
    compressor, (state, _) = trained("shared_int | ef")
    before = state["residual"].copy()
    resize(state, compressor, 2, 4, average=True)
    expected = before / 2 if compressor.traits().predivide else before
    np.testing.assert_allclose(state["residual"], expected, rtol=1e-6)


def test_among_other_ranks_factors_that_all_had_in_common_begin_anew():
    compressor, (state, _) = trained("powersgd(rank=2) | ef")
    assert state.keys() & {"left", "right"}
    resize(state, compressor, 2, 2, average=True)
    assert not state.keys() & {"left", "right"}
    assert "residual" in state


ALONE = [
    "topk(ratio=0.1) | ef21", "topk(ratio=0.1) | ef21 | min_size(10)", "int8 | ef21",
    "topk(ratio=0.1) | ef", "topk(ratio=0.1) | momentum_correction", "powersgd(rank=2) | ef",
    "acpsgd(rank=2) | ef", "onebit | server_ef", "int8 | ef(dtype='int8')",
]  # fmt: skip


@pytest.mark.parametrize("spec", ALONE)
def test_among_other_ranks_all_get_the_same_results(spec):
    compressor, states = trained(spec, size=3)
    for state in states[:2]:  # the third is lost, and another one comes
        resize(state, compressor, 3, 3, average=True)
    states[2] = {}
    for step in range(3, 6):
        gradients = [normal(9 * step + r) for r in range(3)]
        results = simulate(compressor, gradients, states, step, shape=SHAPE)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("spec", ALONE[:3])
def test_among_other_ranks_estimates_whose_mean_nobody_knows_begin_anew(spec):
    compressor, (state, _) = trained(spec)
    assert state.keys() & {"worker", "server"}
    resize(state, compressor, 3, 2, average=True)
    assert state.keys() <= {"step"}


def test_in_another_order_elements_keep_what_is_owed_to_them():
    index, compressor = np.arange(6)[::-1], parse("block_topk(ratio=0.1) | ef")
    state = {"step": 3, "residual": np.arange(6, dtype=np.float32)}
    state["stage2.2"] = {"residual": np.ones(2, np.float32), "step": 3}
    before = owed(copy.deepcopy(state), compressor, 2, average=True)["residual"]
    assert before[2:4].tolist() == [4.0, 5.0]
    assert reorder(state, compressor, index, 2) == []
    np.testing.assert_array_equal(state.pop("residual"), before[::-1])
    assert state == {"step": 3}
    factors = {"step": 3, "right": np.ones((2, 3), np.float32)}
    assert reorder(factors, parse("powersgd | ef"), index, 2) == ["right"]
    assert factors == {"step": 3}
