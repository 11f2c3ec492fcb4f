"""The wire format is frozen: a change of any byte shows here, and must be meant.

python tests/compressors/test_wire.py     # writes the fixtures of compressors that have none

Where bytes are to change, WIRE_VERSION in compressors/core/payload.py is raised first: this file as
a program then writes all fixtures anew, of that version. It overwrites none of the same version.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ringlet.compressors import Context, Modifier, parse
from ringlet.compressors.core.payload import WIRE_VERSION
from ringlet.compressors.testing.tools.built_in import every_spec

FIXTURES = Path(__file__).with_name("wire.json")
RECORD = json.loads(FIXTURES.read_text())
FROZEN = RECORD["payloads"]


def wanted():
    """Return the specs that have fixtures, and those of compressors that are in none of them."""
    every = {spec: parse(spec) for spec in every_spec(FROZEN)}
    alone = [spec for spec, c in every.items() if not isinstance(c, Modifier)]
    sent = [spec for spec in alone if every[spec].traits().combine != "rounds"]
    return [*FROZEN, *(spec for spec in sent if spec not in FROZEN)]


def payload(spec):
    """Return the arrays that 75 fixed values become at step 3 of rank 1, as text."""
    steps = np.arange(75, dtype=np.float32)
    x = (np.sin(steps * np.float32(1.7)) * (1 + steps % 7)).astype(np.float32)
    x = (np.round(x * 1024) / 1024).astype(np.float32)  # the same on every machine's libm
    ctx = Context(name="layer.weight", shape=(75,), numel=75, step=3, rank=1, size=4, seed=5)
    arrays = parse(spec).compress(x, ctx)
    return {name: [a.dtype.name, a.tobytes().hex()] for name, a in sorted(arrays.items())}


def complaint(spec, made, record, version):
    """Return what is wrong with the bytes of a spec, if anything is."""
    if version != record["version"]:
        return (
            f"the payloads on record are of wire version {record['version']}, WIRE_VERSION is "
            f"{version}: run this file as a program"
        )
    if made != record["payloads"][spec]:
        return (
            f"the payload of {spec!r} has changed, and WIRE_VERSION is {version} as before: ranks "
            "with this Ringlet and others would decode each other's wrongly. Undo the change, or "
            "raise WIRE_VERSION in compressors/core/payload.py and run this file as a program"
        )
    return None


@pytest.mark.parametrize("spec", FROZEN)
def test_payloads_are_the_ones_on_record(spec):
    told = complaint(spec, payload(spec), RECORD, WIRE_VERSION)
    assert told is None, told


def test_bytes_that_change_without_the_version_are_found():
    (spec, kept), *_ = FROZEN.items()
    record = {"version": 7, "payloads": {spec: kept}}
    assert complaint(spec, kept, record, 7) is None
    changed = {name: [dtype, text[:-1] + "x"] for name, (dtype, text) in kept.items()}
    assert "has changed, and WIRE_VERSION is 7 as before" in complaint(spec, changed, record, 7)
    assert "on record are of wire version 7, WIRE_VERSION is 8" in complaint(spec, kept, record, 8)


def test_every_compressor_has_its_payload_on_record():
    assert wanted() == list(FROZEN), "run this file as a program"


if __name__ == "__main__":
    kept = FROZEN if RECORD["version"] == WIRE_VERSION else {}
    made = {spec: kept.get(spec) or payload(spec) for spec in wanted()}
    text = json.dumps({"version": WIRE_VERSION, "payloads": made}, indent=1)
    FIXTURES.write_text(text + "\n")
