"""Overrides for speed whose mistakes show in a mean, or among several tensors, alone."""

import numpy as np

from broken.right import Cells, SharedScale


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
