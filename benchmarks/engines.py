"""Ringlet on engines, beside what these have of their own: medians of pairs taken in turn.

    python benchmarks/engines.py reader [--save]     # estimators' rows beside pyarrow's own scan

Needs the environment of ``make test-engines``, and Java for Spark. ``--save`` writes the result
into benchmarks/results/engines.json. Of a pair the one and the other begin in turn, so that
neither has the quieter machine.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "engines.json"
os.environ |= {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_LOCAL_HOSTNAME": "localhost",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
}


def pairs(ours, theirs, count):
    """Return what both functions return, ``count`` times, the one first and then the other."""
    found = []
    for number in range(count):
        if number % 2:
            own = ours()
            other = theirs()
        else:
            other = theirs()
            own = ours()
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


BENCHMARKS = {"reader": reader}


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
