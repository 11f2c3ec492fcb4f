"""CUDA C++ source of a program: a few files and the constants it is compiled with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# Contraction to fused multiply-add is off: results are to equal the CPU's bit for bit.
THREADS = 256  # of a block, as a rule
OPTIONS = ("--std=c++17", "--fmad=false")


@dataclass(frozen=True)
class Program:
    """What is compiled as one module.

    ``parts`` names the files behind the prelude in order, as ROOM/NAME; ``kernels`` the entry
    points, each of which takes one struct by value and is launched in blocks of ``threads``;
    ``constants`` become macros.
    """

    parts: tuple[str, ...]
    kernels: tuple[str, ...]
    constants: tuple[tuple[str, int | float | str], ...] = ()
    threads: int = THREADS

    def source(self) -> str:
        """Return the C++ text."""
        lines = [f"#define {name} {value}" for name, value in self.constants]
        lines.append(f"#define THREADS {self.threads}")
        return "\n".join([*lines, *(_text(part) for part in ("runtime/prelude", *self.parts))])


@cache
def _text(part: str) -> str:
    return files("ringlet.compressors.kernels.cuda").joinpath(f"{part}.cuh").read_text()
