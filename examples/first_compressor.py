"""One compressor, chosen by name: the smallest whole program.

ringlet run -np 2 python examples/first_compressor.py "int4 | ef"
"""

import sys

import torch

import ringlet.torch as hvd


def main():
    spec = sys.argv[1] if len(sys.argv) > 1 else "int4 | ef"
    hvd.init()
    torch.manual_seed(0)
    data = torch.randn(2048, 256)
    labels = torch.nn.Linear(256, 10)(data).argmax(1)  # what is to be learnt
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2 * hvd.size()),
        named_parameters=model.named_parameters(),
        compression=spec,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    own = torch.arange(hvd.rank(), len(data), hvd.size())  # each rank has data of its own
    for _ in range(100):
        batch = own[torch.randint(len(own), (64,))]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data[batch]), labels[batch]).backward()
        optimizer.step()
    accuracy = (model(data).argmax(1) == labels).double().mean().item()
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        print(f"accuracy {100 * accuracy:.1f} % with {spec}")
        print(f"{hvd.stats().ratio:.1f} times fewer bytes sent")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
