"""Files in folders where others may write: links are not written through, nor pipes waited for."""

import os
import socket
import stat
from contextlib import nullcontext

import pytest

from ringlet.ring.safe_files import (
    create,
    create_text,
    make_folder,
    on_the_way,
    open_own,
    planted_in,
    read_own,
    refuse_others,
    replacing,
)


def write(path):
    descriptor = create(path)
    os.write(descriptor, b"new")
    os.close(descriptor)


def test_a_file_is_made_or_emptied(tmp_path):
    path = tmp_path / "a"
    for before in (None, "something longer"):
        if before is not None:
            path.write_text(before)
        write(path)
        assert path.read_text() == "new"
    before = os.umask(0o022)
    try:
        write(tmp_path / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o644
    with create_text(path) as file:
        file.write("ä\n")
        assert path.read_bytes() == b"\xc3\xa4\n"  # a line is written at its end
    write("/dev/null")


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_written_through_a_symbolic_link(tmp_path, there):
    target, link = tmp_path / "target", tmp_path / "link"
    if there:
        target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(OSError, match=f"is a symbolic link, .*{link}"):
        create(link)
    assert link.is_symlink()
    assert target.exists() == there
    assert not there or target.read_text() == "precious"


def test_a_file_of_several_names_is_left_alone(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    os.link(target, tmp_path / "link")
    with pytest.raises(OSError, match="is a file of several names"):
        create(tmp_path / "link")
    assert target.read_text() == "precious"


def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a pipe that nobody reads"):
        create(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        descriptor = create(path)
        assert os.get_blocking(descriptor)
        os.write(descriptor, b"new")
        os.close(descriptor)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of others")
@pytest.mark.parametrize("pipe", [False, True])
def test_what_a_stranger_has_put_where_all_may_write_is_left_alone(tmp_path, pipe):
    path = tmp_path / "a"
    os.mkfifo(path, 0o666) if pipe else path.touch(0o666)
    os.chown(path, 65534, 65534)
    tmp_path.chmod(0o1777)  # as /tmp is
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="belongs to another user"):
            create(path)
        tmp_path.chmod(0o755)  # a folder of one's own, which a container may share
        write(path)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of others")
@pytest.mark.parametrize("link", [False, True])
def test_no_folder_is_made_in_a_strangers_where_all_may_write(tmp_path, link):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for each in (shared, own):
        each.mkdir()
    shared.chmod(0o1777)  # as /tmp is
    planted = shared / "board"
    planted.symlink_to(own) if link else planted.mkdir()
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    with pytest.raises(OSError, match="belongs to another user") as caught:
        make_folder(planted / "rank0")
    assert caught.value.filename == str(planted)
    assert not [*planted.iterdir()]  # nor before it was refused
    for fine in (shared / "mine" / "rank0", own / "rank0", own / "rank0"):
        make_folder(fine)
        assert fine.is_dir()


def test_a_file_where_a_folder_is_to_be_is_told(tmp_path):
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(FileExistsError, match="is there already, and is no folder; name another"):
        make_folder(tmp_path / "run.jsonl")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make folders of others")
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("below", ["", "inside"])
def test_no_file_is_made_behind_a_strangers_folder_where_all_may_write(tmp_path, link, below):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for each in (shared, own / "inside"):
        each.mkdir(parents=True)
    shared.chmod(0o1777)  # as /tmp is
    planted = shared / "runs"
    if link:
        planted.symlink_to(own)
    else:
        (planted / "inside").mkdir(parents=True)
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    path = planted / below / "a"
    with pytest.raises(OSError, match="belongs to another user") as caught:
        create(path)
    assert caught.value.filename == str(planted)
    assert not [*(planted / below).glob("a*")]
    (shared / "mine").symlink_to(own)  # a link of one's own, to a folder of one's own
    write(shared / "mine" / below / "a")
    with replacing(path):  # of a name that nobody can know before
        pass


@pytest.mark.parametrize("pipe", [False, True])
def test_a_file_that_a_pipe_takes_the_place_of_is_not_waited_for(tmp_path, monkeypatch, pipe):
    """Between a look at its name and the moment when it is opened."""
    path = tmp_path / "records"
    path.write_bytes(b"other")
    looks_at = os.lstat
    seen = looks_at(path)
    if pipe:
        path.unlink()
        os.mkfifo(path)
    monkeypatch.setattr(os, "lstat", lambda where: seen if where == str(path) else looks_at(where))
    with nullcontext() if pipe else pytest.raises(FileExistsError):
        refuse_others(path, b"{")


def test_a_missing_folder_is_told_by_the_files_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path, error in (
        (tmp_path / "none" / "none" / "a", FileNotFoundError),
        (tmp_path / "file" / "a", NotADirectoryError),
        (tmp_path / "file" / "b" / "a", NotADirectoryError),
    ):
        with pytest.raises(error) as caught:
            create(path)
        assert caught.value.filename == str(path)
    monkeypatch.chdir(tmp_path)
    write("a")
    assert (tmp_path / "a").read_text() == "new"


def test_what_leads_elsewhere_is_not_read(tmp_path):
    path = tmp_path / "a"
    path.write_text("text")
    with os.fdopen(open_own(path, {os.geteuid()})) as file:
        assert file.read() == "text"
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_own(path, {os.geteuid() + 1})
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="is a symbolic link"):
        open_own(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="is no file, and not read"):
            open_own(other)
    os.link(path, tmp_path / "another")
    with pytest.raises(OSError, match="is a file of several names"):
        open_own(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make folders of others")
def test_what_strangers_have_put_into_a_folder_of_all_is_found(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp is
    own, planted = shared / "own", shared / "planted"
    for each in (own, own / "inside", planted):
        each.mkdir()
    os.chown(own / "inside", 65534, 65534)  # which nobody but its owner's can have put there
    assert planted_in(shared) == planted_in(own) == []
    os.chown(planted, 65534, 65534)
    assert planted_in(shared) == [str(planted)]
    assert on_the_way(planted) == str(planted)
    assert on_the_way(own / "inside") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make links of others")
def test_a_folder_that_is_not_there_yet_may_be_on_a_strangers_way(tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for each in (shared, own):
        each.mkdir()
    shared.chmod(0o1777)  # as /tmp is
    for name, target in ("link", own), ("dangling", own / "gone"):
        link = shared / name
        link.symlink_to(target)
        os.chown(link, 65534, 65534, follow_symlinks=False)
        for place in (link, link / "cache", link / "cache" / "deep"):
            assert on_the_way(place) == str(link)
    (own / "file").touch()
    for fine in (own / "a" / "b", shared / "a", own / "file" / "a"):
        assert on_the_way(fine) == ""


def test_only_files_that_nobody_else_can_have_written_are_read(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"own")
    for mode in (0o600, 0o644, 0o444, 0o755):
        path.chmod(mode)
        assert read_own(path) == b"own"
    for mode in (0o664, 0o646, 0o620):
        path.chmod(mode)
        with pytest.raises(PermissionError, match=f"may be written to by other users.*{path}"):
            read_own(path)
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(PermissionError, match="is a symbolic link"):
        read_own(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o644)
    for other in (tmp_path / "pipe", tmp_path):
        with pytest.raises(PermissionError, match="is no file"):
            read_own(other)
    with pytest.raises(FileNotFoundError):
        read_own(tmp_path / "nothing")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(PermissionError, match="belongs to another user"):
            read_own(path)
        os.chown(path, 0, 0)
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        assert read_own(path) == b"own"  # root's
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "link", "pipe"]


def test_on_a_disk_without_owners_or_modes_files_are_ones_own(tmp_path, monkeypatch):
    """A share may show one owner, and one mode, of all that is on it."""
    path, usual = tmp_path / "a", os.fstat
    path.write_bytes(b"own")
    path.chmod(0o644)

    def shown(descriptor):
        found = list(usual(descriptor))
        found[stat.ST_MODE], found[stat.ST_UID] = stat.S_IFREG | 0o777, 4711
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", shown)
    assert read_own(path) == b"own"
    monkeypatch.setattr(os, "fstat", lambda fd: shown(fd) if usual(fd).st_size else usual(fd))
    with pytest.raises(PermissionError, match="belongs to another user"):
        read_own(path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    target, path = tmp_path / "target", tmp_path / "a"
    target.write_text("precious")
    path.symlink_to(target)
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("no bytes")
    assert path.is_symlink()
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert target.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "target"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    """Root, in a container, would make a file of /dev/null."""
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("needs root, to make devices")
    before = path.lstat()
    with pytest.raises(FileExistsError, match="is not replaced; name a file"), replacing(path):
        pass
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]
