"""What compressors hold back on one rank of an elastic job, for the programs that train in one."""

import numpy as np


def residuals(lengths, states, of_sums):
    """Return the residuals of tensors of so many elements, by name, one behind the other.

    They include what is held back of the means of shards, so many times: as many as there are
    ranks, for a mean is made of a rank's residual by dividing. So they do of shards over two
    levels, which are means of a host's ranks.
    """
    found = []
    for name, n in lengths.items():
        state = states.get(name, {})
        found.append(np.array(state.get("residual", np.zeros(n)), np.float64))
        _add_sums(found[-1], state, of_sums)
        for key in [key for key in state if key.startswith("shard.")]:
            start, stop, _, hosts = map(int, key.split(".")[1:5])
            found[-1][start:stop] += state[key].get("residual", 0.0) * (of_sums / hosts)
            _add_sums(found[-1][start:stop], state[key], of_sums)
    return np.concatenate(found)


def _add_sums(whole, state, times):
    for key in [key for key in state if key.startswith("stage2.")]:
        start, part = int(key.removeprefix("stage2.")), state[key].get("residual", np.zeros(0))
        whole[start : start + part.size] += part * times


def owed(held, size):
    """Return what a rank that holds this back owes to the mean of ``size`` ranks.

    That is along two directions, and how much at most.
    """
    whole = held / size
    draws = np.random.default_rng(0).standard_normal((2, whole.size))
    return [*(draws @ whole), float(np.linalg.norm(whole))]
