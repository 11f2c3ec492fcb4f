"""Real operations at random, over any transport: ``ringlet run -np 3 python worker_fuzz.py``.

All ranks draw what happens from one seed, and each knows what it must get: sums, rows, or an error.
When they submit, and in which order, each draws for itself. Prints a line on rank 0; a violation is
an AssertionError.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np

from ringlet.compressors import Compressor, Context, Traits, parse, register
from ringlet.fusion import CompressionFailed, Engine, Limits, Request, StepAbandoned
from ringlet.fusion.requests.series import prototype_of
from ringlet.ring import Mismatch, ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.rendezvous.connect import connect

WAIT = 60.0
SLOW = 5.0  # seconds; kernels compile in the first rounds
NAMES = [f"t{i}" for i in range(12)]
SPECS = ["none", "none", "none", "fp16", "int8", "powersgd"]
fault: dict[str, bool] = {}


@register("brittle_fuzz")
class Brittle(Compressor):
    """Sends values as they are, or raises."""

    def traits(self):
        return Traits(fixed_size=True, granularity=1)

    def layout(self, n):
        return parse("none").layout(n)

    def compress(self, x, ctx: Context):
        if fault.get("now"):
            raise KeyError("lost my keys")
        return {parse("none").layout(x.size)[0].name: x.copy()}

    def decompress(self, payload, out, ctx: Context):
        (out[:],) = payload.values()


class Fuzz:
    """One rank. ``shared`` is the same on all ranks, ``own`` decides about order and delays."""

    def __init__(self, comm, seed, capacity):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.shared, self.own = random.Random(seed), random.Random(seed * 1000 + comm.rank)
        limits = Limits(
            cache_capacity=capacity, fusion_threshold=self.shared.choice([256, 1 << 20])
        )
        self.engine = Engine(comm, open_control, limits)
        self.digest = hashlib.sha256()
        self.operations = self.errors = 0
        self.sets = {0: tuple(range(self.size))}
        self.groups = []
        self.joins, self.calls, self.prototypes = 0, {}, {}

    # -- what a rank gives, and must get ---------------------------------------------------------

    def value(self, rank, name, turn):
        return float((7 * rank + 3 * int(name.strip("tgw")) + turn) % 50)

    def requests(self, names, number, group=""):
        """Draw an operation for each of ``names``; rows differ between ranks where they may."""
        drawn = []
        for name in names:
            kind = self.shared.choice(["allreduce"] * 4 + ["allgather", "broadcast", "alltoall"])
            if group:
                kind = "allreduce"
            spec = self.shared.choice(SPECS) if kind == "allreduce" else "none"
            rows = [self.shared.choice([2, 2, 3]) for _ in range(self.size)]
            if kind in ("allreduce", "broadcast"):
                rows = [rows[0]] * self.size
            width = 400 if spec != "none" else self.shared.choice([1, 4])
            size = len(self.sets[number])
            split = [[self.shared.randint(0, 2) for _ in range(size)] for _ in range(self.size)]
            drawn.append((name, kind, spec, rows, width, split, number, group, len(names)))
        return drawn

    def request(self, drawn, rank):
        name, kind, spec, rows, width, split, number, group, count = drawn
        splits = tuple(split[rank]) if kind == "alltoall" else ()
        shape = (sum(splits) if splits else rows[rank], width)
        op = ReduceOp.SUM if spec == "none" else ReduceOp.AVERAGE
        root = 1 % len(self.sets[number])
        return Request(
            f"{spec}.{name}.{rows[0]}" if spec != "none" else name, kind, shape=shape, op=op,
            spec=spec, root=root if kind == "broadcast" else 0, process_set=number, splits=splits,
            group=group, group_size=count if group else 0,
        )  # fmt: skip

    def expected(self, drawn, turn, absent=()):
        name, kind, spec, rows, width, split, number, *_ = drawn
        ranks = self.sets[number]
        given = {r: 0.0 if r in absent else self.value(r, name, turn) for r in ranks}
        if kind == "allreduce":
            total = sum(given.values())
            return np.full(rows[0] * width, total if spec == "none" else total / len(ranks))
        if kind == "broadcast":
            return np.full(rows[0] * width, given[ranks[1 % len(ranks)]])
        if kind == "allgather":
            return np.concatenate([np.full(rows[r] * width, given[r]) for r in ranks])
        me = ranks.index(self.rank)
        return np.concatenate([np.full(split[r][me] * width, given[r]) for r in ranks])

    def pause(self):
        if self.own.random() < 0.15:
            time.sleep(self.own.random() * 0.01)

    # -- rounds ---------------------------------------------------------------------------------

    def operate(self, turn, number=0, absent=(), odd=None):
        """Several operations at once; one rank may ask for something odd."""
        names = self.shared.sample(NAMES, self.shared.randint(1, 8))
        cut = self.shared.randint(0, len(names)) if len(names) > 1 else 0
        if len(names) - cut == 1:
            cut = len(names)
        drawn = self.requests(names[:cut], number) + self.requests(names[cut:], number, "g")
        if absent:
            drawn = [d for d in drawn if d[1] == "allreduce"]
        plain = [each for each in drawn if each[2] == "none"]
        wrong = self.shared.choice(plain) if plain and odd is not None else None
        mode = self.shared.choice(["shape", "op"])
        if self.rank not in self.sets[number] or self.rank in absent:
            return
        items = []
        for each in drawn:
            request = self.request(each, self.rank)
            if each is wrong and self.rank == odd:
                kind = "barrier" if mode == "op" else request.kind
                shape = (*request.shape, 1) if mode == "shape" else request.shape
                request = replace(request, kind=kind, shape=shape, splits=request.splits)
            x = np.full(request.numel, self.value(self.rank, each[0], turn), np.float32)
            items.append((request, x, None, parse(request.spec)))
        alone = [i for i in items if not i[0].group]
        together = [i for i in items if i[0].group]
        handles = {}
        batches = [[item] for item in alone] + ([together] if together else [])
        self.own.shuffle(batches)
        for batch in batches:
            self.pause()
            for (request, *_), handle in zip(batch, self.engine.submit_all(batch), strict=True):
                handles[request.name] = handle
        refused = set()
        if wrong is not None:
            refused = {d[0] for d in drawn if d is wrong or (wrong[7] and d[7])}
        for each in drawn:
            self.operations += 1
            handle = handles[self.request(each, self.rank).name]
            if each[0] in refused:
                self.errors += 1
                try:
                    handle.wait(WAIT)
                except Mismatch as error:
                    self.digest.update(str(error).encode() if len(self.sets[number]) == self.size
                                       else b"")  # fmt: skip
                else:
                    raise AssertionError(f"{each}: no mismatch")
                continue
            found = handle.wait(WAIT)
            want = self.expected(each, turn, absent)
            assert found.shape == want.shape, (each, found.shape, want.shape)
            tolerance = 0.0 if each[2] == "none" else 0.5
            assert np.allclose(found, want, rtol=0, atol=tolerance), (turn, each, found, want)
            if number == 0 and each[1] != "alltoall" and not absent:
                self.digest.update(found.tobytes())

    def unnamed(self, turn, number=0, absent=()):
        """Calls without names, one of which differs on one rank: it fails, by name, everywhere."""
        since = f"join{self.joins}." if self.joins else ""
        drawn, first = [], self.calls.get(number, 0)
        for n in range(first, first + self.shared.randint(1, 30)):
            rows = (
                drawn[-1][1] if drawn and self.shared.random() < 0.7 else self.shared.choice([2, 3])
            )
            spec = self.shared.choice(["none", "none", "none", "fp16"])
            odd = self.shared.choice(self.sets[number]) if self.shared.random() < 0.05 else None
            drawn.append((n, rows, spec, None if absent else odd))
        self.calls[number] = first + len(drawn)
        if self.rank not in self.sets[number] or self.rank in absent:
            return
        handles = []
        by_name = self.own.random() < 0.2  # as adapters do where they cannot go the quick way
        for n, rows, spec, odd in drawn:
            if self.own.random() < 0.02:
                self.pause()
            key = number, since, rows, spec, odd == self.rank
            if key not in self.prototypes:
                request = Request(
                    f"u.noname.{since}0", shape=(rows + (odd == self.rank), 2), op=ReduceOp.SUM,
                    spec=spec, process_set=number,
                )  # fmt: skip
                self.prototypes[key] = prototype_of(request), parse(spec)
            prototype, compressor = self.prototypes[key]
            request = prototype.numbered(n)
            if by_name:
                request = replace(request)
            x = np.full(request.numel, self.value(self.rank, f"t{n}", turn), np.float32)
            handles.append(self.engine.submit(request, x, None, compressor))
        several = len(self.sets[number]) > 1
        for (n, rows, _, odd), handle in zip(drawn, handles, strict=True):
            self.operations += 1
            if odd is not None and several:
                self.errors += 1
                try:
                    handle.wait(WAIT)
                    told = ""
                except Mismatch as error:
                    told = str(error)
                assert f"u.noname.{since}{n}'" in told, (n, told)
                continue
            ranks = [r for r in self.sets[number] if r not in absent]
            want = sum(self.value(r, f"t{n}", turn) for r in ranks)
            found = handle.wait(WAIT)
            assert np.all(found == want), (turn, n, rows, found, want)
            assert handle.name == f"u.noname.{since}{n}"

    def mismatch(self, turn):
        """Something odd, caught; then the same names again."""
        self.operate(turn, odd=self.shared.randrange(self.size))

    def declare(self, turn):
        """A declared group."""
        spec = self.shared.choice(["none", "int8 | ef", "brittle_fuzz", "powersgd", "fp16"])
        names = [f"w{i}" for i in range(3)]
        requests = [Request(n, shape=(30, 40), spec=spec) for n in names]
        name = f"group {self.shared.randint(0, 1)} of {len(self.groups)}"
        group = self.engine.declare(name, requests, [parse(spec)] * 3, [{}, {}, {}])
        self.groups.append((group, spec))

    def step(self, turn, fails=None, absent=()):
        """A step of a declared group; the rank ``fails``, if any, gives it up in some way."""
        if not self.groups:
            return self.declare(turn)
        group, spec = self.shared.choice(self.groups[-3:])
        how = self.shared.choice(["abandon", "before", "raise"])
        times = self.shared.randint(1, 3)
        if self.rank in absent:
            return None
        if fails is not None:
            if how == "raise" and spec != "brittle_fuzz":
                how = "abandon"
            for _ in range(times):
                self.fail(group, how, self.rank == fails)
        x = [np.full(1200, self.value(self.rank, f"w{i}", turn), np.float32) for i in range(3)]
        order = list(range(3))
        self.own.shuffle(order)
        for i in order:
            self.pause()
            group.submit(f"w{i}", x[i])
        group.wait(WAIT)
        self.operations += 3
        for i in range(3):
            given = [0.0 if r in absent else self.value(r, f"w{i}", turn) for r in range(self.size)]
            want = sum(given) / self.size
            if not absent or "ef" not in spec:
                assert np.allclose(x[i], want, rtol=0, atol=1.0), (turn, spec, x[i][:3], want)
            if not absent:
                self.digest.update(x[i].tobytes())
        return None

    def fail(self, group, how, mine):
        self.errors += 1
        if mine and how in ("abandon", "before"):
            if how == "abandon":
                group.submit("w1", np.ones(1200, np.float32))
            self.pause()
            group.abandon("a test")
            return
        fault["now"] = mine
        for i in range(3):
            group.submit(f"w{i}", np.ones(1200, np.float32))
        try:
            group.wait(WAIT)
            raise AssertionError("the step did not fail")
        except (StepAbandoned, CompressionFailed):
            pass
        finally:
            fault["now"] = False

    def failing_step(self, turn):
        """A step that one rank gives up, up to three times in a row."""
        self.step(turn, fails=self.shared.randrange(self.size))

    def uneven(self, turn):
        """Some ranks run out of data before the others."""
        count = self.shared.randint(1, self.size - 1)
        absent = tuple(self.shared.sample(range(self.size), count))
        rounds = self.shared.randint(1, 3)
        among = [self.operate, self.unnamed, *([self.step] if self.groups else [])]
        actions = [self.shared.choice(among) for _ in range(rounds)]
        joining = threading.Thread(target=self.engine.join)
        if self.rank in absent:
            joining.start()
        for i, action in enumerate(actions):  # those who are absent draw what the others do
            action(turn + i, absent=absent)
        if self.rank not in absent:
            joining.start()
        joining.join(WAIT)
        assert not joining.is_alive(), "join() hangs"
        self.joins += 1
        self.calls.clear()

    def change_sets(self, turn):
        """Make a process set and use it, or remove one."""
        if len(self.sets) > 2:
            number = self.shared.choice([n for n in self.sets if n])
            self.engine.remove_process_set(number)
            del self.sets[number]
            return
        ranks = sorted(self.shared.sample(range(self.size), self.shared.randint(1, self.size)))
        number = self.engine.add_process_set(ranks)
        self.sets[number] = tuple(ranks)

    def in_a_set(self, turn):
        """Operations in a process set."""
        action = self.shared.choice([self.operate, self.unnamed])
        action(turn, number=self.shared.choice(sorted(self.sets)))

    def run(self, operations):
        actions = [self.operate, self.mismatch, self.step, self.failing_step, self.uneven,
                   self.change_sets, self.in_a_set, self.declare, self.unnamed]  # fmt: skip
        weights = [6, 4, 4, 3, 2, 1, 3, 1, 4]
        turn = done = 0
        while done < operations:
            turn += 1
            done += 4
            (action,) = self.shared.choices(actions, weights)
            start = time.perf_counter()
            action(turn)
            took = time.perf_counter() - start
            if took > SLOW:
                print(f"rank {self.rank}: {action.__name__} took {took:.1f} s", flush=True)
        digests = self.comm_digests()
        assert len(set(digests)) == 1, "ranks got different results"

    def comm_digests(self):
        own = np.frombuffer(self.digest.digest(), np.uint8).copy()
        request = Request("digests", "allgather", "uint8", (own.size,))
        found = self.engine.submit(request, own).wait(WAIT).tobytes()
        return [found[i : i + own.size] for i in range(0, len(found), own.size)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    comm = connect()
    start = time.perf_counter()
    capacity = random.Random(args.seed).choice([0, 3, 8, 4096])
    fuzz = Fuzz(comm, args.seed, capacity)
    fuzz.run(args.operations)
    fuzz.engine.shutdown()
    if comm.rank == 0:
        took = time.perf_counter() - start
        print(
            f"seed {args.seed}, {comm.size} ranks over {comm.base.name}: {fuzz.operations} "
            f"operations, {fuzz.errors} errors that were due, {took:.1f} s",
            flush=True,
        )
    comm.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
