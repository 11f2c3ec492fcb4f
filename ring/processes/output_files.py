"""The files that keep what each rank prints, opened so that nobody can lead them elsewhere.

The folder may be in a place where others can write. So below it no link is followed, and a file has
to be an ordinary one, of this user, that has no other name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from typing import BinaryIO

from ringlet.ring.errors import LaunchError
from ringlet.ring.safe_files import is_planted, make_folder

NAMES = {1: "stdout", 2: "stderr"}


def open_files(
    directory: str, ranks: Iterable[int], width: int = 1
) -> dict[tuple[int, int], BinaryIO]:
    """Open ``rank.N/stdout`` and ``rank.N/stderr`` in ``directory`` for each N of ``ranks``.

    N is filled up to ``width`` digits. The files are returned by rank and stream (1 or 2), and
    empty. Raises LaunchError.
    """
    files: dict[tuple[int, int], BinaryIO] = {}
    with contextlib.ExitStack() as opened:
        place = directory
        try:
            make_folder(directory)
            top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, top)
            for rank in ranks:
                place = name = f"rank.{rank:0{width}d}"
                folder = _open_folder(name, top)
                try:
                    for stream, file in NAMES.items():
                        place = f"{name}/{file}"
                        files[rank, stream] = _open_file(file, folder)
                finally:
                    os.close(folder)
        except OSError as error:
            for one in files.values():
                one.close()
            at = "" if place == directory else f", {place}"
            link = error.errno in (errno.ELOOP, errno.ENOTDIR)
            why = "is a symbolic link, or no folder" if link else error.strerror or str(error)
            raise LaunchError(f"--output-filename {directory}{at}: {why}") from error
    return files


def _open_folder(name: str, parent: int) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(name, flags, dir_fd=parent)
    if is_planted(os.fstat(folder), os.fstat(parent)):  # who could rename the files in it
        os.close(folder)
        text = "belongs to another user, and nothing is written there; name another folder"
        raise OSError(errno.EACCES, text, name)
    return folder


def _open_file(name: str, folder: int) -> BinaryIO:
    # A pipe of that name would make opening wait, hence O_NONBLOCK.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not plain or found.st_uid != os.geteuid():
            raise OSError("is not an ordinary file of this user alone: remove it")
        os.ftruncate(descriptor, 0)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "wb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise
