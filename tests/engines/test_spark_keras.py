"""KerasEstimator on a real Spark: what it learns, keeps, measures and adds."""

import os
import sys

import numpy as np
import pytest

os.environ |= {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_LOCAL_HOSTNAME": "localhost",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import keras
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession, functions

from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed
from ringlet.spark import KerasEstimator

TRUE = np.array([1.0, -2.0, 3.0, 0.5], np.float32)


@pytest.fixture(scope="module")
def spark():
    builder = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.shuffle.partitions", "3").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def frame(spark):
    features = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
    rows = [
        (float(x[0]), [float(x[1])], Vectors.dense(x[2:]), float(x @ TRUE), 1.0 * (i % 2), i % 5)
        for i, x in enumerate(features)
    ]
    return spark.createDataFrame(rows, ["a", "b", "c", "y", "w", "fold"]).cache()


def line(dropout=0.0):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,)), keras.layers.Dense(1, use_bias=False)]
    if dropout:
        layers.insert(1, keras.layers.Dropout(dropout))
    return keras.Sequential(layers)


def estimator(store, model=None, **given):
    usual = {"num_proc": 2, "epochs": 4, "batch_size": 16, "validation": 0.2}
    model = line() if model is None else model
    sgd = keras.optimizers.SGD(0.05, momentum=0.5)
    return KerasEstimator(
        model, sgd, "mse", ["a", "b", "c"], ["y"], str(store), **(usual | given)
    )  # fmt: skip


def weights(model):
    return model.get_model().get_weights()[0][:, 0]


def test_it_learns_validates_and_adds_a_column(frame, tmp_path):
    made = estimator(
        tmp_path, compression="int8 | ef", metrics=["mae"], validation="fold", val_batch_size=50,
        callbacks=[keras.callbacks.EarlyStopping("val_mae", patience=1, min_delta=9)], epochs=9,
    )  # fmt: skip
    model = made.fit(frame.withColumn("fold", functions.col("fold") == 0))
    assert sorted(model.history[0]) == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    assert len(model.history) == 2  # all ranks stop
    model = estimator(tmp_path, compression="int8 | ef").fit(frame)
    assert model.history[-1]["val_loss"] < model.history[0]["loss"] / 20
    assert np.abs(weights(model) - TRUE).max() < 0.05
    rows = model.transform(frame).select("y", "y__output").toPandas()
    assert len(rows) == 600
    assert ((rows["y"] - rows["y__output"]) ** 2).mean() < 0.01


def test_what_is_held_out_is_measured_on_all_rows_whichever_rank_has_them(frame, tmp_path):
    held = frame.withColumn("out", functions.col("fold") == 1)
    model = estimator(tmp_path, validation="out", epochs=2).fit(held)
    rows = model.transform(held.filter("out")).select("y", "y__output").toPandas()
    assert len(rows) == 120
    own = ((rows["y"] - rows["y__output"]) ** 2).mean()
    assert model.history[-1]["val_loss"] == pytest.approx(own, rel=1e-4)


def test_it_goes_on_where_a_run_has_ended(frame, tmp_path):
    given = {"compression": "int8 | ef", "model": line(dropout=0.1), "metrics": ["mae"]}
    whole = estimator(tmp_path / "whole", **given).fit(frame)
    first = estimator(tmp_path / "parts", epochs=2, run_id="one", **given)
    assert len(first.fit(frame).history) == 2
    second = estimator(tmp_path / "parts", run_id="one", **given)
    parts = second.fit_on_parquet(frame.sparkSession)
    assert parts.history == whole.history  # to the bit, error feedback and dropout included
    other = estimator(tmp_path / "parts", run_id="one", num_proc=1)
    with pytest.raises(WorkerFailed, match="is of 2 ranks, not of 1"):
        other.fit_on_parquet(frame.sparkSession)
    wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    other = estimator(tmp_path / "parts", run_id="one", model=wide)
    with pytest.raises(WorkerFailed, match="run 'one' is of another model or optimizer"):
        other.fit_on_parquet(frame.sparkSession)


def test_weights_count_and_layers_compute_as_the_policy_says(frame, tmp_path):
    # What has weight 0 is wrong, and must not be learnt.
    wrong = functions.when(functions.col("w") == 0, 100.0).otherwise(functions.col("y"))
    made = estimator(
        tmp_path, sample_weight_col="w", validation=0.0, epochs=8, precision="bf16",
        weighted_metrics=["mae"],
    )  # fmt: skip
    model = made.fit(frame.withColumn("y", wrong))
    assert np.abs(weights(model) - TRUE).max() < 0.2
    assert sorted(model.history[0]) == ["epoch", "loss", "mae"]


class Doubled(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


def test_several_inputs_outputs_and_classes_of_ones_own(frame, tmp_path):
    left, right = keras.Input((2,)), keras.Input((1, 2))
    joined = keras.layers.Concatenate()([left, keras.layers.Flatten()(right)])
    outputs = [keras.layers.Dense(1)(Doubled()(joined)), keras.layers.Dense(1)(joined)]
    made = KerasEstimator(
        keras.Model([left, right], outputs), keras.optimizers.SGD(0.02), ["mse", "mse"],
        ["a", "b", "c"], ["y", "z"], str(tmp_path), num_proc=2, epochs=4,
        loss_weights=[0.5, 1.0], custom_objects={"Doubled": Doubled},
        train_steps_per_epoch=8, batch_size=16,
    )  # fmt: skip
    both = frame.withColumn("z", -functions.col("y"))
    rows = made.fit(both).transform(both).select("y__output", "z__output", "y").toPandas()
    assert np.corrcoef(rows["y__output"], rows["y"])[0, 1] > 0.9
    assert np.corrcoef(rows["z__output"], rows["y"])[0, 1] < -0.9


def test_what_does_not_fit_is_said(frame, tmp_path):
    narrow = KerasEstimator(line(), "sgd", "mse", ["a"], ["y"], str(tmp_path), num_proc=2)
    with pytest.raises(WorkerFailed, match=r"^rank \d: the model takes 4 numbers a row, but the"):
        narrow.fit(frame)
    with pytest.raises(LaunchError, match="validation column 'no' is missing; the frame has a, b"):
        estimator(tmp_path, validation="no").fit(frame)
    with pytest.raises(ValueError, match="has no weights yet"):
        estimator(tmp_path, keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="val_batch_size=0"):
        estimator(tmp_path, val_batch_size=0)
