"""What every threshold of early exit would cost and save, and the choice of one: by all heads' logits, without a model.

A sample leaves at the first head where it is sure enough, so that its layer changes with a single threshold only at the
running minima of its uncertainty over the heads: all thresholds that matter are found exactly. Decisions are those of
`exit_policy.exit_heads`. Knows no ranks and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_trainer.config.exit_specs import DEFAULT_PATIENCE, Criterion, ExitPolicy, ExitsSpec
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import spread
from ds_trainer.techniques.exits.policy import confidence, entropy, exit_heads

_ROUNDING = 1e-6  # metrics are computed in fp32: a drop of just max_drop is allowed
_CANDIDATES, _PASSES = 20, 3  # of a head's threshold, and over the heads, where each is given its own


@dataclass(frozen=True)
class Point:
    """A threshold, the layers that a sample goes through on average, and the metrics, the main one first."""

    threshold: float
    mean_layers: float
    scores: dict[str, float]


@dataclass(frozen=True)
class AllHeads:
    """What every head says of the same examples: `logits` (heads, n, classes) fp32, those of the model's own last.

    `layers` are the heads', the last one all that the model has. `score` gives the metrics, the main one first, of a
    choice of logits (n, classes). `patience` is a regression's, whose thresholds are tolerances.
    """

    logits: Tensor
    layers: Sequence[int]
    score: Callable[[Tensor], dict[str, float]]
    patience: int = DEFAULT_PATIENCE

    @property
    def regression(self) -> bool:
        return self.logits.shape[-1] == 1

    def point(self, threshold: float, heads: Tensor) -> Point:
        """What comes of leaving at these heads, (n,) by index."""
        count = heads.numel()
        layers = torch.tensor(self.layers, device=heads.device)[heads]
        chosen = self.logits[heads, torch.arange(count, device=heads.device)]
        return Point(threshold, int(layers.sum()) / count, self.score(chosen))

    def policy(self, criterion: Criterion, thresholds: Sequence[float]) -> ExitPolicy:
        """Of thresholds, one a head; for the patience of a classification they are that, all the same."""
        if criterion != "patience":
            return ExitPolicy(criterion=criterion, thresholds=list(thresholds))
        if self.regression:
            return ExitPolicy(criterion=criterion, thresholds=list(thresholds), patience=self.patience)
        return ExitPolicy(criterion=criterion, patience=int(thresholds[0]))

    def same_for_all(self, threshold: float) -> list[float]:
        """The threshold for every head but the own."""
        return [threshold] * (len(self.layers) - 1)


def curve(criterion: Criterion, heads: AllHeads, most: int = 100) -> list[Point]:
    """A point for every threshold, the same for all heads, that changes a decision; from nobody leaving to all.

    Where they are more than `most`, about so many, evenly spaced in mean layers, with both ends. A classification's
    thresholds of patience are 1 to heads - 1. Python and JSON numbers hold them exactly.
    """
    if criterion == "patience" and not heads.regression:
        return [_under(criterion, heads, float(patience)) for patience in range(len(heads.layers) - 1, 0, -1)]
    unsure = _uncertainty(criterion, heads.logits)
    if criterion == "patience":
        unsure = _worst_of(unsure, heads.patience)
    least = unsure.cummin(0).values
    cuts, total_layers = _cuts(least, heads.layers)
    kept = _evenly(total_layers, most)
    # who is still unsure after k heads leaves at the next
    return [heads.point(abs(cut), (least >= cut).sum(0)) for cut in cuts[kept].tolist()]


def choose(
    points: Sequence[Point], depth: int, target_speedup: float | None = None, max_drop: float | None = None
) -> Point:
    """The best main metric at `depth` / mean layers of at least `target_speedup`; or the fewest mean layers where that
    metric is at most `max_drop` points (hundredths) below the one with most layers.

    Of equals the one of higher score, then of fewer layers. A score that is NaN is never chosen. Raises ValueError
    where nothing is left to choose.
    """
    assert (target_speedup is None) != (max_drop is None), "one of the two"
    sound = [point for point in points if not math.isnan(_main(point))]
    full = max(points, key=_most_layers)
    if not sound or (max_drop is not None and math.isnan(_main(full))):
        raise UserError("exits: the score of the full model, or of all thresholds, is NaN: there is nothing to choose")
    if max_drop is not None:
        least = _main(full) - max_drop / 100 - _ROUNDING
        return min((p for p in sound if _main(p) >= least), key=lambda p: (p.mean_layers, -_main(p)))
    assert target_speedup is not None
    fast = [point for point in sound if depth / point.mean_layers >= target_speedup]
    if not fast:
        fastest = max(depth / point.mean_layers for point in sound)
        raise UserError(
            f"exits: no threshold reaches target_speedup {target_speedup:g}: the fastest is {_down(fastest)}; set it "
            f"to that or less, or add heads after earlier layers"
        )
    return max(fast, key=lambda point: (_main(point), -point.mean_layers))


def choose_per_head(criterion: Criterion, heads: AllHeads, points: Sequence[Point], spec: ExitsSpec) -> ExitPolicy:
    """From the best single threshold of the curve on, move one head's at a time as long as what is aimed at gains.

    Coordinate descent: at least as good on these examples, under the same constraint. `points` are the curve's; what is
    aimed at is the specification's `target_speedup` or `max_drop`.
    """
    depth = heads.layers[-1]
    best = choose(points, depth, spec.target_speedup, spec.max_drop)
    thresholds = heads.same_for_all(best.threshold)
    full = max(points, key=_most_layers)
    candidates = _candidates(criterion, heads.logits)
    for _ in range(_PASSES):
        before = best
        for head, values in enumerate(candidates):
            moved = {value: [*thresholds[:head], value, *thresholds[head + 1 :]] for value in values}
            tried = [_under(criterion, heads, value, chosen) for value, chosen in moved.items()]
            better = choose([best, *tried, full], depth, spec.target_speedup, spec.max_drop)
            if better is not best and better is not full:
                best, thresholds = better, moved[better.threshold]
        if best is before:
            break
    return heads.policy(criterion, thresholds)


def _main(point: Point) -> float:
    return next(iter(point.scores.values()))


def _most_layers(point: Point) -> float:
    return point.mean_layers


def _down(value: float) -> float:
    """To hundredths, never above the value: what is told as possible is."""
    return math.floor(value * 100) / 100


def _under(criterion: Criterion, heads: AllHeads, threshold: float, thresholds: Sequence[float] | None = None) -> Point:
    """The point of this threshold for all heads, or of one a head, under which name it goes."""
    policy = heads.policy(criterion, thresholds or heads.same_for_all(threshold))
    return heads.point(threshold, exit_heads(policy, heads.logits, heads.regression))


def _uncertainty(criterion: Criterion, logits: Tensor) -> Tensor:
    """(heads - 1, n): what must be below the threshold, or for confidence its negative, to leave; inf for NaN."""
    inner = logits[:-1].float()
    if criterion == "entropy":
        found = entropy(inner)
    elif criterion == "confidence":
        found = -confidence(inner)
    else:  # of a regression: the difference from the head before
        answers = inner.squeeze(-1)
        found = torch.cat([torch.full_like(answers[:1], math.inf), (answers[1:] - answers[:-1]).abs()])
    return torch.where(found.isnan(), math.inf, found)  # no threshold is above it


def _worst_of(differences: Tensor, patience: int) -> Tensor:
    """The largest of each head's last `patience` differences; inf where they are fewer."""
    if patience > len(differences):
        return torch.full_like(differences, math.inf)
    windows = differences.unfold(0, patience, 1).amax(-1)
    return torch.cat([torch.full_like(differences[: patience - 1], math.inf), windows])


def _cuts(least: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rising thresholds, one between any two that differ in a decision, and the layers that all samples use at each.

    A sample goes on from a head, and through the layers up to the next, where its minimum so far is not below.
    """
    steps = torch.tensor(layers, device=least.device).diff()[:, None].expand_as(least)
    matters = least.isfinite()
    values, places = least[matters].unique(return_inverse=True)
    saved = torch.zeros(len(values), dtype=torch.int64, device=least.device).index_add_(0, places, steps[matters])
    total = layers[-1] * least.shape[1] - torch.cat([saved.new_zeros(1), saved.cumsum(0)])
    return _between(values), total


def _between(values: Tensor) -> Tensor:
    """From (k,) rising values (k + 1,) thresholds: at most the first, between any two, above the last."""
    if not len(values):
        return values.new_zeros(1)
    negative = bool(values[0] < 0)  # confidences, which are above 0 and at most 1
    start = values[:1].clamp(max=-1.0 if negative else 0.0)
    middle = values[:-1] + (values[1:] - values[:-1]) / 2  # in their own precision, in which they are compared
    middle = torch.where(middle > values[:-1], middle, values[1:])  # a value is not below itself
    above = values[-1:].nextafter(values.new_tensor(math.inf))
    end = torch.zeros_like(above) if negative else (values[-1:] * 1.01).maximum(above)
    return torch.cat([start, middle, end])


def _evenly(falling: Tensor, most: int) -> Tensor:
    """Places of about `most` of these numbers, evenly spaced by value, with both ends."""
    if len(falling) <= most:
        return torch.arange(len(falling))
    rising = -falling.double()
    wanted = torch.linspace(float(rising[0]), float(rising[-1]), most, dtype=torch.float64, device=rising.device)
    right = torch.searchsorted(rising, wanted).clamp(1, len(rising) - 1)
    nearer_left = wanted - rising[right - 1] < rising[right] - wanted
    return (right - nearer_left.long()).unique()


def _candidates(criterion: Criterion, logits: Tensor) -> list[list[float]]:
    """Thresholds to try for each head alone: evenly spaced over those that change a decision there."""
    found = []
    for values in _uncertainty(criterion, logits):
        cuts = _between(values[values.isfinite()].unique())
        places = [*spread(len(cuts), _CANDIDATES), len(cuts) - 1]
        found.append([abs(cuts[place].item()) for place in dict.fromkeys(places)])
    return found
