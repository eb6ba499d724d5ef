"""The score and the cost of every exit threshold, and the choice of one, from the doubts and answers of all heads.

A sample leaves at the first head whose doubt u_j is below the threshold t. If all heads share t, it is still in the
batch after head j exactly where min(u_1, ..., u_j) >= t. So its exit changes only where t passes one of these running
minima: sorted, those of all samples give every threshold that makes a difference. No model, file or other rank is
needed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_trainer.config.exit_specs import DEFAULT_PATIENCE, Criterion, ExitPolicy, ExitsSpec, SequenceUncertainty
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.evaluation import Answers
from ds_trainer.techniques.exits.policy import exit_at

_ROUNDING = 1e-6  # scores are computed in fp32, and a drop of exactly max_drop is allowed
_CANDIDATES, _PASSES = 20, 3  # thresholds tried for each head, and rounds over the heads, with one threshold per head


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
    tolerances; for classes it is the threshold. `over_tokens` is how the doubts are taken over tokens.
    """

    doubts: Mapping[Criterion, Tensor]
    answers: Sequence[Answers]
    layers: Sequence[int]
    score: Callable[[Answers], dict[str, float]]
    regression: bool = False
    patience: int = DEFAULT_PATIENCE
    over_tokens: SequenceUncertainty = "least_certain"

    def policy(self, criterion: Criterion, threshold: float) -> ExitPolicy:
        """Return the policy with this threshold at every head. That of a classification by patience is the patience."""
        policy = ExitPolicy(criterion=criterion, sequence_uncertainty=self.over_tokens)
        if criterion == "patience" and not self.regression:
            return policy.model_copy(update={"patience": int(threshold)})
        patience = self.patience if criterion == "patience" else None
        return policy.model_copy(update={"thresholds": [threshold] * (len(self.layers) - 1), "patience": patience})

    def point(self, threshold: float, exits: Tensor) -> OperatingPoint:
        """Return the point of examples that leave at these heads: (examples,), indices of heads."""
        heads = exits.tolist()
        chosen = {id: self.answers[head][id] for id, head in enumerate(heads)}
        return OperatingPoint(threshold, sum(self.layers[head] for head in heads) / len(heads), self.score(chosen))

    def point_of(self, policy: ExitPolicy, threshold: float) -> OperatingPoint:
        """Return the point of a policy; `threshold` is recorded in it."""
        return self.point(threshold, exit_at(policy, self.doubts[policy.criterion]))


def curve(criterion: Criterion, heads: AllHeads, most: int = 100) -> list[OperatingPoint]:
    """Return a point for each common threshold that changes an exit, from nobody leaving to the earliest exits.

    Where there are more than `most`, about so many are returned, evenly spaced by mean layers, with both ends. For the
    patience of a classification the thresholds are 1 to the number of exit heads. A threshold survives JSON exactly.
    """
    if criterion == "patience" and not heads.regression:
        patiences = map(float, range(len(heads.layers) - 1, 0, -1))
        return [heads.point_of(heads.policy(criterion, patience), patience) for patience in patiences]
    doubts = heads.doubts[criterion]
    if criterion == "patience":
        # a sample leaves where its last `patience` differences are below t, that is where the largest of them is
        before = doubts.new_full((heads.patience - 1, doubts.shape[1]), math.inf)  # the first heads have too few
        doubts = torch.cat([before, doubts]).unfold(0, heads.patience, 1).amax(-1)
    least = doubts.cummin(0).values
    thresholds, layers_used = _thresholds_and_layers(least, heads.layers)
    kept = _evenly(layers_used, most)
    # a sample leaves at head i if it is still in the batch after exactly i heads
    return [heads.point(abs(value), (least >= value).sum(0)) for value in thresholds[kept].tolist()]


def choose(points: Sequence[OperatingPoint], depth: int, spec: ExitsSpec) -> OperatingPoint:
    """Return the best point under the `target_speedup` or the `max_drop` of the specification.

    `target_speedup`: the point of the best score, and of equal ones of the fewest layers, among those whose speed-up
    `depth` / mean_layers reaches it. `max_drop`: the point of the fewest layers, and of equal ones of the best score,
    among those that score at most so many hundredths less than the point of most layers, which is the full model.
    Scores are main scores. A point whose score is NaN is never chosen; UserError where no point can be.
    """
    valid = [point for point in points if not math.isnan(point.main_score)]
    full = max(points, key=lambda point: point.mean_layers)
    if not valid or (spec.max_drop is not None and math.isnan(full.main_score)):
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


def choose_per_head(
    criterion: Criterion, heads: AllHeads, points: Sequence[OperatingPoint], spec: ExitsSpec
) -> ExitPolicy:
    """Return a policy with one threshold per head, by coordinate descent from the best common threshold.

    The descent moves one threshold at a time, and only to a better point under the same constraint: on these examples
    the policy is at least as good as the common threshold. `points` are those of the curve.
    """
    depth = heads.layers[-1]
    best = choose(points, depth, spec)
    policy = heads.policy(criterion, best.threshold)
    full = max(points, key=lambda point: point.mean_layers)  # `choose` measures a drop from its score
    candidates = _candidates(heads.doubts[criterion])
    for head, values in list(enumerate(candidates)) * _PASSES:
        before, after = policy.thresholds[:head], policy.thresholds[head + 1 :]
        moved = {value: policy.model_copy(update={"thresholds": [*before, value, *after]}) for value in values}
        tried = [heads.point_of(each, value) for value, each in moved.items()]
        better = choose([best, *tried, full], depth, spec)
        if better is not best and better is not full:
            best, policy = better, moved[better.threshold]
    return policy


def _thresholds_and_layers(least: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return one threshold for each set of exits that some threshold gives, ascending, and the layers used at each.

    `least` (heads - 1, samples) is the running minimum of the doubt. A sample goes on from a head, through the
    layers up to the next head, unless that minimum is below the threshold: a threshold above it saves these layers.
    """
    steps = torch.tensor(layers, device=least.device).diff()[:, None].expand_as(least)
    finite = least.isfinite()
    values, index = least[finite].unique(return_inverse=True)
    saved = torch.zeros(len(values), dtype=torch.int64, device=least.device).index_add_(0, index, steps[finite])
    used = layers[-1] * least.shape[1] - torch.cat([saved.new_zeros(1), saved.cumsum(0)])
    return _between(values), used


def _between(values: Tensor) -> Tensor:
    """Return k + 1 thresholds for k ascending values: at most the first, one between any two, one above the last."""
    if not len(values):
        return values.new_zeros(1)
    negative = bool(values[0] < 0)  # these are negative confidences: at least -1 and below 0
    start = values[:1].clamp(max=-1.0 if negative else 0.0)
    middle = values[:-1] + (values[1:] - values[:-1]) / 2  # in the precision in which they are compared
    # where no number lies between two neighbouring floats the upper one serves, since a value is not below itself
    middle = torch.where(middle > values[:-1], middle, values[1:])
    above = values[-1:].nextafter(values.new_tensor(math.inf))
    end = torch.zeros_like(above) if negative else (values[-1:] * 1.01).maximum(above)
    return torch.cat([start, middle, end])


def _evenly(falling: Tensor, most: int) -> Tensor:
    """Return the indices of about `most` of these numbers, evenly spaced by value, with both ends."""
    if len(falling) <= most:
        return torch.arange(len(falling))
    rising = -falling.double()
    ideal = torch.linspace(float(rising[0]), float(rising[-1]), most, dtype=torch.float64, device=rising.device)
    right = torch.searchsorted(rising, ideal).clamp(1, len(rising) - 1)
    left_is_nearer = ideal - rising[right - 1] < rising[right] - ideal
    return (right - left_is_nearer.long()).unique()


def _candidates(doubts: Tensor) -> list[list[float]]:
    """Return the thresholds to try for each head: evenly spread over those that change an exit there."""
    candidates = []
    for values in doubts:
        thresholds = _between(values[values.isfinite()].unique())
        indices = [*spread(len(thresholds), _CANDIDATES), len(thresholds) - 1]
        candidates.append([abs(thresholds[index].item()) for index in dict.fromkeys(indices)])
    return candidates
