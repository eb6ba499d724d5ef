"""Evaluate and calibrate early exits: each head alone, every threshold, and the chosen policy.

One pass through all layers gives the doubts and the answers of all heads, from which any policy is scored as the model
that leaves early decides (`RunningPolicy`). A sample leaves at the first head whose doubt u_j is below the threshold t:
it is still in the batch after head j exactly where min(u_1, ..., u_j) >= t. So its exit changes only where t passes one
of these running minima: sorted, those of all samples give every threshold that makes a difference.

Thresholds are chosen on the held-out part of the training set, never on a split that is evaluated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.exit_specs import DEFAULT_PATIENCE, Criterion, ExitPolicy, ExitsSpec, aim_mistakes
from ds_trainer.tasks.evaluation import Answers, evaluation_batches, load_on_device, split_prefix
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import (
    EarlyExitModel,
    doubts_of_all,
    exit_at,
    read_exits,
    with_exits,
    write_exits,
)

_FINE = 400  # points of the curve that a threshold is chosen from
_ROUNDING = 1e-6  # scores are computed in fp32, and a drop of exactly max_drop is allowed


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold, the mean number of layers that a sample goes through, and the scores, the main one first."""

    threshold: float
    mean_layers: float
    scores: dict[str, float]

    @property
    def main_score(self) -> float:
        return next(iter(self.scores.values()))


@dataclass(frozen=True)
class AllHeads:
    """What every head says about the same examples, numbered from 0: its doubts and its answers.

    `doubts` are (heads - 1, examples) fp64 by criterion, without the model's own head; `answers` are by head, the
    model's own last, and then by example. `layers` has the layer of each head; the last is the depth of the model.
    `score` turns an answer for each example into scores. `patience` is that of a regression, whose thresholds are
    tolerances; for classes it is the threshold.
    """

    doubts: Mapping[Criterion, Tensor]
    answers: Sequence[Answers]
    layers: Sequence[int]
    score: Callable[[Answers], dict[str, float]]
    regression: bool = False
    patience: int = DEFAULT_PATIENCE

    def policy(self, criterion: Criterion, threshold: float) -> ExitPolicy:
        """Return the policy with this threshold at every head. That of a classification by patience is the patience."""
        if criterion == "patience" and not self.regression:
            return ExitPolicy(criterion=criterion, patience=int(threshold))
        patience = self.patience if criterion == "patience" else None
        return ExitPolicy(criterion=criterion, thresholds=[threshold] * (len(self.layers) - 1), patience=patience)

    def under(self, policy: ExitPolicy) -> tuple[list[int], dict[str, float]]:
        """Return the layer at which each example leaves by a policy, and the scores of the answers given there."""
        left = exit_at(policy, self.doubts[policy.criterion]).tolist()
        scores = self.score({id: self.answers[head][id] for id, head in enumerate(left)})
        return [self.layers[head] for head in left], scores

    def point(self, criterion: Criterion, threshold: float) -> OperatingPoint:
        exits, scores = self.under(self.policy(criterion, threshold))
        return OperatingPoint(threshold, sum(exits) / len(exits), scores)


def curve(criterion: Criterion, heads: AllHeads, most: int = 100) -> list[OperatingPoint]:
    """Return a point for each threshold that changes an exit, from nobody leaving to the earliest exits.

    At most about `most` points are returned, evenly spaced by mean layers, with both ends. For the patience of a
    classification the thresholds are 1 to the number of exit heads. A threshold survives JSON exactly.
    """
    doubts = heads.doubts[criterion]
    if criterion == "patience" and not heads.regression:
        return [heads.point(criterion, float(patience)) for patience in range(len(doubts), 0, -1)]
    if criterion == "patience":
        # a sample leaves where its last `patience` differences are below t, that is where the largest of them is
        before = doubts.new_full((heads.patience - 1, doubts.shape[1]), math.inf)  # the first heads have too few
        doubts = torch.cat([before, doubts]).unfold(0, heads.patience, 1).amax(-1)
    least = doubts.cummin(0).values
    finite = least.isfinite()
    values, index = least[finite].unique(return_inverse=True)
    thresholds = _between(values)
    if len(thresholds) > most:
        # a threshold above the minimum at a head saves the sample the layers up to the next head
        steps = torch.tensor(heads.layers).diff().double()[:, None].expand_as(least)
        saved = torch.cat([steps.new_zeros(1), torch.bincount(index, steps[finite]).cumsum(0)])
        even = torch.linspace(0, float(saved[-1]), most, dtype=saved.dtype)
        thresholds = thresholds[torch.searchsorted(saved, even).unique()]
    return [heads.point(criterion, abs(threshold)) for threshold in thresholds.tolist()]


def choose(points: Sequence[OperatingPoint], depth: int, spec: ExitsSpec) -> OperatingPoint:
    """Return the best point under the `target_speedup` or the `max_drop` of the specification.

    `target_speedup`: the point of the best score, and of equal ones of the fewest layers, among those whose speed-up
    `depth` / mean_layers reaches it. `max_drop`: the point of the fewest layers, and of equal ones of the best score,
    among those whose score is at most `max_drop` hundredths below that of the point of most layers, the full model.
    Scores are main scores. A point whose score is NaN is never chosen; UserError where no point can be.
    """
    valid = [point for point in points if not math.isnan(point.main_score)]
    full = max(points, key=lambda point: point.mean_layers)
    if not valid or (spec.max_drop is not None and full not in valid):
        raise UserError("exits: the score of the full model, or of all thresholds, is NaN: there is nothing to choose")
    if spec.max_drop is not None:
        least = full.main_score - spec.max_drop / 100 - _ROUNDING
        allowed = [point for point in valid if point.main_score >= least]
        return min(allowed, key=lambda point: (point.mean_layers, -point.main_score))
    assert spec.target_speedup is not None, "one of the two is set"
    fast = [point for point in valid if depth / point.mean_layers >= spec.target_speedup]
    if not fast:
        fastest = math.floor(100 * max(depth / point.mean_layers for point in valid)) / 100
        raise UserError(
            f"exits: no threshold reaches target_speedup {spec.target_speedup:g}: set it to {fastest} or less, or add "
            "heads after earlier layers"
        )
    return max(fast, key=lambda point: (point.main_score, -point.mean_layers))


def evaluate_exits(
    folder: Path, task: Task, batch_size: int, policy: ExitPolicy | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Evaluate the heads, the curves and the policy of a folder on every split; collective, the same on every rank.

    Returns the scores to add to the model's, such as `exit_1/accuracy`, `early_exit/accuracy` and
    `early_exit/leave_at_1`, a count, and the whole results as JSON values. Their "calibration" is the folder's record
    of it, or None where the policy is not the folder's.
    """
    model = with_exits(load_on_device(task, folder), folder, policy)
    *inner, depth = model.layers
    splits, flat = {}, dict[str, float]()
    for split in task.splits:
        heads = all_heads(model, task, split, batch_size, model.policy.patience)
        results = splits[split] = distributed.on_main(partial(_results, heads, model.policy))
        early, prefix = results["early_exit"], split_prefix(task, split)
        for layer in inner:  # the last head is the model's own, whose scores are the model's
            flat |= {f"{prefix}exit_{layer}/{name}": value for name, value in results["heads"][str(layer)].items()}
        named = early["scores"] | {name: early[name] for name in ("mean_layers", "expected_saving")}
        named |= {f"leave_at_{layer}": count for layer, count in early["exit_counts"].items()}
        flat |= {f"{prefix}early_exit/{name}": value for name, value in named.items()}
    saved = read_exits(folder)
    return flat, {
        "layers": model.layers,
        "num_layers": depth,
        "policy": model.policy.model_dump(mode="json"),
        "splits": splits,
        "calibration": saved.calibration if saved.policy == model.policy else None,
    }


def _results(heads: AllHeads | None, policy: ExitPolicy) -> dict[str, Any]:
    assert heads is not None, "rank 0 has them"
    exits, scores = heads.under(policy)
    mean, depth = sum(exits) / len(exits), heads.layers[-1]
    return {
        "heads": {str(layer): heads.score(one) for layer, one in zip(heads.layers, heads.answers, strict=True)},
        "curves": {name: [asdict(point) for point in curve(name, heads)] for name in heads.doubts},
        "early_exit": {
            "scores": scores,
            "mean_layers": mean,
            "expected_saving": mean / depth,
            "expected_speedup": depth / mean,
            "exit_counts": {str(layer): exits.count(layer) for layer in heads.layers},
        },
    }


def calibrate_folder(folder: Path, task: Task, batch_size: int, spec: ExitsSpec) -> dict[str, Any]:
    """Choose the thresholds of a folder on held-out examples, write them into it, return the record; collective.

    The specification gives `target_speedup` or `max_drop`, the criterion (by default the folder's) and, for a
    regression, the patience. UserError where no threshold reaches the target, the criterion does not suit the task, or
    the held-out examples are others than in training.
    """
    saved, model = read_exits(folder), with_exits(load_on_device(task, folder), folder)
    if saved.held_out_key != distributed.on_main(task.held_out_key):
        raise UserError(
            f"the examples held out now are not those that were held out in training {folder}: give the same data file "
            "and columns, and the same task.held_out"
        )
    criterion = spec.chosen_criterion or saved.policy.criterion
    if model.regression and spec.patience is None:
        spec = spec.model_copy(update={"patience": saved.policy.patience})
    *layers, depth = model.layers
    mistakes = aim_mistakes(spec, criterion, layers, depth, model.regression)
    raise_mistakes(f"exits: {mistake}" for mistake in mistakes)
    heads = all_heads(model, task, task.held_out_split, batch_size, spec.patience)

    def calibrate() -> dict[str, Any]:
        assert heads is not None, "rank 0 has them"
        best = choose(curve(criterion, heads, _FINE), depth, spec)
        calibration = {
            "split": task.held_out_split,
            "examples": len(heads.answers[-1]),
            "criterion": criterion,
            "target_speedup": spec.target_speedup,
            "max_drop": spec.max_drop,
            **asdict(best),
            "full_scores": heads.score(heads.answers[-1]),
            "expected_speedup": depth / best.mean_layers,
        }
        policy = heads.policy(criterion, best.threshold)
        write_exits(folder, saved.model_copy(update={"policy": policy, "calibration": calibration}))
        return calibration

    return distributed.on_main(calibrate)


def all_heads(model: EarlyExitModel, task: Task, split: str, batch_size: int, patience: int | None) -> AllHeads | None:
    """Return what every head says about every example of a split; one pass, collective; only rank 0 gets it.

    A regression is judged by this `patience`.
    """
    criteria: tuple[Criterion, ...] = ("patience",) if model.regression else get_args(Criterion)
    by_example: dict[int, Any] = {}  # doubts (criteria, heads - 1), and the answers of all heads
    for batch in evaluation_batches(task, split, batch_size):
        logits = model.all_logits(**batch.inputs)
        counted = model.counted(batch.inputs["input_ids"], batch.inputs.get("attention_mask"))
        doubts = torch.stack([doubts_of_all(name, logits, counted) for name in criteria]).permute(2, 0, 1).tolist()
        answers = [task.answers(SimpleNamespace(logits=one), batch) for one in logits]
        for id, values in zip(batch.ids.tolist(), doubts, strict=True):
            by_example[id] = values, [of_head[id] for of_head in answers]
    merged = {id: values for part in distributed.gather(by_example) for id, values in part.items()}
    if not distributed.is_main():
        return None
    of_examples = [merged[id] for id in range(len(merged))]
    by_criterion = torch.tensor([one for one, _ in of_examples], dtype=torch.float64).permute(1, 2, 0)
    return AllHeads(
        doubts=dict(zip(criteria, by_criterion, strict=True)),
        answers=[dict(enumerate(of_head)) for of_head in zip(*(given for _, given in of_examples), strict=True)],
        layers=model.layers,
        score=partial(task.score, split),
        regression=model.regression,
        patience=patience or DEFAULT_PATIENCE,
    )


def _between(values: Tensor) -> Tensor:
    """Return k + 1 thresholds for k ascending values: at most the first, one between any two, one above the last."""
    negative = bool((values < 0).any())  # these are negative confidences: at least -1 and below 0
    start = values.new_full((1,), -1.0 if negative else 0.0)
    end = values[-1:] * (0.0 if negative else 1.01) + (0.0 if negative else 1e-9)  # none where there is no value
    middle = values[:-1] + values.diff() / 2
    # nothing lies between two neighbouring floats: a sample leaves below a threshold, so that the upper one parts them
    return torch.cat([start, torch.where(middle > values[:-1], middle, values[1:]), end])
