"""Kernels on disk: whatever processes do at once, nobody runs another's code."""

import errno
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import stat
import sys

import numba
import pytest
from numba.core.caching import CacheImpl

from ringlet.ring import jit as jit_module
from ringlet.ring.jit import jit

SOURCE = """
from ringlet.ring.jit import jit

def kernel(factor):
    @jit
    def multiply(x):
        return x * factor + 0
    return multiply

def powers(factor):
    @jit
    def power(x):
        return 1 if x == 0 else factor * power(x - 1)
    return power

def powers_and_one(factor):
    power = powers(factor)  # no compiler writes it out in place of the call
    @jit
    def add(x):
        return power(x) + 1
    return add
"""


class Folder:
    """A file of kernels, which stand beside it once they are compiled."""

    def __init__(self, path):
        self.source = path / "kernels.py"
        self.source.write_text(SOURCE)
        self.path = path

    def call(self, factor, name="kernel"):
        """Return what the kernel makes of 10, and whether it was on disk, as a new process does."""
        spec = importlib.util.spec_from_file_location("kernels", self.source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)(factor)
        return kernel(10), bool(kernel.stats.cache_hits)

    def files(self):
        return {*self.path.rglob("*.nbc")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    return Folder(tmp_path)


def test_who_saves_while_another_does_keeps_both_kernels(folder, monkeypatch):
    write = jit_module._FileOfEach._open_for_write

    def late(self, path):  # it has decided where; now another writes
        monkeypatch.setattr(jit_module._FileOfEach, "_open_for_write", write)
        assert folder.call(4) == (40, False)
        return write(self, path)

    monkeypatch.setattr(jit_module._FileOfEach, "_open_for_write", late)
    assert folder.call(3) == (30, False)
    assert (folder.call(3), folder.call(4)) == ((30, True), (40, True))


def test_a_file_with_another_kernel_in_it_is_not_run(folder):
    folder.call(3)
    (three,) = folder.files()
    folder.call(4)
    (four,) = folder.files() - {three}
    shutil.copy(three, four)
    assert folder.call(4) == (40, False)
    assert folder.call(4) == (40, True)


def test_kernels_of_a_changed_file_are_compiled_anew_in_place_of_the_old(folder):
    assert folder.call(3) == (30, False)
    files = folder.files()
    folder.source.write_text(SOURCE.replace("+ 0", "+ 1000"))
    assert folder.call(3) == (1030, False)
    assert folder.call(3) == (1030, True)
    assert folder.files() == files


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ("x + 1 +", "x + 2 +", 1036),
        ("OFFSET = 1000", "OFFSET = 2000", 2033),
        ("more=0", "more=5", 1048),
        ("arange(3)", "ones(3)", 1036),
        ("@njit\ndef one", "@njit(fastmath=True)\ndef one", 1033),
    ],
)
def test_what_a_kernel_calls_from_another_file_makes_it_another(
    folder, monkeypatch, old, new, result
):
    """Directly, by its module, and through a helper in between; a value of its module's, too."""
    monkeypatch.syspath_prepend(folder.path)
    helper = folder.path / "helper_of_kernels.py"
    folder.source.write_text(
        "import helper_of_kernels\n"
        "from helper_of_kernels import OFFSET\n"
        "from ringlet.ring.jit import jit\n"
        "def kernel(factor):\n"
        "    @jit\n"
        "    def add(x):\n"
        "        return helper_of_kernels.more(x) * factor + OFFSET\n"
        "    return add\n"
    )
    text = (
        "from numba import njit\n"
        "import numpy\n"
        "OFFSET = 1000\n"
        "TABLE = numpy.arange(3)\n"
        "@njit\n"
        "def one_more(x, more=0):\n"
        "    return x + 1 + more\n"
        "@njit\n"
        "def more(x):\n"
        "    return one_more(x) + TABLE[0]\n"
    )
    helper.write_text(text)
    sys.modules.pop("helper_of_kernels", None)
    assert folder.call(3) == (1033, False)
    sys.modules.pop("helper_of_kernels")
    assert folder.call(3) == (1033, True)
    files = folder.files()
    helper.write_text(text.replace(old, new))
    sys.modules.pop("helper_of_kernels")
    assert folder.call(3) == (result, False)
    assert folder.files() == files
    sys.modules.pop("helper_of_kernels")


INTRINSIC = """
from numba.extending import intrinsic
def emit(builder, x, y):
    return builder.add(x, y)
@intrinsic
def used(typing, x):
    def generate(context, builder, signature, given):
        return emit(builder, given[0], context.get_constant(signature.return_type, 3))
    return x(x), generate
"""


@pytest.mark.filterwarnings("ignore:First-class function type")
@pytest.mark.parametrize(
    ("text", "old", "new", "call", "results"),
    [
        (INTRINSIC, "builder.add", "builder.sub", "used(x)", (13, 7)),
        ("import numpy\nused = numpy.int64", "int64", "int8", "used(x + 300)", (310, 54)),
        (
            "from numba import types\nused = types.int64",
            "int64",
            "int8",
            "used(x + 300)",
            (310, 54),
        ),
        (
            "from enum import IntEnum\nclass used(IntEnum):\n    FEW = 5",
            "5",
            "6",
            "x + used.FEW",
            (15, 16),
        ),
        (
            "from numba import njit\n@njit\ndef one(x):\n    return x + 1\nused = (one, one)",
            "+ 1",
            "+ 2",
            "used[0](x)",
            (11, 12),
        ),
        (
            "from numba.extending import register_jitable\n"
            "@register_jitable\ndef used(x):\n    return x + 1",
            "+ 1",
            "+ 2",
            "used(x)",
            (11, 12),
        ),
        (
            "from numba import vectorize\n@vectorize\ndef used(x):\n    return x + 1",
            "+ 1",
            "+ 2",
            "used(x)",
            (11, 12),
        ),
        (
            "from numba import njit, types\n@njit(locals={'y': types.int64})\n"
            "def used(x):\n    y = x + 300\n    return y",
            "int64",
            "int8",
            "used(x)",
            (310, 54),
        ),
    ],
    ids=["intrinsic", "dtype", "type", "enum", "tuple", "inlined", "ufunc", "locals"],
)
def test_whatever_a_kernel_reaches_in_another_file_makes_it_another(
    folder, monkeypatch, text, old, new, call, results
):
    monkeypatch.syspath_prepend(folder.path)
    helper = folder.path / "helper_of_kernels.py"
    folder.source.write_text(
        "from helper_of_kernels import used\n"
        "from ringlet.ring.jit import jit\n"
        "def kernel(factor):\n"
        "    @jit\n"
        "    def reach(x):\n"
        f"        return {call}\n"
        "    return reach\n"
    )
    found = []
    for written in (text, text, text.replace(old, new), text.replace(old, new)):
        helper.write_text(written)
        sys.modules.pop("helper_of_kernels", None)
        found.append(folder.call(1))
    sys.modules.pop("helper_of_kernels")
    before, after = results
    assert found == [(before, False), (before, True), (after, False), (after, True)]


def test_a_kernel_that_closes_over_an_intrinsic_is_found(folder):
    text = INTRINSIC + "from ringlet.ring.jit import jit\ndef kernel(factor):\n    own = used\n"
    folder.source.write_text(
        text + "    @jit\n    def call(x):\n        return own(x)\n    return call"
    )
    assert [folder.call(1), folder.call(1)] == [(13, False), (13, True)]


def test_a_kernel_that_takes_another_leaves_no_file_in_each_process(folder):
    text = SOURCE.replace("x * factor + 0", "one(x)").replace("multiply(x)", "multiply(x, one)")
    folder.source.write_text(text)
    spec = importlib.util.spec_from_file_location("kernels", folder.source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.kernel(0)(10, numba.njit(lambda x: x + 1)) == 11
    assert not folder.files()


def with_a_hole(data):
    """Return ``data`` as where a block was not written: what is in it would be run as it is."""
    code = data.rindex(b"\x7fELF") + 64
    return data[:code] + bytes(64) + data[code + 64 :]


@pytest.mark.parametrize(
    "left", [lambda data: b"", lambda data: data[:100], lambda data: b"K" * 99, with_a_hole]
)
def test_a_file_that_was_cut_short_is_written_again(folder, left):
    """As by a loss of power."""
    folder.call(3)
    (path,) = folder.files()
    path.write_bytes(left(path.read_bytes()))
    assert [folder.call(3), folder.call(3)] == [(30, False), (30, True)]


def test_a_file_that_may_not_be_read_is_as_none(folder, monkeypatch):
    def forbidden(self, name):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    assert folder.call(3) == (30, False)
    with monkeypatch.context() as patch:
        patch.setattr(jit_module._FileOfEach, "_load_data", forbidden)
        assert folder.call(3) == (30, False)
    assert folder.call(3) == (30, True)


@pytest.mark.parametrize("inner", ["@jit", "@njit", "@njit(nogil=True)"])
def test_a_kernel_that_closes_over_another_is_found_with_the_same_one_only(folder, inner):
    """Also if Numba alone compiles that one, and would number it as another process its own."""
    other = SOURCE.replace("@jit\n    def power", f"{inner}\n    def power")
    folder.source.write_text("from numba import njit\n" + other)
    for factor in 3, 4:  # each as the first kernels of a process
        process = multiprocessing.get_context("fork").Process(
            target=lambda: sys.exit(folder.call(factor, "powers_and_one")[0] != factor**10 + 1)  # noqa: B023
        )
        process.start()
        process.join()
        assert process.exitcode == 0
    assert folder.call(3, "powers_and_one") == (3**10 + 1, True)
    assert folder.call(4, "powers_and_one") == (4**10 + 1, True)


def test_a_kernel_with_other_options_is_another(folder):
    folder.source.write_text(SOURCE.replace("@jit", "@jit(fastmath=False)"))
    assert folder.call(3) == (30, False)
    source = folder.source.read_text()
    folder.source.write_text(source.replace("False", "True "))
    assert folder.call(3) == (30, False)
    assert len(folder.files()) == 2


def test_a_kernel_that_calls_itself_is_found(folder):
    assert folder.call(2, "powers") == (1024, False)
    assert folder.call(2, "powers") == (1024, True)
    assert folder.call(3, "powers") == (3**10, False)


def test_a_debugger_steps_through_a_kernel_where_numba_is_told_not_to_compile(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)

    def add(x):
        return x + 1

    assert jit(add) is add
    assert jit(fastmath=True)(add) is add


def test_a_kernel_that_a_full_disk_has_no_room_for_works_and_that_is_said_once(
    folder, monkeypatch, caplog
):
    def full(self, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jit_module, "_told", set())
    with monkeypatch.context() as patch:
        patch.setattr(jit_module._FileOfEach, "_open_for_write", full)
        assert [folder.call(3), folder.call(4)] == [(30, False), (40, False)]
    (said,) = caplog.messages
    assert f"kept in {folder.path}" in said
    assert "(No space left on device)" in said
    assert "NUMBA_CACHE_DIR" in said
    assert not folder.files()
    assert [folder.call(3), folder.call(3)] == [(30, False), (30, True)]


def test_kernels_work_where_no_folder_takes_them(folder, monkeypatch, caplog):
    """As in a container whose only folder to write to is another one."""
    monkeypatch.setattr(jit_module, "_told", set())
    with monkeypatch.context() as patch:
        patch.setattr(CacheImpl, "_locator_classes", [])
        assert [folder.call(3), folder.call(3)] == [(30, False), (30, False)]
        assert folder.call(2, "powers_and_one") == (1025, False)
    (said,) = caplog.messages
    assert "each process compiles them anew" in said
    assert not folder.files()


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("how", ["owner", "group", "others", "link", "pipe"])
def test_a_file_that_another_user_may_have_written_is_not_loaded(
    folder, tmp_path, monkeypatch, caplog, how
):
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("needs root, to make files of others")
    monkeypatch.setattr(jit_module, "_told", set())
    sprung = tmp_path / "sprung"
    assert folder.call(3) == (30, False)
    (kept,) = folder.files()
    trap = tmp_path / "trap" if how == "link" else kept
    kept.unlink()
    if how == "pipe":
        os.mkfifo(kept, 0o644)
    else:
        trap.write_bytes(pickle.dumps(Trap(str(sprung))))
        trap.chmod({"group": 0o664, "others": 0o646}.get(how, 0o644))
    if how == "link":
        kept.symlink_to(trap)
    elif how == "owner":
        os.chown(kept, 65534, 65534)
    assert folder.call(3) == (30, False)
    assert not sprung.exists()
    said = caplog.messages[0]
    assert f"not loaded, and are compiled anew, such as {kept} (" in said
    assert "NUMBA_CACHE_DIR" in said
    if how != "pipe":  # ours has taken its place
        assert folder.call(3) == (30, True)
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002, 0])
def test_kernels_are_found_again_whatever_the_umask(folder, umask):
    before = os.umask(umask)
    try:
        assert folder.call(3) == (30, False)
    finally:
        os.umask(before)
    (kept,) = folder.files()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644 & ~umask
    assert folder.call(3) == (30, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have files of root's")
def test_kernels_that_root_has_compiled_are_loaded_by_all(folder, monkeypatch):
    """As in a container whose image has them."""
    assert folder.call(3) == (30, False)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert folder.call(3) == (30, True)


def test_a_locator_that_is_not_there_is_still_an_error(folder, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "Nowhere")
    with pytest.raises(RuntimeError, match="Nowhere"):
        folder.call(3)
