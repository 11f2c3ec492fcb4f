"""Packages that are damaged, or odd, among those that announce compressors or policies."""

from __future__ import annotations

import pytest

from ringlet.compressors import CompressorError, UnknownCompressor, names, parse
from ringlet.compressors.specs import registry
from ringlet.compressors.specs.announced import announced
from ringlet.precision.policies import parse_policy, registered_policies

COMPRESSOR = """
from ringlet.compressors import Int8
class Mine(Int8): pass
"""
POLICY = """
from ringlet.precision import Policy
def mine(): return Policy("mine")
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that installs a package with such entry points; None is no METADATA."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, points, metadata=b"Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        if metadata is not None:
            told = metadata % name.encode() if b"%s" in metadata else metadata
            (folder / "METADATA").write_bytes(told)
        (folder / "entry_points.txt").write_bytes(points)
        return folder

    return install


def module(tmp_path, name, text):
    (tmp_path / f"{name}.py").write_text(text)


DAMAGED = [
    pytest.param(b"[ringlet.compressors]\nm\xff\xfeine = a:B\n", id="not utf-8"),
    pytest.param(b"[ringlet.compressors]\nmine a:B\n[[[\n= =\n", id="no pair"),
]


@pytest.mark.parametrize("points", DAMAGED)
def test_a_damaged_package_hides_no_other_and_is_named(tmp_path, package, points):
    package("ringletbroken", points)
    both = (
        b"[ringlet.compressors]\nsound = sound_mod:Mine\n[ringlet.precision]\nm = policy_mod:mine\n"
    )
    package("ringletsound", both)
    module(tmp_path, "sound_mod", COMPRESSOR)
    module(tmp_path, "policy_mod", POLICY)
    assert {"int8", "sound"} <= {*names()}
    assert type(parse("sound")).__name__ == "Mine"
    assert "m" in registered_policies()
    assert parse_policy("m").name == "mine"
    told = "entry points of the package ringletbroken cannot be read .*: install it anew"
    with pytest.raises(UnknownCompressor, match=told):
        parse("nosuch")
    with pytest.raises(ValueError, match=told):
        parse_policy("nosuch")


@pytest.mark.parametrize("metadata", [None, b"\xff\xfe\0"])
def test_a_package_without_a_name_is_told_by_its_folder(tmp_path, package, metadata):
    folder = package("ringletnameless", b"[ringlet.compressors]\nbad = bad_mod:Mine\n", metadata)
    module(tmp_path, "bad_mod", "raise ValueError('at import')")
    with pytest.raises(CompressorError, match=f"of package {folder} does not import: ValueError"):
        parse("bad")


def test_names_that_no_spec_can_read_are_not_listed(package):
    package("ringletodd", b"[ringlet.compressors]\nMI NE = a:B\nmi\x1b[31mne = a:B\n= a:B\n")
    assert {entry.name for entry in announced(registry.GROUP)[0]} > {"MI NE", ""}
    assert all(name.isidentifier() for name in names())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("class Odd(BaseException): pass\nraise Odd('why')", "does not import: Odd: why"),
        ("raise SystemExit('why')", "does not import: SystemExit: why"),
        ("Mine = mine = 3", "3|that is an int|no function"),
    ],
)
def test_whatever_an_import_raises_names_the_package(tmp_path, package, text, told):
    name = f"raising_{len(text)}"  # each is imported anew
    entry = f"[ringlet.compressors]\nodd = {name}:Mine\n[ringlet.precision]\nodd = {name}:mine\n"
    package("ringletraising", entry.encode())
    module(tmp_path, name, text)
    with pytest.raises(CompressorError, match=f"'odd' of package ringletraising .*({told})"):
        parse("odd")
    with pytest.raises(ValueError, match=f"'odd' of package ringletraising .*({told})"):
        parse_policy("odd")


def test_a_policy_that_two_packages_offer_is_refused(package):
    for name in ("ringleta", "ringletb"):
        package(name, f"[ringlet.precision]\ntwice = {name}:make\n".encode())
    with pytest.raises(ValueError, match=r"offered by several packages: .*ringlet[ab]:make \(from"):
        parse_policy("twice")
