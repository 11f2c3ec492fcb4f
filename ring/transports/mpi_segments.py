"""The shared memory of MPICH's ranks, which would outlive a job that fails.

MPICH 5 gives the file back in MPI_Finalize, which nobody reaches who is killed. Without its name it
goes with the last process that maps it, and MPI_Finalize does not miss it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_SEGMENT = re.compile(r" (\d+) +(/dev/shm/mpich_shm_[^/\s]+)$", re.MULTILINE)


def take_names_away() -> None:
    """Remove the names of MPICH's segments that this process maps, once all ranks map them."""
    with suppress(OSError):  # no such system: nothing is there to remove
        for inode, path in set(_SEGMENT.findall(_MAPS.read_text(errors="surrogateescape"))):
            with suppress(OSError):  # another rank was faster
                if os.stat(path, follow_symlinks=False).st_ino == int(inode):
                    os.unlink(path)
