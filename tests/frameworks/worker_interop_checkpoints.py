"""One rank of a job that goes on from a checkpoint that one of other people's trainers has written:
``accelerate``, ``trainer`` or ``lightning``, by the recipe of docs/checkpoints.md. It ends with an
error unless training goes on as if it had not stopped, which it does not without residuals.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ringlet.torch as hvd

sys.path.append(str(Path(__file__).parents[1]))
from checkpoint_recipes import recipe

SPEC, HALF, END = "topk(ratio=0.05) | ef", 4, 8  # steps; two epochs


def dataset():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8 * 2 * HALF, 64, generator=draw)  # batches of 8 on two ranks
    return TensorDataset(x, x @ torch.randn(64, 1, generator=draw))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def shared_folder():
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))


def accelerate(begin, end, folder):
    from accelerate import Accelerator

    made = recipe("def save(accelerator")
    accelerator, model = Accelerator(cpu=True), network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(dataset(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state, hook = hvd.ddp_hook(SPEC, model.named_parameters())
    model.register_comm_hook(state, hook)
    if begin and any(folder.glob("ringlet.*.pt")):
        made["load"](accelerator, state, folder)
    elif begin:
        accelerator.load_state(folder)
    for _ in range(begin, end, HALF):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
    if end == HALF:
        made["save"](accelerator, state, folder)
    return weights(model)


def trainer(begin, end, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    made = recipe("class Compression(TrainerCallback)", TrainerCallback=TrainerCallback)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x=None, labels=None):
            return {"loss": mse_loss(self.net(x), labels)}

    options = TrainingArguments(
        str(folder), use_cpu=True, max_steps=end, per_device_train_batch_size=8, report_to=[],
        learning_rate=1e-2, lr_scheduler_type="constant", save_strategy="steps", save_steps=HALF,
        disable_tqdm=True,
    )  # fmt: skip
    rows, callback = [{"x": x, "labels": y} for x, y in dataset()], made["Compression"](SPEC)
    running = Trainer(Model(), options, train_dataset=rows, callbacks=[callback])
    callback.trainer = running
    running.train(resume_from_checkpoint=str(folder / f"checkpoint-{begin}") if begin else None)
    return weights(running.model)


def lightning(begin, end, folder):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    made = recipe("class Compression(Callback)", Callback=lightning.Callback)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            x, y = batch
            return mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    running = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=end // HALF, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[made["Compression"](SPEC)],
    )  # fmt: skip
    module, kept = Module(), str(folder / "last.ckpt")
    running.fit(module, DataLoader(dataset(), batch_size=8), ckpt_path=kept if begin else None)
    if end == HALF:
        running.save_checkpoint(kept)
    return weights(module)


def forget_residuals(folder):
    """Leave a checkpoint as the library alone would have written it."""
    if hvd.rank() == 0:
        for file in folder.rglob("ringlet.*.pt"):
            file.unlink()
        for file in folder.glob("last.ckpt"):
            checkpoint = torch.load(file)
            del checkpoint["ringlet"]
            torch.save(checkpoint, file)
    hvd.barrier()


def main(train):
    hvd.init()
    folder = shared_folder()
    straight = train(0, END, shared_folder())
    train(0, HALF, folder)
    hvd.barrier()
    assert torch.equal(train(HALF, END, folder), straight), "training has not gone on as it was"
    forget_residuals(folder)
    assert not torch.equal(train(HALF, END, folder), straight), "residuals make no difference"
    print("DONE", flush=True)


if __name__ == "__main__":
    main({"accelerate": accelerate, "trainer": trainer, "lightning": lightning}[sys.argv[1]])
