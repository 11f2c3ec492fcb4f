"""A frame as Parquet files in a store, and each rank's share of them, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlet.ring.errors import LaunchError

FEATURES, LABELS, WEIGHT = "features", "labels", "weight"
_NUMBERS = {
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "byte", "short", "long",
    "integer",
}  # fmt: skip

_CACHED = 2 << 20  # bytes that are decoded at once

Array = np.ndarray[Any, np.dtype[Any]]
Batch = tuple[Array, Array, Array | None]  # features, labels, weights


@dataclass(frozen=True)
class Columns:
    """Which columns of a frame are features, labels and (one, or none) the weight of a row."""

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None


def _array(frame: Any, names: Sequence[str], what: str) -> Any:
    """Return an expression: the columns ``names`` as one list of float32 after the other."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    types = dict(frame.dtypes)
    lists = []
    for name in names:
        if name not in types:
            raise LaunchError(f"{what} {name!r} is missing; the frame has {_schema(types)}")
        kind = types[name]
        if kind == "vector":
            lists.append(vector_to_array(functions.col(name), "float32"))
        elif kind in _NUMBERS or kind.startswith("decimal"):
            lists.append(functions.array(functions.col(name).cast("float")))
        elif kind.startswith("array<") and kind[6:-1] in _NUMBERS:
            lists.append(functions.col(name).cast("array<float>"))
        else:
            raise LaunchError(
                f"{what} {name!r} is of type {kind}, and not a number, a list of numbers or a"
                f" vector; the frame has {_schema(types)}"
            )
    return lists[0] if len(lists) == 1 else functions.concat(*lists)


def _schema(types: dict[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in types.items())


def feature_list(frame: Any, columns: Columns) -> Any:
    """Return the expression of what the model gets of a row. Raises LaunchError, as ``write``."""
    return _array(frame, columns.features, "feature column")


def write(frame: Any, columns: Columns, path: str, files: int) -> None:
    """Write the columns of ``frame`` to ``path`` as ``files`` files of equally many rows.

    Raises LaunchError naming a column that is missing or of another type, with the schema.
    """
    from pyspark.sql import functions

    chosen = [
        feature_list(frame, columns).alias(FEATURES),
        _array(frame, columns.labels, "label column").alias(LABELS),
    ]
    if columns.weight is not None:
        _array(frame, [columns.weight], "sample_weight_col")
        chosen.append(functions.col(columns.weight).cast("float").alias(WEIGHT))
    frame.select(*chosen).repartition(files).write.mode("overwrite").parquet(path)


class Share:
    """Every ``size``-th row group of the files at ``path``, from the ``rank``-th on.

    ``rows`` is how many rows that are, ``least`` how many the rank with the fewest has. No row is
    in two ranks' shares. Raises LaunchError when a rank would have none, or there is no such path.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        import fsspec
        import pyarrow.dataset

        files, where = fsspec.core.url_to_fs(path)
        if not files.exists(where):
            raise LaunchError(f"there are no rows at {path}: fit(df) writes them")
        found = pyarrow.dataset.dataset(where, filesystem=files, format="parquet")
        pieces: list[Any] = []
        for fragment in sorted(found.get_fragments(), key=lambda each: str(each.path)):
            pieces += fragment.split_by_row_group()
        counts = [sum(group.num_rows for group in piece.row_groups) for piece in pieces]
        full = [(piece, rows) for piece, rows in zip(pieces, counts, strict=True) if rows]
        shares = [sum(rows for _, rows in full[other::size]) for other in range(size)]
        self._pieces = [piece for piece, _ in full[rank::size]]
        self.rows, self.least = shares[rank], min(shares)
        if not self.least:
            raise LaunchError(
                f"rank {shares.index(0)} of {size} has no rows: there are {sum(shares)} in"
                f" {len(full)} row groups at {path}"
            )

    def batches(
        self, rows: int, generator: np.random.Generator | None = None, ahead: int = 0
    ) -> Iterator[Batch]:
        """Yield ``rows`` rows at a time; the last batch may be smaller.

        With a ``generator`` row groups come in random order, and rows are shuffled among the
        ``ahead`` that are held in memory at once.
        """
        pieces = list(self._pieces)
        if generator is not None:
            generator.shuffle(pieces)
        rest: Batch | None = None  # fewer than ``rows``
        with ThreadPoolExecutor(1) as pool:
            for whole in _prefetched(_windows(pieces, max(ahead, rows)), pool):
                order = None if generator is None else generator.permutation(len(whole[0]))
                start = 0
                if rest is not None:
                    start = rows - len(rest[0])
                    rest = _joined([rest, _taken(whole, order, 0, start)])
                    if len(rest[0]) == rows:
                        yield rest
                        rest = None
                for first in range(start, len(whole[0]), rows):
                    batch = _taken(whole, order, first, first + rows)
                    if len(batch[0]) == rows:
                        yield batch
                    else:
                        rest = batch
        if rest is not None:
            yield rest


def _prefetched(windows: Iterator[Batch], pool: Executor) -> Iterator[Batch]:
    """Yield ``windows``, each of which is read while the one before is used."""
    coming = pool.submit(next, windows, None)
    while (window := coming.result()) is not None:
        coming = pool.submit(next, windows, None)
        yield window


def _windows(pieces: Sequence[Any], least: int) -> Iterator[Batch]:
    """Yield what the row groups hold, at least ``least`` rows at a time but for the last ones.

    They are read in pieces that stay in a processor's cache until they are copied: row groups as a
    whole, which is what ``Fragment.to_batches`` makes of them, take twice as long.
    """
    from pyarrow.parquet import ParquetFile

    kept: list[Batch] = []
    held = 0
    for piece in pieces:
        (group,) = piece.row_groups
        rows = max(1, _CACHED * group.num_rows // max(1, group.total_byte_size))
        with piece.filesystem.open_input_file(piece.path) as file:
            tables = ParquetFile(file, pre_buffer=True).iter_batches(
                rows, [group.id], use_threads=False
            )
            for table in tables:
                kept.append(_arrays(table))
                held += table.num_rows
                if held >= least:
                    yield _joined(kept)
                    kept, held = [], 0
    if held:
        yield _joined(kept)


def _arrays(table: Any) -> Batch:
    weight = table.column(WEIGHT).to_numpy() if WEIGHT in table.schema.names else None
    return _matrix(table, FEATURES), _matrix(table, LABELS), weight


def _matrix(table: Any, name: str) -> Array:
    column = table.column(name)
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if column.null_count or len(flat) % max(1, len(column)):
        raise LaunchError(f"the {name} of some rows are missing, or longer than those of others")
    return np.asarray(flat, np.float32).reshape(len(column), -1)


def _joined(kept: Sequence[Batch]) -> Batch:
    """Return the rows of ``kept`` as one batch. Raises LaunchError where their lengths differ."""
    if len(kept) == 1:
        return kept[0]
    features, labels, weights = zip(*kept, strict=True)
    for name, arrays in {FEATURES: features, LABELS: labels}.items():
        if len(widths := {each.shape[1] for each in arrays}) > 1:
            raise LaunchError(f"rows have {name} of different lengths: {sorted(widths)}")
    weight = None if weights[0] is None else np.concatenate(weights)
    return np.concatenate(features), np.concatenate(labels), weight


def _taken(whole: Batch, order: Array | None, start: int, end: int) -> Batch:
    """Return the rows that ``order`` has from ``start`` on, a copy; views without an order."""
    features, labels, weight = whole
    if order is None:
        piece = slice(start, end)
        return features[piece], labels[piece], None if weight is None else weight[piece]
    chosen = order[start:end]
    weight = None if weight is None else weight.take(chosen)
    return features.take(chosen, axis=0), labels.take(chosen, axis=0), weight
