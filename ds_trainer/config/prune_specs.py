"""The pruning entry of a recipe: by which scores, at which granularity, how much, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ds_trainer.config.fields import Count, Fraction, Positive, Rate, Strict, Units
from ds_trainer.config.schedules import Shape
from ds_trainer.files.messages import listed, shown
from ds_trainer.ranks.failures import UserError, raise_mistakes

Granularity = Literal["weight", "block", "row", "column", "head", "neuron", "2:4"]
KINDS = ("attention", "feed_forward")
"""The kinds of blocks of a layer. As keys of `granularity` they are not name patterns."""
WHOLE_BLOCKS = {"head": "attention", "neuron": "feed_forward"}
"""The granularities that are about whole blocks of a layer, and the kind of block of each."""
BY_SHARE = ("topK", "magnitude")
"""The methods whose threshold is the share to keep; other methods compare scores with theirs."""
_NAMES = {"hybrid": {"attention": "head", "feed_forward": "neuron"}, "head": {"attention": "head"}}
_NAMES |= {"neuron": {"feed_forward": "neuron"}}
_DEFAULTS: dict[str, dict[str, float]] = {
    "topK": {"initial_threshold": 1.0, "final_threshold": 0.15},
    "magnitude": {"initial_threshold": 1.0, "final_threshold": 0.15},
    "threshold": {"initial_threshold": 0.0, "final_threshold": 0.1, "mask_scale": 1.0},
    "sigmoied_threshold": {"initial_threshold": 0.0, "final_threshold": 0.1},
    "l0": {"initial_threshold": 1.0, "final_threshold": 1.0, "mask_scale": 2.197, "mask_scores_learning_rate": 0.1},
}
"""The defaults of each method that differ from the fields'. With them and a constant `mask_init` training starts dense.

The defaults of l0 are from the published command of movement pruning: gates start at 0.98, and since both thresholds
are 1, the weight of the penalty stays the same. The scores of `threshold` start above 0, because a score of 0, with
which other methods start, is not above a threshold of 0.
"""
COUNTED = ("row", "column", "neuron")
"""`multiple_of` rounds the number kept of each of these."""


def _known(value: Any) -> Any:
    """Raise one message for an unknown granularity: pydantic would raise one for each member of the union."""
    known = get_args(Granularity)
    values = list(value.values()) if isinstance(value, dict) else [value]
    unknown = [one for one in values if one not in known and (one != "hybrid" or isinstance(value, dict))]
    if unknown or not values:
        raise UserError(
            f"{listed(unknown) or 'no granularity'}: known are {', '.join(known)}; or hybrid; or an object from "
            "attention, feed_forward or name patterns of linear layers to one of these"
        )
    return value


def _spelled(method: Any) -> Any:
    return "sigmoied_threshold" if method == "sigmoid_threshold" else method


def _null(value: Any) -> Any:
    return None if value == "null" else value


Method = Annotated[Literal["topK", "threshold", "sigmoied_threshold", "magnitude", "l0"], BeforeValidator(_spelled)]
AnyGranularity = Annotated[Granularity | Literal["hybrid"] | dict[str, Granularity], BeforeValidator(_known)]


class PruneSpec(Strict):
    """Movement pruning (arXiv 2005.07683), magnitude pruning, hard-concrete L0 (arXiv 1712.01312).

    A score is of a weight or, as in arXiv 2109.04838, of a larger part of the matrices that is kept or dropped whole.
    """

    pruning_method: Method = Field("topK", description="how scores arise and decide; sigmoid_threshold is known, too")
    granularity: AnyGranularity = Field(
        "weight",
        description='the part of a matrix that one score is about; "hybrid" is {"attention": "head", "feed_forward": '
        '"neuron"}; in an object the first key that matches a linear layer decides, and without one it is not pruned',
    )
    block_shape: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(
        [32, 32], description="outputs and inputs of the granularity block; blocks at an edge may be smaller"
    )
    modules: list[str] | None = Field(
        None, min_length=1, description="name patterns of linear layers; of a head's or neuron's block all or none"
    )
    mask_init: Literal["constant", "uniform", "kaiming", "cut"] = Field(
        "constant", description='"cut" starts topK from the zeros of the model, which a cut has made'
    )
    mask_scale: float = Field(
        0.0,
        description="the constant, or half of the range; 1 for threshold, 2.197 for l0; with cut, 0.1, the scores of "
        "what is kept, and its negative those of zeros",
    )
    initial_threshold: float | None = Field(
        1.0, description="by default 0 for threshold and sigmoied_threshold; null for cut: the model's density"
    )
    final_threshold: float = Field(
        0.15,
        description="the share to keep; for threshold and sigmoied_threshold what scores must exceed, by default 0.1; "
        "null in either threshold means the default, or the target",
    )
    target_flops: Fraction | None = Field(
        None,
        gt=0,
        description="share of the encoder's FLOPs to keep, instead of final_threshold, chosen over all layers with "
        "scores standardised among heads and among neurons",
    )
    target_latency: Fraction | None = Field(None, gt=0, description="share of the encoder's measured seconds to keep")
    cost_tokens: Positive = Field(128, description="length in tokens of the example whose FLOPs or seconds are counted")
    uniform: bool = Field(False, description="keep the same number in every layer, for each kind of matrix or block")
    min_heads: Count = Field(0, description="heads, or groups that share a key and value, to keep in every layer")
    multiple_of: Literal[1, 8, 16, 64] = Field(1, description="round the number of neurons, rows or columns to keep")
    initial_warmup: Units = Field(1, description="how long the initial threshold is held at the start")
    final_warmup: Units = Field(2, description="how long the final threshold is held at the end")
    schedule: Shape = Field("cubic", description="shape of the way from the initial threshold to the final one")
    regularization: Annotated[Literal["l1", "l0"] | None, BeforeValidator(_null)] = Field(None, description="on scores")
    final_lambda: Rate | None = Field(None, description='weight of the penalty: the loss weight "prune.penalty"')
    global_topk: bool = Field(False, description="one threshold over all layers; unlike scores are standardised")
    global_topk_frequency_compute: Positive = Field(1, description="steps between two choices over all layers")
    mask_scores_learning_rate: Rate = Field(1e-2, description="by default 0.1 for l0")
    evaluate_at_final_threshold: bool = Field(False, description="evaluations also score the model at final_threshold")
    train_weights: bool = Field(True, description="false trains only the scores (static model pruning)")

    @property
    def choices(self) -> dict[str, str]:
        """The granularity by key: kinds of blocks, or name patterns."""
        if isinstance(self.granularity, dict):
            return dict(self.granularity)
        return dict(_NAMES.get(self.granularity, {"*": self.granularity}))

    @property
    def target(self) -> float | None:
        """The share of the encoder's cost to keep, where the recipe sets one."""
        return self.target_latency if self.target_flops is None else self.target_flops

    @property
    def _over_all_layers(self) -> list[str]:
        """The fields that are set and choose among the decisions of all layers together."""
        return [name for name in ("global_topk", "target_flops", "target_latency") if getattr(self, name)]

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_method(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        defaults: dict[str, float | None] = dict(_DEFAULTS.get(str(_spelled(data.get("pruning_method", "topK"))), {}))
        granularity = data.get("granularity")
        if "2:4" in (list(granularity.values()) if isinstance(granularity, dict) else [granularity]):
            defaults["final_threshold"] = 0.5
        if data.get("mask_init") == "cut":
            defaults |= {"initial_threshold": None, "mask_scale": 0.1}
        targets = [data[name] for name in ("target_flops", "target_latency") if data.get(name) is not None]
        if len(targets) == 1:
            defaults["final_threshold"] = targets[0]
        given = {name: value for name, value in data.items() if value is not None or not name.endswith("_threshold")}
        return defaults | given

    @model_validator(mode="after")
    def _consistent(self) -> PruneSpec:
        raise_mistakes([*self._method_mistakes(), *self._granularity_mistakes(), *self._count_mistakes()])
        return self

    def _method_mistakes(self) -> Iterator[str]:
        if self.pruning_method in BY_SHARE:
            for name in ("initial_threshold", "final_threshold"):
                share = getattr(self, name)
                if share is not None and not 0 < share <= 1:
                    yield f"{name} is {share}: {self.pruning_method} takes the share to keep, in (0, 1]"
        else:
            for name in (*self._over_all_layers, *(["granularity 2:4"] if "2:4" in self.choices.values() else [])):
                yield f"{name} goes with topK or magnitude, not with {self.pruning_method}"
        others = {*self.choices.values()} - {"weight", "block", "2:4"}
        if self.mask_init == "cut" and (self.pruning_method != "topK" or others):
            yield "mask_init cut goes with topK, and granularity weight, block or 2:4: change one of them"
        if self.mask_init == "cut" and self.mask_scale <= 0:
            yield f"mask_scale is {self.mask_scale}: mask_init cut needs it above 0, to tell kept weights from zeros"
        if self.pruning_method == "magnitude" and (self.regularization or not self.train_weights):
            field = "regularization" if self.regularization else "train_weights false"
            yield f"{field} needs learned scores, and magnitude has none: drop it, or set pruning_method to topK"
        if self.final_lambda is not None and not self.regularization:
            yield 'final_lambda weighs a penalty, and there is none: set regularization to "l1" or "l0"'
        if self.regularization and self.final_threshold == 0:
            yield "final_threshold is 0, and the penalty is scaled by threshold / final_threshold: raise it"
        if self.regularization and (self.initial_threshold or 0) * self.final_threshold < 0:
            yield (
                f"initial_threshold is {self.initial_threshold} and final_threshold {self.final_threshold}: the "
                "penalty, scaled by threshold / final_threshold, would begin as a reward: raise both to 0 or above"
            )

    def _granularity_mistakes(self) -> Iterator[str]:
        for key, granularity in self.choices.items():
            kind = WHOLE_BLOCKS.get(granularity, key)
            if key != kind:
                yield f'granularity: {granularity} goes with the key "{kind}", not with {shown(key)}: change one'
        chosen = set(self.choices.values())
        if self.global_topk and "2:4" in chosen:
            yield "global_topk chooses among all weights, and 2:4 keeps two of every four: drop one of them"
        if self.global_topk and "weight" in chosen and len(chosen) > 1:
            yield f"global_topk compares like with like, and weight is mixed with {listed(sorted(chosen - {'weight'}))}"
        if "2:4" in chosen and self.final_threshold != 0.5:
            yield f"final_threshold is {self.final_threshold}, and 2:4 keeps half: leave it out or write 0.5"

    def _count_mistakes(self) -> Iterator[str]:
        chosen, rivals = set(self.choices.values()), self._over_all_layers
        if self.target_flops is not None and self.target_latency is not None:
            yield "target_flops and target_latency are both set: keep one"
        elif self.target is not None and not math.isclose(self.final_threshold, self.target):
            yield (
                f"{rivals[-1]} replaces final_threshold, which is {self.final_threshold}: leave that out or, in a "
                "recipe that a run has written, set it to null"
            )
        if self.target is not None and chosen - WHOLE_BLOCKS.keys():
            yield f"{rivals[-1]} counts what heads and neurons cost: set granularity to hybrid, head or neuron"
        if self.uniform and rivals:
            yield f"uniform keeps the same number in every layer, and {rivals[0]} chooses among all layers: keep one"
        if self.uniform and self.pruning_method not in BY_SHARE and "weight" in chosen:
            yield f"uniform with {self.pruning_method} goes with larger grains than weight: set granularity, or topK"
        if self.min_heads and "head" not in chosen:
            yield f"min_heads is {self.min_heads}, and no granularity is head: set it to 0, or granularity to hybrid"
        if self.multiple_of > 1 and not chosen & set(COUNTED):
            yield f"multiple_of rounds neurons, rows and columns, not {shown(self.granularity)}: change one of the two"
        bounds = {"uniform": self.uniform, "min_heads": self.min_heads, "multiple_of": self.multiple_of > 1}
        for name in [name for name, value in bounds.items() if value and self.pruning_method == "l0"]:
            yield f"{name} would close gates that l0 opens, and open others: choose another pruning_method"
