"""Evaluation of early exits: every head alone, every threshold offline, the chosen policy run and timed; calibration.

One pass over a split keeps all heads' logits; `exit_curves.py` scores any threshold from them. Thresholds are chosen on
the held-out part of the training set, never on what they are evaluated on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.config.exit_specs import DEFAULT_PATIENCE, Criterion, ExitPolicy, ExitsSpec, aim_mistakes
from ds_trainer.ranks import distributed, timing
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import evaluation_shard, spread
from ds_trainer.tasks.evaluation import evaluation_batches, split_prefix
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.tasks.text.text_task import HELD_OUT
from ds_trainer.techniques.exits.curves import AllHeads, choose, choose_per_head, curve
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, with_exits
from ds_trainer.techniques.exits.heads import has_exits, read_exits, write_exits
from ds_trainer.techniques.exits.policy import exit_heads

_CRITERIA: tuple[Criterion, ...] = ("entropy", "confidence", "patience")
_ONE_BY_ONE, _BATCHED = 64, 1000  # examples to time, at batch 1 and at that of the evaluation
_SECONDS = 60.0  # of timing, about, for each batch size and split
_FINE = 400  # points of the curve that thresholds are chosen from


def evaluate_exits(model: EarlyExitModel, task: Task, batch_size: int) -> dict[str, Any]:
    """Every head, curve, exit and time of every evaluation split, as JSON values; collective, the same on every rank.

    `model` is on the rank's device, in evaluation mode. What is under "early_exit" comes of running the model under its
    policy, "heads" and "curves" of one pass to the end. "calibration" is that of the model's folder, if its policy is.
    """
    return {
        "layers": model.layers,
        "num_layers": model.layers[-1],
        "policy": model.policy.model_dump(mode="json"),
        "splits": {split: _of_split(model, task, split, batch_size) for split in task.splits},
        "calibration": distributed.on_main(partial(_calibration_of, model)),
    }


def without_curves(found: dict[str, Any]) -> dict[str, Any]:
    """What `evaluate_exits` has found, but for its bulk."""
    splits = {
        split: {name: value for name, value in of_split.items() if name != "curves"}
        for split, of_split in found["splits"].items()
    }
    return found | {"splits": splits}


def flat_scores(task: Task, found: dict[str, Any]) -> dict[str, float]:
    """What joins an evaluation's scores: `exit_1/accuracy`, `early_exit/accuracy`, `early_exit/mean_layers`, by split.

    Seconds and `early_exit/speedup` are measured, at the evaluation's batch size; `early_exit/leave_at_1` is a count.
    """
    flat: dict[str, float] = {}
    for split, of_split in found["splits"].items():
        early = of_split["early_exit"]
        *_, measured = early["measured"].values()
        named = early["scores"] | {name: early[name] for name in ("mean_layers", "expected_saving")}
        named |= {name: measured[name] for name in ("speedup", "seconds", "full_seconds")}
        named |= {f"leave_at_{layer}": count for layer, count in early["exit_counts"].items()}
        of_all = {f"early_exit/{name}": value for name, value in named.items()}
        *inner, _ = of_split["heads"].items()  # the own head's scores are the model's
        of_one = {f"exit_{layer}/{name}": value for layer, scores in inner for name, value in scores.items()}
        flat |= {f"{split_prefix(task, split)}{name}": value for name, value in (of_one | of_all).items()}
    return flat


def calibrate_folder(folder: Path, task: Task, batch_size: int, spec: ExitsSpec) -> dict[str, Any]:
    """Rewrite a folder's `exits.json` with thresholds chosen on held-out examples; gives how. Collective."""
    distributed.on_main(partial(_check_held_out, folder, task))
    early = with_exits(task.build_model(folder), folder).to(distributed.device()).eval()
    policy, calibration = calibrate(early, task, batch_size, spec)
    saved = read_exits(folder).model_copy(update={"policy": policy, "calibration": calibration})
    distributed.on_main(partial(write_exits, folder, saved))
    return calibration


def calibrate(model: EarlyExitModel, task: Task, batch_size: int, spec: ExitsSpec) -> tuple[ExitPolicy, dict[str, Any]]:
    """The policy that reaches the target on the held-out part of the training set, and how it was found; collective.

    Of the specification count `target_speedup` or `max_drop`, `per_head`, the criterion (by default that of the
    model's policy) and, for a regression, the patience. ValueError where no threshold reaches the target, the
    criterion does not go with the task, or nothing is held out.
    """
    criterion = spec.asked_criterion or model.policy.criterion
    if model.regression and spec.patience is None:
        spec = spec.model_copy(update={"patience": model.policy.patience})
    *layers, depth = model.layers
    mistakes = aim_mistakes(spec, criterion, layers, depth, model.regression)
    if mistakes:
        raise UserError("\n".join(f"exits: {mistake}" for mistake in mistakes))
    logits = all_logits(model, task, HELD_OUT, batch_size)

    def chosen() -> tuple[ExitPolicy, dict[str, Any]]:
        assert logits is not None, "rank 0 has them"
        heads = AllHeads(logits, model.layers, _scorer(task, HELD_OUT), spec.patience or DEFAULT_PATIENCE)
        return _calibrated(criterion, heads, spec)

    return distributed.on_main(chosen)


def all_logits(model: EarlyExitModel, task: Task, split: str, batch_size: int) -> Tensor | None:
    """What every head says of every example: (heads, n, classes) fp32 in the order of the split, on rank 0's CPU.

    None on other ranks. One pass over all ranks.
    """
    found = [
        (batch.ids, model.all_logits(**batch.inputs).float().cpu())
        for batch in evaluation_batches(task, split, batch_size)
    ]
    distributed.give_back_freed_memory()
    shards = distributed.gather(found)
    if not distributed.is_main():
        return None
    parts = [part for shard in shards for part in shard]
    heads, _, classes = parts[0][1].shape
    merged = torch.full((heads, len(task.examples(split)), classes), torch.nan)
    for ids, logits in parts:
        merged[:, ids] = logits
    return merged


@torch.inference_mode()
def measured_speed(model: EarlyExitModel, task: Task, split: str, batch_size: int, limit: int) -> dict[str, Any]:
    """Wall seconds of the model that exits early and of the same model run to the end, and their ratio.

    On at most `limit` examples, evenly spread, in the evaluation's batches, in an order drawn at random, until the time
    is up; they take turns batch by batch, and in who is first. Not collective: this rank alone, once all have asked for
    the split; the others wait, hence the limits.
    """
    examples = task.examples(split)
    places = np.asarray(spread(len(examples), limit))
    batches = [places[shard] for shard in evaluation_shard(examples.lengths[places], 0, 1, batch_size)]
    order = np.random.default_rng(0).permutation(len(batches))
    runs: tuple[nn.Module, nn.Module] = (model, model.model)
    seconds, measured, end = [0.0, 0.0], 0, time.perf_counter() + _SECONDS
    for number, positions in enumerate([batches[order[0]], *(batches[place] for place in order)]):
        if measured and time.perf_counter() > end:
            break
        batch = task.collate(examples, positions).to(model.device)
        for which in ((0, 1), (1, 0))[number % 2]:
            taken = timing.seconds(partial(runs[which], **batch.inputs), model.device)
            seconds[which] += taken if number else 0.0  # the first batch comes twice, to warm up
        measured += len(positions) if number else 0
    early, full = seconds
    return {"examples": measured, "seconds": early, "full_seconds": full, "speedup": full / early}


def _check_held_out(folder: Path, task: Task) -> None:
    """Refuse to choose thresholds on examples that the heads may have seen."""
    if read_exits(folder).held_out_key != task.held_out_key():
        raise UserError(
            f"the examples held out now are not those that were held out in training {folder}: give the same data file "
            f"and columns, and the same task.held_out"
        )


def _calibration_of(model: EarlyExitModel) -> dict[str, Any] | None:
    folder = Path(model.model.name_or_path)
    saved = read_exits(folder) if has_exits(folder) else None
    return saved.calibration if saved and saved.policy == model.policy else None


def _of_split(model: EarlyExitModel, task: Task, split: str, batch_size: int) -> dict[str, Any]:
    logits = all_logits(model, task, split, batch_size)
    found = distributed.on_main(partial(_offline, model, task, split, logits))
    early = _running(model, task, split, batch_size)
    limits = {1: _ONE_BY_ONE} | ({batch_size: _BATCHED} if batch_size > 1 else {})
    early["measured"] = distributed.on_main(
        lambda: {f"batch_{size}": measured_speed(model, task, split, size, limit) for size, limit in limits.items()}
    )
    return found | {"early_exit": early}


def _offline(model: EarlyExitModel, task: Task, split: str, logits: Tensor | None) -> dict[str, Any]:
    """Every head by itself, and the curves; on rank 0, which has the logits."""
    assert logits is not None, "rank 0 has them"
    heads = AllHeads(logits, model.layers, _scorer(task, split), model.policy.patience or DEFAULT_PATIENCE)
    criteria = ("patience",) if model.regression else _CRITERIA
    return {
        "heads": {str(layer): heads.score(own) for layer, own in zip(model.layers, logits, strict=True)},
        "curves": {name: [asdict(point) for point in curve(name, heads)] for name in criteria},
    }


def _scorer(task: Task, split: str) -> Callable[[Tensor], dict[str, float]]:
    """The task's metrics of logits (n, classes) in the order of the split."""

    def score(logits: Tensor) -> dict[str, float]:
        ids = torch.arange(len(logits))
        return task.score(split, task.answers(SimpleNamespace(logits=logits), Batch({}, ids, ids)))

    return score


def _running(model: EarlyExitModel, task: Task, split: str, batch_size: int) -> dict[str, Any]:
    """Scores and exit layers of the model run under its policy; collective."""
    answers: dict[int, Any] = {}
    layers: dict[int, int] = {}
    for batch in evaluation_batches(task, split, batch_size):
        out = model(**batch.inputs)
        answers |= task.answers(out, batch)
        layers |= dict(zip(batch.ids.tolist(), out.exit_layers.tolist(), strict=True))
    shards = distributed.gather((answers, layers))

    def merged() -> dict[str, Any]:
        answers = {id: answer for shard, _ in shards for id, answer in shard.items()}
        left = list({id: layer for _, shard in shards for id, layer in shard.items()}.values())
        mean = sum(left) / len(left)
        return {
            "scores": task.score(split, answers),
            "mean_layers": mean,
            "expected_saving": mean / model.layers[-1],
            "expected_speedup": model.layers[-1] / mean,
            "exit_counts": {str(layer): left.count(layer) for layer in model.layers},
        }

    return distributed.on_main(merged)


def _calibrated(criterion: Criterion, heads: AllHeads, spec: ExitsSpec) -> tuple[ExitPolicy, dict[str, Any]]:
    depth = heads.layers[-1]
    points = curve(criterion, heads, _FINE)
    best = choose(points, depth, spec.target_speedup, spec.max_drop)
    policy = heads.policy(criterion, heads.same_for_all(best.threshold))
    if spec.per_head:
        policy = choose_per_head(criterion, heads, points, spec)
        best = heads.point(best.threshold, exit_heads(policy, heads.logits, heads.regression))
    return policy, {
        "split": HELD_OUT,
        "examples": heads.logits.shape[1],
        "criterion": criterion,
        "target_speedup": spec.target_speedup,
        "max_drop": spec.max_drop,
        "threshold": None if spec.per_head else best.threshold,
        **({"thresholds": policy.thresholds} if spec.per_head else {}),
        "scores": best.scores,
        "full_scores": heads.score(heads.logits[-1]),
        "mean_layers": best.mean_layers,
        "expected_speedup": depth / best.mean_layers,
    }
