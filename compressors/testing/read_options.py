"""A check of options that nobody reads: it looks at the code of a plugin, and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.options import options_of
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.plugin_code import (
    codes_of,
    functions_of,
    modules_of,
    names_used,
    own_classes,
    plugins,
)

# What reads attributes whose names stand nowhere.
_BY_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter", "eval"})


@needs(
    "is_a_value",
    "nothing_is_declared_in_vain",
    "schedule_goes_by_the_step",
    "options_at_their_ends",
    "other_dtypes_are_refused",
)
def check_options_are_read(compressor: Compressor) -> None:
    """A user who sets an option that nothing looks at compares runs that are one and the same.

    Read it as self.NAME where it is to count, or leave it away.
    """
    for made in plugins(compressor):
        own = own_classes(made)
        packages = {cls.__module__.partition(".")[0] for cls in own}
        used: set[str] = set()
        for module in modules_of(own, packages):
            used.update(_read(module, made, packages))
        if not used.isdisjoint(_BY_ANY_NAME) or any(map(_is_opaque, own)):
            continue
        theirs = [cls for cls in made.__mro__ if cls not in own and issubclass(cls, Compressor)]
        known = {n for cls in theirs if cls is not Compressor for n in options_of(cls)}
        for name in options_of(made).keys() - known:  # Ringlet's own classes read theirs
            assert name in used, (
                f"nothing looks at the option {name!r} of {made.__name__}: whatever a user gives "
                f"for it, results are the same; read self.{name}, or leave it away"
            )


def _read(module: ModuleType, made: type, packages: set[str]) -> Iterator[str]:
    """Yield the names that a module's functions use, but those of other compressors."""
    for value in functions_of(module, made, packages):
        for code in codes_of(value):
            yield from names_used(code)


def _is_opaque(cls: type) -> bool:
    """Whether a class has methods in which no names can be looked for: compiled ones."""
    for value in vars(cls).values():
        plain = isinstance(value, type | FunctionType | GetSetDescriptorType | MemberDescriptorType)
        acts = callable(value) or hasattr(type(value), "__get__")
        if acts and not plain and next(codes_of(value), None) is None:
            return True
    return False


CHECKS = (check_options_are_read,)
