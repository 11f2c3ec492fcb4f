"""Names that an adapter has not: what was meant, also by those who come from other libraries."""

import pytest
import torch

import ringlet.torch as hvd
from ringlet.horovod.other_names import _NAMES


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("all_reduce", r"of torch\.distributed; here: hvd\.allreduce_\(\.\.\.\) in place"),
        ("get_world_size", r"here: hvd\.size\(\)"),
        ("DistributedDataParallel", r"which is torch's; here: keep torch\.nn\.parallel\.Distrib"),
        ("initialize", r"which is DeepSpeed's; here: hvd\.init\(\)"),
        ("DistributedOptimiser", "did you mean 'DistributedOptimizer'"),
        ("broadcast_params", "did you mean 'broadcast_parameters'"),
        ("nothing_like_it", "no attribute 'nothing_like_it'$"),
    ],
)
def test_a_name_that_is_not_there_is_answered(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(hvd, name)
    assert not hasattr(hvd, name)


def test_what_stands_for_a_name_is_there():
    for name, (_, instead) in _NAMES.items():
        assert not hasattr(hvd, name), name
        for word in instead.replace("(", " ").split():
            if word.startswith("hvd."):
                assert callable(getattr(hvd, word.removeprefix("hvd.").rstrip(",;"))), word


def test_parameters_come_before_the_root():
    with pytest.raises(TypeError, match=r"not 0, and the root_rank behind it"):
        hvd.broadcast_parameters(0, torch.nn.Linear(2, 2).state_dict())
