"""What a recipe may say of early exits, and what a model folder with exit heads says of itself (`exits.json`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ds_trainer.fields import Positive, Rate, Strict

EXITS_FILE = "exits.json"
Criterion = Literal["entropy", "confidence", "patience"]
Pooling = Literal["first", "mean"]
Limit = Rate | Annotated[list[Rate], Field(min_length=1)]
"""One threshold for every head, or one a head."""


ExitTerm = Literal["heads", "distill"]


def _heads_alone() -> list[ExitTerm]:
    return ["heads"]


class ExitsSpec(Strict):
    """A classifier after every layer: DeeBERT (arXiv 2004.12993) and PABEE (arXiv 2006.04152)."""

    layers: list[Positive] | None = Field(
        None, min_length=1, description="layers with a head, 1 is the first; by default all, the last has the model's"
    )
    training: Literal["heads", "joint"] = Field(
        "heads", description='"heads": they alone, all else frozen (DeeBERT\'s second stage); "joint": with the model'
    )
    head_weights: list[Rate] | None = Field(
        None,
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
    criterion: Criterion | None = Field(None, description="by default entropy; patience for a regression")
    early_exit_entropy: Limit = Field(0.1, description="nats; a sample below it leaves")
    early_exit_confidence: Limit = Field(0.9, description="a sample whose likeliest class is above it leaves")
    patience: Positive = Field(2, description="a sample leaves once so many heads in a row agree with the one before")
    regression_threshold: Limit = Field(0.1, description="patience: scores that are nearer than this agree")
    target_speedup: Annotated[float, Field(ge=1)] | None = Field(
        None, description="calibrate for layers / mean layers used; instead of the thresholds above"
    )
    max_drop: Rate | None = Field(None, description="calibrate for at most so many points below the full model")

    per_head: bool = Field(False, description="refine what is calibrated to a threshold for each head")

    @model_validator(mode="after")
    def _consistent(self) -> ExitsSpec:
        if self.layers and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers names one twice: {self.layers}")
        if len(set(self.terms)) != len(self.terms):
            raise ValueError(f"terms names one twice: {', '.join(self.terms)}")
        if self.target_speedup is not None and self.max_drop is not None:
            raise ValueError("target_speedup and max_drop are both set: the thresholds can be picked for one of them")
        if self.per_head and not self.calibrated:
            raise ValueError("per_head refines what is calibrated: set target_speedup or max_drop, or write a list")
        return self

    @property
    def calibrated(self) -> bool:
        return self.target_speedup is not None or self.max_drop is not None


class ExitPolicy(Strict):
    """When a sample leaves. `thresholds` are one a head: of patience a regression's tolerances, else none."""

    criterion: Criterion
    thresholds: list[Rate] = Field(default_factory=list)
    patience: Positive | None = None


class SavedExits(Strict):
    """A folder's `exits.json`: which layers have a head beside the model's own, and when a sample leaves."""

    version: Literal[1] = 1
    layers: list[Positive] = Field(min_length=1)
    pooling: Pooling
    policy: ExitPolicy
    held_out: float = Field(0.0, description="share of the training set that was kept out of training")
    calibration: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> SavedExits:
        if sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers are {self.layers}: they go from first to last")
        # whether it is of a regression only its model tells
        regression = self.policy.criterion == "patience" and bool(self.policy.thresholds)
        mistake = policy_mistake(self.policy, len(self.layers), regression)
        if mistake:
            raise ValueError(mistake)
        return self


def policy_mistake(policy: ExitPolicy, heads: int, regression: bool) -> str | None:
    """Why a policy is none for a model with so many heads beside its own."""
    if regression and policy.criterion != "patience":
        return f'criterion is "{policy.criterion}", and a regression has no probabilities: set "patience"'
    wanted = 0 if policy.criterion == "patience" and not regression else heads
    if len(policy.thresholds) != wanted:
        return f"{len(policy.thresholds)} thresholds for {heads} heads by {policy.criterion}: give {wanted}"
    if policy.criterion == "patience" and policy.patience is None:
        return "criterion is patience and patience is not set"
    return None


def policy_of(spec: ExitsSpec, heads: int, regression: bool) -> ExitPolicy:
    """The policy that a recipe asks for; ValueError where it does not go with the task or the number of heads."""
    criterion = spec.criterion or ("patience" if regression else "entropy")
    if regression and criterion != "patience":
        raise ValueError(f'exits: criterion is "{criterion}", and a regression has no probabilities: set "patience"')
    if criterion == "patience" and not regression:
        return ExitPolicy(criterion=criterion, patience=spec.patience)
    field = "regression_threshold" if regression else f"early_exit_{criterion}"
    limit = getattr(spec, field)
    thresholds = limit if isinstance(limit, list) else [limit] * heads
    if len(thresholds) != heads:
        raise ValueError(f"exits: {field} has {len(thresholds)} values, and there are {heads} heads: give one or all")
    return ExitPolicy(
        criterion=criterion, thresholds=thresholds, patience=spec.patience if criterion == "patience" else None
    )
