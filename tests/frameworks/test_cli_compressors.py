"""``ringlet check`` and ``ringlet new``, as their users type them."""

import importlib
import json
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from ringlet.__main__ import main
from ringlet.compressors import resolve
from ringlet.compressors.testing import check_compressor
from ringlet.compressors.testing.tools.simulate import simulate

pytestmark = pytest.mark.preloaded("torch")


def ringlet(*args, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "ringlet", *args],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
    )


def test_check_prints_a_line_per_check():
    ran = ringlet("check", "fp16")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "  ok      replicas_agree\n" in ran.stdout
    assert "FAILED" not in ran.stdout
    *_, passed, cost = ran.stdout.splitlines()
    assert passed.endswith("checks passed")
    assert cost == "a Gaussian matrix: 16 bits a value, and 0.02% of its norm is lost"


def test_check_says_what_is_wrong_and_why(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ringlet.compressors import Compressor\n"
        "class Mine(Compressor):\n"
        "    def compress(self, x, ctx):\n"
        "        return {'values': x}\n"
        "    def decompress(self, payload, out, ctx):\n"
        "        out[:] = payload['values']\n"
    )
    ran = ringlet("check", "mine:Mine", cwd=tmp_path)
    assert ran.returncode == 1
    assert "  FAILED  leaves_its_input_alone" in ran.stdout
    assert "deterministic" not in ran.stdout
    assert "wait for the ones that failed" in ran.stdout
    assert "What to do: " in ran.stdout
    assert "shares memory with the input; copy it" in ran.stdout
    assert "Why it matters: " in ran.stdout


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("itn8", "did you mean 'int8'?"),
        ("ef", "write for example 'int8 | ef'"),
        ("no_such_module:X", "no_such_module does not import"),
        ("json:JSONDecoder", "json has no compressor 'JSONDecoder'"),
        ("json:JSONDecoder | ef", "json has no compressor 'JSONDecoder'"),
    ],
)
def test_check_of_nothing_is_a_one_line_error(target, says):
    ran = ringlet("check", target)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_plugin_that_ends_the_process_is_no_success(tmp_path):
    (tmp_path / "leaves.py").write_text("import os; os._exit(0)")
    for words in (["leaves:Any"], ["--policy", "leaves:any"]):
        ran = ringlet("check", *words, cwd=tmp_path)
        assert ran.returncode == 2
        assert "leaves does not import: SystemExit: os._exit(0)" in ran.stderr
    (tmp_path / "crashes.py").write_text(
        "import ctypes\n"
        "from ringlet.compressors import Compressor\n"
        "class Crashes(Compressor):\n"
        "    def compress(self, x, ctx):\n"
        "        ctypes.string_at(0)\n"
    )
    ran = ringlet("check", "crashes:Crashes", cwd=tmp_path)
    assert ran.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ran.stderr
    assert 'crashes.py", line 5 in compress' in ran.stderr


def test_check_takes_a_class_in_a_chain(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ringlet.compressors import Compressor\n"
        "class Mine(Compressor):\n"
        "    def compress(self, x, ctx):\n"
        "        return {'values': x.copy()}\n"
        "    def decompress(self, payload, out, ctx):\n"
        "        out[:] = payload['values']\n"
    )
    ran = ringlet("check", "mine:Mine | ef", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("checking mine:Mine | ef\n")


def test_new_makes_a_package_that_conforms_and_says_what_can_be_typed(tmp_path):
    ran = ringlet("new", "levels", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    made = tmp_path / "ringlet-levels"
    said = re.search(r"`ringlet (check .*?)`", (made / "README.md").read_text())
    assert said is not None
    words = shlex.split(said[1].replace("Levels", "Levels(levels=1)"))
    checked = ringlet(*words, cwd=made)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=made,
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": str(made), "PATH": ""},
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert 'levels = "ringlet_levels:Levels"' in (made / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("kind", "specs"),
    [
        ("rounds", ["{}", "{}(levels=1)", "powersgd | {} | ef"]),
        ("modifier", ["int8 | {}", "natural | {}(power=1)"]),
    ],
)
def test_packages_of_other_kinds_conform(tmp_path, monkeypatch, kind, specs):
    name = f"new_{kind}"
    ran = ringlet("new", name, "--kind", kind, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    made = tmp_path / f"ringlet-{name}"
    monkeypatch.syspath_prepend(str(made))
    written = re.search(
        r"(?m)^@parametrize_with_checks\(\[(.*)\]\)$",
        (made / "tests" / f"test_{name}.py").read_text(),
    )
    listed = re.findall('"([^"]*)"', written[1])
    said = re.search(r'`ringlet check "(.*?)"`', (made / "README.md").read_text())
    assert len(listed) == 2
    importlib.import_module(f"ringlet_{name}")
    assert resolve(said[1]) == resolve(listed[1])
    for spec in dict.fromkeys([*listed, *(spec.format(name) for spec in specs)]):
        check_compressor(spec)


@pytest.mark.parametrize("kind", ["payload", "rounds", "modifier"])
def test_packages_are_as_a_linter_wants_them(tmp_path, kind):
    """By Ruff's own choice of rules."""
    pytest.importorskip("ruff")
    made = tmp_path / "ringlet-mine"
    assert main(["new", "mine", "--kind", kind, "--directory", str(made)]) == 0
    for words in (["check", "--extend-select", "I"], ["format", "--diff"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--no-cache", "."]
        ran = subprocess.run(
            command, cwd=made, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(("name", "kind"), [("traits", "payload"), ("round", "rounds")])
def test_a_new_class_hides_nothing_that_its_module_imports(tmp_path, monkeypatch, name, kind):
    assert ringlet("new", name, "--kind", kind, cwd=tmp_path).returncode == 0
    monkeypatch.syspath_prepend(str(tmp_path / f"ringlet-{name}"))
    importlib.import_module(f"ringlet_{name}")
    (out,) = simulate(resolve(name), [np.ones(8, np.float32)])
    assert out.tolist() == [1] * 8


def test_json_holds_no_words_of_the_plugin(tmp_path):
    (tmp_path / "talks.py").write_text(
        "from ringlet.compressors import Int8\n"
        "class Talks(Int8):\n"
        "    def layout(self, n):\n"
        "        print('layout of', n)\n"
        "        return super().layout(n)\n"
    )
    ran = ringlet("check", "--json", "talks:Talks", cwd=tmp_path)
    (failure,) = json.loads(ran.stdout)["failures"]
    assert "prints 'layout of " in failure


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int8", "already"),
        ("Not-A-Name", "lower-case identifier, not 'Not-A-Name'; write 'not_a_name'"),
        ("lambda", "a word of Python's"),
        ("_", "begins with one"),
        ("größe", "ASCII letters"),
    ],
)
def test_new_refuses_bad_names(tmp_path, name, says):
    ran = ringlet("new", name, cwd=tmp_path)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert not list(tmp_path.iterdir())


def test_new_says_what_a_shell_can_read(tmp_path):
    ran = ringlet("new", "mine", "--directory", "my own/mine", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "Next: cd 'my own/mine' && pip" in ran.stdout


def test_new_overwrites_nothing(tmp_path):
    (tmp_path / "ringlet-mine").mkdir()
    (tmp_path / "ringlet-mine" / "precious").write_text("x")
    ran = ringlet("new", "mine", cwd=tmp_path)
    assert ran.returncode == 2
    assert "is not empty" in ran.stderr
