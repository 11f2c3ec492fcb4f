"""Adasum against its definition in float64, on whatever communicator: imported, or one per rank.

As a script: ``worker_adasum.py mpi``, or ``... gloo STORE RANK SIZE``; rank 0 prints a digest.
"""

import hashlib
import sys
from itertools import pairwise

import numpy as np

from ringlet.ring.collectives.adasum import adasum
from ringlet.ring.dtypes import FLOATS, storage

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def to_float64(array, dtype):
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def from_float64(values, dtype):
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def pair(a, b):
    """The definition."""

    def coefficient(v):
        norm = v @ v
        return 1.0 if norm < np.sqrt(np.finfo(np.float64).tiny) else 1 - (a @ b) / (2 * norm)

    return coefficient(a) * a + coefficient(b) * b


def oracle(vectors):
    """Combine float64 vectors, one a rank, in the order that the module documents."""
    power = 1 << (len(vectors).bit_length() - 1)
    tree = list(vectors[:power])
    for r, extra in enumerate(vectors[power:]):
        tree[r] = pair(tree[r], extra)
    while len(tree) > 1:
        tree = [pair(a, b) for a, b in zip(tree[::2], tree[1::2], strict=True)]
    return tree[0]


def gradients(size, lengths, dtype, seed):
    """Return every rank's buffer: tensors that agree to different degrees, and some that vanish."""
    rng = np.random.default_rng([seed, size])
    rows = [[] for _ in range(size)]
    for i, n in enumerate(lengths):
        common = rng.normal(size=n)
        for row in rows:
            mix = i % 3 / 2
            vector = mix * common + (1 - mix) * rng.normal(size=n)
            row.append(vector * (0 if rng.random() < 0.1 else 2.0 ** rng.integers(-4, 5)))
    return [from_float64(np.concatenate([np.zeros(0), *row]), dtype) for row in rows]


def play(comm, lengths, dtype, seed):
    """Combine and check on this rank; return the bytes that all ranks must have in common."""
    inputs = gradients(comm.size, lengths, dtype, seed)
    ends = [0, *np.cumsum(lengths, dtype=int).tolist()]
    buffer = inputs[comm.rank].copy()
    adasum(comm, buffer, ends, dtype if dtype == "bfloat16" else None)
    assert buffer.dtype == storage(dtype)
    wide = [to_float64(x, dtype) for x in inputs]
    for start, stop in pairwise(ends):
        expected = oracle([x[start:stop] for x in wide])
        # A coefficient is off by what the partial vectors are, in units of their length.
        lengths_of = sum(np.linalg.norm(x[start:stop]) for x in wide)
        bound = 8 * comm.size * EPS[dtype] * lengths_of + 1e-7 * (dtype == "float16")
        got = to_float64(buffer[start:stop], dtype)
        assert np.abs(got - expected).max(initial=0) <= bound, (dtype, start, stop, seed)
    return buffer.tobytes()


def play_all(comm):
    """Play a table of cases; return a digest, the same on every rank."""
    digest = hashlib.sha256()
    for seed, lengths in enumerate([[], [0], [1], [5, 0, 3], [1, 1, 1, 1], [7000, 13, 20000]]):
        for dtype in FLOATS:
            digest.update(play(comm, lengths, dtype, seed))
    found = comm.allgather_bytes(digest.digest())
    assert set(found) == {digest.digest()}
    return digest.hexdigest()


def main():
    if sys.argv[1] == "mpi":
        from ringlet.ring.transports.mpi import MpiCommunicator

        comm = MpiCommunicator()
    else:
        from torch.distributed import FileStore

        from ringlet.ring.transports.gloo import GlooCommunicator

        rank, size = int(sys.argv[3]), int(sys.argv[4])
        store = FileStore(sys.argv[2], size)
        comm = GlooCommunicator(store, rank, size, timeout=60.0, host="127.0.0.1")
    digest = play_all(comm)
    comm.close()
    if comm.rank == 0:
        print(digest)


if __name__ == "__main__":
    main()
