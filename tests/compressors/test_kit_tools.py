"""What the conformance kit is made of: its examples, how it makes them smaller, whom it asks."""

import importlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ringlet.compressors import Int8, parse
from ringlet.compressors.testing import CheckFailed, check_command, simulate
from ringlet.compressors.testing.catalogue import all_checks
from ringlet.compressors.testing.tools import inputs, named_check, other_process, other_time
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.other_process import OtherProcess
from ringlet.compressors.testing.tools.patience import given_up_after
from ringlet.compressors.testing.tools.simulate import summed

sys.path.insert(0, str(Path(__file__).parent))

from broken.program import ChangesFolder
from broken.right import Whole


def drawn():
    return [x.tobytes() for x in (*inputs.vectors(), *inputs.special())]


def hashed():
    return hash("a name"), os.getpid()


def ended():
    os._exit(3)


def printed():
    print("what a plugin prints is no answer")
    return 7


def left(found=sys.modules):
    """Return what an earlier call left here, and leave something."""
    before = "left_behind" in found
    found["left_behind"] = np
    return before


@pytest.fixture(scope="module")
def other():
    process = OtherProcess()
    yield process
    process._close()


def loaded(name):
    return name in sys.modules


def ask(other, function, *args):
    return other.ask({__name__}, function, *args)


def test_examples_are_the_same_in_every_process(other):
    assert ask(other, drawn) == drawn()


def test_examples_cannot_be_changed():
    for x in (*inputs.vectors(), *inputs.special()):
        assert not x.flags.writeable


def test_examples_are_what_they_say():
    assert {0, 1} < {x.size for x in inputs.vectors()}
    assert all(np.isfinite(x).all() and (abs(x) <= 2.0**80).all() for x in inputs.vectors())
    values = np.concatenate(inputs.special())
    assert {np.inf, -np.inf, np.finfo("f4").max} < set(values[~np.isnan(values)].tolist())
    assert np.isnan(values).any()
    assert (values == np.finfo("f4").smallest_subnormal).any()


def test_a_failing_example_is_made_smaller():
    def body(x):
        assert not (x > 100).any(), f"{(x > 100).sum()} of {x.size} are large"

    with pytest.raises(AssertionError) as caught:
        for_all([np.full(5, 3, "f4"), np.arange(5000, dtype="f4")], body)
    message = str(caught.value)
    assert message.startswith("1 of 1 are large\n")
    assert message.endswith("\nSmallest example: array([4999.], dtype=float32)")


def test_an_example_is_made_smaller_for_as_long_as_it_fails_in_the_same_way():
    def body(x):
        assert x.size < 3, "three"
        raise ValueError("another error")

    with pytest.raises(AssertionError, match="three") as caught:
        for_all([np.ones(50, "f4")], body)
    assert "array([0., 0., 0.], dtype=float32)" in str(caught.value)


def test_what_an_example_is_made_of_may_be_written_to_by_nobody_else():
    def body(x):
        x[:] = 7

    for_all(inputs.vectors(), body)
    assert not any((x == 7).any() for x in inputs.vectors() if x.size > 80)


def test_sums_in_bfloat16_are_rounded_as_transports_do():
    ours = np.array([1.0, 1.0, 1.0, 1.0078125, np.inf, np.nan, 3e38], np.float32)
    theirs = np.array([2**-9, 3 * 2**-9, 2**-8, 2**-8, 1.0, 1.0, 3e38], np.float32)
    sent = [{"values": (x.view(np.uint32) >> 16).astype(np.uint16)} for x in (ours, theirs)]
    total = summed(parse("bf16"), sent, ours.size)["values"].astype(np.uint32) << 16
    expected = [1.0, 1.0078125, 1.0, 1.015625, np.inf, np.nan, np.inf]  # ties go to even
    assert_array_equal(total.view(np.float32), np.array(expected, np.float32))


def test_another_process_hashes_otherwise(other):
    (here, pid), (there, other_pid) = hashed(), ask(other, hashed)
    assert here != there
    assert pid != other_pid


def test_another_process_finds_nothing_that_an_earlier_question_left(other):
    assert ask(other, left) is False
    assert ask(other, left) is False


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that writes a module, imports it, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.import_module(name)
        names.append(name)
        return name

    yield write
    for name in names:
        del sys.modules[name]


def test_modules_are_loaded_once_for_many_questions(other, module, tmp_path):
    """Those of a plugin may take seconds, PyTorch's for example."""
    lines = tmp_path / "lines"
    name = module("slow_one", f"open({str(lines)!r}, 'a').write('loaded ')\ndef one(): return 1")
    assert [other.ask({name}, sys.modules[name].one) for _ in range(3)] == [1] * 3
    assert lines.read_text().split() == ["loaded"] * 2  # here and there
    assert ask(other, printed) == 7
    assert other.ask({name}, sys.modules[name].one) == 1


def test_numba_is_loaded_once_for_a_plugin_beside_our_own(other):
    simulate(Int8(), [np.ones(64, "f4")])  # which loads it here
    ours = {"ringlet.compressors.modifiers.ef"}
    assert not ask(other, loaded, "numba")  # it would make every fork dearer
    assert other.ask({__name__} | ours, loaded, "numba")


def test_a_plugin_beside_our_own_is_loaded_once_though_scipy_starts_threads(
    module, monkeypatch, tmp_path
):
    """Numba imports SciPy, whose OpenBLAS starts threads: forks of what has some are not used."""
    simulate(Int8(), [np.ones(64, "f4")])
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    process, lines = OtherProcess(), tmp_path / "lines"
    name = module("slow_two", f"open({str(lines)!r}, 'a').write('loaded ')\ndef one(): return 1")
    modules = {name, "ringlet.compressors.modifiers.ef"}
    try:
        assert [process.ask(modules, sys.modules[name].one) for _ in range(3)] == [1] * 3
    finally:
        process._close()
    assert lines.read_text().split() == ["loaded"] * 2  # here and there


def test_what_is_edited_is_loaded_anew(other, module, tmp_path):
    module("beside", "VALUE = 1")
    name = module("of_two", "import beside\ndef value(): return beside.VALUE")
    assert other.ask({name}, sys.modules[name].value) == 1
    (tmp_path / "beside.py").write_text("VALUE = 1 + 1")
    assert other.ask({name}, sys.modules[name].value) == 2


def test_a_module_that_starts_threads_finds_them_in_another_process(other, module):
    name = module(
        "with_threads",
        "import queue, threading\n"
        "asked, told = queue.Queue(), queue.Queue()\n"
        "serve = lambda: [told.put(question + 1) for question in iter(asked.get, None)]\n"
        "threading.Thread(target=serve, daemon=True).start()\n"
        "def one(n):\n"
        "    asked.put(n)\n"
        "    return told.get(timeout=30)\n",
    )
    assert [other.ask({name}, sys.modules[name].one, n) for n in range(3)] == [1, 2, 3]
    sys.modules[name].asked.put(None)


def test_a_module_that_loads_nowhere_else_is_told(other, module, tmp_path):
    name = module("only_here", "def one(): return 1")
    (tmp_path / "only_here.py").write_text("raise ValueError('not there')")
    for _ in range(2):
        with pytest.raises(AssertionError, match="ValueError: not there"):
            other.ask({name}, sys.modules[name].one)
    (tmp_path / "only_here.py").write_text("import os; os._exit(4)")
    with pytest.raises(AssertionError, match="ended with status 1024"):
        other.ask({name, __name__}, sys.modules[name].one)
    assert ask(other, printed) == 7


def test_another_process_that_ends_is_told_and_the_next_one_answers(other):
    with pytest.raises(AssertionError, match="ended with status"):
        ask(other, ended)
    assert ask(other, printed) == 7


def test_another_process_tells_what_went_wrong(other):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        ask(other, divmod, 1, 0)


def until(condition):
    """Wait for ``condition`` to hold."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def endless(told):
    Path(told).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def test_what_gives_no_answer_is_ended_wherever_it_runs(monkeypatch, tmp_path):
    process, told = OtherProcess(), tmp_path / "pid"
    assert ask(process, printed) == 7

    def once_begun(*waiting):  # however long it takes to begin
        until(lambda: told.exists() and told.read_text())
        return select.select(*waiting)

    monkeypatch.setattr(other_process, "_PATIENCE", 1.0)
    monkeypatch.setattr(other_process, "select", SimpleNamespace(select=once_begun))
    with pytest.raises(AssertionError, match="gave no answer in 1 s"):
        ask(process, endless, str(told))
    line = Path(f"/proc/{told.read_text()}/cmdline")  # empty once the process has ended
    until(lambda: not (line.exists() and line.read_bytes()))
    monkeypatch.undo()
    assert ask(process, printed) == 7
    process._close()


def ends_by_itself(process):
    """Return the code of the child's end, once its input has ended."""
    child = process._child
    child.communicate(timeout=60)  # who closes a process kills a child that takes long
    process._close()
    return child.returncode


def test_a_child_that_is_gone_is_started_anew():
    process = OtherProcess()
    assert ask(process, printed) == 7
    child = process._child
    child.kill()
    child.wait()
    assert ask(process, printed) == 7
    assert ends_by_itself(process) == 0


def test_a_child_that_has_begun_is_the_one_that_answers():
    process = OtherProcess()
    process.begin()
    child = process._child
    assert child.poll() is None
    process.begin()
    assert ask(process, printed) == 7
    assert process._child is child
    assert ends_by_itself(process) == 0


def test_clocks_go_on_an_hour_later_and_come_back():
    clocks = time.time, time.time_ns, time.perf_counter, time.perf_counter_ns
    before = [clock() for clock in clocks]
    with other_time.later(3600):
        there = [time.time(), time.time_ns(), time.perf_counter(), time.perf_counter_ns()]
    for was, now, second in zip(before, there, (1, 10**9, 1, 10**9), strict=True):
        assert 3600 * second <= now - was < 7200 * second
    assert (time.time, time.time_ns, time.perf_counter, time.perf_counter_ns) == clocks


def test_time_passes_between_a_plugins_looks_at_a_clock_and_nobody_elses():
    clocks = time.monotonic, time.perf_counter_ns
    with other_time.slowly(3600):
        looks = [time.monotonic() for _ in range(3)]
        ns = [time.perf_counter_ns() for _ in range(2)]
        with given_up_after(60):  # Python's own timer
            pass
    assert 7200 <= looks[2] - looks[0] < 7260
    assert 3600 * 10**9 <= ns[1] - ns[0] < 3660 * 10**9
    assert (time.monotonic, time.perf_counter_ns) == clocks


def check_endlessly(found):
    """Why.

    What to do.
    """
    while True:
        found.append(len(found) % 7)
        del found[100:]


def test_what_does_not_end_is_given_up_and_says_where(monkeypatch):
    found = []

    class OnceBegun(threading.Timer):
        def run(self):
            until(lambda: found)
            super().run()

    monkeypatch.setattr(threading, "Timer", OnceBegun)
    monkeypatch.setattr(named_check, "_PATIENCE", 0.05)
    check = named_check.Named(check_endlessly, resolve=lambda found: found)
    with pytest.raises(CheckFailed) as failure:
        check(found)
    told = str(failure.value)
    assert "it does not come to an end (test_kit_tools.py, line" in told
    assert "try equal values, zeros, NaN and Inf" in told


def check_quickly(plugin):
    """Why.

    What to do.
    """


def test_checks_that_took_long_are_named_behind_the_time_of_all(monkeypatch, capsys):
    checks = [named_check.Named(check_quickly, resolve=str)]
    for seconds, told in ((30.0, "30.0 s"), (31.0, "31.0 s (quickly 31 s)")):
        now = iter([100.0, *[100.0 + seconds] * 3])
        clock = SimpleNamespace(perf_counter=lambda now=now: next(now))
        monkeypatch.setattr(check_command, "time", clock)
        assert check_command.report("x", checks) == 0
        assert capsys.readouterr().out.endswith(f"\n{told}: 1 of 1 checks passed\n")


def check_of_what_exits(status):
    """Why.

    What to do.
    """
    leave = os._exit if status == 0 else sys.exit
    leave(status)


@pytest.mark.parametrize(("status", "reason"), [("no licence", "no licence"), (0, "os._exit(0)")])
def test_a_plugin_that_exits_does_not_end_the_kit(status, reason):
    check = named_check.Named(check_of_what_exits, resolve=lambda status: status)
    exits = os._exit
    with pytest.raises(CheckFailed) as failure:
        check(status)
    assert os._exit is exits
    told = str(failure.value)
    assert f"SystemExit: {reason} (test_kit_tools.py, line" in told
    assert "To exit ends the user's program: raise CompressorError" in told


class RunsOnOneCore(Whole):
    def compress(self, x, ctx):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        return super().compress(x, ctx)


@pytest.mark.parametrize(
    ("plugin", "changed"),
    [
        (ChangesFolder(), "os.chdir"),
        pytest.param(
            RunsOnOneCore(),
            "os.sched_setaffinity",
            marks=pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
        ),
    ],
)
def test_what_an_earlier_check_has_seen_change_changes_again(plugin, changed):
    before = os.getcwd(), os.sched_getaffinity(0)
    checks = {check.name: check for check in all_checks()}
    checks["compresses_a_tensor"](plugin)
    with pytest.raises(CheckFailed, match=changed):
        checks["leaves_the_program_alone"](plugin)
    assert (os.getcwd(), os.sched_getaffinity(0)) == before


def check_of_what_forks(status):
    """Why.

    What to do.
    """
    child = os.fork()
    if not child:
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_what_a_plugin_forks_ends_as_ever():
    named_check.Named(check_of_what_forks, resolve=lambda status: status)(7)


def test_what_ends_in_time_is_not_given_up(monkeypatch):
    timers = []

    class Noted(threading.Timer):
        def start(self):
            timers.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Noted)
    with given_up_after(3600.0):
        pass
    (timer,) = timers
    assert timer.finished.is_set()  # it was cancelled
    timer.function()  # as where that came too late
    for _ in range(100):
        pass
