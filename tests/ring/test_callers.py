"""What a user's mistake looks like: the keyword that was meant, and a short traceback."""

import gc
import logging
import traceback
import warnings
import weakref

import numpy as np
import pytest

import ringlet
from ringlet.job import lifecycle
from ringlet.ring import callers, functions
from ringlet.ring.functions.call_checks import check_arguments


def frames(error):
    """Return the functions that a traceback goes through."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lifecycle.init(proces_sets=[]), "did you mean 'process_sets'? There are: comm, p"),
        (lambda: ringlet.run(print, num_pro=2), "did you mean 'num_proc'? There are: fn, args, kw"),
        (lambda: functions.run(print, zzz=2), "'zzz'. There are: fn, args, kwargs, np, transport"),
        (lambda: lifecycle.init(backend="gloo"), "did you mean 'transport'? There are: comm"),
        (lambda: lifecycle.init(1, 2, 3, 4, 5, 6), "init() takes: comm, process_sets, transport"),
    ],
)
def test_a_keyword_that_is_not_there_is_answered_with_those_that_are(call, said):
    with pytest.raises(TypeError) as caught:
        call()
    assert said in str(caught.value)
    assert frames(caught.value)[-1] == "<lambda>"


class Owner:
    @callers.public
    def method(self, size):
        return size


def test_a_method_does_not_list_self():
    with pytest.raises(TypeError, match=r"did you mean 'size'\? There are: size$"):
        Owner().method(siz=2)


def mistake():
    ringlet.run(print, kwargs="verbose", np=1)


def test_a_public_function_that_calls_another_is_left_out_too(monkeypatch):
    monkeypatch.delenv("RINGLET_LOG_LEVEL", raising=False)
    monkeypatch.delenv("HOROVOD_LOG_LEVEL", raising=False)

    def as_ours(code):
        names = {"public": callers.public, "__name__": "ringlet.test"}
        exec(code, names)  # frames count as Ringlet's by the name of their module
        return names["outer"]

    outer = as_ours(
        "@public\ndef inner(): raise ValueError('on purpose')\n"
        "@public\ndef outer(): return inner()\n"
    )
    with pytest.raises(ValueError, match="on purpose") as caught:
        outer()
    assert frames(caught.value) == ["test_a_public_function_that_calls_another_is_left_out_too"]


def test_a_mistake_ends_at_the_users_line(monkeypatch):
    monkeypatch.delenv("RINGLET_LOG_LEVEL", raising=False)
    monkeypatch.delenv("HOROVOD_LOG_LEVEL", raising=False)
    with pytest.raises(TypeError) as caught:
        mistake()
    assert frames(caught.value)[-1] == "mistake"


@pytest.mark.parametrize("name", ["RINGLET_LOG_LEVEL", "HOROVOD_LOG_LEVEL", ""])
def test_whoever_debugs_sees_all_of_it(monkeypatch, name):
    log = logging.getLogger("ringlet")
    monkeypatch.setattr(log, "level", log.level if name else logging.DEBUG)
    log.manager._clear_cache()
    if name:
        monkeypatch.setenv(name, "debug")
    with pytest.raises(TypeError) as caught:
        mistake()
    assert frames(caught.value)[-1] == check_arguments.__name__


def test_what_is_no_mistake_of_the_user_keeps_its_frames():
    """Neither a fault of ours, which Python raises, nor what a function of the user's raises."""
    ours = {"__name__": "ringlet.somewhere"}
    code = "def fault(x): x.missing\ndef calls(f): f()\ndef refuses(): raise ValueError('no')\n"
    code += "def wrong(x): assert x == 4"
    exec(code, ours)

    def theirs():
        raise ValueError("mine")

    for function, argument, last in (
        (ours["fault"], 3, "fault"),
        (ours["wrong"], 3, "wrong"),
        (ours["calls"], theirs, "theirs"),
        (ours["calls"], ours["refuses"], __name__),
    ):
        with pytest.raises((AttributeError, AssertionError, ValueError)) as caught:
            callers.public(function)(argument)
        found = frames(caught.value)
        assert (found[-1] == last) == (last != __name__), found
    assert found == ["test_what_is_no_mistake_of_the_user_keeps_its_frames"]


@pytest.mark.parametrize("level", ["info", "debug"])
def test_what_a_mistaken_call_was_given_ends_with_its_error(monkeypatch, level):
    """Tensors of gigabytes, and not only when garbage is collected."""
    monkeypatch.setenv("RINGLET_LOG_LEVEL", level)
    ours = {"__name__": "ringlet.somewhere"}
    exec("def refuses(x): raise ValueError('no')", ours)
    given = np.zeros(3)
    there = weakref.ref(given)
    gc.disable()
    try:
        try:
            callers.public(ours["refuses"])(given)
        except ValueError:
            del given
        assert there() is None
    finally:
        gc.enable()


def test_warnings_name_the_users_line():
    ours = {"__name__": "ringlet.somewhere", "warnings": warnings, "outside": callers.outside}
    exec("def warn(): warnings.warn('careful', stacklevel=outside())", ours)
    with pytest.warns(UserWarning, match="careful") as caught:
        callers.public(ours["warn"])()
    assert caught[0].filename == __file__


def test_what_is_no_process_set_is_named():
    def number(tensor, process_set):
        return process_set.number()

    for given in ((1, 3), (3, 3)):
        with pytest.raises(TypeError, match=r"process_set is what add_process_set\(\) .* not 3"):
            callers.public(number)(*given)
    with pytest.raises(TypeError, match=r"not \[0\]"):
        callers.public(number)(1, process_set=[0])

    def other(process_set):
        return "text".number()  # a fault of ours, and no other argument's

    with pytest.raises(AttributeError, match="'str' object has no attribute 'number'"):
        callers.public(other)(3)
