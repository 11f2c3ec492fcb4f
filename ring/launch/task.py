"""One rank of ``ringlet.run``: ``python -m ringlet.ring.launch.task DIRECTORY``.

The directory is private to the caller's user; call and results are files in it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from ringlet.ring.errors import LOST_PEER, PeerLost
from ringlet.ring.launch.parcel import error_file, pickler, result_file


def main(directory: Path, rank: int) -> int:
    """Call the function, leave its result or its traceback; return the exit code."""
    try:
        with (directory / "call").open("rb") as file:
            sys.path[:] = pickle.load(file)  # before the function's modules are needed
            fn, args, kwargs = pickle.load(file)
        data = pickler().dumps(fn(*args, **kwargs))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        error_file(directory, rank).write_text(text, errors="backslashreplace")
        if isinstance(error, KeyboardInterrupt):
            raise
        return LOST_PEER if isinstance(error, PeerLost) else 1
    # Renamed when complete: a result is there as a whole or not at all.
    partial = directory / f"partial-{rank}"
    partial.write_bytes(data)
    partial.replace(result_file(directory, rank))
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(os.environ["RINGLET_RANK"]))
    if code:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # MPI_Finalize would wait for ranks that wait for this one
