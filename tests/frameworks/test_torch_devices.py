"""Tensors that are not in host memory: staged there and back, as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import ringlet.torch as hvd
from ringlet.job.session import current
from ringlet.torch.parallel.ddp import DdpState, reduce_bucket

pytestmark = pytest.mark.preloaded("torch")


class Far(torch.Tensor):
    """A tensor that claims to be elsewhere, and whose values only copies reach."""

    @staticmethod
    def __new__(cls, inner):
        form = {"strides": inner.stride(), "dtype": inner.dtype, "device": "lazy"}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **form)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Far({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        far = torch.device(kwargs.get("device") or "lazy").type == "lazy"
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        near = tree_map(lambda t: t.inner if isinstance(t, Far) else t, (args, kwargs))
        found = function(*near[0], **near[1])
        if function._schema.name.endswith("_"):
            return args[0]
        return tree_map(lambda t: Far(t) if far and isinstance(t, torch.Tensor) else t, found)


class Sending(TorchDispatchMode):
    """Lets host tensors be sent there, too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not str(kwargs.get("device")).startswith("lazy"):
            return function(*args, **kwargs)
        return Far(function(*args, **kwargs | {"device": "cpu"}))


def alike(far, near):
    assert far.device.type == "lazy"
    assert torch.equal(far.cpu(), near)


def case_collectives():
    x = torch.randn(6, 5)
    alike(hvd.allreduce(Far(x), name="a"), hvd.allreduce(x, name="b"))
    alike(hvd.allreduce(Far(x), op=hvd.Max), hvd.allreduce(x, op=hvd.Max))
    alike(hvd.allreduce(Far(x), compression="int8"), hvd.allreduce(x, compression="int8"))
    here = Far(x.clone())
    assert hvd.allreduce_(here, name="in place") is here
    alike(here, hvd.allreduce(x, name="c"))
    both = [Far(x.clone()), Far(x[:2].clone())]
    hvd.grouped_allreduce_(both, name="grouped")
    alike(both[1], hvd.allreduce(x[:2], name="d"))
    with Sending():
        moves = (hvd.allgather, hvd.alltoall, hvd.reducescatter)
        moved = [move(Far(x)) for move in moves]
    for got, move in zip(moved, moves, strict=True):
        alike(got, move(x))
    alike(hvd.broadcast(Far(x), 1), hvd.broadcast(x, 1))
    hvd.broadcast_(here, 0)
    alike(here, hvd.broadcast(hvd.allreduce(x, name="e"), 0))


def case_gradients():
    near = torch.randn(4, 3, requires_grad=True)
    far = Far(near.detach().clone()).requires_grad_()
    weights = torch.arange(12.0).reshape(4, 3)
    (hvd.allreduce(near, name="near") * weights).sum().backward()
    (hvd.allreduce(far, name="far") * Far(weights)).sum().backward()
    alike(far.grad, near.grad)


def case_training():
    """The same parameters in the end, bit for bit, whatever they travel as."""
    for spec in ("none", "int8 | ef", "powersgd(rank=2) | ef"):
        ended = []
        for wrap in (lambda t: t, Far):
            torch.manual_seed(hvd.rank())
            values = {"a": torch.randn(64, 32), "b": torch.randn(40, 64), "c": torch.randn(40)}
            named = {name: torch.nn.Parameter(wrap(v)) for name, v in values.items()}
            hvd.broadcast_parameters(named)
            inner = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
            optimizer = hvd.DistributedOptimizer(inner, named.items(), compression=spec)
            for step in range(3):
                torch.manual_seed(10 * step + hvd.rank())
                x = wrap(torch.randn(8, 32))
                optimizer.zero_grad()
                y = (x @ named["a"].t()) @ named["b"].t() + named["c"]
                y.square().mean().backward()
                optimizer.step()
            ended.append({name: p.detach().cpu() for name, p in named.items()})
        assert all(torch.equal(ended[0][name], ended[1][name]) for name in named), spec


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, wrap):
        torch.manual_seed(hvd.rank())
        self._flat = wrap(torch.randn(3000))
        self._parts = [self._flat[:2000].view(40, 50), self._flat[2000:]]
        self._parameters = [wrap(torch.zeros(40, 50)), wrap(torch.zeros(1000))]

    def buffer(self):
        return self._flat

    def gradients(self):
        return self._parts

    def parameters(self):
        return self._parameters

    def index(self):
        return 0


def case_ddp_buckets():
    near, far = (
        reduce_bucket(DdpState("int8", None, current()), Bucket(w)) for w in (lambda t: t, Far)
    )
    alike(far.wait(), near.wait())


def case_tensors_without_values():
    with pytest.raises(TypeError, match="has no values"):
        hvd.allreduce(torch.empty(3, device="meta"))


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_devices(run_case, case):
    run_case(case, "gloo", 2)
