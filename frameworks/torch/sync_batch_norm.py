"""Batch normalisation over the batches of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.ops.movements import allgather
from ringlet.torch.ops.reductions import allreduce


class SyncBatchNorm(_BatchNorm):
    """Normalise with the mean and variance of all ranks' batches together.

    Arguments and state are those of ``torch.nn.BatchNorm2d``; inputs have a batch dimension and
    channels in the second one. Outside training, and on one rank, it is that. Ranks may hold
    batches of different sizes, but none may be empty everywhere.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` normalised."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or current().size == 1:
            return super().forward(input)
        return self._over_ranks(input)

    @untraced
    def _over_ranks(self, input: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None:
            weight = self.momentum
        else:
            weight = 1.0 / (float(self.num_batches_tracked or 0) + 1.0)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        apply: Any = _Normalise.apply
        output, mean, var, count = apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = var * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        result: torch.Tensor = output
        return result


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        channels, wide = x.shape[1], _widened(x)
        axes = [0, *range(2, x.dim())]
        count = x.numel() // max(channels, 1)
        mean = wide.sum(axes) / max(count, 1)
        shape = [1, channels] + [1] * (x.dim() - 2)
        spread = (wide - mean.view(shape)).square().sum(axes)
        own = torch.cat([mean, spread, mean.new_tensor([float(count)])])
        gathered = allgather(own.double()[None])
        # Chan, Golub and LeVeque's way of merging variances, which does not cancel.
        means, spreads = gathered[:, :channels], gathered[:, channels:-1]
        counts = gathered[:, -1:]
        total = counts.sum()
        merged = (counts * means).sum(0) / total
        var = (spreads.sum(0) + (counts * (means - merged).square()).sum(0)) / total
        mean, inverse = merged.to(wide.dtype), (var + eps).rsqrt().to(wide.dtype)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        factor = weight if weight is not None else normal.new_ones(1)
        ctx.save_for_backward(x, factor, mean, inverse)
        ctx.total, ctx.axes, ctx.shape, ctx.eps = float(total), axes, shape, eps
        ctx.affine = weight is not None, bias is not None
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        statistics = mean, var.to(wide.dtype), total.to(wide.dtype)
        ctx.mark_non_differentiable(*statistics)
        return output.to(x.dtype), *statistics

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        values = _widened(x)
        if torch.is_grad_enabled():  # to be differentiated again: statistics depend on x
            mean = _summed(values.sum(ctx.axes)) / ctx.total
            spread = (values - mean.view(ctx.shape)).square().sum(ctx.axes)
            inverse = (_summed(spread) / ctx.total + ctx.eps).rsqrt()
        normal = (values - mean.view(ctx.shape)) * inverse.view(ctx.shape)
        wide = grads[0].to(normal.dtype)
        sums = wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)
        both = _summed(torch.cat(sums)) / ctx.total
        mean_grad, mean_product = both.chunk(2)
        scaled = inverse * weight
        inner = wide - mean_grad.view(ctx.shape) - normal * mean_product.view(ctx.shape)
        grad = (inner * scaled.view(ctx.shape)).to(grads[0].dtype)
        has_weight, has_bias = ctx.affine
        return grad, sums[1] if has_weight else None, sums[0] if has_bias else None, None


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 if it has fewer bits."""
    return x.float() if x.dtype.itemsize < 4 else x


def _summed(own: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks."""
    return allreduce(own, op=ReduceOp.SUM)
