"""The garbage collector is paused, and left as it was."""

import contextlib
import gc

import pytest

from ringlet.ring.collector import paused


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_paused_and_left_as_it_was(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(KeyError), paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
