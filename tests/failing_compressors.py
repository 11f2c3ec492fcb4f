"""Compressors that fail on one rank, where and when a test wants it."""

from __future__ import annotations

import torch.distributed as dist

from ringlet.compressors import Compressor, Part, Traits


class Failing(Compressor):
    """Raises where, and on which rank, its class is told."""

    bad = ("", -1)

    def come(self, where):
        if self.bad == (where, dist.get_rank()):
            raise KeyError(f"moody in {where}")

    def traits(self):
        return Traits(fixed_size=True, granularity=1)


class Moody(Failing):
    """Sends values as they are; raises on one rank, or has another payload there."""

    def at(self, step):
        self.come("at")
        return self

    def layout(self, n):
        self.come("layout")
        return (Part("values", "float32", n),)

    def compress(self, x, ctx):
        self.come("compress")
        return {"values": x.copy()}

    def decompress(self, payload, out, ctx):
        self.come("decompress")
        out[:] = payload["values"]
