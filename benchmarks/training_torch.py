"""Training over slow links: DDP and its hooks beside Ringlet's compressors, step for step.

    python benchmarks/training_torch.py                # loopback, then 1 Gbit/s and 100 Mbit/s
    python benchmarks/training_torch.py --mbit 1000 --save    # also writes benchmarks/results/
    python benchmarks/training_torch.py --mbit 0 --steps 60   # long enough to compare quality
    python benchmarks/training_torch.py --mbit 100 --delay-ms 10   # hosts at two sites
    python benchmarks/training_torch.py --fsdp    # FSDP2, and what compress_fsdp makes of it
    python benchmarks/training_torch.py --fsdp1   # FSDP1, as well

Four ranks on four hosts (network namespaces; without root only loopback is measured) train a CNN of
10M parameters on digits, or a byte transformer. All contenders run in one job, a few steps each in
turn; a time is the slowest rank's, the figure the median over the turns. The floor trains without
any communication. Four ranks share this machine's cores, so codecs and backward compete.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import netns
import numpy as np
from progress import announce, follow

from ringlet.cli.progress import Progress

RESULTS = Path(__file__).parent / "results"
OURS = ["none", "fp16", "int4 | ef", "topk(ratio=0.01) | ef", "powersgd(rank=4) | ef"]
FLOOR, DDP = "no communication", "DDP"
HOOKS = ["DDP + fp16 hook", "DDP + PowerSGD hook"]
OUR_HOOK = "DDP + Ringlet's hook "  # behind which the spec stands
HOOKED = [OUR_HOOK + spec for spec in ("fp16", "int4 | ef", "powersgd(rank=4) | ef")]
CODED = {
    "FSDP1": ("int8", "int4"),
    "FSDP2": ("int8", "int8 gather int8", "int4 gather mxfp4"),
}
SHARDED = {kind: [kind, *(f"{kind} + {each}" for each in coded)] for kind, coded in CODED.items()}
TO_REACH = {1000: 1.2, 100: 1.4}  # times the floor, for the best of ours


def cnn():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 1900), nn.ReLU(), nn.Linear(1900, 10),
    )  # fmt: skip


def transformer():
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from pytorch_transformer import ByteTransformer

    return ByteTransformer(width=384)


class Digits:
    def __init__(self, batch):
        import torch
        from sklearn.datasets import load_digits

        self.batch = batch or 256
        digits = load_digits()
        self.images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
        self.labels = torch.tensor(digits.target)

    def loss(self, model, step, rank):
        from torch.nn.functional import cross_entropy

        rows = np.random.default_rng([step, rank]).integers(0, 1500, self.batch)
        return cross_entropy(model(self.images[rows]), self.labels[rows])

    def held_out(self, model):
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(self.images[1500:]), self.labels[1500:]).item()


class Bytes:
    def __init__(self, batch):
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        import pytorch_transformer as example

        self.example, self.rows = example, batch or 4
        self.train, self.test = example.load_text()

    def loss(self, model, step, rank):
        rng = np.random.default_rng([step, rank])
        return self.example.loss_of(model, *self.example.batch(self.train, self.rows, rng))

    def held_out(self, model):
        rng = np.random.default_rng(0)
        return self.example.loss_of(model, *self.example.batch(self.test, 64, rng)).item()


TASKS = {"cnn": (cnn, Digits), "bytes": (transformer, Bytes)}


def contender(name, make, lr):
    """Return (model to call, its parameters' module, optimizer)."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    import ringlet.torch as hvd

    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == FLOOR:
        return model, model, optimizer
    if name.startswith(OUR_HOOK):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(*hvd.ddp_hook(name.removeprefix(OUR_HOOK)))
        return wrapped, model, optimizer
    kind, _, coded = name.partition(" + ")
    if kind in CODED:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        parts = [part for part in model.children() if list(part.parameters())]
        if kind == "FSDP1":
            policy, cpu = ModuleWrapPolicy({type(part) for part in parts}), torch.device("cpu")
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
            )
        else:
            for part in [*parts, model]:
                fully_shard(part)
        if coded:
            spec, _, gather = coded.partition(" gather ")
            hvd.compress_fsdp(model, spec, gather=gather or None)
        return model, model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == DDP or name in HOOKS:
        # Over gloo, torch's PowerSGD hook hangs when several buckets wait in gloo's two threads.
        cap = 10_000 if name == HOOKS[1] else 25
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)
        if name == HOOKS[0]:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == HOOKS[1]:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped, model, optimizer
    named = model.named_parameters()
    return model, model, hvd.DistributedOptimizer(optimizer, named, compression=name)


def run_rank(options):
    import torch
    import torch.distributed as dist

    import ringlet.torch as hvd

    runtime = hvd.init()
    torch.set_num_threads(1)
    place = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    dist.init_process_group("gloo", f"file://{place}/store", rank=hvd.rank(), world_size=hvd.size())
    make, task = TASKS[options.task]
    task = task(options.batch)
    built = {name: contender(name, make, options.lr) for name in options.contenders}
    times = {name: [] for name in built}
    for turn in range(options.turns + 1):
        if hvd.rank() == 0:
            announce(f"turn {turn} of {options.turns}")
        for name, (call, _, optimizer) in built.items():
            hvd.barrier()
            start = time.perf_counter()
            for step in range(turn * options.steps, (turn + 1) * options.steps):
                optimizer.zero_grad()
                task.loss(call, step, hvd.rank()).backward()
                optimizer.step()
            spent = torch.tensor([(time.perf_counter() - start) / options.steps])
            slowest = hvd.allreduce(spent, op=hvd.Max, name="slowest").item()
            if turn:  # the first turn compiles, connects, and warms PowerSGD's hook up
                times[name].append(slowest)
    found = {}
    for name, (_, model, _) in built.items():
        with torch.no_grad():
            found[name] = {"seconds": times[name], "held_out": task.held_out(model)}
    if hvd.rank() == 0:
        parameters = sum(p.numel() for p in next(iter(built.values()))[1].parameters())
        told = {"found": found, "parameters": parameters, "transport": runtime.transport}
        Path(options.output).write_text(json.dumps(told))
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


def measure(mbit, options, progress):
    """Run the job, on shaped hosts unless ``mbit`` is 0; return what rank 0 reports."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "found.json")
        rank = [sys.executable, str(Path(__file__).resolve()), "--rank", "--output", output]
        rank += ["--task", options.task, "--turns", str(options.turns), "--lr", str(options.lr)]
        rank += [
            "--batch",
            str(options.batch),
            "--steps",
            str(options.steps),
            "--contenders",
            *options.contenders,
        ]
        run = [sys.executable, "-m", "ringlet", "run", "--no-prefix", "--transport", "gloo"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if not mbit:
            command = [*run, "-np", str(options.hosts), *rank]
            follow(progress, "loopback", command, env=environment)
        else:
            with netns.Hosts(options.hosts, mbit, delay=options.delay_ms / 1e3) as hosts:
                where = ["-H", hosts.slots(1), "--rsh", hosts.rsh]
                where += ["--network-interface", netns.INTERFACE]
                where += ["--env", f"GLOO_SOCKET_IFNAME={netns.INTERFACE}"]
                command = hosts.command(0, [*run, *where, *rank])
                follow(progress, f"{mbit} Mbit/s", command, env=environment)
        return json.loads(Path(output).read_text())


def table(mbit, delay_ms, told):
    found = told["found"]
    medians = {name: statistics.median(of["seconds"]) for name, of in found.items()}
    base = next((kind for kind in CODED if kind in medians), DDP)
    floor, peer = medians.get(FLOOR, float("nan")), medians.get(base, float("nan"))
    where = f"{mbit} Mbit/s" if mbit else "loopback"
    where += f", {delay_ms:g} ms from host to host" if mbit and delay_ms else ""
    yield f"### {where}, {told['parameters'] / 1e6:.1f}M parameters"
    yield ""
    yield f"| | ms a step | x the floor | x faster than {base} | held-out loss |"
    yield "|---|---|---|---|---|"
    for name, median in medians.items():
        shown = name.replace("|", "\\|")  # which would end a table's cell
        ours = "" if name == FLOOR or name.startswith((DDP, *CODED)) else "Ringlet "
        yield (
            f"| {ours}{shown} | {median * 1e3:.0f} | {median / floor:.2f} | {peer / median:.2f} "
            f"| {found[name]['held_out']:.3f} |"
        )
    yield ""
    best = min((n for n in medians if n in OURS), key=lambda n: medians[n], default=None)
    if best and mbit in TO_REACH and not delay_ms:
        ratio = medians[best] / floor
        verdict = "reached" if ratio <= TO_REACH[mbit] else "not reached"
        yield f"Best of ours: {best}, {ratio:.2f} x the floor ({TO_REACH[mbit]} is {verdict})."
        rivals = [medians[n] for n in (DDP, *HOOKS) if n in medians]
        if rivals:
            ratio = min(rivals) / medians[best]
            yield f"The best of DDP and its hooks takes {ratio:.2f} x its time."
        yield ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="0: loopback")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from host to host, one way")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--task", choices=list(TASKS), default="cnn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="a turn")
    parser.add_argument("--batch", type=int, default=0, help="a rank's (cnn: 256, bytes: 4)")
    parser.add_argument("--lr", type=float, default=0.02)
    for flag, kind in ("--fsdp", "FSDP2"), ("--fsdp1", "FSDP1"):
        told = f"compare {kind}'s ways, not DDP's"
        parser.add_argument(flag, dest="kind", action="store_const", const=kind, help=told)
    parser.add_argument("--contenders", nargs="+", help="by default all of DDP, or of FSDP")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = [FLOOR, *SHARDED.get(options.kind, [DDP, *HOOKS, *OURS, *HOOKED])]
    options.contenders = options.contenders or every
    if options.rank:
        return run_rank(options)
    if any(options.mbit) and (why := netns.unavailable(copied=options.delay_ms > 0)):
        print(f"shaped links skipped: {why}")
        options.mbit = [mbit for mbit in options.mbit if not mbit] or [0]
    lines = [
        f"{options.hosts} ranks, {options.task}, {options.turns} turns of {options.steps} steps; "
        f"{os.cpu_count()} cores; {date.today()}",
        "",
    ]
    with Progress(len(options.mbit) * (options.turns + 1)) as progress:
        for mbit in options.mbit:
            lines += table(mbit, options.delay_ms, measure(mbit, options, progress))
    print("\n".join(lines))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        title = "# Training over shaped links (benchmarks/training_torch.py)\n\n"
        far = "_far" if options.delay_ms else ""
        sharded = f"_{options.kind.lower()}" if options.kind else ""
        path = RESULTS / f"training_torch_{options.task}{sharded}{far}.md"
        path.write_text(title + "\n".join(lines).rstrip() + "\n")
    return None


if __name__ == "__main__":
    main()
