"""What environment and arguments say of the engine's limits, and of what is tuned."""

import os
import threading

import pytest

from ringlet.fusion import Limits
from ringlet.fusion.errors import in_words
from ringlet.job.lifecycle import init
from ringlet.job.session import check_wire_versions, shutdown
from ringlet.job.settings import limits_from
from ringlet.ring.errors import LaunchError
from ringlet.ring.transports.local import run_local


@pytest.mark.parametrize(
    ("env", "streams"),
    [
        ({}, 4),
        ({"RINGLET_STREAMS": "2"}, 2),
        ({"HOROVOD_NUM_NCCL_STREAMS": "1"}, 1),
        ({"HOROVOD_NUM_NCCL_STREAMS": "1", "RINGLET_STREAMS": "8"}, 8),
    ],
)
def test_streams_have_two_names(env, streams):
    assert limits_from(env).streams == streams


def test_there_is_at_least_one_stream():
    with pytest.raises(ValueError, match=r"RINGLET_STREAMS.* at least 1, not 0"):
        limits_from({"RINGLET_STREAMS": "0"})
    with pytest.raises(ValueError, match="at least 1, not -1"):
        Limits(streams=-1)


@pytest.mark.parametrize(
    ("env", "tuned"),
    [
        ({}, ""),
        ({"HOROVOD_AUTOTUNE": "0"}, ""),
        ({"RINGLET_AUTOTUNE": "False", "HOROVOD_AUTOTUNE": "1"}, ""),
        ({"HOROVOD_AUTOTUNE": "1"}, "all"),
        ({"RINGLET_AUTOTUNE": "True", "HOROVOD_CYCLE_TIME": "5"}, "all,-cycle_time"),
        ({"RINGLET_AUTOTUNE": "all", "HOROVOD_CACHE_CAPACITY": "9"}, "all,-cache"),
        ({"RINGLET_AUTOTUNE": "1", "HOROVOD_NUM_NCCL_STREAMS": "2"}, "all,-streams"),
        ({"RINGLET_AUTOTUNE": "1", "RINGLET_HIERARCHICAL_ALLREDUCE": "1"}, "all"),
        ({"RINGLET_AUTOTUNE": "cycle_time", "RINGLET_CYCLE_TIME": "5"}, "cycle_time"),
        ({"RINGLET_AUTOTUNE": "streams, cache"}, "streams,cache"),
    ],
)
def test_autotuning_is_switched_on_or_told_names(env, tuned):
    pytest.importorskip("bayes_opt")
    assert limits_from(env).autotune == tuned


def test_what_cannot_be_tuned_is_an_error():
    with pytest.raises(ValueError, match="'compression' is not one of fusion_threshold"):
        limits_from({"RINGLET_AUTOTUNE": "compression"})


def test_an_argument_of_init_comes_before_the_environment(monkeypatch):
    pytest.importorskip("bayes_opt")

    def tuned(comm, autotune):
        limits = init(autotune=autotune).engine.limits
        shutdown()
        return limits.autotune, limits.streams

    def refused(comm):
        with pytest.raises(ValueError, match="set RINGLET_HIERARCHICAL_ALLREDUCE=1"):
            init(autotune="cycle_time,hierarchical")

    monkeypatch.setenv("RINGLET_STREAMS", "2")
    monkeypatch.setenv("RINGLET_AUTOTUNE", "0")
    assert run_local(tuned, 2, True) == [("fusion_threshold,cycle_time,cache", 2)] * 2
    assert run_local(tuned, 2, None) == [("", 2)] * 2
    monkeypatch.setenv("RINGLET_AUTOTUNE", "1")
    assert run_local(tuned, 2, False) == [("", 2)] * 2
    assert run_local(tuned, 2, "streams") == [("streams", 2)] * 2
    run_local(refused, 2)


def test_ranks_whose_payloads_have_other_bytes_are_refused():
    check_wire_versions([1, 1, 1])
    with pytest.raises(LaunchError, match=r"version 1 on rank\(s\) 0, 2; version 2 on rank\(s\) 1"):
        check_wire_versions([1, 2, 1])


@pytest.mark.parametrize("running", [False, True])
def test_a_name_in_place_of_a_communicator_is_refused_before_and_after_init(running):
    if running:
        init()
    try:
        with pytest.raises(TypeError, match="use transport='mpi'"):
            init("mpi")
    finally:
        shutdown()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make folders of others")
def test_kernels_that_another_user_may_have_made_are_not_loaded(tmp_path, monkeypatch):
    from numba.core.caching import _CacheLocator

    from ringlet.compressors.kernels.cpu.dense import casts

    tmp_path.chmod(0o1777)  # as /tmp is
    place = tmp_path / "numba"
    place.mkdir(mode=0o777)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
    init()
    shutdown()
    os.chown(place, 65534, 65534)
    with pytest.raises(LaunchError, match=r"^NUMBA_CACHE_DIR=.* belongs to another user, who"):
        init()
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("RINGLET_KERNEL_CACHE", str(place / "cuda"))
    with pytest.raises(LaunchError, match=r"^RINGLET_KERNEL_CACHE=.*/numba belongs to another"):
        init()
    monkeypatch.delenv("RINGLET_KERNEL_CACHE")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
    os.chown(place, 0, 0)
    place.chmod(0o1777)  # a folder for the kernels of all users
    for name in ("others_" + 40 * "0", "file"):
        (place / name).mkdir()
        os.chown(place / name, 65534, 65534)
    init()
    shutdown()
    planted = place / _CacheLocator.get_suitable_cache_subpath(casts.__file__)
    planted.mkdir()
    os.chown(planted, 65534, 65534)
    with pytest.raises(LaunchError, match=f"{planted} belongs to another user, who could have"):
        init()


def test_a_folder_for_kernels_is_made_for_this_user_alone(tmp_path, monkeypatch):
    """Who else could make it later, while ranks run, would have them load what he likes."""
    place = tmp_path / "deep" / "numba"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
    before = os.umask(0)
    try:
        init()
        shutdown()
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "numba"))
    init()  # no such folder can be made: Numba takes another one
    shutdown()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make links of others")
def test_a_folder_for_kernels_is_not_made_by_a_strangers_link(tmp_path, monkeypatch):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for each in (shared, own):
        each.mkdir()
    shared.chmod(0o1777)  # as /tmp is
    link = shared / "link"
    link.symlink_to(own)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(link / "cache"))
    with pytest.raises(LaunchError, match=f"{link} belongs to another user, who could have"):
        init()
    assert not [*own.iterdir()]


def test_a_limit_of_threads_is_told_with_what_to_do(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("ringlet"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    cure = r"there may be no more threads; raise the limit of this user's processes \(ulimit -u\)"
    with pytest.raises(LaunchError, match=f"^rank 0 cannot start: {cure}"):
        init()
    assert "new thread: there may be no more" in in_words(RuntimeError("can't start new thread"))
    assert "threads" not in in_words(RuntimeError("another"))
