"""Files that are written where others may write too, such as in /tmp.

Whoever puts a link where a file is going to be would have its target overwritten, in the name of
the user who writes; a pipe without a reader would have him wait. Whoever puts a file of his own
there could read what is written, and change it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def create(path: str | os.PathLike[str], append: bool = False) -> int:
    """Return a descriptor of ``path``, new or emptied, to write to; ``append`` keeps what is there.

    Raises OSError, telling what to do, where ``path`` is a link, symbolic or one of several names
    of a file, a pipe that nobody reads, or a stranger's in a folder such as /tmp. So where a
    folder on the way to it, or a link to one, is such a stranger's.
    """
    where = os.fspath(path)
    _refuse_the_way(where)
    # What is there is looked at before it is emptied.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(where, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            text = "is a symbolic link, and nothing is written through it; name the file itself"
            raise OSError(errno.ELOOP, text, where) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "is a pipe that nobody reads", where) from None
        raise
    try:
        found = os.fstat(descriptor)
        if _planted(found, os.path.dirname(where) or "."):
            text = "belongs to another user, and is not written to; name another file"
            raise OSError(errno.EACCES, text, where)
        if stat.S_ISREG(found.st_mode):
            if found.st_nlink > 1:
                text = "is a file of several names, and not overwritten; remove this name first"
                raise OSError(errno.EMLINK, text, where)
            if append:
                os.lseek(descriptor, 0, os.SEEK_END)
            else:
                os.ftruncate(descriptor, 0)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_unfollowed(where: str) -> int:
    """Return a descriptor to read from, without waiting; PermissionError for a symbolic link."""
    try:
        return os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            text = "is a symbolic link, and not read through"
            raise PermissionError(errno.EPERM, text, where) from None
        raise


def open_own(path: str | os.PathLike[str], owners: Container[int] | None = None) -> int:
    """Return a descriptor of the file ``path``, to read from, that leads nowhere else.

    Raises OSError, telling why, where ``path`` is a link, symbolic or one of several names of a
    file, no file, such as a pipe, or of a user who is none of ``owners`` (None: anybody's).
    """
    where = os.fspath(path)
    descriptor = _open_unfollowed(where)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no file, and not read", where)
        if found.st_nlink > 1:
            raise OSError(errno.EMLINK, "is a file of several names, and not read", where)
        if owners is not None and found.st_uid not in owners:
            raise OSError(errno.EACCES, "belongs to another user, and is not read", where)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: str | os.PathLike[str]) -> bytes:
    """Return what is in a file that nobody but this user, and root, can have written.

    For what is run. Raises PermissionError, telling why, where ``path`` is another's, or may be: a
    link, a pipe, or a file that others may write to. On disks that keep no owners or no modes, such
    as a share, it is enough that a new file looks the same. Raises OSError where it cannot be read.
    """
    where = os.fspath(path)
    descriptor = _open_unfollowed(where)
    try:
        found, why = os.fstat(descriptor), ""
        if not stat.S_ISREG(found.st_mode):
            why = "is no file"
        elif found.st_uid not in (os.geteuid(), 0):
            why = "belongs to another user"
        elif found.st_mode & _OTHERS:
            why = "may be written to by other users"
        if why and not _all_are_so(found, where):
            raise PermissionError(errno.EPERM, why, where)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _all_are_so(found: os.stat_result, where: str) -> bool:
    """Whether a file that this user makes beside ``where`` has that owner, and is as open."""
    if not stat.S_ISREG(found.st_mode):
        return False
    beside = f"{where}.{secrets.token_hex(8)}.part"
    try:
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        made = os.fstat(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(beside)
    return made.st_uid == found.st_uid and not found.st_mode & _OTHERS & ~made.st_mode


def refuse_others(path: str | os.PathLike[str], *beginnings: bytes) -> None:
    """Raise FileExistsError where ``path`` is a file with another beginning than these: not ours.

    A program, say, that somebody has named by mistake. An empty file is nobody's.
    """
    where, head = os.fspath(path), b""
    # Such as one that is not there; ``create`` tells of others.
    with suppress(OSError), open(_open_unfollowed(where), "rb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            head = file.read(max(map(len, beginnings)))
    if head and not any(head.startswith(each[: len(head)]) for each in beginnings):
        text = "is there already, and holds something else: it is not overwritten"
        raise FileExistsError(errno.EEXIST, text, where)


def refuse_devices(path: str | os.PathLike[str]) -> None:
    """Raise FileExistsError where ``path`` is no file that another one may take the place of."""
    where = os.fspath(path)
    try:
        kind = os.lstat(where).st_mode
    except OSError:  # such as of one that is not there
        return
    if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)):
        text = "is a device, a pipe or a socket, and is not replaced; name a file"
        raise FileExistsError(errno.EEXIST, text, where)


def _planted(found: os.stat_result, folder: str) -> bool:
    """Return ``is_planted`` of what is in the ``folder`` of that name."""
    return found.st_uid != os.geteuid() and is_planted(found, os.stat(folder))


def is_planted(found: os.stat_result, around: os.stat_result) -> bool:
    """Whether a file is a stranger's in a folder ``around`` it where all may make, none remove.

    Some kernels refuse to open such a file by themselves (fs.protected_regular), and some do not.
    """
    if found.st_uid == os.geteuid():
        return False
    shared = around.st_mode & stat.S_ISVTX and around.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    return bool(shared) and found.st_uid != around.st_uid


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those above it, unless they are there.

    Raises OSError where one of them, or a link to it, is a stranger's in a folder such as /tmp, and
    where ``path`` is something else.
    """
    _refuse_strangers(on_the_way(path))  # before: nothing is made behind a stranger's link
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        text = "is there already, and is no folder; name another one"
        raise FileExistsError(errno.EEXIST, text, os.fspath(path)) from None
    _refuse_strangers(on_the_way(path))


def _refuse_strangers(found: str) -> None:
    """Raise OSError where ``on_the_way`` has found something."""
    if found:
        text = "belongs to another user, and nothing is written there; name another folder"
        raise OSError(errno.EACCES, text, found)


def _refuse_the_way(where: str) -> None:
    """Raise OSError where a stranger could lead elsewhere what is written to the file ``where``."""
    try:
        found = on_the_way(os.path.dirname(where) or ".")
    except OSError as error:  # such as of a folder that is not there: the file is what was named
        raise OSError(error.errno, error.strerror, where) from None
    _refuse_strangers(found)


def on_the_way(path: str | os.PathLike[str]) -> str:
    """Return which folder, or link, on the way to a folder is a stranger's in one such as /tmp.

    Itself included, as far as they are there; empty where none is.
    """
    whole = Path(os.path.abspath(path))
    for part in (whole, *whole.parents[:-1]):  # a link may lead anywhere, so as they are named
        with suppress(FileNotFoundError, NotADirectoryError):
            if _planted(os.lstat(part), os.fspath(part.parent)):
                return os.fspath(part)
    return ""


def planted_in(path: str | os.PathLike[str]) -> list[str]:
    """Return what in a folder is a stranger's, if it is one where all may write, such as /tmp."""
    found = []
    for each in (os.path.join(path, name) for name in sorted(os.listdir(path))):
        with suppress(FileNotFoundError):  # others may make files there, and rename them
            if _planted(os.lstat(each), os.fspath(path)):
                found.append(each)
    return found


def create_text(
    path: str | os.PathLike[str], newline: str | None = None, append: bool = False
) -> TextIO:
    """Return ``create(path, append)`` as a text file in UTF-8, written line by line."""
    return os.fdopen(create(path, append), "w", buffering=1, encoding="utf-8", newline=newline)


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that becomes ``path`` at the end; after an error nothing has changed.

    ``mode`` is who may read and write it, of which the umask takes away.

    Where ``path`` is a link, that is replaced and not what it leads to. Raises FileExistsError
    where it is a device or a pipe: whoever may would make a file of /dev/null, for all. Nothing
    that was there is written to, so the folder may be a colleague's, such as one for checkpoints.
    """
    refuse_devices(path)
    where = Path(path)
    beside = where.with_name(f"{where.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(beside, flags, mode), "wb") as file:
            yield file
        os.replace(beside, where)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
