"""What compressors hold back on one rank of an elastic job, for the programs that train in one."""

import numpy as np


def residuals(lengths, states, of_sums):
    """Return the residuals of tensors of so many elements, by name, one behind the other.

    They include what is held back of the means of shards, so many times: as many as there are
    ranks, for a mean is made of a rank's residual by dividing.
    """
    found = []
    for name, n in lengths.items():
        state = states.get(name, {})
        found.append(np.array(state.get("residual", np.zeros(n)), np.float64))
        for key in [key for key in state if key.startswith("stage2.")]:
            start, part = int(key.removeprefix("stage2.")), state[key].get("residual", np.zeros(0))
            found[-1][start : start + part.size] += part * of_sums
    return np.concatenate(found)


def owed(held, size):
    """Return what a rank that holds this back owes to the mean of ``size`` ranks.

    That is along two directions, and how much at most.
    """
    whole = held / size
    draws = np.random.default_rng(0).standard_normal((2, whole.size))
    return [*(draws @ whole), float(np.linalg.norm(whole))]
