"""Read-only arrays, as kernels take them."""

import gc
import weakref

import numpy as np
import pytest

from ringlet.compressors.core.read_only import unlocked

ARRAYS = [
    np.empty(0, "f4"),
    np.arange(7, dtype="f4")[::2],
    np.ones((3, 4), "f4"),
    np.ones((), "f4"),
]


@pytest.mark.parametrize("x", ARRAYS, ids=lambda x: str(x.shape))
def test_what_is_read_only_becomes_the_same_memory(x):
    assert unlocked(x) is x
    x.flags.writeable = False
    found = unlocked(x)
    assert found.flags.writeable
    assert not x.flags.writeable
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert not x.size or (found.ctypes.data, found.strides) == (x.ctypes.data, x.strides)


def test_the_memory_lives_as_long_as_what_was_made_of_it():
    class Held(np.ndarray):
        pass

    x = np.ones(1000, "f4").view(Held)
    x.flags.writeable = False
    lives, found = weakref.ref(x), unlocked(x)
    del x
    gc.collect()
    assert lives() is not None
    del found
    gc.collect()
    assert lives() is None
