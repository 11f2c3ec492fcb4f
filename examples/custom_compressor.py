"""A compressor of one's own: sign with one scale per tensor, in ten lines, used by name.

ringlet run -np 2 python examples/custom_compressor.py
"""

import torch

import ringlet.torch as hvd
from ringlet.compressors import Compressor, register


@register("scaledsign")
class ScaledSign(Compressor):
    """Send one bit per entry and the mean magnitude (Karimireddy et al., ICML 2019)."""

    def compress(self, x, ctx):
        bits = ctx.xp.packbits(x >= 0)
        return {"bits": bits, "scale": abs(x).sum(keepdims=True) / max(x.size, 1)}

    def decompress(self, payload, out, ctx):
        positive = ctx.xp.unpackbits(payload["bits"], count=out.size)
        out[:] = (positive * 2.0 - 1.0) * payload["scale"]


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())  # every rank draws data of its own
    target = torch.linspace(-1, 1, 64)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="scaledsign | ef",  # by its name; error feedback comes with the contract
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(201):
        x = torch.randn(32, 64)
        loss = (model(x) - x * target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0 and step % 50 == 0:
            print(f"step {step:3d}  loss {mean_loss:.4f}")
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        print(f"replicas bit-equal: {equal}; {hvd.stats().ratio:.1f} times fewer bytes sent")
    hvd.shutdown()


if __name__ == "__main__":
    main()
