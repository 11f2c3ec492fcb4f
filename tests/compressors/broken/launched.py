"""Kernels for many tensors that are right for few, for the first launch, or without neighbours."""

from dataclasses import replace

import numpy as np

from broken.right import CELL, Launch, Launched, LaunchedVarying, VaryingLaunch


class FirstLaunchOnly(Launched):
    """Lays its launches out once, for as long as the process lasts."""

    def multi_tensor(self, ctx):
        return _Planned(self)


_PLANS: dict[int, list[int]] = {}


class _Planned(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        plan = _PLANS.setdefault(len(tensors), [t.n for t in tensors])
        for tensor, n in zip(tensors, plan, strict=True):
            short = tensor._replace(x=tensor.x[:n], n=min(n, tensor.n))
            if short.n == tensor.n:
                super().encode([tensor], spaced, scale, decay, weight)


class ThirtyTwoAtATime(Launched):
    """Has room for 32 tensors in a launch, and forgets the others."""

    def multi_tensor(self, ctx):
        return _Few(self)


class _Few(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        super().encode(tensors[:32], spaced, scale, decay, weight)


class DecodesThirtyTwo(Launched):
    """Has room for 32 tensors in a launch that decodes."""

    def multi_tensor(self, ctx):
        return _FewDecoded(self)


class _FewDecoded(Launch):
    def decode(self, tensors, spaced=None, scale=1.0, weight=1.0):
        super().decode(tensors[:32], spaced, scale, weight)


class ContextOfTheFirst(Launched):
    """Draws by the first tensor's context for all tensors of a launch."""

    def rounded(self, places, ctx):
        return np.minimum(np.floor(places + ctx.uniform(places.size)), np.float32(127))

    def multi_tensor(self, ctx):
        return _FirstContext(self)


class _FirstContext(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        first = [t._replace(ctx=replace(tensors[0].ctx, numel=t.n)) for t in tensors]
        super().encode(first, spaced, scale, decay, weight)


class OffsetForgottenInLaunch(Launched):
    """Draws for a piece of a tensor as for its beginning."""

    def rounded(self, places, ctx):
        return np.minimum(np.floor(places + ctx.uniform(places.size)), np.float32(127))

    def multi_tensor(self, ctx):
        return _NoOffset(self)


class _NoOffset(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        moved = [t._replace(ctx=replace(t.ctx, offset=0)) for t in tensors]
        super().encode(moved, spaced, scale, decay, weight)


class StageForgottenInLaunch(OffsetForgottenInLaunch):
    """Draws in the second stage what was drawn in the first."""

    def multi_tensor(self, ctx):
        return _NoStage(self)


class _NoStage(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        moved = [t._replace(ctx=replace(t.ctx, stage=1)) for t in tensors]
        super().encode(moved, spaced, scale, decay, weight)


class NeighboursShareNaN(Launched):
    """Looks for NaN once for all tensors of a launch, and spoils all of them."""

    def multi_tensor(self, ctx):
        return _Spoils(self)


class _Spoils(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        super().encode(tensors, spaced, scale, decay, weight)
        if not all(np.isfinite(t.x).all() for t in tensors):
            for tensor in tensors:
                tensor.payload["steps"][:] = np.nan


class NeighboursLoseResiduals(Launched):
    """Keeps no residual at all where one tensor of the launch overflowed."""

    def multi_tensor(self, ctx):
        return _KeepsNone(self)


class _KeepsNone(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        before = [None if t.residual is None else t.residual.copy() for t in tensors]
        super().encode(tensors, spaced, scale, decay, weight)
        if not all(np.isfinite(t.x).all() for t in tensors):
            for tensor, old in zip(tensors, before, strict=True):
                if old is not None:
                    tensor.residual[:] = old


class ResidualsKeepNaN(Launched):
    """Leaves NaN in the residual of a tensor that overflowed."""

    def multi_tensor(self, ctx):
        return _KeepsNaN(self)


class _KeepsNaN(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        super().encode(tensors, spaced, scale, decay, weight)
        for tensor in tensors:
            if tensor.residual is not None and not np.isfinite(tensor.x).all():
                tensor.residual[:] = np.where(np.isfinite(tensor.x), tensor.residual, np.nan)


class AlignedOnly(Launched):
    """Reads four values at a time, from where the last such four began."""

    def multi_tensor(self, ctx):
        return _Aligned(self)


class _Aligned(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        aligned = []
        for tensor in tensors:
            behind = tensor.x.ctypes.data % 16 // 4
            aligned.append(tensor._replace(x=np.roll(tensor.x, behind)))
        super().encode(aligned, spaced, scale, decay, weight)


class WritesWholeCells(Launched):
    """Decodes whole cells, and begins with the last tensor: neighbours' beginnings are zeros."""

    def multi_tensor(self, ctx):
        return _WholeCells(self)


class _WholeCells(Launch):
    def decode(self, tensors, spaced=None, scale=1.0, weight=1.0):
        super().decode(tensors, spaced, scale, weight)
        for tensor in tensors:
            out, base = tensor.out, tensor.out.base
            if base is not None and base.ndim == 1 and base.dtype == out.dtype:
                end = (out.ctypes.data - base.ctypes.data) // out.itemsize + out.size
                base[end : end + -out.size % CELL] = 0


class OnlyFloat32(Launched):
    """Takes half precision for float32, bit for bit, as far as there are bits."""

    def multi_tensor(self, ctx):
        return _Wide(self)


class _Wide(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        wide = [t._replace(x=t.x.astype("float32")) for t in tensors]
        super().encode(wide, spaced, scale, decay, weight)


class EmptyEndsTheLaunch(Launched):
    """Stops at the first tensor without elements."""

    def multi_tensor(self, ctx):
        return _UntilEmpty(self)


class _UntilEmpty(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        for tensor in tensors:
            if not tensor.n:
                return
            super().encode([tensor], spaced, scale, decay, weight)


class ScaleBeforeResidual(Launched):
    """Multiplies the residual by the scale as well."""

    def multi_tensor(self, ctx):
        return _ScalesBoth(self)


class _ScalesBoth(Launch):
    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        for tensor in tensors:
            if tensor.residual is not None:
                tensor.residual[:] *= np.float32(scale)
        super().encode(tensors, spaced, scale, decay, weight)


class ScratchOfALaunch(Launched):
    """Returns one launcher with one table of inputs, which the next launch overwrites."""

    def multi_tensor(self, ctx):
        return _Grown(self)


class _Grown(Launch):
    seen = 0

    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        start, self.seen = self.seen % 2, self.seen + 1
        super().encode(tensors[start:], spaced, scale, decay, weight)


class VaryingThirtyTwo(LaunchedVarying):
    """Compresses 32 tensors in a launch, and sends the last one's payload for the others."""

    def multi_varying(self, ctx):
        return _VaryingFew(self)


class _VaryingFew(VaryingLaunch):
    def compress(self, tensors, scale=1.0, decay=1.0):
        sent = super().compress(tensors[:32], scale, decay)
        return sent + [sent[-1]] * (len(tensors) - len(sent))


class VaryingSharesNaN(LaunchedVarying):
    """Marks every payload of a launch in which one tensor overflowed."""

    def multi_varying(self, ctx):
        return _VaryingSpoils(self)


class _VaryingSpoils(VaryingLaunch):
    def compress(self, tensors, scale=1.0, decay=1.0):
        sent = super().compress(tensors, scale, decay)
        bad = not all(np.isfinite(t.x).all() for t in tensors)
        return [p | {"step": p["step"] + np.float32(np.nan)} if bad else p for p in sent]


class VaryingSumsTwo(LaunchedVarying):
    """Decodes two payloads of a sum, however many there are."""

    def multi_varying(self, ctx):
        return _VaryingTwo(self)


class _VaryingTwo(VaryingLaunch):
    def decode(self, sums, scale=1.0):
        super().decode([s._replace(payloads=s.payloads[:2]) for s in sums], scale)


class VaryingSharesMemory(LaunchedVarying):
    """Returns payloads that lie in one array of the launcher, which the next launch fills."""

    def multi_varying(self, ctx):
        return _VaryingRoom(self)


_ROOM = np.zeros(1 << 20, "int8")


class _VaryingRoom(VaryingLaunch):
    def compress(self, tensors, scale=1.0, decay=1.0):
        sent, start = [], 0
        for payload in super().compress(tensors, scale, decay):
            codes = _ROOM[start : start + payload["codes"].size]
            codes[:] = payload["codes"]
            start += codes.size
            sent.append(payload | {"codes": codes})
        return sent
