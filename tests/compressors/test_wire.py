"""The wire format is frozen: a change of any byte shows here, and must be meant.

python tests/compressors/test_wire.py     # writes the fixtures of compressors that have none
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ringlet.compressors import Context, Modifier, parse
from ringlet.compressors.testing.tools.built_in import every_spec

FIXTURES = Path(__file__).with_name("wire.json")
FROZEN = json.loads(FIXTURES.read_text())


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


@pytest.mark.parametrize("spec", FROZEN)
def test_payloads_are_the_ones_on_record(spec):
    assert payload(spec) == FROZEN[spec]


def test_every_compressor_has_its_payload_on_record():
    assert wanted() == list(FROZEN), "run this file as a program"


if __name__ == "__main__":
    text = json.dumps({spec: FROZEN.get(spec) or payload(spec) for spec in wanted()}, indent=1)
    FIXTURES.write_text(text + "\n")
