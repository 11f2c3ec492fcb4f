"""Documents that have to keep up with the code."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

from ringlet.compressors import lookup, parse
from ringlet.compressors.testing.tools.built_in import every_spec
from ringlet.ring.variables import VARIABLES

ROOT = Path(__file__).parents[1]
_READ = re.compile(r'RINGLET_[A-Z_]*[A-Z]|(?:_read|given)\(env, "([A-Z_]+)"')
UNMEASURED = ("none", "warmup", "min_size")  # which change no payload
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


def test_the_tables_of_variables_are_what_the_registry_says():
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    kept = (ROOT / "docs" / "configuration.md").read_text()
    assert reference["configuration"]() == kept, "run python docs/reference.py"
    assert not [n for n, v in VARIABLES.items() if not v.meaning and n not in _INTERNAL]


def test_the_table_of_compressors_has_all_of_them():
    rows = re.findall(
        r"^\| `(.+?)` \| [\d.]+ \|", (ROOT / "docs" / "compressors.md").read_text(), re.M
    )
    specs = [row.replace("\\|", "|") for row in rows]
    assert len(specs) > 30
    lacking = [spec for spec in every_spec(specs, UNMEASURED) if spec not in specs]
    assert not lacking, "run benchmarks/compressor_table.py --add"


def test_the_readme_names_compressors_that_there_are():
    text = (ROOT / "README.md").read_text().split("### Compressors")[1].split("\n###")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    assert len(cells) > 8
    for spec in re.findall(r"`([^`]+)`", " ".join(cells)):
        spec = spec.replace("\\|", "|").removeprefix("... | ")
        assert lookup(spec) if spec.isidentifier() else parse(spec)


def test_the_figure_of_the_rooms_is_what_the_script_draws():
    figure = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))["draw"]()
    kept = (ROOT / "docs" / "figures" / "rooms.svg").read_text()
    assert figure == kept, "run python docs/draw_rooms.py"
    numbers = [t.text for t in ElementTree.fromstring(kept).iter() if t.get("class") == "number"]
    assert list(dict.fromkeys(numbers)) == ["1", "2", "3", "4", "5", "6", "7"]
