"""Read a JSON object as DeepSpeed reads its own: Hjson, so comments and trailing commas are fine, duplicate keys not.

Every error names the file and, where it is a matter of syntax, line and column. Loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hjson

from ds_trainer.files.messages import cut, kind_of, listed
from ds_trainer.files.reading import read_file
from ds_trainer.ranks.failures import UserError

_MOST_BYTES = 2**20
_MOST_DEEP = 50
_MOST_OF_A_KEY = 200
_Place = tuple[Any, ...]
"""Of a value: the place of what holds it, and its key or number there; () of the whole."""
_WHOLE = 2**63
"""Whole numbers end there for whatever reads them next."""


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """The object in the file; `what` names its role in errors, e.g. "the recipe". Raises ValueError."""
    file = Path(path)
    said = f"{what} {cut(str(file), 300)}"
    text = _text_of(file, said)
    if not text.strip():
        raise UserError(f"{said} is empty: it must be an object, {{...}}")
    try:
        data = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except hjson.HjsonDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{said} is not JSON: {cut(error.msg, 200)} at {place}") from None
    except _DuplicateKeysError as error:
        raise UserError(f"{said} says {error} twice in one section: keep one") from None
    except (IndexError, OverflowError, RecursionError, ValueError) as error:
        raise UserError(f"{said} is not JSON: {_what_hjson_means(error)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{said} holds {kind_of(data)}: it must be an object, {{...}}")
    faults = value_faults(data)
    if faults:
        raise UserError("\n".join(f"{said}: {fault}" for fault in faults))
    return data


def value_faults(data: Any) -> list[str]:
    """What no field of a recipe or an engine file can be, wherever it stands: the first of each kind."""
    first: dict[str, str] = {}
    for place, value, depth in _all_values(data):
        fault = _fault_of(value, depth)
        if fault and fault not in first:
            first[fault] = f"{fault}, at {_path(place)}" if place else fault
    return list(first.values())


def is_not_a_number(value: Any) -> bool:
    """Hjson takes a bare NaN for text that runs to the end of the line, comma and all."""
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    return isinstance(value, str) and value.rstrip(", ").lstrip("+-").lower() in ("nan", "inf", "infinity")


class _DuplicateKeysError(Exception):
    """Not a ValueError, so that it is told apart from Hjson's own."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    if twice:
        raise _DuplicateKeysError(listed(twice))
    return dict(pairs)


def _text_of(file: Path, said: str) -> str:
    try:
        raw = read_file(file, said, _MOST_BYTES)
    except ValueError as error:
        looked_in = f" (looked in {Path.cwd()})" if str(error).endswith("does not exist") else ""
        raise UserError(f"{error}{looked_in}") from None
    if b"\0" in raw:
        line = raw[: raw.index(b"\0")].count(b"\n") + 1
        raise UserError(f"{said} has a NUL byte in line {line}: save it as UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"{said} is not UTF-8 in line {line}: save it as UTF-8") from None


def _what_hjson_means(error: Exception) -> str:
    """Hjson leaks these four from its inside; the ValueError is Python's, of a number of thousands of digits."""
    if isinstance(error, IndexError):
        return "it ends inside a comment or a text"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number is too large"


def _fault_of(value: Any, depth: int) -> str | None:
    if depth > _MOST_DEEP:
        return f"nested deeper than {_MOST_DEEP} levels"
    if is_not_a_number(value):
        return "NaN or Infinity is not JSON"
    if isinstance(value, int) and abs(value) >= _WHOLE:
        return f"a whole number is larger than {_WHOLE:.0e}"
    if isinstance(value, str) and _is_no_text(value):
        return "a text holds a NUL character or half a surrogate pair"
    if isinstance(value, dict) and any(len(key) > _MOST_OF_A_KEY or _is_no_text(key) for key in value):
        return f"a key is longer than {_MOST_OF_A_KEY} characters, or holds a NUL character or half a surrogate pair"
    return None


def _is_no_text(text: str) -> bool:
    if text.isascii():
        return "\0" in text
    return any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def _all_values(data: Any) -> Iterator[tuple[_Place, Any, int]]:
    """Every value with its place and its depth, but nothing that is too deep; without recursion, which has a limit."""
    waiting: list[tuple[_Place, Any, int]] = [((), data, 0)]
    while waiting:
        place, value, depth = waiting.pop()
        yield place, value, depth
        if depth > _MOST_DEEP:
            continue
        if isinstance(value, dict):
            waiting += [((place, key), inner, depth + 1) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [((place, index), value[index], depth + 1) for index in reversed(range(len(value)))]


def _path(place: _Place) -> str:
    """The keys and numbers of a place, from the outside in: phases[0].max_steps."""
    parts: list[str] = []
    while place:
        place, part = place
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    return cut("".join(reversed(parts)).removeprefix("."), 200)
