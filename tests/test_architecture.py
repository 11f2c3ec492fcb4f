"""The shape of the code: dependencies point one way, and the type checker sees every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "compressors": {"compressors"},
    "ring": {"ring"},
    "fusion": {"fusion", "compressors", "ring"},
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "mxnet", "pyspark", "ray"}


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
                assert inside in MAY_IMPORT[folder], f"{path.relative_to(ROOT)} imports {name}"
            if folder in ("compressors", "fusion"):
                assert parts[0] not in FRAMEWORKS, f"{path.relative_to(ROOT)} imports {name}"


def test_the_tree_for_type_checkers_is_complete():
    tree = ROOT / "tree" / "ringlet"
    expected = {p.name for p in (ROOT / "frameworks").iterdir() if p.name != "__pycache__"}
    expected |= {"compressors", "fusion", "ring"}
    assert {p.name for p in tree.iterdir() if p.name != "__pycache__"} == expected
    for link in tree.iterdir():
        assert link.is_symlink()
        assert link.exists(), link
        assert link.resolve().is_relative_to(ROOT)


def test_every_package_is_listed_for_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in ("frameworks", "compressors", "fusion", "ring"):
        for init in (ROOT / folder).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT).as_posix()
            assert f'"{relative}"' in listed or relative == folder, relative
