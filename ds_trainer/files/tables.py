"""Write tables of text, aligned for a console or in Markdown for a page. A row maps names of columns to cells."""

import re
from collections.abc import Mapping, Sequence

Row = Mapping[str, str]
_NUMBER = re.compile(r"[-+–]?\d[\d.,]*\s*\S*( \(.*\))?|–|")


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
