"""Kernels for many tensors in host memory that are right for few, or without neighbours."""

import numpy as np

from broken.right import (
    BatchedCells,
    BatchedDraws,
    TogetherMean,
    at,
    batch_of,
    cells_at,
    decode_one,
    encode_one,
)
from ringlet.compressors.sparsifiers.threshold import Threshold


class BatchOfThirtyTwo(BatchedCells):
    """Has room for 32 tensors in a call, and forgets the others."""

    def batched(self):
        def encoded(cells, t, *tables):
            if t < 32:
                encode_one(cells, t, *tables)

        return batch_of(self, encoded)


class DecodesUnscaled(BatchedCells):
    """Leaves the factor to somebody else."""

    def batched(self):
        def decoded(cells, t, outs, payloads, scale):
            decode_one(cells, t, outs, payloads, np.float32(1))

        return batch_of(self, decoded=decoded)


class DecodesTheFirstRank(BatchedCells):
    """Adds up nothing."""

    def batched(self):
        def decoded(cells, t, outs, payloads, scale):
            decode_one(cells, t, outs, payloads[:1], scale)

        return batch_of(self, decoded=decoded)


class BatchSharesNaN(BatchedCells):
    """Looks for NaN once for all tensors of a call, and spoils all of them."""

    def batched(self):
        def encoded(cells, t, tensors, payloads, decay):
            encode_one(cells, t, tensors, payloads, decay)
            every = zip(tensors[:, 0], payloads[:, 0], strict=True)
            if any(np.isnan(at(place, int(n), "float32")).any() for place, n in every):
                cells_at(payloads[t])["steps"][:] = np.nan

        return batch_of(self, encoded)


class KeyOfTheFirst(BatchedDraws):
    """Draws by the first tensor's key for all tensors of a call."""

    def batched(self):
        def encoded(cells, t, tensors, payloads, decay):
            rows = tensors.copy()
            rows[:, 2] = rows[0, 2]
            encode_one(cells, t, rows, payloads, decay)

        return batch_of(self, encoded, draws=True)


class OffsetForgottenInBatch(BatchedDraws):
    """Draws for a piece of a tensor as for its beginning."""

    def batched(self):
        def encoded(cells, t, tensors, payloads, decay):
            rows = tensors.copy()
            rows[:, 3] = 0
            encode_one(cells, t, rows, payloads, decay)

        return batch_of(self, encoded, draws=True)


class BatchWritesWholeCells(BatchedCells):
    """Decodes as many values as fit its cells."""

    def batched(self):
        def decoded(cells, t, outs, payloads, scale):
            n = int(payloads[0, t, 0])
            if n % 64 < 63:
                at(outs[t], n + 1, "float32")[n] = 0
            decode_one(cells, t, outs, payloads, scale)

        return batch_of(self, decoded=decoded)


class SendsLessTogether(Threshold):
    """Sends one entry of each tensor behind the 32nd of a call."""

    def batched(self):
        kernels = super().batched()

        def encode(tensors, payloads, decay):
            kernels.encode(tensors, payloads, decay)
            payloads[32:, [2, 4]] = np.minimum(payloads[32:, [2, 4]], 1)

        return kernels._replace(encode=encode)


class OneShapeForAll(TogetherMean):
    """Takes the first tensor's length for every tensor's."""

    def together(self, tensors):
        for tensor in tensors:
            yield tensor.x[: tensors[0].x.size]


class RoundsShareNaN(TogetherMean):
    """Looks for NaN once for all tensors."""

    def finished(self, outs):
        if any(np.isnan(out).any() for out in outs):
            for out in outs:
                out[:] = np.nan


class RoundsForgetMemory(TogetherMean):
    """Counts nothing where tensors exchange together."""

    def counted(self, ctx):
        pass


class RoundsAddUp(TogetherMean):
    """Adds up where the exchange of one tensor takes the mean."""

    op = "sum"
