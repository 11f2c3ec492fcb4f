"""Every operation with every dtype, against NumPy: played by threads and by processes."""

import itertools
import zlib
from dataclasses import dataclass

import numpy as np

from ringlet.fusion import Request
from ringlet.fusion.requests.request import KINDS
from ringlet.ring import ReduceOp
from ringlet.ring.dtypes import FLOATS, NAMES, storage

FOREIGN = ("complex64", "complex128", "float8_e4m3fn", "object", "str")
REDUCTIONS = ("allreduce", "reducescatter")
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-50}
ROWS = {"small": 5, "large": 30011}


@dataclass(frozen=True)
class Case:
    """One operation on rows of two elements; ``factor`` scales before and after."""

    kind: str
    dtype: str
    op: ReduceOp
    size: str
    factor: float = 1.0

    @property
    def name(self):
        return "/".join(map(str, (self.kind, self.dtype, self.op.name, self.size, self.factor)))


def cases():
    table = [
        Case(kind, dtype, op, size)
        for kind, dtype, op in itertools.product(KINDS, NAMES, ReduceOp)
        for size in ROWS
        if kind in REDUCTIONS or (op is ReduceOp.SUM and size == "small")
    ]
    table += [
        Case(kind, dtype, op, "small", factor)
        for kind, dtype, op in itertools.product(REDUCTIONS, NAMES, ReduceOp)
        for factor in (0.5, 3.0)
    ]
    return table + [Case(kind, dtype, ReduceOp.SUM, "small") for kind in KINDS for dtype in FOREIGN]


def refused(case):
    """Return the type of what a rank is to be told when it asks; None where it gets a result."""
    if case.dtype in FOREIGN:
        return TypeError
    if case.kind not in REDUCTIONS:
        return None
    if case.op is ReduceOp.ADASUM and case.kind == "reducescatter":
        return ValueError
    if case.op is ReduceOp.ADASUM and case.dtype not in FLOATS:
        return TypeError
    if case.dtype == "bool" and (case.op is ReduceOp.AVERAGE or case.factor != 1.0):
        return TypeError
    return None


def values(case, rank, rows):
    """Return what a rank brings, as the engine takes it; any rank can compute it."""
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), rank])
    n, kind = 2 * rows, storage(case.dtype) if case.dtype in NAMES else np.dtype(np.float32)
    if case.dtype == "bool":
        return rng.random(n) < 0.5
    if kind.kind in "iu" and case.dtype != "bfloat16":
        whole = rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
        if case.op is ReduceOp.AVERAGE and kind.itemsize == 8:
            return whole >> kind.type(8)  # sums of these have to fit
        return whole % kind.type(20) if case.factor != 1.0 else whole
    x = rng.normal(size=n)
    if case.dtype == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16)
    return x.astype(kind)


def wide(array, dtype):
    """Return values in which NumPy can compute the result: float64, or what integers are."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return array.astype(np.float64) if dtype in FLOATS else array


def truncated(x, kind):
    return np.trunc(x).astype(np.int64).astype(kind)


def adasum(vectors):
    """Combine two or three: the third with the first, and what they make with the second."""
    a, b = vectors[0], vectors[1]
    if len(vectors) == 3:
        a = adasum([vectors[0], vectors[2]])
    dot = a @ b
    return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b


def combined(case, arrays):
    """Return what NumPy makes of all ranks' arrays."""
    inputs, kind = [wide(a, case.dtype) for a in arrays], storage(case.dtype)
    floating, op, factor = case.dtype in FLOATS, case.op, case.factor
    if factor != 1.0:
        inputs = [a * factor if floating else truncated(a * factor, kind) for a in inputs]
    if op is ReduceOp.ADASUM:
        out = adasum(inputs)
    elif op is ReduceOp.AVERAGE and floating:
        out = np.mean(inputs, axis=0)
    elif op is ReduceOp.AVERAGE:
        total = np.sum([a.astype(object) for a in inputs], axis=0)
        size = len(inputs)
        if factor == 1.0:
            return np.array([abs(t) // size * (-1 if t < 0 else 1) for t in total]).astype(kind)
        return truncated(total.astype(np.float64) * factor / size, kind)
    else:
        ufunc = {
            ReduceOp.SUM: np.add,
            ReduceOp.MIN: np.minimum,
            ReduceOp.MAX: np.maximum,
            ReduceOp.PRODUCT: np.multiply,
        }[op]
        with np.errstate(over="ignore"):
            out = inputs[0]
            for other in inputs[1:]:
                out = ufunc(out, other)
    if factor != 1.0:
        out = out * factor if floating else truncated(out * factor, kind)
    return out


def play(engine, case):
    """Run ``case`` on this rank; return what is wrong with it, or an empty string."""
    rank, size = engine.rank, engine.size
    uneven = case.kind in ("allgather", "alltoall")
    rows = [ROWS[case.size] + uneven * r for r in range(size)]
    arrays = [values(case, r, n) for r, n in enumerate(rows)]
    splits = [[1, *[0] * (size - 2), n - 1] for n in rows] if case.kind == "alltoall" else []
    request = Request(
        case.name,
        case.kind,
        case.dtype,
        (rows[rank], 2),
        case.op,
        root=size - 1 if case.kind == "broadcast" else 0,
        prescale=case.factor,
        postscale=case.factor,
        splits=tuple(splits[rank]) if splits else (),
    )
    try:
        handle = engine.submit(request, arrays[rank].copy())
    except (TypeError, ValueError) as error:
        expected = refused(case)
        if expected is None or not isinstance(error, expected):
            return f"{case.name}: refused with {error!r}"
        known = case.kind in str(error) or repr(case.dtype) in str(error)
        return "" if known and len(str(error)) > 30 else f"{case.name}: says only {error!r}"
    if refused(case):
        return f"{case.name}: was not refused"
    got = handle.wait(60)
    if case.kind == "barrier":
        return ""
    if case.kind == "broadcast":
        exact = arrays[-1]
    elif case.kind == "allgather":
        exact = np.concatenate(arrays)
    elif case.kind == "alltoall":
        starts = [2 * sum(s[:rank]) for s in splits]
        exact = np.concatenate(
            [a[b : b + 2 * s[rank]] for a, b, s in zip(arrays, starts, splits, strict=True)]
        )
    else:
        whole = combined(case, arrays)
        ends = np.cumsum([0, *handle.sizes]) * 2
        exact = whole[ends[rank] : ends[rank + 1]] if case.kind == "reducescatter" else whole
        if case.dtype in FLOATS:
            eps, least = 4 * EPS[case.dtype], max(1.0, case.factor**2)
            near = np.allclose(wide(got, case.dtype), exact, rtol=eps, atol=eps * least)
            return "" if near else f"{case.name}: {got[:5]} is not near {exact[:5]}"
    same = got.dtype == exact.dtype and np.array_equal(got, exact)
    return "" if same else f"{case.name}: {got[:5]} is not {exact[:5]}"


def play_all(engine):
    """Return what is wrong, over all cases; the engine must be alive at the end."""
    wrong = [text for case in cases() if (text := play(engine, case))]
    alive = engine.submit(Request("end", shape=(1,)), np.ones(1, np.float32)).wait(60)
    assert alive[0] == 1.0
    return wrong


def play_in_job():
    """Play all cases in a job that ``ringlet.run`` has started."""
    from ringlet.job.session import init, shutdown

    try:
        return play_all(init().engine)
    finally:
        shutdown()
