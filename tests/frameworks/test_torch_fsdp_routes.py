"""Other compressors for other parameters under FSDP2, FSDP1 and HSDP, by their names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch_group import started

import ringlet.torch as hvd
from ringlet.compressors import SpecError
from ringlet.ring.errors import Mismatch

pytestmark = pytest.mark.preloaded("torch")

ROUTES = {"*norm*": "none", "table.*": "fp16", "blocks.1*": "int4 | ef", "*": "int8"}


def spec_of(name):
    """Return what a parameter gets by ROUTES."""
    if "norm" in name:
        return "none"
    return "fp16" if "table" in name else "int4 | ef" if "blocks.1" in name else "int8"


class Block(torch.nn.Module):
    def __init__(self, width, wrapped):
        super().__init__()
        self.norm = torch.nn.LayerNorm(2048)
        up = torch.nn.Linear(2048, width)
        self.up = checkpoint_wrapper(up) if wrapped else up
        self.down = torch.nn.Linear(width, 2048, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(torch.nn.Module):
    def __init__(self, wrapped=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(9, 2048)
        self.blocks = torch.nn.ModuleList(Block(7 + i, wrapped) for i in range(2))

    def forward(self, rows):
        h = self.table(rows)
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


def sharded(mesh=None, by_block=True, wrapped=False):
    own = Network(wrapped)
    for block in own.blocks if by_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(own, mesh=mesh)
    return own


def flat(**options):
    return FullyShardedDataParallel(
        Network(),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        **options,
    )


def gradients(own, steps=2, seed=0):
    """Return the shards of gradients after each of some steps, by names without wrappers."""
    found = []
    for step in range(steps):
        own.zero_grad()
        rows = torch.Generator().manual_seed(100 * seed + 10 * step + hvd.rank())
        own(torch.randint(0, 9, (6,), generator=rows)).backward()
        for name, p in own.named_parameters():
            whole = torch.empty(0) if p.grad is None else p.grad  # FSDP1 gave it to other ranks
            local = whole.to_local() if hasattr(whole, "to_local") else whole
            found.append((step, plain(name), local.clone()))
    return {(step, name): gradient for step, name, gradient in found}


def plain(name):
    for wrapper in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def check_routes(make, compress):
    """Each parameter's gradient is, bit for bit, that of a model with its spec for all."""
    uniform = {}
    for spec in {spec_of(name) for name, _ in Network().named_parameters()}:
        own = make()
        compress(own, spec)
        uniform[spec] = gradients(own)
    own = make()
    compress(own, ROUTES)
    found = gradients(own)
    assert len({spec_of(name) for _, name in found}) == 4
    for (step, name), gradient in found.items():
        assert torch.equal(gradient, uniform[spec_of(name)][step, name]), (step, name)
    differs = [
        name
        for step, name in found
        if step == 0 and not torch.equal(uniform["none"][0, name], found[0, name])
    ]
    assert any("blocks.0" in name for name in differs)
    assert any("blocks.1" in name for name in differs)
    assert not any("norm" in name for name in differs)


def case_fsdp2():
    started()
    for by_block in (True, False):
        check_routes(lambda by_block=by_block: sharded(by_block=by_block), hvd.compress_fsdp)


def case_fsdp1():
    started()
    check_routes(lambda: flat(use_orig_params=True), hvd.compress_fsdp)


def case_fsdp1_of_flat_parameters():
    started()
    for spec in ("int8", ROUTES):
        own = flat(use_orig_params=False)
        hvd.compress_fsdp(own, spec)
        last = gradients(own)
    again = flat(use_orig_params=True)
    hvd.compress_fsdp(again, ROUTES)
    pieces = gradients(again)
    for step in range(2):
        whole = torch.cat([last[key].flatten() for key in last if key[0] == step])
        parts = [pieces[key].flatten() for key in pieces if key[0] == step]
        assert whole.norm() == pytest.approx(torch.cat(parts).norm().item(), rel=1e-5)


def case_hsdp():
    started()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, hvd.size() // 2), mesh_dim_names=names)
    group = mesh["replicate"].get_group()
    made = []

    def compress(own, spec):
        made.append(hvd.compress_hsdp(own, spec, group))

    check_routes(lambda: sharded(mesh["shard"]), compress)
    states = made[-1].state_dict()["states"]
    held = {name for name, state in states.items() if "residual" in state}
    assert held
    assert all("blocks.1" in name for name in held)


def case_parameters_are_gathered_by_their_names():
    """Ranks compute with what their own spec makes of each parameter."""
    started()
    for by_block in (True, False):
        seen = {}
        for spec in ("none", "int8", "fp16", {"*norm*": "none", "table.*": "fp16", "*": "int8"}):
            own, values = sharded(by_block=by_block), {}

            def look(module, _, values=values):
                for name, p in module.named_parameters():
                    if not hasattr(p, "to_local"):
                        values[id(module), name] = p.detach().clone()

            for module in own.modules():
                module.register_forward_pre_hook(look)
            hvd.compress_fsdp(own, gather=spec)
            gradients(own, steps=1)
            order = {id(module): i for i, module in enumerate(own.modules())}
            names = {id(module): name for name, module in own.named_modules()}
            seen[str(spec)] = {
                (order[at], f"{names[at]}.{name}".lstrip(".")): value
                for (at, name), value in values.items()
            }
        routed = seen.popitem()[1]
        assert routed
        for key, value in routed.items():
            spec = "none" if "norm" in key[1] else "fp16" if "table" in key[1] else "int8"
            assert torch.equal(value, seen[spec][key]), key
        weight = next(key for key in routed if key[1].endswith("up.weight"))
        assert not torch.equal(routed[weight], seen["none"][weight])


def case_training_goes_on_from_a_checkpoint_bit_for_bit():
    started()
    for make in (sharded, lambda: flat(use_orig_params=True)):
        own = make()
        state = hvd.compress_fsdp(own, ROUTES)
        gradients(own, seed=1)
        saved = copy.deepcopy(state.state_dict())
        assert state.residual_norm() > 0
        wanted = gradients(own, seed=2)
        other = make()
        again = hvd.compress_fsdp(other, ROUTES)
        again.load_state_dict(saved)
        found = gradients(other, seed=2)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def case_names_are_those_without_wrappers():
    started()
    own, bare = sharded(wrapped=True), sharded()
    for each in (own, bare):
        hvd.compress_fsdp(each, {"blocks.*.up.weight": "int8", "blocks.*": "int4"})
    found, wanted = gradients(own), gradients(bare)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def case_a_schedule_of_some_parameters():
    started()
    own, exact = sharded(), sharded()
    hvd.compress_fsdp(own, {"*up*": "int4 | warmup(dense=1)", "*": "none"})
    found, wanted = gradients(own), gradients(exact)
    for (step, name), gradient in wanted.items():
        same = torch.equal(found[step, name], gradient)
        assert same == (step == 0 or "up" not in name or "bias" in name), (step, name)


def case_mistakes_are_told():
    started()
    for own in (sharded(), flat(use_orig_params=False)):
        with pytest.warns(UserWarning, match=r"'blokcs\.\*' matches no parameter"):
            hvd.compress_fsdp(own, {"blokcs.*": "int8", "table*": "fp16"})
        with pytest.raises(ValueError, match="'powersgd' cannot compress a reduce-scatter"):
            hvd.compress_fsdp(own, {"table*": "powersgd", "*": "int8"})
        with pytest.raises(SpecError, match="pattern is a string"):
            hvd.compress_fsdp(own, {1: "int8"})
    with pytest.raises(ValueError, match="gather='topk' loses"):
        hvd.compress_fsdp(sharded(), gather={"table*": "topk", "*": "int8"})
    own = sharded()
    spec = "int4" if hvd.rank() == 1 else "fp16"
    hvd.compress_fsdp(own, {"table*": spec, "*": "int8"})
    with pytest.raises(Mismatch) as told:
        gradients(own)
    assert r"rank 1: table*: int4, *: int8" in str(told.value)
    assert len(set(hvd.allgather_object(str(told.value)))) == 1


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_fsdp_routes(run_case, case):
    run_case(case, "gloo", 4 if case is case_hsdp else 2)
