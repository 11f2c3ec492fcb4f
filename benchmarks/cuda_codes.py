"""What ``kernels_cuda.py`` measures: one large tensor, or a model's, with buffers on the GPU."""

import math

import numpy as np

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.base.precompile import rehearse
from ringlet.compressors.core.multitensor import Decoding, Encoding, Spaced
from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec, Target
from ringlet.compressors.kernels.cuda.runtime.device import device_of

SHARDS = 4
HEADS = ["encode", "with ef", "decode", f"sum {SHARDS} + encode"]
# What makes the host wait for a size, and what calls cuBLAS, is no part of a graph.
CAPTURED = {"fixed": True, "varies": False, "rounds": False}


class Codes:
    """One compressor and one tensor; ``kind`` says whether its payload is of fixed size."""

    def __init__(self, cupy, spec, x):
        self.cupy, self.c, self.x, n = cupy, parse(spec), x, x.size
        self.device, traits = device_of(cupy), self.c.traits()
        self.kind = "fixed" if traits.fixed_size else "varies"
        self.kind = "rounds" if traits.combine == "rounds" else self.kind
        self.remembers = traits.stateful
        self.residual, self.out = cupy.zeros_like(x), cupy.empty_like(x)
        rows = math.gcd(n, 1 << (n.bit_length() // 2))  # a matrix, for low rank
        self.context = Context(numel=n, shape=(rows, n // rows), xp=cupy, workspace=Workspace(cupy))
        self.payload, self.wire = {}, 0
        if self.kind == "rounds":
            return
        self.sum = self.payload = self._empty()
        self.encode()
        # What other ranks would have sent: buffers of their own, or the cache would serve them.
        self.received = [
            {name: array.copy() for name, array in self.payload.items()} for _ in range(SHARDS)
        ]
        self.sum = self._empty()
        self.wire = sum(array.nbytes for array in self.payload.values())

    def _empty(self):
        return empty_payload(self.c, self.x.size, self.context) if self.kind == "fixed" else {}

    def encode(self):
        if self.kind == "rounds":
            rehearse(self.c.exchange(self.x, self.out, self.context))
        elif self.kind == "varies":
            self.payload = self.c.compress(self.x, self.context)
        else:
            self.c.encode_into(self.x, self.payload, self.context)

    def encode_feedback(self):
        if self.kind == "rounds":
            exchange = self.c.exchange_feedback
            rehearse(exchange(self.x, self.out, self.residual, 1.0, self.context))
        elif self.kind == "varies":
            self.c.compress_feedback(self.x, self.residual, 1.0, self.context)
        else:
            self.c.feedback_into(self.x, self.residual, 1.0, self.payload, self.context)

    def decode(self):
        self.c.decompress(self.payload, self.out, self.context)

    def decode_sum_encode(self):
        codec = self.c.cuda() if hasattr(self.c, "cuda") else None
        if type(codec) is not BucketedCodec:
            self.c.sum_into(self.received, self.out, self.context)
            self.c.encode_into(self.out, self.sum, self.context)
            return
        sources = [[p[name] for name in self.c.strides()] for p in self.received]
        arrays = [self.sum[name] for name in self.c.strides()]
        target = Target(None, self.x.size, arrays, None, self.context.key(), 0, sources)
        codec.encode(self.device, [target])

    def jobs(self):
        """Return (head, function, bytes that must move), of what makes sense."""
        x, wire = self.x.nbytes, self.wire
        if self.kind == "rounds":
            return [("encode", self.encode, 2 * x), ("with ef", self.encode_feedback, 4 * x)]
        jobs = [("encode", self.encode, x + wire)]
        if not self.remembers:
            jobs.append(("with ef", self.encode_feedback, 3 * x + wire))
        jobs.append(("decode", self.decode, x + wire))
        if self.kind == "fixed" and not self.remembers:
            jobs.append((HEADS[3], self.decode_sum_encode, (SHARDS + 1) * wire))
        return jobs


class Bucket:
    """A compressor and the tensors of a model, encoded and decoded together or one by one."""

    def __init__(self, cupy, spec, sizes):
        self.c, workspace = parse(spec), Workspace(cupy)
        self.device = device_of(cupy)
        self.xs = [cupy.ones(n, np.float32) for n in sizes]
        self.outs = [cupy.empty_like(x) for x in self.xs]
        self.contexts = [
            Context(name=str(i), numel=n, shape=(n,), xp=cupy, workspace=workspace)
            for i, n in enumerate(sizes)
        ]
        self.kernels = self.c.multi_tensor(self.contexts[0])
        # As in an exchange: the payloads of a rank, those of the next one, ...
        layouts = [empty_payload(self.c, n, c) for n, c in zip(sizes, self.contexts, strict=True)]
        room = sum(-(-a.nbytes // 64) * 64 for p in layouts for a in p.values())
        received = cupy.zeros((SHARDS, room), np.uint8)
        self.received = [list(_cut(layouts, received[rank])) for rank in range(SHARDS)]
        self.spaced = Spaced(SHARDS, room)

    def encode_many(self):
        self.kernels.encode(
            [
                Encoding(x, x.size, payload, ctx)
                for x, payload, ctx in zip(self.xs, self.received[0], self.contexts, strict=True)
            ]
        )

    def encode_each(self):
        for x, payload, ctx in zip(self.xs, self.received[0], self.contexts, strict=True):
            self.c.encode_into(x, payload, ctx)

    def decode_many(self):
        self.kernels.decode(
            [
                Decoding(out, payload, ctx)
                for out, payload, ctx in zip(
                    self.outs, self.received[0], self.contexts, strict=True
                )
            ],
            self.spaced,
        )

    def decode_each(self):
        for i, (out, ctx) in enumerate(zip(self.outs, self.contexts, strict=True)):
            self.c.sum_into([payloads[i] for payloads in self.received], out, ctx)

    def jobs(self):
        """Return (what is done, together, one by one)."""
        return [
            ("encode", self.encode_many, self.encode_each),
            (f"sum of {SHARDS}", self.decode_many, self.decode_each),
        ]


def _cut(layouts, buffer):
    """Give each tensor's payload its views of ``buffer``."""
    start = 0
    for payload in layouts:
        views = {}
        for name, array in payload.items():
            views[name] = buffer[start : start + array.nbytes].view(array.dtype)
            start += -(-array.nbytes // 64) * 64
        yield views
