"""What error feedback does: how far the sum of what was sent is from the sum of the gradients.

    python benchmarks/feedback.py            # prints the errors after the last step
    python benchmarks/feedback.py --save     # also writes benchmarks/results/feedback.json

Four simulated ranks have a gradient in common and noise of their own, anew in each of 300 steps.
The figure is |sum of results - sum of gradients| / |sum of gradients|, so 1 is as good as sending
nothing. The same seed gives the same figures on every machine.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from progress import each

from ringlet.compressors import parse
from ringlet.compressors.testing import simulate

RESULTS = Path(__file__).parent / "results"
SPECS = ("topk(ratio=0.01)", "topk(ratio=0.01) | ef", "int4", "int4 | ef", "onebit", "onebit | ef")
RANKS, ELEMENTS, STEPS, NOISE = 4, 20_000, 300, 1.0


def errors(spec):
    """Return the relative error of the sum after every tenth step."""
    compressor, rng = parse(spec), np.random.default_rng(0)
    common = rng.standard_normal(ELEMENTS, dtype=np.float32)
    states = [{} for _ in range(RANKS)]
    true, sent, found = np.zeros(ELEMENTS), np.zeros(ELEMENTS), []
    for step in range(STEPS):
        noise = NOISE * rng.standard_normal((RANKS, ELEMENTS), dtype=np.float32)
        gradients = list(common + noise)
        true += np.mean(gradients, axis=0)
        sent += simulate(compressor, gradients, states, step)[0]
        if step % 10 == 9:
            found.append(float(np.linalg.norm(sent - true) / np.linalg.norm(true)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    found = dict(zip(SPECS, each(errors, SPECS), strict=True))
    for spec, values in found.items():
        print(f"{spec:<24} {values[-1]:.4f} after {STEPS} steps")
    if options.save:
        about = f"{RANKS} simulated ranks, {ELEMENTS} elements, noise as large as the gradient"
        steps = list(range(10, STEPS + 1, 10))
        text = json.dumps({"about": about, "steps": steps, "errors": found}, indent=1)
        (RESULTS / "feedback.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
