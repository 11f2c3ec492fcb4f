"""Compiling CUDA C++ with NVRTC, for one architecture, once: binaries are kept on disk.

CuPy's own ``RawModule`` is of no use here: it flushes subnormal numbers to zero, which results
equal to the CPU's do not allow.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.kernels.cuda.runtime.source import OPTIONS, Program
from ringlet.ring.safe_files import read_own

log = logging.getLogger("ringlet")

_MADE_OF = b"ringlet kernel of "  # then a digest of the source, one of the binary, and the binary

_told: set[str] = set()  # why binaries are not kept, which is said once


def binary(program: Program, capability: int, nvrtc: Any) -> bytes:
    """Return ``program`` for GPUs of compute ``capability`` (90 for 9.0): machine code.

    PTX where this NVRTC is older than the GPU. ``nvrtc`` is CuPy's module of that name. Raises
    CompressorError with the compiler's log.
    """
    known = [arch for arch in nvrtc.getSupportedArchs() if arch <= capability]
    if not known:
        raise CompressorError(f"this NVRTC does not know GPUs of compute capability {capability}")
    exact = known[-1] == capability
    target = f"sm_{capability}" if exact else f"compute_{known[-1]}"
    options = (*OPTIONS, f"--gpu-architecture={target}")
    source = program.source()
    said = (source, *options, str(nvrtc.getVersion()))
    digest = hashlib.sha256("\0".join(said).encode())
    head = _MADE_OF + digest.digest()
    with contextlib.suppress(OSError, RuntimeError):
        kept = read_own(_folder() / digest.hexdigest())
        made = kept[len(head) + digest.digest_size :]
        # Whoever may rename files there could give it another's name; and the power may have gone.
        if kept == head + hashlib.sha256(made).digest() + made:
            return made
    made = _compiled(source, options, nvrtc, exact)
    try:
        _keep(_folder() / digest.hexdigest(), head + hashlib.sha256(made).digest() + made)
    except (OSError, RuntimeError) as error:  # a full disk, say: it works without a file
        _tell(getattr(error, "strerror", None) or str(error))
    return made


def _compiled(source: str, options: tuple[str, ...], nvrtc: Any, exact: bool) -> bytes:
    handle = nvrtc.createProgram(source, "ringlet.cu", (), ())
    try:
        nvrtc.compileProgram(handle, options)
        made = nvrtc.getCUBIN(handle) if exact else nvrtc.getPTX(handle)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(handle)
        raise CompressorError(f"NVRTC refuses a kernel: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(handle)
    return made.encode() if isinstance(made, str) else bytes(made)


def _folder() -> Path:
    """Return where binaries are kept; RuntimeError where nothing says so, not even a home."""
    named = os.environ.get("RINGLET_KERNEL_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ringlet" / "kernels"


def _keep(place: Path, made: bytes) -> None:
    """Write as a whole or not at all: several ranks may compile at once."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(made)
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _tell(why: str) -> None:
    if why not in _told:
        _told.add(why)
        log.warning(
            "compiled CUDA kernels cannot be kept (%s), so that each process compiles them anew; "
            "RINGLET_KERNEL_CACHE names another folder",
            why,
        )
