"""YAML of plain values, without a package for it: mappings, lists, texts, numbers, truth values."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_TAKEN = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # YAML has other ideas


def yaml_text(documents: Sequence[Any]) -> str:
    """Return ``documents`` as YAML, one after the other. A text is quoted as in JSON if need be."""
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        found = []
        for key, each in value.items():
            inner = _lines(each)
            if isinstance(each, dict | list) and each:
                indent = "  " if isinstance(each, dict) else ""
                found += [f"{_word(key)}:", *(indent + line for line in inner)]
            else:
                found.append(f"{_word(key)}: {inner[0]}")
        return found
    if isinstance(value, list) and value:
        found = []
        for each in value:
            first, *rest = _lines(each)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [_word(value)]


def _quoted(value: Any) -> str:
    """Return ``value`` as JSON, but for characters that YAML's readers want in a way of its own.

    They know no pairs of surrogates, and take a DEL only where it is escaped.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x7F:
        return json.dumps(character)[1:-1]
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _word(value: Any) -> str:
    plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _TAKEN
    return str(value) if plain else _quoted(value)
