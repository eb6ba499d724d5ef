"""Show values in messages, as they were written and short, and in tables, for a console or a page."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, str]
"""A row of a table: the cells by the names of their columns."""
_NUMBER = re.compile(r"[-+–]?\d[\d.,]*\s*\S*( \(.*\))?|–|")


def shown(value: Any, most: int = 60) -> str:
    """Return the value in JSON, cut to `most` characters."""
    return cut(json.dumps(value, ensure_ascii=False, default=str), most)


def quoted(value: Any, most: int = 60) -> str:
    """Return the value as Python writes it, cut to `most` characters."""
    return cut(repr(value), most)


def listed(values: Iterable[Any], most: int = 20) -> str:
    """Return the values quoted, with commas between them; after the first `most` only the number of the others."""
    items = list(values)
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(quoted, items[:most])) + more


def changes(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of each field that differs between two JSON values, and what it was and is, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            yield from changes(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
    elif before != now:
        yield path, f"{path}: {shown(before)} before, {shown(now)} now"


def cut(text: str, most: int) -> str:
    """Cut a text to `most` characters; three dots show that it was longer."""
    return text if len(text) <= most else text[: most - 3] + "..."


def kind_of(value: Any) -> str:
    """Name the kind of a JSON value in words."""
    if value is None or isinstance(value, bool):
        return shown(value)
    words = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")


def aligned(rows: Sequence[Row]) -> str:
    """Return the rows as lines below the names of their columns; columns that hold only numbers are flush right."""
    columns = _columns(rows)
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    flush = [
        str.rjust if all(_NUMBER.fullmatch(line[place]) for line in lines[1:]) else str.ljust
        for place in range(len(columns))
    ]
    return "\n".join(
        "  ".join(justify(cell, width) for justify, cell, width in zip(flush, line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table in GitHub's Markdown; pipes and line breaks in cells are escaped."""
    columns = _columns(rows)
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the names of all columns in the order of their first appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _escaped(cell: str) -> str:
    return " ".join(cell.replace("\\", "\\\\").replace("|", "\\|").split("\n"))
