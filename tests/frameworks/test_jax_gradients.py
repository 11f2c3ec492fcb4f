"""ringlet.jax.reduce_gradients: an optax transformation whose state is a pytree of its own."""

from __future__ import annotations

import gc
import re
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from told_warnings import warned

import ringlet.jax as hvd
from ringlet.compressors import Compressor, Payload, Traits, resolve
from ringlet.compressors.modifiers.residuals import wide
from ringlet.compressors.testing.tools.simulate import simulate
from ringlet.jax import elastic
from ringlet.jax.carried_states import carrying_over
from ringlet.jax.held_state import flattened, merge_layouts, nested, store
from ringlet.jax.reduction_state import made_by_path
from ringlet.jax.tree_paths import paths_and_leaves
from ringlet.job.session import current
from ringlet.ring.rendezvous import epochs

pytestmark = pytest.mark.preloaded("jax")

SHAPES = {"dense": {"kernel": (60, 70), "bias": (70,)}, "out": (5000,)}
SPECS = (
    "none",
    "fp16",
    "int8 | ef",
    "int4 | ef(dtype='bf16')",
    "topk(ratio=0.1) | ef",
    "onebit | ef(dtype='int8')",
    "powersgd(rank=2) | ef",
    "acpsgd(rank=2) | ef",
    "randomk(ratio=0.1)",
    "int8 | ef21",
    "topk | momentum_correction",
    "topk(ratio=0.1) | ef | warmup(steps=2)",
    "onebit | server_ef",
)  # fmt: skip


def gradients(step, rank=None):
    numbers = np.random.default_rng([step, hvd.rank() if rank is None else rank])
    leaf = lambda shape: numbers.normal(size=shape).astype("float32")  # noqa: E731
    return jax.tree.map(leaf, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def trained(update, state, steps):
    results = []
    for step in steps:
        reduced, state = update(gradients(step), state)
        assert hvd.replicas_equal(reduced)
        results.append(bits(reduced))
    return results, state


def case_specs():
    results_are_those_of_a_simulated_engine(SPECS[::2])


def case_specs_between_these():
    results_are_those_of_a_simulated_engine(SPECS[1::2])


def results_are_those_of_a_simulated_engine(specs):
    """And the same compiled, eager and restored."""
    from orbax.checkpoint import StandardCheckpointer

    size = hvd.size()
    params = gradients(0, 0)
    found, middles = {}, {}
    for spec in specs:
        chosen = resolve(spec)
        transformation = hvd.reduce_gradients(spec)
        start = transformation.init(params)
        update = jax.jit(transformation.update)
        results, end = found[spec] = trained(update, start, range(4))
        assert int(end.step) == 4
        again, middles[spec] = trained(update, start, range(2))
        assert again == results[:2], spec
        if chosen.traits().combine == "gather" and size == 2:
            states = [{} for _ in range(size)]
            for step in range(4):
                given = [gradients(step, rank)["out"] for rank in range(size)]
                expected = simulate(chosen, given, states, step, "out")
                assert np.allclose(expected[0], np.frombuffer(results[step][-1], "float32"),
                                   rtol=1e-5, atol=1e-6), spec  # fmt: skip
    # Another process, or this one, goes on from a checkpoint: here without a program.
    folder = Path(tempfile.mkdtemp()) / "states"
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, list(middles.values()))
        checkpointer.wait_until_finished()
        empty = jax.tree.map(jnp.zeros_like, list(middles.values()))
        restored = checkpointer.restore(folder, empty)
    for (spec, (results, end)), middle in zip(found.items(), restored, strict=True):
        again, last = trained(hvd.reduce_gradients(spec).update, middle, range(2, 4))
        assert again == results[2:], spec
        assert bits(last) == bits(end), spec


def case_names():
    """Compressors are chosen, and residuals filed, by path."""
    routes = {"dense/*": "none", "out": "int8 | ef"}
    transformation = hvd.reduce_gradients(routes)
    state = transformation.init(gradients(0))
    if hvd.size() == 1:
        assert state.held == {}  # nothing is compressed
        return
    assert list(state.held) == ["out"]
    own, *of_shard = sorted(state.held["out"])
    assert own == "residual"
    assert len(of_shard) == (hvd.size() > 2)
    assert all(re.fullmatch(r"stage2\.\d+/residual", key) for key in of_shard)
    _, state = trained(jax.jit(transformation.update), state, range(2))
    chained = (optax.EmptyState(), {"inner": state})
    own = np.linalg.norm(np.concatenate(list(state.held["out"].values())))
    assert np.isclose(hvd.residual_norm(chained), own)
    assert own > 0
    assert float(hvd.residual_norm(optax.EmptyState())) == 0
    corrected = hvd.reduce_gradients("topk | momentum_correction")
    _, state = trained(jax.jit(corrected.update), corrected.init(gradients(0)), range(2))
    kept = [
        array for arrays in state.held.values() for key, array in arrays.items() if key[-1] == "v"
    ]
    assert np.isclose(hvd.residual_norm(state), own := np.linalg.norm(np.concatenate(kept)))
    assert own > 0
    listed = hvd.reduce_gradients("int8 | ef").init([jnp.ones(2000), (jnp.ones(3000), None)])
    assert sorted(listed.held) == ["0", "1/0"]
    shapes = jax.eval_shape(transformation.init, gradients(0))
    assert shapes.held["out"]["residual"].shape == (5000,)


def case_parameters_that_differ():
    """Whoever forgets to broadcast them is told so, in programs, loops of one, and outside."""

    given = np.ones((9, 3, 5), np.float32)

    def looped(step, params, state):
        return jax.lax.scan(step, (params, state), given)[0]

    def stepped(step, params, state):
        for x in given:
            (params, state), _ = step((params, state), x)
        return params, state

    def told_in(optimizer, train, first, later):
        def step(carry, x):
            params, state = carry
            updates, state = optimizer.update({"deep": {"w": x}, "b": x[0]}, state, params)
            return (optax.apply_updates(params, updates), state), 0.0

        run, texts = train(step), []
        params = {"deep": {"w": jnp.full((3, 5), float(first))}, "b": jnp.zeros(5)}
        with warned(texts):
            params, state = run(params, optimizer.init(params))
            params["b"] += later
            for _ in range(2):
                params, state = run(params, state)
            hvd.barrier()
        return texts, hvd.replicas_equal(params)

    for train in (
        lambda step: jax.jit(partial(looped, step)),
        lambda step: partial(stepped, jax.jit(step)),
        lambda step: partial(stepped, step),
    ):
        for first, later, words in (
            (0, 0, None),
            (hvd.rank(), 0, "'deep/w' differs between ranks after the first step"),
            (
                0,
                hvd.rank(),
                "'b' differs between ranks after 16 steps, so that their models drift "
                "apart: they were alike before",
            ),
        ):
            optimizer = optax.chain(hvd.reduce_gradients("int8 | ef"), optax.sgd(0.1))
            texts, alike = told_in(optimizer, train, first, later)
            wrong = words is not None and hvd.size() > 1
            assert alike is not wrong
            assert len(texts) == (wrong and hvd.rank() == 0), texts
            assert all(words in text for text in texts), texts


def case_patterns_without_a_match():
    """Patterns are held against all leaves, of which `init` tries those that remember only."""
    told = []
    with warned(told):
        for routes in (
            {"*/bias": "none", "*": "int8 | ef"},
            {"*/bais": "none", "*": "int8 | ef"},
        ):
            transformation = hvd.reduce_gradients(routes)
            trained(jax.jit(transformation.update), transformation.init(gradients(0)), range(2))
    assert len(told) == (hvd.rank() == 0 and hvd.size() > 1)
    assert all("'*/bais' matches none of the variables" in text for text in told)


def case_optax():
    """Chains, accumulation, loops: what is put around an optax transformation."""
    rank, size = hvd.rank(), hvd.size()
    target = jnp.arange(3000.0) / 3000

    def loss(params, noise):
        return ((params["w"] - target + noise) ** 2).sum()

    optimizer = optax.chain(
        optax.MultiSteps(
            hvd.reduce_gradients("topk(ratio=0.05) | ef"), 2
        ).gradient_transformation(),
        optax.adam(0.02),
    )

    @jax.jit
    def train(params, state):
        def step(carry, noise):
            params, state = carry
            grads = jax.grad(loss)(params, noise)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss(params, 0.0)

        noises = 0.01 * jax.random.normal(jax.random.key(rank), (300, 3000))
        return jax.lax.scan(step, (params, state), noises)

    params = hvd.broadcast_pytree({"w": jnp.full(3000, float(rank))})
    (params, _), losses = train(params, optimizer.init(params))
    assert losses[-1] < losses[0] / 20
    assert hvd.replicas_equal(params)
    total = hvd.reduce_gradients(op=hvd.Sum, gradient_predivide_factor=1.0)
    ones = {"a": jnp.ones(3), "b": None}
    reduced, _ = total.update(ones, total.init(ones))
    assert (reduced["a"].tolist(), reduced["b"]) == ([size] * 3, None)
    assert total.update({}, total.init({}))[0] == {}


def case_memory():
    """A state that is given away stays where it is; one that is kept stays what it is."""
    transformation = hvd.reduce_gradients("int8 | ef")
    grads = {"w": jnp.ones(200_000) * (1 + hvd.rank())}
    state = transformation.init(grads)
    update = jax.jit(transformation.update, donate_argnums=(0, 1))
    _, state = update(jax.tree.map(jnp.copy, grads), state)
    if hvd.size() > 1:
        where = state.held["w"]["residual"].unsafe_buffer_pointer()
        _, state = update(jax.tree.map(jnp.copy, grads), state)
        assert state.held["w"]["residual"].unsafe_buffer_pointer() == where
    kept, before = state, bits(state)
    jax.block_until_ready(jax.jit(transformation.update)(gradients(0), transformation.init(
        gradients(0))))  # fmt: skip
    jax.block_until_ready(jax.jit(transformation.update)(grads, kept))
    assert bits(kept) == before


def case_reduction():
    """Sums of 16-bit gradients accumulate in float32 where that is asked for."""
    values = np.random.default_rng(hvd.rank()).normal(size=4096).astype("float32")
    grads = {"w": jnp.asarray(values, "bfloat16")}
    every = np.asarray(hvd.allgather(grads["w"].astype("float32")[None]))
    exact = np.asarray(jnp.asarray(every.sum(0), "bfloat16"), "float32")
    for options in ({"reduction": "float32"}, {"precision": "bf16"}):
        transformation = hvd.reduce_gradients("none", op=hvd.Sum, **options)
        reduced, _ = jax.jit(transformation.update)(grads, transformation.init(grads))
        assert np.array_equal(np.asarray(reduced["w"], "float32"), exact), options
    with pytest.raises(ValueError, match="'float32', 'wire' or None"):
        hvd.reduce_gradients(reduction="float64")
    with pytest.raises(ValueError, match="loss scale"):
        hvd.reduce_gradients(precision="fp16")


BROKEN = []


class Breaking(Compressor):
    """Fails on rank 1 at step 1, once."""

    def traits(self):
        return Traits()

    def compress(self, x, ctx):
        if ctx.rank == 1 and ctx.step == 1 and not BROKEN:
            BROKEN.append(True)
            raise ArithmeticError("not today")
        return {"values": x.copy()}

    def decompress(self, payload: Payload, out, ctx):
        out[:] = payload["values"]


class Growing(Compressor):
    """Remembers more in later steps than in its first one."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        ctx.state["seen"] = np.zeros(ctx.step + 1, np.float32)
        return {"values": x.copy()}

    def decompress(self, payload: Payload, out, ctx):
        out[:] = payload["values"]


class Counting(Compressor):
    """Remembers a number, a 64-bit array, and one within another dict."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        ctx.state["calls"] = ctx.state.get("calls", 0) + 1
        seen = ctx.state.setdefault("seen", np.zeros(2, np.int64))
        seen += 1
        inside = ctx.state.setdefault("deep", {})
        inside["large"] = inside.get("large", 2.0**40) + 1
        assert inside["large"] == 2.0**40 + seen[0]
        return {"values": np.full_like(x, ctx.state["calls"])}

    def decompress(self, payload: Payload, out, ctx):
        out[:] = payload["values"]


class KeepsWhatIsNotZero(Compressor):
    """Remembers the largest value, and nothing of zeros."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        if x.any():
            ctx.state["largest"] = np.abs(x).max(keepdims=True)
        return {"values": x.copy()}

    def decompress(self, payload: Payload, out, ctx):
        out[:] = payload["values"]


def case_plugins():
    grads = {"w": jnp.ones(2000)}
    keeping = hvd.reduce_gradients(KeepsWhatIsNotZero())
    _, state = jax.jit(keeping.update)(grads, keeping.init(grads))
    assert state.held["w"]["largest"].tolist() == [1.0]
    counting = hvd.reduce_gradients(Counting())
    state = counting.init(grads)
    update = jax.jit(counting.update)
    for turn in range(3):
        reduced, state = update(grads, state)
        assert set(reduced["w"].tolist()) == {turn + 1}
    growing = hvd.reduce_gradients(Growing())
    state = growing.init(grads)
    update = jax.jit(growing.update)
    _, state = update(grads, state)
    with pytest.raises(ValueError, match=r"'w' now remembers 'seen' as float32\[2\]"):
        update(grads, state)


def case_errors():
    """What fails on one rank fails on all, alike; the step can be repeated from its state."""
    rank = hvd.rank()
    grads = {"w": jnp.ones(2000), "v": jnp.ones(3)}
    transformation = hvd.reduce_gradients({"w": Breaking(), "*": "none"})
    state = transformation.init(grads)
    update = jax.jit(transformation.update)
    _, state = update(grads, state)
    with pytest.raises(hvd.HorovodInternalError, match="not today") as caught:
        update(grads, state)
    assert hvd.allgather_object(type(caught.value).__name__)[0] == type(caught.value).__name__
    reduced, state = update(grads, state)
    assert set(reduced["w"].tolist()) == {1.0}
    odd = {"w": jnp.ones(2000 + rank)}
    plain = hvd.reduce_gradients()
    with pytest.raises(hvd.HorovodInternalError, match="'w' differs between ranks") as caught:
        jax.jit(plain.update)(odd, plain.init(odd))
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    with pytest.raises(hvd.HorovodInternalError, match="'w' differs between ranks"):
        hvd.reduce_gradients("int8 | ef").init(odd)
    late = plain.init(grads)._replace(step=jnp.int32(rank))
    with pytest.raises(hvd.HorovodInternalError, match="same step on every rank"):
        plain.update(grads, late)
    fed = hvd.reduce_gradients("int8 | ef")
    state = fed.init(grads)
    told = r"of other gradients: it remembers 'w', and these are 'v'\. .* optax\.lookahead"
    with pytest.raises(ValueError, match=told):
        fed.update({"v": jnp.ones(3)}, state)
    with pytest.raises(TypeError, match=r"comes from its init\(params\), not tuple"):
        fed.update(grads, ())
    complex_ones = {"z": jnp.ones(3000, "complex64") * (rank + 1j)}
    with pytest.raises(TypeError, match="gradient of 'z' is of dtype complex64"):
        plain.init(complex_ones)
    apart = optax.contrib.split_real_and_imaginary(optax.chain(fed, optax.sgd(1.0)))
    moved, _ = jax.jit(apart.update)(complex_ones, apart.init(complex_ones))
    np.testing.assert_allclose(moved["z"], -(hvd.size() - 1) / 2 - 1j, atol=1e-2)
    with pytest.raises(ValueError, match="unknown compressor"):
        hvd.reduce_gradients("int9")


def case_trees_that_differ():
    """Also of which one is empty, or new in a later step; and whoever catches that goes on."""
    one, two, none = {"w": jnp.ones(300)}, {"w": jnp.ones(300), "v": jnp.ones(2)}, {}
    for spec in ("none", "int8 | ef"):
        for jit in (jax.jit, lambda call: call):
            for before, odd, others in (
                ((), none, one),
                ((), one, none),
                ((one,), none, one),
                ((one,), two, one),
                ((one, two, one), {"u": jnp.ones(3)}, two),
            ):
                transformation = hvd.reduce_gradients(spec)
                update = jit(transformation.update)
                for tree in before:
                    update(tree, transformation.init(tree))
                own = odd if hvd.rank() == 1 else others
                state = hvd.reduce_gradients("none").init(own)
                with pytest.raises(hvd.HorovodInternalError, match="is there on rank") as told:
                    update(own, state)
                assert len(set(hvd.allgather_object(str(told.value).partition("\n")[0]))) == 1
                for tree in (one, {"new": jnp.ones(5)}, one):
                    mean, _ = update(tree, transformation.init(tree))
                    assert hvd.replicas_equal(mean)


def case_trees_that_all_ranks_know_out_of_turn():
    """Such as those of a layer that is frozen now and then; also where some ranks joined early."""
    rank, size = hvd.rank(), hvd.size()
    one, two = {"w": jnp.ones(300)}, {"w": jnp.ones(300), "v": jnp.ones(2)}
    for spec in ("none", "int8 | ef"):
        transformation = hvd.reduce_gradients(spec)
        states = {len(tree): transformation.init(tree) for tree in (one, two)}
        update = jax.jit(transformation.update)

        def step(tree, states=states, update=update):
            return update(tree, states[len(tree)])[0]

        for turns in (one, two, one, two), (two, one, one):
            for _ in range(2):
                for tree in turns:
                    step(tree)
            for odd in range(size):
                with pytest.raises(hvd.HorovodInternalError, match="'v' is there on rank"):
                    step(two if rank == odd else one)
                assert hvd.replicas_equal(step(two))
                assert hvd.replicas_equal(step(one))
            for _ in range(rank):
                step(two)
            hvd.join()


def case_a_rank_that_is_left_gives_back_what_it_held():
    """And several that come after it take it over, however few bits it was kept in."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    alone = sets[hvd.rank()]
    params, given = gradients(0, 0), gradients(5)
    paths = paths_and_leaves(params)[0]
    for spec in ("topk(ratio=0.1) | ef", "int8 | ef(dtype='bf16')", "onebit | ef(dtype='int8')"):
        among = hvd.reduce_gradients(spec)
        _, before = trained(jax.jit(among.update), among.init(params), range(2))
        left = hvd.reduce_gradients(spec, process_set=alone)
        with carrying_over([before]):
            state = left.init(params)
        assert int(state.step) == 2
        held = {path: np.array(arrays["residual"]) for path, arrays in state.held.items()}
        assert held.keys() == before.held.keys()
        if hvd.size() == 2:  # of three and more, what shards lack is in it too
            for path, arrays in before.held.items():
                assert np.array_equal(held[path], wide(nested(jax.tree.map(np.array, arrays))))
        for update in (left.update, jax.jit(left.update)):
            results, after = update(given, state)
            for path, got, own in zip(
                paths, jax.tree.leaves(results), jax.tree.leaves(given), strict=True
            ):
                owed = held[path].reshape(own.shape) if path in held else 0  # a small one: exact
                assert np.allclose(got, own + owed, rtol=1e-6), path
            assert hvd.residual_norm(after) == 0
            assert bits(update(given, after)[0]) == bits(given)
        with carrying_over([state]):
            again = among.init(params)
        assert int(again.step) == 2
        for path in held:
            arrays = nested(jax.tree.map(np.array, again.held[path]))
            assert np.array_equal(arrays["residual"], held[path])
        assert trained(among.update, again, [2])[0] == trained(jax.jit(among.update), again, [2])[0]
    for each in sets:
        hvd.remove_process_set(each)


def case_a_process_set_of_other_ranks():
    """A state is of as many ranks as the set had; who leaves it keeps what it held back."""
    rank, params = hvd.rank(), {"w": jnp.zeros(5000)}
    given = {"w": jnp.asarray(np.random.default_rng(rank).normal(size=5000), jnp.float32)}
    for spec in ("fp16 | ef", "topk(ratio=0.1) | ef"):
        pair = hvd.add_process_set([0, 1])
        among = hvd.reduce_gradients(spec, process_set=pair)
        _, first = among.update(given, among.init(params))
        with carrying_over([first]):
            state = among.init(params)
        hvd.remove_process_set(pair)
        other = hvd.add_process_set([0, 2])
        with carrying_over([state]):
            between = hvd.reduce_gradients(spec, process_set=other).init(params)
        hvd.remove_process_set(other)
        pair = hvd.add_process_set([0, 1])
        among = hvd.reduce_gradients(spec, process_set=pair)
        with carrying_over([between]):
            again = among.init(params)
        if rank < 2:
            assert np.abs(first.held["w"]["residual"]).max() > 0
            for one in (state, between, again):
                assert np.array_equal(one.held["w"]["residual"], first.held["w"]["residual"])
                assert one.present.tolist() == [2 if spec == "fp16 | ef" else 1]
                assert int(one.step) == 1
        elif between.held:
            assert not between.held["w"]["residual"].any()
        among.update(given, again)
        hvd.remove_process_set(pair)


def case_an_elastic_job_begins_from_a_checkpoint():
    """What its ranks held back goes on, whichever order a tree has its transformations in."""
    made = hvd.reduce_gradients("topk(ratio=0.1) | ef"), hvd.reduce_gradients("none")
    labels = {"w": "second", "b": "first"}
    optimizer = optax.multi_transform({"second": made[0], "first": made[1]}, labels)
    params = {"w": jnp.zeros(3000), "b": jnp.zeros(2000)}
    given = {"w": jnp.asarray(np.random.default_rng(hvd.rank()).normal(size=3000), jnp.float32)}
    given["b"] = jnp.ones(2000)
    _, saved = optimizer.update(given, optimizer.init(params))
    with pytest.raises(TypeError, match=r"write JaxState\(params, optimizer\)"):
        hvd.elastic.JaxState(params, saved)
    state = hvd.elastic.JaxState(params, optimizer)
    state.opt_state = saved
    found, elastic.is_elastic = elastic.is_elastic, lambda: True
    try:
        state.sync()
    finally:
        elastic.is_elastic = found
    assert state.held_back() > 0
    assert state.held_back() == float(hvd.residual_norm(saved))
    steps = [int(s.step) for s in jax.tree.leaves(state.opt_state, is_leaf=_is_ours) if _is_ours(s)]
    assert steps == [1, 1]
    optimizer.update(given, state.opt_state)


def case_a_newcomer_to_an_elastic_job_forgets_what_others_pay():
    """What a checkpoint held back, which they have gone on from."""
    optimizer = optax.chain(hvd.reduce_gradients("topk(ratio=0.1) | ef"), optax.sgd(1.0))
    params, told = {"w": jnp.zeros(3000)}, "have gone on from it, and pay it"
    given = {"w": jnp.asarray(np.random.default_rng(hvd.rank()).normal(size=3000), jnp.float32)}
    _, saved = optimizer.update(given, optimizer.init(params))
    state = hvd.elastic.JaxState(params, optimizer)
    state.opt_state = saved
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(elastic, "is_elastic", lambda: True)
        patched.setattr(epochs, "is_elastic", lambda: True)
        state.sync()
        held = state.held_back()
        assert held == float(hvd.residual_norm(saved)) > 0  # all have loaded it
        for _ in range(2):  # before the others have taken a step, and behind one
            if hvd.rank() == hvd.size() - 1:
                state = hvd.elastic.JaxState(params, optimizer)
                state.opt_state = saved
                with pytest.warns(UserWarning, match=told):
                    state.sync()
                held = 0.0
            else:
                state.sync()
            assert state.held_back() == held
            _, state.opt_state = optimizer.update(given, state.opt_state)
            held = state.held_back()
            assert held > 0


def _is_ours(value):
    return isinstance(value, hvd.ReduceGradientsState)


def case_the_state_of_another_rank():
    """Whoever broadcasts it, or loads rank 0's everywhere, is told so once."""
    transformation = hvd.reduce_gradients("topk(ratio=0.1) | ef")
    params = {"w": jnp.zeros(3000)}
    start = hvd.broadcast_pytree(transformation.init(params))  # of which nothing is held back yet
    given = {"w": jnp.asarray(np.random.default_rng(hvd.rank()).normal(size=3000), jnp.float32)}
    texts = []
    with warned(texts):
        for update in (jax.jit(transformation.update), transformation.update):
            _, own = update(given, start)
            update(given, own)
            assert own.owner.tolist() == [hvd.rank(), hvd.size()]
        assert not texts
        if hvd.size() == 2:  # of three and more, trees may differ between ranks
            _, after = update(given, hvd.broadcast_pytree(own))
            update(given, after)
            words = "is that of rank 0 of 2, and rank 1 of 2 goes on with it"
            assert len(texts) == hvd.rank()
            assert all(words in text for text in texts), texts


def case_the_state_of_a_job_of_other_ranks():
    """It goes on in units of the gradient, also where these are divided before; that is told."""
    size, rank = hvd.size(), hvd.rank()
    nothing = {"w": jnp.zeros(3000)}
    for spec in ("topk(ratio=0.01) | ef", "fp16 | ef"):
        transformation, texts = hvd.reduce_gradients(spec), []
        state = transformation.init(nothing)
        share = 1 / (size + 1) if spec == "fp16 | ef" else 1.0  # among one rank more
        held = {"w": {key: jnp.full(a.shape, share) for key, a in state.held["w"].items()}}
        mark = jnp.full(state.present.shape, 1 + (spec == "fp16 | ef"), jnp.uint8)
        owner = jnp.array([rank, size + 1], jnp.int32)
        with warned(texts):
            sent, after = transformation.update(
                nothing, state._replace(held=held, present=mark, owner=owner)
            )
        (text,) = texts
        assert f"of rank {rank} of {size + 1}, and rank {rank} of {size} goes on" in text
        assert "may count twice" not in text
        share = 1 / size if spec == "fp16 | ef" else 1.0
        left = hvd.allreduce(after.held["w"]["residual"], op=hvd.Average, name="left") / share
        np.testing.assert_allclose(sent["w"] + left, np.ones(3000), rtol=1e-3)


def case_a_spec_that_remembers_nothing_goes_on():
    before = hvd.reduce_gradients({"w": "topk(ratio=0.1) | ef", "*": "none"})
    given = jax.tree.map(jnp.asarray, {"w": gradients(0)["out"], "b": np.ones(2000, np.float32)})
    _, state = before.update(given, before.init(given))
    texts = []
    with warned(texts):
        hvd.reduce_gradients({"w": "topk(ratio=0.2) | ef", "*": "none"}).update(given, state)
        assert not texts
        after = hvd.reduce_gradients("fp16")
        held = state
        for _ in range(2):
            _, state = after.update(given, state)
            assert hvd.residual_norm(state) == 0
    _, again = before.update(given, state)  # no later spec adds what is long out of date
    _, anew = before.update(given, before.init(given)._replace(step=state.step))
    assert bits(again.held) == bits(anew.held)
    assert hvd.size() == 1 or hvd.residual_norm(held) > 0
    assert len(texts) == (hvd.rank() == 0 and hvd.size() > 1), texts  # alone, all is given back
    for text in texts:
        assert "holds ['residual'] of 'w', of which 'fp16' makes nothing: " in text


def case_what_one_spec_held_back_another_delivers():
    """Also where one of them divides by the number of ranks before it compresses."""
    if hvd.size() == 1:
        return  # nothing is held back
    given = {"w": jnp.asarray(np.random.default_rng(hvd.rank()).normal(size=5000), jnp.float32)}
    nothing = {"w": jnp.zeros(5000)}
    topk, cast = (hvd.reduce_gradients(s) for s in ("topk(ratio=0.01) | ef", "fp16 | ef"))
    for before, after, factor in ((topk, cast, 1 / hvd.size()), (cast, topk, hvd.size())):
        sent, state = before.update(given, before.init(given))
        held = state.held["w"]["residual"]
        for _ in range(2):  # what is converted once stays what it is
            more, state = jax.jit(after.update)(nothing, state)
            sent = jax.tree.map(jnp.add, sent, more)
        left = np.asarray(state.held["w"]["residual"])
        kept = np.flatnonzero(left)
        if after is topk:
            assert len(kept) > 4000
            np.testing.assert_allclose(left[kept], np.asarray(held)[kept] * factor, rtol=1e-6)
        else:
            owed = hvd.allreduce(given["w"], op=hvd.Average, name="owed")
            np.testing.assert_allclose(sent["w"], owed, atol=5e-3)
            assert np.abs(left).max() < 1e-2


def case_residuals_go_on_with_another_spec():
    """Also where it remembers in other arrays than the one before, and the moments of Adam stay."""
    size, rank = hvd.size(), hvd.rank()
    if size == 1:
        return  # nothing is held back
    params = {"w": jnp.zeros((50, 60)), "b": jnp.zeros(3)}
    row = np.random.default_rng(rank).normal(size=(50, 60))
    given = {"w": jnp.asarray(row, jnp.float32), "b": jnp.ones(3)}
    optimizers = {
        spec: optax.chain(hvd.reduce_gradients(spec), optax.adam(0.1))
        for spec in ("topk(ratio=0.01) | ef", "powersgd(rank=2) | ef", "int8 | ef(dtype='bf16')",
                     "fp16 | ef", "onebit | ef(dtype='int8')", "none")
    }  # fmt: skip
    (first, one), *others = optimizers.items()
    _, state = one.update(given, one.init(params), params)
    held = np.array(state[0].held["w"]["residual"])
    assert np.abs(held).max() > 1
    texts = []
    with warned(texts):
        for spec, other in others:
            if spec in ("powersgd(rank=2) | ef", "int8 | ef(dtype='bf16')"):
                with pytest.raises(ValueError, match=r"no room\. .*hvd\.carry_over\(state, transf"):
                    other.update(given, state, params)
            taken = hvd.carry_over(state, other, params)
            assert bits(taken[1]) == bits(state[1])
            assert int(taken[0].step) == 1
            if spec == "none":
                continue
            assert not texts
            share = size if spec == "fp16 | ef" else 1
            np.testing.assert_allclose(taken[0].held["w"]["residual"] * share, held, rtol=1e-6)
            update = jax.jit(other.update)
            for _ in range(2):
                _, taken = update(given, taken, params)
            assert int(taken[0].step) == 3
            if size == 2:  # of three and more, what shards lack is in it too
                made = made_by_path(taken[0].held, np.asarray(taken[0].present))["w"]
                kept = wide(nested(jax.tree.map(np.array, made)))
                back = hvd.carry_over(taken, one, params)[0].held["w"]["residual"]
                np.testing.assert_allclose(back, kept * share, rtol=1e-6)
    words = "carry_over forgets ['residual'] of 'w', of which the new compression makes nothing"
    assert len(texts) == (rank == 0), texts
    assert all(words in text for text in texts)
    with pytest.raises(ValueError, match="is of another optimizer than the transformation"):
        hvd.carry_over(state, optax.chain(hvd.reduce_gradients(first), optax.sgd(0.1)), params)
    with pytest.raises(ValueError, match="holds nothing of reduce_gradients"):
        hvd.carry_over(optax.adam(0.1).init(params), one, params)
    with pytest.raises(RuntimeError, match=r"carry_over inside jax\.jit"):
        jax.jit(lambda state: hvd.carry_over(state, one, params))(state)


def case_adasum_of_casts():
    """Steps of different directions add up; what travels is of 16 bits, and what comes is not."""
    rank, size = hvd.rank(), hvd.size()
    given = {"w": jnp.zeros((size, 2)).at[rank].set(jnp.array([2.0, 1e-9]))}
    for spec, least in (("none", 1e-9), ("fp16", 0.0 if size > 1 else 1e-9)):
        transformation = hvd.reduce_gradients(spec, op=hvd.Adasum)
        found, _ = transformation.update(given, transformation.init(given))
        assert found["w"].dtype == jnp.float32
        np.testing.assert_allclose(found["w"], [[2.0, least]] * size, rtol=1e-6)
    with pytest.raises(ValueError, match="op=Adasum needs compression 'none', 'fp16' or 'bf16'"):
        hvd.reduce_gradients("int8 | ef", op=hvd.Adasum)


def case_no_gradients_on_any_rank():
    transformation = hvd.reduce_gradients("int8 | ef")
    updates, state = transformation.update({}, transformation.init({}))
    assert updates == {}
    assert int(state.step) == 1


def case_init_on_some_ranks_only():
    """Whoever goes on without ``init`` meets those that call it, and all are told."""
    rank = hvd.rank()
    grads = {"w": jnp.ones(2000)}
    forgetful = hvd.reduce_gradients("none" if rank else "int8 | ef")
    for turn in range(2):  # the second one has programs that are compiled
        with pytest.raises(hvd.HorovodInternalError, match="'w' differs between ranks") as caught:
            jax.jit(forgetful.update)(grads, forgetful.init(grads))
        told = set(hvd.allgather_object(str(caught.value)))
        assert len(told) == 1, turn
        assert "rank 0: float32[2000], int8 | ef; rank 1: float32[2000], none" in told.pop()
    state = hvd.reduce_gradients("int8 | ef").init(grads)
    again = hvd.reduce_gradients("int8 | ef")
    with pytest.raises(hvd.HorovodInternalError, match="rank 0: init; rank 1: update") as caught:
        again.update(grads, state if rank else again.init(grads))
    assert "make the state by init on every rank, or restore" in str(caught.value)
    reduced, _ = again.update(grads, again.init(grads))
    assert hvd.replicas_equal(reduced)


def declared_after(count):
    """Return how many groups engines know at most, at the latest when they are ``count``."""
    for _ in range(100):
        gc.collect()
        hvd.barrier()  # a release travels like any message: one that all have sent is there soon
        known = max(hvd.allgather_object(len(current().engine._worker._groups)))
        if known <= count:  # which all ranks see at once: none waits for others in a barrier
            break
    return known


def case_dropped():
    """The engine keeps nothing of transformations that nobody holds any more."""
    grads, before = {"w": jnp.ones(2000)}, declared_after(0)
    for turn in range(6):
        transformation = hvd.reduce_gradients("int8 | ef")
        transformation.update(grads, transformation.init(grads))
        del transformation
        if turn % 2 == hvd.rank() % 2:  # collectors run when they please, on each rank
            gc.collect()
    assert declared_after(before) <= before


def case_outside_of_the_process_set():
    """The rank that takes no part keeps its gradients, at once and in a program."""
    rank, inside = hvd.rank(), hvd.size() - 1
    chosen, grads = hvd.add_process_set(range(inside)), {"w": jnp.full(2000, rank + 1.0)}
    expected = (inside + 1) / 2 if rank < inside else rank + 1.0
    for spec in ("none", "int8 | ef"):
        transformation = hvd.reduce_gradients(spec, process_set=chosen)
        state = transformation.init(grads)
        for update in (transformation.update, jax.jit(transformation.update)):
            reduced, state = update(grads, state)
            assert np.allclose(reduced["w"], expected, rtol=0.02)
        assert int(state.step) == 2
    hvd.remove_process_set(chosen)


def case_join():
    """A rank with fewer batches goes on with zeros."""
    size, rank = hvd.size(), hvd.rank()
    grads = {"w": jnp.ones(2000)}
    transformation = hvd.reduce_gradients("none", op=hvd.Sum)
    state = transformation.init(grads)
    update = jax.jit(transformation.update)
    for turn in range(2 + rank):
        reduced, state = update(grads, state)
        assert reduced["w"][0] == (size if turn < 2 else size - turn + 1)
    assert hvd.join() == size - 1


def case_a_rank_at_another_step():
    """What is drawn in common goes by the step: all ranks are told, and go on where they agree."""
    rank = hvd.rank()
    grads = {"w": jnp.full((50, 60), rank + 1.0)}
    for spec in ("randomk(ratio=0.2)", "int8 | hadamard", "none"):
        transformation = hvd.reduce_gradients(spec)
        state = transformation.init(grads)
        for update in (jax.jit(transformation.update), transformation.update):
            for _ in range(3):
                _, state = update(grads, state)
            for odd in (state.step + 1, state.step - 1):
                kept = state._replace(step=odd if rank == 1 else state.step)
                with pytest.raises(hvd.HorovodInternalError, match="'the step' differs") as told:
                    update(grads, kept)
                assert len(set(hvd.allgather_object(str(told.value)))) == 1
                mean, after = update(grads, state)
                assert hvd.replicas_equal(mean)
                assert int(after.step) == int(state.step) + 1
            first, _ = update(grads, state._replace(step=state.step - 2))  # all of them
            again, _ = update(grads, state._replace(step=state.step - 2))
            assert bits(first) == bits(again)
            assert hvd.replicas_equal(first)


def case_steps_after_join():
    """Ranks that had fewer batches go on from the step of those that had most."""
    size, rank = hvd.size(), hvd.rank()
    grads = {"w": jnp.full((50, 60), rank + 1.0)}
    for spec in ("randomk(ratio=0.2)", "int8 | hadamard"):
        transformation = hvd.reduce_gradients(spec)
        state, update = transformation.init(grads), jax.jit(transformation.update)
        for epoch in range(3):
            for turn in range(2 + rank):
                mean, state = update(grads, state)
                if turn == 0:
                    assert hvd.replicas_equal(mean)
                    assert int(state.step) == epoch * (size + 1) + 1
                    assert np.isclose(mean["w"].mean(), (size + 1) / 2, rtol=0.01), (spec, epoch)
            hvd.join()


def case_numbers_and_arrays_of_numpy():
    """Outside of jit, too, they are what JAX makes of them: float32 unless x64 is on."""
    size, own = hvd.size(), hvd.rank() + 1.0
    gradients = {"array": np.full(5000, own), "number": own, "scalar": np.float64(own)}
    for spec in ("none", "int8 | ef"):
        reduction = hvd.reduce_gradients(spec, op=hvd.Sum)
        reduced, _ = reduction.update(gradients, reduction.init(gradients))
        for leaf in jax.tree.leaves(reduced):
            assert leaf.dtype == "float32"
            np.testing.assert_allclose(leaf, size * (size + 1) / 2, rtol=0.01)


def case_nnx():
    """Its optimizer shows parameters as variables, and gradients as what these hold."""
    from flax import nnx

    model = nnx.Linear(60, 70, rngs=nnx.Rngs(0))
    spec = {"kernel": "int8 | ef", "*": "none"}
    chained = optax.chain(hvd.reduce_gradients(spec), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, chained, wrt=nnx.Param)
    x = np.random.default_rng(hvd.rank()).normal(size=(4, 60)).astype("float32")
    for _ in range(2):
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))
    assert hvd.replicas_equal(nnx.to_pure_dict(nnx.state(model)))
    shown = nnx.state(model)
    for tree in (shown, nnx.to_pure_dict(shown)):
        assert paths_and_leaves(tree)[0] == ["bias", "kernel"]


# How JAX traces and compiles, and what ranks compare, is the same whoever and how many they are.
SIZES = {
    case_parameters_that_differ: (1, 2),
    case_patterns_without_a_match: (1, 2),
    case_optax: (1, 2),
    case_memory: (1, 2),
    case_plugins: (2,),
    case_trees_that_differ: (2,),
    case_dropped: (2,),
    case_numbers_and_arrays_of_numpy: (2,),
    case_nnx: (2,),
    # What several ranks do to each other.
    case_names: (1, 2, 3),
    case_errors: (2, 3),
    case_trees_that_all_ranks_know_out_of_turn: (3,),
    case_a_rank_that_is_left_gives_back_what_it_held: (2, 3),
    case_a_rank_at_another_step: (2, 3),
    case_steps_after_join: (2, 3),
    case_a_process_set_of_other_ranks: (3,),
    case_an_elastic_job_begins_from_a_checkpoint: (2,),
    case_a_newcomer_to_an_elastic_job_forgets_what_others_pay: (2, 3),
    case_the_state_of_another_rank: (2, 3),
    case_the_state_of_a_job_of_other_ranks: (2,),
    case_init_on_some_ranks_only: (2, 3),
    case_outside_of_the_process_set: (2, 3),
}
JOBS = [("gloo", 2), ("mpi", 3), ("alone", 1)]


def test_on_ranks(case, transport, size, run_case):
    run_case(case, transport, size)


def test_states_as_arrays():
    state = {
        "residual": np.arange(3, dtype=np.float32),
        "stage2.0": {"residual": np.ones(2, np.float32), "bits": np.ones((2, 2), np.uint64)},
        "calls": 7, "mean": 0.5, "on": True, "step": 9,
    }  # fmt: skip
    arrays = flattened(state)
    assert arrays["stage2.0/bits:uint64"].shape == (2, 2, 8)
    again = nested(arrays)
    assert again["calls"] == 7
    assert (again["mean"], again["on"]) == (0.5, True)
    assert again["stage2.0"]["bits"].tolist() == [[1, 1], [1, 1]]
    assert np.shares_memory(again["residual"], state["residual"])
    into = {key: np.full_like(array, 9) for key, array in sorted(arrays.items())}
    into["later"] = np.ones(2, np.float32)
    present = np.zeros(len(into), np.uint8)
    store(state, into, present, "it")
    assert present.tolist() == [1] * len(arrays) + [0]
    assert into["later"].tolist() == [0, 0]
    assert all(np.array_equal(into[key], arrays[key]) for key in arrays)
    with pytest.raises(ValueError, match="no room"):
        store(state, {}, present[:0], "it")
    with pytest.raises(ValueError, match="another shape in later steps"):
        merge_layouts([{"a": np.ones(2)}, {"a": np.ones(3)}])


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("DistributedOptimizer", "reduce_gradients"),
        ("DistributedGradientTape", "reduce_gradients"),
        ("broadcast_parameters", "broadcast_pytree"),
        ("broadcast_optimizer_state", "broadcast_pytree"),
        ("DiLoCo", "reduce_gradients"),
        ("OneBitAdam", "reduce_gradients"),
        ("Compression", "reduce_gradients"),
    ],
)
def test_names_of_other_adapters_are_answered_with_those_of_this_one(name, word):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; here: .*hvd\.{word}\("):
        getattr(hvd, name)
    assert callable(getattr(hvd, word))
