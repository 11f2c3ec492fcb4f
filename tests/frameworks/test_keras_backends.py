"""ringlet.keras on Keras's backends torch and jax: this file is also the script of two ranks."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("tensorflow")
CHECKS = ("fit", "local layers", "drift", "residuals and models", "values", "mistakes")
OWN = {
    "torch": ("mixed float16", "precision", "accumulation", "elsewhere", "compiled"),
    "jax": ("bfloat16", "refusals"),
}


def main():
    import keras
    import numpy as np

    import ringlet.keras as hvd
    from ringlet.keras.value_collectives import variables_equal

    if keras.config.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert "tensorflow" not in sys.modules
    sys.modules["tensorflow"] = None  # Keras would import it to save a model: two seconds a rank

    def made(optimizer, policy="float32"):
        keras.backend.clear_session(free_memory=False)
        random.seed(rank)  # what initializers ask; keras.utils.set_random_seed imports TensorFlow
        dense = keras.layers.Dense
        layers = [keras.Input((16,)), dense(128, activation="relu", dtype=policy), dense(4)]
        model = keras.Sequential(layers)
        model.compile(optimizer, "mse")
        return model

    def fit(model, *callbacks, epochs=3):
        numbers = np.random.default_rng(rank)
        x = numbers.normal(size=(64, 16)).astype("float32")
        y = np.stack([x[:, i] * x[:, i + 4] for i in range(4)], 1)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        mean = hvd.callbacks.MetricAverageCallback()
        callbacks = [start, mean, *callbacks]
        return model.fit(x, y, 16, epochs, verbose=0, callbacks=callbacks).history["loss"]

    for spec in (None, "int8 | ef", "topk(ratio=0.1) | ef"):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec)
        model = made(optimizer)
        losses = fit(model)
        assert losses[-1] < losses[0]
        assert variables_equal([*model.weights, *optimizer.variables])
    print("fit", flush=True)

    keras.backend.clear_session(free_memory=False)
    own, shared = keras.layers.Dense(8), keras.layers.Dense(4)
    parted = keras.Sequential([keras.Input((16,)), own, shared])
    partly = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=own)
    parted.compile(partly, "mse")
    for _ in range(2):  # variables are others' inside after each fit, on some backends
        fit(parted, epochs=1)
        parted.fit(np.full((4, 16), 1.0 + rank), np.ones((4, 4)), 2, verbose=0)
        assert variables_equal(shared.weights)
        assert not variables_equal(own.weights)
    local_layers_among_others(size)
    print("local layers", flush=True)

    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("ringlet").addHandler(handler)
    x = np.ones((64, 16), np.float32)
    for alike in (True, False):  # nothing broadcasts: a rate, and then weights, of its own
        other = made(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
        if alike:
            for weight in other.weights:
                weight.assign(np.full(weight.shape, 0.01))
            other.fit(x, x[:, :4], 4, 2, verbose=0)
            assert variables_equal(other.weights)
            assert not texts
            other.optimizer.learning_rate = 0.01 * (1 + rank)
        other.fit(x, x[:, :4], 4, verbose=0)
    kernel = repr(other.weights[0].path)
    told = [text.partition(", so that their models drift apart")[0] for text in texts]
    assert told == [
        "the learning rate differs between ranks after 32 steps",
        f"{kernel} differs between ranks after the first step",
    ] * (rank == 0), texts
    logging.getLogger("ringlet").removeHandler(handler)
    print("drift", flush=True)

    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    best = hvd.callbacks.BestModelCheckpoint("loss", filepath=folder / "best.keras")
    fit(model, best, hvd.callbacks.CompressorStateCheckpoint(folder / "best.keras"))
    hvd.broadcast_object()
    again = hvd.load_model(folder / "best.keras", compression=spec)
    hvd.load_compressor_state(again.optimizer, folder / "best.keras")
    norm = optimizer.residual_norm()
    assert again.optimizer.residual_norm() == norm > 0
    state = hvd.elastic.KerasState(again, epoch=rank)
    state.sync()
    weight = keras.ops.convert_to_numpy(again.weights[0]).copy()
    fit(again, hvd.elastic.UpdateEpochStateCallback(state), epochs=1)
    assert (state.epoch, again.optimizer.residual_norm() != norm) == (1, True)
    state.restore()
    assert (state.epoch, again.optimizer.residual_norm()) == (0, norm)
    assert np.array_equal(keras.ops.convert_to_numpy(again.weights[0]), weight)
    print("residuals and models", flush=True)

    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2

    class Halves:
        """A compressor of Horovod's kind."""

        @staticmethod
        def compress(tensor):
            return tensor / 2, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2

    assert float(hvd.allreduce(float(rank), compression=Halves)) == (size - 1) / 2
    assert hvd.allgather(np.array([rank])).tolist() == list(range(size))
    assert float(hvd.broadcast(float(rank), 1)) == 1.0
    assert hvd.reducescatter(np.ones(size), op=hvd.Sum).tolist() == [size]
    print("values", flush=True)

    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    odd = keras.Variable(np.zeros(3 + rank, np.float32), name="odd")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(hvd.HorovodInternalError, match="'odd' differs between ranks"):
        optimizer.apply([keras.ops.ones(3 + rank)], [odd])
    model = made(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    average, rows = hvd.callbacks.MetricAverageCallback(), 64 if rank else 32
    with pytest.raises(hvd.HorovodInternalError, match=r"rank\(s\) 0 ended an epoch"):
        model.fit(x[:rows], x[:rows, :4], 16, verbose=0, callbacks=[average])
    print("mistakes", flush=True)
    {"torch": on_torch, "jax": on_jax}[keras.config.backend()](made, fit)


def local_layers_among_others(size):
    """What is compiled in an elastic job goes on when there are more ranks, or less."""
    import keras
    import numpy as np

    import ringlet.keras as hvd
    from ringlet.keras import backends

    own = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), own])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=own)
    model.compile(optimizer, lambda _, made: keras.ops.mean(made))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backends, "is_elastic", lambda: True)
        for ranks in (size, 8 * size):
            patched.setattr(hvd.ProcessSet, "size", lambda _, ranks=ranks: ranks)
            before = model.get_weights()[0]
            model.train_on_batch(np.ones((4, 1)), np.ones((4, 1)))
            moved = before - model.get_weights()[0]
            assert np.allclose(moved, 1 / ranks, atol=1e-6), (moved, ranks)


def on_torch(made, fit):
    """Loss scales and accumulation, which an optimizer of torch's backend does by itself."""
    import keras
    import numpy as np
    import torch

    import ringlet.keras as hvd
    from ringlet.keras import backends
    from ringlet.keras.value_collectives import variables_equal
    from ringlet.precision import DynamicScale, Policy, StaticScale

    rank, size = hvd.rank(), hvd.size()
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024.0)
    optimizer = hvd.DistributedOptimizer(scaler, compression="int8 | ef")
    model = made(optimizer)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.weights, 0)
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.weights]
    bad = np.inf if rank == 1 else 1.0
    gradients = [torch.full(tuple(v.shape), bad) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    for old, new in zip(before, model.weights, strict=True):
        assert np.array_equal(old, keras.ops.convert_to_numpy(new))
    assert float(optimizer.dynamic_scale.value) == 512.0
    assert optimizer.residual_norm() == 0
    print("mixed float16", flush=True)

    keep = ("head.*",)
    for scale in (StaticScale(1000.0), DynamicScale(512.0, 4.0, 0.25, 2, most=1024.0)):
        keras.backend.clear_session(free_memory=False)
        policy = Policy("mine", "float16", "fp16", keep, scale)
        layers = [keras.layers.Dense(32), keras.layers.LayerNormalization()]
        layers += [keras.layers.ReLU(), keras.layers.Dense(4, name="head")]
        model = hvd.apply_precision(keras.Sequential([keras.Input((16,)), *layers]), policy)
        computing = [layer.compute_dtype for layer in model.layers]
        assert computing == ["float16", "float32", "float16", "float32"]
        inner = keras.optimizers.SGD(0.01)
        model.compile(hvd.DistributedOptimizer(inner, precision=policy), "mse")
        fit(model, epochs=1)
        for bad in (False, True, False):
            before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.weights]
            factor = np.inf if bad and rank == 1 else 1.0
            model.train_on_batch(np.ones((4, 16)) * factor, np.ones((4, 4)))
            after = map(keras.ops.convert_to_numpy, model.weights)
            assert all(map(np.array_equal, before, after)) == bad
        for bad in (False, False, False, False, False, True, False):
            scale = scale.after(bad)
        path = f"{tempfile.mkdtemp()}/model.keras"
        model.save(path)
        for each in (model.optimizer, hvd.load_model(path, precision=policy).optimizer):
            assert float(each.dynamic_scale.value) == scale.scale
            assert int(each.skipped_steps.value) == 1
        assert variables_equal([*model.weights, *model.optimizer.variables])
    print("precision", flush=True)

    x = keras.Variable(np.zeros(3, np.float32), name="x")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for i in range(4):
        optimizer.apply([torch.full((3,), rank + 1.0)], [x])
        expected = (i + 1) // 2 * (size + 1)
        assert np.allclose(keras.ops.convert_to_numpy(x), -expected)
    optimizer.apply([torch.full((3,), rank + 1.0)], [x])
    again = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    hvd.set_compressor_state(again, hvd.compressor_state(optimizer))
    again.apply([torch.full((3,), rank + 1.0)], [x])
    assert np.allclose(keras.ops.convert_to_numpy(x), -expected - (size + 1))
    print("accumulation", flush=True)

    sys.path.insert(0, str(Path(__file__).parent))
    from test_torch_devices import Far, Sending

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with Sending():  # gradients that are not in host memory, and come back to where they were
        far = Far(torch.full((3,), rank + 1.0))
        given = optimizer._ringlet, [x], ["x"], [far], [""], optimizer._ringlet_accumulator
        _, (mean,) = backends.reduce_gradients(*given)
        assert mean.device.type == "lazy"
        assert mean.inner.tolist() == [(size + 1) / 2] * 3
    print("elsewhere", flush=True)

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8 | ef")
    model = made(optimizer)
    model.compile(optimizer, "mse", jit_compile=True)
    for parameter in model.parameters():  # as after a step: without, the first one is compiled too
        parameter.grad = torch.zeros_like(parameter)
    losses = fit(model, epochs=2)
    assert losses[-1] < losses[0]
    assert variables_equal([*model.weights, *optimizer.variables])
    assert optimizer.residual_norm() > 0
    print("compiled", flush=True)


def on_jax(made, fit):
    """What there is instead on jax, whose steps are one program."""
    import keras

    import ringlet.keras as hvd
    from ringlet.keras.value_collectives import variables_equal

    keras.backend.clear_session(free_memory=False)
    layers = [keras.layers.Dense(32), keras.layers.ReLU(), keras.layers.Dense(4)]
    model = hvd.apply_precision(keras.Sequential([keras.Input((16,)), *layers]), "bf16")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), precision="bf16"), "mse")
    losses = fit(model)
    assert losses[-1] < losses[0]
    assert variables_equal(model.weights)
    print("bfloat16", flush=True)

    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match="need no loss scale"):
        hvd.DistributedOptimizer(scaler)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2)
    print("refusals", flush=True)


@pytest.fixture(scope="module", params=OWN)
def job(request):
    """Run the checks on two ranks."""
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    done = subprocess.run(
        [*command, sys.executable, __file__],
        env=os.environ | {"KERAS_BACKEND": request.param},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return request.param, done


@pytest.mark.parametrize("check", [*CHECKS, "own"])
def test_backends_on_two_ranks(job, check):
    backend, done = job
    for each in OWN[backend] if check == "own" else (check,):
        assert done.stdout.count(f">: {each}\n") == 2, done.stdout + done.stderr


if __name__ == "__main__":
    main()
