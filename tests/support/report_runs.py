"""The folder of a run of three phases, as it is left, to make reports of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.run_plots import pruned_bert, synthetic_exits, taught

from ds_trainer.report import plots

FIGURES = {
    "score_by_cost",
    "dense.loss",
    *(f"taught.{name}" for name in ("loss", "density", "agreement", "kept_weights")),
    *(f"exits.{name}" for name in ("loss", "kept_weights", "exits", "exit_histogram")),
    *(f"exits.{name}_validation_mismatched" for name in ("exits", "exit_histogram")),
}


def results_of(counts: dict[str, Any], score: float, **more: Any) -> dict[str, Any]:
    encoder = {key: sum(count[key] for count in counts.values()) for key in ("kept", "total")}
    return {
        "train": {"epochs": 1.0, "train_loss": 0.3, "train_seconds": 12.3, "examples_per_s": 99.0, "steps": 20},
        "eval": {"accuracy": score, **more.pop("eval", {})},
        "weights": {"layers": counts, "encoder": encoder, "model": {key: 2 * n for key, n in encoder.items()}},
        **more,
    }


def write_run(folder: Path) -> Path:
    """A run of three phases, the last with exits on two splits; the first is dense, the second pruned and taught."""
    counts = pruned_bert(folder / "model")
    shutil.copytree(folder / "model", folder / "taught" / "model")
    dense = {name: {"kept": count["total"], "total": count["total"]} for name, count in counts.items()}
    exits = synthetic_exits(3, splits=("validation", "validation_mismatched"))
    (folder / "eval").mkdir()
    (folder / "eval" / "exits.json").write_text(json.dumps(exits))
    latency = {"batch_1": {"median_ms": 3.25, "p95_ms": 4.5}, "batch_32": {"median_ms": 50.0}}
    faster = {"batch_1": {"median_ms": 2.5, "p95_ms": 3.0}, "batch_32": {"median_ms": 25.0}}
    conditions = {"threads": 2, "device": "cpu", "dtype": "float32", "examples": 64, "mean_tokens": 21.25}
    teacher = {"teacher/accuracy": 0.91, "teacher/agreement": 0.88}
    early = {"early_exit/accuracy": 0.79, "early_exit/mean_layers": 1.75, "early_exit/speedup": 1.6}
    early |= {"early_exit/expected_saving": 0.58, "exit_1/accuracy": 0.61, "mm/exit_2/accuracy": 0.62}
    early |= {"early_exit/leave_at_1": 63, "early_exit/seconds": 64.0, "early_exit/full_seconds": 65.0}
    results = {
        "dense": results_of(dense, 0.9, latency=latency, measured_on=conditions, size={"bytes": 3 * 2**20}),
        "taught": results_of(counts, 0.8, eval=teacher, latency=faster, measured_on=conditions),
        "exits": results_of(counts, 0.81, eval=early, exits=exits, early_exit_latency=latency),
    }
    techniques = [{}, {"prune": {}, "distill": {}}, {"prune": None, "exits": {}}]
    phases = [{"name": n, "task": None, "techniques": t} for n, t in zip(results, techniques, strict=True)]
    recipe = {"model": {"name_or_path": "/models/bert"}, "task": {"name": "mnli"}, "phases": phases}
    log = [{**row, "phase": "taught"} for row in taught()]
    log += [{"phase": name, "step": step, "train/loss": 1 / step} for name in ("dense", "exits") for step in (1, 2, 3)]
    files = {"recipe.json": recipe, "all_results.json": results, "deepspeed_config.json": {"train_batch_size": 8}}
    files["command.json"] = {"command": "deepspeed launch/train.py --recipe my.json"}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return folder


def figures_of(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "plots").glob("*.png")}


def draw_only_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("densities", "kept_weights", "agreement", "exit_curves", "exit_histogram"):
        monkeypatch.setattr(plots, name, lambda *_: None)
