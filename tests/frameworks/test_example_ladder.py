"""The ladder of examples: short programs that run as docs/examples.md says.

Steps 3 to 7 have tests of their own: ``test_torch_training.py`` or ``test_examples.py``, and
``test_tensorflow_examples.py`` for Keras.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text()
LADDER = re.findall(r"^\| \d+ \| `([\w.]+)` \| .*? \| `(.*?)` \|$", PAGE, re.M)
# Those without tests elsewhere that one job can run one after the other.
TOGETHER = {
    "first_compressor.py": ["int4 | ef"],
    "layer_routes.py": [],
    "local_steps.py": [],
    "small_language_model.py": ["--steps", "30"],
}


def main() -> None:
    import runpy

    for script, arguments in TOGETHER.items():
        if os.environ["RINGLET_RANK"] == "0":  # who alone prints what the programs give
            print(f"=={script}", flush=True)
        sys.argv = [script, *arguments]
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ringlet", "run", "--no-prefix", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_ladder_is_short() -> None:
    assert len(LADDER) == 10
    for script, command in LADDER:
        assert f"examples/{script}" in command
        text = (EXAMPLES / script).read_text()
        assert text.count("\n") < 80, script
        # A program begins with the command that starts it, and the page with the same one.
        starter = command.partition("examples/")[0]
        assert f"\n{starter}examples/{script}" in text, script
    shown = set(re.findall(r"`(\w+\.py)`", PAGE))
    assert shown == {path.name for path in EXAMPLES.glob("*.py")}


def test_steps_that_are_run_together() -> None:
    text = run("-np", "2", sys.executable, __file__)
    parts = dict(re.findall(r"==([\w.]+)\n(.*?)(?===|\Z)", text, re.DOTALL))
    assert list(parts) == list(TOGETHER)
    fewer = {n: re.findall(r"([\d.]+) times fewer bytes", body) for n, body in parts.items()}
    assert float(fewer["first_compressor.py"][0]) > 7
    assert float(re.search(r"accuracy ([\d.]+)", parts["first_compressor.py"])[1]) > 40  # type: ignore[index]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", parts["layer_routes.py"])]
    assert losses == sorted(losses, reverse=True)
    first, later = map(float, re.findall(r"([\d.]+) (?:at first|later)", parts["layer_routes.py"]))
    assert first > later > 2
    assert float(re.search(r"accuracy ([\d.]+)", parts["local_steps.py"])[1]) > 80  # type: ignore[index]
    assert float(re.search(r"([\d.]+) nats", parts["small_language_model.py"])[1]) < 3.2  # type: ignore[index]
    assert float(fewer["small_language_model.py"][0]) > 10
    assert text.count("replicas bit-equal: yes") == len(TOGETHER)


def test_elastic() -> None:
    script = str(EXAMPLES / "elastic_digits.py")
    text = run("-np", "3", "--min-np", "2", sys.executable, script, "--lose", "20")
    assert "from step 0 on 3 ranks\nfrom step 20 on 2 ranks\n" in text
    assert float(re.search(r"accuracy ([\d.]+) % on 2 ranks", text)[1]) > 75  # type: ignore[index]
    assert "replicas bit-equal: yes" in text


if __name__ == "__main__":
    main()
