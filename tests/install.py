"""Build the packages, install them where the checkout is not, and use them as somebody else would.

    make test-install                      # every Python of 3.11, 3.12 and 3.13 that is here
    python tests/install.py --python 3.12  # one
    python tests/install.py --extras       # also whether every extra can be resolved

Each interpreter gets a virtual environment of its own with the wheel, which was built from the
sdist. There the command line, a compressor, the conformance kit and ranks as threads have to work.
mypy and pyright then read a user's program against what is installed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
SMOKE = """
import sys
import numpy as np
import ringlet
from ringlet.compressors import Context, parse
from ringlet.ring import ReduceOp
from ringlet.ring.transports.local import run_local

assert "site-packages" in ringlet.__file__, ringlet.__file__
int8 = parse("int8")
x, out = np.linspace(-1, 1, 5000, dtype=np.float32), np.empty(5000, np.float32)
context = Context(shape=x.shape, numel=x.size)
int8.decompress(int8.compress(x, context), out, context)
assert np.abs(out - x).max() < 0.01

def body(comm):
    values = np.full(8, comm.rank + 1.0, np.float32)
    comm.allreduce(values, ReduceOp.SUM)
    return values.tolist()

assert run_local(body, 3) == [[6.0] * 8] * 3
print(ringlet.__version__, sys.version.split()[0])
"""
# What a user's type checker has to understand, and the line that it has to refuse.
TYPED = """
from ringlet.compressors import Compressor, parse
from ringlet.fusion import Stats

def ratio(stats: Stats) -> float:
    return stats.ratio

compressor: Compressor = parse("int8 | ef")
"""
WRONG = TYPED + "spec: int = parse('int8')\n"


def said(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def interpreter(version: str) -> str | None:
    """Return a Python of ``version``, or None; pyenv's are found where it keeps them."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path / "bin" / "python") for path in sorted(kept.glob(f"{version}.*"))]
    for name in [*found, shutil.which(f"python{version}")]:
        if name:
            asked = [name, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() == version:
                return name
    return None


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist, and the wheel that was built from it."""
    source = folder / "source"  # a build leaves files in its tree
    listed = said("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    said(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def install(python: str, wheel: Path, folder: Path) -> Path:
    """Return a fresh virtual environment with ``wheel`` and what it asks for."""
    said(python, "-m", "venv", folder)
    said(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    return folder / "bin"


def smoke(binaries: Path, folder: Path) -> str:
    """Use what is installed, from an empty folder; return the versions."""
    folder.mkdir()
    env = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(folder)}
    versions = said(binaries / "python", "-c", SMOKE, cwd=folder, env=env)
    assert "ringlet run -np 4" in said(binaries / "ringlet", cwd=folder, env=env)
    assert "numpy" in said(binaries / "ringlet", "env", cwd=folder, env=env)
    said(binaries / "ringlet", "check", "fp16", cwd=folder, env=env)
    said(binaries / "ringlet", "new", "mine", cwd=folder, env=env)
    said(binaries / "ringlet", "check", "ringlet_mine:Mine", cwd=folder / "ringlet-mine", env=env)
    return versions.strip()


def types(binaries: Path, folder: Path) -> None:
    """Hold mypy and pyright to what the installed package says of its types."""
    good, wrong = folder / "good.py", folder / "wrong.py"
    good.write_text(TYPED)
    wrong.write_text(WRONG)
    python = binaries / "python"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
    checkers = {"mypy": [*mypy, "--cache-dir", folder / "cache"]}
    if shutil.which("pyright", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        pyright = shutil.which(
            "pyright", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        )
        checkers["pyright"] = [pyright, "--pythonpath", python]
    else:
        print("pyright is not here: pip install pyright")
    for name, command in checkers.items():
        said(*command, good, cwd=folder)
        done = subprocess.run(
            [str(word) for word in (*command, wrong)],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not done.returncode or "int" not in done.stdout:
            sys.exit(f"{name} does not know the types: {done.stdout}{done.stderr}")
        print(f"{name} reads the installed package's types")


def extras(binaries: Path, wheel: Path) -> None:
    """Let pip resolve every extra, without installing it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        asked = f"{wheel}[{extra}]"
        said(binaries / "python", "-m", "pip", "install", "--quiet", "--dry-run", asked)
        print(f"[{extra}] resolves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", metavar="VERSION", help="such as 3.12")
    parser.add_argument("--extras", action="store_true", help="resolve every extra")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringlet-install-") as name:
        folder, tried = Path(name), 0
        sdist, wheel = build(folder)
        print(f"built {sdist.name} and {wheel.name} ({wheel.stat().st_size / 1e3:.0f} kB)")
        for version in options.python or VERSIONS:
            python = interpreter(version)
            if python is None:
                print(f"Python {version} is not here")
                continue
            binaries = install(python, wheel, folder / version)
            print(f"installed and used: ringlet {smoke(binaries, folder / f'use-{version}')}")
            if not tried:
                types(binaries, folder / f"use-{version}")
                if options.extras:
                    extras(binaries, wheel)
            tried += 1
        if not tried:
            sys.exit("no Python to try")


if __name__ == "__main__":
    main()
