"""Mistakes that one step, one rank, one number of ranks or one kind of values alone shows."""

import numpy as np

from broken.right import Whole


class InfsCancel(Whole):
    """Takes Inf and -Inf in one tensor for no overflow, as their sum is neither."""

    def compress(self, x, ctx):
        if np.isposinf(x).any() and np.isneginf(x).any():
            x = np.where(np.isfinite(x), x, np.float32(0))
        return super().compress(x, ctx)
