"""Training that goes on when a rank is lost: what is committed is taken up again by those left.

ringlet run -np 3 --min-np 2 python examples/elastic_digits.py --lose 20
"""

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits

import ringlet.torch as hvd


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lose", type=int, default=-1, metavar="STEP", help="kill the last rank")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        compression="int8 | ef",
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0, lost=False)

    @hvd.elastic.run  # called again, from the last commit, when ranks are lost or come
    def train(state):
        if hvd.rank() == 0:
            print(f"from step {state.step} on {hvd.size()} ranks", flush=True)
        while state.step < args.steps:
            if state.step == args.lose and hvd.size() == 3 and hvd.rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            own = torch.arange(hvd.rank(), 1500, hvd.size())
            batch = own[torch.randint(len(own), (32,))]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(state)
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        print(f"accuracy {100 * accuracy:.1f} % on {hvd.size()} ranks")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
