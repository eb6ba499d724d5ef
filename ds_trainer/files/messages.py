"""How what a user wrote is shown back in a message: as it was written, and short, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_MOST_OF_A_LINE = 1000
_MOST = 3500


def shown(value: Any, most: int = 60) -> str:
    """The value as it stands in a JSON file, cut where it is long."""
    return cut(json.dumps(value, ensure_ascii=False, default=str), most)


def quoted(value: Any, most: int = 60) -> str:
    """The value as Python writes it, cut where it is long."""
    return cut(repr(value), most)


def listed(values: Iterable[Any], most: int = 20) -> str:
    """The values quoted, with commas; of many the first, and how many more there are."""
    found = list(values)
    more = f" and {len(found) - most:,} more" if len(found) > most else ""
    return ", ".join(map(quoted, found[:most])) + more


def cut(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shortened(message: str) -> str:
    """A message that can be read: long lines cut; of many lines the first, and how many more there are."""
    lines = [cut(line, _MOST_OF_A_LINE) for line in message.split("\n")]
    if sum(len(line) + 1 for line in lines) <= _MOST:
        return "\n".join(lines)
    kept, room = 0, _MOST
    while len(lines[kept]) < room:
        room -= len(lines[kept]) + 1
        kept += 1
    return "\n".join([*lines[:kept], f"... and {len(lines) - kept:,} lines more"])


def kind_of(value: Any) -> str:
    """What a value of JSON is, in words."""
    if value is None or isinstance(value, bool):
        return shown(value)
    words = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")
