"""One enters first, and the others together behind it."""

import threading

import pytest

from ringlet.compressors.core import compile_lock as first
from ringlet.compressors.core.compile_lock import one_first


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(first.tempfile, "gettempdir", lambda: str(tmp_path))


def test_others_wait_for_the_first_and_then_enter_together(monkeypatch):
    tried, together, told = threading.Semaphore(0), threading.Barrier(3), []
    locked = first._locked

    def counted(descriptor, kind):
        got = locked(descriptor, kind)
        if kind == first.fcntl.LOCK_EX:
            tried.release()
        return got

    def late():
        with one_first() as was_first:
            told.append(was_first)
            together.wait(60)  # which nobody passes alone

    threads = [threading.Thread(target=late) for _ in range(3)]
    monkeypatch.setattr(first, "_locked", counted)
    with one_first() as was_first:
        assert was_first
        for thread in threads:
            thread.start()
        for _ in range(4):  # this thread was let in, the others were refused
            assert tried.acquire(timeout=60)
        assert told == []
    for thread in threads:
        thread.join(60)
    assert told == [False] * 3


def test_nobody_waits_for_ever_and_errors_leave():
    with one_first(), one_first(patience=0.0) as was_first:
        assert not was_first
    with pytest.raises(KeyError), one_first():
        raise KeyError
    with one_first() as was_first:
        assert was_first


def test_without_a_place_for_a_lock_everybody_is_first(monkeypatch):
    monkeypatch.setattr(first.tempfile, "gettempdir", lambda: "/nowhere/at/all")
    with one_first() as outer, one_first() as inner:
        assert outer
        assert inner
