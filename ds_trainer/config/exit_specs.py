"""What a recipe may say of early exits, and what a model folder with exit heads says of itself (`exits.json`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ds_trainer.config.fields import Positive, Rate, Share, Strict
from ds_trainer.ranks.failures import UserError

EXITS_FILE = "exits.json"
MOST_PATIENCE = 1000
DEFAULT_PATIENCE = 2
MOST_CONFIDENCE = 1 + 1e-6
"""Of the thresholds that calibration writes, the one that nobody passes may be just above 1."""
Criterion = Literal["entropy", "confidence", "patience"]
Pooling = Literal["first", "mean"]
Patience = Annotated[int, Field(strict=True, ge=1, le=MOST_PATIENCE)]


def _from_first_to_last(layers: list[int]) -> list[int]:
    if sorted(set(layers)) != layers:
        raise UserError(f"layers are {layers}: write each once, from first to last")
    return layers


def _limits(most: float, wanted: str) -> BeforeValidator:
    """One message for what is neither a number nor a list of numbers."""

    def check(value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
        if values and numbers and all(0 <= one <= most for one in values):
            return value
        found = f", not {value}" if isinstance(value, list) else ""
        raise UserError(f"write {wanted}, or a list of one a head{found}")

    return BeforeValidator(check)


Layers = Annotated[list[Positive], Field(min_length=1), AfterValidator(_from_first_to_last)]
"""Numbers of layers, 1 is the first."""
Limit = Annotated[float | list[float], _limits(sys.float_info.max, "a number of 0 or more")]
"""One threshold for every head, or one a head."""
ConfidenceLimit = Annotated[float | list[float], _limits(MOST_CONFIDENCE, "a number from 0 to 1")]

ExitTerm = Literal["heads", "distill"]

_DEFAULTS = {"early_exit_entropy": 0.1, "early_exit_confidence": 0.9, "regression_threshold": 0.1}
_CRITERIA: dict[str, Criterion] = {
    "early_exit_entropy": "entropy",
    "early_exit_confidence": "confidence",
    "patience": "patience",
    "regression_threshold": "patience",
}
"""By the fields that go with them alone."""


def _heads_alone() -> list[ExitTerm]:
    return ["heads"]


class ExitsSpec(Strict):
    """A classifier after every layer: DeeBERT (arXiv 2004.12993) and PABEE (arXiv 2006.04152)."""

    layers: Layers | None = Field(
        None, description="layers with a head, 1 is the first; by default all, the last has the model's"
    )
    training: Literal["heads", "joint"] = Field(
        "heads", description='"heads": they alone, all else frozen (DeeBERT\'s second stage); "joint": with the model'
    )
    head_weights: list[Rate] | None = Field(
        None,
        min_length=1,
        description="in exits.heads, which is a sum over the heads (by default each 1), or with joint training a "
        "weighted mean that includes the model's own head (by default the number of the layer)",
    )
    terms: list[ExitTerm] = Field(
        default_factory=_heads_alone,
        min_length=1,
        description='those that the loss table weighs: "exits.heads" on labels, "exits.distill" on the own head\'s',
    )
    temperature: Annotated[float, Field(gt=0)] = Field(2.0, description="of exits.distill")
    pooling: Pooling | None = Field(None, description="by default as the model's own head")
    criterion: Criterion | None = Field(
        None, description="by default that of the threshold below that is set, or else entropy; patience for regression"
    )
    early_exit_entropy: Limit | None = Field(None, description="nats; a sample below it leaves; by default 0.1")
    early_exit_confidence: ConfidenceLimit | None = Field(
        None, description="a sample whose likeliest class is above it leaves; by default 0.9"
    )
    patience: Patience | None = Field(
        None, description="a sample leaves once so many heads in a row agree with the one before; by default 2"
    )
    regression_threshold: Limit | None = Field(
        None, description="patience: scores that are nearer than this agree; by default 0.1"
    )
    target_speedup: Annotated[float, Field(ge=1)] | None = Field(
        None, description="calibrate for layers / mean layers used; instead of the thresholds above"
    )
    max_drop: Rate | None = Field(None, description="calibrate for at most so many points below the full model")

    per_head: bool = Field(False, description="refine what is calibrated to a threshold for each head")

    @model_validator(mode="after")
    def _consistent(self) -> ExitsSpec:
        if len(set(self.terms)) != len(self.terms):
            raise UserError(f"terms names one twice: {', '.join(self.terms)}")
        if self.target_speedup is not None and self.max_drop is not None:
            raise UserError("target_speedup and max_drop are both set: the thresholds can be picked for one of them")
        if self.per_head and not self.calibrated:
            raise UserError("per_head refines what is calibrated: set target_speedup or max_drop, or write a list")
        mistakes = self._idle_thresholds()
        if mistakes:
            raise UserError("\n".join(mistakes))
        return self

    @property
    def calibrated(self) -> bool:
        return self.target_speedup is not None or self.max_drop is not None

    @property
    def asked_criterion(self) -> Criterion | None:
        """The criterion that is named, or that of the thresholds that are set."""
        return self.criterion or next((_CRITERIA[name] for name in self._thresholds_set()), None)

    def _thresholds_set(self) -> list[str]:
        return [name for name in _CRITERIA if getattr(self, name) is not None]

    def _idle_thresholds(self) -> list[str]:
        """Why thresholds that are set would do nothing."""
        found = self._thresholds_set()
        if self.calibrated:
            aim = "max_drop" if self.target_speedup is None else "target_speedup"
            # of a regression, patience is not what is calibrated
            mistakes = [f"{name} is set, and {aim} picks it: drop one of them" for name in found if name != "patience"]
            found = [name for name in found if name == "patience"]
        else:
            mistakes = []
        if self.criterion is None and len({_CRITERIA[name] for name in found}) > 1:
            return [f"{' and '.join(found)} are of different criteria: keep one, or set criterion and drop the others"]
        return mistakes + [
            f'{name} goes with criterion "{_CRITERIA[name]}", and criterion is "{self.criterion}": drop one of them'
            for name in found
            if self.criterion not in (None, _CRITERIA[name])
        ]


class ExitPolicy(Strict):
    """When a sample leaves. `thresholds` are one a head: of patience a regression's tolerances, else none."""

    criterion: Criterion
    thresholds: list[Rate] = Field(default_factory=list)
    patience: Patience | None = None

    @model_validator(mode="after")
    def _probabilities(self) -> ExitPolicy:
        if self.criterion == "confidence" and any(limit > MOST_CONFIDENCE for limit in self.thresholds):
            raise UserError(f"thresholds are {self.thresholds}: a confidence is a probability, from 0 to 1")
        return self


class SavedExits(Strict):
    """A folder's `exits.json`: which layers have a head beside the model's own, and when a sample leaves."""

    version: Literal[1] = 1
    layers: Layers
    pooling: Pooling
    policy: ExitPolicy
    held_out: Share = Field(0.0, description="share of the training set that was kept out of training")
    held_out_key: str = Field("", description="what tells the examples that were kept out from all others")
    calibration: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> SavedExits:
        # whether it is of a regression only its model tells
        regression = self.policy.criterion == "patience" and bool(self.policy.thresholds)
        mistake = policy_mistake(self.policy, len(self.layers), regression)
        if mistake:
            raise UserError(mistake)
        return self


def policy_mistake(policy: ExitPolicy, heads: int, regression: bool) -> str | None:
    """Why a policy is none for a model with so many heads beside its own."""
    if regression and policy.criterion != "patience":
        return _no_probabilities(policy.criterion)
    wanted = 0 if policy.criterion == "patience" and not regression else heads
    if len(policy.thresholds) != wanted:
        return f"{len(policy.thresholds)} thresholds for {heads} heads by {policy.criterion}: give {wanted}"
    if policy.criterion == "patience" and policy.patience is None:
        return "criterion is patience and patience is not set"
    return None


def policy_of(spec: ExitsSpec, heads: int, regression: bool) -> ExitPolicy:
    """The policy that a recipe asks for; ValueError where it does not go with the task or the number of heads."""
    criterion = spec.asked_criterion or ("patience" if regression else "entropy")
    if regression and criterion != "patience":
        raise UserError(f"exits: {_no_probabilities(criterion)}")
    if spec.regression_threshold is not None and not regression:
        raise UserError("exits: regression_threshold is set, and classes agree or do not: drop it")
    patience = (spec.patience or DEFAULT_PATIENCE) if criterion == "patience" else None
    if criterion == "patience" and not regression:
        return ExitPolicy(criterion=criterion, patience=patience)
    field = "regression_threshold" if regression else f"early_exit_{criterion}"
    said = getattr(spec, field)
    limit = _DEFAULTS[field] if said is None else said
    thresholds = limit if isinstance(limit, list) else [limit] * heads
    if len(thresholds) != heads:
        raise UserError(f"exits: {field} has {len(thresholds)} values, and there are {heads} heads: give one or all")
    return ExitPolicy(criterion=criterion, thresholds=thresholds, patience=patience)


def aim_mistakes(
    spec: ExitsSpec, criterion: Criterion, layers: Sequence[int], depth: int | None, regression: bool
) -> list[str]:
    """Why no thresholds can be picked as asked, each from the name of the field on; known before any pass.

    `layers` are those with a head beside the model's own, which is after the last, `depth`; None where that is unknown.
    """
    if regression and criterion != "patience":
        return [_no_probabilities(criterion)]
    picks_patience = criterion == "patience" and not regression
    mistakes = []
    if spec.calibrated and spec.patience is not None and not regression:
        mistakes.append(f"patience {spec.patience}: it goes with a regression; of classes it is itself picked: drop it")
    if spec.per_head and picks_patience:
        mistakes.append("per_head: patience is the same for all heads: set criterion to entropy or confidence")
    if spec.target_speedup is None or depth is None:
        return mistakes
    asked = (1 if picks_patience else spec.patience or DEFAULT_PATIENCE) if criterion == "patience" else 0
    earliest = [*layers, depth][min(asked, len(layers))]
    if spec.target_speedup > depth / earliest:
        fastest = math.floor(100 * depth / earliest) / 100
        mistakes.append(
            f"target_speedup {spec.target_speedup:g}: no threshold reaches it: the fastest is {fastest:g}, for "
            f"nobody leaves before layer {earliest} of {depth}; set it to that or less, or add earlier heads"
        )
    return mistakes


def _no_probabilities(criterion: Criterion) -> str:
    return f'criterion is "{criterion}", and a regression has no probabilities: set "patience"'
