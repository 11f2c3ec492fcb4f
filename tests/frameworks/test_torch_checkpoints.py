"""The recipes of docs/checkpoints.md, in loops that call them as the libraries do.

`make test-huggingface` runs them in the libraries themselves (test_interop.py).
"""

from __future__ import annotations

import tempfile
import types
from pathlib import Path

import pytest
import torch
from checkpoint_recipes import recipe
from torch.nn.parallel import DistributedDataParallel
from torch_group import started

import ringlet.torch as hvd

pytestmark = pytest.mark.preloaded("torch")

SPEC = "topk(ratio=0.05) | ef"


def wrapped():
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 8))
    return DistributedDataParallel(own)


def train(model, first, last):
    """Return the parameters after steps of plain SGD."""
    for step in range(first, last):
        draw = torch.Generator().manual_seed(10 * step + hvd.rank())
        model.zero_grad()
        model(torch.randn(6, 8, generator=draw)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def shared_folder():
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))


def same_as_without_a_break(run):
    """``run(folder, begin, end)`` trains, from a checkpoint unless ``begin`` is 0."""
    folder = shared_folder()
    straight = run(folder, 0, 6)
    run(folder, 0, 3)
    hvd.barrier()
    assert torch.equal(run(folder, 3, 6), straight)


def case_trainer():
    started()
    made = recipe("class Compression(TrainerCallback)", TrainerCallback=object)

    def run(folder, begin, end):
        model = wrapped()
        args = types.SimpleNamespace(output_dir=str(folder), process_index=hvd.rank())
        state = types.SimpleNamespace(global_step=begin)
        callback = made["Compression"](SPEC)
        callback.trainer = types.SimpleNamespace(model_wrapped=model)
        kept = folder / f"checkpoint-{begin}" / "model.pt"
        if begin:
            model.load_state_dict(torch.load(kept))
        callback.on_train_begin(args, state, None)
        final = train(model, begin, end)
        state.global_step = end
        callback.on_save(args, state, None)
        if hvd.rank() == 0:
            torch.save(model.state_dict(), folder / f"checkpoint-{end}" / "model.pt")
        return final

    same_as_without_a_break(run)


def case_accelerate():
    started()
    made = recipe("def save(accelerator")

    class Accelerator:
        """Saves and loads the model, and nothing else."""

        def __init__(self, model):
            self.model, self.process_index = model, hvd.rank()

        def save_state(self, folder):
            if hvd.rank() == 0:
                torch.save(self.model.state_dict(), Path(folder) / "model.pt")

        def load_state(self, folder):
            self.model.load_state_dict(torch.load(Path(folder) / "model.pt"))

    def run(folder, begin, end):
        model = wrapped()
        state, hook = hvd.ddp_hook(SPEC, model.named_parameters())
        model.register_comm_hook(state, hook)
        accelerator = Accelerator(model)
        if begin:
            made["load"](accelerator, state, str(folder))
        final = train(model, begin, end)
        made["save"](accelerator, state, str(folder))
        return final

    same_as_without_a_break(run)


def case_lightning():
    started()
    made = recipe("class Compression(Callback)", Callback=object)

    def run(folder, begin, end):
        model = wrapped()
        trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(model=model))
        callback = made["Compression"](SPEC)
        if begin:
            checkpoint = torch.load(folder / "last.ckpt")  # weights_only, as is the default
            model.load_state_dict(checkpoint["model"])
            callback.on_load_checkpoint(trainer, model, checkpoint)
        callback.on_train_start(trainer, model)
        final = train(model, begin, end)
        checkpoint = {"model": model.state_dict()}
        callback.on_save_checkpoint(trainer, model, checkpoint)
        if hvd.rank() == 0:
            torch.save(checkpoint, folder / "last.ckpt")
        return final

    same_as_without_a_break(run)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_recipe(run_case, case):
    run_case(case, "gloo", 2)
