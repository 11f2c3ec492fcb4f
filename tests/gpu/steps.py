"""Some steps of one rank with a compressor that remembers things, on any kind of arrays."""

import numpy as np

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import encoded

MODIFIED = [
    "int8 | ef21", "topk(ratio=0.1) | ef21", "threshold(value=0.7) | ef21",
    "int8 | momentum_correction", "topk(ratio=0.1) | momentum_correction(0.8, clip=0.5)",
    "threshold(value=0.7) | momentum_correction(clip=9.0, masking=False)", "qsgd(bits=4) | scaled",
    "randomk(ratio=0.3) | scaled",
]  # fmt: skip


def steps(spec, xs, xp=np):
    """Return everything that the gradients ``xs``, a step each, leave behind, as NumPy arrays."""
    c, n, state, seen, workspace = parse(spec), xs[0].size, {}, [], Workspace(xp)
    for step, x in enumerate(xs):
        ctx = Context(
            name="w", numel=n, shape=(n,), step=step, state=state, size=3, workspace=workspace,
            seed=4, xp=xp,
        )  # fmt: skip
        payload, out = encoded(c, xp.asarray(x), ctx), xp.zeros(n, np.float32)
        seen += [to_host(array) for array in payload.values()]
        c.accumulate(payload, out, ctx)
        seen.append(to_host(out))
        c.sum_into([payload, payload], out, ctx)
        seen.append(to_host(out))
        c.decompress(payload, out, ctx)
        c.finish(out, ctx)
        seen.append(to_host(out))
        seen += [to_host(array) for array in state.values() if hasattr(array, "dtype")]
    return seen


def to_host(array):
    """Return a copy as a NumPy array."""
    return array.copy() if isinstance(array, np.ndarray) else array.get()
