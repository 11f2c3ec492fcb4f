"""Mistakes of what an entry keeps while it waits, and of a code with a block to itself."""

import numpy as np

from ringlet.compressors import Compressor, Part, Traits, option, remembered


class Waits(Compressor):
    """Sends of every fifty entries those that this step's gradient moves beyond the largest."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("residual",))

    def compress(self, x, ctx):
        xp = ctx.xp
        kept = remembered("residual", x.size, ctx)
        p = kept + x
        rows = xp.zeros((-(-x.size // 50), 50), "float32")
        rows.reshape(-1)[: x.size] = p
        limit = xp.repeat(xp.abs(rows).max(axis=1), 50)[: x.size]
        chosen = xp.flatnonzero(~(xp.abs(p + x) < limit)).astype("int32")
        if xp.isfinite(p).all():
            kept[:] = self.waiting(x, p)
            kept[chosen] = 0
        return {"indices": chosen, "values": self.sent(x, p)[chosen]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]

    def waiting(self, x, p):
        return p

    def sent(self, x, p):
        return p


class ForgetsWhatWaited(Waits):
    """Keeps of what is not sent this step's gradient alone."""

    def waiting(self, x, p):
        return x


class SendsWhatItCompares(Waits):
    """Sends the value by which it chooses, which has this step's gradient twice."""

    def sent(self, x, p):
        return p + x


class NormWithoutRoom(Compressor):
    """A norm for 256 values, and codes up to 127: noise makes 128 of a value that has the norm."""

    levels: int = option(127, ge=1, le=127, doc="steps")

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("norms", "float32", -(-n // 256)))

    def compress(self, x, ctx):
        rows = np.zeros((-(-x.size // 256), 256), "float32")
        rows.reshape(-1)[: x.size] = x
        with np.errstate(all="ignore"):
            most = np.abs(rows).max(axis=1, keepdims=True)
            by = np.where((most > 0) & np.isfinite(most), most, 1)
            norms = np.sqrt(((rows / by) ** 2).sum(axis=1, keepdims=True)) * by
            usable = np.isfinite(norms) & (norms > 0)
            sizes = np.where(usable, np.abs(rows) / np.where(usable, norms, 1), 0) * self.levels
            sizes = sizes.reshape(-1)[: x.size]
            codes = np.floor(sizes.astype("float32") + ctx.uniform(x.size))
            signs = np.where(np.isfinite(x), np.sign(x), 0)
            codes = (codes * signs).astype("int32").astype("int8")
        return {"codes": codes, "norms": norms.reshape(-1)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["codes"] * (np.repeat(payload["norms"], 256)[: out.size] / self.levels)


class NormWithoutRoomAtTheEnd(NormWithoutRoom):
    """The same with fewer levels, of which there may be as many."""

    levels: int = option(64, ge=1, le=127, doc="steps")
