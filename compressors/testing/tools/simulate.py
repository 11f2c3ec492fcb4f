"""What the engine does with a compressor, in plain array code: the oracle of the kit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Exchange, Payload, Round, storage
from ringlet.compressors.core.context import SECOND_STAGE, Array, Context, State, Workspace
from ringlet.compressors.testing.tools.inputs import gaussian


class Overflow(AssertionError):
    """Integers of several ranks whose sum does not fit their type."""


Shaping = Callable[[int], tuple[int, ...]]  # from a number of elements to a shape

_shaping: list[Shaping] = []
_ROUNDS = 10_000
_WIRE = ("int8", "int16", "int32", "int64", "float32")  # what transports add up


@contextmanager
def shaped(shaping: Shaping) -> Iterator[None]:
    """Let tensors of which no shape is given have another than flat, until the with-block ends."""
    _shaping.append(shaping)
    try:
        yield
    finally:
        _shaping.pop()


def _shape_of(x: Array) -> tuple[int, ...]:
    return _shaping[-1](x.size) if _shaping else x.shape


def context(x: Array, state: State | None = None, **fields: Any) -> Context:
    """Return the context of a whole tensor ``x``."""
    held = {} if state is None else state
    return Context(**{"shape": _shape_of(x), "numel": x.size, "state": held, **fields})


def by_payload(compressor: Compressor) -> bool:
    """Whether there are payloads: not for compressors that exchange in rounds."""
    return compressor.traits().combine != "rounds"


def in_halves(compressor: Compressor) -> bool:
    """Whether the values themselves travel as float16, whose range is known to everybody."""
    if not by_payload(compressor):
        return False
    x = gaussian(3000, 8)
    payload = compressor.compress(x, context(x))
    most = max(array.size for array in payload.values())
    return any(a.dtype == np.float16 and a.size == most for a in payload.values())


def takes_local(compressor: Compressor) -> bool:
    """Whether ``exchange`` has room for what stands for this rank's own gradient."""
    taken = list(inspect.signature(compressor.exchange).parameters.values())
    return len(taken) >= 4 or any(p.kind is p.VAR_POSITIONAL for p in taken)


def encode(compressor: Compressor, x: Array, ctx: Context) -> Payload:
    """Compress as the engine does: into preallocated arrays where the payload is of fixed size."""
    if not compressor.traits().fixed_size:
        return compressor.compress(x, ctx)
    payload: Payload = {}
    for name, dtype, elements in compressor.layout(x.size):
        # Buffers are reused, so what was in them before must not matter.
        payload[name] = np.full(elements, 77, storage(dtype))
    compressor.encode_into(x, payload, ctx)
    return payload


def decode(compressor: Compressor, payload: Payload, n: int, ctx: Context) -> Array:
    """Decompress into an array that holds garbage before."""
    out = np.full(n, np.nan, np.float32)
    compressor.decompress(payload, out, ctx)
    return out


def simulate(
    compressor: Compressor,
    gradients: Sequence[Array],
    states: Sequence[State] | None = None,
    step: int = 0,
    name: str = "tensor",
    shape: tuple[int, ...] | None = None,
    in_place: bool = False,
    shares: list[Array] | None = None,
    seed: int = 0,
    workspace: Workspace | None = None,
    rounds: list[tuple[str, str, int]] | None = None,
    alike: int = 1,
    lasting: bool = False,
) -> list[Array]:
    """Return what every one of W simulated ranks has for the mean of ``gradients``.

    ``gradients`` are flat float32 arrays of one length, by rank; ``states`` what each rank
    remembers between calls; ``shape`` the tensor's, flat by default. Results of exchanges replace
    the values if they are made ``in_place``; what stands for each rank's values is appended to
    ``shares``, if there is such a list, and to ``rounds`` what is exchanged: op, dtype and length.
    In rounds each may stand for many ``alike``; what is received stays after the next yield if it
    is ``lasting``, as it is not in an engine.
    """
    size, n = len(gradients) * alike, gradients[0].size
    held = states if states is not None else [{} for _ in gradients]
    given = _shape_of(gradients[0]) if shape is None else shape
    # Shared as among the tensors of an engine: who keeps scratch too long finds it overwritten.
    fields: dict[str, Any] = {"shape": given, "workspace": workspace or Workspace()}
    fields |= {"size": size, "step": step, "name": name, "seed": seed}
    contexts = [context(x, held[rank], rank=rank, **fields) for rank, x in enumerate(gradients)]
    now = compressor.at(step)
    traits = now.traits()
    if traits.combine == "rounds":
        outs = _rounds(now, gradients, contexts, in_place, shares, rounds, alike, lasting)
    else:
        scale = np.float32(1.0 / size)
        inputs = [x * scale if traits.predivide and size > 1 else x for x in gradients]
        payloads = [encode(now, x, ctx) for x, ctx in zip(inputs, contexts, strict=True)]
        if traits.combine == "sum":
            payloads = [summed(now, payloads, n)]
        outs = []
        for ctx in contexts:
            out = decode(now, payloads[0], n, ctx)
            for payload in payloads[1:]:
                now.accumulate(payload, out, ctx)
            if not traits.predivide and size > 1:
                out *= scale
            outs.append(out)
    for out, ctx in zip(outs, contexts, strict=True):
        ended: Any = now.finish(out, ctx)  # type: ignore[func-returns-value]
        assert ended is None or ended is out, (
            "finish() returns something, which nobody takes; change out in place: out[:] = ..."
        )
    return outs


def scatter(
    compressor: Compressor, gradients: Sequence[Array], states: Sequence[State], step: int = 0
) -> list[Array]:
    """Return the same where shards are reduced by their owners and then compressed again.

    For compressors of fixed size that may be cut.
    """
    size, n = len(gradients), gradients[0].size
    now = compressor.at(step)
    granule = now.traits().granularity
    assert granule is not None, "a tensor that is scattered is cut"
    granules = -(-n // granule)
    cuts = [min(granules * part // size * granule, n) for part in range(size + 1)]
    outs = [np.full(n, np.nan, np.float32) for _ in gradients]
    fields: dict[str, Any] = {"size": size, "step": step, "workspace": Workspace()}
    for owner, (start, stop) in enumerate(pairwise(cuts)):
        if start == stop:
            continue
        total = np.zeros(stop - start, np.float32)
        for rank, x in enumerate(gradients):
            ctx = context(x, states[rank], rank=rank, offset=start, **fields)
            total += decode(now, encode(now, x[start:stop].copy(), ctx), total.size, ctx)
        total *= np.float32(1.0 / size)
        second: dict[str, Any] = {"shape": (n,), "stage": 2, **fields}
        kept = states[owner].setdefault(f"{SECOND_STAGE}{start}", {})
        payload = encode(now, total, context(total, kept, rank=owner, **second))
        for rank, out in enumerate(outs):
            ctx = context(total, kept if rank == owner else {}, rank=rank, **second)
            out[start:stop] = decode(now, payload, total.size, ctx)
    return outs


def summed(compressor: Compressor, payloads: Sequence[Payload], n: int) -> Payload:
    """Return what a transport makes of payloads that it adds up."""
    total: Payload = {}
    for name, dtype, _ in compressor.layout(n):
        arrays = [payload[name] for payload in payloads]
        if dtype == "bfloat16":
            with np.errstate(over="ignore"):
                wide = sum((a.astype(np.uint32) << 16).view(np.float32) for a in arrays)
            bits = np.asarray(wide, np.float32).view(np.uint32)
            # To the nearest, ties to even; a NaN or an infinity stays what it is.
            up = np.where(np.isfinite(wide), 0x7FFF + (bits >> 16 & 1), 0).astype(np.uint32)
            total[name] = ((bits + up) >> 16).astype(np.uint16)
        else:
            wide = np.sum([a.astype(np.float64) for a in arrays], axis=0)
            with np.errstate(over="ignore"):
                total[name] = np.asarray(wide).astype(arrays[0].dtype)
    return total


def _rounds(
    compressor: Compressor,
    gradients: Sequence[Array],
    contexts: Sequence[Context],
    in_place: bool,
    shares: list[Array] | None,
    asked: list[tuple[str, str, int]] | None,
    alike: int,
    lasting: bool,
) -> list[Array]:
    local: list[Array | None] = [None] * len(gradients)
    if shares is not None:
        shares += [np.full(x.size, np.nan, np.float32) for x in gradients]
        local[:] = shares
    outs = [x.copy() if in_place else np.full(x.size, np.nan, np.float32) for x in gradients]
    gradients = outs if in_place else gradients
    generators: list[Exchange] = [
        compressor.exchange(x, out, ctx, own)
        if own is not None
        else compressor.exchange(x, out, ctx)
        for x, out, ctx, own in zip(gradients, outs, contexts, local, strict=True)
    ]
    exchanged(generators, contexts[0].workspace, asked, alike, lasting)
    return outs


def exchanged(
    generators: Sequence[Exchange],
    workspace: Workspace,
    found: list[tuple[str, str, int]] | None = None,
    alike: int = 1,
    lasting: bool = False,
) -> None:
    """Run the exchanges of all ranks to their end; append what they exchange to ``found``."""
    try:
        _in_step(generators, workspace, [] if found is None else found, alike, lasting)
    finally:
        for generator in generators:  # after a failure too, in this context and not in another
            generator.close()


def _in_step(
    generators: Sequence[Exchange],
    workspace: Workspace,
    found: list[tuple[str, str, int]],
    alike: int,
    lasting: bool,
) -> None:
    received: list[Array | None] = [None] * len(generators)
    while True:
        rounds = [_advance(g, r, workspace) for g, r in zip(generators, received, strict=True)]
        for old in received:
            if old is not None and not lasting:  # it is valid until the next yield
                old.fill(np.nan if old.dtype.kind == "f" else -77)
        if all(r is None for r in rounds):
            return
        asked = [r for r in rounds if r is not None]
        kinds = {(r.op, r.values.dtype, r.values.shape) for r in asked}
        assert len(asked) == len(rounds), (
            "some ranks exchange another round, others do not; how many rounds there are must not "
            "depend on a rank's own values"
        )
        assert len(kinds) == 1, (
            f"ranks exchange different things in one round: {kinds}; what is yielded must have the "
            "same op, dtype and length on all of them"
        )
        found.append((asked[0].op, asked[0].values.dtype.name, asked[0].values.size))
        assert len(found) < _ROUNDS, (
            f"exchange has yielded {_ROUNDS} rounds and goes on; end after a number of rounds that "
            "no values decide"
        )
        together = combined([r.values for r in asked], asked[0].op, alike)
        received = [together.copy() for _ in rounds]


def _advance(generator: Exchange, received: Array | None, workspace: Workspace) -> Round | None:
    try:
        asked = next(generator) if received is None else generator.send(received)
    except StopIteration:
        return None
    assert isinstance(asked, Round), (
        f"exchange yielded {type(asked).__name__}; yield Round(values, 'mean'), or 'sum' or 'max'"
    )
    values = asked.values
    what = f"{values.dtype}{list(values.shape)}"
    assert values.dtype.name in _WIRE, (
        f"exchange yielded Round({what}), which no wire adds up; yield float32 or a signed "
        "integer: values.astype('float32')"
    )
    assert values.ndim == 1, f"exchange yielded Round({what}); yield a flat array: .reshape(-1)"
    assert not workspace.lends(values), (
        f"exchange yielded Round({what}) of scratch memory, which other tensors' exchanges use "
        "meanwhile; yield a new array, or take it from ctx.workspace.held(n)"
    )
    return asked


def combined(arrays: Sequence[Array], op: str, alike: int = 1) -> Array:
    """Return what a transport makes of the arrays that all ranks give it in a round."""
    dtype = arrays[0].dtype
    if op == "max":  # of NaN and a number some transports give the one, some the other
        return np.fmax.reduce(arrays)  # type: ignore[no-any-return]
    wide = np.sum([a.astype(np.float64) for a in arrays], axis=0) * alike
    if op == "mean":
        wide /= len(arrays) * alike
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        inside = bool((wide >= limits.min).all() and (wide <= limits.max).all())
        if not inside:
            raise Overflow(
                f"the sum of {len(arrays) * alike} ranks overflows {dtype}; send a wider integer, "
                "or codes of at most its largest divided by ctx.size"
            )
    return np.asarray(wide).astype(dtype)
