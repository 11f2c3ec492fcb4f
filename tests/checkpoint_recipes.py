"""The recipes of docs/checkpoints.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import ringlet.torch as hvd

TEXT = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()


def recipe(name, **given):
    """Return what the block of code that defines ``name`` defines."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (block,) = [block for block in blocks if name in block]
    names = {"hvd": hvd, "torch": torch, "Path": Path, **given}
    exec(block, names)
    return names
