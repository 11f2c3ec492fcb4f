"""ringlet.tensorflow: tapes, optimizers, embeddings, checkpoints and batch norm on real ranks."""

from __future__ import annotations

import ast
import gc
import re
import tempfile
import threading
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from told_warnings import warned

import ringlet
import ringlet.tensorflow as hvd
from ringlet.job.session import current
from ringlet.ring.rendezvous import epochs
from ringlet.shared.gradients.loop_reducers import reducers_of
from ringlet.tensorflow.keras import PartialDistributedOptimizer
from ringlet.tensorflow.ops import topology_ops
from ringlet.tensorflow.tape import reducer_of_tape

pytestmark = pytest.mark.preloaded("tensorflow")

SPECS = (None, "fp16", "bf16", "int8 | ef", "topk(ratio=0.05) | ef", "powersgd(rank=2) | ef")


def function(body):
    return tf.function(body, autograph=False)


def dense_model(seed=0, width=128, policy="float32"):
    keras.utils.set_random_seed(seed)
    # Layers are numbered anew, so that ranks name them alike.
    keras.backend.clear_session(free_memory=False)
    layers = [
        keras.Input((16,)),
        keras.layers.Dense(width, activation="relu", name="hidden", dtype=policy),
        keras.layers.Dense(4, name="out", dtype=policy),
    ]
    return keras.Sequential(layers, name="model")


def batch(rank, step=0, rows=8):
    x = tf.random.stateless_normal([rows, 16], [rank, step])
    return x, tf.random.stateless_normal([rows, 4], [rank, step + 1000])


def loss_of(model, data):
    return tf.reduce_mean(tf.square(tf.cast(model(data[0]), tf.float32) - data[1]))


def arrays(variables):
    return [np.array(v) for v in variables]


def local_mean_gradients(model, step=0):
    """What the average over ranks is, computed on this rank alone."""
    every = []
    for rank in range(hvd.size()):
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch(rank, step))
        every.append(tape.gradient(loss, model.trainable_variables))
    return [np.mean([np.array(g) for g in same], 0) for same in zip(*every, strict=True)]


def case_tape():
    model = dense_model()
    expected = local_mean_gradients(model)

    def gradients(**options):
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch(hvd.rank()))
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, model.trainable_variables)

    variants = [
        {},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"num_groups": 1},
        {"groups": [model.trainable_variables[:2]]},
        {"compression": hvd.Compression.none},
    ]
    for options in variants:
        for call in (gradients, function(gradients)):
            for got, want in zip(call(**options), expected, strict=True):
                assert np.allclose(got, want, atol=1e-6)
    for got, want in zip(gradients(op=hvd.Sum), expected, strict=True):
        assert np.allclose(got, want * hvd.size(), atol=1e-5)
    for spec in SPECS:
        got = gradients(compression=spec)
        assert got[1].shape == expected[1].shape
    routed = gradients(compression={"*bias": "none", "*": "topk(ratio=0.01)"})
    assert np.allclose(routed[1], expected[1], atol=1e-6)
    assert np.count_nonzero(routed[0]) < expected[0].size / 4
    nodes = [
        op.type
        for op in function(gradients).get_concrete_function().graph.get_operations()
        if op.type == "PyFunc"
    ]
    assert nodes == ["PyFunc"]


def case_tape_structures():
    rank, size = hvd.rank(), hvd.size()
    x, unused = tf.Variable(2.0, name="x"), tf.Variable(1.0, name="unused")
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        y = x * x * (rank + 1.0)
    factor = (size + 1) / 2
    assert tape.gradient(y, x).numpy() == pytest.approx(4 * factor)
    named = tape.gradient(y, {"a": x, "b": [unused]})
    assert named["a"].numpy() == pytest.approx(4 * factor)
    assert named["b"] == [None]
    watched = tf.constant(3.0)
    with tf.GradientTape() as inner:
        inner.watch(watched)
        z = watched * (rank + 1.0)
    assert hvd.DistributedGradientTape(inner).gradient(z, watched).numpy() == factor
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(TypeError, match=r"tf\.GradientTape"):
        hvd.DistributedGradientTape("tape")
    with pytest.raises(ValueError, match="predivide_factor needs op=Average"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)


def case_a_tape_whose_compression_changes():
    """What is held back under the former is told of, and can be handed over."""
    gradient = np.random.default_rng(hvd.rank()).normal(size=4000).astype("float32")

    def taped():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * gradient)
        return tape, loss

    def sent(spec):
        tape, loss = taped()
        return hvd.DistributedGradientTape(tape, compression=spec).gradient(loss, variable)

    for way in ("told", "handed over", "in turns"):
        variable = tf.Variable(np.zeros(4000, np.float32), name="x")
        specs = ["topk(ratio=0.1) | ef", "int8 | ef"]
        texts: list[str] = []
        total = np.zeros(4000)
        with warned(texts):
            if way == "in turns":
                for i in range(6):
                    sent(specs[i % 2])
            else:
                for _ in range(3):
                    total += sent(specs[0])
                if way == "handed over":
                    tapes = [
                        hvd.DistributedGradientTape(taped()[0], compression=spec) for spec in specs
                    ]
                    old, new = [hvd.CompressorState(tape, [variable]) for tape in tapes]
                    new.deserialize(old.serialize())
                for _ in range(2):
                    total += sent(specs[1])
        said = "was topk(ratio=0.1) | ef for 3 steps and is int8 | ef now: a residual of norm"
        assert [said in text for text in texts] == [True] * (way == "told" and hvd.rank() == 0)
        off = np.abs(total - np.asarray(hvd.allreduce(5 * gradient))).max()
        assert (off < 0.2) == (way == "handed over")


def case_outer_tape():
    """Penalties on reduced gradients have gradients, those of the mean over the ranks."""
    rank, size = hvd.rank(), hvd.size()
    table = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    w, unused = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    sources, rows = [w, unused, table], [0, 2, 2] if rank else [1, 1]

    def penalty(**options):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(w**3) * (rank + 1.0)
                loss += tf.reduce_sum(tf.gather(table, rows) ** 3)
            inner = hvd.DistributedGradientTape(inner, **options)
            of_w, none, of_table = inner.gradient(loss, sources)
            assert none is None
            # The last one is no part of it.
            total = tf.reduce_sum(of_w**2) + tf.reduce_sum(tf.convert_to_tensor(of_table) ** 2)
        return outer.gradient(total, [w, table])

    mean = (size + 1) / 2
    # Of the sum over ranks of penalties, each of which is of the same means.
    expected = [2 * 3 * mean * np.array([1.0, 4.0]) * 6 * np.array([1.0, 2.0]) * (rank + 1), None]
    counts = [np.bincount(r, minlength=3)[:, None] for r in ([1, 1], [0, 2, 2])]
    x = table.numpy()
    of_table = 3 * x**2 * (counts[0] + counts[1]) / size
    expected[1] = 2 * of_table * 6 * x * counts[rank]
    for run in (penalty, function(penalty)):
        found = run()
        assert np.allclose(found[0], expected[0])
        assert np.allclose(tf.convert_to_tensor(found[1]), expected[1])
    assert np.isfinite(penalty(compression="topk(ratio=0.5) | ef")[0]).all()
    with pytest.raises(LookupError, match=r"op=Adasum has no gradient"):
        penalty(op=hvd.Adasum)


def case_gradients_that_are_reduced_twice_are_told_of():
    """Sums count each rank's as often as there are ranks."""
    told = []
    v = tf.Variable(tf.ones([4, 6]), name="twice")

    def step(optimizer, wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v)
        optimizer.apply_gradients([(wrap(tape).gradient(loss, v), v)])

    plain = tf.keras.optimizers.SGD(0.1)
    for run in (step, tf.function(step)):
        both = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
        with warned(told):
            for _ in range(2):
                step(plain, hvd.DistributedGradientTape)
                step(both, lambda tape: tape)
            assert told == []
            for _ in range(2):
                run(both, hvd.DistributedGradientTape)
        expected = "the gradient of 'twice', and of 0 more, which a DistributedGradientTape has"
        assert len(told) == (hvd.rank() == 0)
        assert all(expected in text for text in told)
        told.clear()


def case_adasum_of_casts():
    """Steps of different directions add up; what travels is of 16 bits, and what comes is not."""
    rank, size = hvd.rank(), hvd.size()
    w = tf.Variable(tf.ones([size, 3]))
    factors = np.zeros((size, 3), np.float32)
    factors[rank] = 2.0, 0.5, 1e-9

    def reduced(compression):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * factors)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Adasum, compression=compression)
        return tape.gradient(loss, w)

    for run in (reduced, tf.function(reduced)):
        for compression, least in (("none", 1e-9), (hvd.Compression.fp16, 0.0), ("bf16", 1e-9)):
            found = run(compression)
            assert found.dtype == tf.float32
            np.testing.assert_allclose(found, [[2.0, 0.5, least]] * size, rtol=4e-3)
    with pytest.raises(ValueError, match="op=Adasum needs compression 'none', 'fp16' or 'bf16'"):
        reduced("int8 | ef")


def case_outer_tape_of_rows():
    """Tables whose gradients travel as rows say how to differentiate them all the same."""
    table = tf.Variable(tf.ones([40000, 2]))

    def penalty(**options):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.gather(table, [1, 3]) ** 3)
            gradient = hvd.DistributedGradientTape(inner, **options).gradient(loss, table)
            total = tf.reduce_sum(tf.convert_to_tensor(gradient) ** 2)
        return outer.gradient(total, table)

    for run in (penalty, function(penalty)):
        with pytest.raises(LookupError, match=r"pass sparse_as_dense=True"):
            run()
    found = tf.convert_to_tensor(penalty(sparse_as_dense=True)).numpy()
    assert np.allclose(found[[1, 3]], 36.0)
    assert np.count_nonzero(found) == 4


def case_models_with_equal_names():
    """Residuals belong to variables: those of one model are not those of another."""
    rank = hvd.rank()
    models = [[tf.Variable(tf.random.stateless_normal([n], [rank, n]))] for n in (2000, 3000, 3000)]
    results = []
    for _ in range(2):
        for variables in models:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0] ** 2)
            tape = hvd.DistributedGradientTape(tape, compression="topk(ratio=0.01) | ef")
            results.append(tape.gradient(loss, variables)[0].numpy())
    assert np.array_equal(results[1], results[2])
    assert np.array_equal(results[4], results[5])
    assert not np.array_equal(results[1], results[4])


def case_local_sources():
    rank, size = hvd.rank(), hvd.size()
    model = dense_model()
    local = model.get_layer("hidden")
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(model, batch(rank))
    own = [np.array(g) for g in tape.gradient(loss, model.trainable_variables)]
    expected = local_mean_gradients(model)
    for scale in (True, False):
        partial = hvd.PartialDistributedGradientTape(
            tape, local_layers=local, scale_local_gradients=scale
        )
        got = partial.gradient(loss, model.trainable_variables)
        for i in range(4):
            want = own[i] / (size if scale else 1) if i < 2 else expected[i]
            assert np.allclose(got[i], want, atol=1e-6)
        kept, shared = partial.get_local_and_global_gradients(loss, model.trainable_variables)
        for (variable, gradient), i in zip([*kept, *shared], range(4), strict=True):
            assert variable is model.trainable_variables[i]
            assert np.allclose(gradient, got[i], atol=1e-6)
    with pytest.raises(TypeError, match="local_layers are Keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])
    unbuilt = [local, keras.layers.Dense(2, name="late")]
    with pytest.raises(ValueError, match="local_layers: 'late' is not built"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=unbuilt)


def case_a_process_set():
    rank = hvd.rank()
    alone = hvd.add_process_set([1])
    x = tf.Variable(tf.ones([40_000]) * (rank + 1.0), name="apart")
    y = tf.Variable(tf.ones([20_000, 4]), name="rows apart")

    @function
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * x) + tf.reduce_sum(tf.gather(y, [rank, 3, rank]))
        own = hvd.DistributedGradientTape(tape, process_set=alone, compression="int8")
        dx, dy = own.gradient(loss, [x, y])
        x.assign_sub(0.5 * dx)
        return dx, tf.convert_to_tensor(dy)

    for _ in range(2):
        before = x.numpy()
        dx, dy = gradients()
        assert np.array_equal(dx, 2 * before)
        assert dy.numpy()[[rank, 3], 0].tolist() == [2.0, 1.0]
    _outside(alone)
    hvd.remove_process_set(alone)


def _outside(alone):
    """Tensors as sources, local sources and optimizers of old: gradients stay as they are."""
    rank = hvd.rank()
    for wrap in (lambda f: f, function):

        @wrap
        def own(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = (rank + 1.0) * tf.reduce_sum(x * x)
            return hvd.DistributedGradientTape(tape, process_set=alone).gradient(loss, x)

        assert own(tf.constant([1.0, 3.0])).numpy().tolist() == [2.0 * rank + 2, 6.0 * rank + 6]
    for passes in (1, 2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            v = tf.compat.v1.get_variable("own", initializer=tf.ones([3]))
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(0.25),
                process_set=alone,
                backward_passes_per_step=passes,
            )
            train = optimizer.minimize((rank + 1.0) * tf.reduce_sum(tf.gather(v, [0, 2])))
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(passes):
                session.run(train)
            assert session.run(v).tolist() == [
                1 - 0.25 * passes * (rank + 1),
                1,
                1 - 0.25 * passes * (rank + 1),
            ]


def case_sources_of_a_shape_that_only_the_run_tells():
    rank = hvd.rank()
    shapes = [tf.TensorSpec([None, 2]), tf.TensorSpec(None)]

    @tf.function(input_signature=shapes, autograph=False)
    def gradients(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            loss = tf.reduce_sum(x * x) + (rank + 1.0) * tf.reduce_sum(y)
        tape = hvd.DistributedGradientTape(tape, compression="int8")
        return tape.gradient(loss, [x, y])

    for rows in (3, 1, 3):
        x = tf.fill([rows, 2], float(rank))
        dx, dy = gradients(x, tf.zeros([rows] * rows))
        assert dx.numpy().tolist() == [[1.0, 1.0]] * rows
        assert np.array_equal(dy, np.full([rows] * rows, 1.5))
    with pytest.raises(hvd.HorovodInternalError, match="differs between ranks"):
        gradients(tf.zeros([4 + rank, 2]), tf.zeros([1]))


def case_join_with_a_tape():
    """Ranks with fewer batches leave the others zeros."""
    rank, size = hvd.rank(), hvd.size()
    x = tf.Variable(tf.ones([3000]), name="uneven")
    seen = []
    for _ in range(3 - min(rank, 2)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression="fp16")
        seen.append(tape.gradient(loss, x).numpy()[0])
    hvd.join()
    assert seen == [float(sum(3 - min(r, 2) > i for r in range(size))) for i in range(len(seen))]


def case_join_with_a_large_table():
    """Rows cannot be gathered of a rank that joined: the error says what can be."""
    rank = hvd.rank()
    table = tf.Variable(tf.zeros([30_000, 4]), name="table")

    def reduced(compression=None, **options):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [rank, 7])
            loss = tf.reduce_sum(rows * tf.constant([[0.1, 0.2, 0.3, 1.0], [0.4, 0.1, 0.5, 2.0]]))
        tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum, **options)
        return tape, tape.gradient(loss, table)

    tape, _ = reduced("int8 | ef")
    (state,) = reducer_of_tape(tape, [table]).memory.states.values()
    reduced(sparse_as_dense=True)
    if rank == 0:
        held = state["rows"].copy()
        with pytest.raises(hvd.HorovodInternalError, match="pass sparse_as_dense=True, so that"):
            reduced("int8 | ef")
        assert held.any()
        assert np.array_equal(state["rows"], held)
        assert tf.convert_to_tensor(reduced(sparse_as_dense=True)[1])[7, 3] == 2.0
    hvd.join()


def case_training_with_every_compressor():
    rank = hvd.rank()
    for spec in SPECS:
        model = dense_model(seed=rank)
        hvd.broadcast_variables(model.trainable_variables, 0)
        optimizer = keras.optimizers.Adam(0.01)

        @function
        def step(data, model=model, optimizer=optimizer, spec=spec):
            with tf.GradientTape() as tape:
                loss = loss_of(model, data)
            tape = hvd.DistributedGradientTape(tape, compression=spec)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
            return loss

        optimizer.build(model.trainable_variables)
        losses = [float(step(batch(rank))) for i in range(20)]
        assert losses[-1] < 0.9 * losses[0], (spec, losses)
        assert hvd.replicas_equal(model.variables)


def embedding_step(rows, spec, as_dense, wrap):
    rank = hvd.rank()
    table = tf.Variable(tf.random.stateless_normal([rows, 8], [1, 2]), name=f"table{rows}")
    reference = tf.Variable(table)
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([table])

    @wrap
    def step(tokens):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, tokens)) * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape, compression=spec, sparse_as_dense=as_dense)
        gradient = tape.gradient(loss, table)
        optimizer.apply([gradient], [table])
        return gradient

    size = hvd.size()
    for i in range(3):
        gradient = step(tf.constant([rank, i, rows - 1, i]))
        sparse = rows * 8 >= 65536 and not as_dense
        assert isinstance(gradient, tf.IndexedSlices) == sparse
        total = np.zeros(reference.shape)
        for r in range(size):
            np.add.at(total, [r, i, rows - 1, i], (r + 1.0) / size)
        reference.assign_sub(0.5 * total.astype(np.float32))
        if sparse:
            indices = gradient.indices.numpy()
            assert (np.diff(indices) > 0).all()
    assert np.allclose(table, reference, atol=1e-5 if spec is None else 0.05)
    assert hvd.replicas_equal([table])


def case_embeddings():
    for spec in (None, "fp16", "int8 | ef"):
        for rows in (50, 20_000):
            for wrap in (lambda f: f, function):
                embedding_step(rows, spec, False, wrap)
        # A dense gradient is that of any variable: no rows travel.
        embedding_step(50, spec, True, lambda f: f)
        embedding_step(20_000, spec, True, function)
    sent = hvd.stats().raw_bytes
    embedding_step(100_000, None, False, function)
    assert hvd.stats().raw_bytes - sent < 4 * 8 * 1000  # the table never travelled
    with pytest.raises(hvd.HorovodInternalError, match="cannot compress rows") as refused:
        embedding_step(30_000, "powersgd(rank=2) | ef", False, lambda f: f)
    with pytest.raises(hvd.HorovodInternalError, match="keep their residuals as float32, not as"):
        embedding_step(30_000, "int8 | ef(dtype='bf16')", False, lambda f: f)
    # What is advised works when it is copied.
    advice = re.search(r"as in compression=(\{.*\}), or", str(refused.value))
    embedding_step(30_000, ast.literal_eval(advice[1]), False, lambda f: f)
    slices = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 2]))
    with pytest.raises(
        hvd.HorovodInternalError, match="choose another, such as 'int8', or pass tf"
    ):
        hvd.allreduce(slices, compression="shared_int")


def case_rows_feed_back():
    """What compression loses of a row arrives when the row is used again."""
    rank = hvd.rank()
    table = tf.Variable(tf.zeros([10_000, 16]), name="fed")
    values = tf.random.stateless_normal([4, 16], [rank, 7])
    total = 0
    for _ in range(40):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2, 3, 5]) * values)
        tape = hvd.DistributedGradientTape(tape, compression="topk(ratio=0.1) | ef")
        gradient = tape.gradient(loss, table)
        total = total + tf.gather(tf.convert_to_tensor(gradient), [1, 2, 3, 5])
    mean = hvd.allreduce(values)
    assert np.allclose(total / 40, mean, atol=0.5)
    assert np.corrcoef(np.array(total).ravel(), np.array(mean).ravel())[0, 1] > 0.95
    for reset in (1, 0):  # where residuals begin anew in every step, all steps send the same
        other, sent = tf.Variable(tf.zeros([10_000, 16]), name=f"anew{reset}"), []
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(other, [1, 2, 3, 5]) * values)
            spec = f"topk(ratio=0.1) | ef(reset={reset})"
            tape = hvd.DistributedGradientTape(tape, compression=spec)
            sent.append(np.array(tf.convert_to_tensor(tape.gradient(loss, other))))
        assert (sent[0].tobytes() == sent[1].tobytes() == sent[2].tobytes()) == bool(reset)


def case_different_models_on_two_ranks():
    rank = hvd.rank()
    names = ["shared", "extra"][: 1 if rank else 2]
    variables = [tf.Variable(tf.ones([3]), name=name) for name in names]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in variables])
    tape = hvd.DistributedGradientTape(tape)
    with pytest.raises(hvd.HorovodInternalError, match=r"'extra' is there on rank\(s\) 0 but not"):
        tape.gradient(loss, variables)
    some, none = tf.Variable(1.0, name="some"), tf.Variable(1.0, name="none")
    with tf.GradientTape() as tape:
        loss = some * some
    with pytest.raises(hvd.HorovodInternalError, match="'some' is there on"):
        hvd.DistributedGradientTape(tape).gradient(loss, none if rank else some)
    odd = tf.Variable(tf.ones([3 + rank]), name="odd")

    @function
    def inside():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(odd)
        return hvd.DistributedGradientTape(tape).gradient(loss, odd)

    with pytest.raises(hvd.HorovodInternalError, match="'odd' differs between ranks"):
        inside()


def reduced_by_a_tape(variables, **options):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in variables]) * (hvd.rank() + 1.0)
    return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)


def case_other_variables_or_settings_on_one_rank_in_a_later_step():
    """Such as those of a layer that one rank freezes: all ranks hear of it, and can go on."""
    size, last = hvd.size(), hvd.rank() == hvd.size() - 1
    mean = (size + 1) / 2
    some, more = (tf.Variable(tf.ones([3]), name=name) for name in ("some", "more"))
    both, new = [some, more], tf.Variable(tf.ones([3]), name="more")

    def alike(variables, **options):
        for gradient in reduced_by_a_tape(variables, **options):
            assert np.allclose(gradient, mean)

    eager = lambda call: call  # noqa: E731
    for told, others, own, wrap in (
        ("'more' is there on rank", (both, {}), ([some], {}), eager),
        ("'more' is there on rank", (both, {}), ([some], {}), function),
        ("'more' is there on rank", ([some], {}), (both, {}), eager),
        ("'some' is there on rank", ([some], {}), ([more], {}), eager),
        ("different orders", (both, {}), (both[::-1], {}), eager),
        ("'compression' differs", (both, {}), (both, {"compression": "int8"}), eager),
        ("'op' differs", (both, {}), (both, {"op": hvd.Sum}), eager),
        ("'sparse_as_dense' differs", (both, {}), (both, {"sparse_as_dense": True}), eager),
        ("'some' differs between ranks .*group", (both, {}), (both, {"groups": 2}), eager),
        ("reduced before' differs between ranks", (both, {}), ([some, new], {}), eager),
    ):
        alike(both)
        variables, options = own if last else others
        with pytest.raises(hvd.HorovodInternalError, match=told):
            wrap(partial(reduced_by_a_tape, variables, **options))()
        alike(both)
        alike([some])
    # Tapes that take turns, and one rank that is out of turn.
    for _ in range(3):
        alike([some])
        alike([more])
    with pytest.raises(hvd.HorovodInternalError, match="is there on rank"):
        reduced_by_a_tape([some if last else more])
    # Where one of them sees first whether all gradients are finite.
    x = tf.Variable(tf.ones([3]), name="x")
    guarded = {"precision": "fp16(static=1024)", "compression": "int8 | ef"}
    alike([x], **guarded)
    with pytest.raises(hvd.HorovodInternalError, match="is there on rank"):
        reduced_by_a_tape([some] if last else [x], **({} if last else guarded))
    alike([x], **guarded)
    alike([some])


def case_settings_of_a_first_tape_that_differ():
    """Ranks that began with other settings begin anew, with the same ones."""
    last = hvd.rank() == hvd.size() - 1
    first = tf.Variable(tf.ones([3]), name="first")
    with pytest.raises(hvd.HorovodInternalError, match="compress"):
        reduced_by_a_tape([first], compression="int4" if last else "int8")
    assert np.allclose(reduced_by_a_tape([first], compression="int8")[0], (hvd.size() + 1) / 2)


def case_one_rank_differs_after_a_join():
    """Ranks that joined early have reduced less, and know fewer lists, and count alike again."""
    rank, size = hvd.rank(), hvd.size()
    one, two = (keras.Variable(np.ones(3, np.float32), name=name) for name in ("one", "two"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([one, two])
    given = tf.ones([3])
    for turn in range(2):
        for _ in range(2 - 2 * turn):
            optimizer.apply([given, given], [one, two])
            reduced_by_a_tape([one.value, two.value])
            optimizer.apply([given, None], [one, two])
            reduced_by_a_tape([one.value])
        for _ in range(rank):  # in the second turn one rank joins at once
            optimizer.apply([given, given], [one, two])
            reduced_by_a_tape([one.value, two.value])
        hvd.join()
        for variable in (one, two):
            variable.assign(np.ones(3))
        optimizer.apply([given, given], [one, two])
        reduced_by_a_tape([one.value, two.value])
        for odd in range(size):
            with pytest.raises(hvd.HorovodInternalError, match="'two' differs between ranks"):
                optimizer.apply([given, None if rank == odd else given], [one, two])
            with pytest.raises(hvd.HorovodInternalError, match="'two' is there on rank"):
                reduced_by_a_tape([one.value] if rank == odd else [one.value, two.value])
        optimizer.apply([given, None], [one, two])
        assert np.allclose(one, 0.8)
        assert np.allclose(two, 0.9)


def case_jit_is_refused():
    x = tf.Variable(1.0, name="jit")

    @tf.function(jit_compile=True, autograph=False)
    def step():
        with tf.GradientTape() as tape:
            y = x * x
        return hvd.DistributedGradientTape(tape).gradient(y, x)

    with pytest.raises(RuntimeError, match="jit_compile=True cannot contain it"):
        step()


def case_keras_optimizer():
    rank = hvd.rank()
    for spec in (None, "int8 | ef"):
        model = dense_model()
        reference = dense_model()
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), compression=spec, groups=2
        )
        assert type(optimizer).__name__ == "SGD"

        @function
        def step(data, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = loss_of(model, data)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

        optimizer.build(model.trainable_variables)
        for i in range(5):
            step(batch(rank, i))
            plain.apply(local_mean_gradients(reference, i), reference.trainable_variables)
        near = 1e-5 if spec is None else 0.05
        for got, want in zip(model.weights, reference.weights, strict=True):
            assert np.allclose(got, want, atol=near)
        assert hvd.replicas_equal([*model.variables, *optimizer.variables])
        assert (optimizer.residual_norm() > 0) == (spec is not None)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match=r"keras\.optimizers\.Optimizer or a tf\.compat"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="Average or Sum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Max)


def applying(optimizer, variable):
    return lambda gradient: optimizer.apply([gradient], [variable])


def case_backward_passes_per_step():
    rank, size = hvd.rank(), hvd.size()
    for average in (False, True):
        for wrap in (lambda f: f, function):
            x = keras.Variable(np.zeros(3, np.float32), name="x")
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
            )
            optimizer.build([x])

            step = wrap(applying(optimizer, x))
            for i in range(6):
                step(tf.fill([3], rank + 1.0))
                expected = (i + 1) // 3 * (1 if average else 3) * (size + 1) / 2
                assert np.allclose(x, -expected), (i, np.array(x))
            assert int(optimizer.iterations) == 2
        local = keras.Variable(np.zeros(2, np.float32), name="local")
        again = type(optimizer).from_config(optimizer.get_config())  # distributed the same way
        again.register_local_var(local)
        for i in range(3):
            again.apply([tf.fill([2], rank + i + 1.0)], [local])
        total = (3 * rank + 6) / (3 if average else 1) / size
        assert np.allclose(local, -total), np.array(local)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)


def applying_some(optimizer, x, y):
    def apply(used):
        given = tf.fill([3], hvd.rank() + 1.0)
        optimizer.apply([given if name in used else None for name in "xy"], [x, y])

    return apply


def case_a_variable_that_some_passes_do_not_use():
    """What a pass does not use has a gradient of zero there; the last one must use it."""
    rank, last = hvd.rank(), "'x' has a gradient in earlier ones of 2 backward passes"
    for plan, words in (
        ([("y", "xy")] * 2, None),
        ([("y", "xy"), ("xy", "xy")], None),
        ([("xy", "y")] * 2, last),
        ([("xy", "y"), ("xy", "xy")], "'x' differs between ranks"),
        ([("xy", "y"), ("y", "y")], "'x' differs between ranks .*no gradient"),
        ([("xy", "x"), ("x", "xy")], "'y' differs between ranks"),
    ):
        for wrap in (function, lambda call: call):
            x, y = (keras.Variable(np.zeros(3, np.float32), name=name) for name in "xy")
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), backward_passes_per_step=2
            )
            optimizer.build([x, y])

            step = wrap(applying_some(optimizer, x, y))
            step(plan[rank][0])
            if words is None:
                step(plan[rank][1])
                passes = [[sum(name in used for used in each) for each in plan] for name in "xy"]
                for variable, (first, second) in zip((x, y), passes, strict=True):
                    assert np.allclose(variable, -(first + 2 * second) / 2), plan
                continue
            kinds = (ValueError, tf.errors.InvalidArgumentError, hvd.HorovodInternalError)
            with pytest.raises(kinds, match=words):
                step(plan[rank][1])
            assert np.array_equal(x.numpy(), np.zeros(3))


def applying_rows(optimizer, table, scale):
    def apply(whole):
        shape = tf.constant(list(table.shape), tf.int64)
        used = tf.IndexedSlices(tf.ones([4, 2]), tf.constant([3] * 4), shape)
        given = tf.ones(table.shape) * 10 if whole else used
        optimizer.apply([given, tf.constant(1.0)], [table, scale])

    return apply


def case_a_table_that_some_passes_use_as_a_whole():
    """Rows and whole tables are added up, in the form of the last pass; so are scalars."""
    size = hvd.size()
    rows = np.array([[0, 0], [0, 0], [0, 0], [4, 4]], np.float32)  # as many as the table has
    for passes in ("rows", "whole"), ("whole", "rows"), ("rows", "rows", "whole"):
        for threshold in (False, True):
            table = keras.Variable(np.zeros((4, 2) if threshold else (40_000, 2)), name="table")
            scale = keras.Variable(0.0, name="scale")
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), backward_passes_per_step=len(passes), op=hvd.Sum
            )
            optimizer.build([table, scale])
            step = function(applying_rows(optimizer, table, scale))
            for kind in passes:
                step(kind == "whole")
            expected = 10 + passes.count("rows") * rows
            assert np.array_equal(table.numpy()[:4], -size * expected), passes
            assert scale.numpy() == -size * len(passes)


def case_mixed_float16():
    """One rank overflows: every rank skips the step, and residuals stay."""
    rank = hvd.rank()
    for spec in ("fp16", "int8 | ef", "powersgd(rank=2) | ef"):
        model = dense_model(policy="mixed_float16")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
            compression=spec,
        )
        optimizer.build(model.trainable_variables)

        @function
        def step(data, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = loss_of(model, data)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(
                tape.gradient(scaled, model.trainable_variables), model.trainable_variables
            )
            return loss

        first = float(step(batch(rank)))
        for _ in range(5):
            last = float(step(batch(rank)))
        assert last < first
        before, norm = arrays(model.weights), optimizer.residual_norm()
        x, y = batch(rank)
        step((x * np.inf if rank == 1 else x, y))
        for old, new in zip(before, model.weights, strict=True):
            assert np.array_equal(old, np.array(new)), spec
        assert optimizer.residual_norm() == norm
        assert float(optimizer.dynamic_scale) == 512.0
        assert optimizer._ringlet.settings.guard == (spec != "fp16")
        assert hvd.replicas_equal([*model.variables, *optimizer.variables])
    with pytest.raises(ValueError, match="the other way round"):
        keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))


def case_precision_of_a_tape():
    """A policy brings wire and reduction; one rank's overflow is that of all, and not kept."""
    rank = hvd.rank()
    keep = tf.Variable(tf.random.stateless_normal([4096], [1, 5]), name="in16bits")

    def gradient(precision, factor=1.0, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keep * keep) * (rank + 1.0) * factor
        tape = hvd.DistributedGradientTape(tape, precision=precision, **options)
        return tape.gradient(loss, keep), reducer_of_tape(tape, [keep])

    exact = 2 * keep * (1 + hvd.size()) / 2
    for precision, spec, way in (
        ("bf16", "bf16", "scatter_reduce"),
        ("bf16(reduction='wire')", "bf16", "sum"),
        ("fp8_wire", "fp8 | ef", None),
    ):
        given, reducer = gradient(precision)
        assert np.allclose(given, exact, rtol=0.1)
        (step,) = reducer._lists.values()
        (member,) = step.group.members.values()
        assert str(member.declared) == spec
        assert way in (None, member.strategy)
    fixed = {"precision": "fp16(static=64)", "compression": "int8 | ef"}
    given, reducer = gradient(factor=64.0, **fixed)
    assert np.allclose(given / 64, exact, atol=0.1)
    before = reducer.memory.norm()
    given, reducer = gradient(factor=np.inf if rank == 1 else 64.0, **fixed)
    assert not np.isfinite(given.numpy()).any()
    assert reducer.memory.norm() == before > 0
    given, _ = gradient("fp16", factor=np.inf if rank == 1 else 1.0)  # whose wire remembers nothing
    assert not np.isfinite(given.numpy()).any()
    with pytest.raises(ValueError, match=r"a loss scale that changes, and 'int8 \| ef' remembers"):
        gradient("fp16", compression={"*bias": "none", "*": "int8 | ef"})
    layer = keras.layers.Dense(2)
    layer.build((3,))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 3]))) + tf.reduce_sum(keep)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, precision="bf16")
    whole, _ = tape.gradient(loss, [keep, layer.kernel])
    assert np.allclose(whole, 1.0)
    assert tape._ringlet_settings.reduction == "float32"


def case_settings_of_tapes_and_old_optimizers_that_differ():
    odd = hvd.rank() == 1
    for arguments in (
        {"precision": "fp16(static=1024)" if odd else "fp16(static=2048)"},
        {"precision": "fp16(static=1024)" if odd else None, "compression": "int8 | ef"},
    ):
        x = tf.Variable(tf.zeros(8), name="x")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x)
        tape = hvd.DistributedGradientTape(tape, **arguments)
        with pytest.raises(hvd.HorovodInternalError, match="'precision' differs between ranks"):
            tape.gradient(loss, [x])
    v1 = tf.compat.v1.train
    for name, own in (
        ("learning_rate", v1.GradientDescentOptimizer(0.1 + odd)),
        ("the class of the optimizer", (v1.AdamOptimizer if odd else v1.AdagradOptimizer)(0.1)),
    ):
        x = tf.Variable(tf.zeros(8), name="x")
        optimizer = hvd.DistributedOptimizer(own)
        with pytest.raises(hvd.HorovodInternalError, match=f"'{name}' differs between ranks"):
            optimizer.minimize(lambda v=x: tf.reduce_sum(v), var_list=[x])
        assert np.array_equal(x.numpy(), np.zeros(8))


def case_compat_v1():
    rank, size = hvd.rank(), hvd.size()
    v1 = tf.compat.v1
    for passes in (1, 2):
        with tf.Graph().as_default():
            x = v1.get_variable("x", [3], initializer=v1.constant_initializer(rank + 1.0))
            optimizer = hvd.DistributedOptimizer(
                v1.train.AdamOptimizer(0.1)
                if passes == 2
                else v1.train.MomentumOptimizer(1.0, 0.9),
                compression="fp16",
                backward_passes_per_step=passes,
            )
            train = optimizer.minimize(
                tf.reduce_sum(x * (rank + 1.0)), global_step=v1.train.get_or_create_global_step()
            )
            hooks = [hvd.BroadcastGlobalVariablesHook(0)]
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                assert session.run(x).tolist() == [1.0] * 3
                values = [session.run([train, x])[1] for _ in range(passes)]
                values.append(session.run(x))
                steps = session.run(v1.train.get_global_step())
            assert steps == passes
            if passes == 1:
                assert values[-1].tolist() == [1.0 - (size + 1) / 2] * 3
            else:
                assert np.allclose(values[-1], 0.9, atol=1e-4)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    eager = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    y = tf.Variable(0.0)
    eager.minimize(lambda: y * (rank + 1.0), var_list=[y])
    assert y.numpy() == -(size + 1) / 2
    with pytest.raises(ValueError, match="has a loss scale"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), precision="fp16")
    half = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), precision="bf16")
    half.minimize(lambda: y * (rank + 1.0), var_list=[y])
    assert y.numpy() == -(size + 1)
    assert str(half._ringlet.settings.router) == "bf16"


def case_a_tape_that_tells_variables_by_place():
    rank, mean = hvd.rank(), (hvd.size() + 1) / 2
    x, y = (tf.Variable(tf.zeros([n]), name=f"own_{rank}_{n}") for n in (2, 3))
    with tf.GradientTape(persistent=True) as tape:
        loss = (tf.reduce_sum(x) + 2 * tf.reduce_sum(y)) * (rank + 1.0)
    for made in (hvd.DistributedGradientTape(tape), hvd.DistributedGradientTape(tape)):
        gradients = made.gradient(loss, [x, y], use_generic_names=True)
        assert np.array_equal(gradients[0], [mean] * 2)
        assert np.array_equal(gradients[1], [2 * mean] * 3)
    made.register_local_source(x)
    local, shared = made.get_local_and_global_gradients(loss, [x, y], use_generic_names=True)
    assert local[0][0] is x
    assert np.array_equal(shared[0][1], [2 * mean] * 3)
    with pytest.raises(hvd.HorovodInternalError, match="own_0_2"):
        hvd.DistributedGradientTape(tape).gradient(loss, [x, y])


def case_local_variables_of_an_optimizer_of_compat_v1():
    rank, size = hvd.rank(), hvd.size()
    v1 = tf.compat.v1
    for passes, scale in ((1, True), (2, True), (2, False)):
        with tf.Graph().as_default():
            own, shared = (v1.get_variable(n, initializer=tf.zeros([2])) for n in ("own", "shared"))
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0),
                backward_passes_per_step=passes,
                scale_local_gradients=scale,
            )
            optimizer.register_local_var(own)
            loss = tf.reduce_sum(own + shared) * (rank + 1.0)
            train = optimizer.apply_gradients(optimizer.compute_gradients(loss))
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(2 * passes):
                    session.run(train)
                values = session.run([own, shared])
        expected = [-(rank + 1) / (size if scale else 1), -(size + 1) / 2]
        assert np.allclose(values, [[2 * passes * each] * 2 for each in expected]), values
    eager, own = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)), tf.Variable(0.0)
    eager.register_local_var(own)
    eager.minimize(lambda: own * (rank + 1.0), var_list=[own])
    assert own.numpy() == -(rank + 1) / size


def case_an_optimizer_of_compat_v1_that_is_wrapped_again():
    gradient = np.random.default_rng(hvd.rank()).normal(size=4000).astype("float32")
    variable = tf.Variable(np.zeros(4000, np.float32), name="x")
    own = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    for spec in ("topk(ratio=0.1) | ef", "int8 | ef"):
        optimizer = hvd.DistributedOptimizer(own, compression=spec)
        optimizer.minimize(lambda: tf.reduce_sum(variable * gradient), var_list=[variable])
    total = np.asarray(hvd.allreduce(2 * gradient))
    assert np.abs(-variable.numpy() - total).max() < 0.1  # with what the first held back


def case_two_optimizers_in_one_session():
    """A session runs their nodes in any order: here each rank's begins with another one."""
    rank, size = hvd.rank(), hvd.size()
    v1 = tf.compat.v1
    begun = threading.Event()
    with tf.Graph().as_default(), v1.Session() as session:
        names = ["first", "second"]
        variables = [v1.get_variable(n, initializer=[1.0, 2.0]) for n in names]
        made = [hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)) for _ in names]
        steps = [
            optimizer.minimize(tf.reduce_sum(v) * (rank + 1.0), var_list=[v])
            for optimizer, v in zip(made, variables, strict=True)
        ]
        begins, waits = [optimizer._ringlet for optimizer in made[:: -1 if rank else 1]]

        def bind(*args, inner=begins._bind):
            inner(*args)
            begun.set()

        def wait(*args, inner=waits._bind):
            assert begun.wait(60)
            inner(*args)

        begins._bind, waits._bind = bind, wait
        session.run(v1.global_variables_initializer())
        session.run(steps)
        found = session.run(variables)
    mean = (size + 1) / 2
    assert [each.tolist() for each in found] == [[1.0 - mean, 2.0 - mean]] * 2


def case_different_models_in_a_session():
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("differs", initializer=[1.0] * (2 + hvd.rank()))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(tf.reduce_sum(variable), var_list=[variable])
        session.run(v1.global_variables_initializer())
        with pytest.raises(hvd.HorovodInternalError, match="differs"):
            session.run(step)


def case_functions_traced_in_different_order():
    """Names are given when nodes run: ranks need to run them in one order, not to trace them so."""
    rank, size = hvd.rank(), hvd.size()
    variables = [tf.Variable(tf.ones([3 + i]), name=f"traced{i}") for i in range(2)]

    def step(v):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * (rank + 1.0)
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, v)
        return gradient, hvd.allreduce(tf.ones_like(v), op=hvd.Sum)

    steps = [tf.function(lambda v=v: step(v), autograph=False) for v in variables]
    for traced in steps[:: -1 if rank else 1]:
        traced.get_concrete_function()
    for v, run in zip(variables, steps, strict=True):
        gradient, ones = run()
        assert gradient.numpy().tolist() == [(size + 1) / 2] * v.shape[0]
        assert ones.numpy().tolist() == [size] * v.shape[0]
    # In one function the order counts: ranks that differ are told at once, and by variables.
    fresh = [tf.Variable(tf.ones([5]), name=f"swapped{i}") for i in range(2)]

    @tf.function(autograph=False)
    def swapped():
        return [step(v)[0] for v in fresh[:: -1 if rank else 1]]

    with pytest.raises(hvd.HorovodInternalError, match=r"'swapped0' is there on rank\(s\) 0 but"):
        swapped()


def case_checkpoint_of_a_tape_and_an_optimizer():
    rank = hvd.rank()
    folder = tempfile.mkdtemp()

    def made():
        model = dense_model()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), compression="topk(ratio=0.1) | ef"
        )
        optimizer.build(model.trainable_variables)
        state = hvd.CompressorState(optimizer)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, residuals=state)
        return model, optimizer, checkpoint

    def train(model, optimizer, steps):
        for i in steps:
            with tf.GradientTape() as tape:
                loss = loss_of(model, batch(rank, i))
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

    model, optimizer, checkpoint = made()
    train(model, optimizer, range(4))
    path = checkpoint.write(str(Path(folder) / f"rank{rank}"))
    norm = optimizer.residual_norm()
    train(model, optimizer, range(4, 8))
    again, restored, other = made()
    other.read(path).expect_partial()
    assert restored.residual_norm() == norm > 0
    train(again, restored, range(4, 8))
    for a, b in zip(model.weights, again.weights, strict=True):
        assert np.array_equal(np.array(a), np.array(b))
    paths = hvd.allgather_object(path)
    _, foreign, third = made()
    with pytest.warns(UserWarning, match="holds the residuals of rank"):
        third.read(paths[(rank + 1) % hvd.size()]).expect_partial()
    assert foreign.residual_norm() == 0

    x = tf.Variable(tf.random.stateless_normal([4096], [rank, 3]), name="taped")

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * x)
        tape = hvd.DistributedGradientTape(tape, compression="topk(ratio=0.01) | ef")
        return tape, tape.gradient(loss, x)

    tape, _ = gradient()
    state = hvd.CompressorState(tape, [x])
    kept = state.serialize()
    want = gradient()[1].numpy()
    gradient()
    state.deserialize(kept)
    assert np.array_equal(gradient()[1].numpy(), want)
    with pytest.raises(ValueError, match="no compressor state"):
        state.deserialize(b"something else")
    with pytest.raises(TypeError, match="no DistributedOptimizer"):
        hvd.CompressorState(keras.optimizers.SGD())


def case_elastic_state():
    """Eagerly and in a session: sync, commit, and back again after a failure in a graph."""
    rank = hvd.rank()
    variables = [tf.Variable([rank + 1.0], name="elastic"), tf.Variable(rank, name="count")]
    state = hvd.elastic.TensorFlowState(variables, batch=rank)

    @function
    def step():
        variables[0].assign_add(hvd.allreduce([1.0]))
        variables[1].assign_add(1)

    @function
    def wrong():
        variables[0].assign_add([50.0])
        return hvd.allreduce(tf.ones([1 + rank]), name="elastic.differs")

    @hvd.elastic.run
    def train(state, steps):
        for _ in range(steps):
            step()
            state.batch += 1
            state.commit()
        return wrong()

    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        train(state, 3)
    assert (variables[0].numpy().tolist(), int(variables[1]), state.batch) == ([4.0], 3, 3)
    model = dense_model()
    keras_state = hvd.elastic.TensorFlowKerasState(model, keras.optimizers.SGD(0.1), backend=None)
    model.weights[0].assign_add(tf.ones_like(model.weights[0]) * rank)
    keras_state.sync()
    assert hvd.replicas_equal(model.weights)
    with pytest.raises(ValueError, match="no variables"):
        hvd.elastic.TensorFlowState()
    with tf.Graph().as_default():
        x = tf.compat.v1.get_variable("x", initializer=[float(rank + 1)])
        y = tf.compat.v1.get_variable("y", initializer=float(rank), use_resource=False)
        with pytest.raises(ValueError, match="needs a session"):
            hvd.elastic.TensorFlowState()
        more = [x.assign_add(hvd.allreduce(x)), y.assign_add(1.0)]
        odd = hvd.allreduce(tf.ones([1 + rank]), name="elastic.odd")
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(batch=rank + 5)
            operations = len(session.graph.get_operations())

            @hvd.elastic.run
            def run(state):
                session.run(more)
                state.batch += 1
                state.commit()
                session.run(more)
                session.run(odd)

            with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
                run(state)
            assert (session.run([x, y]), state.batch) == ([[2.0], 1.0], 6)
            assert len(session.graph.get_operations()) == operations


def case_a_newcomer_to_an_elastic_job_forgets_what_others_pay():
    """What a checkpoint held back, which they have gone on from: of a tape."""
    w = tf.Variable(tf.zeros(3000), name="newcomers")
    given = np.random.default_rng(hvd.rank()).normal(size=3000).astype(np.float32)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * given)
        tape = hvd.DistributedGradientTape(tape, compression="topk(ratio=0.1) | ef")
        w.assign_sub(tape.gradient(loss, [w])[0])
        return hvd.CompressorState(tape, [w])

    kept, told = step(), "have gone on from it, and pay it"
    (reducer,), saved = reducers_of([w]), kept.serialize()
    state = hvd.elastic.TensorFlowState([w])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(epochs, "is_elastic", lambda: True)
        state.sync()
        held = reducer.memory.norm()
        assert held > 0  # all have it
        for _ in range(2):  # before the others have taken a step, and behind one
            if hvd.rank() == 1:
                kept.deserialize(saved)
                state = hvd.elastic.TensorFlowState([w])
                with pytest.warns(UserWarning, match=told):
                    state.sync()
                held = 0.0
            else:
                kept.deserialize(kept.serialize())  # as often as the other rank
                state.sync()
            assert reducer.memory.norm() == held
            step()
            held = reducer.memory.norm()
            assert held > 0
    assert hvd.replicas_equal([w])


def case_passes_of_v1_end_with_what_is_restored():
    """Half-summed passes survive neither a restore nor a sync, on whichever rank they are."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.get_variable("x", initializer=[0.0])
        factor = v1.placeholder(tf.float32)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        step = optimizer.minimize(tf.reduce_sum(x) * factor)
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session)
        for back in (state.restore, state.sync):
            if hvd.rank() == 0:
                session.run(step, {factor: 100.0})
            back()
            session.run(step, {factor: 1.0})
            assert session.run(x).tolist() == [0.0]
            session.run(step, {factor: 1.0})
            assert session.run(x).tolist() == [-2.0]
            session.run(x.assign([0.0]))


def declared_after(count):
    """Return how many groups engines know at most, once they are ``count`` or become no fewer."""
    known, same = 1 << 30, 0
    while known > count and same < 10:
        gc.collect()
        hvd.barrier()  # a release travels like any message: one that all have sent is there soon
        # All ranks see the same, so that none waits for others in a barrier.
        last, known = known, max(hvd.allgather_object(len(current().engine._worker._groups)))
        same = same + 1 if known == last else 0
    return known


def case_dropped_with_their_variables():
    """The engine keeps nothing of tapes and optimizers whose variables are gone."""
    before = declared_after(0)
    for turn in range(5):
        model = dense_model(width=8 + turn)
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch(hvd.rank()))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)).apply(gradients, variables)
        del model, variables, tape, loss, gradients
        if turn % 2 == hvd.rank() % 2:  # collectors run when they please, on each rank
            gc.collect()
    assert declared_after(before + 1) <= before + 1  # the last tape's, until there is another


def case_sync_batch_norm():
    rank, size = hvd.rank(), hvd.size()
    rows = [r + 2 for r in range(size)]
    whole = tf.random.stateless_normal([sum(rows), 5, 4], [3, 1])
    weights = tf.random.stateless_normal([sum(rows), 5, 4], [3, 2])
    start = sum(rows[:rank])
    own = slice(start, start + rows[rank])
    plain, synced = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()

    def run(layer, x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(x, training=True)
            loss = tf.reduce_sum(out * w)
        return out, *tape.gradient(loss, [x, layer.gamma, layer.beta])

    plain.build(whole.shape)
    synced.build(whole.shape)
    want, want_x, want_gamma, want_beta = run(plain, whole, weights)
    for wrap in (lambda f: f, function):
        out, dx, gamma, beta = wrap(lambda: run(synced, whole[own], weights[own]))()
        assert np.allclose(out, want[own], atol=1e-5)
        assert np.allclose(dx, want_x[own], atol=1e-5)
        assert np.allclose(hvd.allreduce(gamma, op=hvd.Sum), want_gamma, atol=1e-4)
        assert np.allclose(hvd.allreduce(beta, op=hvd.Sum), want_beta, atol=1e-4)
        if wrap is not function:
            assert np.allclose(synced.moving_mean, plain.moving_mean, atol=1e-5)
            assert np.allclose(synced.moving_variance, plain.moving_variance, atol=1e-5)
    assert np.allclose(
        synced(whole, training=False), keras.ops.convert_to_numpy(synced(whole)), atol=1e-6
    )
    copy = hvd.SyncBatchNormalization.from_config(synced.get_config())
    assert copy.momentum == synced.momentum
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


def test_batch_norm_that_one_rank_has_traced_waits_for_ranks_that_come(monkeypatch):
    """In an elastic job: what is traced stays when there are more."""
    monkeypatch.setattr(topology_ops, "is_elastic", lambda: True)

    hvd.init()
    try:
        plain, synced = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
        x = tf.random.stateless_normal([6, 5], [3, 1])
        traced = tf.function(lambda x: synced(x, training=True))
        assert np.allclose(traced(x), plain(x, training=True), atol=1e-5)
        assert "PyFunc" in str(traced.get_concrete_function(x).graph.as_graph_def())
    finally:
        hvd.shutdown()


def test_what_is_traced_in_an_elastic_job_goes_by_the_ranks_that_there_are(monkeypatch):
    monkeypatch.setattr(topology_ops, "is_elastic", lambda: True)
    own, layer = tf.Variable(1.0), keras.layers.Dense(1, use_bias=False)
    layer.build((1, 1))

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            sent = hvd.broadcast(own, 0)
            loss = 3 * own
        optimizer.apply([tf.ones([1, 1])], layer.trainable_variables)
        ones = tf.IndexedSlices(tf.constant([[8]]), tf.constant([0]), tf.constant([1, 1]))
        local = hvd.DistributedGradientTape(tape)
        local.register_local_source(own)
        return tape.gradient(sent, own), local.gradient(loss, own), hvd.allreduce(ones).values

    hvd.init()
    optimizer = PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
    ranks, rank = 1, 0
    monkeypatch.setattr(hvd.ProcessSet, "size", lambda _: ranks)
    monkeypatch.setattr(hvd.ProcessSet, "rank", lambda _: rank)
    try:
        for ranks, rank in ((1, 0), (4, 0), (2, 1)):
            before = layer.kernel.numpy()
            sent, local, mean = step()
            assert (sent.numpy(), local.numpy()) == (1.0 if rank == 0 else 0.0, 3.0 / ranks)
            assert np.array_equal(mean, [[8 / ranks]])
            assert np.allclose(before - layer.kernel.numpy(), 1 / ranks, atol=1e-6)
    finally:
        hvd.shutdown()


def test_a_broadcast_has_its_gradient_where_tensors_are_compared_as_objects(monkeypatch):
    """As in graphs of TensorFlow 1; in an elastic job, in which the rank is asked for late."""
    v1 = tf.compat.v1
    monkeypatch.setattr(topology_ops, "is_elastic", lambda: True)
    v1.disable_tensor_equality()
    hvd.init()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            x = tf.constant([1.0, 2.0])
            (gradient,) = tf.gradients(tf.reduce_sum(hvd.broadcast(x, 0) * 3), x)
            assert session.run(gradient).tolist() == [3, 3]
    finally:
        hvd.shutdown()
        v1.enable_tensor_equality()


CASES = [name for name in dir() if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES)
def test_training_on_two_ranks(run_case, case):
    run_case(globals()[case], "gloo", 2)


@pytest.mark.parametrize(
    "ranks", [None, [0, 1], [1, 2]], ids=["the same set", "a set of the same ranks", "other ranks"]
)
def test_what_a_tape_holds_back_goes_on_with_the_set_that_comes_next(ranks):
    """What is done and owed together is, of the least and the most entry, all that was given."""
    given = np.linspace(1, 2, 2048).astype("float32")

    def work():
        hvd.init()
        known = pair = hvd.add_process_set([0, 1])
        weights = tf.Variable(np.zeros_like(given), name="weights")
        told = []
        for steps in (5, 7):
            for _ in range(steps):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weights * given)
                tape = hvd.DistributedGradientTape(
                    tape, compression="topk(ratio=0.01) | ef", process_set=known
                )
                weights.assign_sub(tape.gradient(loss, [weights])[0])
            (reducer,) = reducers_of([weights])
            owed = sum(state["residual"] for state in reducer.memory.states.values())
            shares = (owed - weights.numpy()) / given
            told.append((reducer.step, shares.min(), shares.max()))
            if len(told) == 1:
                hvd.remove_process_set(pair)
                hvd.add_process_set([0, 2])  # what is added again has another number
                known = pair if ranks is None else hvd.ProcessSet(ranks)
                hvd.add_process_set(known)
        hvd.barrier()
        hvd.shutdown()
        return told

    told = ringlet.run(work, np=3, transport="local")
    if ranks == [1, 2]:  # rank 0 goes on alone, and still owes what it did
        assert told[0] == [pytest.approx((5, 5, 5)), pytest.approx((5, 12, 12))]
        assert [steps for steps, *_ in told[1] + told[2]] == [5, 12, 0, 12]
    else:
        assert told[0] == told[1] == [pytest.approx((5, 5, 5)), pytest.approx((12, 12, 12))]
