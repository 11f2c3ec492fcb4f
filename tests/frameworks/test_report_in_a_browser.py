"""The report in a real browser: no error, readable on a desk and on a telephone, and it sorts.

A page beside it shows it in frames of 1400 and 400 pixels, looks at what the browser has made of
it, and writes that down as JSON, which the browser then prints.
"""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ringlet.__main__ import main

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: apt-get install chromium opens reports in tests"
)
HOSTILE = '<img src=x onerror="parent.hacked=1">"\'</td><script>parent.hacked=1</script>'
PROBE = """<!doctype html><meta charset="utf-8"><body>
<iframe id="w1400" src="run.html" style="width:1400px;height:900px"></iframe>
<iframe id="w400" src="run.html" style="width:400px;height:900px"></iframe>
<pre id="found">nothing</pre><script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message)), true);
function look(frame) {
  const page = frame.contentDocument, win = frame.contentWindow;
  const texts = [...page.querySelectorAll("svg text")].filter(t => t.textContent.trim());
  const small = texts.filter(t => t.getBoundingClientRect().height < 8).length;
  const body = [...page.querySelectorAll("p, h1, h2, td, span")]
    .filter(e => parseFloat(win.getComputedStyle(e).fontSize) < 12).length;
  const visible = () => [...page.querySelectorAll(".sorts tbody tr")]
    .map(r => [r.getBoundingClientRect().top, [...r.children].map(c => c.textContent)])
    .sort((a, b) => a[0] - b[0]).map(r => r[1]);
  const order = {"": visible()};
  for (const input of page.querySelectorAll(".sorts th input")) {
    input.parentElement.click();
    order[input.parentElement.textContent] = visible();
  }
  return {
    wide: page.documentElement.scrollWidth, room: win.innerWidth, small, body,
    first: page.body.firstElementChild.textContent, order,
    images: page.images.length, scripts: page.scripts.length,
    cut: [...page.querySelectorAll("td:first-child")].filter(
      c => c.scrollWidth > c.clientWidth && c.textContent.length < 20).map(c => c.textContent),
    beyond: [...page.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect().width),
    legends: [...page.querySelectorAll("figure")].filter(f => f.querySelector("svg"))
      .map(f => [f.querySelector("h2").textContent, f.querySelectorAll(".legend span").length]),
    labels: texts.map(t => t.textContent),
  };
}
addEventListener("load", () => {
  const found = {errors, hacked: Boolean(window.hacked)};
  for (const frame of document.querySelectorAll("iframe")) found[frame.id] = look(frame);
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


def write_run(path: Path) -> None:
    """Write the metrics of a run of 40 steps with five layers, one of them named to do harm."""
    rng = random.Random(0)
    names = ["embed.weight", "body.0.weight", "body.1.weight", "head.bias", HOSTILE]
    layers = [
        {
            "name": name, "compressor": "int8 | ef", "collective": "scatter_reduce",
            "elements": 4096 * (i + 1), "raw_bytes": 16384 * (i + 1), "wire_bytes": 4224 * (i + 1),
            "norm": rng.random(), "relative_error": rng.random() / 100,
            "residual_norm": rng.random(),
        }
        for i, name in enumerate(names)
    ]  # fmt: skip
    records = [{"kind": "run", "time": 1.7e9, "ranks": 2, "transport": "gloo"}]
    for step in range(40):
        timed = {"compress_s": 0.002, "communicate_s": 0.01 + rng.random() / 1e3,
                 "decompress_s": 0.001, "seconds": 0.02, "uncompressed_s": 0.05}  # fmt: skip
        sent = {"raw_bytes": 245760, "wire_bytes": 63360, "ratio": 3.9, "buckets": 2, "tensors": 5}
        at = {"step": step, "time": 1.7e9 + 0.1 * step, "group": "SGD of net"}
        records.append({"kind": "step", **at, **timed, **sent})
        if step % 10 == 0:
            records.append({"kind": "layers", **at, "layers": layers})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "run.jsonl")
    assert main(["report", str(folder / "run.jsonl")]) == 0
    (folder / "probe.html").write_text(PROBE)
    done = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1900,1000",
            "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=5000", "--enable-logging=stderr",
            "--dump-dom", (folder / "probe.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stderr
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(told[1])) | {"console": console}


WIDTHS = ["w1400", "w400"]


def test_nothing_goes_wrong(found) -> None:
    assert (found["errors"], found["console"]) == ([], [])
    assert not found["hacked"]
    for width in WIDTHS:
        assert (found[width]["images"], found[width]["scripts"]) == (0, 0)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_readable(found, width: str) -> None:
    page = found[width]
    assert page["wide"] <= page["room"], "the page itself scrolls sideways"
    assert (page["small"], page["body"]) == (0, 0), "letters that are too small"
    assert page["cut"] == [], "short names that are cut off"
    assert max(page["beyond"]) <= max(600, page["room"]), "charts of several screens"
    assert page["first"].startswith("Compression paid")


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_have_units_and_a_legend(found, width: str) -> None:
    page = found[width]
    assert len(page["legends"]) >= 4
    assert all(entries for _, entries in page["legends"])
    labels = " ".join(page["labels"])
    assert re.search(r"\d ms", labels)
    assert re.search(r"\d kB|\d KiB", labels)
    assert "step 0" in labels


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_layers_sorts(found, width: str) -> None:
    order = found[width]["order"]
    names = [row[0] for row in order["layer"]]
    assert names == sorted(names, key=str.lower)
    assert HOSTILE in names
    for head, column in (("elements", 3), ("gradient norm", 7), ("residual norm", 9)):
        numbers = [float(row[column].replace(",", "")) for row in order[head]]
        assert numbers == sorted(numbers, reverse=True)
        assert len(numbers) == 5
    assert [r[0] for r in order["gradient norm"]] != [r[0] for r in order["elements"]]
