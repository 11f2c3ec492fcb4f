"""Every collective against an oracle, on whatever communicator: imported, or run one per rank.

As a script: ``worker_collectives.py mpi OUT``, or ``... gloo OUT STORE RANK SIZE`` (or torch).
Each rank checks its own results, and that ranks agree bit for bit: of what all have, rank 0 checks
the values. It writes OUT (JSON).
"""

import hashlib
import json
import sys
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringlet.ring import Communicator, Mismatch, ReduceOp, RingError, TransportUnavailable
from ringlet.ring.dtypes import FLOATS, INTEGERS, NAMES, storage

OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


@dataclass(frozen=True)
class Case:
    """One collective; ``n`` is its size, ``uneven`` bends the counts, ``seed`` makes the values."""

    kind: str
    dtype: str
    n: int
    op: ReduceOp = ReduceOp.SUM
    uneven: bool = False
    special: bool = False  # sprinkle NaN, infinities and signed zeros
    root: int = 0
    seed: int = 0
    rounded: int = 1  # how often a 16-bit sum is rounded on its way

    def counts(self, size, salt=0):
        if not self.uneven:
            return [self.n] * size
        return [(self.n + 1) * ((r + salt) * 5 % 4) // 2 for r in range(size)]


def cases(size):
    """Return the table of cases that every transport plays; from 4 ranks on, a shorter one."""
    short = size >= 4
    table = []
    for dtype in NAMES:
        for op in OPS:
            table += [Case("allreduce", dtype, n, op) for n in (0, 5, 20001)[short:]]
            table += [Case("reduce_scatter", dtype, n, op) for n in (3, 6001)[: 2 - 2 * short]]
            table += [Case("reduce_scatter", dtype, 300, op, uneven=True)]
            if dtype in FLOATS:
                table += [Case("allreduce", dtype, n, op, special=True) for n in (257, 20001)]
        for kind in ("allgather", "alltoall"):
            table += [Case(kind, dtype, n) for n in (1, 20001)[short:]]
            table += [Case(kind, dtype, n, uneven=True) for n in (7, 9001)[: 2 - short]]
        table += [Case("broadcast", dtype, n, root=n % size) for n in (5, 20001)[short:]]
    large = {"bool": ReduceOp.SUM, "int16": ReduceOp.MIN, "float32": ReduceOp.SUM}
    table += [Case("allreduce", d, 1200011, op, special=True) for d, op in large.items()]
    for kind in ("allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast"):
        table += [Case(kind, dtype, 0) for dtype in ("bfloat16", "float32", "bool")]
    table += [Case("bytes", "uint8", n, uneven=u) for n in (0, 9) for u in (False, True)]
    table += [Case("expect", dtype, n) for dtype in ("int64", "float32") for n in (0, 1, 4001)]
    return [*table, Case("barrier", "uint8", 0)]


def to_float64(array, dtype):
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


PERIOD = 20011  # a prime: no piece of a buffer that a transport cuts looks like another


def values(case, rank, n):
    """Return the ``n`` elements that ``rank`` brings: any rank can compute them."""
    return np.resize(drawn(case, rank, min(n, PERIOD)), n)


@lru_cache(64)  # ranks that are threads bring the same
def drawn(case, rank, n):
    rng = np.random.default_rng([zlib.crc32(repr(case).encode()), rank])
    if case.dtype in INTEGERS:
        kind = storage(case.dtype)
        if case.dtype == "bool":
            return rng.random(n) < 0.7
        return rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
    x = rng.normal(size=n) * np.exp2(rng.integers(-6, 7, n))
    if case.special:
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
        x = np.where(rng.random(n) < 0.3, rng.choice(odd, n), x)
    if case.dtype == "bfloat16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(case.dtype)


def check(case, got, inputs):
    """Compare a reduction with the oracle: exact for integers, in float64 for floats."""
    function = {
        ReduceOp.SUM: np.add,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.PRODUCT: np.multiply,
    }[case.op]
    if case.dtype in INTEGERS:
        np.testing.assert_array_equal(got, function.reduce(inputs, dtype=got.dtype), repr(case))
        return
    wide = np.array([to_float64(x, case.dtype) for x in inputs])
    with np.errstate(all="ignore"):
        expected = function.reduce(wide)
        bound = 0.0
        if case.op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            inner = EPS["float32" if case.rounded == 1 else case.dtype]
            partial = min(EPS[case.dtype], inner) * len(inputs)
            scale = np.abs(wide).sum(0) if case.op == ReduceOp.SUM else np.abs(expected)
            smallest = 2.0**-24 if case.dtype == "float16" else 1e-40
            bound = 2 * EPS[case.dtype] * np.abs(expected) + partial * scale + smallest
        result = to_float64(got, case.dtype)
        if case.dtype == "float16":
            expected = np.where(np.abs(expected) >= 65520, np.sign(expected) * np.inf, expected)
        close = (np.abs(result - expected) <= bound) | (result == expected)
    close |= np.isnan(result) & np.isnan(expected)
    assert close.all(), (case, result[~close][:4], expected[~close][:4])


def play(comm: Communicator, case: Case) -> bytes:
    """Play one case; return the bytes that all ranks must have in common."""
    size, rank, kind = comm.size, comm.rank, storage(case.dtype)
    if case.kind == "barrier":
        comm.barrier()
        return b""
    if case.kind == "bytes":
        said = [bytes(range(n)) for n in case.counts(size)]
        assert comm.allgather_bytes(said[rank]) == said
        assert comm.broadcast_bytes(said[rank] if rank == size - 1 else None, size - 1) == said[-1]
        return b"".join(said)
    if case.kind == "expect":
        return play_expected(comm, case)
    if case.kind == "allreduce":
        buffer = values(case, rank, case.n).copy()
        comm.allreduce(buffer, case.op, case.dtype)
        if rank == 0:  # all ranks have the same bits, or their digests differ
            check(case, buffer, [values(case, r, case.n) for r in range(size)])
        return buffer.tobytes()
    if case.kind == "broadcast":
        buffer = values(case, rank, case.n)
        comm.broadcast(buffer, case.root)
        np.testing.assert_array_equal(buffer, values(case, case.root, case.n))
        return buffer.tobytes()
    if case.kind == "alltoall":
        matrix = [case.counts(size, salt=r) for r in range(size)]
        sent = [values(case, r, sum(matrix[r])) for r in range(size)]
        receives = [matrix[r][rank] for r in range(size)]
        receive = np.full(sum(receives), 1, kind)
        given = (matrix[rank], receives) if case.uneven else (None, None)
        comm.alltoall(sent[rank], receive, *given)
        starts = [sum(row[:rank]) for row in matrix]
        pieces = [s[a : a + n] for s, a, n in zip(sent, starts, receives, strict=True)]
        np.testing.assert_array_equal(receive, np.concatenate(pieces))
        return b""
    counts = case.counts(size)
    if case.kind == "allgather":
        sent = [values(case, r, n) for r, n in enumerate(counts)]
        receive = np.full(sum(counts), 1, kind)
        comm.allgather(sent[rank], receive, counts if case.uneven else None)
        np.testing.assert_array_equal(receive, np.concatenate(sent))
        return receive.tobytes()
    inputs = [values(case, r, sum(counts)) for r in range(size)]
    receive = np.full(counts[rank], 1, kind)
    comm.reduce_scatter(inputs[rank], receive, counts, case.op, case.dtype)
    piece = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    check(case, receive, [x[piece] for x in inputs])
    return b""


def play_expected(comm, case):
    """Make all-gathers that were expected before other calls, the first ones by other ranks."""
    size, rank, kind = comm.size, comm.rank, storage(case.dtype)
    sent = [values(case, r, 3 * case.n) for r in range(size)]
    received = [np.full(size * case.n, 1, kind) for _ in range(3)]
    pieces = [slice(i * case.n, (i + 1) * case.n) for i in range(3)]
    first = comm.expect(received[0])
    second = comm.expect(received[1])
    comm.barrier()
    whole = np.full(3 * size * case.n, 1, kind)
    comm.allgather(sent[rank], whole)
    first(sent[rank][pieces[0]])
    third = comm.expect(received[2])
    second(sent[rank][pieces[1]])
    comm.allgather(sent[rank], whole)
    third(sent[rank][pieces[2]])
    for got, piece in zip(received, pieces, strict=True):
        np.testing.assert_array_equal(got, np.concatenate([each[piece] for each in sent]))
    np.testing.assert_array_equal(whole, np.concatenate(sent))
    return whole.tobytes()


def play_in(subset, salt):
    """Play a few cases on a subset (None: this rank is not in it); return their bytes."""
    if subset is None:
        return b""
    kinds = (
        "allreduce",
        "reduce_scatter",
        "allgather",
        "expect",
        "alltoall",
        "broadcast",
        "barrier",
        "bytes",
    )
    table = [Case(kind, "float32", n, seed=salt) for kind in kinds for n in (3, 90)]
    table.append(Case("allreduce", "float32", 100003, seed=salt))
    table.append(Case("allreduce", "bfloat16", 20001, ReduceOp.MAX, seed=salt))
    return b"".join(play(subset, case) for case in table)


def play_subsets(comm: Communicator) -> dict[str, str]:
    """Play cases on subsets of 4 ranks; return a digest for each that this rank is in."""
    digests = {}

    def note(name, subset, salt):
        if subset is not None:
            assert subset.origin[subset.rank] == comm.rank
            digests[name] = hashlib.sha256(play_in(subset, salt)).hexdigest()

    even, odd = comm.subset([0, 2]), comm.subset(np.array([1, 3]))
    assert (even is None, odd is None) == (comm.rank % 2 == 1, comm.rank % 2 == 0)
    for salt in range(3):  # both at the same time
        note(f"even {salt}", even, salt)
        note(f"odd {salt}", odd, 9 + salt)
    low, high = comm.subset((0, 1, 2)), comm.subset(range(1, 4))
    note("low", low, 20)
    note("high", high, 21)
    note("low again", low, 22)
    inner = high.subset([0, 2]) if high is not None else None
    assert inner is None or inner.origin == (1, 3)
    note("inner", inner, 23)
    alone = comm.subset([comm.size - 1])
    note("alone", alone, 24)
    note("all", comm.subset(range(comm.size)), 25)
    bad = ([], [2, 1], [1, 1], [0, comm.size], [-1], [True])
    for ranks in bad:
        try:
            comm.subset(ranks)
        except ValueError as error:
            assert "subset" in str(error)  # noqa: PT017
        else:
            raise AssertionError(f"{ranks} were accepted")
    try:
        comm.subset([0, 1] if comm.rank != 2 else [0, 2])
    except Mismatch as error:
        assert str(error) == "rank 0 asked for the subset [0, 1], rank 2 for [0, 2]"  # noqa: PT017
    else:
        raise AssertionError("two different subsets were accepted")
    comm.barrier()
    if even is not None:
        even.close()
        try:
            even.barrier()
        except RingError as error:
            assert "closed" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a closed subset went on")
    note("odd after even was closed", odd, 26)
    return digests


def play_all(comm: Communicator) -> dict[str, str]:
    """Play the whole table; return a digest per case, the same on every rank."""
    digests = {}
    for case in cases(comm.size):
        digests[repr(case)] = hashlib.sha256(play(comm, case)).hexdigest()
    if comm.size == 4:
        subsets = json.dumps(play_subsets(comm)).encode()
        for name, digest in (
            x for t in comm.allgather_bytes(subsets) for x in json.loads(t).items()
        ):
            assert digests.setdefault(name, digest) == digest, f"members of {name} differ"
    mine = json.dumps(digests).encode()
    for rank, theirs in enumerate(comm.allgather_bytes(mine)):
        told = json.loads(theirs)
        other = [case for case in digests if told.get(case) != digests[case]]
        assert told == digests, f"rank {rank} has other bits than rank {comm.rank}: {other}"
    return digests


def main():
    transport, out = sys.argv[1:3]
    if transport == "mpi":
        from ringlet.ring.transports.mpi import MpiCommunicator

        comm = MpiCommunicator()
    elif transport == "torch":
        comm = torch_communicator(*sys.argv[3:6])
    else:
        from torch.distributed import FileStore

        from ringlet.ring.transports.gloo import GlooCommunicator

        rank, size = int(sys.argv[4]), int(sys.argv[5])
        store = FileStore(sys.argv[3], size)
        comm = GlooCommunicator(store, rank, size, timeout=60.0, host="127.0.0.1")
        if sys.argv[6] != "near":
            comm._spread = True  # over hosts: close ones, unless messages take long
        if "far" in sys.argv[6]:
            comm._delay = 0.01
            comm._nearest = 0.01 if sys.argv[6] == "all far" else 0.0
    digests = play_all(comm)
    if comm.rank == 0:
        with open(out, "w") as file:
            json.dump(digests, file)
    comm.close()
    comm.close()
    if transport == "torch":  # the group is its owner's
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def torch_communicator(store, rank, size):
    """Make the default group of torch.distributed, and a communicator of it."""
    import torch.distributed as dist

    from ringlet.ring.transports.torch_group import TorchCommunicator

    where = f"file://{store}"
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=int(size))
    group = dist.new_group([int(size) - 1])
    if int(rank) == int(size) - 1:
        alone = TorchCommunicator(group)
        assert (alone.rank, alone.size, alone.origin) == (0, 1, (int(rank),))
        alone.close()
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        try:
            TorchCommunicator(group)
        except TransportUnavailable as error:
            assert "not in the group" in str(error)  # noqa: PT017
    return TorchCommunicator()


if __name__ == "__main__":
    main()
