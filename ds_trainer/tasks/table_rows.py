"""The lines of text files and the rows of tables, each with its line, which neither pyarrow nor pandas gives.

The quotes of a .tsv file may be text, or those of a CSV writer: the file itself shows which.
"""

import csv
import io
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path

from ds_trainer.files.reading import check_file
from ds_trainer.ranks.failures import UserError

_QUOTED_CELL = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t]*)'
_QUOTED_ROW = re.compile(rf"{_QUOTED_CELL}(?:\t{_QUOTED_CELL})*")
"""A row of a table with tabs in which every quote begins a cell, ends it, or is doubled."""


def lines(path: Path) -> Iterator[str]:
    """Decode the lines of a UTF-8 file one after another, each with its newline; nothing else ends a line."""
    check_file(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason}): save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def plain_rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
    """Cut lines at the mark and at nothing else: in GLUE's files a quote is an ordinary character."""
    for number, line in enumerate(lines(path), 1):
        row = line.removesuffix("\n").removesuffix("\r")
        if row:
            yield number, row.split(mark)


def quoted_rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a text of 128 KiB
    # a bare carriage return ends a line, too: old spreadsheets write it
    rows = chain.from_iterable(io.StringIO(line, newline="") for line in lines(path))
    reader = csv.reader(rows, delimiter=mark, strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        way_out = "where quotes are part of the text, set quoting to false"
        raise UserError(f"{path}, line {number}: not CSV: {error}; {way_out}") from None


@lru_cache
def shows_quoting(path: Path, size: int, time: int) -> bool | None:
    """Return whether a file with tabs can only be what a CSV writer, such as pandas, makes of its cells.

    None: it has no quotes. Every quote is then a writer's (none stands alone inside a cell), and some cell cannot be
    meant as it stands: it holds a doubled quote, a tab or a line break, or all cells of the first row are in quotes.

    All lines are read, so the answer is kept: by its size and time, a changed file is read again.
    """
    csv.field_size_limit(2**31 - 1)
    consumed: list[str] = []

    def consuming() -> Iterator[str]:
        for line in lines(path):
            consumed.append(line)
            yield line

    shown: bool | None = None
    width = 0
    try:
        for cells in csv.reader(consuming(), delimiter="\t", strict=True):
            raw = "".join(consumed).rstrip("\r\n")
            lines_fit = len(consumed) > 1 and {line.count("\t") + 1 for line in consumed} == {width}
            consumed.clear()
            if not width and cells:
                width, shown = len(cells), all(cell.startswith('"') for cell in raw.split("\t")) or None
            if '"' not in raw:
                continue
            if not _QUOTED_ROW.fullmatch(raw) or len(cells) != width:
                return False
            # a quotation over several lines that are rows themselves may be a text that was cut into sentences
            shown = bool(shown) or (not lines_fit and any(sign in cell for cell in cells for sign in '"\t\n'))
    except csv.Error:
        return False
    return shown
