"""Measure every compressor and write the table of docs/compressors.md.

    python benchmarks/compressor_table.py            # prints
    python benchmarks/compressor_table.py --write    # replaces the table in docs/compressors.md
    python benchmarks/compressor_table.py --add      # measures what has no row there yet

Error is ||C(x) - x||^2 / ||x||^2 of one call on a million elements; for compressors that exchange
in rounds, of what four ranks have of their mean. Speed is GB/s of float32 input while encoding.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from progress import each

from ringlet.compressors import Context, Workspace, lookup, parse
from ringlet.compressors.base.contract import empty_payload, encoded
from ringlet.compressors.core.threads import threads
from ringlet.compressors.testing import simulate
from ringlet.compressors.testing.tools.built_in import every_spec

DOCS = Path(__file__).parents[1] / "docs" / "compressors.md"
BEGIN, END = "<!-- table begins -->", "<!-- table ends -->"
SPECS = [
    "fp16", "bf16", "fp8", "lossless", "int8", "int4", "int4(stochastic=True)", "mxfp8",
    "mxfp8(format='e5m2')", "mxfp6", "mxfp6(format='e3m2')", "mxfp4", "mxfp4(stochastic=True)",
    "nvfp4", "maxnorm(bits=2)", "minmax", "minmax(bits=2)", "qsgd",
    "qsgd(bits=4)", "natural", "terngrad", "onebit", "signsgd",
    "shared_int", "topk", "topk | int8", "topk_sampled", "sidco", "block_topk",
    "block_topk(bits=2)", "randomk", "threshold(value=2.5)", "powersgd", "acpsgd",
    "int4 | hadamard", "qsgd(bits=4) | scaled", "topk | ef", "topk | ef21",
    "topk | momentum_correction", "int8 | server_ef",
]  # fmt: skip
UNMEASURED = ("none", "warmup", "min_size")  # which change no payload
N = 1 << 20


def distributions():
    rng = np.random.default_rng(0)
    spikes = rng.standard_normal(N) * (rng.random(N) < 0.01)
    drawn = [rng.standard_normal(N), rng.laplace(size=N), rng.standard_t(3, N), spikes]
    return [x.astype(np.float32) for x in drawn]


def context(x, state):
    side = int(np.sqrt(x.size))
    shape = (side, side) if side * side == x.size else x.shape
    fields = {"shape": shape, "numel": x.size, "state": state}
    return Context(**fields, workspace=Workspace())


def error(compressor, x):
    with np.errstate(all="ignore"):
        if compressor.traits().combine == "rounds":
            pieces = [np.roll(x, i) for i in range(4)]
            out, x = simulate(compressor, pieces, shape=(1024, 1024))[0], np.mean(pieces, axis=0)
        else:
            out = np.empty_like(x)
            payload = encoded(compressor, x, context(x, {}))
            compressor.decompress(payload, out, context(x, {}))
    wide = x.astype(np.float64)
    return float(np.square(out - wide).sum() / np.square(wide).sum())


def bits(compressor, x):
    if compressor.traits().combine == "rounds":
        sent = 0
        generator = compressor.exchange(x, np.empty_like(x), context(x, {}))
        try:
            item = next(generator)
            while True:
                sent += item.values.nbytes
                item = generator.send(item.values.copy())
        except StopIteration:
            return 8 * sent / x.size
    payload = encoded(compressor, x, context(x, {}))
    return 8 * sum(array.nbytes for array in payload.values()) / x.size


def speed(compressor):
    """Return GB/s of encoding 64 MiB, the median of five calls; None for rounds."""
    if compressor.traits().combine == "rounds":
        return None
    x = np.random.default_rng(1).standard_normal(1 << 24, dtype=np.float32)
    ctx = context(x, {})
    if compressor.traits().fixed_size:
        payload = empty_payload(compressor, x.size, ctx)

        def run():
            compressor.encode_into(x, payload, ctx)
    else:

        def run():
            compressor.compress(x, ctx)

    run()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return x.nbytes / statistics.median(times) / 1e9


def collective(traits):
    if traits.combine != "gather":
        return {"sum": "allreduce", "rounds": "allreduce, in rounds"}[traits.combine]
    shardable = traits.fixed_size and traits.granularity is not None
    return "scatter-reduce" if shardable else "all-gather"


def claims(traits):
    shown = [f"omega {traits.omega:.3g}"] if traits.omega is not None else []
    shown += [f"delta {traits.delta:.3g}"] if traits.delta is not None else []
    shown += ["remembers"] if traits.stateful else []
    return ", ".join(shown) or "-"


def papers(spec):
    names = [part.split("(")[0].strip() for part in spec.split("|")]
    return "; ".join(dict.fromkeys(lookup(name).paper for name in names)) or "-"


def number(value):
    if value == 0:
        return "0"
    return f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"


def head():
    heads = "spec | bits/element | combined by | claims | paper | GB/s | Gaussian | Laplace | t(3)"
    return [f"| {heads} | spikes |", "|---" * 10 + "|"]


def label(spec):
    return f"| `{spec.replace('|', chr(92) + '|')}` |"


def row(spec, inputs):
    compressor = parse(spec)
    traits, rate = compressor.traits(), speed(compressor)
    cells = [
        f"{bits(compressor, inputs[0]):.2f}",
        collective(traits),
        claims(traits),
        papers(spec),
        "-" if rate is None else f"{rate:.1f}",
        *(number(error(compressor, x)) for x in inputs),
    ]
    return " ".join([label(spec), " | ".join(cells), "|"])


def table(known):
    """Yield the lines of the table; rows that are ``known`` are not measured again."""
    yield from head()
    inputs = distributions()
    specs = every_spec(SPECS, UNMEASURED)
    old = {spec: line for line in known for spec in specs if line.startswith(label(spec))}
    measured = each(lambda spec: row(spec, inputs), [spec for spec in specs if spec not in old])
    for spec in specs:
        yield old[spec] if spec in old else next(measured)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/compressors.md")
    parser.add_argument("--add", action="store_true", help="only what docs/compressors.md lacks")
    args = parser.parse_args()
    text = DOCS.read_text()
    before, inside, after = text.split(BEGIN)[0], text.split(BEGIN)[1], text.split(END)[1]
    note = f"Measured with {threads()} threads on a shared 2-core machine."
    known = inside.split(END)[0].splitlines() if args.add else []
    lines = []
    for line in table(known):
        print(line, flush=True)
        lines.append(line)
    if args.write or args.add:
        note = known[-1] if known else note
        DOCS.write_text(before + "\n".join([BEGIN, *lines, "", note, END]) + after)


if __name__ == "__main__":
    main()
