"""The command line: help, version, and one line for whatever is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import ringlet
from ringlet.__main__ import COMMANDS, main
from ringlet.cli import progress as progress_module
from ringlet.cli.commands import grouped
from ringlet.cli.progress import Progress
from ringlet.ring.errors import LOST_PEER

SCRIPT = Path(sys.executable).parent / "ringlet"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run the command line, which has to fail with ``code`` and say why in one line."""
    try:
        returned = main(arguments)
    except SystemExit as end:
        returned = int(end.code or 0)
    out, err = capsys.readouterr()
    assert (returned, out) == (code, "")
    assert err.startswith("ringlet")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], "unknown command 'rum'. Did you mean 'run'?"),
        (["advise"], "unknown command 'advise'. Did you mean 'doctor'?"),
        (["conformance"], "unknown command 'conformance'. Did you mean 'check'?"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["train.py", "--lr", "3"], "to start a program: ringlet run -np 2 python train.py --lr 3"),
        (["python3", "-m", "train"], "start a program: ringlet run -np 2 python3 -m train"),
        (["-np", "4", "python", "a b.py"], "a program: ringlet run -np 4 python 'a b.py'"),
        (["run"], "-np is missing: how many ranks?"),
        (["run", "python", "a b.py", "-np", "2"], "Write: ringlet run -np 2 python 'a b.py'"),
        (["run", "python", "a.py", "-n"], "-np is missing: how many ranks?"),
        (["run", "-np2", "true"], "-np2; did you mean -np 2?"),
        (["node", "-np", "2", "true"], "-np; did you mean --slots?"),
        (["run", "--nproc_per_node=2", "true"], "did you mean -np?"),
        (["run", "-np", "2", "-m", "train"], "-m; did you mean python -m?"),
        (
            ["run", "-np", "2", "--compression", "int8", "true"],
            "did you mean compression=... of DistributedOptimizer, in the program?",
        ),
        (["run", "-np"], "expected one argument"),
        (["run", "-np", "2"], "a command is missing: ringlet run -np 2 python train.py"),
        (["run", "-np", "2", "--"], "a command is missing"),
        (["run", "-np", "2", ""], "the command is an empty string"),
        (["run", "-np", "0", "true"], "-np 0: a job needs at least one rank"),
        (["run", "--np", "-3", "true"], "-np -3: a job needs at least one rank"),
        (["run", "--num-proc", "x", "true"], "-np takes a number of ranks, not 'x'"),
        (["run", "-np", "100000", "true"], "are refused; name hosts, as in -H localhost:100000"),
        (["run", "-H", "a:2,b:8080", "true"], "--hosts: host b has 8080 slots, and each would"),
        (["run", "-H", "a:8080", "--min-np", "2", "true"], "--hosts: host a has 8080 slots, and"),
        (["run", "-np", "2", "--transport", "glo", "true"], "Did you mean 'gloo'?"),
        (["run", "-np", "2", "--transport", "local", "true"], "joins threads of one process"),
        (["run", "-np", "2", "--env", "A", "true"], "--env takes KEY=VALUE, not 'A'"),
        (["run", "-np", "2", "--env", "=A", "true"], "--env takes KEY=VALUE, not '=A'"),
        (["run", "-np", "2", "--verbos", "true"], "--verbos; did you mean --verbose?"),
        (["run", "-np", "2", "--hostfiles=x", "true"], "did you mean --hostfile?"),
        (["run", "-np", "2", "--min-np", "3", "true"], "--min-np 3 is more than -np 2"),
        (["run", "-np", "2", "--cycle-time-ms", "x", "true"], "takes a number of at least 0"),
        (["run", "-np", "2", "-x", "NO_SUCH_NAME", "true"], "there is no such variable here"),
        (["run", "-np", "2", "-x", "=A", "true"], "-x takes NAME or NAME=VALUE, not '=A'"),
        (["run", "-np", "2", "-H", "a:1", "true"], "the hosts have 1: a:1"),
        (["run", "-H", "a:1", "--hostfile", "b", "true"], "give --hosts or --hostfile, not both"),
        (["run", "-np", "2", "--ssh-port", "70000", "true"], "--ssh-port takes a port"),
        (["run", "-np", "2", "--start-timeout", "0", "true"], "--start-timeout takes seconds"),
        (["doctor", "--transports", "mpi"], "did you mean --transport?"),
        (["completion", "bsh"], "did you mean bash?"),
        (["env", "--jsn"], "did you mean --json?"),
        (["timeline"], "the following arguments are required: path (see"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in said(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["-np", "2"], {"RINGLET_START_TIMEOUT": "soon"}, "RINGLET_START_TIMEOUT='soon' is not a"),
        (["-np", "2"], {"HOROVOD_START_TIMEOUT": "0"}, "HOROVOD_START_TIMEOUT='0' is not a number"),
        (["--min-np", "2"], {"HOROVOD_ELASTIC_TIMEOUT": "-1"}, "HOROVOD_ELASTIC_TIMEOUT='-1' is"),
    ],
)
def test_variables_that_cannot_be(
    arguments: list[str],
    variables: dict[str, str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert words in said(capsys, "run", *arguments, "true")


def test_commands_that_cannot_be_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ("run", "-np", "2")
    assert said(capsys, *run, "no-such-command", code=127).endswith(
        "command not found: no-such-command\n"
    )
    assert "; without the quotes: sh train.py" in said(capsys, *run, "sh train.py", code=127)
    assert said(capsys, *run, " ", code=127).endswith("command not found:  \n")
    Path("train.py").write_text("print(1)")
    hint = "train.py is not executable; did you mean: python train.py"
    assert hint in said(capsys, *run, "train.py", code=126)
    Path("train.py").chmod(0o755)
    hint = "train.py is not on PATH; did you mean: python train.py or ./train.py"
    assert hint in said(capsys, *run, "train.py", code=127)
    Path("folder").mkdir()
    assert "is a directory" in said(capsys, *run, "./folder", code=126)


def test_a_program_without_an_interpreter_line(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("echo no interpreter\n")
    program.chmod(0o755)
    command = [str(SCRIPT), "run", "-np", "1", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 126
    assert f"[0]<stderr>: {program}: Exec format error" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "1", "--no-prefix"],
        ["--np", "1", "--no-prefix", "--"],
        ["--no-prefix", "--num-proc=1"],
    ],
)
def test_what_follows_the_command_is_its_own(words: list[str]) -> None:
    own = ["-np", "5", "--", "--version", "-v", "a b", "*", ":", "--env", "\udcff"]
    program = [sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *own]
    for ringlet_command in ([str(SCRIPT)], [sys.executable, "-m", "ringlet"]):
        ended = subprocess.run(
            [*ringlet_command, "run", *words, *program],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (ended.stdout, ended.stderr) == (f"{own!a}\n", "")
        assert ended.returncode == 0


def test_verbose_says_what_is_started() -> None:
    command = [str(SCRIPT), "run", "-np", "1", "-v", "true"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr.startswith("ringlet run: 1 rank over ")


def test_the_flags_of_horovodrun_become_variables() -> None:
    flags = ["--gloo", "--fusion-threshold-mb", "0.5", "--cycle-time-ms=2", "--no-stall-check"]
    names = ("FUSION_THRESHOLD", "CYCLE_TIME", "STALL_CHECK_DISABLE", "TRANSPORT")
    shown = " ".join(f"$RINGLET_{name}" for name in names)
    command = [str(SCRIPT), "run", "-np", "1", "--no-prefix", *flags, "sh", "-c", f"echo {shown}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "524288 2 1 gloo\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--version"], [f"ringlet {ringlet.__version__}"]),
        (["run", "--version"], [f"ringlet {ringlet.__version__}"]),
        (["--help"], ["cheap to communicate", *(f"  {name}  " for name in COMMANDS)]),
        (
            ["run", "--help"],
            ["-np", "--num-proc", "--transport", "--env", "--no-prefix", "--hosts", "--rsh", "-x"],
        ),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert (end.value.code, err) == (0, "")
        assert all(word in out for word in words)
        assert max(map(len, out.splitlines())) <= 100


def test_alone_it_shows_what_one_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for title, names in grouped().items():
        assert f"\n{title}:\n  {names[0]} " in out
    assert sorted(name for names in grouped().values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_begins_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    examples, usage, _ = out.partition("\n\nusage: ")
    assert usage
    assert all(re.match(r"(eval .\$\()?ringlet ", line) for line in examples.splitlines())
    assert f"ringlet {name} " in examples


def test_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGLET_SECRET", "0123456789abcdef")
    for name in ("HOROVOD_Secret", "NCCL_token"):
        monkeypatch.setenv(name, "0123456789abcdef")
    monkeypatch.setenv("RINGLET_SEED", "7")
    monkeypatch.setenv("RINGLET_LOG", "a\x1b[2Jb\nc")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "0123456789abcdef" not in text
    assert re.search(r"RINGLET_SECRET +\(set, not shown\)", text)
    assert re.search(r"NCCL_token +\(set, not shown\)", text)
    assert re.search(r"RINGLET_SEED +7", text)
    assert r"a\x1b[2Jb\nc" in text  # a terminal does not obey it
    assert re.search(rf"ringlet +{re.escape(ringlet.__version__)}", text)
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["variables"]["RINGLET_SEED"] == "7"
    assert facts["installed"]["numpy"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="pip install 'ringlet[completion]'")
    made = subprocess.run(
        [SCRIPT, "completion", shell], capture_output=True, text=True, check=True, timeout=60
    )
    for name in COMMANDS:
        assert name in made.stdout
    assert "--hostfile" in made.stdout
    if shell == "bash" and shutil.which("bash"):
        (tmp_path / "complete").write_text(made.stdout)
        ask = f". {tmp_path}/complete; COMP_WORDS=(ringlet rep); COMP_CWORD=1; "
        ask += 'COMP_LINE="ringlet rep"; COMP_POINT=11; _shtab_ringlet; echo "${COMPREPLY[*]}"'
        done = subprocess.run(
            ["bash", "-c", ask], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stdout.split() == ["report"]


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "fp16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plugin"] == "fp16"
    assert set(found["checks"].values()) == {"ok"}
    assert found["failures"] == []


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = 100.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    for stream in (Terminal(), io.StringIO()):
        with Progress(2, stream) as progress:
            for what in ("first", "second"):
                progress.begin(what)
                progress.end()
                now += 1.5
        text = stream.getvalue()
        if stream.isatty():
            assert text.startswith("\r[........................] 0/2 first\x1b[K\r[############")
            assert text.endswith("\r\x1b[K")
            assert "\n" not in text
        else:
            assert text == "1/2 first (0.0 s)\n2/2 second (1.5 s)\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        ended = subprocess.run(
            [SCRIPT, "env"], stdout=out, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_that_cannot_be_written_is_told(arguments: list[str], unbuffered: str) -> None:
    """With PYTHONUNBUFFERED=1 the error comes while argparse writes, which passes over it."""
    code = (
        "import io, sys\n"
        "from ringlet.__main__ import main\n"
        f"raw = open('/dev/full', 'wb', buffering={0 if unbuffered else -1})\n"
        f"sys.stdout = io.TextIOWrapper(raw, write_through={bool(unbuffered)})\n"
        f"sys.exit(main({arguments}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    command = "ringlet run" if "run" in arguments else "ringlet"
    told = f"{command}: the output cannot be written: No space left on device\n"
    assert (ended.stdout, ended.stderr) == ("", told)


def test_a_package_is_not_made_inside_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (
        (tmp_path / "file", f"{tmp_path / 'file'} is a file"),
        (tmp_path / "file" / "a" / "b", f"{tmp_path / 'file'} is a file, and"),
        (Path("/proc/mine"), "/proc/mine/pyproject.toml cannot be written: "),
    ):
        assert why in said(capsys, "new", "mine", "--directory", str(place))


def test_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    full = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    code = full + "from ringlet.__main__ import main; sys.exit(main(['env']))"
    with (tmp_path / "out").open("wb") as out:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdout=out,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert ended.returncode == 1
    assert ended.stderr == b"ringlet env: the output cannot be written: File too large\n"


def test_what_the_output_has_no_characters_for_is_escaped(tmp_path: Path) -> None:
    """As where LC_ALL=C makes it ASCII; bytes of a file's name that are no UTF-8 stay."""
    folder = tmp_path / os.fsdecode("µ".encode() + b"\xff")
    folder.mkdir()
    (folder / "t.rank0.json").write_text('[\n{"name": "x", "ph": "i", "pid": 0, "ts": 5.0},\n')
    for encoding, shown in (("ascii", b"/\\xb5\xff/"), ("utf-8", b"/\xc2\xb5\xff/")):
        ended = subprocess.run(
            [SCRIPT, "timeline", folder / "t.json"],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert ended.stdout.endswith(shown + b"t.json: 1 events of 1 ranks\n")


def test_a_timeline_that_a_full_disk_has_no_room_for_is_named(tmp_path: Path) -> None:
    event = {"name": "x", "ph": "i", "pid": 0, "ts": 5.0}
    (tmp_path / "t.rank0.json").write_text("[\n" + f"{json.dumps(event)},\n" * 100)
    path = str(tmp_path / "t.json")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999)); "
        f"from ringlet.__main__ import main; sys.exit(main(['timeline', {path!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    told = f"ringlet timeline: {path}: File too large\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", told)
    assert [each.name for each in tmp_path.iterdir()] == ["t.rank0.json"]


def test_a_working_directory_that_is_gone_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check", "int8"]) == 2
    said = "ringlet check: the working directory is gone; cd to one that is there\n"
    assert capsys.readouterr() == ("", said)


def test_check_needs_a_folder_for_temporary_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is full, the compressor is not what fails."""
    monkeypatch.setattr(tempfile, "tempdir", None)  # looks for one anew
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        told = said(capsys, "check", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.endswith("can be written to (is the disk full?); name one in TMPDIR\n")


def test_an_interrupted_command_prints_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ringlet.cli.bug_report.main", interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr() == ("", "")


def test_doctor_refuses_before_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-np", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ringlet doctor: -np 0: a job needs at least one rank\n")


def test_what_is_started_is_told_as_a_shell_takes_it() -> None:
    run = [SCRIPT, "run", "--gloo", "-np", "1", "true", "int4 | ef"]
    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stderr == "ringlet run: 1 rank over gloo: true 'int4 | ef'\n"


@pytest.mark.parametrize(
    ("code", "did"), [(1, "failed first"), (LOST_PEER, "noticed it first")], ids=["failed", "lost"]
)
def test_the_rank_that_failed_first_has_the_last_word(code: int, did: str, tmp_path: Path) -> None:
    # Rank 1 fails; rank 0 prints after that, so that what rank 1 said has to be looked for. Rank 1
    # waits for rank 0, which would end by the signal before, and takes it whenever it comes.
    program = (
        "import os, sys, signal, time\n"
        "if os.environ['RINGLET_RANK'] == '1':\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        f"    print('the cause', file=sys.stderr, flush=True); os._exit({code})\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "open(sys.argv[1], 'w').close()\n"
        "signal.sigwait([signal.SIGTERM]); print('much later', flush=True)"
    )
    run = [SCRIPT, "run", "--gloo", "-np", "2", sys.executable, "-c", program]
    run.append(str(tmp_path / "ready"))
    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == code
    assert "much later" in ended.stdout
    assert ended.stderr.startswith("ringlet run: 2 ranks over gloo: ")
    assert ended.stderr.endswith(
        f"ringlet run: rank 1 {did}; its last lines were:\nringlet run: | the cause\n"
    )
