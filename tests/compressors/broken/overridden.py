"""Overrides for speed whose mistakes show in a mean, or among several tensors, alone."""

from dataclasses import replace

import numpy as np

from broken.right import AboveHalf, Cells, SharedDither, SharedScale, Whole


class FeedbackOfTheMean(SharedScale):
    """Keeps what it lacks of the mean, to which the other ranks' gradients belong."""

    def exchange_feedback(self, x, out, residual, decay, ctx, local=None):
        with np.errstate(invalid="ignore", over="ignore"):
            target = x + np.float32(decay) * residual
            yield from self.exchange(target, out, ctx, local)
            lost = target - out
        np.copyto(residual, lost, where=np.isfinite(lost))


class FeedbackOfOwnLoss(SharedScale):
    """Looks at what it lost itself, and not at whether the result was spoiled by another rank."""

    def exchange_feedback(self, x, out, residual, decay, ctx, local=None):
        own = np.empty_like(x) if local is None else local
        with np.errstate(invalid="ignore", over="ignore"):
            target = x + np.float32(decay) * residual
            yield from self.exchange(target, out, ctx, own)
            lost = np.where(np.isnan(own), np.float32(0), target - own)
        np.copyto(residual, lost, where=np.isfinite(lost))


class ForgetsWeight(Cells):
    """Kernels for many tensors that look at the scale, and not at the weight."""

    def multi_tensor(self, ctx):
        return _Launch(self)


class _Launch:
    def __init__(self, cells):
        self.cells = cells

    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        for tensor in tensors:
            x = tensor.x * np.float32(scale)
            if tensor.residual is None:
                self.cells.encode_into(x, tensor.payload, tensor.ctx)
                continue
            self.cells.feedback_into(x, tensor.residual, decay, tensor.payload, tensor.ctx)

    def decode(self, tensors, spaced=None, scale=1.0, weight=1.0):
        for tensor in tensors:
            self.cells.decompress(tensor.source, tensor.out, tensor.ctx)
            tensor.out *= np.float32(scale * weight)


class AccumulateForgetsOffset(SharedDither):
    """Takes shared noise off again, in `accumulate` that of the tensor's beginning."""

    def accumulate(self, payload, out, ctx):
        decoded = np.empty_like(out)
        self.decompress(payload, decoded, replace(ctx, offset=0))
        with np.errstate(invalid="ignore"):
            out += decoded


class FusedForgetsOffset(Cells):
    """Rounds at random, in the fused feedback with the numbers of the tensor's beginning."""

    def rounded(self, places, ctx):
        return np.minimum(np.floor(places + ctx.uniform(places.size)), np.float32(127))

    def feedback_into(self, x, residual, decay, payload, ctx):
        super().feedback_into(x, residual, decay, payload, replace(ctx, offset=0))


class VaryingForgetsDecay(Whole):
    """Kernels for many tensors of variable payloads that do not look at decay."""

    def multi_varying(self, ctx):
        return _VaryingLaunch(self)


class _VaryingLaunch:
    feeds = True

    def __init__(self, whole):
        self.whole = whole

    def compress(self, tensors, scale=1.0, decay=1.0):
        sent = []
        for tensor in tensors:
            x = tensor.x * np.float32(scale)
            if tensor.residual is None:
                sent.append(self.whole.compress(x, tensor.ctx))
            else:
                sent.append(self.whole.compress_feedback(x, tensor.residual, 1.0, tensor.ctx))
        return sent

    def decode(self, sums, scale=1.0):
        for out, payloads, ctx in sums:
            self.whole.sum_into(payloads, out, ctx)
            out *= np.float32(scale)


class KeepsShortResiduals(Cells):
    """Keeps what is lost of the first 65536 elements."""

    def keep_residual(self, target, payload, residual, ctx):
        before = residual[1 << 16 :].copy()
        super().keep_residual(target, payload, residual, ctx)
        residual[1 << 16 :] = before


class FinishesElsewhere(Cells):
    """Halves the result, and returns it in a new array."""

    def finish(self, out, ctx):
        return out * np.float32(0.5)


class SumsAsManyAsTheFirst(AboveHalf):
    """Adds up as many entries of each rank as the first one has sent."""

    def sum_into(self, payloads, out, ctx):
        out[:] = 0
        count = payloads[0]["indices"].size
        for payload in payloads:
            out[payload["indices"][:count]] += payload["values"][:count]
