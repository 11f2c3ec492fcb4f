"""Documents that have to keep up with the code."""

import ast
import re
import runpy
import sys
import tomllib
from itertools import pairwise
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


def test_the_overview_names_compressors_that_there_are():
    text = (ROOT / "docs" / "compressors.md").read_text().split("## What there is")[1]
    text = text.split("\n\n")[1]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    assert len(cells) > 8
    for spec in re.findall(r"`([^`]+)`", " ".join(cells)):
        spec = spec.replace("\\|", "|").removeprefix("... | ")
        assert lookup(spec) if spec.isidentifier() else parse(spec)


def test_the_figures_are_what_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_figures.py"))["DRAWN"]
    for name, draw in drawn.items():
        kept = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
        assert draw() == kept, "run python docs/draw_figures.py"
        ElementTree.fromstring(kept)


def test_code_in_a_narrow_cell_may_break_where_nobody_misreads_it():
    breakable = runpy.run_path(str(ROOT / "docs" / "cells.py"))["breakable"]
    row = "<td><code>RINGLET_NUM_THREADS</code> a_b</td><td><code>topk(ratio=0.01)</code></td>"
    broken = breakable(f"<p><code>a_b</code></p>{row}")
    assert broken.replace("<wbr>", "") == f"<p><code>a_b</code></p>{row}"
    assert "<code>RINGLET_<wbr>NUM_<wbr>THREADS</code> a_b</td>" in broken
    assert "<code>topk(<wbr>ratio=0.01)</code>" in broken
    assert broken.startswith("<p><code>a_b</code></p>")


def test_pages_that_a_command_names_are_links_in_its_reference():
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["command_line"]()
    assert "[launching](../launching.md) says more." in page
    assert "docs/" not in page


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == set(), "name them under nav in mkdocs.yml"
    made = {"reference/command-line.md", "reference/compressors.md"}
    assert listed - pages == made


def test_lists_begin_behind_an_empty_line():
    """GitHub takes them for lists anywhere, the site does not."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
        for before, line in pairwise(text.splitlines()):
            within = re.match(r"(- |\d+\. |  |$)", before)
            assert within or not re.match(r"(- |\d+\. )", line), (page.name, line)


def test_links_in_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
            if "://" not in link and not link.startswith(("mailto:", "reference/")):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def sayings():
    """Return every text of the four packages, with … where values are put in."""
    for folder in ("ring", "fusion", "frameworks", "compressors"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_the_page_of_examples_says_what_they_need():
    text = (ROOT / "docs" / "examples.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = list(extras["dependencies"]) + re.findall(r"`([a-z][a-z-]+)`", text)
    for names in re.findall(r"\[([a-z,]+)\]['`]", text):
        for name in names.split(","):
            needs += extras["optional-dependencies"][name]
    there = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in needs} | {"sklearn"}
    assert "scikit_learn" in there  # which is sklearn in programs
    there |= {"orbax"} & {name.partition("_")[0] for name in there}
    for path in sorted((ROOT / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                wanted = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Import):
                wanted = {alias.name.partition(".")[0] for alias in node.names}
            else:
                continue
            own = {"ringlet", *(other.stem for other in path.parent.glob("*.py"))}
            assert wanted - there - own - sys.stdlib_module_names == set(), path


def test_troubleshooting_has_the_words_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    words = re.findall(r"^### `(.+)`$", page, re.M)
    assert len(words) >= 30
    assert page.count("*Cause.* ") == page.count("*Cure.* ") >= len(words)
    said = list(sayings())
    for each in words:
        for part in filter(None, map(str.strip, each.split("…"))):
            assert any(part in text for text in said), f"nothing says {part!r} any more"


def test_the_figure_of_the_rooms_is_what_the_script_draws():
    figure = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))["draw"]()
    kept = (ROOT / "docs" / "figures" / "rooms.svg").read_text()
    assert figure == kept, "run python docs/draw_rooms.py"
    numbers = [t.text for t in ElementTree.fromstring(kept).iter() if t.get("class") == "number"]
    assert list(dict.fromkeys(numbers)) == ["1", "2", "3", "4", "5", "6", "7"]
