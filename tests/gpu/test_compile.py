"""Every CUDA source is compiled for the architectures that are promised: no GPU is needed."""

import errno
import hashlib
import os
import re
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nvrtc
import pytest

import ringlet.compressors.kernels.cuda as package
from ringlet.compressors import CompressorError, parse
from ringlet.compressors.kernels.cuda.common import elementwise, norms, scatter
from ringlet.compressors.kernels.cuda.dense import lossless
from ringlet.compressors.kernels.cuda.lowrank import factors, products
from ringlet.compressors.kernels.cuda.modifiers import hadamard, state_updates
from ringlet.compressors.kernels.cuda.quantizers import shared_int
from ringlet.compressors.kernels.cuda.runtime import compile as compile_module
from ringlet.compressors.kernels.cuda.runtime.compile import binary
from ringlet.compressors.kernels.cuda.runtime.source import OPTIONS, Program
from ringlet.compressors.kernels.cuda.sparsifiers import (
    randomk,
    threshold,
    topk,
)
from ringlet.compressors.modifiers.residuals import STORES
from ringlet.compressors.testing.tools.built_in import bucketed_specs

REASON = "needs NVRTC: pip install nvidia-cuda-nvrtc-cu12"
pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason=REASON)
# One spec for every path through the preprocessor.
SPECS = bucketed_specs([
    "fp16", "int8", "int4(stochastic=True)", "qsgd(bits=3)", "minmax", "onebit", "signsgd",
    "natural", "terngrad", "fp8", "mxfp4(stochastic=True)", "nvfp4",
    "mxfp6(format='e3m2')", "block_topk", "block_topk(block=65536, ratio=0.5, bits=8)",
    "block_topk(ratio=0.25, block=64, dct=True)", "block_topk(bits=2)", "block_topk(bits=16)",
])  # fmt: skip


def programs():
    found = []
    for spec in SPECS:
        codec = parse(spec).cuda()
        found.append(codec.program("encode", FEEDBACK=1))
        found.append(codec.program("decode"))
    int8 = parse("int8").cuda()
    found += [int8.program("encode", INPUT=kind) for kind in (0, 1, 2)]
    found += [int8.program("encode", SUMMED=1, FEEDBACK=1), int8.program("decode", ADDING=1)]
    found += [int8.program("decode", OUTPUT=kind) for kind in (1, 2)]
    found += [topk.program(0, 1), topk.program(1, 0), elementwise.PROGRAM, scatter.PROGRAM]
    found += [threshold.program(0, 1), threshold.program(2, 0)]
    for store in STORES.values():
        found += [store.cuda().program(kernel) for kernel in ("encode", "decode")]
    found += [randomk.PROGRAM, hadamard.program(1024), hadamard.program(8192)]
    found += [of.program(kind) for kind in (0, 1) for of in (state_updates, norms)]
    found += [lossless.program(0, True), lossless.program(1, False, True)]
    found += [factors.ORTHONORMAL, products.PRODUCT]
    found += [shared_int.program(8, 512, True), shared_int.program(32, 100, False)]
    return found


def architectures():
    return [70, 75, 80, 90] if nvrtc.version()[0] == 12 else [75, 80, 90]


def test_every_source_file_is_compiled_here():
    used = {"runtime/prelude"}.union(*(program.parts for program in programs()))
    root = Path(package.__file__).parent
    there = {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.cuh")}
    assert used == there


def test_every_program_compiles_for_every_architecture_within_registers():
    def build(job):
        program, number = job
        options = (*OPTIONS, f"--gpu-architecture=sm_{number}", "--ptxas-options=-v")
        return program, number, nvrtc.compiled(program.source(), options)

    # Every file for the oldest architecture, which has the fewest instructions; the other paths
    # through it, or the same one, for newer ones, in turn.
    oldest, *newer = architectures()
    every = programs()
    files = {(program.parts, program.kernels): program for program in every}
    others = [program for program in every if program not in files.values()]
    again = {(program.parts, program.kernels) for program in others}
    others += [program for file, program in files.items() if file not in again]
    jobs = [(program, oldest) for program in files.values()]
    jobs += [(program, newer[i % len(newer)]) for i, program in enumerate(others)]
    with ThreadPoolExecutor(2) as pool:
        for program, number, (binary, ptx, log) in pool.map(build, jobs):
            what = f"{program.parts} {dict(program.constants)} for sm_{number}: {log}"
            assert binary, what
            assert ptx, what
            warnings = [line for line in log.splitlines() if "warning" in line]
            assert all("deprecated" in line for line in warnings), what
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
            assert max(spilled) < 64, what


def test_the_way_over_cupy_needs_no_gpu(tmp_path, monkeypatch):
    cuda = pytest.importorskip("cupy.cuda")
    monkeypatch.setenv("RINGLET_KERNEL_CACHE", str(tmp_path / "cache"))
    program = parse("int8").cuda().program("encode")
    made = binary(program, 90, cuda.nvrtc)
    assert made[:4] == b"\x7fELF"
    assert len(list((tmp_path / "cache").iterdir())) == 1
    kept = ("getSupportedArchs", "getVersion")
    stale = types.SimpleNamespace(**{n: getattr(cuda.nvrtc, n) for n in kept})
    assert binary(program, 90, stale) == made  # from the cache: this one cannot compile
    newer = types.SimpleNamespace(**{n: getattr(cuda.nvrtc, n) for n in dir(cuda.nvrtc)})
    newer.getSupportedArchs = lambda: (75, 80)
    assert b".target sm_80" in binary(program, 90, newer)


def open_to_all(path):
    path.write_bytes(b"planted")
    path.chmod(0o666)


@pytest.fixture
def compiler():
    return types.SimpleNamespace(
        NVRTCError=RuntimeError,
        getSupportedArchs=lambda: (90,),
        getVersion=lambda: (12, 9),
        createProgram=lambda *_: None,
        compileProgram=lambda *_: None,
        destroyProgram=lambda *_: None,
        getCUBIN=lambda *_: b"made",
    )


def test_a_damaged_binary_is_made_anew(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("RINGLET_KERNEL_CACHE", str(tmp_path))
    assert binary(elementwise.PROGRAM, 90, compiler) == b"made"
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:-4], whole[:30], b"", whole[:-1] + b"\0", whole + b"\0"):
        kept.write_bytes(damaged)
        assert binary(elementwise.PROGRAM, 90, compiler) == b"made"
        assert kept.read_bytes() == whole


def test_where_binaries_cannot_be_kept_it_is_told_once(tmp_path, monkeypatch, compiler, caplog):
    """On a full disk, in a folder that is a file, without a home; nothing is left behind."""
    monkeypatch.setattr(compile_module, "_told", set())

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for kind in ("a full disk", "a file", "no home"):
        with monkeypatch.context() as patched:
            folder = tmp_path / kind
            patched.setenv("RINGLET_KERNEL_CACHE", "" if kind == "no home" else str(folder))
            patched.delenv("XDG_CACHE_HOME", raising=False)
            if kind == "a full disk":
                patched.setattr(os, "replace", full)
            elif kind == "a file":
                folder.write_bytes(b"")
            else:
                patched.setattr(os.path, "expanduser", lambda path: path)  # as without a user
            for _ in range(2):
                assert binary(elementwise.PROGRAM, 90, compiler) == b"made"
        assert len(caplog.records) == 1, kind
        assert "RINGLET_KERNEL_CACHE names another folder" in caplog.text
        caplog.clear()
    assert not list((tmp_path / "a full disk").iterdir())


def test_a_binary_that_others_may_have_made_is_not_run(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("RINGLET_KERNEL_CACHE", str(tmp_path))
    program = elementwise.PROGRAM
    assert binary(program, 90, compiler) == b"made"
    (kept,) = tmp_path.iterdir()
    head = kept.read_bytes().removesuffix(hashlib.sha256(b"made").digest() + b"made")
    planted = tmp_path / "planted"
    planted.write_bytes(b"planted")
    for plant in (
        lambda: kept.symlink_to(planted),
        lambda: os.mkfifo(kept),
        lambda: open_to_all(kept),
    ):
        kept.unlink()
        plant()
        assert binary(program, 90, compiler) == b"made"
        assert binary(program, 90, compiler) == b"made"
        kept.write_bytes(head + hashlib.sha256(b"kept").digest() + b"kept")
        assert binary(program, 90, compiler) == b"kept"
    other = parse("int8").cuda().program("encode")
    assert binary(other, 90, compiler) == b"made"
    (another,) = [path for path in tmp_path.iterdir() if path not in (kept, planted)]
    another.replace(kept)  # as whoever may rename files there can
    assert binary(program, 90, compiler) == b"made"


def test_a_compiler_error_is_shown(tmp_path, monkeypatch):
    cuda = pytest.importorskip("cupy.cuda")
    monkeypatch.setenv("RINGLET_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(CompressorError, match="BITS"):
        binary(Program(("runtime/values",), ()), 90, cuda.nvrtc)
    with pytest.raises(CompressorError, match="does not know"):
        binary(Program((), ()), 20, cuda.nvrtc)
