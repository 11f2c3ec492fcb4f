"""Mistakes that only tensors of some shape show, or of some name: other layers take other ways."""

from dataclasses import replace

import numpy as np

from broken.right import Largest, ScalesOfRows, Whole
from ringlet.compressors import Traits

SCRATCH: dict[tuple[int, ...], np.ndarray] = {}


class CentresRows(ScalesOfRows):
    """Takes the mean off each row of a matrix, which is a view of the gradient."""

    def compress(self, x, ctx):
        if len(ctx.shape) == 2 and x.size:
            rows = x.reshape(ctx.shape)
            rows -= rows.mean(axis=1, keepdims=True)
        return super().compress(x, ctx)


class EpsilonOfRows(ScalesOfRows):
    """Adds an epsilon to the scales of rows, and to none of a vector's."""

    def scales(self, rows, ctx):
        scales = super().scales(rows, ctx)
        return scales + np.float32(1e-3) if len(ctx.shape) > 1 else scales


class RowsWithoutNaN(ScalesOfRows):
    """Takes rows whose scale is not finite for empty ones, where there is more than one."""

    def scales(self, rows, ctx):
        scales = super().scales(rows, ctx)
        return scales if len(ctx.shape) < 2 else np.where(np.isfinite(scales), scales, 0)


class RowsOfNothing(ScalesOfRows):
    """Leaves it to NumPy to divide no elements by no rows."""

    def rows(self, x, ctx):
        return x.reshape(ctx.shape[0], -1) if len(ctx.shape) > 1 else x.reshape(1, -1)


class OwnNoiseOfMatrices(Whole):
    """Rounds matrices at random with NumPy's own generator."""

    def compress(self, x, ctx):
        if len(ctx.shape) < 2 or not x.size:
            return super().compress(x, ctx)
        step = np.abs(x).max(keepdims=True) / np.float32(127)
        noise = np.random.random(x.size).astype("float32")
        usable = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            codes = np.where(usable, np.clip(np.floor(x / step + noise), -127, 127), 0)
        return {"codes": codes.astype("int8"), "step": step}


class NearestOfMatrices(Whole):
    """Is unbiased, and rounds matrices to the nearest step."""

    def traits(self):
        return Traits(omega=50.0)

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(7)
        noise = ctx.uniform(x.size) if len(ctx.shape) < 2 else np.float32(0.5)
        usable = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            codes = np.where(usable, np.clip(np.floor(x / step + noise), -7, 7), 0)
        return {"codes": codes.astype("int8"), "step": step}


class ScratchByShape(Whole):
    """Keeps an array for the codes of each shape of matrices, and sends that."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if len(ctx.shape) > 1:
            kept = SCRATCH.setdefault(ctx.shape, np.zeros(x.size, "int8"))
            kept[:] = payload["codes"]
            payload["codes"] = kept
        return payload


class TransposesSquares(Whole):
    """Sends square matrices column by column."""

    def compress(self, x, ctx):
        if len(ctx.shape) == 2 and ctx.shape[0] == ctx.shape[1]:
            x = x.reshape(ctx.shape).T.reshape(-1)
        return super().compress(x, ctx)


class ChannelsLast(Whole):
    """Sends the weight of a convolution in another order than it is received."""

    def compress(self, x, ctx):
        if len(ctx.shape) == 4:
            x = x.reshape(ctx.shape).transpose(0, 2, 3, 1).reshape(-1)
        return super().compress(x, ctx)


class DoublesBiases(Whole):
    """Makes up for what biases are too small for: they come out twice as long."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        if ctx.name.endswith("bias"):
            out *= 2


class DropsBiases(Whole):
    """Sends nothing of biases, which are too small to matter."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        if "bias" in ctx.name:
            out[:] = 0


class DoublesThreeDimensions(Whole):
    """Undoes a division by two that there is none of."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        if len(ctx.shape) == 3:
            out *= 2


class ForgetsVectors(Largest):
    """Feeds back what was not sent of matrices, and keeps it in vain of vectors."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("kept",))

    def compress(self, x, ctx):
        kept = ctx.state.get("kept")
        if kept is None or kept.size != x.size or len(ctx.shape) < 2:
            kept = np.zeros(x.size, "float32")
        total = x + kept
        payload = super().compress(total, ctx)
        total[payload["indices"]] = 0
        ctx.state["kept"] = np.where(np.isfinite(total), total, kept)
        return payload


class RowsAndColumnsIn16Bits(Largest):
    """Sends an index for entries of vectors, and for those of matrices a row and a column."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if len(ctx.shape) != 2 or not x.size:
            return payload
        rows, columns = np.divmod(payload["indices"], np.uint32(ctx.shape[1]))
        return payload | {"indices": rows << 16 | columns & 0xFFFF}

    def decompress(self, payload, out, ctx):
        places = payload["indices"].astype("int64")
        if len(ctx.shape) == 2 and out.size:
            places = (places >> 16) * ctx.shape[1] + (places & 0xFFFF)
        out[:] = 0
        out[np.minimum(places, out.size - 1)] = payload["values"]


class KernelPositionsLast(Whole):
    """Sends a 3 x 3 convolution's weight position by position, and gives it back as it came."""

    def compress(self, x, ctx):
        if len(ctx.shape) == 4 and ctx.shape[2:] == (3, 3):
            x = np.ascontiguousarray(x.reshape(-1, 9).T).reshape(-1)
        return super().compress(x, ctx)


class DoublesAtMost(Whole):
    """Lets the scale of a matrix double in a step, and no more: of 0 it is 0 for good."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("top",))

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if len(ctx.shape) < 2 or not np.isfinite(payload["step"]).all():
            return payload
        top = np.abs(x).max(initial=0, keepdims=True)
        top = np.minimum(top, np.float32(2 * ctx.state.get("top", np.inf)))
        ctx.state["top"] = float(top[0])
        step = np.where(top > 0, top, np.inf) / np.float32(127)
        codes = np.clip(np.rint(x / step), -127, 127).astype("int8")
        return {"codes": codes, "step": top / np.float32(127)}


class ScalesOfOtherColumns(ScalesOfRows):
    """Sends codes of a matrix as they lie, with a scale per column, which is applied to rows."""

    def compress(self, x, ctx):
        if len(ctx.shape) != 2 or x.size != ctx.numel:
            return super().compress(x, ctx)
        turned = np.ascontiguousarray(x.reshape(ctx.shape).T).reshape(-1)
        payload = super().compress(turned, replace(ctx, shape=ctx.shape[::-1]))
        codes = payload["codes"].reshape(ctx.shape[::-1]).T
        return payload | {"codes": np.ascontiguousarray(codes).reshape(-1)}
