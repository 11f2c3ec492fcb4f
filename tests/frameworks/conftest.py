"""Jobs of real processes: many cases in one job, told apart afterwards."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import ModuleType

import cloudpickle
import hang_watch
import pytest
import told_warnings
import torch_group

import ringlet

Case = Callable[[], None]
RunCase = Callable[[Case, str, int], None]

# Ranks do not find what tests import.
for module in (sys.modules[__name__], hang_watch, told_warnings, torch_group):
    cloudpickle.register_pickle_by_value(module)


def outcomes(cases: list[Case], watched: bool = True) -> dict[str, str]:
    """Run every case on this rank; return the traceback of each, empty where it passed.

    A process that is ``watched`` ends with a stack where a case hangs.
    """
    import torch

    import ringlet.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    told: dict[str, str] = {}
    for case in cases:
        torch.manual_seed(hvd.rank())
        with hang_watch.ended_after(60) if watched else contextlib.nullcontext():
            try:
                case()
                told[case.__name__] = ""
            except BaseException:  # pytest's own failures are no Exceptions
                told[case.__name__] = traceback.format_exc()
            hvd.barrier()
    hvd.shutdown()
    return told


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests that take a ``case`` and say nothing of it those of their module, in its order.

    And each of the module's ``JOBS`` (transport, size) that runs it, if the test says no size.
    """
    module, marks = metafunc.module, metafunc.definition.iter_markers("parametrize")
    said = " ".join(str(mark.args[0]) for mark in marks)
    if "case" not in metafunc.fixturenames or re.search(r"\bcase\b", said):
        return
    if "size" not in metafunc.fixturenames or re.search(r"\bsize\b", said):
        metafunc.parametrize("case", _cases(module), ids=_short)
        return
    runs = [(case, *job) for job in module.JOBS for case in _cases(module, job[1])]
    metafunc.parametrize(("case", "transport", "size"), runs, ids=_short)


def _cases(module: ModuleType, size: int | None = None) -> list[Case]:
    """Return a module's cases: all, or those that its ``SIZES`` does not keep for other sizes."""
    cases = [value for name, value in vars(module).items() if name.startswith("case_")]
    sizes = getattr(module, "SIZES", {})
    return [case for case in cases if size is None or size in sizes.get(case, (size,))]


def _short(value: object) -> str:
    return getattr(value, "__name__", str(value)).removeprefix("case_")


@pytest.fixture(scope="module")
def run_case(request: pytest.FixtureRequest) -> RunCase:
    """Return a function that fails unless a case passed on every rank of a job.

    All functions named ``case_*`` of the test's module run in one job per transport and size, but
    for those that its ``SIZES`` keeps for others; "alone" is a rank without a launcher. A module
    whose job would take too long for one test says how many ``CASES_PER_JOB``.
    """
    cloudpickle.register_pickle_by_value(request.module)

    @cache
    def job(transport: str, size: int, first: int, per: int) -> list[dict[str, str]] | Exception:
        cases = _cases(request.module, size)[first : first + per]
        if transport == "alone":  # a process that nobody launched: this one
            return [outcomes(cases, watched=False)]
        try:
            return ringlet.run(outcomes, (cases,), np=size, transport=transport)
        except Exception as error:
            return error

    def check(case: Case, transport: str, size: int) -> None:
        cases = _cases(request.module, size)
        per = getattr(request.module, "CASES_PER_JOB", len(cases))
        first = cases.index(case) // per * per
        told = job(transport, size, first, per)
        if isinstance(told, Exception):
            raise told
        failed = [f"rank {r}: {t[case.__name__]}" for r, t in enumerate(told) if t[case.__name__]]
        assert not failed, "\n".join(failed)

    return check
