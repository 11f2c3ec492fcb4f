"""ringlet.keras under tf_keras, which is Keras 2: models, optimizers, callbacks on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ringlet.keras as hvd
import ringlet.tensorflow
from ringlet.keras.optimizer_state import state_variables
from ringlet.keras.tf_keras import velocities_of
from ringlet.keras.value_collectives import variables_equal
from ringlet.tensorflow.tf_keras_batch_norm import SyncBatchNormalizationOfTfKeras

pytestmark = pytest.mark.preloaded("tensorflow")


def made(seed=0, rows=0, policy="float32"):
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(seed)
    layers = [tf_keras.Input((16,), dtype="int32" if rows else "float32")]
    if rows:
        layers += [tf_keras.layers.Embedding(rows, 8), tf_keras.layers.Flatten()]
    layers += [
        tf_keras.layers.Dense(128, activation="relu", dtype=policy),
        tf_keras.layers.Dense(4, dtype=policy),
    ]
    return tf_keras.Sequential(layers)


def small(seed=0):
    """Return a model of one layer, of which a program is made in half the time."""
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential([tf_keras.Input((16,)), tf_keras.layers.Dense(4)])


def data(rank, rows=64):
    numbers = np.random.default_rng(rank)
    x = numbers.normal(size=(rows, 16)).astype("float32")
    return x, np.stack([x[:, i] * x[:, i + 4] for i in range(4)], 1)


def fit(model, callbacks=(), epochs=2, x=None, **options):
    given, y = data(hvd.rank())
    given = given if x is None else x
    options = {"batch_size": 16, "verbose": 0, "epochs": epochs} | options
    return model.fit(given, y, callbacks=list(callbacks), **options).history


def everything(model):
    return [*model.weights, *state_variables(model.optimizer, model.trainable_variables)]


def kinds():
    """Return optimizers to be made, new ones and older ones."""
    new, older = tf_keras.optimizers, tf_keras.optimizers.legacy
    return {
        "sgd": lambda: new.SGD(0.01, momentum=0.9),
        "older sgd": lambda: older.SGD(0.01, momentum=0.9),
        "adam": lambda: new.Adam(0.01),
        "older adam": lambda: older.Adam(0.01),
        "adamw": lambda: new.AdamW(0.01, clipnorm=1.0),
        "rmsprop": lambda: new.RMSprop(0.01),
        "older rmsprop": lambda: older.RMSprop(0.01, clipvalue=0.5),
        "adagrad": lambda: new.Adagrad(0.1),
        "older ftrl": lambda: older.Ftrl(0.1),
    }


def case_fit():
    topk = {"*bias": "none", "*": "topk(ratio=0.1) | ef"}
    for number, (label, make) in enumerate(kinds().items()):
        model = made(seed=hvd.rank()) if number < 2 else small(seed=hvd.rank())
        optimizer = hvd.DistributedOptimizer(make(), compression=topk)
        assert isinstance(optimizer, type(make()))
        assert type(optimizer).__name__ == type(make()).__name__
        model.compile(optimizer, "mse", metrics=["mae"])
        start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        history = fit(model, [*start, hvd.callbacks.MetricAverageCallback()], epochs=3)
        assert history["loss"][-1] < history["loss"][0], label
        assert hvd.allgather_object(history) == [history] * hvd.size()
        assert variables_equal(everything(model)), label
        assert (optimizer.residual_norm() > 0) == (number < 2)  # small ones travel as they are


def case_the_result_is_that_of_one_process_with_all_of_the_batch():
    rank, size = hvd.rank(), hvd.size()
    x, y = data(5, 64)
    for number, (label, make) in enumerate(kinds().items()):
        for graph in (True, False) if number < 2 else (False,):
            alone, shared = small(seed=1), small(seed=1)
            alone.compile(make(), "mse", run_eagerly=True)
            shared.compile(hvd.DistributedOptimizer(make()), "mse", run_eagerly=not graph)
            for _ in range(4):
                alone.train_on_batch(x, y)
                shared.train_on_batch(x[rank::size], y[rank::size])
            for a, b in zip(alone.weights, shared.weights, strict=True):
                assert np.allclose(a, b, rtol=1e-4, atol=1e-5), label
            assert variables_equal(everything(shared)), label
            assert shared.optimizer.residual_norm() == 0


def case_own_loops():
    """``apply_gradients`` of what a tape gave, and ``minimize`` of a function."""
    for make in [*kinds().values()][:4]:
        model = made(seed=2)
        optimizer = ringlet.tensorflow.DistributedOptimizer(make(), compression="fp16")
        x, y = data(hvd.rank())

        @tf.function
        def step(model=model, optimizer=optimizer, x=x, y=y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            own = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
            return loss

        first = float(step())
        for _ in range(5):
            last = float(step())
        assert last < first
        optimizer.minimize(
            lambda model=model, x=x, y=y: tf.reduce_mean((model(x) - y) ** 2),
            model.trainable_variables,
        )
        assert variables_equal([*model.weights, *state_variables(optimizer, model.weights)])
        assert int(optimizer.iterations) == 7
        # What a program has added up itself is taken as it is.
        grown = tf.Variable([0.0])
        single = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
        single.apply_gradients(
            [(tf.constant([1.0 + hvd.rank()]), grown)], skip_gradients_aggregation=True
        )
        assert grown.numpy().tolist() == [-1.0 - hvd.rank()]


def case_an_optimizer_that_is_wrapped_again():
    for make in (kinds()["sgd"], kinds()["older adam"]):
        own, model = make(), made()
        first = hvd.DistributedOptimizer(own, compression="topk(ratio=0.1) | ef")
        model.compile(first, "mse")
        fit(model, epochs=1)
        owed, before = first.residual_norm(), [v.numpy() for v in everything(model)]
        again = hvd.DistributedOptimizer(own, compression="int8 | ef")
        assert (again.residual_norm(), first.residual_norm()) == (owed, 0)
        model.compile(again, "mse")
        after = [v.numpy() for v in everything(model)]
        assert len(before) == len(after)
        assert all(map(np.array_equal, before, after))
        fit(model, epochs=1)
        assert variables_equal(everything(model))


def case_an_optimizer_without_a_learning_rate():
    class Adding(tf_keras.optimizers.legacy.Optimizer):
        def _resource_apply_dense(self, grad, var, apply_state=None):
            return var.assign_add(grad)

        def get_config(self):
            return super().get_config()

    optimizer = hvd.DistributedOptimizer(Adding("adding"))
    grown = tf.Variable([0.0])

    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), grown)])

    for apply in (tf.function(step), step):
        apply()
    assert grown.numpy().tolist() == [2.0]


def case_passes_and_process_sets():
    # New ones and older ones, eagerly and in a program.
    eagerly = {"sgd": True, "older sgd": False, "adam": False, "older adam": True}
    for label, eager in eagerly.items():
        model = small()
        optimizer = hvd.DistributedOptimizer(
            kinds()[label](), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        model.compile(optimizer, "mse", run_eagerly=eager)
        fit(model)
        assert int(optimizer.iterations) == 4
        assert variables_equal(model.weights)
    only = hvd.add_process_set([0])
    weight = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), process_set=only)
    optimizer.apply_gradients([(tf.constant([1.0 + hvd.rank()]), weight)])
    assert weight.numpy().tolist() == [-1.0 - hvd.rank()]
    hvd.remove_process_set(only)


def case_an_embedding():
    tokens = np.random.default_rng(hvd.rank()).integers(0, 20_000, (64, 16))
    adam = tf_keras.optimizers
    for make, spec in ((adam.Adam, "int8 | ef"), (adam.legacy.Adam, None)):
        model = made(rows=20_000)
        model.compile(hvd.DistributedOptimizer(make(0.01), compression=spec), "mse")
        before = hvd.stats().raw_bytes
        history = fit(model, x=tokens, epochs=3)
        assert history["loss"][-1] < history["loss"][0]
        assert variables_equal(model.weights)
        assert hvd.stats().raw_bytes - before < 12 * 4 * 20_000 * 8 / 2  # not the whole table


def case_local_layers():
    model = made(seed=hvd.rank())
    optimizer = hvd.PartialDistributedOptimizer(
        tf_keras.optimizers.SGD(0.01), local_layers=model.layers[0]
    )
    model.compile(optimizer, "mse")
    hvd.broadcast_variables(model.layers[1].weights, 0)
    fit(model)
    assert variables_equal(model.layers[1].weights)
    assert not variables_equal(model.layers[0].weights)
    # What overflows in a local layer of one rank skips the step on all.
    scaling = tf_keras.mixed_precision.LossScaleOptimizer
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        model = made()
        optimizer = hvd.PartialDistributedOptimizer(
            scaling(make(0.01), initial_scale=1024.0), local_layers=model.layers[0]
        )
        variables = model.trainable_variables
        for spoilt, stays in ((hvd.rank() == 1, True), (False, False)):
            before = [v.numpy() for v in variables]
            gradients = [tf.ones(v.shape) for v in variables]
            gradients[0] *= np.inf if spoilt else 1.0
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            assert float(optimizer.loss_scale) == 512.0
            assert [np.array_equal(*each) for each in zip(before, variables, strict=True)] == [
                stays
            ] * 4
        assert variables_equal(model.layers[1].weights)


def case_mixed_float16():
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        scaling = tf_keras.mixed_precision.LossScaleOptimizer
        distributed = hvd.DistributedOptimizer(make(0.01))
        with pytest.raises(ValueError, match="the other way round"):
            scaling(distributed)
        with pytest.raises(ValueError, match="put the optimizer of tf_keras into a"):
            hvd.DistributedOptimizer(make(0.01), precision="fp16")
        model = made(policy="mixed_float16")
        optimizer = hvd.DistributedOptimizer(
            scaling(make(0.01), initial_scale=1024.0), compression="int8 | ef", precision="fp16"
        )
        model.compile(optimizer, "mse")
        history = fit(model, epochs=3)
        assert history["loss"][-1] < history["loss"][0]
        assert variables_equal(everything(model))
        norm = optimizer.residual_norm()
        assert norm > 0
        # One rank's overflow skips the step on all, and residuals stay as they are.
        x, y = data(hvd.rank())
        weights = [w.numpy() for w in model.weights]
        model.train_on_batch(x * (np.inf if hvd.rank() else 1.0), y)
        assert all(map(np.array_equal, weights, model.weights))
        assert (float(optimizer.loss_scale), optimizer.residual_norm()) == (512.0, norm)


def case_learning_rates():
    size = hvd.size()
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        model = made()
        model.compile(hvd.DistributedOptimizer(make(0.1, momentum=0.9)), "mse")
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.01 * size, warmup_epochs=2, verbose=1)
        later = hvd.callbacks.LearningRateScheduleCallback(0.01 * size, 0.1, start_epoch=2)
        rates = fit(model, [warmup, later], epochs=4)["lr"]
        assert rates[1] == pytest.approx(0.01 * size)
        assert 0.01 < rates[0] < rates[1]
        assert rates[2:] == pytest.approx([0.001 * size] * 2)
        named = velocities_of(model.optimizer)
        before = [v.numpy() for v in named]
        halved = hvd.callbacks.LearningRateScheduleCallback(0.002, lambda epoch: 0.5)
        halved.set_model(model)
        model.optimizer.learning_rate = 0.002
        halved.on_epoch_begin(0)
        assert len(before) == 4
        assert all(np.allclose(v, was / 2) for v, was in zip(named, before, strict=True))
        curve = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        model.compile(hvd.DistributedOptimizer(make(curve)), "mse")
        fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1)
        reports, logs = hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0), {}
        reports.set_model(model)
        reports.on_epoch_end(0, logs)
        assert 0 < logs["lr"] < 0.1


def case_saved_models():
    rank = hvd.rank()
    spec = "topk(ratio=0.1) | ef"
    for make in (tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam):
        folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
        model = made()
        optimizer = hvd.DistributedOptimizer(make(0.01), compression=spec)
        model.compile(optimizer, "mse")
        fit(
            model,
            [
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.CompressorStateCheckpoint(folder / "residuals"),
                hvd.callbacks.BestModelCheckpoint("loss", filepath=str(folder / "best.keras")),
                hvd.callbacks.BestModelCheckpoint("loss", filepath=str(folder / "best.h5")),
            ],
        )
        if rank == 0:
            model.save(folder / "best")  # a SavedModel, which is no file
        hvd.broadcast_object()
        assert len([*folder.iterdir()]) == 3 + hvd.size()
        going_on = [model]
        for name in ("best.keras", "best.h5", "best"):
            plain = tf_keras.models.load_model(folder / name)
            assert type(plain.optimizer) is make  # Ringlet is not needed to load it
            again = hvd.load_model(folder / name, compression=spec)
            for a, b in zip(everything(again), everything(plain), strict=True):
                assert np.array_equal(a, b), (name, a.name)
            # tf_keras does not bring back every optimizer's state from every format.
            kept = name == "best.h5" or (name, make) == ("best.keras", tf_keras.optimizers.Adam)
            assert int(again.optimizer.iterations) == (8 if kept else 0)
            if kept:
                hvd.load_compressor_state(again.optimizer, folder / "residuals")
                assert again.optimizer.residual_norm() == optimizer.residual_norm() > 0
                going_on.append(again)
        for each in going_on:
            fit(each, epochs=1, shuffle=False)
            for a, b in zip(each.weights, model.weights, strict=True):
                assert np.array_equal(a, b), each.name
            assert variables_equal(everything(each))
    own = type(optimizer).from_config(optimizer.get_config())
    assert own.residual_norm() == 0
    whole = tf.train.Checkpoint(
        model=model, optimizer=optimizer, residuals=ringlet.tensorflow.CompressorState(optimizer)
    )
    path = whole.write(str(folder / f"rank{rank}"))
    norm, count = optimizer.residual_norm(), int(optimizer.iterations)
    fit(model, epochs=1)
    whole.read(path).assert_consumed()
    assert (optimizer.residual_norm(), int(optimizer.iterations)) == (norm, count)


def case_elastic_state():
    rank = hvd.rank()
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        model = made(seed=rank)
        optimizer = hvd.DistributedOptimizer(
            make(0.01, momentum=0.9), compression="topk(ratio=0.1) | ef"
        )
        model.compile(optimizer, "mse")
        state = hvd.elastic.KerasState(model, epoch=10 * rank, batch=0)
        updates = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        ]

        @hvd.elastic.run
        def train(state, updates=updates):
            fit(state.model, updates, epochs=2 + state.epoch, initial_epoch=state.epoch)
            return state.epoch

        assert train(state) == 2
        assert variables_equal(everything(model))
        committed, norm = [v.numpy() for v in everything(model)], optimizer.residual_norm()
        fit(model)
        assert not np.array_equal(committed[0], model.weights[0].numpy())
        state.restore()
        assert all(map(np.array_equal, [v.numpy() for v in everything(model)], committed))
        assert optimizer.residual_norm() == norm > 0


def case_mistakes():
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(), name="mine")
    assert optimizer.name == "mine"
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="Average or Sum"):
        hvd.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(), op=hvd.Adasum)
    with pytest.raises(TypeError, match="cannot be copied"):
        optimizer.__reduce_ex__(4)
    tf_keras.backend.clear_session()
    units = 3 + hvd.rank()
    model = tf_keras.Sequential([tf_keras.Input((16,)), tf_keras.layers.Dense(units)])
    model.add(tf_keras.layers.Dense(4))
    model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD()), "mse")
    with pytest.raises(hvd.HorovodInternalError, match="dense/kernel' differs"):
        fit(model)
    with pytest.raises(hvd.HorovodInternalError, match="differs between ranks"):
        fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def case_gradients_of_its_own_that_count_as_reduced_are_warned_of():
    """Horovod's optimizer returned reduced ones: ranks would go apart without a word."""
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        w = tf.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(make(1.0))
        older = isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)
        asked = optimizer._compute_gradients if older else optimizer.compute_gradients
        options = (
            {"experimental_aggregate_gradients": False}
            if older
            else {"skip_gradients_aggregation": True}
        )

        def own(asked=asked, w=w):
            with tf.GradientTape() as tape:
                loss = w * float(1 + hvd.rank())
            return asked(loss, [w], tape=tape)

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            optimizer.apply_gradients(own())
            optimizer.minimize(lambda w=w: w * float(1 + hvd.rank()), [w])
            assert w.numpy() == [-2.0]
        with pytest.warns(UserWarning, match="returned this rank's own"):
            optimizer.apply_gradients(own(), **options)
        assert w.numpy() == [-3.0 - hvd.rank()]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            optimizer.apply_gradients([(tf.constant([1.0]), w)], **options)


def case_sync_batch_norm():
    """The layer of tf_keras normalises with all ranks' batches, in a loop, with a mask, in fit."""
    rank, size = hvd.rank(), hvd.size()
    whole = tf.random.stateless_normal([5 * size, 3, 4], [3, 1])
    start = rank * 5 - rank  # batches of different sizes: the last rank's is longer
    own = slice(start, 5 * size if rank == size - 1 else start + 4)
    mask = tf.random.stateless_uniform([5 * size, 3], [3, 2]) > 0.4
    for masked in (False, True):
        plain, synced = (
            tf_keras.layers.BatchNormalization(fused=False),
            SyncBatchNormalizationOfTfKeras(),
        )
        want = plain(whole, training=True, mask=mask if masked else None)
        for number, wrap in enumerate((lambda f: f, tf.function)):

            @wrap
            def run(synced=synced, masked=masked):
                return synced(whole[own], training=True, mask=mask[own] if masked else None)

            assert np.allclose(run(), want[own], atol=1e-5)
            if not number:
                assert np.allclose(synced.moving_mean, plain.moving_mean, atol=1e-5)
                assert np.allclose(synced.moving_variance, plain.moving_variance, atol=1e-5)
        assert np.allclose(synced(whole, training=False), synced(whole), atol=1e-6)
    images = tf.random.stateless_normal([2 * size, 3, 3, 2], [3, 3])  # where Keras fuses
    plain, synced = (
        tf_keras.layers.BatchNormalization(fused=False),
        SyncBatchNormalizationOfTfKeras(),
    )
    want = plain(images, training=True)[2 * rank : 2 * rank + 2]
    assert np.allclose(synced(images[2 * rank : 2 * rank + 2], training=True), want, atol=1e-5)
    model = small()
    model.add(SyncBatchNormalizationOfTfKeras())
    model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)), "mse")
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert variables_equal(model.weights)
    with tempfile.TemporaryDirectory() as folder:
        for kind in (".keras", ".h5"):
            model.save(f"{folder}/model{kind}")
            again = hvd.load_model(f"{folder}/model{kind}")
            assert isinstance(again.layers[-1], SyncBatchNormalizationOfTfKeras)
    with pytest.raises(ValueError, match="fused"):
        SyncBatchNormalizationOfTfKeras(fused=True)


CASES = [name for name in dir() if name.startswith("case_")]
CASES_PER_JOB = 8


@pytest.mark.parametrize("case", CASES)
def test_tf_keras_on_two_ranks(run_case, case):
    run_case(globals()[case], "gloo", 2)


def test_a_program_that_says_keras_2_by_its_environment():
    """There ``tf.keras`` is tf_keras, which nobody has imported by name."""
    program = """
import tensorflow as tf
import ringlet.tensorflow.keras as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(1.0))
assert type(optimizer).__module__.startswith("tf_keras.") and optimizer.residual_norm() == 0
import ringlet.tensorflow
model = tf.keras.Sequential([ringlet.tensorflow.SyncBatchNormalization()])
assert model(tf.ones([2, 3])).shape == (2, 3)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
