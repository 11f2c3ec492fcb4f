"""Ringlet on engines, beside what these have of their own: medians of pairs taken in turn.

    python benchmarks/engines.py reader [--save]     # estimators' rows beside pyarrow's own scan
    python benchmarks/engines.py startup-ray         # to the first step, beside TorchTrainer
    python benchmarks/engines.py startup-spark       # to the first step, beside TorchDistributor
    python benchmarks/engines.py restart             # from kill -9 to the next step, likewise
    python benchmarks/engines.py throughput          # steps in RayExecutor, beside `ringlet run`

Needs the environment of ``make test-engines``, and Java for Spark. ``--save`` writes the result
into benchmarks/results/engines.json. Of a pair the one and the other begin in turn, so that
neither has the quieter machine.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from progress import each

RESULTS = Path(__file__).parent / "results" / "engines.json"
os.environ |= {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_LOCAL_HOSTNAME": "localhost",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 gives way to whatever else runs, `ringlet run` does not
}


def pairs(ours, theirs, count):
    """Return what both functions return, ``count`` times, the one first and then the other."""

    def pair(number):
        if number % 2:
            other = theirs()
            return ours(), other
        own = ours()
        return own, theirs()

    found = []
    for own, other in each(pair, range(1, count + 1), "pair {}"):
        found.append((own, other))
        print(f"  {own:.3f} beside {other:.3f}", flush=True)
    return found


def summary(about, found, unit="s"):
    """Return medians of pairs, and of their ratios (ours to theirs)."""
    ours, theirs = zip(*found, strict=True)
    return {
        "about": about,
        "unit": unit,
        "pairs": [[round(own, 4), round(other, 4)] for own, other in found],
        "ours": round(statistics.median(ours), 4),
        "theirs": round(statistics.median(theirs), 4),
        "ratio": round(statistics.median(own / other for own, other in found), 3),
    }


# The reader of estimators


def spark_session(slots=4):
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.memory", "3g").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def write_rows(path, rows, width):
    """Have Spark write float32 rows, as an estimator's fit does."""
    from pyspark.sql import functions

    from ringlet.spark.parquet_data import Columns, write

    session = spark_session(2)
    values = functions.array(*[functions.rand(i).cast("float") for i in range(width)])
    frame = session.range(rows).select(values.alias("x"), functions.rand(99).alias("y"))
    write(frame, Columns(("x",), ("y",)), path, 4)
    session.stop()


def read_share(path, rank, size, kind, begin, told):
    """Read one rank's share, and tell how long that took: wall clock and processor, seconds."""
    import numpy as np
    from pyarrow.parquet import ParquetFile

    from ringlet.spark.parquet_data import Share

    share = Share(path, rank, size)
    begin.wait()
    start, used, rows = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), 0
    if kind == "scan":
        for piece in share._pieces:
            for table in piece.to_batches():
                rows += table.num_rows
    elif kind == "iterate":
        for piece in share._pieces:
            file = ParquetFile(piece.path)
            for table in file.iter_batches(row_groups=[group.id for group in piece.row_groups]):
                rows += table.num_rows
    else:
        for features, _, _ in share.batches(1024, np.random.default_rng(rank), 1 << 16):
            rows += len(features)
    seconds, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    assert rows == share.rows
    told.put((seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime))


def read(path, kind, processor):
    """Return the seconds until two ranks have read their shares at once."""
    spawn = multiprocessing.get_context("spawn")
    told, begin = spawn.Queue(), spawn.Barrier(2)
    ranks = [
        spawn.Process(target=read_share, args=(path, rank, 2, kind, begin, told)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    seconds, used = zip(*[told.get() for _ in ranks], strict=True)
    for rank in ranks:
        rank.join()
    processor.append(sum(used))
    return max(seconds)


def reader(count):
    """Return an estimator's rows beside both ways in which pyarrow reads a row group."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/data"
        write_rows(path, 8_000_000, 32)
        size = sum(file.stat().st_size for file in Path(path).glob("*.parquet"))
        read(path, "scan", [])  # so that the files are in memory
        found, told = [], {}
        for kind, name in (
            ("iterate", "ParquetFile.iter_batches"),
            ("scan", "Fragment.to_batches"),
        ):
            own, other = [], []
            found = pairs(
                lambda own=own: read(path, "rows", own),
                lambda kind=kind, other=other: read(path, kind, other),
                count,
            )
            rates = [b / a for a, b in found]
            processor = [b / a for a, b in zip(own, other, strict=True)]
            told[f"share of {name}'s rate"] = round(statistics.median(rates), 3)
            told[f"share of {name}'s rate by processor time"] = round(
                statistics.median(processor), 3
            )
    about = (
        f"{size / 1e9:.2f} GB of Parquet that Spark wrote (8M rows of 32 float32 and a label) by"
        " 2 ranks at once: shuffled batches of 1024 rows, beside pyarrow's scan"
        " (Fragment.to_batches) of the same row groups; the slower rank's seconds"
    )
    return summary(about, found) | told


# Beside what engines have of their own


def one_step():
    """Take part in an allreduce, the engine's own where it has made one possible."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(torch.ones(4))
        return
    import ringlet.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(4))


def in_spark():
    one_step()
    return time.time()


def in_spark_of_torch():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    one_step()
    return time.time()


def startup_spark(count):
    """Return the seconds from the call to the first step, beside Spark's TorchDistributor."""
    from pyspark.ml.torch.distributor import TorchDistributor

    import ringlet.spark

    session = spark_session()

    def ours():
        began = time.time()
        return ringlet.spark.run(in_spark, num_proc=2, spark=session)[0] - began

    def theirs():
        began = time.time()
        distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
        return distributor.run(in_spark_of_torch) - began

    ours()  # Spark's first job takes longer
    about = "from the call to the first step of 2 ranks: ringlet.spark.run beside TorchDistributor"
    return summary(about, pairs(ours, theirs, count))


def start_ray():
    import ray

    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    runtime = {"env_vars": here}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=runtime)


def in_ray(config):
    """Step, and write when; the first time rank 1 may be killed after it."""
    import ray

    one_step()
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    killed = folder / "killed"
    if config["kill"] and not killed.exists():
        # Ray gives a run up whose worker ends while its controller starts the others.
        for _ in range(40):
            one_step()
            time.sleep(0.05)
        if rank == 1:
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the other one is missed
            one_step()
    if rank == 0:
        (folder / "stepped").write_text(str(time.time()))


def ray_seconds(ours, kill):
    """Return the seconds to the first step of Ray Train, or from a kill to the next one."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ringlet.ray import RingletConfig

    kind = DataParallelTrainer if ours else TorchTrainer
    given = {"backend_config": RingletConfig()} if ours else {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        run = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1))
        config = {"folder": folder, "kill": kill}
        scaling = ScalingConfig(num_workers=2)
        kind(
            in_ray, train_loop_config=config, scaling_config=scaling, run_config=run, **given
        ).fit()
        if kill:
            began = float(Path(folder, "killed").read_text())
        return float(Path(folder, "stepped").read_text()) - began


def startup_ray(count):
    """Return the seconds from the call to the first step, beside Ray's TorchTrainer."""
    start_ray()
    found = pairs(lambda: ray_seconds(True, False), lambda: ray_seconds(False, False), count)
    about = "from the call to the first step of 2 ranks of Ray Train: RingletConfig beside"
    return summary(f"{about} TorchTrainer", found)


def restart(count):
    """Return the seconds from kill -9 of a worker to the next step, beside Ray's TorchTrainer."""
    start_ray()
    found = pairs(lambda: ray_seconds(True, True), lambda: ray_seconds(False, True), count)
    about = "from kill -9 of one of 2 workers to the next step of Ray Train: RingletConfig beside"
    return summary(f"{about} TorchTrainer", found)


def train(steps=60):
    """Train a small model; return seconds a step."""
    import torch

    import ringlet.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression="int8 | ef"
    )
    inputs = torch.randn(64, 512)
    for step in range(steps + 10):
        if step == 10:
            hvd.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps


def throughput(count):
    """Return the seconds of a step in RayExecutor's actors, beside those in `ringlet run`."""
    from ringlet.ray import RayExecutor

    start_ray()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)

    def ours():
        executor.start()
        try:
            return max(executor.run(train))
        finally:
            executor.shutdown()

    code = "import engines; print('took', engines.train())"
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    command += [sys.executable, "-c", code]

    def theirs():
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return max(float(line.split()[-1]) for line in ran.stdout.splitlines() if "took" in line)

    about = (
        "a step of a model of 1M parameters, int8 | ef, on 2 ranks over gloo: RayExecutor beside"
    )
    return summary(f"{about} `ringlet run`", pairs(ours, theirs, count))


BENCHMARKS = {
    "reader": reader,
    "startup-ray": startup_ray,
    "startup-spark": startup_spark,
    "restart": restart,
    "throughput": throughput,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=BENCHMARKS)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found = BENCHMARKS[options.what](options.pairs)
    found["about"] += f"; {os.cpu_count()} cores, which others use too; {date.today()}"
    print(json.dumps(found, indent=1))
    if options.save:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[options.what] = found
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
