"""The pruning entry of a recipe: by which scores, at which granularity, how much, and when."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from ds_trainer.files.messages import listed, shown
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.fields import Positive, Rate, Strict, Units, only
from ds_trainer.recipe.schedules import Shape

Granularity = Literal["weight", "block", "row", "column", "head", "neuron"]
# the kinds of blocks of a layer; as keys of `granularity` they are not name patterns
KINDS = ("attention", "feed_forward")
# the granularities whose decisions reach into all matrices of a block, and the kind of that block
WHOLE_BLOCKS = {"head": "attention", "neuron": "feed_forward"}
# the methods whose threshold is the share to keep; other methods compare scores with theirs
BY_SHARE = ("topK", "magnitude")
# The defaults of each method that differ from the fields'. With them and a constant `mask_init` training starts dense.
# Those of l0 are from the published command of movement pruning: gates start at 0.98, and since both thresholds are 1,
# the weight of the penalty stays the same. The scores of `threshold` start above 0, because a score of 0, with which
# other methods start, is not above a threshold of 0.
_DEFAULTS: dict[str, dict[str, float]] = {
    "topK": {"initial_threshold": 1.0, "final_threshold": 0.15},
    "magnitude": {"initial_threshold": 1.0, "final_threshold": 0.15},
    "threshold": {"initial_threshold": 0.0, "final_threshold": 0.1, "mask_scale": 1.0},
    "sigmoied_threshold": {"initial_threshold": 0.0, "final_threshold": 0.1},
    "l0": {"initial_threshold": 1.0, "final_threshold": 1.0, "mask_scale": 2.197, "mask_scores_learning_rate": 0.1},
}


def _is_granularity(value: Any) -> bool:
    known = get_args(Granularity)
    if isinstance(value, dict):
        return bool(value) and all(one in known for one in value.values())
    return value in (*known, "hybrid")


_GRANULARITY = only(
    _is_granularity,
    f"known are {', '.join(get_args(Granularity))}; or hybrid; or an object from attention, feed_forward or name "
    "patterns of linear layers to one of these; 2:4 is a granularity of cuts, whose zeros keep_zeros keeps",
)
Method = Literal["topK", "threshold", "sigmoied_threshold", "magnitude", "l0"]
AnyGranularity = Annotated[Granularity | Literal["hybrid"] | dict[str, Granularity], _GRANULARITY]


class PruneSpec(Strict):
    """Movement pruning (arXiv 2005.07683), magnitude pruning, hard-concrete L0 (arXiv 1712.01312).

    A score decides on a weight or, as in arXiv 2109.04838, on a larger part of the matrices that is kept or dropped
    whole.
    """

    removed: ClassVar = {
        "target_flops": (None, 'set final_threshold, or write a cut with "target_flops"'),
        "target_latency": (None, 'set final_threshold, or write a cut with "target_latency"'),
        "cost_tokens": (128, 'write a cut, which has "cost_tokens"'),
        "uniform": (False, "topK and magnitude keep the same share of every layer without it: drop it, or write a cut"),
        "min_heads": (0, 'write a cut with "min_heads"'),
        "multiple_of": (1, 'write a cut with "neurons", the number that each layer keeps'),
    }

    pruning_method: Method = Field("topK", description="how scores arise and decide; sigmoid_threshold is known, too")
    granularity: AnyGranularity = Field(
        "weight",
        description='the part of a matrix that one score is about; "hybrid" is {"attention": "head", "feed_forward": '
        '"neuron"}; in an object the first key that matches a linear layer decides, and without one it is not pruned',
    )
    block_shape: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(
        [32, 32], description="outputs and inputs of the granularity block; blocks at an edge may be smaller"
    )
    modules: list[str] | None = Field(None, min_length=1, description="name patterns of the linear layers to prune")
    mask_init: Literal["constant", "uniform", "kaiming"] = Field("constant", description="the scores at the start")
    mask_scale: float = Field(0.0, description="the constant, or half of the range; 1 for threshold, 2.197 for l0")
    initial_threshold: float = Field(1.0, description="by default 0 for threshold and sigmoied_threshold")
    final_threshold: float = Field(
        0.15, description="the share to keep; or what scores must exceed, by default 0.1; null means the default"
    )
    initial_warmup: Units = Field(1, description="how long the initial threshold is held at the start")
    final_warmup: Units = Field(2, description="how long the final threshold is held at the end")
    schedule: Shape = Field("cubic", description="shape of the way from the initial threshold to the final one")
    regularization: Literal["l1", "l0"] | None = Field(None, description="the penalty on scores")
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
        kinds = {kind: name for name, kind in WHOLE_BLOCKS.items() if self.granularity in (name, "hybrid")}
        return kinds or {"*": self.granularity}

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_method(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None or not name.endswith("_threshold")}
        if given.get("pruning_method") == "sigmoid_threshold":
            given["pruning_method"] = "sigmoied_threshold"
        if given.get("regularization") == "null":  # as the original scripts write it
            given["regularization"] = None
        if given.get("mask_init") == "cut":
            raise UserError('mask_init "cut" was removed in 0.3: train the zeros of a cut on with keep_zeros')
        return _DEFAULTS.get(str(given.get("pruning_method", "topK")), {}) | given

    def mistakes(self) -> Iterator[str]:
        method, granularities = self.pruning_method, {*self.choices.values()}
        initial, final = self.initial_threshold, self.final_threshold
        for name, share in (("initial_threshold", initial), ("final_threshold", final)):
            if method in BY_SHARE and not 0 < share <= 1:
                yield f"{name} is {share}: {method} takes the share to keep, in (0, 1]"
        if self.global_topk and method not in BY_SHARE:
            yield f"global_topk goes with topK or magnitude, not with {method}"
        if self.global_topk and "weight" in granularities and len(granularities) > 1:
            others = listed(sorted(granularities - {"weight"}))
            yield f"global_topk compares like with like, and weight is mixed with {others}"
        if method == "magnitude" and (self.regularization or not self.train_weights):
            field = "regularization" if self.regularization else "train_weights false"
            yield f"{field} needs learned scores, and magnitude has none: drop it, or set pruning_method to topK"
        if self.final_lambda is not None and not self.regularization:
            yield 'final_lambda weighs a penalty, and there is none: set regularization to "l1" or "l0"'
        if self.regularization and (final == 0 or initial * final < 0):
            yield (
                f"initial_threshold is {initial} and final_threshold {final}: the penalty is scaled by threshold / "
                "final_threshold, and would be divided by 0 or begin as a reward: raise them"
            )
        for key, granularity in self.choices.items():
            kind = WHOLE_BLOCKS.get(granularity, key)
            if key != kind:
                yield f'granularity: {granularity} goes with the key "{kind}", not with {shown(key)}: change one'
