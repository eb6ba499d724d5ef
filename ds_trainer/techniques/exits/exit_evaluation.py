"""Evaluate and calibrate early exits: each head alone, every threshold, and the chosen policy, run and timed.

One pass over a split gives the doubts and the answers of all heads, from which `curves.py` scores any threshold.
Thresholds are chosen on the held-out part of the training set, never on a split that is evaluated.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import nn

from ds_trainer.config.exit_specs import DEFAULT_PATIENCE, Criterion, ExitPolicy, ExitsSpec, aim_mistakes
from ds_trainer.ranks import distributed, timing
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.evaluation import evaluation_batches, load_on_device, split_prefix
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.exits.curves import AllHeads, choose, choose_per_head, curve
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, with_exits
from ds_trainer.techniques.exits.heads import has_exits, read_exits, write_exits
from ds_trainer.techniques.exits.policy import doubts_of_all

_ONE_BY_ONE, _BATCHED = 64, 1000  # examples to time at batch size 1, and at that of the evaluation
_SECONDS = 60.0  # time limit for each split and batch size
_FINE = 400  # points of the curve that a threshold is chosen from


def evaluate_exits(model: EarlyExitModel, task: Task, batch_size: int) -> dict[str, Any]:
    """Evaluate heads, curves, policy and speed on every split, as JSON values; collective, the same on every rank.

    `model` is on the rank's device, in evaluation mode. In the result "early_exit" comes from running the model under
    its policy, "heads" and "curves" from one pass through all layers. "calibration" is the folder's record of it, or
    None where the model runs under another policy than the folder's.
    """
    folder = Path(model.model.name_or_path)
    saved = distributed.on_main(lambda: read_exits(folder) if has_exits(folder) else None)
    return {
        "layers": model.layers,
        "num_layers": model.layers[-1],
        "policy": model.policy.model_dump(mode="json"),
        "splits": {split: _evaluate_split(model, task, split, batch_size) for split in task.splits},
        "calibration": saved.calibration if saved and saved.policy == model.policy else None,
    }


def without_curves(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of `evaluate_exits` without the curves, which are their bulk."""
    splits = {split: dict(values) for split, values in results["splits"].items()}
    for values in splits.values():
        del values["curves"]
    return results | {"splits": splits}


def flat_scores(task: Task, results: dict[str, Any]) -> dict[str, float]:
    """Return the scores that an evaluation adds to the model's: `exit_1/accuracy`, `early_exit/accuracy`, and so on.

    Seconds and `early_exit/speedup` are measured, at the evaluation's batch size; `early_exit/leave_at_1` is a count.
    """
    flat: dict[str, float] = {}
    for split, values in results["splits"].items():
        early, prefix = values["early_exit"], split_prefix(task, split)
        *_, measured = early["measured"].values()
        *inner, _ = values["heads"].items()  # the last head is the model's own, whose scores are the model's
        for layer, scores in inner:
            flat |= {f"{prefix}exit_{layer}/{name}": value for name, value in scores.items()}
        named = early["scores"] | {name: early[name] for name in ("mean_layers", "expected_saving")}
        named |= {name: measured[name] for name in ("speedup", "seconds", "full_seconds")}
        named |= {f"leave_at_{layer}": count for layer, count in early["exit_counts"].items()}
        flat |= {f"{prefix}early_exit/{name}": value for name, value in named.items()}
    return flat


def load_with_exits(task: Task, folder: Path, policy: ExitPolicy | None = None) -> EarlyExitModel:
    """Load the model of a folder with its exit heads, and this policy or the folder's, as `load_on_device` does."""
    return with_exits(load_on_device(task, folder), folder, policy).eval()


def calibrate_folder(folder: Path, task: Task, batch_size: int, spec: ExitsSpec) -> dict[str, Any]:
    """Choose thresholds on held-out examples, rewrite the `exits.json` of a folder, return the record. Collective."""
    saved = read_exits(folder)
    if saved.held_out_key != distributed.on_main(task.held_out_key):
        raise UserError(
            f"the examples held out now are not those that were held out in training {folder}: give the same data file "
            "and columns, and the same task.held_out"
        )
    policy, calibration = calibrate(load_with_exits(task, folder), task, batch_size, spec)
    saved = saved.model_copy(update={"policy": policy, "calibration": calibration})
    distributed.on_main(partial(write_exits, folder, saved))
    return calibration


def calibrate(model: EarlyExitModel, task: Task, batch_size: int, spec: ExitsSpec) -> tuple[ExitPolicy, dict[str, Any]]:
    """Return the policy that reaches the target on the held-out examples, and a record of the choice; collective.

    The specification gives `target_speedup` or `max_drop`, `per_head`, the criterion and the `sequence_uncertainty` (by
    default those of the model's policy) and, for a regression, the patience. ValueError where no threshold reaches the
    target, the criterion does not suit the task, or nothing is held out.
    """
    criterion = spec.chosen_criterion or model.policy.criterion
    if model.regression and spec.patience is None:
        spec = spec.model_copy(update={"patience": model.policy.patience})
    *layers, depth = model.layers
    mistakes = aim_mistakes(spec, criterion, layers, depth, model.regression)
    raise_mistakes(f"exits: {mistake}" for mistake in mistakes)
    over_tokens = spec.sequence_uncertainty or model.policy.sequence_uncertainty
    rule = model.policy.model_copy(update={"patience": spec.patience, "sequence_uncertainty": over_tokens})
    heads = all_heads(model, task, task.held_out_split, batch_size, rule)

    def chosen() -> tuple[ExitPolicy, dict[str, Any]]:
        assert heads is not None, "rank 0 has them"
        points = curve(criterion, heads, _FINE)
        best = choose(points, depth, spec)
        policy = heads.policy(criterion, best.threshold)
        if spec.per_head:
            policy = choose_per_head(criterion, heads, points, spec)
            best = heads.point_of(policy, best.threshold)
        return policy, {
            "split": task.held_out_split,
            "examples": len(heads.answers[-1]),
            "criterion": criterion,
            "target_speedup": spec.target_speedup,
            "max_drop": spec.max_drop,
            "threshold": None if spec.per_head else best.threshold,
            **({"thresholds": policy.thresholds} if spec.per_head else {}),
            "scores": best.scores,
            "full_scores": heads.score(heads.answers[-1]),
            "mean_layers": best.mean_layers,
            "expected_speedup": depth / best.mean_layers,
        }

    return distributed.on_main(chosen)


def all_heads(model: EarlyExitModel, task: Task, split: str, batch_size: int, rule: ExitPolicy) -> AllHeads | None:
    """Return what every head says about every example of a split; one pass, collective; only rank 0 gets it.

    All criteria have the patience and the `sequence_uncertainty` of `rule`.
    """
    criteria: tuple[Criterion, ...] = ("patience",) if model.regression else get_args(Criterion)
    over_tokens = rule.sequence_uncertainty

    def run(batch: Batch) -> Iterable[Any]:
        """Return for each example its doubts (criteria, heads - 1), and its answers by head."""
        logits = model.all_logits(**batch.inputs)
        counted = model.counted(batch.inputs["input_ids"], batch.inputs.get("attention_mask"))
        doubts = torch.stack([doubts_of_all(name, over_tokens, logits, counted) for name in criteria])
        answers = [task.answers(SimpleNamespace(logits=one), batch) for one in logits]
        by_example = ([answer[id] for answer in answers] for id in batch.ids.tolist())
        return zip(doubts.permute(2, 0, 1).tolist(), by_example, strict=True)

    rows = _by_example(run, task, split, batch_size)
    if rows is None:
        return None
    doubts, answers = zip(*rows, strict=True)
    by_criterion = torch.tensor(doubts, dtype=torch.float64).permute(1, 2, 0)
    return AllHeads(
        doubts=dict(zip(criteria, by_criterion, strict=True)),
        answers=[dict(enumerate(of_head)) for of_head in zip(*answers, strict=True)],
        layers=model.layers,
        score=partial(task.score, split),
        regression=model.regression,
        patience=rule.patience or DEFAULT_PATIENCE,
        over_tokens=over_tokens,
    )


@torch.inference_mode()
def measured_speed(model: EarlyExitModel, task: Task, split: str, batch_size: int, limit: int) -> dict[str, Any]:
    """Return the seconds of the model with early exits and of the same model through all layers, and their ratio.

    At most `limit` examples, evenly spread, go through both models batch by batch until the time is up; which model is
    first alternates. Not collective: other ranks wait for this one, hence the limits.
    """
    examples = task.examples(split)
    chosen = spread(len(examples), limit)
    batches = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
    models: dict[str, nn.Module] = {"seconds": model, "full_seconds": model.model}
    taken, measured, end = dict.fromkeys(models, 0.0), 0, time.perf_counter() + _SECONDS
    # the first batch is run twice; its first run warms up and does not count
    for turn, indices in enumerate([batches[0], *batches]):
        if measured and time.perf_counter() > end:
            break
        batch = task.collate(examples, indices).to(model.device)
        for name in sorted(models, reverse=turn % 2 == 0):
            seconds = timing.seconds(partial(models[name], **batch.inputs), model.device)
            taken[name] += seconds if turn else 0.0
        measured += len(indices) if turn else 0
    return {"examples": measured, **taken, "speedup": taken["full_seconds"] / taken["seconds"]}


def _evaluate_split(model: EarlyExitModel, task: Task, split: str, batch_size: int) -> dict[str, Any]:
    heads = all_heads(model, task, split, batch_size, model.policy)

    def run(batch: Batch) -> Iterable[Any]:
        """Return for each example its exit layer, and its answer."""
        out = model(**batch.inputs)
        answers = task.answers(out, batch)
        return zip(out.exit_layers.tolist(), map(answers.get, batch.ids.tolist()), strict=True)

    rows = _by_example(run, task, split, batch_size)

    def results() -> dict[str, Any]:
        assert heads is not None and rows is not None, "rank 0 has them"  # noqa: PT018
        exits, answers = zip(*rows, strict=True)
        mean, depth = sum(exits) / len(exits), model.layers[-1]
        limits = {1: _ONE_BY_ONE} | ({batch_size: _BATCHED} if batch_size > 1 else {})
        return {
            "heads": {str(layer): heads.score(one) for layer, one in zip(model.layers, heads.answers, strict=True)},
            "curves": {name: [asdict(point) for point in curve(name, heads)] for name in heads.doubts},
            "early_exit": {
                "scores": heads.score(dict(enumerate(answers))),
                "mean_layers": mean,
                "expected_saving": mean / depth,
                "expected_speedup": depth / mean,
                "exit_counts": {str(layer): exits.count(layer) for layer in model.layers},
                "measured": {
                    f"batch_{size}": measured_speed(model, task, split, size, limit) for size, limit in limits.items()
                },
            },
        }

    return distributed.on_main(results)


def _by_example(run: Callable[[Batch], Iterable[Any]], task: Task, split: str, batch_size: int) -> list[Any] | None:
    """Run every batch of a split, a part of them on each rank; `run` gives a value for each example. Collective.

    Rank 0 gets the values in the order of the split, the other ranks None. They must pickle.
    """
    shard: dict[int, Any] = {}
    for batch in evaluation_batches(task, split, batch_size):
        shard |= zip(batch.ids.tolist(), run(batch), strict=True)
    distributed.give_back_freed_memory()
    merged = {id: value for part in distributed.gather(shard) for id, value in part.items()}
    return [merged[id] for id in range(len(merged))] if distributed.is_main() else None
