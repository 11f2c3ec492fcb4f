"""One rank of a job of other people's trainers with our hook: ``accelerate``, ``trainer`` or
``lightning``. Prints what it found, and ends with an error unless ranks agree and the loss falls.
"""

import hashlib
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ringlet.torch as hvd

calls = []


def counted_hook():
    state, hook = hvd.ddp_hook("topk(ratio=0.1) | ef")

    def counting(state, bucket):
        calls.append(bucket.index())
        return hook(state, bucket)

    return state, counting


def dataset():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=draw)
    return TensorDataset(x, x @ torch.randn(64, 1, generator=draw))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))


def finish(model, losses):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(weights).hexdigest())
    assert calls, "the hook was never called"
    assert len(digests) == 2, digests
    assert len(set(digests)) == 1, "ranks hold different parameters"
    assert losses[-1] < losses[0] / 2, losses
    print("DONE", flush=True)


def accelerate():
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(dataset(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.register_comm_hook(*counted_hook())
    losses = []
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    finish(model, losses)


def trainer():
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x=None, labels=None):
            return {"loss": mse_loss(self.net(x), labels)}

    class Compress(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            running.model_wrapped.register_comm_hook(*counted_hook())

    options = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=40, per_device_train_batch_size=16,
        report_to=[], learning_rate=1e-2, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in dataset()]
    running = Trainer(Model(), options, train_dataset=rows, callbacks=[Compress()])
    running.train()
    finish(running.model, [float(e["loss"]) for e in running.state.log_history if "loss" in e])


def lightning():
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            x, y = batch
            loss = mse_loss(self.net(x), y)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    class Compress(lightning.Callback):
        def on_train_start(self, trainer, module):
            trainer.strategy.model.register_comm_hook(*counted_hook())

    running = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Compress()],
    )  # fmt: skip
    model = Module()
    running.fit(model, DataLoader(dataset(), batch_size=16))
    finish(model, losses)


if __name__ == "__main__":
    {"accelerate": accelerate, "trainer": trainer, "lightning": lightning}[sys.argv[1]]()
