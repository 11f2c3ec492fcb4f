"""Documents that have to keep up with the code."""

import re
from pathlib import Path

from ringlet.ring.variables import VARIABLES

ROOT = Path(__file__).parents[1]
_READ = re.compile(r'RINGLET_[A-Z_]*[A-Z]|(?:_read|given)\(env, "([A-Z_]+)"')
_INTERNAL = {"RINGLET_LAUNCHER_SECRET"}  # between a launcher and its wrappers


def test_every_environment_variable_is_documented():
    text = (ROOT / "docs" / "configuration.md").read_text()
    # "`RINGLET_AUTOTUNE_LOG`, `_WARMUP_SAMPLES`" names two.
    told = set(re.findall(r"RINGLET_[A-Z_]*[A-Z]", text))
    told |= {"RINGLET_AUTOTUNE" + rest for rest in re.findall(r"`(_[A-Z_]+)`", text)}
    told |= {"RINGLET_" + name for name in re.findall(r"HOROVOD_([A-Z_]*[A-Z])", text)}
    read = set()
    for folder in ("ring", "fusion", "compressors", "frameworks"):
        for path in (ROOT / folder).rglob("*.py"):
            for match in _READ.finditer(path.read_text()):
                read.add("RINGLET_" + match[1] if match[1] else match[0])
    assert "RINGLET_FUSION_THRESHOLD" in read
    assert read - _INTERNAL - told == set()
    # What init compares names with, lest it take one that is read for a slip.
    assert read - VARIABLES.keys() == set()
    assert VARIABLES.keys() - _INTERNAL - told == set()
