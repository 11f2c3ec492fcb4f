"""TorchEstimator on a real Spark: what it reads, learns, keeps and adds."""

import os
import sys

import numpy as np
import pytest

os.environ |= {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_LOCAL_HOSTNAME": "localhost",
    "OMP_NUM_THREADS": "1",
}

import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession

from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed
from ringlet.spark import TorchEstimator
from ringlet.spark.parquet_data import Columns, Share, write

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
        (i, float(x[0]), [float(x[1])], Vectors.dense(x[2:]), float(x @ TRUE), 1.0 + i % 2)
        for i, x in enumerate(features)
    ]
    return spark.createDataFrame(rows, ["id", "a", "b", "c", "y", "w"]).cache()


def estimator(store, dropout=0.0, **given):
    usual = {"num_proc": 2, "epochs": 4, "batch_size": 16, "validation": 0.2}
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    if dropout:
        model = torch.nn.Sequential(torch.nn.Dropout(dropout), model)
    return TorchEstimator(
        model, lambda p: torch.optim.SGD(p, 0.05), torch.nn.functional.mse_loss,
        ["a", "b", "c"], ["y"], str(store), **(usual | given),
    )  # fmt: skip


def test_shares_do_not_overlap_and_are_shuffled(frame, tmp_path):
    write(
        frame.selectExpr("array(id) as x", "id"), Columns(("x",), ("id",)), str(tmp_path / "d"), 4
    )
    shares = [Share(str(tmp_path / "d"), rank, 3) for rank in range(3)]
    assert sum(share.rows for share in shares) == 600
    plain = [[b[0][:, 0] for b in share.batches(32)] for share in shares]
    assert all(len(batch) == 32 for batches in plain for batch in batches[:-1])
    seen = np.concatenate([batch for batches in plain for batch in batches])
    assert sorted(seen) == list(range(600))
    mixed = [
        np.concatenate([b[0][:, 0] for b in shares[0].batches(32, np.random.default_rng(s), 100)])
        for s in (1, 2)
    ]
    usual = np.concatenate(plain[0])
    assert sorted(mixed[0]) == sorted(mixed[1]) == sorted(usual)
    assert list(mixed[0]) != list(mixed[1])
    with pytest.raises(LaunchError, match="rank 4 of 9 has no rows: there are 600 in 4 row groups"):
        Share(str(tmp_path / "d"), 0, 9)


def test_it_learns_validates_and_adds_a_column(frame, tmp_path):
    model = estimator(tmp_path, compression="int8 | ef").fit(frame)
    losses = [epoch["val_loss"] for epoch in model.history]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 5
    weight = model.get_model().weight.detach().numpy()[0]
    assert np.abs(weight - TRUE).max() < 0.1
    rows = model.transform(frame).select("id", "y", "y__output").toPandas()
    assert len(rows) == 600
    assert ((rows["y"] - rows["y__output"]) ** 2).mean() < 0.05


def test_it_goes_on_where_a_run_has_ended(frame, tmp_path):
    given = {"compression": "int8 | ef", "dropout": 0.1}
    whole = estimator(tmp_path / "whole", **given).fit(frame)
    first = estimator(tmp_path / "parts", epochs=2, run_id="one", **given)
    assert len(first.fit(frame).history) == 2
    second = estimator(tmp_path / "parts", run_id="one", **given)
    parts = second.fit_on_parquet(frame.sparkSession)
    assert len(parts.history) == 4
    assert [epoch["epoch"] for epoch in parts.history] == [0, 1, 2, 3]
    assert parts.history == whole.history  # to the bit, error feedback and dropout included
    other = estimator(tmp_path / "parts", run_id="one", num_proc=1, restarts=0, dropout=0.1)
    with pytest.raises(WorkerFailed, match=r"^rank 0: the checkpoint .* is of 2 ranks") as failed:
        other.fit_on_parquet(frame.sparkSession)
    assert failed.value.__suppress_context__, "the rank's stack comes first"


def test_each_fit_is_a_run_of_its_own(frame, tmp_path):
    """Without a run_id: else the second would find all epochs of the first one done."""
    made = estimator(tmp_path, epochs=2)
    first, run_id = made.fit(frame), made.run_id
    second = made.fit(frame.withColumn("y", -frame.y))
    assert made.run_id != run_id
    weights = [model.get_model().weight.detach().numpy()[0] for model in (first, second)]
    assert np.dot(*weights) < 0


def test_what_cannot_be_is_a_sentence_and_no_stack_of_a_ranks(frame, tmp_path):
    with pytest.raises(ValueError, match="unknown compressor 'int9'; did you mean 'int8'"):
        estimator(tmp_path, compression="int9 | ef")
    with pytest.raises(ValueError, match="'bf17'"):
        estimator(tmp_path, precision="bf17")
    with pytest.raises(WorkerFailed, match=r"^rank \d: there are no rows at .*: fit\(df\) writes"):
        estimator(tmp_path / "nothing").fit_on_parquet(frame.sparkSession)
    with pytest.raises(WorkerFailed, match=r"^rank \d: rank 1 of 2 has no rows: there are 1 in 1"):
        estimator(tmp_path, validation=0.0).fit(frame.limit(1))


def test_weights_count(frame, tmp_path):
    from pyspark.sql import functions

    # What has weight 0 is wrong, and must not be learnt.
    doubled = frame.withColumn("w", functions.col("w") - 1).withColumn(
        "y", functions.when(functions.col("w") == 0, 100.0).otherwise(functions.col("y"))
    )
    loss = torch.nn.MSELoss(reduction="none")
    made = estimator(tmp_path, sample_weight_col="w", validation=0.0, epochs=6)
    made._training = made._training.__class__(**{**vars(made._training), "loss": loss})
    weight = made.fit(doubled).get_model().weight.detach().numpy()[0]
    assert np.abs(weight - TRUE).max() < 0.2


@pytest.mark.parametrize(
    ("features", "labels", "said"),
    [
        (["a", "z"], ["y"], "feature column 'z' is missing; the frame has id: bigint, a: double"),
        (["a"], ["no"], "label column 'no' is missing"),
        (["text"], ["y"], "feature column 'text' is of type string, and not a number"),
    ],
)
def test_a_column_that_is_not_there_or_of_another_type_is_named(
    frame, tmp_path, features, labels, said
):
    from pyspark.sql import functions

    made = TorchEstimator(
        torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, 0.1), torch.nn.functional.mse_loss,
        features, labels, str(tmp_path), num_proc=2,
    )  # fmt: skip
    with pytest.raises(LaunchError, match=said):
        made.fit(frame.withColumn("text", functions.lit("x")))
