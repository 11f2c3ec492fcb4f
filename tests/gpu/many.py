"""Steps of many tensors that share launches, and of the same ones one by one, on any arrays."""

import numpy as np
from steps import to_host

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.core.multitensor import Decoding, Encoding, Spaced

# A spec, and the dtype of its gradients: every codec, and every dtype, with feedback and without.
SPECS = {
    "fp16": "uint16", "fp16 | ef": "float32", "bf16": "float32", "bf16 | ef": "float16",
    "int8": "float16", "int8 | ef": "uint16", "int4(stochastic=True)": "uint16",
    "int4(stochastic=True) | ef": "float32", "maxnorm | min_size(0)": "float32",
    "minmax(bits=3)": "float32", "minmax(bits=3) | ef": "float16", "qsgd": "uint16",
    "qsgd(bits=4) | scaled": "float16", "qsgd(bits=4) | scaled | ef": "float32",
    "natural": "float16", "natural | ef": "uint16", "natural | server_ef": "float32",
    "onebit": "float32", "onebit | ef": "float16", "signsgd": "uint16",
    "terngrad": "float32", "terngrad | ef": "float32", "fp8": "uint16", "fp8 | ef": "float32",
    "nvfp4": "float32", "nvfp4(stochastic=True) | ef": "float16", "mxfp4": "float16",
    "mxfp6(stochastic=True) | ef": "uint16",
    "block_topk(block=64)": "float32", "block_topk(block=64) | ef": "uint16",
    "block_topk(block=64, bits=2, dct=True, ratio=0.1) | server_ef": "float16",
    "topk": "float32", "topk | ef": "float16", "int8 | ef(dtype='bf16')": "float32",
    "int4 | ef(dtype='int8')": "uint16",
}  # fmt: skip
LENGTHS = [1, 7, 64, 130, 1000, 9, 513]
RANKS = 3


def random_values(rng, n, kind, trouble=True):
    """Return values of all sizes in the dtype ``kind``; with ``trouble`` some are not finite."""
    x = rng.standard_normal(n).astype(np.float32) * np.exp2(rng.integers(-12, 8, n))
    if trouble:
        x[rng.random(n) < 0.01] = rng.choice([np.nan, np.inf, 0.0])
    if kind == "uint16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(kind)


def widened(x):
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def narrowed(x, kind):
    """Round float32 as the engine does: with the casts of the compressors."""
    if kind == "float32":
        return x
    cast = parse("fp16" if kind == "float16" else "bf16")
    return cast.compress(x, Context())["values"].view(kind)


def shifted(xp, array, shift):
    """Return a copy on the device that begins ``shift`` elements behind an aligned address."""
    return xp.asarray(np.concatenate([np.zeros(shift, array.dtype), array]))[shift:]


class Side:
    """Tensors, what they are compressed with, and what that leaves behind."""

    def __init__(self, spec, kind, lengths, xp, ranks=RANKS):
        self.c, self.kind, self.lengths, self.xp, self.ranks = parse(spec), kind, lengths, xp, ranks
        self.workspace, self.kernels = Workspace(xp), self.c.multi_tensor(Context(xp=xp))
        self.states = [{} for _ in lengths]
        # Payloads as in the buffers of an exchange: rank after rank, each padded.
        self.empty = [empty_payload(self.c, n, self.context(i)) for i, n in enumerate(lengths)]
        arrays = [array for payload in self.empty for array in payload.values()]
        self.starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)]).tolist()
        self.received = xp.zeros(max(self.starts[-1], 8) * ranks, np.uint8)
        self.sent = xp.zeros(max(self.starts[-1], 8), np.uint8)
        self.outs = [xp.zeros(n, kind) for n in lengths]

    def context(self, i, rank=0, stage=1, step=0):
        state = self.states[i].setdefault(f"{rank}.{stage}", {}) if self.states else {}
        return Context(
            name=f"w{i}", numel=self.lengths[i], shape=(self.lengths[i],), state=state, step=step,
            rank=rank, size=self.ranks, stage=stage, xp=self.xp, workspace=self.workspace,
        )  # fmt: skip

    def payloads(self, buffer):
        found, starts = [], iter(self.starts)
        for payload in self.empty:
            views = {}
            for name, array in payload.items():
                start = next(starts)
                views[name] = buffer[start : start + array.nbytes].view(array.dtype)
            found.append(views)
        return found

    def of_ranks(self):
        return [self.payloads(part) for part in self.xp.split(self.received, self.ranks)]

    def seen(self):
        """Return all that is left behind, as NumPy arrays."""
        residuals = [r for s in self.states for held in s.values() for r in held.values()]
        return [to_host(a) for a in (self.received, self.sent, *self.outs, *residuals)]


def one_by_one(side, xs, scale, post):
    """Take two steps of all ranks, and of an owner of sums, with NumPy arrays ``xs`` by rank."""
    for step in range(2):
        for rank, payloads in enumerate(side.of_ranks()):
            for i, payload in enumerate(payloads):
                x = widened(xs[rank][i]) * np.float32(scale)
                side.c.encode_into(x, payload, side.context(i, rank, step=step))
        for i, payload in enumerate(side.payloads(side.sent)):
            total = np.empty(side.lengths[i], np.float32)
            side.c.sum_into([p[i] for p in side.of_ranks()], total, side.context(i))
            total *= np.float32(post)
            side.outs[i][...] = narrowed(total, side.kind)
            side.c.encode_into(total, payload, side.context(i, stage=2, step=step))


def together(side, xs, scale, post):
    """Do the same with multi-tensor kernels."""
    spaced = Spaced(side.ranks, side.received.size // side.ranks)
    for step in range(2):
        for rank, payloads in enumerate(side.of_ranks()):
            given = [
                Encoding(x, x.size, payload, side.context(i, rank, step=step))
                for i, (x, payload) in enumerate(zip(xs[rank], payloads, strict=True))
            ]
            side.kernels.encode(given, None, scale)
        first = side.of_ranks()[0]
        decoded = [
            Decoding(out, payload, side.context(i))
            for i, (out, payload) in enumerate(zip(side.outs, first, strict=True))
        ]
        side.kernels.decode(decoded, spaced, post)
        given = [
            Encoding(None, n, payload, side.context(i, stage=2, step=step), first[i])
            for i, (n, payload) in enumerate(
                zip(side.lengths, side.payloads(side.sent), strict=True)
            )
        ]
        side.kernels.encode(given, spaced, post)
