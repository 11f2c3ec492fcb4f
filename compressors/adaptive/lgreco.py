"""L-GreCo, a method of that name: a compressor for each layer, from what gradients look like.

It works on values that every rank has, such as reduced gradients, so that all ranks choose alike.
Hand the choice to ``optimizer.set_compression``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.nesting import innermost
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import OptionError
from ringlet.compressors.lowrank.powersgd import LowRank
from ringlet.compressors.specs.parser import resolve

Spec = str | Compressor
_WARM = 4  # steps after which a warm start has found its subspace


def assign(
    gradients: Mapping[str, Array],
    candidates: Sequence[Spec],
    reference: Spec,
    resolution: int = 1000,
) -> dict[str, Compressor]:
    """Return a compressor for each layer: fewest bytes within the error budget of ``reference``.

    Alimohammadi et al., "L-GreCo: layerwise-adaptive gradient compression", MLSys 2024: minimise
    the sum of payload sizes subject to the sum of squared errors not exceeding what ``reference``
    on all layers would give (to one part in ``resolution`` per layer), by dynamic programming.
    ``gradients`` are float32 arrays by name, the same on every rank, in the tensors' shapes, by
    which low-rank compressors go; ``reference`` is always among the candidates, so there is a
    solution. Tensors below a compressor's ``min_size`` travel uncompressed, and count as such. The
    result is a mapping for ``compression=``. Raises OptionError where low-rank compressors are
    given vectors alone, of which they send everything, and where a gradient is not finite.
    """
    if resolution < 1:
        raise OptionError(f"assign: resolution must be at least 1, got {resolution}")
    chosen = [resolve(spec) for spec in (*candidates, reference)]
    low = next((str(each) for each in chosen if isinstance(innermost(each), LowRank)), None)
    if low is not None and gradients and all(g.ndim < 2 for g in gradients.values()):
        raise OptionError(
            f"assign: {low!r} compresses matrices, and all gradients are flat; give them in their "
            "tensors' shapes, such as p.grad.numpy() without reshape(-1)"
        )
    sizes, errors = [], []
    for name, gradient in gradients.items():
        if not np.isfinite(gradient).all():
            raise OptionError(
                f"assign: the gradient of {name!r} is not finite, so that no errors can be "
                "compared; give those of a step without an overflow"
            )
        measured = [_measure(compressor, name, gradient) for compressor in chosen]
        sizes.append([size for size, _ in measured])
        errors.append([error for _, error in measured])
    if not sizes:
        return {}
    budget = sum(row[-1] for row in errors)
    if not np.isfinite(budget):
        raise OptionError(
            f"assign: {chosen[-1]} overflows on these gradients, so that its error is no budget; "
            "choose another reference"
        )
    picks = _cheapest(np.array(sizes, float), np.array(errors, float), budget, resolution)
    return {name: chosen[pick] for name, pick in zip(gradients, picks, strict=True)}


def _measure(compressor: Compressor, name: str, gradient: Array) -> tuple[float, float]:
    """Return the bytes that a rank sends, and the squared error of compressing ``gradient``.

    In the last of a few steps where exchanges in rounds begin with what the one before left; bytes
    are the mean of the last two, for ACP-SGD sends one factor and the other in turn.
    """
    x = np.ascontiguousarray(gradient, np.float32).reshape(-1)
    if x.size < compressor.traits().min_size:  # as fusion.planning.strategy says
        return float(x.nbytes), 0.0
    ctx = Context(name=name, shape=gradient.shape, numel=x.size)
    out, sent = np.empty_like(x), [0, 0]  # of the step before, and of this one
    traits = compressor.traits()
    if traits.combine != "rounds":
        payload = compressor.compress(x, ctx)
        compressor.decompress(payload, out, ctx)
        sent = [sum(array.nbytes for array in payload.values())] * 2
    for step in range(_WARM if traits.combine == "rounds" else 0):
        ctx.step, sent = step, [sent[1], 0]
        rounds = compressor.exchange(x, out, ctx)
        with suppress(StopIteration):
            asked = next(rounds)
            while True:
                sent[1] += asked.values.nbytes
                asked = rounds.send(asked.values)
        for held in traits.gradient_units:  # it is this gradient's error that counts
            ctx.state.pop(held, None)
    lost = out.astype(np.float64) - x
    return sum(sent) / 2, float(lost @ lost)


def _cheapest(sizes: Array, errors: Array, budget: float, resolution: int) -> list[int]:
    """Return for each row the column such that sizes are least and errors within the budget."""
    layers, options = sizes.shape
    if budget > 0:
        step = budget / resolution
        # Rounded up, so that a plan within the discretised budget is within the real one.
        beyond = float(resolution + 1)  # what no plan can have, as what overflows: it loses all
        steps = np.nan_to_num(errors / step, nan=beyond, posinf=beyond).clip(max=beyond)
        cost = np.ceil(steps - 1e-9).astype(np.int64)
        cost[:, -1] = np.minimum(cost[:, -1], np.floor(steps[:, -1]).astype(np.int64))
    else:
        cost = np.where(errors == 0, 0, resolution + 1)
    least = np.full(resolution + 1, np.inf)
    least[0] = 0.0
    pick = np.zeros((layers, resolution + 1), np.int64)
    for layer in range(layers):
        best = np.full(resolution + 1, np.inf)
        for option in range(options):
            c = int(cost[layer, option])
            if c > resolution:
                continue
            total = np.full(resolution + 1, np.inf)
            total[c:] = least[: resolution + 1 - c] + sizes[layer, option]
            better = total < best
            best[better], pick[layer, better] = total[better], option
        least = best
    place = int(np.argmin(least))
    chosen: list[int] = []
    for layer in reversed(range(layers)):
        chosen.append(int(pick[layer, place]))
        place -= int(cost[layer, chosen[-1]])
    return chosen[::-1]
