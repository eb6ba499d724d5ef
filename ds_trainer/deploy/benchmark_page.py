"""What a benchmark has found, as tables and files: `benchmark.json`, `benchmark.md` and the figure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ds_trainer.deploy.latency import FOR_P95
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.report.figure import check_installed, write_whole
from ds_trainer.report.size_plots import Point, size_speed_score

FIGURE = "size_speed_score"
_FIGURES = (f"{FIGURE}.png", f"{FIGURE}.svg")
_WORDS = ("folder", "backend", "device", "dtype")
"""Columns of text: all others hold numbers, and are flush right."""
_COLUMNS = {
    "median_ms": "median ms",
    "p95_ms": "p95 ms",
    "examples_per_s": "examples/s",
    "speed_up": "speed-up",
    "speed_up_per_flop_ratio": "/ FLOPs",
}
_FORMS = ("compact", "safetensors", "pickle")
"""Of weights on disk; the first that a folder has is shown."""
_MIB = 2**20
Rows: TypeAlias = Sequence[Mapping[str, str]]
"""Of a table: cells by their columns; a row need not have all."""


def show(found: Mapping[str, Any]) -> None:
    """Print the tables on standard output."""
    print("\n".join(["", aligned(sizes(found)), "", aligned(times(found)), "", *remarks(found)]), flush=True)


def clear(folder: Path) -> None:
    """Remove the files of an earlier benchmark."""
    for name in ("benchmark.json", "benchmark.md", *_FIGURES):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def write_numbers(found: Mapping[str, Any], folder: Path) -> None:
    """Write `benchmark.json`, whole or not at all. Raises ValueError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    write_whole(folder / "benchmark.json", (json.dumps(found, indent=2, ensure_ascii=False) + "\n").encode())


def write(found: Mapping[str, Any], folder: Path) -> None:
    """Write the files of an output folder, each whole or not at all; a figure that cannot be drawn is a warning.

    Raises ValueError where the folder cannot be written.
    """
    write_numbers(found, folder)
    _write_page(found, folder, [])
    if _draw(found, folder):
        _write_page(found, folder, [f"![sizes, speed-ups and scores]({FIGURE}.png)", ""])
    distributed.info(f"benchmark: {folder / 'benchmark.md'}")


def _write_page(found: Mapping[str, Any], folder: Path, image: Sequence[str]) -> None:
    page = ["# Benchmark", "", markdown(sizes(found)), "", markdown(times(found)), "", *image]
    page += [f"- {_escaped(line)}" for line in remarks(found)]
    write_whole(folder / "benchmark.md", ("\n".join(page) + "\n").encode(errors="replace"))


def sizes(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each folder: what it holds, does and scores, without a clock."""
    rows = []
    whole = found["folders"][found["base"]]["encoder"]["total"]
    for label, folder in found["folders"].items():
        encoder = folder["encoder"]
        row = {"folder": label, "parameters": f"{folder['parameters']['total']:,}"}
        row["not 0"] = f"{folder['parameters']['kept']:,}"
        row["encoder weights"] = f"{encoder['total']:,} ({_percent(encoder['total'], whole)})"
        row["encoder not 0"] = f"{encoder['kept']:,} ({_percent(encoder['kept'], whole)})"
        for length, flops in folder["flops_per_example"].items():
            what = "GFLOPs, task" if length == "task" else f"GFLOPs at {length}"
            row[what] = "–" if flops is None else f"{flops / 1e9:.3g}"
        for kind, size in folder["bytes"].items():
            row[f"{kind}, MiB"] = f"{size / _MIB:,.1f}"
        for way, scores in folder["scores"].items():
            row |= {name if way == "torch" else f"{name} ({way})": f"{value:.4f}" for name, value in scores.items()}
        rows.append(row)
    return rows


def times(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each folder at each setting."""
    return [row for measured in found["measurements"] for row in _rows_of(measured)]


def remarks(found: Mapping[str, Any]) -> list[str]:
    """What was measured where and how, and all that is to be noted."""
    conditions = found["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    where = f"{conditions['cpu']}, {conditions['cores']} cores"
    where += f"; {conditions['gpu']}" if "gpu" in conditions else ""
    lines = [
        f"Speed-ups are to {found['base']}: the folders took turns, call by call; the median of a turn's "
        f"ratios. "
        f"/ FLOPs: over the ratio of the encoders' FLOPs, 1 where all that is saved is gained. p95: of {FOR_P95} "
        f"calls or more.",
        f"On {where}. {versions}.",
    ]
    if any(measured["length"] == "task" for measured in found["measurements"]):
        lines.append("Tokens with ~: what the task's texts have on average, padded to the longest of each batch.")
    if any(measured["backend"] == "onnxruntime" for measured in found["measurements"]):
        lines.append("The threads of onnxruntime sleep between calls: spinning they would slow down what has its turn.")
    noted: dict[str, list[str]] = {}
    for measured in found["measurements"]:
        for label, note in measured["notes"].items():
            noted.setdefault(f"{label}, {measured['backend']}: {note}", []).append(_setting(measured))
    return [*lines, *found["notes"], *(f"{note} ({'; '.join(at)})" for note, at in noted.items())]


def aligned(rows: Rows) -> str:
    """The rows under their columns' names, in plain text."""
    lines = _lines(rows)
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    flush = [str.ljust if column in _WORDS else str.rjust for column in lines[0]]
    return "\n".join(
        "  ".join(put(cell, width) for put, cell, width in zip(flush, line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(rows: Rows) -> str:
    """The rows as a table in Markdown."""
    columns, *cells = _lines(rows)
    rule = [":---" if column in _WORDS else "---:" for column in columns]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in [columns, rule, *cells])


def points(found: Mapping[str, Any]) -> tuple[str | None, list[Point]]:
    """What the figure shows: the name of the score, if there are any, and a point for each folder and its early exits.

    A folder's bytes are those of its compact file where it has one.
    """
    base = found["folders"][found["base"]]
    metric = next(iter(base["scores"].get("torch", ())), None)
    shown = []
    for label, folder in found["folders"].items():
        share = folder["encoder"]["kept"] / max(base["encoder"]["total"], 1)
        size = next((folder["bytes"][form] for form in _FORMS if form in folder["bytes"]), 0)
        for way, name in (("torch", label), ("torch, early exit", f"{label}, early exit")):
            speed_ups = {
                _short(measured, found["measurements"]): measured["folders"][name]["speed_up"]
                for measured in found["measurements"]
                if "speed_up" in measured["folders"].get(name, {})
            }
            if name == label or speed_ups:
                score = folder["scores"].get(way, {}).get(metric) if metric else None
                shown.append(Point(name, size, share, score, speed_ups))
    return metric, shown


def _draw(found: Mapping[str, Any], folder: Path) -> bool:
    """Whether there is a figure now."""
    try:
        check_installed()
        figure = size_speed_score(*points(found))
        if figure:
            for name in _FIGURES:
                figure.save(folder / name)
    except Exception as error:  # noqa: BLE001 - all that was measured is written
        distributed.warn(f"the benchmark has no figure: {error}")
        return False
    return figure is not None


def _rows_of(measured: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    setting = {name: str(measured[name]) for name in ("backend", "device", "dtype", "threads")}
    tokens = measured["length"] if measured["length"] != "task" else f"~{measured['mean_tokens']:.1f}"
    setting |= {"tokens": str(tokens), "batch": str(measured["batch_size"])}
    for label in [*measured["folders"], *measured["notes"]]:
        row = {"folder": label} | setting
        found = measured["folders"].get(label)
        if found is None:
            yield row | {"median ms": "see below"}
            continue
        for name, column in _COLUMNS.items():
            row[column] = f"{found[name]:,.2f}" if name in found else "–"
        yield row


def _lines(rows: Rows) -> list[list[str]]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [columns, *([row.get(column, "") for column in columns] for row in rows)]


def _setting(measured: Mapping[str, Any]) -> str:
    tokens = "task" if measured["length"] == "task" else f"{measured['length']} tokens"
    place = f"{measured['device']}, {measured['dtype']}, threads {measured['threads']}"
    return f"{place}, {tokens}, batch {measured['batch_size']}"


def _short(measured: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> str:
    """A setting in the words that tell it from the others."""
    said = {
        "backend": measured["backend"],
        "device": measured["device"],
        "dtype": measured["dtype"],
        "threads": f"threads {measured['threads']}",
        "length": "task" if measured["length"] == "task" else f"{measured['length']} tokens",
        "batch_size": f"batch {measured['batch_size']}",
    }
    told = [text for name, text in said.items() if len({other[name] for other in every}) > 1]
    return ", ".join(told) or f"{said['backend']}, {said['batch_size']}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}%"


def _escaped(text: str) -> str:
    """Text that a cell of Markdown shows as it is."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
