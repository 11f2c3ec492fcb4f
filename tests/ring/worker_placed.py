"""A worker as engines have them: calls come, each as a rank of another job, in a thread."""

import atexit
import contextlib
import io
import logging
import os
import pickle
import platform
import sys
import threading

from ringlet.job.placed_call import account_of


def train():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    seen = tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    assert os.environ["RINGLET_LOCAL_RANK"] == str(hvd.local_rank())
    assert os.environ["RINGLET_CROSS_RANK"] == str(hvd.cross_rank())
    assert os.environ["RINGLET_CROSS_SIZE"] == str(hvd.cross_size())
    assert os.environ["RINGLET_HOSTNAME"] == os.environ["HOROVOD_HOSTNAME"] == platform.node()
    assert os.environ["HOROVOD_RANK"] == str(hvd.rank())
    os.environ["LEFT_BEHIND"] = "1"
    return {
        "sum": float(total[0]),
        "place": place,
        "across": (hvd.cross_rank(), hvd.cross_size()),
        "mine": os.environ.get("MINE"),
        "torch": seen,
    }


def raise_on_one():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("the data of rank 1 are bad")
    hvd.allreduce(torch.ones(4), name="one that never ends")


def exit_on_one():
    if os.environ["RINGLET_RANK"] == "2":
        sys.exit(3)
    train()


CALLS = {
    "train": train,
    "raise": raise_on_one,
    "exit": exit_on_one,
    "exit well": lambda: sys.exit(0),
    "lock": threading.Lock,
}


HOOKS = []
register, unregister = atexit.register, atexit.unregister


def note(hook, *args, **kwargs):
    if hook.__module__.startswith("ringlet"):
        HOOKS.append(hook)
    return register(hook, *args, **kwargs)


def forget(hook):
    HOOKS[:] = [other for other in HOOKS if other != hook]
    unregister(hook)


def state():
    own = logging.getLogger("ringlet")
    return {
        "environment": dict(os.environ),
        "excepthook": sys.excepthook,
        "exit": sys.exit,
        "exit hooks": list(HOOKS),
        "log": (own.level, list(own.handlers)),
    }


def main():
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    sys.stdout = io.StringIO()
    atexit.register, atexit.unregister = note, forget
    import ringlet.torch  # noqa: F401  # what importing it does is nobody's call

    while True:
        try:
            what, ticket = pickle.load(calls)
        except EOFError:
            return
        before, accounts = state(), []

        def call(what=what, ticket=ticket, accounts=accounts):
            accounts.append(account_of(ticket, CALLS[what], (), {}))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        after = state()
        changed = [name for name in before if before[name] != after[name]]
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((accounts[0], changed), answers)
            answers.flush()


if __name__ == "__main__":
    main()
