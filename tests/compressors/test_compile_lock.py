"""One enters first, and the others together behind it."""

import os
import threading
import types
from contextlib import ExitStack

import pytest

from ringlet.compressors.core import compile_lock as module
from ringlet.compressors.core.compile_lock import compile_lock, kernels_of


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))


def seized(folder):
    """Return a descriptor that holds the lock, and shows no sign of life."""
    with compile_lock():  # which makes the file
        pass
    (path,) = folder.iterdir()
    os.utime(path, (1.0, 1.0))  # as an earlier holder left it
    descriptor = os.open(path, os.O_RDWR)
    assert module._locked(descriptor, module.fcntl.LOCK_EX)
    return descriptor


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


def test_who_compiles_other_kernels_or_elsewhere_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "here")
    with compile_lock(kernels_of("int8 | ef")):
        with compile_lock(kernels_of("int8 | ef"), patience=0.0) as was_first:
            assert not was_first
        with compile_lock(kernels_of("fp8 | ef"), patience=0.0) as was_first:
            assert was_first
        monkeypatch.setenv("NUMBA_CACHE_DIR", "there")
        with compile_lock(kernels_of("int8 | ef"), patience=0.0) as was_first:
            assert was_first
    for number in range(1000):
        with compile_lock(kernels_of(f"topk(ratio={number})")):
            pass
    assert len([*tmp_path.iterdir()]) == module._LOCKS


def test_a_folder_of_kernels_may_have_a_name_that_is_no_utf_8(monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.fsdecode(b"k\xff"))
    with compile_lock(kernels_of("int8 | ef")) as was_first:
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


def no_folder():
    raise FileNotFoundError("no usable temporary directory")


@pytest.mark.parametrize("place", [lambda: "/nowhere/at/all", no_folder])
def test_without_a_place_for_a_lock_everybody_is_first(monkeypatch, place):
    monkeypatch.setattr(module.tempfile, "gettempdir", place)
    with compile_lock() as outer, compile_lock() as inner:
        assert outer
        assert inner


def test_who_shows_no_sign_of_life_is_waited_for_a_short_time_and_once(monkeypatch, tmp_path):
    now = [0.0]

    def sleep(seconds):
        now[0] += 0.5
        if now[0] <= 60:  # whoever is first works so long, and is stopped then
            os.utime(held, (now[0] // 4, now[0] // 4))

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(module, "time", clock)
    held = seized(tmp_path)
    try:
        with compile_lock() as was_first:
            assert not was_first
        assert now == [60 + module.SILENCE_S]
        with compile_lock() as was_first:
            assert not was_first
        assert now == [60 + module.SILENCE_S]
        os.utime(held)  # it goes on
        with compile_lock(patience=5.0) as was_first:
            assert not was_first
        assert now == [65 + module.SILENCE_S]
    finally:
        os.close(held)
    with compile_lock() as was_first:
        assert was_first


def test_who_is_first_shows_signs_of_life_until_it_is_out(monkeypatch, tmp_path):
    shown, sign = threading.Semaphore(0), module._sign

    def counted(descriptor):
        sign(descriptor)
        shown.release()

    os.close(seized(tmp_path))
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(module, "SIGN_S", 0.001)
    monkeypatch.setattr(module, "_sign", counted)
    with compile_lock() as was_first:
        assert was_first
        assert path.stat().st_mtime > 1.0
        for _ in range(3):
            assert shown.acquire(timeout=60)
        assert "ringlet-compile-lock" in {thread.name for thread in threading.enumerate()}
    assert "ringlet-compile-lock" not in {thread.name for thread in threading.enumerate()}


def test_a_child_that_was_forked_meanwhile_neither_ends_nor_keeps_the_lock():
    reader, writer = os.pipe()
    with ExitStack() as inside:
        inside.enter_context(compile_lock())
        leaver = os.fork()
        if not leaver:
            inside.close()
            os._exit(0)
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)  # until the parent has seen that the lock is free
            os._exit(0)
        assert os.waitpid(leaver, 0)[1] == 0
        with compile_lock(patience=0.0) as was_first:
            assert not was_first
    try:
        with compile_lock() as was_first:
            assert was_first
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)
