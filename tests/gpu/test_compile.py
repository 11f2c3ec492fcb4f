"""Every CUDA source is compiled for the architectures that are promised: no GPU is needed."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nvrtc
import pytest

import ringlet.compressors.kernels.cuda as package
from ringlet.compressors import parse
from ringlet.compressors.kernels.cuda.source import OPTIONS

REASON = "needs NVRTC: pip install nvidia-cuda-nvrtc-cu12"
pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason=REASON)
# One spec for every path through the preprocessor.
SPECS = [
    "fp16", "bf16", "int8", "int4(stochastic=True)", "qsgd(bits=3)", "minmax", "onebit", "signsgd",
    "natural", "terngrad", "fp8", "fp8(format='e5m2', block=8)", "block_topk",
    "block_topk(block=65536, ratio=0.5, bits=8)", "block_topk(ratio=0.25, block=64, dct=True)",
    "block_topk(bits=2)", "block_topk(bits=16)",
]  # fmt: skip


def programs():
    found = []
    for spec in SPECS:
        codec = parse(spec).cuda()
        found.append(codec.program("encode", FEEDBACK=1))
        found.append(codec.program("decode"))
    int8 = parse("int8").cuda()
    found += [int8.program("encode", INPUT=kind) for kind in (0, 1, 2)]
    found += [int8.program("encode", SUMMED=1, FEEDBACK=1), int8.program("decode", ADDING=1)]
    return found


def architectures():
    return [70, 75, 80, 90] if nvrtc.version()[0] == 12 else [75, 80, 90]


def test_every_source_file_is_compiled_here():
    used = {"prelude"}.union(*(program.parts for program in programs()))
    there = {path.stem for path in Path(package.__file__).parent.glob("*.cuh")}
    assert used == there


def test_every_program_compiles_for_every_architecture_within_registers():
    def build(job):
        program, number = job
        options = (*OPTIONS, f"--gpu-architecture=sm_{number}", "--ptxas-options=-v")
        return program, number, nvrtc.compiled(program.source(), options)

    # Every file for all architectures; the other paths through it for one each, in turn.
    numbers, every = architectures(), programs()
    files = {(program.parts, program.kernels): program for program in every}
    jobs = [(p, n) for p in files.values() for n in numbers]
    others = [program for program in every if program not in files.values()]
    jobs += [(p, numbers[i % len(numbers)]) for i, p in enumerate(others)]
    with ThreadPoolExecutor(2) as pool:
        for program, number, (binary, ptx, log) in pool.map(build, jobs):
            what = f"{program.parts} {dict(program.constants)} for sm_{number}: {log}"
            assert binary, what
            assert ptx, what
            warnings = [line for line in log.splitlines() if "warning" in line]
            assert all("deprecated" in line for line in warnings), what
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
            assert max(spilled) < 64, what
