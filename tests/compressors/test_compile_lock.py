"""One enters first, and the others together behind it."""

import threading

import pytest

from ringlet.compressors.core import compile_lock as module
from ringlet.compressors.core.compile_lock import compile_lock


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))


def test_others_wait_for_the_first_and_then_enter_together(monkeypatch):
    tried, together, told = threading.Semaphore(0), threading.Barrier(3), []
    locked = module._locked

    def counted(descriptor, kind):
        got = locked(descriptor, kind)
        if kind == module.fcntl.LOCK_EX:
            tried.release()
        return got

    def late():
        with compile_lock() as was_first:
            told.append(was_first)
            together.wait(60)  # which nobody passes alone

    threads = [threading.Thread(target=late) for _ in range(3)]
    monkeypatch.setattr(module, "_locked", counted)
    with compile_lock() as was_first:
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
    with compile_lock(), compile_lock(patience=0.0) as was_first:
        assert not was_first
    with pytest.raises(KeyError), compile_lock():
        raise KeyError
    with compile_lock() as was_first:
        assert was_first


def test_nobody_waits_for_a_lock_of_somebody_elses(monkeypatch, tmp_path):
    with compile_lock() as was_first:  # which makes the file
        assert was_first
        other = module.os.getuid() + 1
        monkeypatch.setattr(module.os, "getuid", lambda: other)
        (path,) = tmp_path.iterdir()
        path.rename(path.with_name(f"ringlet-kernels-{other}.lock"))
        with compile_lock() as was_first:
            assert was_first


def test_without_a_place_for_a_lock_everybody_is_first(monkeypatch):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: "/nowhere/at/all")
    with compile_lock() as outer, compile_lock() as inner:
        assert outer
        assert inner
