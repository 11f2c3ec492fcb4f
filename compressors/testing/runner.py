"""Runs checks, and turns what goes wrong into something a plugin's author can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.specs.parser import resolve
from ringlet.compressors.testing.catalogue import all_checks
from ringlet.compressors.testing.tools.named_check import CheckFailed, Named


def check_compressor(compressor: Compressor | str, checks: Iterable[Named] | None = None) -> None:
    """Run all checks on a compressor or spec; raises CheckFailed with everything found."""
    failures = failures_of(compressor, all_checks() if checks is None else checks)
    if failures:
        raise CheckFailed("\n\n".join(failures))


def failures_of(
    plugin: Any,
    checks: Iterable[Named],
    told: Callable[[str, bool | None], None] = lambda *_: None,
) -> list[str]:
    """Run ``checks``; return what failed. ``told(name, ok)`` is called after each.

    A check that needs another one which failed, or was not run, is not run: ``ok`` is None.
    """
    failures: list[str] = []
    without: set[str] = set()
    for check in checks:
        ok: bool | None = None
        if without.isdisjoint(check.needs):
            try:
                check(plugin)
                ok = True
            except CheckFailed as failure:
                failures.append(str(failure))
                ok = False
        if not ok:
            without.add(check.name)
        told(check.name, ok)
    return failures


def parametrize_with_checks(compressors: Iterable[Compressor | str]) -> Any:
    """Return a pytest decorator that runs a test for each compressor and check.

    The test takes ``compressor`` and ``check`` and calls ``check(compressor)``. It is skipped where
    a check has failed before that it needs.
    """
    import pytest

    cases = []
    for compressor in map(resolve, compressors):
        without: set[str] = set()
        cases += [
            pytest.param(compressor, _InTurn(check, without), id=f"{compressor}-{check.name}")
            for check in all_checks()
        ]
    return pytest.mark.parametrize(("compressor", "check"), cases)


class _InTurn:
    """A check in pytest, which knows those of the same compressor that failed before it."""

    def __init__(self, check: Named, without: set[str]) -> None:
        self._check, self._without = check, without

    def __call__(self, plugin: Any) -> None:
        import pytest

        before = self._without.intersection(self._check.needs)
        if before:
            self._without.add(self._check.name)
            pytest.skip(f"needs {', '.join(sorted(before))}")
        self._without.add(self._check.name)
        self._check(plugin)
        self._without.discard(self._check.name)
