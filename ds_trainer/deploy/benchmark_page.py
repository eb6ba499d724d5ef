"""The results of a benchmark as tables and files: `benchmark.json`, `benchmark.md` and the figure.

`results` is what `benchmark.measure` returns.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_trainer.deploy.latency import FOR_P95
from ds_trainer.files.messages import aligned, markdown
from ds_trainer.files.writing import write_json, write_whole
from ds_trainer.ranks import distributed
from ds_trainer.recipe.jobs import OF_THE_TASK
from ds_trainer.report.figures import save, score_by_cost

_FIGURES = ("size_speed_score.png", "size_speed_score.svg")
_MOST_PANELS = 6
_COLUMNS = {
    "median_ms": "median ms",
    "p95_ms": "p95 ms",
    "examples_per_s": "examples/s",
    "speed_up": "speed-up",
}
_MIB = 2**20


def show(results: Mapping[str, Any]) -> None:
    """Print the tables on standard output."""
    print("\n".join(["", aligned(sizes(results)), "", aligned(times(results)), "", *remarks(results)]), flush=True)


def write_page(results: Mapping[str, Any], folder: Path) -> None:
    """Write the numbers, the page and the figure; a figure that cannot be drawn is a warning."""
    write_json(folder / "benchmark.json", results)
    image = []
    for name in _FIGURES:  # that of an earlier benchmark would contradict this one
        (folder / name).unlink(missing_ok=True)
    with distributed.as_warning("the benchmark has no figure"):
        if figure := score_by_cost(*scores_and_costs(results)):
            for name in _FIGURES:
                save(figure, folder / name)
            image = [f"![sizes, speed-ups and scores]({_FIGURES[0]})", ""]
    lines = ["# Benchmark", "", markdown(sizes(results)), "", markdown(times(results)), "", *image]
    write_whole(folder / "benchmark.md", "\n".join([*lines, *(f"- {line}" for line in remarks(results))]) + "\n")
    distributed.info(f"benchmark: {folder / 'benchmark.md'}")


def words(case: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a case in words, by their names."""
    return {
        **{name: case[name] for name in ("backend", "device", "dtype")},
        "threads": f"threads {case['threads']}",
        "length": "the task's texts" if case["length"] == OF_THE_TASK else f"{case['length']} tokens",
        "batch_size": f"batch {case['batch_size']}",
    }


def sizes(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each folder, with the measures that need no clock."""
    rows = []
    whole = max(results["folders"][results["base"]]["encoder"]["total"], 1)
    for label, folder in results["folders"].items():
        row = {"folder": label, "parameters": f"{folder['parameters']['total']:,}"}
        row["not 0"] = f"{folder['parameters']['kept']:,}"
        for column, count in (("encoder weights", "total"), ("encoder not 0", "kept")):
            row[column] = f"{folder['encoder'][count]:,} ({100 * folder['encoder'][count] / whole:.1f}%)"
        for length, flops in folder["flops_per_example"].items():
            column = "GFLOPs, task" if length == OF_THE_TASK else f"GFLOPs at {length}"
            row[column] = "–" if flops is None else f"{flops / 1e9:.3g}"
        row |= {f"{kind}, MiB": f"{size / _MIB:,.1f}" for kind, size in folder["bytes"].items()}
        for way, scores in folder["scores"].items():
            row |= {name if way == "torch" else f"{name} ({way})": f"{value:.4f}" for name, value in scores.items()}
        rows.append(row)
    return rows


def times(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each folder in each case."""
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
    """Say where and how the folders were measured, and give all notes."""
    conditions = results["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    where = f"{conditions['cpu']}, {conditions['cores']} cores"
    where += f"; {conditions['gpu']}" if "gpu" in conditions else ""
    lines = [
        f"Speed-ups are relative to {results['base']}. The folders took turns, call by call; a speed-up is the median "
        f"of the ratios within a turn. p95: of {FOR_P95} calls or more. Tokens with ~: the average over the task's "
        f"texts, padded to the longest of each batch. – FLOPs: the model's layers are not of a known family.",
        f"Measured on {where}. {versions}. The threads of onnxruntime sleep between calls.",
        *results["notes"],
    ]
    for measured in results["measurements"]:
        case = ", ".join(words(measured).values())
        lines += [f"{label}, {case}: {note}" for label, note in measured["notes"].items()]
    return lines


def scores_and_costs(results: Mapping[str, Any]) -> tuple[str, dict[str, tuple[float, dict[str, float]]]]:
    """Return what the figure shows: the name of the score, and the score and the costs of each folder and its exits.

    A folder's bytes are those of its compact file where it has one.
    """
    models: dict[str, tuple[float, dict[str, float]]] = {}
    metric = next(iter(results["folders"][results["base"]]["scores"].get("torch", ())), "")
    for label, folder in results["folders"].items():
        bytes_of = folder["bytes"]
        size = bytes_of.get("compact", bytes_of.get("safetensors", bytes_of.get("pickle", 0)))
        for way, name in (("torch", label), ("torch, early exit", f"{label}, early exit")):
            if metric in folder["scores"].get(way, {}):
                models[name] = folder["scores"][way][metric], {"size on disk (MiB)": size / _MIB}
    for measured in results["measurements"][: _MOST_PANELS - 1]:
        for label, numbers in measured["folders"].items():
            if label in models and "speed_up" in numbers:
                models[label][1][f"speed-up: {', '.join(words(measured).values())}"] = numbers["speed_up"]
    return metric, models
