"""``ringlet new``: a package for a compressor of one's own, with its test and entry point."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from ringlet.compressors.specs.registry import name_problem, names

EXAMPLES = """\
ringlet new sign                        # makes ringlet-sign/: plugin and test
ringlet check "ringlet_sign:Sign | ef"  # in that folder
ringlet new companded --kind modifier   # changes how another compressor works"""
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "ringlet-{name}"
version = "0.1.0"
dependencies = ["ringlet"]

[project.optional-dependencies]
test = ["pytest"]

# This line lets Ringlet find the compressor by its name wherever the package is installed.
[project.entry-points."ringlet.compressors"]
{name} = "ringlet_{name}:{cls}"

[tool.setuptools]
py-modules = ["ringlet_{name}"]
"""

_PAYLOAD = '''\
"""The {name} compressor for Ringlet."""

from ringlet.compressors import Compressor, Traits, option, register


@register("{name}")
class {cls}(Compressor):
    """Send the entries as whole steps of the largest one. Replace this by what yours does."""

    levels: int = option(127, ge=1, le=127, doc="steps from zero to the largest entry")

    def traits(self):
        # What is declared here is tested, and lets the engine choose faster ways to reduce.
        return Traits()

    def compress(self, x, ctx):
        # x: flat float32 array of module ctx.xp, perhaps an empty one; do not change it.
        xp = ctx.xp
        largest = xp.abs(x).max(keepdims=True) if x.size else xp.zeros(1, "float32")
        # The step comes from the values: a gradient of half the size gives half the result. Of NaN
        # or Inf it becomes NaN or Inf itself, so that an overflow stays visible.
        step = largest / xp.float32(self.levels)
        usable = xp.isfinite(step) & (step > 0)
        codes = xp.where(usable, xp.rint(x / xp.where(usable, step, 1)), 0)
        # What is returned travels: flat arrays, and new ones.
        return {{"codes": codes.astype("int8"), "step": step}}

    def decompress(self, payload, out, ctx):
        # Overwrite every element of out (flat float32). 0 * NaN and 0 * Inf are NaN.
        out[:] = payload["codes"] * payload["step"]
'''

_ROUNDS = '''\
"""The {name} compressor for Ringlet, whose ranks agree on something first."""

from ringlet.compressors import Compressor, Round, Traits, option, register


@register("{name}")
class {cls}(Compressor):
    """Add up whole steps of the largest entry of all ranks. Replace this by what yours does."""

    levels: int = option(127, ge=1, le=127, doc="steps from zero to the largest entry")

    def traits(self):
        # What is declared here is tested, and lets the engine choose faster ways to reduce.
        return Traits(combine="rounds")

    def exchange(self, x, out, ctx, local=None):
        # x: flat float32 array of module ctx.xp, perhaps an empty one; do not change it. Every rank
        # yields the same rounds, of the same lengths. What is yielded must not change until the
        # round is over: new arrays do, or ctx.workspace.held(n).
        xp = ctx.xp
        largest = xp.abs(x).max(keepdims=True) if x.size else xp.zeros(1, "float32")
        # A maximum may lose NaN. Inf makes NaN of the result, so that an overflow stays visible.
        visible = xp.where(xp.isnan(largest), xp.float32("inf"), largest)
        largest = yield Round(visible, "max")
        step = largest / xp.float32(self.levels)
        usable = xp.isfinite(step) & (step > 0)
        codes = xp.where(usable, xp.rint(x / xp.where(usable, step, 1)), 0)
        fits = self.levels * ctx.size < 1 << 15
        codes = codes.astype("int16" if fits else "int32")
        total = yield Round(codes, "sum")
        # The mean of all ranks, in every element of out.
        out[:] = total * (step / xp.float32(ctx.size))
        if local is not None:
            # What of it stands for this rank's own x: "| ef" keeps the rest.
            local[:] = codes * step
'''

_MODIFIER = '''\
"""The {name} modifier for Ringlet: it stands behind the compressor that it changes."""

import dataclasses

from ringlet.compressors import Modifier, option, register


@register("{name}")
class {cls}(Modifier):
    """Compress powers of the entries, so that small ones get finer steps. Replace this by yours."""

    power: float = option(0.5, ge=0.5, le=1, doc="what entries are raised to")

    def traits(self):
        # Those of the compressor in front, but for what holds no longer: sums of powers are no
        # powers of sums, and their mean is not right.
        inner = self.wrapped_compressor.traits()
        return dataclasses.replace(inner, combine="gather", omega=None, delta=None)

    def compress(self, x, ctx):
        # x: flat float32 array of module ctx.xp, perhaps an empty one; do not change it.
        xp = ctx.xp
        return super().compress(xp.sign(x) * xp.abs(x) ** xp.float32(self.power), ctx)

    def decompress(self, payload, out, ctx):
        # The compressor overwrites every element of out (flat float32).
        xp = ctx.xp
        super().decompress(payload, out, ctx)
        out[:] = xp.sign(out) * xp.abs(out) ** xp.float32(1 / self.power)
'''

_IMPORTED = {"Compressor", "Modifier", "Round", "Traits"}  # by the modules above
_MODULES = {"payload": _PAYLOAD, "rounds": _ROUNDS, "modifier": _MODIFIER}

_TEST = '''\
"""Whether {name} is what it claims to be."""

from ringlet.compressors.testing import parametrize_with_checks

import ringlet_{name}  # noqa: F401, which registers it


@parametrize_with_checks(["{before}{name}", "{before}{name} | ef"])
def test_conformance(compressor, check):
    check(compressor)
'''

_README = """\
# ringlet-{name}

A gradient compressor for Ringlet. Install it with `pip install -e '.[test]'`, test it with
`pytest`, use it with `compression="{before}{name} | ef"`. Before it is installed, here,
`ringlet check "{before}ringlet_{name}:{cls} | ef"` says what is wrong and what to do. What a
compressor has to keep to is in Ringlet's docs/own-compressor.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringlet new``."""
    parser.description = "Make a package for a compressor: plugin, test and entry point."
    parser.add_argument("name", help="the compressor's name in specs, such as 'sign'")
    parser.add_argument(
        "--kind",
        choices=tuple(_MODULES),
        default="payload",
        help="payload: each rank compresses by itself (default); rounds: ranks agree on something "
        "first; modifier: it changes how another compressor works",
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to; default: ringlet-NAME, here"
    )


def main(options: argparse.Namespace) -> int:
    """Write the files; return 2, and write nothing, if the name or place will not do."""
    name = options.name
    directory = options.directory or Path(f"ringlet-{name}")
    problem = ""
    if (found := name_problem(name)) is not None:
        problem = found
    elif not name.isascii() or not name[0].isalpha():
        problem = f"a package's name has ASCII letters, and begins with one, unlike {name!r}"
    elif name in names():
        problem = f"there is a compressor {name!r} already"
    else:
        problem = _occupied(directory)
    if problem:
        print(f"ringlet new: {problem}", file=sys.stderr)
        return 2
    cls = "".join(word.title() for word in name.split("_"))
    if cls in _IMPORTED:
        cls += "Compressor"
    before = "int8 | " if options.kind == "modifier" else ""
    files = {
        "pyproject.toml": _PYPROJECT,
        f"ringlet_{name}.py": _MODULES[options.kind],
        f"tests/test_{name}.py": _TEST,
        "README.md": _README,
    }
    for path, template in files.items():
        target = directory / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(template.format(name=name, cls=cls, before=before))
        except OSError as error:
            print(f"ringlet new: {target} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
        print(f"wrote {target}")
    print(f"\nNext: cd {shlex.quote(str(directory))} && pip install -e '.[test]' && pytest")
    return 0


def _occupied(directory: Path) -> str:
    """Return why nothing can be written to ``directory``, or "": it is to be new, or empty."""
    try:
        for above in directory.parents:
            if above.exists() and not above.is_dir():
                return f"{above} is a file, and {directory} would be in it"
        if not directory.exists():
            return ""
        if not directory.is_dir():
            return f"{directory} is a file"
        return f"{directory} exists and is not empty" if any(directory.iterdir()) else ""
    except OSError as error:
        return f"{directory} cannot be looked at: {error.strerror}"
