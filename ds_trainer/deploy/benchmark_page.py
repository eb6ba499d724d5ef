"""The results of a benchmark as tables and files: `benchmark.json`, `benchmark.md` and the figure.

`results` is the content of `benchmark.json`, as `benchmark.measure` yields it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.config.jobs import OF_THE_TASK
from ds_trainer.deploy.benchmark_cases import words
from ds_trainer.deploy.latency import FOR_P95
from ds_trainer.files.tables import aligned, markdown
from ds_trainer.files.writing import write_json, write_whole
from ds_trainer.ranks import distributed
from ds_trainer.report.drawing import save
from ds_trainer.report.page import tried
from ds_trainer.report.size_plots import MeasuredModel, size_speed_score

_PAGE = "benchmark.md"
_FIGURES = ("size_speed_score.png", "size_speed_score.svg")
_COLUMNS = {
    "median_ms": "median ms",
    "p95_ms": "p95 ms",
    "examples_per_s": "examples/s",
    "speed_up": "speed-up",
    "speed_up_per_flop_ratio": "/ FLOPs",
}
_FORMS = ("compact", "safetensors", "pickle")
"""Forms of weights on disk; the figure shows the first that a folder has."""
_MIB = 2**20


def show(results: Mapping[str, Any]) -> None:
    """Print the tables on standard output."""
    print("\n".join(["", aligned(sizes(results)), "", aligned(times(results)), "", *remarks(results)]), flush=True)


def write_numbers(results: Mapping[str, Any], folder: Path) -> None:
    """Write `benchmark.json`, and remove page and figure of an earlier benchmark, which would contradict it."""
    write_json(folder / "benchmark.json", results)
    for name in (_PAGE, *_FIGURES):
        (folder / name).unlink(missing_ok=True)


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Write page and figure; a figure that cannot be drawn is a warning."""

    def draw() -> list[str]:
        if not (figure := size_speed_score(*measured_models(results))):
            return []
        for name in _FIGURES:
            save(figure, folder / name)
        return [f"![sizes, speed-ups and scores]({_FIGURES[0]})", ""]

    image = tried("the benchmark has no figure", draw) or []
    lines = ["# Benchmark", "", markdown(sizes(results)), "", markdown(times(results)), "", *image]
    lines += [f"- {line}" for line in remarks(results)]
    write_whole(folder / _PAGE, "\n".join(lines) + "\n")
    distributed.info(f"benchmark: {folder / _PAGE}")


def sizes(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each folder: the measures that need no clock."""
    rows = []
    whole = results["folders"][results["base"]]["encoder"]["total"]
    for label, folder in results["folders"].items():
        encoder = folder["encoder"]
        row = {"folder": label, "parameters": f"{folder['parameters']['total']:,}"}
        row["not 0"] = f"{folder['parameters']['kept']:,}"
        row["encoder weights"] = f"{encoder['total']:,} ({100 * encoder['total'] / max(whole, 1):.1f}%)"
        row["encoder not 0"] = f"{encoder['kept']:,} ({100 * encoder['kept'] / max(whole, 1):.1f}%)"
        for length, flops in folder["flops_per_example"].items():
            column = "GFLOPs, task" if length == OF_THE_TASK else f"GFLOPs at {length}"
            row[column] = "–" if flops is None else f"{flops / 1e9:.3g}"
        for kind, size in folder["bytes"].items():
            row[f"{kind}, MiB"] = f"{size / _MIB:,.1f}"
        for way, scores in folder["scores"].items():
            row |= {name if way == "torch" else f"{name} ({way})": f"{value:.4f}" for name, value in scores.items()}
        rows.append(row)
    return rows


def times(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each folder in each case."""
    rows = []
    for measured in results["measurements"]:
        case = {name: str(measured[name]) for name in ("backend", "device", "dtype", "threads")}
        tokens = measured["length"] if measured["length"] != OF_THE_TASK else f"~{measured['mean_tokens']:.1f}"
        case |= {"tokens": str(tokens), "batch": str(measured["batch_size"])}
        for label, numbers in measured["folders"].items():
            shown = {name: f"{numbers[key]:,.2f}" if key in numbers else "–" for key, name in _COLUMNS.items()}
            rows.append({"folder": label} | case | shown)
        rows += [{"folder": label} | case | {"median ms": "see below"} for label in measured["notes"]]
    return rows


def remarks(results: Mapping[str, Any]) -> list[str]:
    """Where and how was measured, and all notes."""
    conditions, measurements = results["conditions"], results["measurements"]
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    where = f"{conditions['cpu']}, {conditions['cores']} cores"
    where += f"; {conditions['gpu']}" if "gpu" in conditions else ""
    lines = [
        f"Speed-ups are relative to {results['base']}. The folders took turns, call by call; a speed-up is the median "
        f"of the ratios within a turn. / FLOPs: the speed-up over the ratio of the encoders' FLOPs, 1 where all saved "
        f"FLOPs save time. p95: of {FOR_P95} calls or more.",
        f"Measured on {where}. {versions}.",
    ]
    if any(measured["length"] == OF_THE_TASK for measured in measurements):
        lines.append("Tokens with ~: the average over the task's texts, padded to the longest of each batch.")
    if any(measured["backend"] == "onnxruntime" for measured in measurements):
        lines.append("The threads of onnxruntime sleep between calls: spinning threads would slow down the others.")
    if any(None in folder["flops_per_example"].values() for folder in results["folders"].values()):
        lines.append("FLOPs are not counted (–) where a model's layers are not of a known family.")
    noted: dict[str, list[str]] = {}
    for measured in measurements:
        case = ", ".join(text for name, text in words(measured).items() if name != "backend")
        for label, note in measured["notes"].items():
            noted.setdefault(f"{label}, {measured['backend']}: {note}", []).append(case)
    return [*lines, *results["notes"], *(f"{note} ({'; '.join(cases)})" for note, cases in noted.items())]


def measured_models(results: Mapping[str, Any]) -> tuple[str | None, list[MeasuredModel]]:
    """The data of the figure: the name of the score, if there are scores, and each folder and its early exits.

    A folder's bytes are those of its compact file where it has one.
    """
    base, measurements = results["folders"][results["base"]], results["measurements"]
    metric = next(iter(base["scores"].get("torch", ())), None)
    shown = []
    for label, folder in results["folders"].items():
        share = folder["encoder"]["kept"] / max(base["encoder"]["total"], 1)
        size = next((folder["bytes"][form] for form in _FORMS if form in folder["bytes"]), 0)
        for way, name in (("torch", label), ("torch, early exit", f"{label}, early exit")):
            speed_ups = {
                _short(measured, measurements): measured["folders"][name]["speed_up"]
                for measured in measurements
                if "speed_up" in measured["folders"].get(name, {})
            }
            if name == label or speed_ups:
                score = folder["scores"].get(way, {}).get(metric) if metric else None
                shown.append(MeasuredModel(name, size, share, score, speed_ups))
    return metric, shown


def _short(measured: Mapping[str, Any], measurements: Sequence[Mapping[str, Any]]) -> str:
    """A case in the words that distinguish it from the others."""
    case = words(measured)
    shown = [text for name, text in case.items() if len({other[name] for other in measurements}) > 1]
    return ", ".join(shown) or f"{case['backend']}, {case['batch_size']}"
