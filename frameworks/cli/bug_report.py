"""``ringlet env``: what a bug report needs, without secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys

from ringlet.compressors.specs.registry import built_in, names
from ringlet.job.capabilities import gpu_path
from ringlet.ring.hosts.forwarding import is_credential
from ringlet.ring.launch.machine import examine
from ringlet.ring.variables import UNDERSTOOD, VARIABLES

EXAMPLES = """\
ringlet env                # paste what it prints into a bug report
ringlet env --json         # the same for a script"""
DESCRIPTION = """\
Print versions, transports, hardware, plugins and the variables that are set:
what a bug report needs. Values of secrets are left out. Nothing is measured and
no rank is started."""
_FAMILIES = ("OMP_", "NCCL_", "GLOO_", "MPICH_", "UCX_", "FI_", "CUDA_VISIBLE", "NUMBA_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``ringlet env``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(options: argparse.Namespace) -> int:
    """Print the facts; return 0."""
    facts = gathered()
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    for title, found in facts.items():
        print(f"{title}:")
        width = max(map(len, found), default=0)
        for name, text in found.items():
            print(f"  {name:<{width}}  {_printable(text)}")
        if not found:
            print("  none")
    return 0


def _printable(text: str) -> str:
    """Return ``text`` with escapes for what a terminal, or a bug report, would not show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def gathered() -> dict[str, dict[str, str]]:
    """Return what there is to say, by section and name."""
    machine = {
        "system": platform.platform(),
        "python": f"{sys.version.split()[0]} ({platform.python_implementation()})",
        "memory": _memory(),
        "gpu": _gpus(),
        "tensors on GPUs": gpu_path(),
    }
    installed = {f.name: f.text for f in examine(os.environ) if f.name not in machine}
    plugins = {name: "compressor" for name in names() if name not in built_in()}
    return {
        "machine": machine,
        "installed": installed,
        "plugins": plugins,
        "variables": variables(os.environ),
    }


def variables(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables of ``env`` that matter to a job, without the values of secrets."""
    ours = VARIABLES.keys() | UNDERSTOOD.keys()
    found = {}
    for name in sorted(env):
        if name in ours or name.startswith(("RINGLET_", "HOROVOD_", *_FAMILIES)):
            found[name] = "(set, not shown)" if is_credential(name) else env[name]
    return found


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB"


def _gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none (no nvidia-smi)"
    asked = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).split("\n")
    return "; ".join(line.strip() for line in lines if line.strip()) or "none"
