"""ringlet.keras on Keras's jax backend: this file is also the script that two ranks run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHECKS = ("fit", "residuals and models", "precision", "values", "mistakes")


def main():
    import keras
    import numpy as np

    import ringlet.keras as hvd
    from ringlet.keras.functions import variables_equal

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert keras.config.backend() == "jax"
    assert "tensorflow" not in sys.modules

    def made(optimizer, policy="float32"):
        keras.backend.clear_session()
        keras.utils.set_random_seed(rank)
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

    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    best = hvd.callbacks.BestModelCheckpoint(folder / "best.keras", monitor="loss")
    fit(model, best, hvd.callbacks.CompressorStateCheckpoint(folder / "best.keras"))
    hvd.broadcast_object()
    again = hvd.load_model(folder / "best.keras", compression=spec)
    hvd.load_compressor_state(again.optimizer, folder / "best.keras")
    norm = optimizer.residual_norm()
    assert again.optimizer.residual_norm() == norm > 0
    fit(again, epochs=1)
    assert again.optimizer.residual_norm() != norm
    print("residuals and models", flush=True)

    keras.backend.clear_session()
    layers = [keras.layers.Dense(32), keras.layers.ReLU(), keras.layers.Dense(4)]
    model = hvd.apply_precision(keras.Sequential([keras.Input((16,)), *layers]), "bf16")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), precision="bf16"), "mse")
    losses = fit(model)
    assert losses[-1] < losses[0]
    assert variables_equal(model.weights)
    print("precision", flush=True)

    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2
    assert hvd.allgather(np.array([rank])).tolist() == list(range(size))
    assert float(hvd.broadcast(float(rank), 1)) == 1.0
    assert hvd.reducescatter(np.ones(size), op=hvd.Sum).tolist() == [size]
    print("values", flush=True)

    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match="need no loss scale"):
        hvd.DistributedOptimizer(scaler)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2)
    odd = keras.Variable(np.zeros(3 + rank, np.float32), name="odd")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(hvd.HorovodInternalError, match="'odd' differs between ranks"):
        optimizer.apply([keras.ops.ones(3 + rank)], [odd])
    print("mistakes", flush=True)


@pytest.fixture(scope="module")
def job():
    """Run the checks on two ranks."""
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    return subprocess.run(
        [*command, sys.executable, __file__],
        env=os.environ | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_jax_backend_on_two_ranks(job, check):
    assert job.stdout.count(f">: {check}\n") == 2, job.stdout + job.stderr


if __name__ == "__main__":
    main()
