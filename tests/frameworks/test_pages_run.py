"""What pages say to copy and paste runs as it stands, or the page says why it is not run.

A block of Python or shell carries a comment on the line before it: ``<!-- run: PRELUDE -->``, with
one of the PRELUDES below, or ``<!-- not run: WHY -->``. Those of Get started need none: all of them
run, from the top to the bottom, in one folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.preloaded("torch")

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "get-started.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?$")
MARK = re.compile(r"<!-- (run|not run): (.+) -->$")
SHELL = {"sh", "bash", "shell"}
# What a block finds around it: what its page tells of in words.
PRELUDES = {
    "nothing": "",
    "plugin": "",
    "torch": """
        import torch
        import ringlet.torch as hvd
        hvd.init()
        Net = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
        loader = [(torch.randn(8, 64), torch.randint(0, 4, (8,))) for _ in range(3)]
        loss = torch.nn.CrossEntropyLoss()
        torch.save = lambda *_: None
    """,
    "trained": """
        import torch
        import ringlet.torch as hvd
        hvd.init()
        model = torch.nn.Linear(64, 64)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "int8 | ef")
        scaler = torch.amp.GradScaler("cpu")
        loss = model(torch.randn(4, 64)).square().mean()
    """,
    "precision": """
        import torch
        import ringlet.torch as hvd
        hvd.init()
        model = hvd.apply_precision(torch.nn.Linear(64, 64), "fp16")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(), precision="fp16")
        loss = model(torch.randn(4, 64, dtype=torch.float16)).float().square().mean()
    """,
    "ddp": """
        import tempfile
        import torch
        import ringlet.torch as hvd
        from torch.nn.parallel import DistributedDataParallel
        store = f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
        model = torch.nn.Linear(64, 64)
    """,
}
PRELUDES["saved"] = (
    PRELUDES["trained"]
    + """
        import glob
        torch.save(model.state_dict(), "model.pt")
        torch.save(optimizer.state_dict(), "optimizer.0.pt")
    """
)


class Block(NamedTuple):
    """A fenced block: where it begins, its language, its title, what it says, and its mark."""

    place: str
    language: str
    title: str | None
    text: str
    mark: tuple[str, str] | None


def blocks(page: Path) -> list[Block]:
    lines, found, at = page.read_text().splitlines(), [], 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = lines.index("```", at + 1)
        mark = MARK.match(lines[at - 1])
        text = "\n".join(lines[at + 1 : end]) + "\n"
        place = f"{page.relative_to(ROOT)}:{at + 1}"
        found.append(Block(place, fence[1], fence[2], text, mark and (mark[1], mark[2])))
        at = end + 1
    return found


EVERY = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in EVERY if block.mark and block.mark[0] == "run"]


def test_every_block_has_a_language() -> None:
    assert not [block.place for block in EVERY if not block.language]


def test_every_block_runs_or_says_why_not() -> None:
    code = [block for block in EVERY if block.language in {"python", *SHELL}]
    assert len(code) > 40
    code = [block for block in code if block.text.strip()]
    silent = [b.place for b in code if b.mark is None and not b.place.startswith("docs/get-st")]
    assert not silent, "write <!-- run: PRELUDE --> or <!-- not run: WHY --> before these"
    unknown = [b.place for b in RUN if b.mark and b.mark[1] not in PRELUDES]
    assert not unknown
    for block in code:
        for named in re.findall(r"(?:tests|examples)/[\w/]+\.py", str(block.mark)):
            assert (ROOT / named).exists(), f"{block.place} names {named}"


def test_every_block_of_python_is_python() -> None:
    for block in EVERY:
        if block.language == "python":
            compile(block.text, block.place, "exec")


DRIVER = """
import json, sys, traceback
failed = []
for place, text in json.load(open(sys.argv[1])):
    try:
        exec(compile(text, place, "exec"), {"__name__": "__main__"})
    except BaseException:
        failed.append(place + chr(10) + traceback.format_exc())
    if "ringlet.torch" in sys.modules:
        sys.modules["ringlet.torch"].shutdown()
sys.exit(chr(10).join(failed) or 0)
"""


def test_blocks_that_are_marked_run(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    marked = [(b.place, textwrap.dedent(PRELUDES[b.mark[1]]) + b.text) for b in RUN if b.mark]
    (tmp_path / "blocks.json").write_text(json.dumps(marked))
    done = subprocess.run(
        [sys.executable, "driver.py", "blocks.json"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def started(line: str, folder: Path) -> str:
    """Run a line of a page as a shell would, but from the fork server; return what it printed."""
    words = shlex.split(line, comments=True)
    env = dict(os.environ)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    assert words[0] == "ringlet", f"the page starts {words[0]}: teach this test to"
    python = [sys.executable, "-m", "ringlet"]
    command = python + [sys.executable if word == "python" else word for word in words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_get_started_from_the_top_to_the_bottom(tmp_path: Path) -> None:
    said = ""
    for block in blocks(START):
        if block.mark and block.mark[0] == "not run":
            continue
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
        elif block.language in SHELL:
            for line in block.text.splitlines():
                said += started(line, tmp_path)
    # What the page says that one sees.
    learnt = [
        float(each) for each in re.findall(r"accuracy ([\d.]+) %, replicas equal: True", said)
    ]
    assert len(learnt) == 3
    assert abs(learnt[0] - learnt[1]) < 3
    assert re.search(r"sent [\d.]+ MB, (7|8)\.\d times fewer bytes", said)
    assert "Inside one host compression saves no time" in said
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
