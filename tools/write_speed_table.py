"""Write the table of the speed figures from the lines that benchmarks/all.sh has collected; its other rows stay.

python tools/write_speed_table.py runs/bench/figures.jsonl          # print it
python tools/write_speed_table.py runs/bench/figures.jsonl --write  # between the markers of docs/results.md
"""

import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "results.md"
HEAD = "| figure | measured | bar | holds | command |\n|---|---|---|---|---|\n"


def table(lines: Iterable[str]) -> str:
    """Return a row for each figure, the newest where there are several. A command stands at its first figure."""
    figures = {(figure["command"], figure["name"]): figure for figure in map(json.loads, lines)}
    commands = list(dict.fromkeys(command for command, _ in figures))
    rows, previous = [], None
    for (command, name), figure in sorted(figures.items(), key=lambda item: commands.index(item[0][0])):
        rows.append(f"| {name} | {judgement(figure)} | {f'`{command}`' if command != previous else ''} |\n")
        previous = command
    return HEAD + "".join(rows)


def judgement(figure: dict[str, Any]) -> str:
    """Return the cells of the value, of the bar that it is held against, and of whether it holds."""
    if figure["bar"] is None:
        return f"{figure['value']:g} | |"
    bar = f"{'>=' if figure['at_least'] else '<='} {figure['bar']:g}"
    return f"{figure['value']:g} | {bar} | {'yes' if figure['holds'] else '**no**'}"


if __name__ == "__main__":
    from markers import write_rows

    text = table(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    write_rows(PAGE, "speed", text) if "--write" in sys.argv else print(text, end="")
