"""Read a JSON object as DeepSpeed reads its own: Hjson, so comments and trailing commas are fine, duplicate keys not.

Every error names the file and, where it is a matter of syntax, line and column. Loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hjson


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """The object in the file; `what` names its role in errors, e.g. "the recipe". Raises ValueError."""
    file = Path(path)
    text = _text_of(file, what)
    if not text.strip():
        raise ValueError(f"{what} {file} is empty: it must be an object, {{...}}")
    try:
        data = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except hjson.HjsonDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{what} {file} is not JSON: {error.msg} at {place}") from None
    except _DuplicateKeysError as error:
        raise ValueError(f"{what} {file} says {error} twice in one section: keep one") from None
    except (IndexError, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"{what} {file} is not JSON: {_what_hjson_means(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{what} {file} holds a {type(data).__name__}: it must be an object, {{...}}")
    not_numbers = [where for where, value in _leaves(data) if is_not_a_number(value)]
    if not_numbers:
        raise ValueError(f"{what} {file}: NaN or Infinity is not JSON, at {', '.join(not_numbers)}")
    return data


def is_not_a_number(value: Any) -> bool:
    """Hjson takes a bare NaN for text that runs to the end of the line, comma and all."""
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    return isinstance(value, str) and value.rstrip(", ").lstrip("+-").lower() in ("nan", "inf", "infinity")


class _DuplicateKeysError(Exception):
    """Not a ValueError, so that it is told apart from Hjson's own."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise _DuplicateKeysError(", ".join(twice))
    return dict(pairs)


def _text_of(file: Path, what: str) -> str:
    if file.is_dir():
        raise ValueError(f"{what} {file} is a folder: name the JSON file in it")
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{what} {file} does not exist (looked in {Path.cwd()})") from None
    except OSError as error:
        raise ValueError(f"{what} {file} cannot be read: {error.strerror}") from None
    if b"\0" in raw:
        line = raw[: raw.index(b"\0")].count(b"\n") + 1
        raise ValueError(f"{what} {file} has a NUL byte in line {line}: save it as UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"{what} {file} is not UTF-8 in line {line}: save it as UTF-8") from None


def _what_hjson_means(error: Exception) -> str:
    """Hjson leaks these four from its inside; the ValueError is Python's, of a number of thousands of digits."""
    if isinstance(error, IndexError):
        return "it ends inside a comment or a text"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number is too large"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
