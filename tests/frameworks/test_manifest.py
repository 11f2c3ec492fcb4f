"""`ringlet manifest` without Kubernetes: the YAML itself, and what cannot be asked for."""

import re

import pytest

from ringlet.__main__ import main
from ringlet.cli.yaml_text import yaml_text

NEEDED = ["--kind", "Job", "--name", "train", "--image", "me/train"]


def test_yaml_of_plain_values():
    document = {"a": {"b": [1, {"c": "x y", "d": []}]}, "yes": "no", "n": True, "e": {}, "t": "x"}
    assert yaml_text([document, ["--", "1e3"]]) == (
        'a:\n  b:\n  - 1\n  - c: "x y"\n    d: []\n"yes": "no"\n"n": true\ne: {}\nt: x\n'
        '---\n- "--"\n- "1e3"\n'
    )


@pytest.mark.parametrize(
    "text", ["a\U0001f600\\b", "\x7f", "\u2028\u0085\ufeff", "\0\x1b", "a: b\n- c", "'\"", "~", "é"]
)
def test_texts_of_any_kind_are_read_as_they_were(text):
    yaml = pytest.importorskip("yaml")
    document = {text: [text, {"k": text}]}
    assert yaml.safe_load(yaml_text([document])) == document


def _by_kubernetes(text, variables):
    """Return what a container gets for ``text``, which names variables as $(NAME)."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]),
        text,
    )


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob", "MPIJob"])
def test_a_command_reaches_the_container_as_it_is_and_no_secret_gets_into_it(kind, capsys):
    yaml = pytest.importorskip("yaml")
    words = ["python", "$(RINGLET_SECRET)", "$$(RINGLET_SECRET)", "echo $$ $HOME $", "$(x)$$"]
    given = ["--kind", kind, *NEEDED[2:], "--env", "A=$(RINGLET_SECRET)$$"]
    assert main(["manifest", *given, *words]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    commands, values = [], []

    def look(found):
        if isinstance(found, dict):
            commands.append(found.get("command", []))
            values.append(found["value"] if found.get("name") == "A" else None)
        for each in found.values() if isinstance(found, dict) else found:
            if isinstance(each, dict | list):
                look(each)

    look(documents)
    shown = {"RINGLET_SECRET": "shown"}
    reached = [[_by_kubernetes(word, shown) for word in command] for command in commands]
    (own,) = [command for command in reached if "python" in command]
    assert own[-len(words) :] == words
    if kind == "MPIJob":
        assert own[own.index("--env") + 1] == "A=$(RINGLET_SECRET)$$"
    seen = {_by_kubernetes(value, shown) for value in values if value is not None}
    assert seen == {"$(RINGLET_SECRET)$$"}


def test_ranks_are_as_many_as_gpus(capsys):
    assert main(["manifest", *NEEDED, "--gpus", "8", "python", "train.py"]) == 0
    assert '- "--slots"\n        - "8"' in capsys.readouterr().out


def test_a_claim_may_appear_at_several_paths(capsys):
    given = ["--volume", "data:/a", "--volume", "more:/b", "--volume", "data:/c"]
    assert main(["manifest", *NEEDED, *given, "python", "train.py"]) == 0
    lines = list(map(str.strip, capsys.readouterr().out.splitlines()))
    mounts = lines[lines.index("volumeMounts:") + 1 :][:6]
    names, paths = mounts[::2], mounts[1::2]
    assert names == ["- name: volume0", "- name: volume1", "- name: volume0"]
    assert [path.rpartition("/")[2].rstrip('"') for path in paths] == ["a", "b", "c"]
    claims = [line.partition(": ")[2] for line in lines if line.startswith("claimName:")]
    assert claims == ["data", "more"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "Pod"], "--kind 'Pod' is not known: one of Job, TrainJob, MPIJob"),
        ([], "--kind is missing"),
        (["--kind", "Job"], "--name is missing"),
        (["--kind", "Job", "--name", "Train", "--image", "i"], "--name 'Train': up to 40"),
        (NEEDED, "a command is missing"),
        ([*NEEDED, "--env", f"RINGLET_SECRET={'a' * 64}", "x"], "would show it to all who may"),
        ([*NEEDED, "python", "\udcff.py"], r"'\udcff.py' is no UTF-8"),
        ([*NEEDED, "--nodes", "9" * 5000, "x"], "--nodes takes a number of at least 1"),
        ([*NEEDED, "--nodes", "\u0663", "x"], "--nodes takes a number of at least 1"),
        ([*NEEDED, "--nodes", "no", "x"], "--nodes takes a number of at least 1, not 'no'"),
        ([*NEEDED, "--volume", "data", "x"], "--volume takes CLAIM:/PATH"),
        (
            [*NEEDED, "--volume", "data:/a", "--volume", "more:/a", "x"],
            "--volume lets two claims appear at /a",
        ),
        (["--kind", "TrainJob", *NEEDED[2:], "--min-nodes", "1", "x"], "those of Job, MPIJob"),
        (
            ["--kind", "RayJob", *NEEDED[2:], "--nodes", "2", "--min-nodes", "3", "x"],
            "--min-nodes 3 is more than --nodes 2",
        ),
        *(
            (
                ["--kind", "RayJob", *NEEDED[2:], flag, value, "x"],
                f"{flag} is of no use to a RayJob",
            )
            for flag, value in (
                ("--slots", "2"),
                ("--network-interface", "eth0"),
                ("--start-timeout", "9"),
            )
        ),
        ([*NEEDED, "--env", "RINGLET_METRIC=1", "x"], "did you mean RINGLET_METRICS"),
        ([*NEEDED, "--env", "NONE", "x"], "--env takes KEY=VALUE"),
    ],
)
def test_what_cannot_be_is_a_sentence(capsys, words, said):
    assert main(["manifest", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
