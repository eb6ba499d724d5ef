"""Runs and models whose figures are drawn."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

BERT = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")


FEED_FORWARD = ("intermediate.dense", "output.dense")


NAMES = [f"bert.encoder.layer.{i}.{m}" for i in range(3) for m in (*BERT, *FEED_FORWARD)]


def synthetic_exits(
    layers: int = 6, metric: str = "accuracy", splits: tuple[str, ...] = ("validation",)
) -> dict[str, Any]:
    """What `eval/exits.json` holds: three criteria that lose more of the score the earlier samples leave."""

    def point(threshold: float, mean: float, loss: float) -> dict[str, Any]:
        return {"threshold": threshold, "mean_layers": mean, "scores": {metric: 0.9 - loss * (1 - mean / layers) ** 3}}

    means = [layers - (layers - 1) * step / 10 for step in range(10)]
    losses = {"entropy": 0.3, "confidence": 0.35, "patience": 0.25}
    split = {
        "heads": {str(n): {metric: 0.9 - 0.4 * math.exp(-n / 2)} for n in range(1, layers + 1)},
        "curves": {name: [point(i / 10, mean, loss) for i, mean in enumerate(means)] for name, loss in losses.items()},
        "early_exit": {
            "scores": {metric: 0.88},
            "mean_layers": 0.6 * layers,
            "expected_saving": 0.4,
            "exit_counts": {str(n): 10 * n for n in range(1, layers + 1)},
            "measured": {"batch_32": {"seconds": 1.0, "full_seconds": 1.6, "speedup": 1.6}},
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
        row |= {"train/lr/weights": 1e-4 / step, "train/lr/vectors": 1e-4 / step, "train/lr/*.mask_scores": 1e-2 / step}
        row |= {"prune/density": 1 - 0.6 * step / steps, "distill/agreement": 1 - 0.5 / step}
        row |= {f"prune/density/{name}": 1 - (0.3 + i / 30) * step / steps for i, name in enumerate(NAMES)}
        rows.append(row)
    return rows


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """A model folder in bfloat16, and its weights counted as a run counts them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{n}.weight": torch.tensor(w).bfloat16() for n, w in weights.items()}, folder / "model.safetensors")
    return {name: {"kept": int((w != 0).sum()), "total": w.size} for name, w in weights.items()}


def pruned_bert(folder: Path, layers: int = 3, heads: int = 4) -> dict[str, dict[str, int]]:
    """Heads of 2. Of layer 1, head 2 of the query, head 4 of the output and half of `ff in` are zero."""
    size = 2 * heads
    shapes = dict.fromkeys(BERT, (size, size)) | dict(
        zip(FEED_FORWARD, [(2 * size, size), (size, 2 * size)], strict=True)
    )
    weights = {f"bert.encoder.layer.{i}.{m}": np.ones(s, np.float32) for i in range(layers) for m, s in shapes.items()}
    weights["bert.encoder.layer.0.attention.self.query"][2:4] = 0
    weights["bert.encoder.layer.0.attention.output.dense"][:, 6:8] = 0
    weights["bert.encoder.layer.0.intermediate.dense"][::2] = 0
    return write_model(folder, {"hidden_size": size, "num_attention_heads": heads}, weights)
