"""Spec strings: ``"topk(ratio=0.01) | int8 | ef"`` as a safe subset of Python expressions.

Names, calls with literal arguments, and ``|``. Nothing is evaluated. ``MODULE:NAME`` in place of a
name is a class that nobody registered: that module is imported.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
from typing import Any

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.errors import CompressorError, OptionError, SpecError, more_of
from ringlet.compressors.specs.diagnosis import (
    AS_NAME,
    AS_PLACE,
    column_of,
    diagnose,
    misplaced,
    named_file,
)
from ringlet.compressors.specs.registry import lookup, names, revision

LONGEST = 2000  # characters of a spec: what diagnoses one may take the square of them
MOST = 32  # compressors that a spec joins: each is a level of nesting
_parsing = threading.Lock()  # CPython 3.11 counts the parser's depth wrongly across threads
_SPACES = str.maketrans("\r\n\t\f", "    ")  # a spec may go over several lines
_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_PLACE = re.compile(r"""'[^']*'|"[^"]*"|([^\W\d]\w*(?:\.\w+)*:[^\W\d]\w*(?:\.\w+)*)""")


def parse(spec: str | Compressor, imports: bool = True) -> Compressor:
    """Return the compressor that ``spec`` describes; a compressor is returned as it is.

    ``parse(str(c)) == c``, with ``MODULE:NAME`` for classes that nobody registered. Its module is
    imported, unless that is not wanted (``imports``): then it has to have been. Raises SpecError
    (with a caret at the place), UnknownCompressor or OptionError, and CompressorError where a
    plugin's class cannot be found or made. A spec has ``LONGEST`` characters and joins ``MOST``
    compressors at most.
    """
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a compressor spec is a string such as 'int8 | ef', not {spec!r}")
    written = spec.translate(_SPACES).strip()
    _refuse_endless(written)
    text = _PLACE.sub(_one_name, written)
    if not text:
        raise SpecError("an empty compressor spec; write 'none' for no compression")
    if (found := named_file(written)) is not None:
        raise _at(text, *found)
    try:
        with _parsing:
            tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise _at(text, *diagnose(text, (error.offset or 1) - 1)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"unreadable compressor spec: {error}") from None
    return _build(tree.body, text, imports)


def resolve(spec: str | Compressor | None) -> Compressor:
    """Return a compressor that can compress: like ``parse``, but refuse a lone modifier.

    One text gives one compressor until another class is registered, but for ``MODULE:NAME``.
    """
    if spec is None:
        spec = "none"
    if type(spec) is str and ":" not in spec:
        return _resolved(spec, revision())
    return _bound(parse(spec))


@functools.lru_cache(maxsize=1024)
def _resolved(text: str, revision: int) -> Compressor:
    return _bound(parse(text))


def _bound(compressor: Compressor) -> Compressor:
    if not compressor.is_bound():
        name = compressor.label()
        raise SpecError(
            f"{name!r} modifies the compressor to its left, and there is none; "
            f"write for example 'int8 | {name}'"
        )
    return compressor


def _refuse_endless(written: str) -> None:
    for count, what, most in (
        (len(written), "characters", LONGEST),
        (written.count("|") + 1, "compressors joined by '|'", MOST),
    ):
        if count > most:
            raise SpecError(
                f"cannot read the compressor spec: it has {count} {what}, and may have {most}; "
                f"shorten it: it begins with {written[:40]!r}"
            )


def _one_name(match: re.Match[str]) -> str:
    return match[0].translate(AS_NAME) if match[1] else match[0]


def _build(node: ast.expr, text: str, imports: bool) -> Compressor:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = (_build(side, text, imports) for side in (node.left, node.right))
        try:
            return left | right
        except SpecError:
            raise
        except CompressorError as error:
            raise _at(text, column_of(node.right, text), str(error)) from None
    if isinstance(node, ast.Name):
        return _make(node, [], {}, text, imports)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = [_literal(argument, text) for argument in node.args]
        options: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise _at(text, column_of(keyword.value, text), "** is not possible here")
            if keyword.arg in options:
                raise _at(text, column_of(keyword, text), f"{keyword.arg!r} is given twice")
            options[keyword.arg] = _literal(keyword.value, text)
        return _make(node.func, arguments, options, text, imports)
    raise _at(text, *misplaced(node, text))


def _make(
    name: ast.Name, args: list[Any], options: dict[str, Any], text: str, imports: bool
) -> Compressor:
    try:
        cls = lookup(name.id.translate(AS_PLACE), imports)
    except CompressorError as error:
        pointed = _pointed(text, column_of(name, text), str(error))
        raise type(error)(pointed) from error.__cause__  # said once, with a plugin's own error
    try:
        return cls(*args, **options)
    except OptionError as error:
        raise OptionError(_pointed(text, column_of(name, text), str(error))) from None
    except CompressorError:
        raise
    except Exception as error:  # of a validate() of its own, or because it is abstract
        said = f"{cls.label()} cannot be made: {type(error).__name__}: {error}{more_of(error)}"
        raise CompressorError(_pointed(text, column_of(name, text), said)) from error


def _literal(node: ast.expr, text: str) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        reason = "an option's value is a number, a string, True, False or None"
        name = node.id if isinstance(node, ast.Name) else ""
        if constant := _CONSTANTS.get(name.lower()):
            reason += f"; write {constant}"
        elif name and name not in names():
            reason += f", and a string has quotes: write {name.translate(AS_PLACE)!r}"
        elif isinstance(node, (ast.Name, ast.Call)):
            reason += "; a compressor stands before or behind another: 'int8 | ef'"
        raise _at(text, column_of(node, text), reason) from None
    return value


def _at(text: str, column: int, reason: str) -> SpecError:
    return SpecError(_pointed(text, column, f"cannot read the compressor spec: {reason}"))


def _pointed(text: str, column: int, message: str) -> str:
    return f"{message}\n    {text}\n    {' ' * column}^".translate(AS_PLACE)
