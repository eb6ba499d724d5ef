"""Write a part of a page between two markers, `<!-- NAME:begin -->` and `<!-- NAME:end -->`, each in its own line."""

import pathlib


def write_between(page: pathlib.Path, name: str, text: str) -> None:
    before, _, after = _around(page, name)
    page.write_text(before + text + after, encoding="utf-8")


def write_rows(page: pathlib.Path, name: str, table: str) -> None:
    """Write a table in Markdown. The rows that were there stay if their first cell is none of the table."""
    lines = _by_first_cell(_around(page, name)[1]) | _by_first_cell(table)
    write_between(page, name, "".join(f"{line}\n" for of_cell in lines.values() for line in of_cell))


def _around(page: pathlib.Path, name: str) -> tuple[str, str, str]:
    """Return the page up to the end of the first marker, what is between, and the page from the second one."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    between, second, after = rest.partition(end)
    if not second:
        raise ValueError(f"{page} has no {begin.strip()} and {end}: add both, each in its own line")
    return before + first, between, second + after


def _by_first_cell(table: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in table.splitlines():
        lines.setdefault(line.split("|")[1].strip(), []).append(line)
    return lines
