"""Runs checks, and turns what goes wrong into something a plugin's author can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ringlet.compressors.contract import Compressor
from ringlet.compressors.errors import CompressorError
from ringlet.compressors.spec import resolve

Check = Callable[[Any], None]


class CheckFailed(AssertionError):
    """A plugin broke a promise. The message says which, where, and why it matters."""


class Named:
    """A check with its name and its reason; calling it runs it.

    ``resolve`` makes the object to be checked of a spec, ``label`` is what messages call it.
    """

    def __init__(
        self,
        check: Check,
        resolve: Callable[[Any], Any] = resolve,
        label: Callable[[Any], str] = str,
    ) -> None:
        self._resolve, self._label = resolve, label
        self.name = check.__name__.removeprefix("check_")
        self.why = " ".join((check.__doc__ or "").split())
        self._check = check

    def __call__(self, plugin: Any) -> None:
        """Run the check on a plugin or spec; raises CheckFailed."""
        target = self._resolve(plugin)
        try:
            self._check(target)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else _told(error)
            notes = "\n".join(getattr(error, "__notes__", []))
            raise CheckFailed(
                f"{self._label(target)} fails {self.name!r}: {reason.strip()}\n"
                + (f"{notes}\n" if notes else "")
                + f"Why it matters: {self.why}"
            ) from error

    def __repr__(self) -> str:
        return self.name


def all_checks() -> list[Named]:
    """Return every check of the kit."""
    from ringlet.compressors.testing import basics, buffers, claims, ranks, training

    modules = (basics, buffers, training, ranks, claims)
    return [Named(c) for module in modules for c in module.CHECKS]


def check_compressor(compressor: Compressor | str, checks: Iterable[Named] | None = None) -> None:
    """Run all checks on a compressor or spec; raises CheckFailed with everything found."""
    failures = failures_of(compressor, all_checks() if checks is None else checks)
    if failures:
        raise CheckFailed("\n\n".join(failures))


def failures_of(
    plugin: Any, checks: Iterable[Named], told: Callable[[str, bool], None] = lambda *_: None
) -> list[str]:
    """Run ``checks``; return what failed. ``told(name, ok)`` is called after each."""
    failures: list[str] = []
    for check in checks:
        before = len(failures)
        try:
            check(plugin)
        except CheckFailed as failure:
            failures.append(str(failure))
        told(check.name, len(failures) == before)
    return failures


def parametrize_with_checks(compressors: Iterable[Compressor | str]) -> Any:
    """Return a pytest decorator that runs a test for each compressor and check.

    The test takes ``compressor`` and ``check`` and calls ``check(compressor)``.
    """
    import pytest

    cases = [
        pytest.param(resolve(c), check, id=f"{resolve(c)}-{check.name}")
        for c in compressors
        for check in all_checks()
    ]
    return pytest.mark.parametrize(("compressor", "check"), cases)


def for_all(strategy: Any, body: Callable[[Any], None], examples: int = 40) -> None:
    """Run ``body`` on examples of a Hypothesis strategy; a failure shows the smallest one."""
    try:
        from hypothesis import HealthCheck, Phase, given, settings
    except ModuleNotFoundError as error:
        raise CompressorError("the conformance kit needs: pip install hypothesis") from error
    failing: list[Any] = []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,  # a verdict about a compressor should not depend on luck
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(strategy)
    def run(example: Any) -> None:
        try:
            body(example)
        except Exception:
            failing[:] = [example]
            raise

    try:
        run()
    except Exception as error:
        smallest = _shown(failing[0]) if failing else "?"
        message = str(error) if isinstance(error, AssertionError) else _told(error)
        raise AssertionError(f"{message.strip()}\nSmallest example: {smallest}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _shown(example: Any) -> str:
    with np.printoptions(threshold=20, edgeitems=5):
        return repr(example)
