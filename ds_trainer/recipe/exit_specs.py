"""The specification of early exits in a recipe, and the file `exits.json` of a model folder with exit heads."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.fields import Positive, Rate, Share, Strict, only

EXITS_FILE = "exits.json"
DEFAULT_PATIENCE = 2
Criterion = Literal["entropy", "confidence", "patience"]
Pooling = Literal["first", "mean"]


def _are_layers(value: Any) -> bool:
    whole = isinstance(value, list) and bool(value) and all(type(number) is int and number > 0 for number in value)
    return whole and sorted(set(value)) == value


def _threshold(most: float, allowed: str) -> BeforeValidator:
    def fits(value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(type(number) in (int, float) and 0 <= number <= most for number in values)

    return only(fits, f"write {allowed}, or a list of one per head")


LayerNumbers = Annotated[list[int], only(_are_layers, "write numbers from 1 on, each once, from first to last")]
"""Ascending numbers of layers; 1 is the first layer."""
Threshold = Annotated[float | list[float], _threshold(sys.float_info.max, "a number of 0 or more")]
"""One threshold for every head, or a list with one per head."""
ConfidenceThreshold = Annotated[float | list[float], _threshold(1, "a number from 0 to 1")]

_CRITERIA: dict[str, Criterion] = {
    "early_exit_entropy": "entropy",
    "early_exit_confidence": "confidence",
    "patience": "patience",
    "regression_threshold": "patience",
}
"""The criterion that each threshold field belongs to."""
_REMOVED_UNCERTAINTY = "least_certain", "a sequence leaves once its least certain token would: drop it, calibrate again"


class ExitsSpec(Strict):
    """A classifier after every layer: DeeBERT (arXiv 2004.12993) and PABEE (arXiv 2006.04152)."""

    greater_is_better: ClassVar[Mapping[str, bool]] = {"mean_layers": False, "expected_saving": False}
    """Of what an evaluation adds to the scores, as `early_exit/mean_layers`."""
    removed: ClassVar = {
        "terms": (["heads"], "the heads learn from the labels alone, and not from the model's own head: drop it"),
        "temperature": (2.0, "it was that of the term exits.distill, which is gone: drop it"),
        "head_weights": (None, "the heads weigh 1 each, and in joint training the number of their layer: drop it"),
        "per_head": (False, "calibrate one threshold for all heads, or write a list of thresholds, one per head"),
        "sequence_uncertainty": _REMOVED_UNCERTAINTY,
    }

    layers: LayerNumbers | None = Field(None, description="layers that get a head, counted from 1; by default all")
    training: Literal["heads", "joint"] = Field("heads", description="the heads alone, as in DeeBERT's stage 2, or all")
    pooling: Pooling | None = Field(None, description="by default that of the model's own head")
    criterion: Criterion | None = Field(None, description="by default that of the threshold that is set, else entropy")
    early_exit_entropy: Threshold | None = Field(None, description="leave below this entropy in nats; by default 0.1")
    early_exit_confidence: ConfidenceThreshold | None = Field(None, description="leave above this probability; 0.9")
    patience: Positive | None = Field(None, description="heads in a row that must agree with the one before; 2")
    regression_threshold: Threshold | None = Field(None, description="scores that differ by less agree; by default 0.1")
    target_speedup: float | None = Field(None, ge=1, description="calibrate for all layers / mean of layers used")
    max_drop: Rate | None = Field(None, description="calibrate for at most this many points below the full model")

    def mistakes(self) -> Iterator[str]:
        if self.target_speedup is not None and self.max_drop is not None:
            yield "target_speedup and max_drop are both set: the thresholds can be picked for one of them"
        aim, criterion = "max_drop" if self.target_speedup is None else "target_speedup", self.chosen_criterion
        for name in self._thresholds_set():
            if self.calibrated and name != "patience":  # calibrating a regression picks its tolerance, not its patience
                yield f"{name} is set, and {aim} picks it: drop one of them"
            elif _CRITERIA[name] != criterion:
                yield f'{name} goes with criterion "{_CRITERIA[name]}", not with "{criterion}": drop one'

    @property
    def calibrated(self) -> bool:
        return self.target_speedup is not None or self.max_drop is not None

    @property
    def chosen_criterion(self) -> Criterion | None:
        """The criterion that is named, or else that of the first threshold that is set."""
        return self.criterion or next((_CRITERIA[name] for name in self._thresholds_set()), None)

    def _thresholds_set(self) -> list[str]:
        return [name for name in _CRITERIA if getattr(self, name) is not None]


class ExitPolicy(Strict):
    """The rule by which a sample leaves.

    `thresholds` has one entry per head. By patience only a regression has thresholds: the tolerances within which two
    scores agree.
    """

    removed: ClassVar = {"sequence_uncertainty": _REMOVED_UNCERTAINTY}
    criterion: Criterion
    thresholds: list[Rate] = Field(default_factory=list)
    patience: Positive | None = None

    @property
    def of_regression(self) -> bool:
        """Whether it is patience with tolerances, which only a regression has."""
        return self.criterion == "patience" and bool(self.thresholds)

    def mistakes_for(self, heads: int, regression: bool) -> Iterator[str]:
        """Say where the policy does not fit a model with this number of heads beside its own."""
        by_patience = self.criterion == "patience"
        given, needed = len(self.thresholds), 0 if by_patience and not regression else heads
        if regression and not by_patience:
            yield _no_probabilities(self.criterion)
        elif given != needed:
            yield f"{given} thresholds for {heads} heads by {self.criterion}: give {needed}"
        if by_patience and self.patience is None:
            yield "criterion is patience and patience is not set"


class SavedExits(Strict):
    """The content of `exits.json`: the layers with an exit head beside the model's own, and the exit policy.

    Heads without `pooling` classify every token. Whether a sequence leaves does not depend on its `special_tokens`.
    """

    version: Literal[1] = 1
    layers: LayerNumbers
    pooling: Pooling | None
    policy: ExitPolicy
    special_tokens: list[int] = Field(default_factory=list, description="ids of tokens that are no part of a text")
    held_out: Share = Field(0.0, description="share of the training set that was kept out of training")
    held_out_key: str = Field("", description="hash that identifies the examples that were kept out of training")
    calibration: dict[str, Any] | None = None

    def mistakes(self) -> Iterator[str]:
        return self.policy.mistakes_for(len(self.layers), self.policy.of_regression)


def policy_of(spec: ExitsSpec, heads: int, regression: bool) -> ExitPolicy:
    """Return the policy of a specification; UserError where it does not fit the task or the number of heads."""
    criterion = spec.chosen_criterion or ("patience" if regression else "entropy")
    if spec.regression_threshold is not None and not regression:
        raise UserError("exits: regression_threshold is set, and classes either agree or do not: drop it")
    if criterion == "patience":
        patience, value = spec.patience or DEFAULT_PATIENCE, spec.regression_threshold if regression else []
    else:
        patience, value = None, getattr(spec, f"early_exit_{criterion}")
    if value is None:
        value = 0.9 if criterion == "confidence" else 0.1
    thresholds = value if isinstance(value, list) else [value] * heads
    policy = ExitPolicy(criterion=criterion, thresholds=thresholds, patience=patience)
    raise_mistakes(f"exits: {mistake}" for mistake in policy.mistakes_for(heads, regression))
    return policy


def aim_mistakes(
    spec: ExitsSpec, criterion: Criterion, layers: Sequence[int], depth: int | None, regression: bool
) -> Iterator[str]:
    """Say why a calibration cannot succeed, known before any pass over the data; each starts with a field's name.

    `layers` are those with a head beside the model's own, which follows layer `depth`; None where that is unknown.
    """
    if regression and criterion != "patience":
        yield _no_probabilities(criterion)
        return
    if spec.calibrated and spec.patience is not None and not regression:
        yield f"patience {spec.patience}: it goes with a regression; for classes it is calibrated: drop it"
    if spec.target_speedup is None or depth is None:
        return
    # with patience n a sample can leave at head n + 1 at the earliest; of classes the patience is picked: from 1 on
    skipped = (spec.patience or DEFAULT_PATIENCE if regression else 1) if criterion == "patience" else 0
    earliest = [*layers, depth][min(skipped, len(layers))]
    if spec.target_speedup > depth / earliest:
        fastest = math.floor(100 * depth / earliest) / 100
        yield (
            f"target_speedup {spec.target_speedup:g}: the fastest is {fastest:g}, for nobody leaves before layer "
            f"{earliest} of {depth}; set it to that or less, or add earlier heads"
        )


def _no_probabilities(criterion: Criterion) -> str:
    return f'criterion is "{criterion}", and a regression has no probabilities: set "patience"'
