"""A compressor for each layer: by patterns of names, and changed while training goes on.

ringlet run -np 2 python examples/layer_routes.py
"""

import torch

import ringlet.torch as hvd

ROUTES = {
    "*.bias": "none",  # small and sensitive; the first pattern that fits counts
    "head.*": "fp16",
    "*": "topk(ratio=0.02) | ef",
}
LATER = ROUTES | {"*": "int8 | ef"}  # less is thrown away once the large steps are made


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(128, 512)
        self.head = torch.nn.Linear(512, 128)

    def forward(self, x):
        return self.head(self.body(x).relu())


def main():
    hvd.init()
    torch.manual_seed(0)
    model, target = Net(), torch.randn(128, 128) / 12
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        model.named_parameters(),
        compression=ROUTES,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1 + hvd.rank())  # data of each rank's own
    for step in range(120):
        if step == 60:
            before = hvd.stats()
            optimizer.set_compression(LATER)  # on all ranks, between two steps
            hvd.reset_stats()
        x = torch.randn(64, 128)
        optimizer.zero_grad()
        loss = (model(x) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0 and step % 30 == 29:
            print(f"step {step + 1:3d}  loss {mean:.4f}")
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        print(f"times fewer bytes: {before.ratio:.1f} at first, {hvd.stats().ratio:.1f} later")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
