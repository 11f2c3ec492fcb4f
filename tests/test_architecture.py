"""The shape of the code: dependencies point one way, and the type checker sees every module."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringlet.horovod.aliases import ALIASES

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "compressors": {"compressors", "ring.jit", "ring.safe_files"},  # how kernels are made, and kept
    "ring": {"ring"},
    "fusion": {"fusion", "compressors", "ring"},
}
# Rooms (folders, or files of their own) from the ground up: each imports from those before it. A
# file is in the innermost room that is listed.
FLOORS = {
    "compressors": """core
        kernels/cpu/common kernels/cpu/dense kernels/cpu/quantizers kernels/cpu/sparsifiers
        kernels/cpu/lowrank kernels/cpu/modifiers
        kernels/cuda/runtime kernels/cuda/common kernels/cuda/dense kernels/cuda/quantizers
        kernels/cuda/sparsifiers kernels/cuda/lowrank kernels/cuda/modifiers
        base specs dense quantizers sparsifiers lowrank modifiers states adaptive
        testing/tools testing/checks testing""",
    "ring": """errors process_owner log collector awake_clock callers variables dtypes arguments
        communicator safe_files jit float16 rank_order interrupt descriptors wire
        transports pipeline control collectives cost rendezvous hosts processes launch placed
        elastic functions command""",
    "fusion": """errors limits devices requests planning codecs recording peers exchanges
        buckets negotiation queue encoding_queue worker extensions observe autotune lifetime
        background_loop engine""",
    # Keras stands on TensorFlow's operations, and TensorFlow's optimizer and tape on Keras.
    "frameworks": """precision metrics job observe shared shared/gradients
        horovod report cli as_horovod data_loaders ray dask
        torch/tensors torch/ops torch/precision torch/parameters torch/optimizer torch/functions
        torch/elastic torch/parallel torch/recipes torch
        tensorflow/ops tensorflow/functions jax/ops keras spark tensorflow jax/sharded jax mxnet
        __main__""",
}
# Modules that Horovod has in every adapter, and programs import by these names.
HOROVODS = {"callbacks", "compression", "elastic", "functions", "optimizer", "sync_batch_norm"}
# What each adapter says in the terms of its framework, so that who knows one knows all.
ADAPTERS = {"checkpoint", "movements", "placement", "reducescatter", "reductions"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "optax", "mxnet", "pyspark", "ray"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_dependencies_point_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "ringlet":
                inside = parts[1] if len(parts) > 1 else "frameworks"
                allowed = {inside, ".".join(parts[1:])} & MAY_IMPORT[folder]
                assert allowed, f"{path.relative_to(ROOT)} imports {name}"
            if folder in ("compressors", "fusion"):
                assert parts[0] not in FRAMEWORKS, f"{path.relative_to(ROOT)} imports {name}"


def modules(folder):
    """Return the modules of a package by their dotted names within it, with what they import.

    A package that is imported for what it exports counts as a module: its ``__init__``.
    """
    package = "ringlet" if folder == "frameworks" else f"ringlet.{folder}"
    paths = {
        f"{package}.{'.'.join(path.relative_to(ROOT / folder).with_suffix('').parts)}": path
        for path in (ROOT / folder).rglob("*.py")
    }

    def known(name):
        return name if name in paths else f"{name}.__init__" if f"{name}.__init__" in paths else ""

    for own, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):  # late and TYPE_CHECKING ones too
            if isinstance(node, ast.ImportFrom):
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {known(name) or known(node.module) for name in each}
            elif isinstance(node, ast.Import):
                found |= {known(alias.name) for alias in node.names}
        inside = sorted(found - {"", f"{package}.__init__"})
        yield _within(own, package), [_within(name, package) for name in inside]


def _within(name, package):
    return tuple(name.removeprefix(f"{package}.").split("."))


@pytest.mark.parametrize("folder", FLOORS)
def test_no_room_imports_from_one_above_it(folder):
    floors = {tuple(room.split("/")): floor for floor, room in enumerate(FLOORS[folder].split())}

    def floor(parts):
        lengths = range(len(parts), 0, -1)
        found = next((floors[parts[:n]] for n in lengths if parts[:n] in floors), None)
        if found is None and parts[-1] == "__init__":  # of what holds rooms
            return len(floors)
        assert found is not None, f"{folder}/{'/'.join(parts)}.py stands in no room"
        return found

    for parts, imported in modules(folder):
        own = floor(parts)
        for other in imported:
            back = f"{folder}/{'/'.join(parts)}.py imports {'.'.join(other)}, which is above it"
            assert floor(other) <= own, back


@pytest.mark.parametrize("folder", FLOORS)
def test_no_circle_of_modules(folder):
    graph = dict(modules(folder))
    done, path = set(), []

    def visit(name):
        assert name not in path, f"a circle: {' -> '.join(map('.'.join, [*path, name]))}"
        if name in done:
            return
        path.append(name)
        for other in graph[name]:
            visit(other)
        done.add(path.pop())

    for name in graph:
        visit(name)


@pytest.mark.parametrize("folder", FLOORS)
def test_a_room_is_a_sentence_and_not_a_hall(folder):
    for init in (ROOT / folder).rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init}: what is in this room?"
        files = [path for path in init.parent.glob("*.py") if path != init]
        assert len(files) <= 17, f"{init.parent} has {len(files)} files"


def test_one_module_makes_what_proves_who_has_sent_something():
    for folder in FLOORS:
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name != "ring/wire/framing.py":
                assert "hmac" not in set(imports(path)), f"{name} makes MACs of its own"
                assert "blake2b(key" not in path.read_text(), f"{name} makes MACs of its own"


def test_one_stem_has_one_meaning():
    stems = {}
    for folder in FLOORS:
        for parts, _ in modules(folder):
            if parts[-1] == "__init__" or (folder, parts[0]) == ("compressors", "kernels"):
                continue  # kernels: see below
            stems.setdefault(parts[-1], []).append("/".join((folder, *parts)))
    several = {stem: paths for stem, paths in stems.items() if len(paths) > 1}
    # Every package has its errors; dense and compressed sums over two levels are one idea.
    assert set(several) == {"errors", "two_level"} | HOROVODS | ADAPTERS, several
    for stem in HOROVODS | ADAPTERS:
        assert all(path.startswith("frameworks/") for path in several[stem]), several[stem]


def test_one_class_has_one_name():
    found = {}
    for folder in FLOORS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(path)
    several = {name for name, paths in found.items() if len(paths) > 1}
    assert several == {"Compression", "Compressor", "FP16Compressor"}, several  # Horovod's names


def test_what_adapters_share_knows_no_framework():
    for room in ("precision", "shared"):
        for path in (ROOT / "frameworks" / room).rglob("*.py"):
            for name in imports(path):
                assert name.split(".")[0] not in FRAMEWORKS, f"{path} imports {name}"


def test_no_room_has_the_name_of_a_package_of_horovods():
    # `import horovod.common` sets the attribute `common` of what `horovod` is then: `ringlet`.
    for name, target in ALIASES.items():
        if not target:
            room = ROOT.joinpath("frameworks", *name.split(".")[1:])
            assert not room.exists(), f"{name} would hide {room}"


def test_kernels_have_the_stem_of_what_they_belong_to():
    """That is ROOM/STEM.py, kernels/cpu/ROOM/STEM.py, kernels/cuda/ROOM/STEM.py and .cuh."""
    root = ROOT / "compressors"
    files = [path for path in root.rglob("*.*") if path.suffix in (".py", ".cuh")]
    files = [path.relative_to(root) for path in files if path.stem != "__init__"]
    owners = {(path.parts[0], path.stem) for path in files if path.parts[0] != "kernels"}
    shared = {stem: room for room, stem in owners}
    for path in files:
        if path.parts[0] == "kernels":
            room, stem = path.parts[2], path.stem
            if room in ("common", "runtime"):  # of several algorithms, or of the base classes
                assert shared.get(stem, "base") in ("core", "base"), f"{path}: another {stem}"
            else:
                assert (room, stem) in owners, f"{path}: no compressors/{room}/{stem}.py"


def test_the_tree_for_type_checkers_is_complete():
    tree = ROOT / "tree" / "ringlet"
    expected = {p.name for p in (ROOT / "frameworks").iterdir() if p.name != "__pycache__"}
    expected |= {"compressors", "fusion", "ring"}
    assert {p.name for p in tree.iterdir() if p.name != "__pycache__"} == expected
    for link in (tree / name for name in expected):
        assert link.is_symlink()
        assert link.exists(), link
        assert link.resolve().is_relative_to(ROOT)


def test_every_package_is_listed_for_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in ("frameworks", "compressors", "fusion", "ring"):
        for init in (ROOT / folder).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT).as_posix()
            assert f'"{relative}"' in listed or relative == folder, relative


def test_the_design_lists_every_room_from_the_ground_up():
    expected = []
    for folder in sorted(FLOORS):
        for room in FLOORS[folder].split():
            path = ROOT / folder / room
            name = f"{room}/" if path.is_dir() else f"{room}.py"
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            said = ast.get_docstring(ast.parse(source.read_text())).splitlines()[0]
            expected.append(f"| `{folder}/{name}` | {said} |")
    design = (ROOT / "docs" / "design.md").read_text().splitlines()
    rows = tuple(f"| `{folder}/" for folder in FLOORS)
    assert [line for line in design if line.startswith(rows)] == expected


DOCUMENTS = ["CONTRIBUTING.md", "docs/design.md", "docs/finding-code.md", "README.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_are_there(document):
    named = re.findall(r"`((?:fusion|ring|compressors|frameworks|tests|benchmarks)/[\w/]+\.\w+)`",
                       (ROOT / document).read_text())  # fmt: skip
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_documents_say_is_in_a_file_is_defined_there(document):
    """As in: `fusion/limits.py` (`Limits`, `DIVISORS`)."""
    said = re.findall(
        r"`([\w/]+\.(?:py|cuh))` \(((?:`[\w.]+`(?:, )?)+)\)", (ROOT / document).read_text()
    )
    missing = []
    for path, symbols in said:
        source = (ROOT / path).read_text()
        for symbol in re.findall(r"[\w.]+", symbols):
            name = symbol.rpartition(".")[2]
            made = rf"^\s*(?:def|class) {name}\b|^\s*(?:self\.)?{name}\b.*="
            cuda = rf"\b{name}\(.*\{{$"
            if not re.search(f"{made}|{cuda}", source, re.M):
                missing.append(f"{path}: {symbol}")
    assert not missing


def test_what_starts_ranks_does_without_numpy():
    """New ranks wait for it: NumPy is most of what a wrapper would import."""
    helpers = "ringlet.ring.launch.agent, ringlet.ring.processes.rank_wrapper"
    code = f"import {helpers}, ringlet.ring.command.cli, sys; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
