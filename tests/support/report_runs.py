"""The folder of a run of three phases, as it is left, to make reports of, and the data of its figures."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

BERT = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
FEED_FORWARD = ("intermediate.dense", "output.dense")
NAMES = [f"bert.encoder.layer.{i}.{m}" for i in range(3) for m in (*BERT, *FEED_FORWARD)]
FIGURES = {
    "dense.loss",
    *(f"taught.{name}" for name in ("loss", "readings", "cut")),
    *(f"exits.{name}" for name in ("loss", "exits", "exit_histogram")),
    *(f"exits.{name}_validation_mismatched" for name in ("exits", "exit_histogram")),
}


def synthetic_exits(layers: int = 6, splits: tuple[str, ...] = ("validation",)) -> dict[str, Any]:
    """What `eval/exits.json` holds: three criteria that lose more of the score the earlier samples leave."""

    def point(threshold: float, mean: float, loss: float) -> dict[str, Any]:
        scores = {"accuracy": 0.9 - loss * (1 - mean / layers) ** 3}
        return {"threshold": threshold, "mean_layers": mean, "scores": scores}

    means = [layers - (layers - 1) * step / 10 for step in range(10)]
    losses = {"entropy": 0.3, "confidence": 0.35, "patience": 0.25}
    split = {
        "heads": {str(n): {"accuracy": 0.9 - 0.4 * math.exp(-n / 2)} for n in range(1, layers + 1)},
        "curves": {name: [point(i / 10, mean, loss) for i, mean in enumerate(means)] for name, loss in losses.items()},
        "early_exit": {
            "scores": {"accuracy": 0.88},
            "mean_layers": 0.6 * layers,
            "exit_counts": {str(n): 10 * n for n in range(1, layers + 1)},
        },
    }
    return {
        "layers": list(range(1, layers + 1)),
        "num_layers": layers,
        "policy": {"criterion": "entropy", "thresholds": [0.2] * (layers - 1), "patience": 2},
        "splits": {name: copy.deepcopy(split) for name in splits},
        "calibration": {"split": "held_out", "examples": 1347, "target_speedup": 1.5, "threshold": 0.2},
    }


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"phase": "taught", "step": step, **{name.replace("__", "/"): value for name, value in values.items()}}


def taught(steps: int = 20, weights: tuple[float, float] = (0.5, 2.0)) -> list[dict[str, Any]]:
    """A log of distillation and pruning, in which every matrix goes its own way."""
    rows = []
    for step in range(1, steps + 1):
        terms = {"task": 1 / step, "distill.logits": 3 / step}
        row = record(step, train__loss=sum(w * t for w, t in zip(weights, terms.values(), strict=True)))
        row |= {f"train/term/{name}": value for name, value in terms.items()}
        row |= {f"train/weight/{name}": w for name, w in zip(terms, weights, strict=True)}
        row |= {"train/lr/weights": 1e-4 / step, "train/lr/*.mask_scores": 1e-2 / step}
        row |= {"prune/density": 1 - 0.6 * step / steps, "plugin/share": 1 - 0.5 / step}
        row |= {f"prune/density/{name}": 1 - (0.3 + i / 30) * step / steps for i, name in enumerate(NAMES)}
        rows.append(row)
    return rows


def parts() -> list[dict[str, Any]]:
    """The records of a cut of three layers; the second one has lost more, and the last feed-forward nothing."""
    sizes = {"attention.output.dense": ("heads", 12), "output.dense": ("neurons", 1536)}
    return [
        {"name": f"bert.encoder.layer.{i}.{name}", "unit": unit, "count": n, "kept": n // (4 if i == 1 else 2)}
        | {"error": i / 10}
        for i in range(3)
        for name, (unit, n) in sizes.items()
    ][:-1]


def results_of(counts: dict[str, Any], score: float, **more: Any) -> dict[str, Any]:
    encoder = {key: sum(count[key] for count in counts.values()) for key in ("kept", "total")}
    return {
        "train": {"epochs": 1.0, "train_loss": 0.3, "train_seconds": 12.3, "examples_per_s": 99.0, "steps": 20},
        "eval": {"accuracy": score, **more.pop("eval", {})},
        "weights": {"layers": counts, "encoder": encoder, "model": {key: 2 * n for key, n in encoder.items()}},
        **more,
    }


def write_run(folder: Path) -> Path:
    """A run of three phases, the last with exits on two splits; the first is dense, the second cut, pruned, taught."""
    dense = {name: {"kept": 64, "total": 64} for name in NAMES}
    counts = dense | {NAMES[0]: {"kept": 16, "total": 64}}
    exits = synthetic_exits(3, splits=("validation", "validation_mismatched"))
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "exits.json").write_text(json.dumps(exits))
    latency = {"batch_1": {"median_ms": 3.25, "p95_ms": 4.5}, "batch_32": {"median_ms": 50.0}}
    faster = {"batch_1": {"median_ms": 2.5, "p95_ms": 3.0}, "batch_32": {"median_ms": 25.0}}
    conditions = {"threads": 2, "device": "cpu", "dtype": "float32", "examples": 64, "mean_tokens": 21.25}
    teacher = {"teacher/accuracy": 0.91, "teacher/agreement": 0.88}
    early = {"early_exit/accuracy": 0.79, "early_exit/mean_layers": 1.75, "early_exit/speedup": 1.6}
    early |= {"early_exit/expected_saving": 0.58, "exit_1/accuracy": 0.61, "mm/exit_2/accuracy": 0.62}
    early |= {"early_exit/leave_at_1": 63, "early_exit/seconds": 64.0, "early_exit/full_seconds": 65.0}
    cut = {"seconds": 8.14, "examples": 512, "parts": parts(), "reconstruction": [], "scores": {"accuracy": 0.8624}}
    results = {
        "dense": results_of(dense, 0.9, latency=latency, measured_on=conditions, size={"bytes": 3 * 2**20}),
        "taught": results_of(counts, 0.8, eval=teacher, latency=faster, measured_on=conditions, cut=cut),
        "exits": results_of(counts, 0.81, eval=early, exits=exits, early_exit_latency=latency, warnings=["it rains"]),
    }
    techniques = [{}, {"prune": {}, "distill": {}}, {"prune": None, "exits": {}}]
    phases = [{"name": n, "task": None, "techniques": t} for n, t in zip(results, techniques, strict=True)]
    phases[0]["student"] = {"num_hidden_layers": 2}
    recipe = {"model": {"name_or_path": "/models/bert"}, "task": {"name": "mnli"}, "phases": phases}
    log = [{**row, "phase": "taught"} for row in taught()]
    log += [{"phase": name, "step": step, "train/loss": 1 / step} for name in ("dense", "exits") for step in (1, 2, 3)]
    log[-1] |= {"memory/resident/rank0": 2**30, "memory/resident/rank1": 2**31}
    files = {"recipe.json": recipe, "all_results.json": results, "deepspeed_config.json": {"train_batch_size": 8}}
    files["command.json"] = {"command": "deepspeed launch/train.py --recipe my.json"}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return folder
