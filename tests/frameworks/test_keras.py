"""ringlet.keras on TensorFlow: fit, callbacks, saved models, Horovod's names, on real ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import tempfile
import warnings
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from told_warnings import warned

import ringlet
import ringlet.keras as hvd
from ringlet.compressors import Router
from ringlet.keras.checkpoint import compressor_state, set_compressor_state
from ringlet.keras.optimizer import Distributed
from ringlet.keras.value_collectives import variables_equal
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous import epochs
from ringlet.shared.arrays import all_finite, numpy_dtype
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import Settings, Slot
from ringlet.shared.variable_names import numbered_groups

pytestmark = pytest.mark.preloaded("tensorflow")


def made(policy="float32", seed=0, rows=0):
    keras.backend.clear_session(free_memory=False)  # layers are numbered anew
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((16,), dtype="int32" if rows else "float32")]
    if rows:
        layers += [keras.layers.Embedding(rows, 8), keras.layers.Flatten()]
    layers += [
        keras.layers.Dense(128, activation="relu", dtype=policy),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(4, dtype=policy),
    ]
    return keras.Sequential(layers)


def small(seed=0):
    """Return a model of one layer, of which a program is made in half the time."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])


def data(rank, rows=64):
    numbers = np.random.default_rng(rank)
    x = numbers.normal(size=(rows, 16)).astype("float32")
    return x, np.stack([x[:, i] * x[:, i + 4] for i in range(4)], 1)


def fit(model, callbacks=(), epochs=2, x=None, **options):
    given, y = data(hvd.rank())
    given = given if x is None else x
    options = {"batch_size": 16, "verbose": 0, "epochs": epochs} | options
    return model.fit(given, y, callbacks=list(callbacks), **options).history


def case_fit():
    rank = hvd.rank()
    for spec in ("fp16", {"*bias": "none", "*": "topk(ratio=0.1) | ef"}):
        model = made(seed=rank)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec)
        model.compile(optimizer, "mse", metrics=["mae"])
        start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        history = fit(model, [*start, hvd.callbacks.MetricAverageCallback()], epochs=4)
        assert history["loss"][-1] < history["loss"][0]
        assert hvd.allgather_object(history) == [history] * hvd.size()
        assert variables_equal([*model.weights, *optimizer.variables])
        norm = optimizer.residual_norm()
        assert (norm > 0) == (spec != "fp16")


def case_fit_eagerly_and_accumulate():
    for eager in (True, False):
        model = made()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.01),
            backward_passes_per_step=2,
            average_aggregated_gradients=True,
        )
        model.compile(optimizer, "mse", run_eagerly=eager)
        fit(model)
        assert int(optimizer.iterations) == 4
        assert variables_equal(model.weights)


def case_fit_in_mixed_float16():
    model = made("mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match="the other way round"):
        model.compile(distributed, "mse")
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(hvd.DistributedOptimizer(scaler, compression="int8 | ef"), "mse")
    history = fit(model, epochs=3)
    assert history["loss"][-1] < history["loss"][0]
    assert variables_equal([*model.weights, *model.optimizer.variables])


def case_fit_an_embedding():
    tokens = np.random.default_rng(hvd.rank()).integers(0, 20_000, (64, 16))
    for spec in (None, "int8 | ef"):
        model = made(rows=20_000)
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec), "mse"
        )
        before = hvd.stats().raw_bytes
        history = fit(model, x=tokens, epochs=3)
        assert history["loss"][-1] < history["loss"][0]
        assert variables_equal(model.weights)
        assert hvd.stats().raw_bytes - before < 12 * 4 * 20_000 * 8 / 2  # not the whole table


def case_local_layers():
    rank, size = hvd.rank(), hvd.size()
    model = made(seed=rank)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.01), local_layers=model.layers[0]
    )
    model.compile(optimizer, "mse")
    hvd.broadcast_variables(model.layers[2].weights, 0)
    fit(model)
    assert variables_equal(model.layers[2].weights)
    kernels = hvd.allgather(model.layers[0].kernel)
    assert not np.array_equal(kernels[:16], kernels[16:])
    assert len(kernels) == 16 * size
    # What overflows in a local layer of one rank skips the step on all.
    for passes in (1, 2):
        model = made()
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1024.0)
        optimizer = hvd.PartialDistributedOptimizer(
            scaled, local_layers=model.layers[0], backward_passes_per_step=passes
        )
        variables = model.trainable_variables
        before = [v.numpy() for v in variables]
        for spoilt, steps in ((rank == size - 1, 0), (False, 1)):
            gradients = [np.full(v.shape, 1024.0, "float32") for v in variables]
            gradients[0] *= np.inf if spoilt else 1.0
            for _ in range(passes):
                optimizer.apply(list(map(keras.ops.convert_to_tensor, gradients)), variables)
            assert int(optimizer.iterations) == steps
            assert float(optimizer.dynamic_scale) == 512.0
        moved = [b - v.numpy() for v, b in zip(variables, before, strict=True)]
        assert np.allclose(moved[0], 1024 / 512 * passes / size, rtol=1e-3)
        assert np.allclose(moved[-1], 1024 / 512 * passes, rtol=1e-3)
    clipped = keras.optimizers.SGD(0.01, global_clipnorm=1.0)
    optimizer = hvd.PartialDistributedOptimizer(clipped, local_layers=model.layers[0])
    with pytest.raises(ValueError, match="global_clipnorm takes the norm of all gradients"):
        optimizer.apply(list(map(keras.ops.convert_to_tensor, gradients)), variables)


def case_local_variables_are_not_broadcast():
    rank = hvd.rank()
    dense = [keras.layers.Dense(1, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((1,)), *dense])
    for layer in dense:
        layer.kernel.assign([[float(rank)]])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    inner = getattr(dense[1].kernel, "value", None)
    own = inner if hasattr(inner, "assign") else dense[1].kernel
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=dense[0].weights)
    start.register_local_var(own)  # TensorFlow's own, in Keras's
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[start])
    values = [float(keras.ops.convert_to_numpy(layer.kernel)[0, 0]) for layer in dense]
    assert values == [rank, rank, 1.0]
    with pytest.raises(ValueError, match="local variables are variables, not Dense"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[dense[0]])


def case_local_variables_outlast_another_wrapping():
    sgd, apart = keras.optimizers.SGD(1.0), keras.layers.Dense(1, use_bias=False)
    options = {"local_layers": apart, "scale_local_gradients": False}
    with pytest.raises(ValueError, match=f"local_layers: '{apart.name}' is not built"):
        hvd.PartialDistributedOptimizer(sgd, **options)
    with pytest.raises(ValueError, match="is not built"):
        hvd.PartialDistributedOptimizer(sgd, local_layers=keras.Sequential([apart]))
    apart.build((None, 1))
    own = float(hvd.rank())
    for wrap in (
        lambda: hvd.PartialDistributedOptimizer(sgd, **options),
        lambda: hvd.DistributedOptimizer(sgd, compression="fp16", scale_local_gradients=False),
        lambda: hvd.DistributedOptimizer(sgd, scale_local_gradients=False),
    ):
        apart.kernel.assign([[0.0]])
        optimizer = wrap()  # the one before is there until then
        optimizer.apply([keras.ops.full((1, 1), own)], [apart.kernel])
        assert float(apart.kernel.numpy()[0, 0]) == -own
    layers = [keras.layers.Dropout(0.1), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.layers[-1].trainable = False  # nor is a layer without variables refused
    hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=model.layers)


def case_variables_come_in_an_iterator_or_not_at_all():
    scaled = hvd.LossScaleOptimizer
    for wrap in (lambda own: own, lambda own: scaled(own, 1.0)):
        for distributed in (True, False):
            x = keras.Variable(np.zeros(2, np.float32), name="x")
            own = wrap(keras.optimizers.SGD(1.0))
            if not distributed and type(own) is not scaled:
                continue  # it is Keras's own
            optimizer = hvd.DistributedOptimizer(own) if distributed else own
            with pytest.raises(ValueError, match=r"call optimizer\.build\(trainable_variables\)"):
                optimizer.apply([keras.ops.ones(2)])
            assert not optimizer.built
            if distributed:
                with pytest.raises(ValueError, match="1 gradients for 0 variables"):
                    optimizer.apply([keras.ops.ones(2)], [])
            for given in (iter([x]), iter([x]), [x], None):
                optimizer.apply([keras.ops.ones(2)], *([] if given is None else [given]))
            assert np.array_equal(x.numpy(), np.full(2, -4.0))
            assert int(getattr(optimizer, "inner_optimizer", optimizer).iterations) == 4


def test_groups_are_as_many_as_are_asked_for():
    assert numbered_groups(6, 4) == ["0", "0", "1", "2", "2", "3"]
    assert numbered_groups(2, 4) == ["0", "1"]
    assert numbered_groups(0, 4) == []


def case_a_model_that_one_rank_has_built():
    """One that loads it, say: ranks broadcast after the first batch, when all have weights."""
    for built in ([0], [1], []):
        model = keras.Sequential([keras.layers.Dense(4)])
        if hvd.rank() in built:
            model.build((None, 16))
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1)
        assert variables_equal(model.weights)


def case_learning_rates():
    size = hvd.size()
    model = small()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.01 * size, warmup_epochs=2, verbose=1)
    later = hvd.callbacks.LearningRateScheduleCallback(0.01 * size, 0.1, start_epoch=2)
    rates = fit(model, [warmup, later], epochs=4)["lr"]
    assert rates[1] == pytest.approx(0.01 * size)
    assert 0.01 < rates[0] < rates[1]
    assert rates[2:] == pytest.approx([0.001 * size] * 2)
    curve = [warmup.multiplier(e / 4) for e in range(8)]
    assert curve == pytest.approx([(1 + (i + 1) / 8 * (size - 1)) / size for i in range(8)])
    velocity = model.optimizer.momentums[0]
    before = np.array(velocity)
    halved = hvd.callbacks.LearningRateScheduleCallback(0.002, lambda epoch: 0.5, staircase=True)
    halved.set_model(model)
    model.optimizer.learning_rate = 0.002
    halved.on_epoch_begin(0)
    assert np.allclose(velocity, before / 2)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(0, 1.0)


def case_learning_rates_without_a_warmup():
    callbacks = hvd.callbacks

    def rates(callback):
        model = small()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        return fit(model, [callback], epochs=2)["lr"]

    assert rates(callbacks.LearningRateWarmupCallback(0.2, 0)) == pytest.approx([0.2] * 2)
    never = callbacks.LearningRateScheduleCallback(0.2, 0.5, end_epoch=0)
    assert rates(never) == pytest.approx([0.1] * 2)
    with pytest.raises(ValueError, match="warmup_epochs must be at least 0, got -1"):
        callbacks.LearningRateWarmupCallback(0.2, -1)
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 1, or None, got 0"):
        callbacks.LearningRateWarmupCallback(0.2, steps_per_epoch=0)


def case_metrics_that_differ():
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": float(hvd.rank()), "acc": 1.0}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 0.5, "acc": 1.0}
    odd = {"loss": 1.0} | ({"val_loss": 1.0} if hvd.rank() == 0 else {})
    said = (
        r"metrics: 'val_loss' is there on rank\(s\) 0.*; every rank has to report the same metrics"
    )
    with pytest.raises(hvd.HorovodInternalError, match=said):
        callback.on_epoch_end(1, odd)
    with pytest.raises(hvd.HorovodInternalError, match=r"metrics: 'loss' is there on rank\(s\) 0"):
        callback.on_epoch_end(2, {"loss": 1.0} if hvd.rank() == 0 else None)
    callback.on_epoch_end(3, None)
    logs = {"f1": np.full((2, 3), hvd.rank(), np.float32), "loss": float(hvd.rank())}
    callback.on_epoch_end(4, logs)
    assert logs["loss"] == 0.5
    assert np.array_equal(logs["f1"], np.full((2, 3), 0.5))
    said = r"metrics: 'f1' differs .*rank 0: \[2\]; rank 1: \[3\]"
    with pytest.raises(hvd.HorovodInternalError, match=said):
        callback.on_epoch_end(5, {"f1": np.zeros(2 + hvd.rank())})
    for odd, said in (
        (None if hvd.rank() else 0.5, r"\(rank 0: a number; rank 1: None, which is no number\)\. "),
        ([0.5] if hvd.rank() else "best", r"\(rank 0: 'best', which is no number; rank 1: \[1\]\)"),
        ({}, "is {}, which is no number on all ranks"),
    ):
        with pytest.raises(TypeError, match=rf"metrics: 'bleu' .*{said}.*leave the metric out"):
            callback.on_epoch_end(6, {"acc": 1.0, "bleu": odd})
    callback.on_epoch_end(7, logs := {"loss": np.float32(hvd.rank())})
    assert logs == {"loss": 0.5}


def case_one_rank_has_more_batches_in_an_epoch():
    said = (
        r"rank\(s\) {} ended an epoch, and rank\(s\) {} went on to another batch in it: give all "
        "ranks equally many batches"
    )
    plain, scaled = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
    average = hvd.callbacks.MetricAverageCallback()
    for made_by, spec in ((plain, None), (lambda rate: scaled(plain(rate)), "int8 | ef")):
        model = small()
        model.compile(hvd.DistributedOptimizer(made_by(0.01), compression=spec), "mse")
        for odd in (0, 1):
            x, y = data(hvd.rank(), 96 if hvd.rank() == odd else 64)
            x[64:80] = x[64:80] if made_by is plain else np.inf  # a step that is skipped
            with pytest.raises(hvd.HorovodInternalError, match=said.format(1 - odd, odd)):
                model.fit(x, y, batch_size=16, verbose=0, callbacks=[average], shuffle=False)
            assert variables_equal(model.weights)
        fit(model, [average])
        assert variables_equal(model.weights)
        assert int(model.optimizer.iterations) == 16


def case_one_rank_resumes_in_another_epoch():
    """As where it alone finds a checkpoint: it would end first, and the others wait for it."""
    model = small()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    average = hvd.callbacks.MetricAverageCallback()
    said = r"different epochs at once \(rank 0: 3; rank 1: 1\): pass the same initial_epoch"
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=said):
            fit(model, [average], epochs=4, initial_epoch=0 if hvd.rank() else 2)
    fit(model, [average], epochs=4, initial_epoch=2)
    assert variables_equal(model.weights)


def case_one_rank_ends_training_before_others():
    """As by a callback that goes by its own loss, in the wrong place or on this rank alone."""
    said = r"rank\(s\) 1 ended training, and rank\(s\) 0 went on: .*behind MetricAverageCallback"
    average, stop = hvd.callbacks.MetricAverageCallback(), keras.callbacks.EarlyStopping
    plain, scaled = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
    for made_by, spec in ((plain, None), (lambda rate: scaled(plain(rate)), "int8 | ef")):
        model = small()
        model.compile(hvd.DistributedOptimizer(made_by(0.01), compression=spec), "mse")
        early = stop("loss", min_delta=1e9 * hvd.rank())
        with pytest.raises(hvd.HorovodInternalError, match=said):
            fit(model, [early, average], epochs=4)
        with pytest.raises(hvd.HorovodInternalError, match=said):
            fit(model, [average], epochs=3 - hvd.rank())
        assert variables_equal(model.weights)
        early = stop("loss", min_delta=1e9)
        assert len(fit(model, [average, early], epochs=4)["loss"]) == 2
        assert variables_equal(model.weights)


def case_an_optimizer_that_the_training_step_does_not_know():
    """It was made by an earlier fit, whose optimizer it still applies."""
    start, x = hvd.callbacks.BroadcastGlobalVariablesCallback(0), data(hvd.rank(), 32)[0]
    for fits_before, passes, expected in ((1, 1, 1), (0, 1, 0), (0, 4, 0)):
        model = small()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        for _ in range(fits_before):
            fit(model)
        model.optimizer = hvd.DistributedOptimizer(model.optimizer, backward_passes_per_step=passes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, x[:, :4], 16, 3, verbose=0, callbacks=[start])
        told = [str(w.message) for w in caught if "has reduced no gradients" in str(w.message)]
        assert len(told) == expected * (hvd.rank() == 0)
        assert variables_equal(model.weights) == (not expected)


def case_an_optimizer_that_is_wrapped_again():
    """It goes on: with momenta that it has not seen itself, and with what was held back."""
    scaled = keras.optimizers.LossScaleOptimizer
    gradient = np.random.default_rng(hvd.rank()).normal(size=4000).astype("float32")
    for wrap in (lambda own: own, lambda own: scaled(own, 1.0)):
        own = wrap(keras.optimizers.SGD(1.0, momentum=0.5))
        variable = keras.Variable(np.zeros(4000, np.float32), name="x")
        first = hvd.DistributedOptimizer(own, compression="topk(ratio=0.1) | ef")
        first.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        sent, owed = -variable.numpy(), first.residual_norm()
        again = hvd.DistributedOptimizer(
            own, "another", compression="int8 | ef", gradient_predivide_factor=2.0
        )
        assert again.residual_norm() == pytest.approx(owed / 2)
        assert (first.residual_norm(), owed > 0, again.name) == (0, True, "another")
        again.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        assert [*map(id, again.variables)] == [*map(id, first.variables)]
        assert int(again.iterations) == 2
        # Two means in all: that of the first step, half of it once more, and what is left.
        total = np.asarray(hvd.allreduce(2 * gradient))
        assert np.abs(-variable.numpy() - 0.5 * sent - total).max() < 0.1
        assert variables_equal([variable, *again.variables])
        texts = []
        with warned(texts):
            plain = hvd.DistributedOptimizer(own)
        said = "is wrapped again, and forgets ['residual'] of 'x', which int8 | ef kept"
        assert [said in text for text in texts] == [True] * (hvd.rank() == 0)
        assert plain.residual_norm() == again.residual_norm() == 0


def case_rows_held_back_where_an_optimizer_takes_tables_as_dense():
    """Wrapped again, or with what was saved: what a table's rows held back is applied."""
    numbers = np.random.default_rng(hvd.rank())
    given = numbers.normal(size=(64, 32)).astype("float32")
    mean = np.asarray(hvd.allreduce(given))
    places, shape = np.arange(64), (4096, 32)

    def wrapped(own, **options):
        return hvd.DistributedOptimizer(
            own, compression="topk(ratio=0.01) | ef", gradient_predivide_factor=2.0, **options
        )

    for loads in (False, True):
        for first in (False, True):
            own, table = keras.optimizers.SGD(1.0), keras.Variable(np.zeros(shape), name="table")
            before = wrapped(own, sparse_as_dense=first)
            before.apply([tf.IndexedSlices(given, places, shape)], [table])
            assert before.residual_norm() > 0
            if loads:
                after = wrapped(keras.optimizers.SGD(1.0), sparse_as_dense=not first)
                hvd.set_compressor_state(after, hvd.compressor_state(before))
            else:
                after = wrapped(own, sparse_as_dense=not first)
            for _ in range(40 if first else 2):
                after.apply([tf.IndexedSlices(np.zeros_like(given), places, shape)], [table])
            assert after.residual_norm() == 0
            np.testing.assert_allclose(-table.numpy()[:64], mean, atol=1e-6)
            assert not table.numpy()[64:].any()


def case_a_gradient_that_one_rank_lacks():
    """The model is the same, and not blamed."""
    used = keras.Variable(np.ones(3, np.float32), name="used")
    left = keras.Variable(np.ones(3, np.float32), name="left")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([used, left])
    gradient = keras.ops.ones(3)
    said = (
        r"'left' differs between ranks \(rank 0: float32\[3\]; rank 1: no gradient\); on "
        r"rank\(s\) 1 the loss does not depend on it: compute the same loss on every rank, or add"
    )
    with pytest.raises(hvd.HorovodInternalError, match=said):
        optimizer.apply([gradient, None if hvd.rank() else gradient])
    optimizer.apply([gradient * (1 + hvd.rank()), None])
    assert np.allclose(keras.ops.convert_to_numpy(used), 1 - 0.15)
    assert np.allclose(keras.ops.convert_to_numpy(left), 1)
    # So in a later step, whichever ranks have begun theirs, and whatever was reduced before.
    optimizer.apply([gradient, gradient])
    for odd in (0, 1):
        for expected in ([gradient, gradient], [gradient, None]):
            optimizer.apply(expected)
            given = list(expected)
            if hvd.rank() == odd:
                given[1] = None if expected[1] is not None else gradient
            with pytest.raises(hvd.HorovodInternalError, match=r"gradients of .*'left' differs"):
                optimizer.apply(given)
    optimizer.apply([gradient, gradient])
    optimizer.apply([gradient, None])


def case_a_program_whose_step_fails_counts_none():
    """The optimizer's count depends on no gradient, and waits for all of them."""
    import tensorflow as tf

    used, left = (keras.Variable(np.ones(3, np.float32), name=name) for name in ("used", "left"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([used, left])

    @tf.function
    def step(lacks):
        gradient = keras.ops.ones(3)
        optimizer.apply([gradient, None if lacks else gradient])

    for lacks, steps in (False, 1), (True, 2), (False, 3):
        step(lacks)
        for _ in range(3):
            with pytest.raises(hvd.HorovodInternalError, match="'left' differs"):
                step(bool(hvd.rank()))
            assert int(optimizer.iterations) == steps
            assert np.allclose(keras.ops.convert_to_numpy(used), 1 - 0.1 * steps)


def case_records_name_optimizer_and_model():
    """Also where ranks have given it other names, which are their own affair."""
    records = []
    recording = hvd.start_metrics(callbacks=[records.append], network=False)
    for rate in (0.1, 0.2):
        model = small()
        inner = keras.optimizers.SGD(rate, name=f"sgd_of_{hvd.rank()}")
        model.compile(hvd.DistributedOptimizer(inner), "mse")
        fit(model)
    recording.stop()
    groups = list(dict.fromkeys(r["group"] for r in records if r["kind"] == "step"))
    own = f"sgd_of_{hvd.rank()} of sequential"
    assert groups == [own, f"{own} 2"]


def case_patterns_without_a_match():
    """A route that compresses nothing is named, once, on the first rank."""
    told = []
    with warned(told):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression={"embeding*": "fp16", "*": "none"}
        )
        model = small()
        model.compile(optimizer, "mse")
        fit(model, epochs=2)
    assert len(told) == (hvd.rank() == 0)
    assert all("'embeding*' matches none of the variables" in text for text in told)


def case_saved_models():
    rank = hvd.rank()
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    model = made()
    spec = "topk(ratio=0.1) | ef"
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec)
    model.compile(optimizer, "mse")
    best = hvd.callbacks.BestModelCheckpoint("loss", filepath=folder / "best.keras")
    residuals = hvd.callbacks.CompressorStateCheckpoint(folder / "best.keras")
    fit(model, [hvd.callbacks.MetricAverageCallback(), best, residuals])
    hvd.broadcast_object()
    assert {p.name for p in folder.iterdir()} == {
        "best.keras",
        *[f"best.keras.rank{r}of{hvd.size()}" for r in range(hvd.size())],
    }
    horovods = hvd.callbacks.BestModelCheckpoint("loss", 1, "max", 3)
    kept = [horovods.monitor, horovods.verbose, horovods.save_freq]
    assert kept == ["loss", 1, 3]
    with pytest.raises(ValueError, match=r"pass filepath='best\.keras'"):
        hvd.callbacks.BestModelCheckpoint("best.keras")
    plain = keras.models.load_model(folder / "best.keras")
    assert type(plain.optimizer) is keras.optimizers.Adam  # Ringlet is not needed to load it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.load_model(folder / "best.keras")
        hvd.load_model(folder / "best.keras", compression="none")  # as it was meant
    told = [str(w.message) for w in caught if "no compression" in str(w.message)]
    assert len(told) == (rank == 0)
    assert all("best.keras.rank0of2 was saved with 'topk(ratio=0.1) | ef'" in t for t in told)
    again = hvd.load_model(folder / "best.keras", compression=spec)
    assert int(again.optimizer.iterations) == int(optimizer.iterations) == 8
    for a, b in zip(again.weights, model.weights, strict=True):
        assert np.array_equal(a, b)
    assert again.optimizer.residual_norm() == 0
    hvd.load_compressor_state(again.optimizer, folder / "best.keras")
    assert again.optimizer.residual_norm() == optimizer.residual_norm() > 0
    with pytest.raises(
        ValueError, match="computes in bfloat16, but this model's layers in float32"
    ):
        hvd.load_model(folder / "best.keras", precision="bf16")
    narrow = made("mixed_float16")
    narrow.compile(keras.optimizers.SGD(0.01), "mse")
    fit(narrow, epochs=1)
    narrow.save(folder / f"narrow{rank}.keras")
    halved = hvd.load_model(folder / f"narrow{rank}.keras", precision="fp16(init=256)")
    assert str(halved.optimizer._ringlet.settings.router) == "fp16"
    fit(halved, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1)
    assert float(halved.optimizer.dynamic_scale) == 256.0
    assert int(halved.optimizer.inner_optimizer.iterations) == 8  # it went on from 4
    assert variables_equal([*halved.weights, *halved.optimizer.variables])
    (folder / f"narrow{rank}.keras").unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (plain, model):
            fit(each, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=1)
    told = [str(w.message) for w in caught if "is no DistributedOptimizer" in str(w.message)]
    assert len(told) == (rank == 0)
    assert all(text.startswith("Adam, the model's optimizer") for text in told)
    for each in (model, again):
        keras.utils.set_random_seed(5)
        each.evaluate(*data(rank), verbose=0)
        fit(each, epochs=1, shuffle=False)
    assert variables_equal(again.weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(again, [hvd.callbacks.CompressorStateCheckpoint(folder / "best.keras")], epochs=1)
    saved_by_other_ranks(again, folder, rank)
    foreign = folder / f"best.keras.rank{1 - rank}of2"
    hvd.broadcast_object()
    with pytest.warns(UserWarning, match="residuals of rank"):
        hvd.set_compressor_state(again.optimizer, foreign.read_bytes())
    assert again.optimizer.residual_norm() == 0
    with pytest.raises(ValueError, match="no legacy optimizers"):
        hvd.load_model(folder / "best.keras", legacy_opts=True)


def saved_by_other_ranks(model, folder, rank):
    """Residuals of another number of ranks are told of once, and what holds none is not."""
    empty, other = folder / "empty.keras", folder / "other[1].keras"  # no pattern, but a name
    missing = rf"compressor state of rank {rank} of 2 is missing; there is "
    with pytest.raises(FileNotFoundError, match=missing + "no other rank's: .*of2'$"):
        hvd.load_compressor_state(model.optimizer, folder / "never.keras")
    state = (folder / f"best.keras.rank{rank}of2").read_bytes()
    (folder / f"torn.keras.rank{rank}of2").write_bytes(state[:-100])
    with pytest.raises(ValueError, match=rf"torn\.keras\.rank{rank}of2: .* no compressor state"):
        hvd.load_compressor_state(model.optimizer, folder / "torn.keras")
    (folder / f"{other.name}.rank{rank}of3").write_bytes(state)
    (folder / f"{other.name}.rank{rank}of3.old").write_bytes(state)
    plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    (folder / f"{empty.name}.rank{rank}of3").write_bytes(hvd.compressor_state(plain))
    hvd.broadcast_object()
    with pytest.raises(FileNotFoundError, match=missing + "that of rank0of3, rank1of3: "):
        hvd.load_compressor_state(model.optimizer, other)
    for path, tells in ((other, rank == 0), (empty, False)):
        callback = hvd.callbacks.CompressorStateCheckpoint(path)
        callback.set_model(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback.on_train_begin()
        told = [str(w.message) for w in caught if "held back is lost" in str(w.message)]
        assert len(told) == tells, told
        said = f"{path} holds the residuals of 2 ranks (rank0of3, rank1of3), this job has 2"
        assert all(said in text for text in told)
    hvd.broadcast_object()
    hvd.save_compressor_state(model.optimizer, other)
    hvd.broadcast_object()
    left = {path.name.removeprefix(other.name) for path in folder.iterdir() if path.name[0] == "o"}
    assert left == {".rank0of2", ".rank1of2", ".rank0of3.old", ".rank1of3.old"}


def case_what_one_rank_alone_has_loaded_of_what_is_common():
    own = np.random.default_rng(hvd.rank()).normal(size=(16, 128)).astype("float32")

    def trained(spec, given):
        kernel = keras.Variable(np.zeros((16, 128)), name="kernel")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=spec)
        optimizer.build([kernel])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if given is not None:
                hvd.set_compressor_state(optimizer, given)
            for _ in range(4):
                optimizer.apply([keras.ops.convert_to_tensor(own)], [kernel])
        assert variables_equal([kernel]), spec
        told = [str(w.message) for w in caught if "in common is forgotten" in str(w.message)]
        return hvd.allgather_object(hvd.compressor_state(optimizer)), told

    rank = hvd.rank()
    for spec, lost, alone in (
        ("int8 | ef", False, False), ("int8 | ef21", True, True), ("acpsgd | ef", False, True),
    ):  # fmt: skip
        kept, told = trained(spec, None)
        told += trained(spec, kept[rank])[1]  # each its own
        assert told == []
        for given, forgotten in ((kept[0], lost), (kept[0] if rank == 0 else None, alone)):
            _, told = trained(spec, given)
            assert len(told) == (forgotten and rank == 0), (spec, told)


def case_states_of_other_steps_than_other_ranks():
    """Estimates of another step are other ones; and nobody waits where one rank alone loads."""
    rank = hvd.rank()
    own = keras.ops.convert_to_tensor(np.random.default_rng(rank).normal(size=(16, 128)), "float32")
    kernel = keras.Variable(np.zeros((16, 128)), name="kernel")
    sgd = keras.optimizers.SGD(0.01)
    optimizer = hvd.DistributedOptimizer(sgd, compression="int8 | ef21")
    optimizer.build([kernel])
    states = []
    for _ in range(3):
        optimizer.apply([own], [kernel])
        states.append(hvd.compressor_state(optimizer))
    hvd.set_compressor_state(optimizer, states[rank])
    with pytest.warns(UserWarning, match="from files of other steps"):
        optimizer.apply([own], [kernel])
    assert variables_equal([kernel])
    if rank == 1:
        hvd.set_compressor_state(optimizer, states[2])
    told = "'how often what compressors remember was put in place' differs between ranks"
    with pytest.raises(hvd.HorovodInternalError, match=rf"{told} .* on all ranks or on none"):
        optimizer.apply([own], [kernel])
    with pytest.warns(UserWarning, match="from files of other steps"):
        optimizer.apply([own], [kernel])
    assert variables_equal([kernel])


def case_state_of_variables_of_another_size_or_name():
    """Such as layers that were made wider, or renamed, since what is loaded was saved."""
    tables = tf.IndexedSlices(tf.ones([2, 512]) * (hvd.rank() + 1), [0, 3], [200, 512])

    def trained(data=None, **sizes):
        made = [keras.Variable(np.zeros(size), name=name) for name, size in sizes.items()]
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression="topk(ratio=0.1) | ef"
        )
        if data is not None:
            set_compressor_state(optimizer, data)
        rows = tf.IndexedSlices(tables.values, tables.indices, made[0].shape)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            for _ in range(3):
                optimizer.apply([rows, *map(tf.ones_like, made[1:])], made)
        texts = [str(each.message) for each in told if each.category is UserWarning]
        assert variables_equal(made)
        return optimizer, texts

    sizes = {"table": (200, 512), "kernel": (50, 40), "kept": (60, 50)}
    optimizer, texts = trained(**sizes)
    assert texts == []
    data = compressor_state(optimizer)
    assert trained(data, **sizes)[1] == []
    wider = {"table": (300, 512), "kernel": (50, 41), "kept": (60, 50)}
    optimizer, (text,) = trained(data, **wider)
    assert "'table' has 153600 elements; what it held back of rows, float32[200, 512]" in text
    assert "'kernel' has 2050 elements; its 'residual', float32[2000], is forgotten" in text
    assert "kept" not in text
    optimizer, (text,) = trained(data, table=(200, 512), renamed=(50, 40), kept=(60, 50))
    assert "compressors remember of 'kernel', and the first step after it has no gra" in text
    held = optimizer._ringlet.memory.states
    assert held["kernel"]["step"] == 3
    assert held["kept"]["step"] == 6


def case_a_model_that_one_rank_loads():
    """Keras forgets Sequential models in the paths of what it loads; ranks agree all the same."""
    rank = hvd.rank()
    spec = {"*bias": "none", "*": "topk(ratio=0.1) | ef"}
    inner = keras.Sequential([keras.layers.Dense(128), keras.layers.Dense(8)], name="tower")
    model = keras.Sequential([keras.Input((16,)), inner, keras.layers.Dense(4)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec), "mse")
    if rank == 1:
        path = Path(tempfile.mkdtemp()) / "one.keras"
        model.optimizer.build(model.trainable_variables)
        model.save(path)
        model = hvd.load_model(path, compression=spec)
    paths = hvd.allgather_object([v.path for v in model.weights])
    assert paths[0] != paths[1]
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, [start])
    optimizer = model.optimizer
    assert variables_equal([*model.weights, *optimizer.variables])
    assert sorted(optimizer._ringlet.memory.states) == sorted(paths[0])
    # What was remembered under one name is found under the other.
    norm, state = optimizer.residual_norm(), hvd.compressor_state(optimizer)
    path = Path(tempfile.mkdtemp()) / "every.keras"
    model.save(path)
    loaded = hvd.load_model(path, compression=spec)
    hvd.set_compressor_state(loaded.optimizer, state)
    loaded.optimizer.apply([keras.ops.zeros_like(v) for v in loaded.weights], loaded.weights)
    assert sorted(loaded.optimizer._ringlet.memory.states) == sorted(v.path for v in loaded.weights)
    assert 0 < loaded.optimizer.residual_norm() < norm  # a tenth of it has travelled
    odd = keras.Variable(np.zeros(3), name=f"odd{rank}")
    with pytest.raises(hvd.HorovodInternalError, match="load one file on every rank"):
        hvd.broadcast_variables([odd], 0)


def case_values():
    size, rank = hvd.size(), hvd.rank()
    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2
    assert float(hvd.allreduce(1.0, op=hvd.Sum, compression=hvd.Compression.fp16)) == size
    assert hvd.allgather(np.array([rank])).numpy().tolist() == list(range(size))
    assert float(hvd.broadcast(float(rank), 1)) == 1.0
    assert hvd.reducescatter(np.ones(size, np.float32), op=hvd.Sum).numpy().tolist() == [size]
    with pytest.raises(RuntimeError, match=r"compat\.v1 graph"):
        hvd.broadcast_global_variables(0)


def case_wrapped_twice_and_other_mistakes():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match=r"keras\.optimizers\.Optimizer"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="Average or Sum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="did you mean"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression="int9")
    with pytest.raises(TypeError, match="cannot be copied"):
        optimizer.__reduce_ex__(4)
    with pytest.raises(RuntimeError, match="stateless_apply"):
        optimizer.stateless_apply([], [], [])
    model = made()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=True)
    with pytest.raises(RuntimeError, match=r"jit_compile=False to model\.compile"):
        fit(model)


def case_arguments_of_the_wrong_kind():
    """What was given is named, before anything is exchanged; numbers of NumPy are numbers."""
    sgd, x = keras.optimizers.SGD, keras.Variable([0.0], name="x")
    for options, kind, said in (
        ({"op": True}, ValueError, r"op is one of hvd\.Average, .*, not True"),
        ({"process_set": [0, 1]}, TypeError, r"process_set is what add_process_set.*\[0, 1\]"),
        ({"process_set": None}, TypeError, "process_set is what .* not None"),
        ({"process_set": 0}, TypeError, "process_set is what .* not 0"),
        ({"groups": "all"}, ValueError, "groups is a number, or a list of lists .* not 'all'"),
        ({"groups": 1.5}, ValueError, r"groups is a number, or a list of lists .* not 1\.5"),
        ({"groups": True}, ValueError, "groups is a number, or a list of lists .* not True"),
        ({"groups": [["a", "b"]]}, ValueError, "groups is .* not of names, such as 'a'"),
        ({"groups": -1}, ValueError, "groups must be at least 0, got -1"),
        ({"num_groups": "2"}, TypeError, "num_groups is a whole number, not '2'"),
        ({"backward_passes_per_step": 2.0}, TypeError, r"is a whole number, not 2\.0"),
        ({"backward_passes_per_step": True}, TypeError, "is a whole number, not True"),
        ({"gradient_predivide_factor": "2"}, TypeError, "predivide_factor is a number, not '2'"),
        ({"gradient_predivide_factor": None}, TypeError, "factor is a number, not None"),
        ({"sparse_as_dense": "no"}, TypeError, "sparse_as_dense is True or False, not 'no'"),
        ({"average_aggregated_gradients": "yes"}, TypeError, "is True or False, not 'yes'"),
        ({"scale_local_gradients": 2}, TypeError, "scale_local_gradients is True or False, not 2"),
    ):
        with pytest.raises(kind, match=said):
            hvd.DistributedOptimizer(sgd(), **options)
    with pytest.warns(DeprecationWarning, match="num_groups is deprecated; pass groups=N") as told:
        assert hvd.DistributedOptimizer(sgd(), num_groups=2)._ringlet_groups == 2
    assert [warning.filename for warning in told] == [__file__]
    optimizer = hvd.DistributedOptimizer(
        sgd(1.0),
        gradient_predivide_factor=np.float32(2),
        backward_passes_per_step=np.int64(2),
        average_aggregated_gradients=np.True_,
        sparse_as_dense=1,
        groups=iter([iter([x])]),
    )
    assert optimizer._ringlet_groups == [[x]]
    set_compressor_state(optimizer, compressor_state(optimizer))
    for _ in range(2):
        optimizer.apply([keras.ops.full((1,), hvd.rank())], [x])
    assert float(x.numpy()[0]) == -0.5
    schedule, warmup = (
        hvd.callbacks.LearningRateScheduleCallback,
        hvd.callbacks.LearningRateWarmupCallback,
    )
    for multiplier in ("0.1", None, {0: 1}):
        said = f"multiplier is a number or a function of the epoch, not {multiplier!r}"
        with pytest.raises(TypeError, match=re.escape(said)):
            schedule(0.1, multiplier)
    with pytest.raises(TypeError, match=r"initial_lr is a number, not '0\.1'"):
        warmup("0.1")
    with pytest.raises(TypeError, match="warmup_epochs is a number, not '5'"):
        warmup(0.1, "5")
    for rate in (float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match=f"initial_lr must be above 0 and finite, got {rate}"):
            schedule(rate, 1.0)
    with pytest.raises(ValueError, match="multiplier must be a number, got nan"):
        schedule(0.1, np.float32("nan"))
    schedule(np.float32(0.1), np.int64(1))
    with pytest.raises(TypeError, match=r"a list, such as model\.variables, not a Variable"):
        hvd.broadcast_variables(x, 0)
    with pytest.raises(TypeError, match=r"overwrites variables, .* which a ndarray is not"):
        hvd.broadcast_variables([np.zeros(3)], 0)


def case_groups_of_another_model():
    """Rank 0 warns, once; not of layers that are frozen, or have no variables."""
    mine, others = made(), made()
    frozen = keras.Variable([1.0], trainable=False, name="frozen")
    variables = mine.trainable_variables
    given = [keras.ops.zeros(v.shape) for v in variables]
    for groups, expected in (
        ([variables[:1], others.trainable_variables], "groups 1 hold none of the variables"),
        ([variables[:1], [frozen], []], None),
        ([variables], None),
    ):
        texts = []
        with warned(texts):
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=groups)
            for _ in range(2):
                optimizer.apply(given, variables)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(mine(np.ones((1, 16), np.float32)))
            tape = ringlet.tensorflow.DistributedGradientTape(tape, groups=groups)
            tape.gradient(loss, variables)
        told = [text for text in texts if "groups" in text]
        assert len(told) == 2 * (expected is not None and hvd.rank() == 0), told
        assert all(expected in text and repr(variables[0].path) in text for text in told), told


def case_gradients_that_are_new_values_are_refused():
    """Those of float8 layers: sums and compressors would spoil the scales without a word."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    model.layers[0].quantize("float8")
    x = np.ones((8, 64), np.float32)
    told = "'.*scale' is its new value .*quantize\\('float8'\\)"
    for passes in (1, 2):
        wrapped = hvd.DistributedOptimizer(
            keras.optimizers.SGD(), compression="none", backward_passes_per_step=passes
        )
        model.compile(wrapped, "mse", jit_compile=False)
        with pytest.raises(ValueError, match=f"DistributedOptimizer: the gradient of {told}"):
            model.fit(x, x[:, :32], verbose=0)
    scale = keras.Variable(1.0, name="scale")
    scale.overwrite_with_gradient = True
    with ringlet.tensorflow.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = 2.0 * scale
    with pytest.raises(ValueError, match=f"DistributedGradientTape: the gradient of {told}"):
        tape.gradient(loss, [scale])


def case_models_that_differ():
    import tensorflow as tf

    keras.backend.clear_session(free_memory=False)
    units = 3 + hvd.rank()
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(units), keras.layers.Dense(4)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(tf.errors.FailedPreconditionError, match="dense/kernel' differs") as told:
        fit(model)
    assert isinstance(told.value, hvd.HorovodInternalError)
    with pytest.raises(hvd.HorovodInternalError, match="differs between ranks"):
        fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def counted(callback):
    """Have a callback's commits counted, and the states that they keep."""
    kept = []
    save = callback.state.save
    callback.state.save = lambda: (
        save(),
        kept.append((callback.state.epoch, callback.state.batch)),
    )
    return kept


def case_elastic_state():
    rank = hvd.rank()
    model = made(seed=rank)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), compression="topk(ratio=0.1) | ef"
    )
    model.compile(optimizer, "mse")
    state = hvd.elastic.KerasState(model, epoch=10 * rank, batch=0, seen=[rank])
    hooks = []

    class Commit(hvd.elastic.CommitStateCallback):
        def commit(self):
            hooks.append("commit")
            super().commit()

    class Batch(hvd.elastic.UpdateBatchStateCallback):
        def on_batch_end(self, batch, logs=None):
            hooks.append(batch)
            super().on_batch_end(batch, logs)

    commit = Commit(state, batches_per_commit=3)
    epochs = hvd.elastic.UpdateEpochStateCallback(state)
    updates = [Batch(state), epochs, commit]
    kept = counted(commit)

    @hvd.elastic.run
    def train(state, fail=False):
        fit(state.model, updates, epochs=2 + state.epoch, initial_epoch=state.epoch)
        state.seen.append("trained")
        if fail:
            fit(state.model, epochs=1)  # which nobody commits
            hvd.allreduce(np.ones(1 + rank, np.float32), name="differs")
        state.commit()
        return state.epoch

    assert train(state) == 2
    assert state.seen == [0, "trained"]
    # sync; after every third batch and every epoch of 4 batches; the commit of ``train``
    assert kept == [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 0)]
    assert hooks == [0, 1, 2, "commit", 3, "commit", 0, 1, "commit", 2, 3, "commit"]
    assert variables_equal([*model.weights, *optimizer.variables])
    assert optimizer.residual_norm() > 0
    with pytest.raises(hvd.HorovodInternalError, match="differ between ranks"):
        train(state, fail=True)
    assert (state.epoch, state.seen, int(optimizer.iterations)) == (4, [0, "trained"], 16)

    def arrays():
        return [keras.ops.convert_to_numpy(v) for v in [*model.weights, *optimizer.variables]]

    state.commit()
    committed, norm = arrays(), optimizer.residual_norm()
    keras.utils.set_random_seed(rank)
    fit(model, shuffle=False)
    after = arrays()
    state.restore()
    assert all(map(np.array_equal, arrays(), committed))
    assert optimizer.residual_norm() == norm
    assert not all(map(np.array_equal, after, committed))
    epochs.on_train_begin()
    epochs.on_epoch_end(0)  # fit without initial_epoch
    assert state.epoch == 5
    with pytest.raises(ValueError, match="has no weights yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="at least 1"):
        hvd.elastic.CommitStateCallback(state, 0)


def case_a_newcomer_to_an_elastic_job_forgets_what_others_pay():
    """What a checkpoint held back, which they have gone on from."""
    model = made()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01), compression="topk(ratio=0.1) | ef"
    )
    model.compile(optimizer, "mse")
    fit(model)
    saved, told = compressor_state(optimizer), "have gone on from it, and pay it"
    state, held = hvd.elastic.KerasState(model), optimizer.residual_norm()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hvd.elastic, "is_elastic", lambda: True)
        patched.setattr(epochs, "is_elastic", lambda: True)
        set_compressor_state(optimizer, saved)
        state.sync()
        assert optimizer.residual_norm() == held > 0  # all have loaded it
        for _ in range(2):  # before the others have taken a step, and behind one
            if hvd.rank() == 1:
                set_compressor_state(optimizer, saved)
                state = hvd.elastic.KerasState(model)
                with pytest.warns(UserWarning, match=told):
                    state.sync()
                held = 0.0
            else:
                set_compressor_state(optimizer, compressor_state(optimizer))  # as often as others
                state.sync()
            assert optimizer.residual_norm() == held
            fit(model)
            held = optimizer.residual_norm()
            assert held > 0
    assert variables_equal([*model.weights, *optimizer.variables])


def case_passes_end_with_what_is_restored():
    """Half-summed passes survive neither a restore nor a sync, on whichever rank they are."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].set_weights([np.zeros((1, 1))])
    extra = keras.Variable(np.zeros(1, np.float32), name="own")
    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(
        sgd, backward_passes_per_step=2, scale_local_gradients=False
    )
    shared = model.layers[0].kernel
    optimizer.build([shared, extra])
    optimizer.register_local_var(extra)
    state = hvd.elastic.KerasState(model, optimizer)

    def step(value):
        given = [keras.ops.full((1, 1), value), keras.ops.full((1,), value)]
        optimizer.apply(given, [shared, extra])
        return [float(keras.ops.convert_to_numpy(v).sum()) for v in (shared, extra)]

    for back in (state.restore, state.sync):
        extra.assign([0.0])
        if hvd.rank() == 0:
            step(100.0)
        back()
        assert step(1.0) == [0.0, 0.0]
        assert step(1.0) == [-2.0, -2.0]
        shared.assign([[0.0]])


def summing(*scopes, size=1, saved=None, **options):
    """Return an optimizer of two passes, the second variable local, and what is a pass of it."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        pair = [keras.Variable(np.zeros(n, np.float32), name=f"of{n}") for n in (size, 2)]
    options = {"backward_passes_per_step": 2, "scale_local_gradients": False} | options
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    optimizer.register_local_var(pair[1])
    if saved is not None:
        set_compressor_state(optimizer, saved)

    def apply(value):
        optimizer.apply([keras.ops.full(v.shape, float(value)) for v in pair], pair)
        return [-float(v.numpy()[0]) for v in pair]

    return optimizer, apply


def case_passes_since_a_step_outlast_a_checkpoint():
    """Each rank's own, of local variables too, under the names of a model that was loaded."""
    rank = hvd.rank()
    optimizer, apply = summing("sequential", "dense")
    between = compressor_state(optimizer)
    apply(10 * rank)
    saved, goes_on = compressor_state(optimizer), [5.0 + 2, 10.0 * rank + 2]
    foreign = hvd.allgather_object(saved)[1 - rank]
    assert apply(2) == goes_on
    for given, passes, options, expected, said in (
        (saved, 1, {}, goes_on, None),
        (saved, 1, {"average_aggregated_gradients": True}, [e / 2 for e in goes_on], None),
        (saved, 1, {"size": 3}, [2.0, goes_on[1]], "names or shapes: of sequential/dense/of1"),
        (saved, 3, {"backward_passes_per_step": 3}, [6.0] * 2, "1 of 2 .*, and a step has 3 here"),
        (foreign, 2, {}, [4.0] * 2, f"on rank {1 - rank} of 2, this is rank {rank} of 2: they are"),
        (between, 2, {}, [4.0] * 2, None),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer, apply = summing("dense", saved=given, **options)
            moved = [apply(2) for _ in range(passes)]
        texts = [str(w.message) for w in caught if "backward passes" in str(w.message)]
        texts += [str(w.message) for w in caught if "passes before" in str(w.message)]
        assert moved == [[0.0] * 2] * (passes - 1) + [expected]
        assert len(texts) == (said is not None), texts
        assert all(re.search(said, text) for text in texts), texts
    apply(30)
    set_compressor_state(optimizer, between)  # takes the place of what was added up
    apply(2)
    assert apply(2) == [8.0] * 2
    # One rank alone has loaded it, and is a pass ahead.
    optimizer, apply = summing("dense", saved=None if rank else saved)
    for _ in range(rank):
        apply(2)
    with pytest.raises(hvd.HorovodInternalError, match=r"added up before' differs .*rank 0: 1; ra"):
        apply(2)
    optimizer.forget_passes()
    before = apply(2)
    assert [now - then for now, then in zip(apply(2), before, strict=True)] == [4.0, 4.0]


def case_passes_since_a_step_outlast_another_wrapping():
    one, ten = keras.ops.ones(1), keras.ops.full((1,), 10.0 * hvd.rank())
    for passes in (2, 3):
        sgd, texts = keras.optimizers.SGD(1.0), []
        pair = [keras.Variable([0.0], name=name) for name in ("shared", "own")]
        first = hvd.DistributedOptimizer(
            sgd, backward_passes_per_step=2, scale_local_gradients=False
        )
        first.register_local_var(pair[1])
        first.apply([ten, ten], pair)
        with warned(texts):
            again = hvd.DistributedOptimizer(
                sgd, backward_passes_per_step=passes, scale_local_gradients=False
            )
        again.apply([one, one], pair)
        moved = [-float(v.numpy()[0]) for v in pair]
        assert moved == ([6.0, 10.0 * hvd.rank() + 1.0] if passes == 2 else [0.0, 0.0])
        assert first._ringlet_accumulator.pending().count == 0
        told = [text for text in texts if "1 of 2 backward passes" in text]
        assert len(told) == (passes == 3 and hvd.rank() == 0), texts


def case_a_local_variable_that_one_rank_leaves_out_keeps_nobody_waiting():
    """Its rank raises behind the reduction, and begins the next step with the others."""
    shared, own = (keras.Variable(np.zeros(1, np.float32), name=n) for n in ("shared", "own"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([shared, own])
    optimizer.register_local_var(own)
    one = keras.ops.ones(1)
    optimizer.apply([one, one], [shared, own])
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="and none in the last one, which applies them"):
            optimizer.apply([one, None], [shared, own])
    else:
        optimizer.apply([one, one], [shared, own])
    before = float(keras.ops.convert_to_numpy(own)[0])
    for _ in range(2):
        optimizer.apply([one, one], [shared, own])
    moved = float(keras.ops.convert_to_numpy(own)[0]) - before
    assert hvd.allgather_object(moved) == [moved] * hvd.size()
    assert moved < 0


def case_ranks_that_begin_with_different_optimizers_go_on_with_the_same():
    variables = [keras.Variable(np.zeros(n, np.float32), name=f"of{n}") for n in (2, 3)]
    each = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in variables]

    def step(i):
        n = variables[i].shape[0]
        each[i].apply([keras.ops.full((n,), float(hvd.rank()))], [variables[i]])

    with pytest.raises(Mismatch, match="of2"):
        step(hvd.rank())
    for i in (0, 1, 1, 0):
        step(i)
    mean = (hvd.size() - 1) / 2
    for variable in variables:
        assert np.allclose(keras.ops.convert_to_numpy(variable), -2 * mean)


def case_settings_that_one_rank_has_otherwise():
    """One error on every rank, at the first step, and no rank waits for another."""
    import tensorflow as tf

    odd, opts = hvd.rank() == 1, keras.optimizers
    schedule = opts.schedules.ExponentialDecay
    differing = {
        "precision": lambda: {"precision": "fp16" if odd else None, "compression": "none"},
        "backward_passes_per_step": lambda: {"backward_passes_per_step": 1 + odd},
        "average_aggregated_gradients": lambda: {
            "backward_passes_per_step": 2,
            "average_aggregated_gradients": odd,
        },
        "sparse_as_dense": lambda: {"sparse_as_dense": odd},
        "the class of the optimizer": lambda: {"optimizer": opts.Adam() if odd else opts.SGD()},
        "weight_decay": lambda: {"optimizer": opts.SGD(weight_decay=0.1 if odd else None)},
        "clipnorm": lambda: {"optimizer": opts.SGD(clipnorm=1.0 + odd)},
        "gradient_accumulation_steps": lambda: {
            "optimizer": opts.SGD(gradient_accumulation_steps=2 + odd)
        },
        "inner_optimizer momentum": lambda: {
            "optimizer": opts.LossScaleOptimizer(opts.SGD(momentum=0.5 * odd)),
            "compression": "int8 | ef",
        },
        "learning_rate decay_rate": lambda: {
            "optimizer": opts.SGD(schedule(0.1, 10, 0.9 if odd else 0.8))
        },
    }
    for name, arguments in differing.items():
        x = keras.Variable(np.zeros(8, np.float32), name="x")
        optimizer = hvd.DistributedOptimizer(**{"optimizer": opts.SGD(0.1)} | arguments())
        optimizer.build([x])
        step = tf.function(functools.partial(optimizer.apply, [tf.ones(8)], [x]))
        for _ in range(2):  # it is not forgotten
            if optimizer._ringlet_accumulator.passes == 2:
                step()
            with pytest.raises(hvd.HorovodInternalError, match=f"'{name}' differs between") as told:
                step()
        texts = hvd.allgather_object(str(told.value).partition("\n")[0])
        assert len(set(texts)) == 1, texts
        assert np.array_equal(x.numpy(), np.zeros(8)), name


def case_settings_of_scales_that_differ():
    """A rank with another way through a step: it looks for overflows before gradients travel."""
    import tensorflow as tf

    scaled = keras.optimizers.LossScaleOptimizer
    for inner in (True, False):
        own = keras.optimizers.SGD(0.1)
        if inner or hvd.rank() == 1:
            own = scaled(own, initial_scale=2.0 ** (4 + hvd.rank()))
        optimizer = hvd.DistributedOptimizer(own, compression="int8 | ef")
        name = "initial_scale" if inner else "that a step is skipped for an overflow"
        with pytest.raises(hvd.HorovodInternalError, match=name):
            optimizer.apply([tf.ones(8)], [keras.Variable(np.zeros(8, np.float32), name="x")])


def case_models_that_drift_apart_are_told_of():
    """Where nothing broadcasts them, or a rate is set on one rank; once, on one rank."""
    rank = hvd.rank()
    steps = {"run_eagerly": True, "steps_per_execution": 1}, {"steps_per_execution": 2}

    def rate_of(rank):
        class Own(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.optimizer.learning_rate = 0.01 * (1 + (epoch > 1) * rank)

        return Own()

    for options in steps:
        for seed, callbacks, wrong in (
            (rank, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), rate_of(0)], None),
            (rank, [rate_of(0)], "/kernel' differs between ranks after the first step, so that"),
            (0, [rate_of(rank)], "the learning rate differs between ranks after 16 steps, so"),
        ):
            model = small(seed)
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
            model.compile(optimizer, "mse", **options)
            texts = []
            with warned(texts):
                fit(model, callbacks, epochs=6)
            assert len(texts) == (rank == 0 and wrong is not None), texts
            assert all(wrong in text for text in texts), texts
            assert variables_equal(model.weights) is (wrong is None)


def case_horovods_names():
    import importlib

    ringlet.install_as_horovod()
    for module in ("horovod.keras", "horovod.tensorflow.keras", "horovod.tensorflow"):
        found = importlib.import_module(module)
        assert found.rank() == hvd.rank()
        assert found.size() == hvd.size()
        assert found.DistributedOptimizer
        assert found.Compression.fp16
        assert found.start_timeline
    for module in ("horovod.keras.callbacks", "horovod.tensorflow.keras.callbacks"):
        assert importlib.import_module(module).MetricAverageCallback
    for module in ("horovod.keras.elastic", "horovod.tensorflow.keras.elastic"):
        assert importlib.import_module(module).KerasState is hvd.elastic.KerasState
    states = importlib.import_module("horovod.tensorflow.elastic")
    assert issubclass(states.TensorFlowKerasState, hvd.elastic.KerasState)
    assert found.elastic.run is states.run
    assert found.DistributedGradientTape
    assert found.util._executing_eagerly()
    import tensorflow as tf

    pair = [tf.Variable(1.0), tf.Variable(1.0)]
    refs = found.util.vars_to_refs([pair[0], pair])
    assert len({*refs[1], refs[0]}) == 2
    assert found.util.refs_to_vars(refs)[1][1] is pair[1]
    runs = []
    once = found.util._cache(lambda *given, **named: runs.append(given))
    assert [once([1, 2], a="b"), once((1, 2), a="b"), once([1], a="b")] == [None] * 3
    assert runs == [([1, 2],), ([1],)]
    assert found.util._make_subgraph(lambda x: x + 1)(1).numpy() == 2
    for variable in (pair[0], keras.Variable(1.0)):
        tf.keras.backend.set_value(variable, 3)
        assert f"{tf.keras.backend.get_value(variable):.1f}" == "3.0"
    env = importlib.import_module("horovod.runner.common.util.env")
    assert env.get_env_rank_and_size() == (hvd.rank(), hvd.size())
    assert os.environ["HOROVOD_LOCAL_SIZE"] == str(hvd.size())
    assert os.environ["HOROVOD_CROSS_RANK"] == str(hvd.cross_rank())
    assert os.environ["HOROVOD_CROSS_SIZE"] == str(hvd.cross_size())
    assert os.environ["HOROVOD_HOSTNAME"] == "localhost"
    assert importlib.import_module("horovod").__version__ == "0.28.1"
    versions = importlib.import_module("horovod.common.util")
    assert versions.is_version_greater_equal_than("2.10.0", "2.9")
    threads = importlib.import_module("horovod.runner.util.threads")
    done = []
    threads.in_thread(done.append, (1,)).join()
    threads.in_thread(done.index, (2,), silent=True).join()
    assert done == [1]
    both = importlib.import_module("ringlet.tensorflow.keras")
    assert both.callbacks.MetricAverageCallback is hvd.callbacks.MetricAverageCallback


def case_saved_models_under_the_alias():
    ringlet.install_as_horovod()
    import horovod.keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.03, momentum=0.9))
    model.compile(
        optimizer, "mse", metrics=["mae"], loss_weights=2.0, experimental_run_tf_function=False
    )
    fit(model, epochs=1)
    keras.backend.set_value(optimizer.lr, 0.015)
    path = Path(tempfile.mkdtemp()) / "model.keras"
    model.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = keras.models.load_model(path)
        again = horovod.keras.load_model(path)
    for each in (plain, again):
        assert each.compiled
        assert each.get_compile_config()["loss_weights"] == 2.0
        assert each.evaluate(*data(0), verbose=0, return_dict=True).keys() == {"loss", "mae"}
        assert isinstance(each.optimizer, Distributed) is (each is again)
        assert keras.backend.get_value(each.optimizer.lr) == np.float32(0.015)
        kept = zip(each.optimizer.variables(), optimizer.variables(), strict=True)
        assert all(np.array_equal(a, b) for a, b in kept)
    for each in (model, again):
        fit(each, epochs=1, shuffle=False)
    assert int(again.optimizer.iterations) == 8
    assert all(map(np.array_equal, again.get_weights(), model.get_weights()))
    assert variables_equal(again.weights)

    class Own(keras.Model):
        def compile(self, *args, **kwargs):
            super().compile(*args, **kwargs)

    mine = Own(model.inputs, model.outputs)
    with pytest.warns(UserWarning, match="method is custom"):  # as Keras has it
        mine.compile_from_config(model.get_compile_config())


CASES = [name for name in dir() if name.startswith("case_")]
CASES_PER_JOB = 12


@pytest.mark.parametrize("case", CASES)
def test_keras_on_two_ranks(run_case, case):
    run_case(globals()[case], "gloo", 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_all_finite(dtype):
    kind = numpy_dtype(dtype)
    largest = np.full((3, 70), ml_dtypes.finfo(kind).max, kind)
    assert all_finite(largest)  # though they add up to Inf
    assert all_finite(np.zeros(0, kind))
    for bad in (np.inf, -np.inf, np.nan):
        for values in (largest.copy(), np.zeros((3, 70), kind)):
            values[2, 69] = bad
            assert not all_finite(values)
            values[0, 0] = -bad
            assert not all_finite(values)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_passes_that_overflow_are_added_up_without_a_word(dtype):
    """A loss scale that is too large for now makes infinities, and all ranks skip the step."""
    accumulator, slot = Accumulator(2), Slot("x", dtype, (2,))
    most = np.finfo(dtype).max
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accumulator.add([slot], [np.array([np.inf, most], dtype)]) is None
        _, (total,) = accumulator.add([slot], [np.array([-np.inf, most], dtype)])
    assert (str(np.isnan(total)), str(np.isinf(total))) == ("[ True False]", "[False  True]")


def test_ranks_outside_of_a_process_set_count_alike():
    """Some ranks have a reducer before that of all ranks, which is the same one still."""

    def reduced():
        hvd.init()
        few = hvd.add_process_set([0, 1])
        sums = []
        for process_set in (few, hvd.global_process_set):
            settings = Settings(Router("none"), hvd.Sum, process_set=process_set)
            slots = [Slot("w", "float32", (3,))]
            (total,) = GradientReducer("test", settings).reduce(slots, [np.ones(3, np.float32)])
            sums.append(total.tolist())
        hvd.shutdown()
        return sums

    whole, part, alone = [3.0] * 3, [2.0] * 3, [1.0] * 3
    told = ringlet.run(reduced, np=3, transport="local")
    assert told == [[part, whole], [part, whole], [alone, whole]]


def test_a_process_set_that_was_removed_and_is_added_again():
    """A reducer goes on with what it holds back: its residual and what was sent are all of it."""

    def reduced():
        hvd.init()
        few = hvd.add_process_set([0, 1])
        settings = Settings(Router("topk(ratio=0.01) | ef"), process_set=few)
        reducer, given = GradientReducer("test", settings), np.arange(2048, dtype=np.float32)
        sent = np.zeros_like(given)
        for turn in range(6):
            sent += reducer.reduce([Slot("w", "float32", (2048,))], [given])[0]
            if turn in (2, 3):
                hvd.remove_process_set(few)
                hvd.add_process_set([[1, 2], [0, 2]][turn - 2])
                hvd.add_process_set(few)
        owed = reducer.memory.states.get("w", {}).get("residual", np.float32(0))
        number = few.process_set_id
        hvd.shutdown()
        return number, reducer.step, (sent + owed).tolist()

    told = ringlet.run(reduced, np=3, transport="local")
    whole = [6.0 * i for i in range(2048)]
    assert told == [(5, 6, whole), (5, 6, whole), (5, 0, whole)]


@pytest.mark.parametrize("outputs", [False, True])
def test_one_rank_that_is_left_gives_back_what_was_held_back(outputs):
    slots = [
        Slot("rows", "float32", (10_000, 16), sparse=True),
        Slot("dense", "float32", (6, 50)),
        Slot("half", "float16", (300,)),
    ][outputs:]  # results go to arrays where none is sparse
    own = [np.ones((2, 16), np.float32), np.array([0, 3])][: 0 if outputs else 2]
    own += [np.full((6, 50), 2, np.float32), np.full(300, 3, np.float16)]

    def work():
        hvd.init()
        reducer = GradientReducer("test", Settings(Router("topk(ratio=0.1) | ef"), predivide=2.0))
        owed = {"dense": np.arange(300, dtype=np.float32), "half": np.full(300, 0.5, np.float32)}
        for name, residual in owed.items():
            reducer.memory.states[name] = {"residual": residual.copy(), "step": 3}
        reducer.memory.states["unused"] = {"residual": np.ones(4, np.float32)}
        to = [np.empty_like(array) for array in own] if outputs else None
        *rows, dense, half = reducer.reduce(slots, own, outputs=to)
        assert all(map(np.array_equal, rows, own))
        np.testing.assert_array_equal(dense, 2 + 2 * np.arange(300).reshape(6, 50))
        np.testing.assert_array_equal(half, np.full(300, 4, np.float16))
        assert reducer.memory.norm() == 2.0  # of what had no gradient
        again = reducer.reduce(slots, own, outputs=to)
        assert all(map(np.array_equal, again, own))

    ringlet.run(work, np=1, transport="local")


def test_what_rows_are_owed_outlasts_an_overflow():
    """As where a gradient is dense: what is held back stays where a row is infinite."""
    rows = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    slot, places = Slot("rows", "float32", (10_000, 16), sparse=True), np.array([3, 5])

    def work():
        hvd.init()
        reducer = GradientReducer("test", Settings(Router("int8 | ef(decay=0.5)")))
        reducer.reduce([slot], [rows.copy(), places])
        kept = reducer.memory.states["rows"]["rows"][places]
        assert kept.any(axis=1).all()
        infinite = rows.copy()
        infinite[0, 1] = np.inf
        reducer.reduce([slot], [infinite, places])
        now = reducer.memory.states["rows"]["rows"][places]
        np.testing.assert_array_equal(now, kept)  # one scale for both rows
        return True

    assert ringlet.run(work, np=2, transport="local") == [True, True]


def test_what_is_owed_to_one_rank_that_is_left_outlasts_an_overflow():
    slot = Slot("w", "float32", (300,))

    def work():
        hvd.init()
        reducer = GradientReducer("test", Settings(Router("topk(ratio=0.1) | ef"), guard=True))
        reducer.memory.states["w"] = {"residual": np.ones(300, np.float32), "step": 3}
        given = np.zeros(300, np.float32)
        given[7] = np.inf
        (spoiled,) = reducer.reduce([slot], [given])  # the optimizer skips it
        assert not np.isfinite(spoiled[7])
        assert reducer.memory.norm() == pytest.approx(300**0.5)
        (paid,) = reducer.reduce([slot], [np.zeros(300, np.float32)])
        np.testing.assert_array_equal(paid, np.ones(300))
        assert reducer.memory.norm() == 0

    ringlet.run(work, np=1, transport="local")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("spec", ["topk(ratio=0.01) | ef", "int8 | ef"])
@pytest.mark.parametrize(
    ("op", "predivide"), [(hvd.Average, 1.0), (hvd.Average, 4.0), (hvd.Sum, 1.0)]
)
def test_what_is_held_back_of_a_table_goes_on_where_its_gradient_becomes_dense(
    op, predivide, spec, size
):
    """Or sparse: all that is applied is what all ranks have given, whichever way comes last."""
    shape, places = (4096, 32), np.arange(64) * 3
    slots = {kind: Slot("table", "float32", shape, sparse=kind) for kind in (False, True)}

    def work():
        hvd.init()
        numbers = np.random.default_rng(hvd.rank())
        for last in slots:
            settings = Settings(Router(spec), op, predivide)
            reducer = GradientReducer("test", settings)
            given, applied = np.zeros(shape), np.zeros(shape)
            for i in range(-3, 130 if last else 8):
                sparse = last if i >= 0 else last ^ bool(i % 2)
                rows = numbers.normal(size=(64, 32)).astype("float32") * (i < 0)
                gradient = np.zeros(shape, np.float32)
                gradient[places] = rows
                given += gradient
                arrays = [rows, places] if sparse else [gradient]
                results = reducer.reduce([slots[sparse]], arrays)
                if sparse:
                    applied[results[1]] += results[0]
                else:
                    applied += results[0]
                if i == -1:
                    assert reducer.memory.norm() > 0
            assert reducer.memory.norm() < 1e-5
            expected = np.asarray(hvd.allreduce(given.astype("float32"), op=op))
            np.testing.assert_allclose(applied, expected, atol=1e-5)

    ringlet.run(work, np=size, transport="local")


@pytest.mark.parametrize("key", ["rows", "residual"])
@pytest.mark.parametrize("spec", ["fp16 | ef", "bf16 | ef"])
def test_what_is_held_back_of_a_table_is_worth_the_same_as_rows_and_as_a_whole(spec, key):
    """Also where a compressor is given each rank's share of the mean, and where one is left."""
    shape, places = (4096, 32), np.arange(64) * 3
    slots = {kind: Slot("table", "float32", shape, sparse=kind) for kind in (False, True)}

    def work():
        hvd.init()
        size, held = hvd.size(), np.zeros(shape, np.float32)
        held[places] = np.random.default_rng(hvd.rank()).integers(-8, 8, (64, 32))
        found = {}
        for sparse, slot in slots.items():
            settings = Settings(Router(spec), predivide=4.0)
            reducer = GradientReducer("test", settings)
            own = held.flatten() if key == "residual" else held.copy()
            reducer.memory.states["table"] = {key: own}
            if size == 1:
                reducer.memory.among = 2  # of before
                reducer.memory.resize(1)
            zeros = np.zeros((64, 32) if sparse else shape, np.float32)
            results = reducer.reduce([slot], [zeros, places] if sparse else [zeros])
            found[sparse] = results[0] if sparse else results[0][places]
            assert reducer.memory.norm() == 0
        assert found[False].any()
        np.testing.assert_array_equal(found[False], found[True])

    for size in (2, 1):
        ringlet.run(work, np=size, transport="local")


def test_what_is_held_back_by_row_goes_on_after_a_whole_table_that_failed():
    """The next rows are of the list that was reduced last, which nobody declares anew."""
    shape, places = (4096, 32), np.arange(64)
    rows = [Slot("table", "float32", shape, sparse=True)]
    whole = [Slot("small", "float32", (30, 2), sparse=True), Slot("table", "float32", shape)]

    def work():
        hvd.init()
        rank, applied = hvd.rank(), np.zeros(shape, np.float32)
        reducer = GradientReducer("test", Settings(Router("topk(ratio=0.01) | ef")))
        reducer.memory.keep_steps()  # as elastic jobs do
        given = np.random.default_rng(rank).normal(size=(64, 32)).astype("float32")
        for i in range(-1, 110):
            values, at = reducer.reduce(rows, [given * (i < 0), places])
            applied[at] += values
            if i == -1:
                norm = reducer.memory.norm()
                wrong = [np.ones((1, 2), np.float32), np.array([30 if rank == 0 else 0])]
                with pytest.raises(ValueError if rank == 0 else hvd.StepAbandoned):
                    reducer.reduce(whole, [*wrong, np.zeros(shape, np.float32)])
                reducer.memory.take_back()
                assert reducer.memory.norm() == pytest.approx(norm)
        assert norm > 0
        assert reducer.memory.norm() == 0
        np.testing.assert_allclose(applied[:64], hvd.allreduce(given), atol=1e-6)

    ringlet.run(work, np=2, transport="local")


def test_one_rank_that_is_left_gives_back_rows_when_they_are_used():
    """Once, wherever a row comes several times; nothing in a step that is skipped, or refused."""
    slots = [
        Slot("table", "float32", (10_000, 16), sparse=True),
        Slot("half", "float16", (10_000, 16), sparse=True),
        Slot("dense", "float32", (300,)),
    ]

    def gradients(*places, value=1.0):
        rows = np.full((len(places), 16), value, np.float32)
        at = np.array(places)
        return [rows, at, rows.astype(np.float16), at[::-1], np.ones(300, np.float32)]

    def work():
        hvd.init()
        settings = Settings(Router("topk(ratio=0.1) | ef"), predivide=2.0, guard=True)
        reducer = GradientReducer("test", settings)
        for name in ("table", "half"):
            rows = np.zeros((10_000, 16), np.float32)
            rows[[3, 5, 7]] = [[30], [50], [70]]
            reducer.memory.states[name] = {"rows": rows}
        reducer.memory.states["dense"] = {"residual": np.ones(300, np.float32)}
        norm = reducer.memory.norm()
        reducer.reduce(slots, gradients(3, 5, value=np.inf))
        with pytest.raises(ValueError, match="'table' has 10000 rows; its gradient has indices"):
            reducer.reduce(slots, gradients(3, -1))
        assert reducer.memory.norm() == norm
        given = gradients(5, 3, 5, 0)
        table, at, half, others, dense = reducer.reduce(slots, given)
        assert at.tolist() == [5, 3, 5, 0]
        assert others.tolist() == [0, 5, 3, 5]
        np.testing.assert_array_equal(table, np.array([51, 31, 1, 1])[:, None] * np.ones(16))
        np.testing.assert_array_equal(half, np.array([1, 51, 31, 1])[:, None] * np.ones(16))
        np.testing.assert_array_equal(dense, np.full(300, 3))
        assert (given[0] == 1).all()
        assert reducer.memory.norm() == pytest.approx((2 * 16) ** 0.5 * 70)
        table, _, half, *_ = reducer.reduce(slots, gradients(3, 7))
        np.testing.assert_array_equal(table, np.array([1, 71])[:, None] * np.ones(16))
        np.testing.assert_array_equal(half, np.array([71, 1])[:, None] * np.ones(16))
        assert reducer.memory.norm() == 0

    ringlet.run(work, np=1, transport="local")


@pytest.mark.parametrize("place", [-1, 30])
def test_rows_that_a_small_table_lacks(place):
    """In a step in which all ranks have compared what they reduce, and in one after another."""
    slot = Slot("table", "float32", (30, 2), sparse=True)

    def work():
        hvd.init()
        reducer = GradientReducer("test", Settings(Router("none")))
        rows = np.ones((1, 2), np.float32)
        reducer.reduce([Slot("other", "float32", (2,))], [np.ones(2, np.float32)])
        told = f"'table' has 30 rows; its gradient has indices from {place} to {place}"
        for odd in (0, 1, 2, 0):
            own = hvd.rank() == odd
            with pytest.raises(ValueError if own else hvd.StepAbandoned, match=told):
                reducer.reduce([slot], [rows, np.array([place if own else 7])])
        (summed,) = reducer.reduce([slot], [rows, np.array([29])])
        assert summed.sum() == summed[29].sum() == 2

    ringlet.run(work, np=3, transport="local")


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_that_one_rank_gives_up_ends_on_all_and_holds_back_what_it_held(beside):
    """Where gradients travel as rows, too: nobody waits for those that do not come."""
    tables = [Slot(f"table{i}", "float32", (10_000, 16), sparse=True) for i in range(2)]
    slots = [*tables, *([Slot("dense", "float32", (8,))] if beside else [])]

    def gradients(rank, wrong=False):
        numbers = np.random.default_rng(rank)
        rows = [numbers.normal(size=(2, 16)).astype("float32") for _ in tables]
        given = [rows[0], np.array([0, 3]), rows[1], np.array([0, 20_000 if wrong else 5])]
        return [*given, *([np.ones(8, np.float32)] if beside else [])]

    def work():
        hvd.init()
        rank = hvd.rank()
        reducer = GradientReducer("test", Settings(Router("topk(ratio=0.1) | ef")))
        reducer.reduce(slots, gradients(rank))
        norm = reducer.memory.norm()
        raised = ValueError if rank == 0 else hvd.StepAbandoned
        with pytest.raises(raised, match="has 10000 rows; its gradient has indices"):
            reducer.reduce(slots, gradients(rank, wrong=rank == 0))
        assert reducer.memory.norm() == norm > 0
        return [array.tobytes() for array in reducer.reduce(slots, gradients(rank))]

    results = ringlet.run(work, np=2, transport="local")
    assert results[0] == results[1]


def test_functions_with_arguments_answer_wrong_ones():
    for name in set(hvd.__all__) - {"timeline_span"}:
        found = getattr(hvd, name)
        if inspect.isfunction(found) and inspect.signature(found).parameters:
            assert hasattr(found, "__wrapped__"), f"{name} is no public entry point"
    with pytest.raises(TypeError, match="did you mean 'root_rank'"):
        hvd.broadcast(np.ones(2), rootrank=0)
