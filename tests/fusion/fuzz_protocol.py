"""Run the protocol's rules at random: ``python fuzz_protocol.py --rules 100000 --seed 1``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from protocol import World


def run(seed: int, rules: int) -> tuple[int, dict[str, int]]:
    """Run ``rules`` rules in worlds of 2 to 4 ranks; return how many, and what happened."""
    rng = random.Random(seed)
    totals: dict[str, int] = {}
    done = 0
    while done < rules:
        world = World(rng.randint(2, 4), rng.choice([0, 2, 3, 4, 64]))
        chosen = rng.choices(World.RULES, k=rng.choice([30, 100, 400]))
        for rule in chosen:
            rule(world, rng.choice)
        world.finish()
        done += len(chosen)
        for name, count in world.counts.items():
            totals[name] = totals.get(name, 0) + count
    return done, totals


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    start = time.perf_counter()
    done, totals = run(args.seed, args.rules)
    print(f"seed {args.seed}: {done} rules in {time.perf_counter() - start:.0f} s, {totals}")
