"""Runs checks, and turns what goes wrong into something a plugin's author can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.specs.parser import resolve
from ringlet.compressors.testing.tools.examples import told

Check = Callable[[Any], None]


class CheckFailed(AssertionError):
    """A plugin broke a promise. The message says which, where, and why it matters."""


class Named:
    """A check with its name and its reason; calling it runs it.

    ``resolve`` makes the object to be checked of a spec, ``label`` is what messages call it. The
    first paragraph of the check's docstring is its reason, the second says what to do. ``needs``
    names the checks without which this one says nothing new: see ``needs``.
    """

    def __init__(
        self,
        check: Check,
        resolve: Callable[[Any], Any] = resolve,
        label: Callable[[Any], str] = str,
    ) -> None:
        self._resolve, self._label = resolve, label
        self.name = check.__name__.removeprefix("check_")
        why, _, cure = (check.__doc__ or "").partition("\n\n")
        self.why, self.cure = " ".join(why.split()), " ".join(cure.split())
        self.needs: tuple[str, ...] = getattr(check, "needs", ())
        self._check = check

    def __call__(self, plugin: Any) -> None:
        """Run the check on a plugin or spec; raises CheckFailed."""
        target = self._resolve(plugin)
        try:
            self._check(target)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else told(error)
            notes = "\n".join(getattr(error, "__notes__", []))
            raise CheckFailed(
                f"{self._label(target)} fails {self.name!r}: {reason.strip()}\n"
                + (f"{notes}\n" if notes else "")
                + f"Why it matters: {self.why}"
                + (f"\nWhat to do: {self.cure}" if self.cure else "")
            ) from error

    def __repr__(self) -> str:
        return self.name


def needs(*names: str) -> Callable[[Check], Check]:
    """Mark a check that would only repeat what the checks ``names`` have found already.

    Where one of them fails, it is not run, so that one cause is told once.
    """

    def mark(check: Check) -> Check:
        check.needs = names  # type: ignore[attr-defined]
        return check

    return mark


def all_checks() -> list[Named]:
    """Return every check of the kit, each behind those that it needs."""
    from ringlet.compressors.testing.checks import (
        basics,
        buffers,
        claims,
        declared,
        overrides,
        processes,
        ranks,
        sizes,
        stages,
        training,
    )
    from ringlet.compressors.testing.checks import (
        state as memory,
    )

    modules = (
        declared, basics, buffers, overrides, processes, claims, sizes, stages, training, ranks,
        memory,
    )  # fmt: skip
    return _behind_needs([Named(c) for module in modules for c in module.CHECKS])


def _behind_needs(checks: list[Named]) -> list[Named]:
    ordered: dict[str, Named] = {}
    waiting = checks
    while waiting:
        ready = [c for c in waiting if all(n in ordered for n in c.needs)]
        assert ready, f"needed in a circle, or missing: {waiting}"
        ordered[ready[0].name] = ready[0]
        waiting = [c for c in waiting if c is not ready[0]]
    return list(ordered.values())


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
