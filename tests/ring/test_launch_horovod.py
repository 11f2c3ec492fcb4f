"""Horovod's arguments of run()."""

import os

import pytest

from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import run
from ringlet.ring.functions.horovod import translated

NOTHING = dict.fromkeys(("np", "min_np", "max_np", "transport", "network_interface"))


@pytest.mark.parametrize(
    ("theirs", "meant"),
    [
        ({"num_proc": 3}, {"np": 3}),
        ({"use_gloo": True, "use_mpi": None}, {"transport": "gloo"}),
        ({"use_mpi": True, "use_gloo": False}, {"transport": "mpi"}),
        ({"use_gloo": False, "use_mpi": False, "disable_cache": True}, {}),
        ({"network_interfaces": ["eth0", "lo"]}, {"network_interface": "eth0,lo"}),
        ({"network_interfaces": "eth0"}, {"network_interface": "eth0"}),
        ({"min_num_proc": None, "mpi_args": None}, {}),
        ({"min_num_proc": 2, "max_num_proc": 4}, {"min_np": 2, "max_np": 4}),
        ({"func": os.getpid, "executable": "python"}, {"func": os.getpid, "executable": "python"}),
    ],
)
def test_what_is_called_otherwise(theirs, meant):
    assert translated(theirs, NOTHING) == meant


@pytest.mark.parametrize(
    ("theirs", "error", "said"),
    [
        ({"use_glo": True}, TypeError, "argument 'use_glo'; did you mean 'use_gloo'?"),
        ({"num_procs": 2}, TypeError, "argument 'num_procs'; did you mean 'num_proc'?"),
        ({"transprot": "mpi"}, TypeError, "argument 'transprot'; did you mean 'transport'?"),
        ({"use_gloo": True, "use_mpi": True}, LaunchError, "one of them can be true"),
        ({"num_proc": 3, "np": 2}, LaunchError, "np=2 contradicts np=3, which num_proc asks for"),
        ({"use_mpi": True, "transport": "gloo"}, LaunchError, "'gloo' contradicts transport='mpi'"),
        ({"max_num_proc": 4, "max_np": 3}, LaunchError, "max_np=3 contradicts max_np=4, which max"),
        ({"mpi_args": "-x"}, LaunchError, "set MPI's own variables instead"),
        ({"fn": None}, TypeError, "run() takes a function to call on every rank, not None"),
    ],
)
def test_what_cannot_be_is_said(theirs, error, said):
    with pytest.raises(error) as raised:
        run(**{"fn": os.getpid} | theirs)
    assert said in str(raised.value)
