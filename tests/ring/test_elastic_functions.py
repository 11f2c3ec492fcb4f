"""Functions on ranks that come and go: ringlet.run with min_np, as Horovod's min_num_proc."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import ringlet
from ringlet.ring.errors import LaunchError

pytestmark = pytest.mark.preloaded("torch")

TWO = {"hosts": "localhost:2,127.0.0.1:1", "min_np": 1, "transport": "gloo"}


def trained(what, folder):
    import torch

    import ringlet.torch as hvd
    from ringlet.job.elastic import HostsUpdatedInterrupt

    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), "int8 | ef"
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    first = hvd.rank()
    leaves = what in ("leave", "linger")

    def commit(state):
        try:
            state.commit()
        except HostsUpdatedInterrupt:
            if what == "linger" and first == 2:
                time.sleep(120)  # until it is killed
            raise

    @hvd.elastic.run
    def train(state):
        while state.step < 20:
            if state.step == 10 and hvd.size() == 3 and first == 1:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "raise":
                    raise RuntimeError("this rank has had enough")
            optimizer.zero_grad()
            model(torch.linspace(0.1, 1, 192).view(3, 64) * (1 + hvd.rank())).sum().backward()
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                commit(state)
            if leaves and state.step == 10 and hvd.rank() == 0:
                Path(folder, "hosts").write_text("localhost:2\n")
            while leaves and state.step >= 12 and hvd.size() == 3:
                time.sleep(0.05)
                commit(state)
        return float(model.weight.sum().detach())

    return hvd.rank(), hvd.size(), os.environ["HOROVOD_HOSTNAME"], train(state), hvd.size()


@pytest.mark.parametrize("what", ["kill", "raise"])
def test_those_who_stay_return(what, tmp_path, capfd):
    found = ringlet.run(trained, (what, str(tmp_path)), np=3, **TWO)
    began, sizes, hosts, sums, ends = zip(*found, strict=True)
    # The host of the rank that failed is used no more: its other rank leaves.
    assert (began, sizes, hosts, ends) == ((2,), (3,), ("127.0.0.1",), (1,))
    assert "rank 1 on localhost" in capfd.readouterr().err
    assert len(set(sums)) == 1


@pytest.mark.parametrize("what", ["leave", "linger"])
def test_a_host_that_leaves_has_no_result(what, tmp_path, capfd):
    listed = tmp_path / "hosts"
    listed.write_text("localhost:2\n127.0.0.1:1\n")
    found = ringlet.run(
        trained,
        (what, str(tmp_path)),
        num_proc=3,
        min_num_proc=1,
        host_discovery_script=f"cat {listed}",
        use_gloo=True,
    )
    began, _, hosts, sums, ends = zip(*found, strict=True)
    assert (began, hosts, ends) == ((0, 1), ("localhost",) * 2, (2, 2))
    assert len(set(sums)) == 1
    # Though it may be the last to end.
    assert "what compression held back on rank 2 is lost: gradients" in capfd.readouterr().err


def test_a_function_that_trains_nothing_returns_from_every_rank():
    assert ringlet.run(os.getcwd, np=2, min_np=1, transport="gloo") == [os.getcwd()] * 2


def waiting(folder):
    Path(folder, "here").touch()
    time.sleep(120)


def test_a_job_that_is_ended_names_the_signal_and_no_rank(tmp_path):
    def end():
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(LaunchError, match="the job was ended by SIGTERM") as raised:
        ringlet.run(waiting, (str(tmp_path),), np=1, min_np=1, transport="gloo")
    thread.join()
    assert not isinstance(raised.value, ringlet.WorkerFailed)


def failing():
    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("no such file")
    hvd.barrier()


def test_a_job_that_cannot_go_on_raises_what_its_rank_did():
    with pytest.raises(ringlet.WorkerFailed, match="ValueError: no such file") as raised:
        ringlet.run(failing, np=2, min_np=2, transport="gloo")
    assert raised.value.rank == 1
    assert "in failing" in raised.value.traceback


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": 2}, "args is a tuple of the function's arguments, not 2; for ranks write np=2"),
        ({"args": "ab"}, "args is a tuple of the function's arguments, not 'ab'"),
        ({"kwargs": 1}, "kwargs is a dict of the function's arguments by name, not 1"),
        ({"np": "2"}, "np takes a number of at least 1, not '2'"),
        ({"np": 1.5}, "np takes a number of at least 1, not 1.5"),
        ({"np": 0}, "np takes a number of at least 1, not 0"),
        ({"hosts": {"localhost": 2}}, "hosts is a text such as 'host1:4,host2:4', not {'local"),
        ({"hostfile": 3}, "hostfile is the path of a file, not 3"),
        ({"start_timeout": "5"}, "start_timeout takes a number of seconds, not '5'"),
        ({"start_timeout": float("nan")}, "start_timeout takes a number of seconds, not nan"),
        ({"start_timeout": -1}, "start_timeout takes a number of seconds, not -1"),
        ({"env": {"OMP_NUM_THREADS": 4}}, "env: OMP_NUM_THREADS is a text, such as '4', not 4"),
        ({"env": {"A": "a\0b"}}, "env: A is 'a\\x00b', and no variable can hold a NUL byte"),
        ({"env": {"A=B": "1"}}, "env: 'A=B' is no name of a variable"),
        ({"env": "A=1"}, "env is a dict of names and texts, not 'A=1'"),
    ],
)
@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_arguments_of_the_wrong_form_are_named(given, said, transport):
    with pytest.raises((LaunchError, TypeError), match=re.escape(said)):
        ringlet.run(failing, **{"np": 1, "transport": transport, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_np": 3, "max_np": 2}, "min_np 3 is more than max_np 2"),
        ({"max_np": 2, "hosts": "a:4"}, "the hosts have 4 slots, which is more than max_np 2"),
        ({"min_np": 1, "slots": "4"}, "slots takes a number of at least 1, not '4'"),
        ({"min_np": 1, "cooldown_range": 5}, "cooldown_range takes two numbers of seconds, not 5"),
        ({"slots": 2}, "slots is for ranks that come and go: give min_np, max_np or a"),
        ({"reset_limit": 2}, "reset_limit is for ranks that come and go"),
        ({"min_np": 3, "np": 2}, "min_np 3 is more than np 2"),
        ({"min_np": 0}, "min_np takes a number of at least 1, not 0"),
        ({"max_np": "4"}, "max_np takes a number of at least 1, not '4'"),
        ({"min_np": 1, "hosts": "a:1", "host_discovery_script": "cat hosts"}, "not both"),
        ({"host_discovery_script": "cat hosts"}, "needs np or min_np: how many ranks to begin"),
        ({"min_np": 4, "hosts": "localhost:2"}, "4 ranks are to begin, but the hosts have 2 slots"),
        ({"min_np": 1, "cooldown_range": (5, 2)}, "cooldown_range takes two numbers of seconds"),
        ({"min_np": 1, "elastic_timeout": "soon"}, "elastic_timeout takes a number of seconds"),
        ({"min_np": 1, "transport": "mpi"}, "an elastic job cannot use MPI"),
        ({"min_np": 1, "transport": "local"}, "ranks as threads, which do not come and go"),
        ({"min_num_proc": 1, "min_np": 2}, "min_np=2 contradicts min_np=1, which min_num_proc"),
    ],
)
def test_what_contradicts_is_said(given, said):
    with pytest.raises(LaunchError, match=said):
        ringlet.run(failing, **given)
