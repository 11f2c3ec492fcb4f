"""Train the digits example uncompressed and with three compressors, and compare.

    make demo

Ends with exit code 1 if a run loses more than a point of accuracy against the uncompressed one, or
if its replicas differ.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SPECS = ["none", "fp16", "int8 | ef", "topk(ratio=0.01) | ef"]
EXAMPLE = Path(__file__).with_name("pytorch_digits.py")


def run(spec, workers, epochs, results):
    """Run the example with ``spec``; return its summary."""
    path = Path(results) / "summary.json"
    path.unlink(missing_ok=True)
    script = [sys.executable, str(EXAMPLE), "--compression", spec, "--json", str(path)]
    launcher = [sys.executable, "-m", "ringlet", "run", "-np", str(workers)]
    subprocess.run([*launcher, *script, "--epochs", str(epochs)], check=True)
    return json.loads(path.read_text())


def print_table(runs):
    heads = "compression", "accuracy", "replicas", "sent/rank", "ratio", "compress", "communicate"
    heads = (*heads, "decompress", "train")
    rows = [
        (
            r["compression"],
            f"{r['accuracy']:.2f} %",
            "bit-equal" if r["replicas_equal"] else "DIFFER",
            f"{r['wire_bytes'] / 1e6:.1f} MB",
            f"{r['ratio']:.1f}",
            f"{r['compress_s']:.2f} s",
            f"{r['communicate_s']:.2f} s",
            f"{r['decompress_s']:.2f} s",
            f"{r['seconds']:.2f} s",
        )
        for r in runs
    ]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", type=int, default=4, metavar="N", help="workers, default 4")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="ringlet-demo-") as results:
        for spec in SPECS:
            print(f"\n--- compression: {spec}", flush=True)
            runs.append(run(spec, args.np, args.epochs, results))
    print()
    print_table(runs)
    print(
        "\nOn one machine there is no network to save: compression pays where communicating takes "
        "long,\non links of 1 to 25 Gbit/s and slower."
    )
    floor = runs[0]["accuracy"] - 1.0
    failed = [r["compression"] for r in runs if r["accuracy"] < floor or not r["replicas_equal"]]
    if failed:
        sys.exit(f"lost more than a point of accuracy, or replicas differ: {', '.join(failed)}")


if __name__ == "__main__":
    main()
