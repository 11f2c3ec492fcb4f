"""Ringlet on Spark: a function called as ranks, in the tasks of a barrier stage.

import ringlet.spark

results = ringlet.spark.run(train, args=(3e-4,), num_proc=8, restarts=2)
"""

from ringlet.shared.requirements import need

need("pyspark", "ringlet.spark")

from ringlet.spark.barrier_job import run

__all__ = ["run"]
