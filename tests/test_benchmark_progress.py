"""Benchmarks show how far they have come on standard error, and print what they printed without."""

import subprocess
import sys

import pytest
from progress import each, follow

from ringlet.cli.progress import Progress


def test_each_shows_the_item_in_work_and_yields_what_comes_of_it(capsys):
    for found in each(lambda n: n * n, (2, 3), "{} ranks"):
        print(found)
    out, err = capsys.readouterr()
    assert out == "4\n9\n"
    assert [line.rpartition(" (")[0] for line in err.splitlines()] == ["1/2 2 ranks", "2/2 3 ranks"]


def test_pieces_of_a_job_are_shown_and_its_other_lines_passed_on(capsys, monkeypatch):
    code = "from progress import announce\nprint('one')\nannounce('turn 0')\nprint('two')"
    code += "\nannounce('turn 1')\nraise SystemExit(3)"
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    with Progress(2) as progress, pytest.raises(subprocess.CalledProcessError) as failed:
        follow(progress, "loopback", [sys.executable, "-c", code])
    assert failed.value.returncode == 3
    assert progress.finished
    out, err = capsys.readouterr()
    assert out == "one\ntwo\n"
    shown = [line.rpartition(" (")[0] for line in err.splitlines()]
    assert shown == ["1/2 loopback, turn 0", "2/2 loopback, turn 1"]
