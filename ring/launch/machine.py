"""What this machine has, and whether ranks can be started and connected with it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ringlet.ring.errors import RingError
from ringlet.ring.launch import start
from ringlet.ring.rendezvous.environment import detect
from ringlet.ring.transports import nccl_library
from ringlet.ring.variables import check, unknown

# By the names of the distributions that bring each; the first that is installed counts.
PACKAGES = {name: (name,) for name in ("ringlet", "numpy", "numba", "torch")} | {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "jax": ("jax",),
    "mpi4py": ("mpi4py",),
    "cloudpickle": ("cloudpickle",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "tf_keras": ("tf_keras", "tf_keras-nightly"),
    "optax": ("optax",),
    "mxnet": ("mxnet",),
    "ray": ("ray",),
    "pyspark": ("pyspark",),
}
NEEDED = ("numpy", "numba")
SELDOM = ("cupy", "tf_keras", "optax", "mxnet", "ray", "pyspark")  # told of where they are
_MPI = "from mpi4py import MPI; print(MPI.Get_library_version().strip())"


@dataclass(frozen=True)
class Finding:
    """A line of the report. ``good`` is False for what has to be put right."""

    name: str
    text: str
    good: bool = True


def versions() -> dict[str, str]:
    """Return the version of Python and of every package that matters; empty if it is missing."""
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next(filter(None, map(_version, distributions)), "")
    return found


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def examine(env: Mapping[str, str]) -> list[Finding]:
    """Return what there is to say about this machine and about ``env``."""
    findings = []
    for name, version in versions().items():
        if not version and name in SELDOM:
            continue
        missing = not version and name in NEEDED
        findings.append(Finding(name, version or "not installed", not missing))
    if findings_mpi := _mpi_library():
        findings.append(findings_mpi)
    cores = len(os.sched_getaffinity(0))
    findings.append(Finding("cpu", f"{_cpu()}, {cores} of {os.cpu_count()} cores usable"))
    lacking = start.lacking()
    for name, why in lacking.items():
        findings.append(Finding(f"transport {name}", f"not available: {why}" if why else "yes"))
    findings.append(Finding("transport local", "yes (ranks as threads of one process)"))
    missing_nccl = nccl_library.lacking()
    why_not = f"not available: {missing_nccl.why}" if missing_nccl else "yes"
    findings.append(Finding("transport nccl", why_not))
    if all(lacking.values()):
        remedy = "pip install 'ringlet[mpi]' or 'ringlet[torch]'"
        findings.append(Finding("transports", f"none that joins processes: {remedy}", False))
    ssh = shutil.which("ssh")
    findings.append(Finding("remote shell", ssh or "no ssh here: other hosts need --rsh"))
    try:
        found = detect(env)
        text = f"{found.launcher}: rank {found.rank} of {found.size} over {found.transport}"
        findings.append(Finding("launcher", text))
    except RingError as error:
        findings.append(Finding("launcher", str(error), False))
    try:
        check(env)
    except ValueError as error:
        findings.append(Finding("environment", str(error), False))
    if strangers := unknown(env):
        text = f"{', '.join(strangers)}: no variable of Ringlet's, and not read"
        findings.append(Finding("environment", text))
    return findings


def _mpi_library() -> Finding | None:
    """Ask the MPI library who it is, in a process of its own, which some libraries end."""
    if start.lacking()["mpi"] is not None:
        return None
    outer = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MPI],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("mpi library", "does not start within 60 s", False)
    lines = done.stdout.split("\n")
    if done.returncode or not lines[0]:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return Finding("mpi library", f"does not start; it said: {said}", False)
    return Finding("mpi library", " ".join(lines[0].split()))


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
