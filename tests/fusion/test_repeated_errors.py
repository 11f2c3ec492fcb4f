"""An error that is kept, and raised each time somebody asks, is a new one each time."""

import threading

import numpy as np
import pytest

from ringlet.compressors import parse
from ringlet.fusion import Engine, EngineClosed, Limits, Request
from ringlet.fusion.requests.handle import Handle, Signal
from ringlet.ring import Mismatch, PeerLost
from ringlet.ring.control.in_process import Inbox
from ringlet.ring.control.opening import open_control
from ringlet.ring.errors import again
from ringlet.ring.transports.local import run_local

TIMES = 50


class Picky(RuntimeError):
    """An error, as plugins have them, that cannot be made from its own ``args``."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code, self.where = code, where


def frames(error):
    count, traceback = 0, error.__traceback__
    while traceback is not None:
        count, traceback = count + 1, traceback.tb_next
    return count


def raised(call):
    """Return the errors of so many calls."""
    errors = []
    for _ in range(TIMES):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        errors.append(caught.value)
    return errors


def check(errors):
    first, last = errors[0], errors[-1]
    assert len({id(error) for error in errors}) == TIMES
    assert frames(last) == frames(first) < 12
    assert type(last) is type(first)
    assert str(last) == str(first)
    return last


def failing(error):
    raise error


@pytest.mark.parametrize(
    "error",
    [
        Mismatch("shapes differ"),
        PeerLost("rank 3 is gone", [3]),
        Picky(7, where="home"),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_is_of_the_same_type_and_content(error):
    error.add_note("seen on Monday")
    error.__cause__ = OSError("cable")
    copy = again(error)
    assert copy is not error
    assert type(copy) is type(error)
    assert (str(copy), copy.args, copy.__dict__) == (str(error), error.args, error.__dict__)
    assert copy.__cause__ is error.__cause__
    copy.add_note("only here")
    assert error.__notes__ == ["seen on Monday"]


def test_a_copy_tells_where_the_error_came_from():
    try:
        failing(Picky(7, where="home"))
    except Picky as error:
        kept = error
    with pytest.raises(Picky) as caught:
        raise again(kept)
    assert caught.traceback[-1].name == "failing"


def test_handles_inboxes_and_groups_raise_new_errors():
    handle = Handle("x", Signal(lambda: None))
    handle.finish(Mismatch("shapes differ"))
    check(raised(handle.wait))
    inbox = Inbox()
    inbox.fail(PeerLost("rank 0 is gone", [0]))
    assert check(raised(lambda: inbox.take(1))).ranks == (0,)
    inbox = Inbox()
    inbox.fail(Picky(7, where="home"))
    assert check(raised(lambda: inbox.take(1))).where == "home"


def test_an_engine_that_has_ended_raises_new_errors():
    def rank_main(comm):
        engine = Engine(comm, open_control, Limits())
        request = Request("w", shape=(4,))
        group = engine.declare("g", [request], [parse("none")], [{}])
        values = np.ones(4, np.float32)
        ended = threading.Event()
        engine.extensions.when_over(ended.set)
        engine.extensions.call_soon(lambda: failing(Picky(7, where="home")))
        assert ended.wait(60)

        def step():
            group.submit("w", values)
            group.wait(60)

        check(raised(step))
        check(raised(group.wait))
        check(raised(lambda: engine.submit(Request("x", shape=(4,)), values)))
        check(raised(lambda: engine.submit_all([(request, values, None, None)])))
        check(raised(lambda: engine.join()))
        check(raised(lambda: engine.declare("h", [request], [parse("none")], [{}])))
        check(raised(lambda: engine.extensions.announce("k", "nothing", None)))
        engine.shutdown()
        assert isinstance(check(raised(engine.join)), EngineClosed)
        check(raised(lambda: engine._tensor_queue.add([Handle("x", Signal(lambda: None))])))

    run_local(rank_main, 1)


def test_communicators_raise_new_errors():
    def rank_main(comm):
        buffer = np.ones(4, np.float32)
        comm.close()
        return check(raised(lambda: comm.allreduce(buffer)))

    run_local(rank_main, 2)
