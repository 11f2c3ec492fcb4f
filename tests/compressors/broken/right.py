"""Plugins without a fault: what the broken ones are made from, and where the kit must keep quiet.

Array code throughout, as an author writes who follows docs/own-compressor.md.
"""

import ctypes
import zlib
from dataclasses import replace

import numpy as np

from ringlet.compressors import Compressor, Context, Part, Round, Traits, option, remembered
from ringlet.compressors.base.batched import Batched, BatchedRounds, RoundOfMany

CELL = 64


class Whole(Compressor):
    """8 bits on one scale for the tensor."""

    def compress(self, x, ctx):
        xp = ctx.xp
        largest = xp.abs(x).max(initial=0, keepdims=True)
        step = largest / np.float32(127)
        with np.errstate(all="ignore"):
            codes = xp.rint(x / step)
        usable = xp.isfinite(step) & (step > 0)
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


def rows_of(x, xp, fill=0.0, cell=CELL):
    """Return ``x`` as rows of a cell each, the last one filled up."""
    rows = xp.full((-(-x.size // cell), cell), np.float32(fill))
    rows.reshape(-1)[: x.size] = x
    return rows


class Cells(Compressor):
    """8 bits, a scale per 64 elements."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def cell(self, n):
        return CELL

    def layout(self, n):
        return (Part("codes", "int8", n), Part("steps", "float32", -(-n // self.cell(n))))

    def rounded(self, places, ctx):
        return ctx.xp.rint(places)

    def compress(self, x, ctx):
        xp = ctx.xp
        rows = rows_of(x, xp, cell=self.cell(x.size))
        steps = xp.abs(rows).max(axis=1) / np.float32(127)
        with np.errstate(all="ignore"):
            rows /= steps[:, None]
        rows[~(xp.isfinite(steps) & (steps > 0))] = 0
        codes = self.rounded(rows.reshape(-1)[: x.size], ctx)
        return {"codes": codes.astype("int8"), "steps": steps}

    def decompress(self, payload, out, ctx):
        steps = payload["steps"].repeat(self.cell(out.size))
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * steps[: out.size]


class Largest(Compressor):
    """A sixteenth of the entries, those of largest magnitude, with 32-bit indices."""

    def compress(self, x, ctx):
        xp = ctx.xp
        k = min(x.size, max(1, x.size // 16))
        order = -xp.abs(x)
        order[xp.isnan(order)] = -np.inf
        places = xp.argpartition(order, k - 1)[:k].astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class AboveHalf(Largest):
    """What is at least half as large as the largest, however many entries these are."""

    def compress(self, x, ctx):
        size = np.where(np.isnan(x), np.inf, np.abs(x))
        least = size.max(initial=0) / np.float32(2)
        places = np.flatnonzero((size >= least) & (size > 0)).astype("uint32")
        return {"indices": places, "values": x[places]}


class Striped(Largest):
    """Each rank sends a share of the entries, which go by turns, and what is not finite."""

    def compress(self, x, ctx):
        first = (ctx.rank + ctx.step) % ctx.size
        lost = np.flatnonzero(~np.isfinite(x))
        places = np.union1d(np.arange(first, x.size, ctx.size), lost).astype("uint32")
        return {"indices": places, "values": x[places]}


class StripedByName(Largest):
    """The same with a block, of which each tensor begins with another one."""

    def compress(self, x, ctx):
        turn = 3 * ctx.step + ctx.rank + zlib.crc32(ctx.name.encode())
        start = 40 * (turn % max(1, -(-x.size // 40)))
        lost = np.flatnonzero(~np.isfinite(x))
        places = np.union1d(np.arange(start, min(start + 40, x.size)), lost).astype("uint32")
        return {"indices": places, "values": x[places]}


class Masked(Compressor):
    """Sends values at places that a bit mask tells; whoever chains behind it is told why not."""

    def compress(self, x, ctx):
        keep = ~(ctx.xp.abs(x) < ctx.xp.abs(x).mean(dtype="float32") if x.size else x < 0)
        return {"mask": ctx.xp.packbits(keep), "values": x[keep]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        keep = ctx.xp.unpackbits(payload["mask"], count=out.size).astype(bool)
        out[keep] = payload["values"]


class Signs(Compressor):
    """A bit per element and the mean magnitude."""

    def compress(self, x, ctx):
        xp = ctx.xp
        scale = xp.abs(x).sum(keepdims=True, dtype="float64") / max(x.size, 1)
        return {"bits": xp.packbits(x >= 0), "scale": scale.astype("float32")}

    def decompress(self, payload, out, ctx):
        positive = ctx.xp.unpackbits(payload["bits"], count=out.size)
        with np.errstate(invalid="ignore"):
            out[:] = (positive * np.float32(2) - np.float32(1)) * payload["scale"]


class Added(Compressor):
    """All values as they are, which are added up on the wire."""

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("values", "float32", n),)

    def compress(self, x, ctx):
        return {"values": x.copy()}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class Folded(Compressor):
    """A linear sketch: every element goes to one of n / 4 sums, the same one on all ranks."""

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("sums", "float32", self.count(n)),)

    def count(self, n):
        return -(-n // 4)

    def places(self, n, ctx):
        rng = ctx.rng(shared=True)
        signs = rng.integers(0, 2, n) * np.float32(2) - np.float32(1)
        return rng.integers(0, max(self.count(n), 1), n), signs.astype("float32")

    def compress(self, x, ctx):
        places, signs = self.places(x.size, ctx)
        sums = ctx.xp.zeros(self.count(x.size), "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            np.add.at(sums, places, signs * x)
        return {"sums": sums}

    def decompress(self, payload, out, ctx):
        places, signs = self.places(out.size, ctx)
        with np.errstate(invalid="ignore"):
            out[:] = payload["sums"][places] * signs * np.float32(0.25)


class Momentum(Compressor):
    """Sends an average over steps, which it remembers, as 16-bit floats times a power of two."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("average",))

    def compress(self, x, ctx):
        xp = ctx.xp
        average = ctx.state.get("average")
        if average is None or average.size != x.size:
            average = ctx.state["average"] = xp.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            new = average + (x - average) * np.float32(0.5)
        xp.copyto(average, new, where=xp.isfinite(new))
        return {"values": new}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class SharedScale(Compressor):
    """Two rounds: the largest magnitude of all ranks, then the sum of integers on that scale."""

    _levels, _wire = 1000, "int32"

    def traits(self):
        return Traits("rounds", in_place=True)

    def rounded(self, places, ctx):
        return ctx.xp.rint(places)

    def exchange(self, x, out, ctx, local=None):
        xp = ctx.xp
        largest = xp.abs(x).max(initial=0, keepdims=True)
        largest = xp.where(xp.isnan(largest), np.float32(np.inf), largest)
        largest = (yield Round(largest, "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(self._levels)
            usable = xp.isfinite(step) & (step > 0)
            codes = xp.where(usable, self.rounded(x / step, ctx), 0).astype(self._wire)
            total = yield Round(codes, "sum")
            step = xp.where(xp.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class Jumping(Compressor):
    """A 64th of the entries, with 16-bit gaps: 65535 skips as many entries and has no value."""

    jump = 65535

    def chained_count(self, payload, n):
        return int((payload["gaps"] != self.jump).sum())

    def jumps(self, skipped):
        return skipped // self.jump

    def rest(self, skipped):
        return skipped - self.jump * self.jumps(skipped)

    def compress(self, x, ctx):
        xp = ctx.xp
        size = xp.where(xp.isnan(x), np.float32(np.inf), xp.abs(x))
        k = -(-x.size // 64)
        places = xp.sort(xp.argpartition(-size, k - 1)[:k])
        skipped = xp.diff(places, prepend=-1) - 1
        ends = xp.cumsum(self.jumps(skipped) + 1)
        gaps = xp.full(int(ends[-1]) if x.size else 0, self.jump, "uint16")
        gaps[ends - 1] = self.rest(skipped).astype("uint16")
        return {"gaps": gaps, "values": x[places]}

    def decompress(self, payload, out, ctx):
        gaps = payload["gaps"].astype("int64")
        places = ctx.xp.cumsum(gaps + (gaps != self.jump)) - 1
        out[:] = 0
        out[places[gaps != self.jump]] = payload["values"]


class Sketched(Compressor):
    """Adds count-sketches up over the ranks, and exchanges the largest entries exactly."""

    def traits(self):
        return Traits("rounds")

    def rng(self, ctx):
        return ctx.rng(shared=True)

    def count(self, x, ctx):
        return max(1, x.size // 50)

    def exchange(self, x, out, ctx, local=None):
        xp, width, rng = ctx.xp, max(1, x.size // 10), self.rng(ctx)
        cells = rng.integers(0, width, (3, x.size))
        signs = rng.integers(0, 2, (3, x.size)) * np.float32(2) - np.float32(1)
        rows = [xp.bincount(c, s * x, width) for c, s in zip(cells, signs, strict=True)]
        sketch = yield Round(xp.concatenate(rows).astype("float32"), "mean")
        visible = (0 * sketch).sum()
        rows = sketch.reshape(3, width)
        a, b, c = (r[c] * s for r, c, s in zip(rows, cells, signs, strict=True))
        median = xp.maximum(xp.minimum(a, b), xp.minimum(xp.maximum(a, b), c))
        size = xp.where(xp.isnan(median), np.float32(np.inf), xp.abs(median))
        count = self.count(x, ctx)
        places = xp.argpartition(-size, count - 1)[:count]
        out[:] = visible
        mine = x[places]
        out[places] += yield from self.values(mine, ctx)
        if local is not None:
            self.share(local, places, mine, out)

    def values(self, mine, ctx):
        return (yield Round(mine, "mean", mine))

    def share(self, local, places, mine, out):
        local[:] = 0
        local[places] = mine


class Means(Compressor):
    """The mean of every 16 elements: linear, without indices, and it says what it loses."""

    def traits(self):
        return Traits("sum", fixed_size=True, granularity=16)

    def divergence(self):
        return "what a mean lacks is never sent"

    def layout(self, n):
        return (Part("means", "float32", -(-n // 16)),)

    def compress(self, x, ctx):
        rows = ctx.xp.zeros((-(-x.size // 16), 16), "float32")
        rows.reshape(-1)[: x.size] = x
        counts = ctx.xp.minimum(16, x.size - 16 * ctx.xp.arange(rows.shape[0]))
        with np.errstate(invalid="ignore", over="ignore"):
            return {"means": (rows.sum(axis=1) / counts).astype("float32")}

    def decompress(self, payload, out, ctx):
        out[:] = payload["means"].repeat(16)[: out.size]


class SharedDither(Cells):
    """Rounds with noise that all ranks share, and that receivers take off again."""

    def noise(self, n, ctx):
        return ctx.uniform(n, shared=True) - np.float32(0.5)

    def rounded(self, places, ctx):
        return np.clip(np.rint(places + self.noise(places.size, ctx)), -127, 127)

    def decompress(self, payload, out, ctx):
        steps = payload["steps"].repeat(CELL)[: out.size]
        with np.errstate(invalid="ignore"):
            out[:] = (payload["codes"] - self.noise(out.size, ctx)) * steps


class Dithered(SharedDither):
    """The same with noise of every rank's own, so that errors cancel: it sends whose it is."""

    def layout(self, n):
        return (*super().layout(n), Part("rank", "int32", 1))

    def noise(self, n, ctx):
        return ctx.uniform(n) - np.float32(0.5)

    def compress(self, x, ctx):
        return super().compress(x, ctx) | {"rank": np.array([ctx.rank], "int32")}

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, replace(ctx, rank=int(payload["rank"][0])))


class Majority(Compressor):
    """The sign that most ranks have: what is added up is linear, and the end is not."""

    def traits(self):
        return Traits("sum", fixed_size=True, scales=False)

    def divergence(self):
        return "a vote knows no sizes"

    def layout(self, n):
        return (Part("votes", "int32", n + 1),)

    def compress(self, x, ctx):
        votes = (x > 0).astype("int32") - (x < 0)
        return {"votes": np.append(votes, not np.isfinite(x).all()).astype("int32")}

    def decompress(self, payload, out, ctx):
        out[:] = payload["votes"][:-1]
        out += np.float32(np.nan if payload["votes"][-1] else 0)

    def finish(self, out, ctx):
        np.sign(out, out=out)


class MajorityInRounds(Majority):
    """The same in a round; nothing is fed back, so that nobody asks what of it is whose."""

    def traits(self):
        return Traits("rounds", scales=False)

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        votes = yield Round(self.compress(x, ctx)["votes"], "sum")
        self.decompress({"votes": votes}, out, ctx)
        if local is not None:
            local[:] = out


class Leaders(Compressor):
    """Ranks take turns to choose which entries all of them send; NaN is told by every rank."""

    def traits(self):
        return Traits("rounds")

    def spoiled(self, x):
        return (np.float32(0) * x).sum()

    def exchange(self, x, out, ctx, local=None):
        xp, k = ctx.xp, -(-x.size // 20)
        size = xp.where(xp.isfinite(x), xp.abs(x), xp.inf)
        largest = xp.argpartition(-size, k - 1)[:k].astype("int32")
        mine = largest if ctx.rank == ctx.step % ctx.size else xp.zeros(k, "int32")
        chosen = (yield Round(mine, "sum")).copy()
        values = xp.append(x[chosen], self.spoiled(x)).astype("float32")
        mean = yield Round(values, "mean", values)
        out[:] = mean[-1] * 0
        out[chosen] += mean[:-1]
        if local is not None:
            local[:] = 0
            local[chosen] = values[:-1]


class Launched(Cells):
    """The same with kernels for many tensors, which take host arrays."""

    def multi_tensor(self, ctx):
        return Launch(self)


class Launch:
    """What a launch does, tensor by tensor: in float32, whatever the gradient's dtype is."""

    def __init__(self, cells):
        self.cells = cells

    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        for tensor in tensors:
            with np.errstate(invalid="ignore", over="ignore"):
                x = widened(tensor.x) * np.float32(scale)
            if tensor.residual is None:
                self.cells.encode_into(x, tensor.payload, tensor.ctx)
            else:
                self.cells.feedback_into(x, tensor.residual, decay, tensor.payload, tensor.ctx)
            with np.errstate(invalid="ignore"):
                tensor.payload["steps"] *= np.float32(weight)

    def decode(self, tensors, spaced=None, scale=1.0, weight=1.0):
        for tensor in tensors:
            decoded = np.empty(tensor.out.size, "float32")
            self.cells.decompress(tensor.source, decoded, tensor.ctx)
            with np.errstate(invalid="ignore", over="ignore"):
                narrowed(decoded * np.float32(scale * weight), tensor.out)


def widened(x):
    """Return float32 of float32, float16, or bfloat16 as uint16."""
    if x.dtype == np.uint16:
        return (x.astype("uint32") << 16).view("float32")
    return x.astype("float32")


def narrowed(values, out):
    """Round to the dtype of ``out``, to nearest even."""
    if out.dtype != np.uint16:
        out[:] = values
        return
    bits = values.view("uint32")
    odd = (bits >> 16) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> 16
    out[:] = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)


class BatchedCells(Cells):
    """The same with kernels for many tensors in host memory, told of by their addresses."""

    def batched(self):
        return batch_of(self)


def batch_of(cells, encoded=None, decoded=None, **fields):
    """Return what a call does, tensor by tensor; the functions are given one tensor each."""
    encoded, decoded = encoded or encode_one, decoded or decode_one

    def encode(tensors, payloads, decay):
        for t in range(len(tensors)):
            encoded(cells, t, tensors, payloads, decay)

    def decode(outs, payloads, scale):
        for t in range(len(outs)):
            decoded(cells, t, outs, payloads, scale)

    names = ("codes", "steps")
    return Batched(cells.label, cells.layout, names, encode, encode, decode, **fields)


def encode_one(cells, t, tensors, payloads, decay):
    n = int(payloads[t, 0])
    key, offset = int(tensors[t, 2]), int(tensors[t, 3])
    ctx = Drawn(numel=offset + n, offset=offset, drawn=key)
    x, payload = at(tensors[t, 0], n, "float32"), cells_at(payloads[t])
    if tensors[t, 1]:
        cells.feedback_into(x, at(tensors[t, 1], n, "float32"), float(decay), payload, ctx)
    else:
        cells.encode_into(x, payload, ctx)


def decode_one(cells, t, outs, payloads, scale):
    out = at(outs[t], int(payloads[0, t, 0]), "float32")
    with np.errstate(invalid="ignore", over="ignore"):
        cells.sum_into([cells_at(rows[t]) for rows in payloads], out, Context(numel=out.size))
        out *= scale


class Drawn(Context):
    """A context of which a kernel knows the key alone."""

    def __init__(self, drawn=0, **fields):
        super().__init__(**fields)
        self.drawn = drawn

    def key(self, shared=False):
        return self.drawn


def cells_at(row):
    n = int(row[0])
    return {"codes": at(row[1], n, "int8"), "steps": at(row[2], -(-n // CELL), "float32")}


def at(address, n, dtype):
    """Return the ``n`` elements that lie at an address."""
    room = (ctypes.c_uint8 * (n * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(room, dtype)


class BatchedDraws(BatchedCells):
    """Rounds at random, by the key of each tensor."""

    def rounded(self, places, ctx):
        return np.minimum(np.floor(places + ctx.uniform(places.size)), np.float32(127))

    def batched(self):
        return batch_of(self, draws=True)


class LaunchedVarying(Whole):
    """Kernels for many tensors of payloads whose size is not declared."""

    def multi_varying(self, ctx):
        return VaryingLaunch(self)


class VaryingLaunch:
    """What such a launch does, tensor by tensor."""

    feeds = True

    def __init__(self, whole):
        self.whole = whole

    def compress(self, tensors, scale=1.0, decay=1.0):
        sent = []
        for tensor in tensors:
            with np.errstate(invalid="ignore", over="ignore"):
                x = widened(tensor.x) * np.float32(scale)
            if tensor.residual is None:
                sent.append(self.whole.compress(x, tensor.ctx))
            else:
                fed = self.whole.compress_feedback(x, tensor.residual, decay, tensor.ctx)
                sent.append(fed)
        return sent

    def decode(self, sums, scale=1.0):
        for out, payloads, ctx in sums:
            total = np.empty(out.size, "float32")
            self.whole.sum_into(payloads, total, ctx)
            with np.errstate(invalid="ignore", over="ignore"):
                narrowed(total * np.float32(scale), out)


class NormDithered(Compressor):
    """Powers of two of the whole tensor's 2-norm, rounded at random (Horvath et al., 2019)."""

    def compress(self, x, ctx):
        xp, levels = ctx.xp, np.float32(8)
        largest = xp.abs(x).max(initial=0, keepdims=True)
        with np.errstate(all="ignore"):
            ratio = x / largest
            length = xp.sqrt(xp.square(ratio).sum(keepdims=True))
            ratio = xp.abs(ratio) / length
            below = xp.floor(xp.log2(ratio))
            low = xp.where(below < -levels, 0, xp.exp2(below))
            high = xp.where(low > 0, 2 * low, xp.exp2(-levels))
            up = ctx.uniform(x.size) * (high - low) < ratio - low
            codes = xp.where(up, high, low)
            codes = xp.where(codes > 0, xp.log2(codes) + levels + 1, 0) * xp.sign(x)
            norm = largest * length
        usable = xp.isfinite(norm) & (norm > 0)
        norm = xp.where(largest > 0, norm, largest)
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "norm": norm}

    def decompress(self, payload, out, ctx):
        codes = payload["codes"].astype("float32")
        sizes = np.where(codes == 0, 0, np.exp2(np.abs(codes) - 9)) * np.sign(codes)
        with np.errstate(invalid="ignore"):
            out[:] = sizes * payload["norm"]


class SharedQuarter(Compressor):
    """Every fourth element, from where all ranks choose alike, four times as large: unbiased."""

    def traits(self):
        return Traits(combine="rounds", omega=3.0)

    def exchange(self, x, out, ctx, local=None):
        first = int(ctx.rng(shared=True).integers(0, 4))
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.append(x[first::4] * np.float32(4), (0 * x).sum()).astype("float32")
            mean = yield Round(values, "mean", values)
            for kept, given in ((out, mean), (local, values)):
                if kept is not None:
                    kept[:] = (0 * given).sum()
                    kept[first::4] += given[:-1]


class SubtractsWhatWasTooMuch(Compressor):
    """Error feedback the other way round: keeps what was sent too much, and subtracts it."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("excess",))

    def compress(self, x, ctx):
        excess = ctx.state.get("excess")
        if excess is None or excess.size != x.size:
            excess = np.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            p = x - excess
            least = x.size * 3 // 4
            most = np.argpartition(np.abs(p), least)[least:]
            new = -p
        new[most] = 0
        if np.isfinite(p).all():
            ctx.state["excess"] = new
        return {"indices": most.astype("int32"), "values": p[most]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class EveryFourthStep(Compressor):
    """Adds up four steps, and sends their sum in every fourth: nothing but NaN in the others."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("sum",))

    def compress(self, x, ctx):
        kept = ctx.state.get("sum")
        if kept is None or kept.size != x.size:
            kept = np.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            total = kept + x
        now, sound = ctx.step % 4 == 3, bool(np.isfinite(total).all())
        if sound:
            ctx.state["sum"] = np.zeros_like(total) if now else total
        return {
            "values": total if now else np.zeros(0, "float32"),
            "visible": np.array([0 if sound else np.nan], "float32"),
        }

    def decompress(self, payload, out, ctx):
        out[:] = payload["visible"]
        if payload["values"].size:
            out += payload["values"]


class ByTurns(Compressor):
    """Every fourth element, from another one on in every step."""

    def compress(self, x, ctx):
        turn, sound = ctx.step % 4, np.isfinite(x).all()
        return {
            "values": x[turn::4].copy(),
            "turn": np.array([turn], "int8"),
            "visible": np.array([0 if sound else np.nan], "float32"),
        }

    def decompress(self, payload, out, ctx):
        out[:] = payload["visible"]
        out[payload["turn"][0] :: 4] += payload["values"]


class BlocksInTurn(Compressor):
    """Sends another tenth in each step, of which all ranks send the same: values add up."""

    parts: int = option(10, ge=1, le=1000)

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("values", "float32", -(-n // self.parts)),)

    def places(self, n, ctx):
        length = -(-n // self.parts)
        return (np.arange(length) + ctx.step % self.parts * length) % max(1, n)

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            return {"values": x[self.places(x.size, ctx)] + (0 * x).sum(dtype="float32")}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[self.places(out.size, ctx)] = payload["values"]


class OneDitheredBit(Compressor):
    """One bit, which compares each value with noise (Jin et al., 2020): zeros come out as well.

    ``salt`` is an option of any text, which makes a difference.
    """

    salt: str = option("", doc="any text: other noise")

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0, keepdims=True)
        usable = np.isfinite(largest) & (largest > 0)
        with np.errstate(all="ignore"):
            share = np.where(usable, x, 0) / np.where(usable, largest, 1)
        noise = ctx.rng(stream=1 + zlib.crc32(self.salt.encode()) % 1000)
        bits = share > noise.random(x.size, dtype=np.float32) * 2 - 1
        return {"bits": np.packbits(bits), "largest": largest}

    def divergence(self):
        return "a bit of the largest value varies too much; leave '| ef' away"

    def decompress(self, payload, out, ctx):
        signs = np.unpackbits(payload["bits"], count=out.size) * np.float32(2) - 1
        with np.errstate(invalid="ignore"):
            out[:] = signs * payload["largest"]


class Wangni(Compressor):
    """Sends each value as often as it is large (Wangni et al., NeurIPS 2018), a few at least."""

    ratio: float = option(0.1, gt=0, le=1)

    def divergence(self):
        return "what is rarely sent is sent many times as large; leave '| ef' away"

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0)
        if not np.isfinite(largest):
            places = np.flatnonzero(~np.isfinite(x))[:1].astype("uint32")
            return {"indices": places, "values": x[places]}
        size = np.abs(x) / (largest or np.float32(1))
        total = float(size.sum(dtype=np.float64)) or 1.0
        chance = np.minimum(size * np.float32(max(1.0, self.ratio * x.size) / total), 1)
        places = np.flatnonzero(ctx.uniform(x.size) < chance).astype("uint32")
        return {"indices": places, "values": (x[places] / chance[places]).astype("float32")}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class SomeLayers(Compressor):
    """Sends tensors whole that have a word in their names, and of others the largest entries.

    Ratios fall from step to step, and traits of a first step say something else.
    """

    word: str = option("bias", doc="part of the names of what is sent whole")
    begun: bool = False

    def traits(self):
        return Traits() if self.begun else Traits("sum", fixed_size=True, omega=0.0, delta=1.0)

    def layout(self, n):
        return (Part("values", "float32", n),)

    def at(self, step):
        return self.replace(begun=step >= 100)

    def compress(self, x, ctx):
        if not self.begun:
            return {"values": x.copy()}
        k = x.size if self.word in ctx.name else min(x.size, max(1, x.size // 16))
        size = np.where(np.isnan(x), np.inf, np.abs(x))
        places = np.argsort(-size, kind="stable")[:k].astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        if not self.begun:
            out[:] = payload["values"]
            return
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class TurnsRemembered(Compressor):
    """Sends every fourth entry, and remembers which ones come next."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        turn = int(ctx.state.get("turn", 0))
        ctx.state["turn"] = (turn + 1) % 4
        places = np.arange(turn, x.size, 4, dtype=np.uint32)
        with np.errstate(all="ignore"):
            spoiled = (0 * x).sum(dtype=np.float32)
        return {"indices": places, "values": x[places] + spoiled, "spoiled": spoiled.reshape(1)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["spoiled"]
        out[payload["indices"]] = payload["values"]


class Corrected(Compressor):
    """An eighth of the entries of a velocity that adds up, as in Deep Gradient Compression."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("speed", "kept"))

    def sent(self, size, chosen):
        return chosen

    def compress(self, x, ctx):
        xp = ctx.xp
        kept = [ctx.state.get(name) for name in ("speed", "kept")]
        if any(array is None or array.size != x.size for array in kept):
            kept = [xp.zeros(x.size, "float32")] * 2
        speed = np.float32(0.5) * kept[0] + x
        total = kept[1] + speed
        size = xp.where(xp.isnan(total), np.float32(np.inf), xp.abs(total))
        chosen = xp.argsort(-size, kind="stable")[: -(-x.size // 8)]
        values = total[chosen]
        if xp.isfinite(total).all():
            clear = self.sent(size, chosen)
            speed[clear] = 0
            total[clear] = 0
            ctx.state["speed"], ctx.state["kept"] = speed, total
        return {"indices": chosen.astype("uint32"), "values": values}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class Forgetting(Compressor):
    """Sends what is above a level that follows the largest magnitude, and falls slowly."""

    share = 0.99

    def traits(self):
        return Traits(stateful=True, gradient_units=("level",))

    def units_size(self, name, n):
        return 1

    def compress(self, x, ctx):
        largest = float(ctx.xp.abs(x).max()) if x.size else 0.0
        level = max(self.share * ctx.state.get("level", 0.0), largest)
        if np.isfinite(largest):
            ctx.state["level"] = level
        (places,) = ctx.xp.nonzero(~(ctx.xp.abs(x) < np.float32(0.25 * level)))
        return {"indices": places.astype("uint32"), "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class RandomStart(Compressor):
    """One power iteration that begins with a matrix which ranks draw in common, every step anew."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        xp, width = ctx.xp, max(1, int(x.size**0.5))
        matrix = xp.zeros((-(-x.size // width), width), "float32")
        matrix.reshape(-1)[: x.size] = x
        start = ctx.rng(shared=True).standard_normal((width, 2)).astype("float32")
        left = (yield Round((matrix @ start).reshape(-1), "mean")).reshape(-1, 2)
        visible = (0 * left).sum()  # NaN where anybody's overflowed
        left = xp.linalg.qr(xp.where(xp.isfinite(left), left, 0))[0]
        own = (left.T @ matrix).reshape(-1)
        mean = yield Round(own, "mean", own)
        out[:] = (left @ mean.reshape(-1, width)).reshape(-1)[: x.size] + visible
        if local is not None:
            local[:] = (left @ own.reshape(-1, width)).reshape(-1)[: x.size]


class AFewCells(Compressor):
    """A count-sketch that may be as small as one asks for: estimates are then off by luck."""

    share: int = option(8, ge=1, le=300, doc="elements to a cell")

    def traits(self):
        return Traits("sum", fixed_size=True, omega=self.share + 1e-3)

    def cells(self, n):
        return -(-n // self.share)

    def layout(self, n):
        return (Part("cells", "float32", self.cells(n)),)

    def hashes(self, n, ctx):
        rng = ctx.rng(shared=True)
        return rng.integers(0, max(1, self.cells(n)), n), rng.choice(np.float32([-1, 1]), n)

    def compress(self, x, ctx):
        places, signs = self.hashes(x.size, ctx)
        cells = ctx.xp.bincount(places, signs * x, self.cells(x.size))
        return {"cells": cells.astype("float32")}

    def decompress(self, payload, out, ctx):
        places, signs = self.hashes(out.size, ctx)
        out[:] = payload["cells"][places] * signs


class Frequencies(Compressor):
    """The largest half of the Fourier coefficients: of what repeats itself nothing is lost."""

    def compress(self, x, ctx):
        xp = ctx.xp
        with np.errstate(all="ignore"):
            found = xp.fft.rfft(x.astype("float64")) if x.size else xp.zeros(0, "complex128")
        size = xp.where(xp.isnan(found), xp.inf, xp.abs(found))
        places = xp.argsort(-size, kind="stable")[: -(-found.size // 2)]
        parts = xp.stack([found[places].real, found[places].imag]).astype("float32")
        return {"places": places.astype("uint32"), "parts": parts.reshape(-1)}

    def decompress(self, payload, out, ctx):
        if out.size:
            found = ctx.xp.zeros(out.size // 2 + 1, "complex128")
            real, imaginary = payload["parts"].reshape(2, -1)
            found.real[payload["places"]] = real
            found.imag[payload["places"]] = imaginary
            with np.errstate(all="ignore"):
                out[:] = ctx.xp.fft.irfft(found, out.size)


class LeaderInTurn(Compressor):
    """Ranks choose in turn what all send; NaN of the others travels beside it."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        xp = ctx.xp
        chosen = xp.zeros(-(-x.size // 4), "int32")
        if ctx.step % ctx.size == ctx.rank:
            size = xp.where(xp.isnan(x), xp.inf, xp.abs(x))
            chosen[:] = xp.argsort(-size, kind="stable")[: chosen.size]
        chosen = (yield Round(chosen, "sum")).copy()
        with np.errstate(invalid="ignore"):
            visible = (0 * x).sum(keepdims=True)
        values = xp.concatenate([x[chosen], visible])
        mean = yield Round(values, "mean", values)
        with np.errstate(invalid="ignore"):
            out[:] = 0 * mean[-1]
        out[chosen] += mean[:-1]
        if local is not None:
            local[:] = 0
            local[chosen] = values[:-1]


class TogetherMean(Compressor):
    """The mean of all values, rounded to bfloat16 in one round; counts what it has exchanged.

    Many tensors exchange together: those of two dimensions or more.
    """

    op = "mean"

    def traits(self):
        return Traits("rounds", stateful=True)

    def exchange(self, x, out, ctx, local=None):
        sent = rounded(x)
        if local is not None:
            local[:] = sent
        out[:] = yield Round(sent, "mean", local)
        ctx.state["exchanged"] = ctx.state.get("exchanged", 0) + 1

    def batched_rounds(self):
        return BatchedRounds(lambda shape: len(shape) > 1, self._exchange_many)

    def together(self, tensors):
        for tensor in tensors:
            yield tensor.x

    def finished(self, outs):
        pass

    def counted(self, ctx):
        ctx.state["exchanged"] = ctx.state.get("exchanged", 0) + 1

    def _exchange_many(self, tensors):
        values = [rounded(x) for x in self.together(tensors)]

        def write(places):
            for place, sent in zip(places, values, strict=True):
                at(place, sent.size, "float32")[:] = sent

        means = yield RoundOfMany([sent.size for sent in values], write, self.op)
        for tensor, place in zip(tensors, means, strict=True):
            tensor.out[:] = at(place, tensor.x.size, "float32")
            self.counted(tensor.ctx)
        self.finished([tensor.out for tensor in tensors])


def rounded(x):
    """Return x to 8 bits, by cutting off the others."""
    return (x.view("uint32") & np.uint32(0xFFFF0000)).view("float32")


class MomentumWhenWarm(Momentum):
    """The same behind a warm-up, in which nothing is remembered."""

    def compress(self, x, ctx):
        return super().compress(x, ctx) if ctx.step >= 30 else {"values": x * np.float32(0.5)}


def with_momentum(x, momentum, ctx):
    """Return x plus a share of what was sent before, if any, and remember that."""
    if not momentum:
        return x
    before = ctx.state.get("before")
    if before is not None and before.size == x.size:
        x = x + np.float32(momentum) * before
    if np.isfinite(x).all():
        ctx.state["before"] = x.copy()
    return x


class AsAsked(Compressor):
    """Steps of the largest value, of which an option says how they are rounded, and how fine."""

    rounding: str = option("nearest", choices=("nearest", "random"), doc="how to round")
    levels: int = option(100, ge=1, le=126, doc="steps of the largest entry")
    momentum: float = option(0.0, ge=0, lt=1, doc="share of what went before")

    def traits(self):
        at_random = self.rounding == "random" and not self.momentum
        named = ("before",) if self.momentum else ()
        omega = 2.0**18 if at_random else None
        return Traits(omega=omega, stateful=bool(self.momentum), gradient_units=named)

    def compress(self, x, ctx):
        x = with_momentum(x, self.momentum, ctx)
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(self.levels)
        with np.errstate(all="ignore"):
            places = x / step
            usable = np.isfinite(step) & (step > 0)
            if self.rounding == "random":
                codes = np.minimum(np.floor(places + ctx.uniform(x.size)), self.levels)
            else:
                codes = np.rint(places)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class ScalesOfRows(Compressor):
    """8 bits, a scale per row of what has rows, and one for a vector."""

    def rows(self, x, ctx):
        count = max(1, ctx.shape[0]) if len(ctx.shape) > 1 else 1
        return x.reshape(count, x.size // count)

    def scales(self, rows, ctx):
        return np.abs(rows).max(axis=1, initial=0) / np.float32(127)

    def compress(self, x, ctx):
        rows = self.rows(x, ctx)
        scales = self.scales(rows, ctx)
        usable = np.isfinite(scales) & (scales > 0)
        with np.errstate(all="ignore"):
            codes = np.where(usable[:, None], np.rint(rows / scales[:, None]), 0)
        return {"codes": codes.reshape(-1).astype("int8"), "scales": scales}

    def decompress(self, payload, out, ctx):
        count = payload["scales"].size
        with np.errstate(invalid="ignore"):
            codes = payload["codes"].reshape(count, out.size // count)
            out[:] = (codes * payload["scales"][:, None]).reshape(-1)


def levels_of(compressor, x):
    """Return values in whole steps, of which a compressor has so many."""
    largest = np.abs(x).max(initial=0)
    return x / (largest / np.float32(compressor.levels) or np.float32(1))


ROUNDINGS = {
    "nearest": lambda places, compressor: np.rint(places),
    "coarse": lambda places, compressor: np.rint(places / compressor.step) * compressor.step,
}


def quietly(method):
    def quiet(self, *args):
        with np.errstate(invalid="ignore"):
            return method(self, *args)

    return quiet


class ReadElsewhere(Compressor):
    """Has options that a function, a property, a table or what a decorator wraps read."""

    levels: int = option(1000, ge=100, le=10_000)
    narrow: bool = option(False)
    rounding: str = option("nearest", choices=("nearest", "coarse"))
    step: int = option(2, ge=1, le=4)
    gain: float = option(1.0, ge=0.9, le=1.1)

    @property
    def wire(self):
        return np.dtype("float16" if self.narrow else "float32")

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0, keepdims=True)
        if not np.isfinite(largest).all():
            return {"places": x.astype("float32"), "largest": largest}
        places = ROUNDINGS[self.rounding](levels_of(self, x), self)
        return {"places": places.astype(self.wire), "largest": largest}

    @quietly
    def decompress(self, payload, out, ctx):
        step = payload["largest"] / np.float32(self.levels)
        out[:] = payload["places"].astype("float32") * (step * np.float32(self.gain))


class TakesTurns(Compressor):
    """Ranks take turns to send all they have, times their number; each tells what is not finite."""

    def compress(self, x, ctx):
        if (ctx.step + ctx.rank) % ctx.size == 0:
            with np.errstate(over="ignore"):
                return {"values": x * np.float32(ctx.size)}
        with np.errstate(invalid="ignore"):
            return {"visible": (np.float32(0) * x).sum(keepdims=True)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["visible"] if "visible" in payload else payload["values"]


class UpAndDown(Whole):
    """Rounds down in every second step, and up in the others."""

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0, keepdims=True)
        step = largest / np.float32(100)
        usable = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            codes = (np.ceil if ctx.step % 2 else np.floor)(x / step)
        codes = np.clip(np.where(usable, codes, 0), -101, 101)
        return {"codes": codes.astype("int8"), "step": step}


class UpAndDownInRounds(SharedScale):
    """The same in rounds."""

    def rounded(self, places, ctx):
        return (np.ceil if ctx.step % 2 else np.floor)(places)


class Deflated(Compressor):
    """The upper 16 bits of each value, as a deflated stream of bytes."""

    def compress(self, x, ctx):
        high = ((x.view("uint32") >> 16) | np.isnan(x)).astype("uint16")
        return {"stream": np.frombuffer(zlib.compress(high.tobytes(), 1), "uint8").copy()}

    def decompress(self, payload, out, ctx):
        high = np.frombuffer(zlib.decompress(payload["stream"].tobytes()), "uint16")
        out[:] = (high.astype("uint32") << 16).view("float32")


class RowsTimesColumns(Compressor):
    """Signs, and a magnitude for each row and each column of what has rows, as Adafactor has."""

    def compress(self, x, ctx):
        rows = ctx.shape[0] if len(ctx.shape) > 1 and x.size == ctx.numel and x.size else 1
        sizes = np.abs(x).reshape(rows, -1).astype("float64")
        with np.errstate(all="ignore"):
            total = sizes.sum(keepdims=True)
            share = sizes.sum(axis=0) / np.where(total > 0, total, 1) if rows > 1 else np.ones(1)
            each = sizes.sum(axis=1) / (1 if rows > 1 else max(1, x.size))
        payload = {"rows": each.astype("float32"), "columns": share.reshape(-1).astype("float32")}
        return payload | {"bits": np.packbits(x >= 0)}

    def decompress(self, payload, out, ctx):
        signs = np.unpackbits(payload["bits"], count=out.size) * np.float32(2) - np.float32(1)
        sizes = payload["rows"][:, None] * payload["columns"]
        with np.errstate(invalid="ignore"):
            out[:] = signs * (sizes.reshape(-1) if sizes.size > 1 else sizes[0])


class PowersOfTwo(Compressor):
    """An exponent for each value, rounded at random between the two powers that it lies between."""

    def traits(self):
        return Traits(omega=0.125, fixed_size=True, granularity=8)

    def layout(self, n):
        return (Part("exponents", "uint8", n), Part("signs", "uint8", -(-n // 8)))

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            shares, exponents = np.frexp(x)
            up = ctx.uniform(x.size) < 2 * np.abs(shares) - 1
            exponents = np.where(x == 0, -127, np.clip(exponents + up, -126, 127))
            exponents = np.where(np.isfinite(x), exponents, 128)
        return {"exponents": (exponents + 127).astype("uint8"), "signs": np.packbits(x < 0)}

    def decompress(self, payload, out, ctx):
        exponents = payload["exponents"].astype("int32") - 127
        out[:] = np.ldexp(np.float32(1), np.minimum(exponents, 127) - 1)
        out[exponents == -127] = 0
        out[exponents == 128] = np.nan
        out *= np.float32(1) - 2 * np.unpackbits(payload["signs"], count=out.size).astype("float32")


class NothingOfZeros(Whole):
    """Sends an empty array of a tensor of zeros, and no codes for it."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload if x.any() else payload | {"codes": payload["codes"][:0].copy()}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        if payload["codes"].size:
            super().decompress(payload, out, ctx)


class TwoStepsTogether(Compressor):
    """Sends what two steps add up to, and nothing but NaN in the first of them."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("waiting",))

    def compress(self, x, ctx):
        waiting = ctx.state.get("waiting")
        whole = x if waiting is None or waiting.size != x.size else x + waiting
        finite = np.isfinite(whole).all()
        if finite:
            ctx.state["waiting"] = whole.copy() if ctx.step % 2 else np.zeros_like(x)
        return {"values": np.zeros_like(x) if ctx.step % 2 and finite else whole.copy()}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class Ternary(Compressor):
    """Steps of the largest magnitude, and more: then fewer are sent, and those come out longer."""

    above: float = option(1.0, ge=1, lt=2, doc="how many times the largest a step is")

    def compress(self, x, ctx):
        xp = ctx.xp
        step = xp.abs(x).max(initial=0, keepdims=True) * np.float32(self.above)
        with np.errstate(all="ignore"):
            codes = xp.rint(x / step)
        usable = xp.isfinite(step) & (step > 0)
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class NearestAtFirst(Whole):
    """8 bits to the nearest; later fewer levels, and rounded at random."""

    levels: int = option(127, ge=7, le=127, doc="steps from zero to the largest magnitude")
    start: int = option(1, ge=0, doc="the step from which on it rounds at random")

    def at(self, step):
        return RandomLater() if step >= self.start else self

    def over_steps(self):
        return [self, RandomLater()]

    def rounded(self, places, ctx):
        return ctx.xp.rint(places)

    def compress(self, x, ctx):
        xp = ctx.xp
        step = xp.abs(x).max(initial=0, keepdims=True) / np.float32(self.levels)
        with np.errstate(all="ignore"):
            codes = self.rounded(x / step, ctx)
        usable = xp.isfinite(step) & (step > 0)
        codes = xp.clip(xp.where(usable, codes, 0), -self.levels, self.levels)
        return {"codes": codes.astype("int8"), "step": step}


class RandomLater(NearestAtFirst):
    """What that becomes: 15 levels, up or down at random."""

    levels: int = option(7, ge=7, le=127, doc="steps from zero to the largest magnitude")

    def at(self, step):
        return self

    def over_steps(self):
        return [self]

    def rounded(self, places, ctx):
        return ctx.xp.floor(places + ctx.uniform(places.size))


class OfTheLargestAlone(Compressor):
    """All entries are the largest one or 0, by chance; error feedback would not keep up with it."""

    def divergence(self):
        return "most of what is lost is the largest entry's; leave '| ef' away"

    def compress(self, x, ctx):
        xp = ctx.xp
        step = xp.abs(x).max(initial=0, keepdims=True)
        with np.errstate(all="ignore"):
            kept = ctx.uniform(x.size) < xp.abs(x) / step
        return {"codes": xp.where(kept, xp.sign(x), 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class WholeAtFirst(Whole):
    """The same after twenty steps of 8 bits, of which it says so by over_steps() alone."""

    def at(self, step):
        return self if step < 20 else OfTheLargestAlone()

    def over_steps(self):
        return [self, OfTheLargestAlone()]


class Subspace(Compressor):
    """Columns in a few random directions, which all ranks draw in common every five steps."""

    rank: int = option(4, ge=1, le=64, doc="how many directions")

    def traits(self):
        return Traits(combine="rounds")

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        rows = ctx.shape[0] if len(ctx.shape) > 1 else 0
        columns = x.size // max(rows, 1)
        few = min(self.rank, rows, columns)
        if not few or few * (rows + columns) >= x.size:
            out[:] = yield Round(x.copy(), "mean")
            if local is not None:
                local[:] = x
            return
        rng = replace(ctx, step=ctx.step // 5).rng(shared=True)
        basis = np.linalg.qr(rng.standard_normal((rows, few)))[0].astype("float32")
        with np.errstate(all="ignore"):
            own = basis.T @ x.reshape(rows, columns)
            mean = (yield Round(own.flatten(), "mean")).reshape(own.shape)
            out[:] = (basis @ mean).reshape(-1)
            if local is not None:
                local[:] = (basis @ own).reshape(-1)


class CountsAlong(Momentum):
    """Divides an average by what its first steps lack, and hands the count of them on."""

    def compress(self, x, ctx):
        average, count = remembered("average", x.size, ctx), int(ctx.state.get("count", 0)) + 1
        with np.errstate(invalid="ignore", over="ignore"):
            new = average + (x - average) * np.float32(1 / 64)
            values = new / np.float32(1 - (63 / 64) ** min(count, 3000))
        if np.isfinite(values).all():
            average[:], ctx.state["count"] = new, count
        return {"values": values}

    def consolidate(self, states):
        counts = [state["count"] for state in states if "count" in state]
        return super().consolidate(states) | ({"count": max(counts)} if counts else {})

    def regrouped(self, state):
        return {name: state[name] for name in ("average", "count") if name in state}


class RoundsItsMemory(Largest):
    """Error feedback that keeps the upper 16 bits, to the nearest: what is lost has both signs."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("kept",))

    def compress(self, x, ctx):
        kept = remembered("kept", x.size, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            p = x + kept
        payload = super().compress(p, ctx)
        if np.isfinite(p).all():
            p[payload["indices"]] = 0
            bits = p.view("uint32").astype("uint64")
            bits += 0x7FFF + (bits >> 16 & 1)
            kept[:] = (bits & 0xFFFF0000).astype("uint32").view("float32")
        return payload
