"""One semantics: the gradients, specs and settings of its matrix, the hashes, and those on record.

Plain NumPy: MXNet's environment computes its columns from the same (tests/mxnet), and both hold
what they find against one record. Whoever changes payloads on purpose writes that anew::

    python tests/frameworks/test_one_semantics.py --write
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

SIZE, STEPS = 3, 2
SHAPES = {"a": (50, 60), "b": (7,), "c": (9000,), "d": (40, 5, 20)}
DECODED = (
    "int8 | ef", "int4 | hadamard | ef", "onebit | ef", "natural", "topk(ratio=0.05) | int8 | ef",
    "randomk(ratio=0.1)", "block_topk(ratio=0.05, bits=8) | ef",
)  # fmt: skip
# Sums on the wire: of more than two ranks in the transport's order.
SUMMED = ("none", "fp16", "powersgd(rank=2) | ef")
SPECS = (*DECODED, *SUMMED)
SETTINGS = {  # transport, fusion threshold in bytes, streams, torch's buckets in bytes
    "gloo": ("gloo", 1 << 26, 4, 1 << 24),
    "gloo, small buckets, one stream": ("gloo", 1 << 13, 1, 1 << 12),
    "gloo, one tensor a bucket": ("gloo", 1, 3, 1),
    "mpi": ("mpi", 1 << 15, 2, 1 << 15),
    "local": ("local", 1 << 26, 1, 1 << 24),
}
# Columns that cannot have every spec, and the specs that they have.
ONLY = {
    # A hook's tensors have its label in their names, by which random numbers are drawn; and they
    # lie elsewhere in a buffer where sums are made.
    "ddp": (
        "int8 | ef", "onebit | ef", "topk(ratio=0.05) | int8 | ef",
        "block_topk(ratio=0.05, bits=8) | ef",
    ),
    # FSDP2 reduces to the rank that has a parameter: what travels is of fixed size and decoded,
    # without a second stage. Its names are those of parts of modules.
    "fsdp2": ("int8 | ef", "onebit | ef", "block_topk(ratio=0.05, bits=8) | ef"),
    # A gradient at a time: in a buffer of its own.
    "mxnet_module": DECODED,
}  # fmt: skip
# Columns that compile a program for each spec. What an adapter hands in does not depend on how
# buckets are cut and sent: but for these settings each has a third of the specs, beside torch.
IN_TURN = ("tensorflow", "keras", "jax")
WHOLE = ("gloo", "local")
RECORD = Path(__file__).with_name("semantics.json")


def gradients(rank, step):
    """Return a rank's gradients of a step, by name: the same on every machine's libm."""
    numbers = np.random.default_rng([rank, step])
    return {
        name: (numbers.random(shape) - numbers.random(shape)).astype("float32")
        for name, shape in SHAPES.items()
    }


def has(column, spec, setting):
    """Whether a framework's column has a spec, in one of the SETTINGS."""
    if column in IN_TURN and setting not in WHOLE:
        turn = [*SETTINGS].index(setting) + SPECS.index(spec)
        return column == IN_TURN[turn % len(IN_TURN)]
    return spec in ONLY.get(column, SPECS)


def hash_of_results(steps):
    """Return the hash of what gradients are reduced to: for each step arrays by name."""
    results = hashlib.blake2b(digest_size=6)
    for reduced in steps:
        for name in sorted(SHAPES):
            results.update((np.asarray(reduced[name]) + np.float32(0)).tobytes())  # no -0.0
    return results.hexdigest()


def hash_of_payloads(every):
    """Return the hash of what ranks sent, by rank; "-" where nothing was compressed.

    For each rank arrays' bytes by tensor, step, offset in the tensor and name in the payload. Where
    a tensor is cut does not count.
    """
    told = []
    for sent in every:
        whole = {}
        for name, step, offset, part in sorted(sent):
            parts = whole.setdefault((name, step), {})
            parts[part] = parts.get(part, b"") + sent[name, step, offset, part]
        told.append([(key, sorted(parts.items())) for key, parts in sorted(whole.items())])
    if not any(told):
        return "-"
    return hashlib.blake2b(repr(told).encode(), digest_size=6).hexdigest()


def record():
    """Return what is on record: a version; hashes of payloads, and of decoded results, by spec."""
    return json.loads(RECORD.read_text())


def complaint(what, spec, found, version):
    """Return what is wrong with hashes that a matrix has for a spec, if anything is.

    ``what`` is "payloads" or "results".
    """
    kept = record()
    if version != kept["version"]:
        return (
            f"the hashes on record are of wire version {kept['version']}, WIRE_VERSION is "
            f"{version}: run tests/frameworks/test_one_semantics.py --write"
        )
    if len(found) > 1:
        return f"the {what} of {spec!r} differ: {sorted(found)}"
    if found != {kept[what][spec]}:
        return (
            f"the {what} of {spec!r} are the same everywhere, {sorted(found)}, and not those on "
            f"record, {kept[what][spec]}, of the same WIRE_VERSION"
        )
    return None
