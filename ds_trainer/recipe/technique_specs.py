"""The specifications of pruning, of distillation, of a phase's techniques together, and of a student to start from.

Exits have a file of their own. Loss weights live in the phase's loss table alone: `recipe.py` takes the
weights of the original scripts, `final_lambda` and the `alpha_*`, there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from ds_trainer.files.messages import listed, shown
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import ExitsSpec
from ds_trainer.recipe.fields import Positive, Rate, Strict, Units, Whole, only
from ds_trainer.recipe.schedules import Shape
from ds_trainer.recipe.task_specs import Length

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


Term = Literal["logits", "mse", "cos", "hidden"]
LayerPair = Annotated[list[Annotated[int, Field(strict=True, ge=-1)]], Field(min_length=2, max_length=2)]
_PAIRS = "[student, teacher]: 1 is the first layer, -1 the last, 0 the embeddings"


class TopKSpec(Strict):
    """What a cache keeps of a language-model teacher: its likeliest tokens and the mass of all others."""

    top_k: Positive = Field(description="tokens of which the probability is kept at each position")


def _is_cache(value: Any) -> bool:
    top_k = value.get("top_k") if isinstance(value, dict) and value.keys() == {"top_k"} else None
    return isinstance(value, bool | TopKSpec) or (type(top_k) is int and top_k > 0)


_CACHE = only(_is_cache, 'write true, false, or {"top_k": 64}, tokens from 1 up')


class DistillSpec(Strict):
    """Distillation from a frozen teacher, as in DistilBERT (arXiv 1910.01108); `distill.py` explains the terms."""

    models: ClassVar = ("teacher",)

    teacher: str = Field(description='a folder, a hub name, "@model", or "@NAME" of an earlier phase')
    terms: list[Term] = Field(["logits"], min_length=1, description="by default those in the loss table")
    temperature: Annotated[float, Field(gt=0)] = Field(2.0, description="temperature of the logits term")
    divergence: Literal["forward", "reverse", "js"] = Field(
        "forward", description="of the logits: KL(teacher || student), KL(student || teacher), or Jensen-Shannon"
    )
    restrict_ce_to_mask: bool = Field(False, description="MLM: distil the logits at the masked positions only")
    layer_pairs: list[LayerPair] = Field([[-1, -1]], min_length=1, description=_PAIRS)
    teacher_max_seq_length: Length | None = Field(
        None, description="tokens at which a teacher cuts texts that it reads by its own tokenizer; null: the task's"
    )
    teacher_dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="in which the teacher computes")
    teacher_zero_stage: Literal[0, 3] = Field(0, description="3 partitions a large teacher over the ranks")
    cache_teacher: Annotated[bool | TopKSpec, _CACHE] = Field(
        False, description='keep its answers to the training set on disk; {"top_k": 64}: of the likeliest tokens'
    )
    freeze_pos_embs: bool = Field(False, description="freeze the student's position embeddings; it must have some")
    freeze_token_type_embds: bool = Field(False, description="the same for its token-type embeddings")
    alpha_ce: Rate | None = Field(None, description='beside alpha_distil the weight "task", else "distill.logits"')
    alpha_distil: Rate | None = Field(None, description='becomes the loss weight "distill.logits"')
    alpha_mlm: Rate | None = Field(None, description='becomes the loss weight "task"')
    alpha_clm: Rate | None = Field(None, description='becomes the loss weight "task"')
    alpha_squad: Rate | None = Field(None, description='becomes the loss weight "task"')
    alpha_mse: Rate | None = Field(None, description='becomes the loss weight "distill.mse"')
    alpha_cos: Rate | None = Field(None, description='becomes the loss weight "distill.cos"')

    def mistakes(self) -> Iterator[str]:
        if self.top_k and "mse" in self.terms:
            yield "cache_teacher keeps no logits with top_k, which the term mse compares: drop one of them"

    @field_validator("terms", mode="before")
    @classmethod
    def _without_attention(cls, value: Any) -> Any:
        if isinstance(value, list) and "attention" in value:
            raise UserError("the term distill.attention was removed in 0.3: use distill.hidden, or distill.cos")
        return value

    @property
    def compared_layers(self) -> list[LayerPair]:
        """The `layer_pairs`, if a term compares their states."""
        return self.layer_pairs if {"cos", "hidden"} & set(self.terms) else []

    @property
    def top_k(self) -> int:
        """The number of tokens that the cache keeps at each position, 0 if it keeps whole answers or there is none."""
        return self.cache_teacher.top_k if isinstance(self.cache_teacher, TopKSpec) else 0


class Techniques(Strict):
    """The techniques of a phase, alone or together; a key that is absent, or null, is a technique that is not used."""

    removed: ClassVar = {
        "layer_skip": (None, "it is the plugin examples/layer_skip.py of the repository now: name that by --plugin")
    }

    exits: ExitsSpec | None = Field(None, description="train heads at which sure samples leave")
    prune: PruneSpec | None = Field(None, description="mask weights, or parts of the matrices, by scores")
    distill: DistillSpec | None = Field(None, description="learn from a teacher")
    keep_zeros: Literal[True] | None = Field(
        None, description="train on without the zeros of a pruned model coming back; by elementwise optimizers"
    )

    def mistakes(self) -> Iterator[str]:
        if self.prune and self.keep_zeros:
            yield "keep_zeros keeps the zeros that are there, and prune makes others: drop one of them"

    @property
    def models(self) -> dict[tuple[str, str], str]:
        """The models that the techniques name, such as a teacher, by technique and field."""
        return {
            (name, field): getattr(spec, field) for name, spec in self if spec for field in getattr(spec, "models", ())
        }

    def with_models(self, models: Mapping[tuple[str, str], str]) -> Techniques:
        """Return these techniques with other names of models, such as the folders that the names stand for."""
        changed: dict[str, Any] = {}
        for (name, field), model in models.items():
            changed[name] = (changed.get(name) or getattr(self, name)).model_copy(update={field: model})
        return self.model_copy(update=changed)


class StudentSpec(Strict):
    """A smaller model to start from: chosen layers of the larger one, or a config of its own with random weights."""

    layers: list[Whole] | None = Field(None, min_length=1, description="counted from 0; embeddings and head go along")
    model_type: str | None = Field(None, description='family of the copy, by default the same; "distilbert" of a BERT')
    config: dict[str, Any] | None = Field(None, description="`model_type` and its fields: random weights instead")

    def mistakes(self) -> Iterator[str]:
        if (self.layers is None) == (self.config is None):
            yield "set layers to copy them, or config for random weights: one of the two"
        if self.config is not None and "model_type" not in self.config:
            yield 'config has no "model_type": add one that transformers knows, e.g. "bert"'
        if self.config is not None and self.model_type is not None:
            yield "model_type goes with layers: beside config, write it inside config"


def loss_weights(techniques: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss-table entries that `final_lambda` and the `alpha_*` of a phase's techniques stand for.

    The original scripts disagree on alpha_ce: beside alpha_mlm, alpha_clm or alpha_squad (DistilBERT) it weighs the
    distilled logits, beside alpha_distil (movement pruning) the task's own loss. ValueError where it is unclear which
    of the two is meant.
    """
    prune, distill = (techniques.get(name) or {} for name in ("prune", "distill"))
    keys = ("alpha_mlm", "alpha_clm", "alpha_squad", "alpha_distil")
    given = [name for name in keys if distill.get(name) is not None]
    # the commands of the scripts have alpha_clm 0 beside alpha_mlm
    partners = [name for name in given if distill[name] != 0] or given[:1]
    if len(partners) > 1:
        raise UserError(f"{' and '.join(partners)} are both set, and each decides what alpha_ce weighs: keep one")
    if distill.get("alpha_ce") is not None and not partners:
        others = "add alpha_distil (then it weighs the task's loss), alpha_mlm, alpha_clm or alpha_squad (the logits)"
        raise UserError(f"alpha_ce is set alone: {others}")
    is_distilbert = bool(partners) and partners != ["alpha_distil"]
    weights = {
        "prune.penalty": prune.get("final_lambda"),
        "task": distill.get(partners[0] if is_distilbert else "alpha_ce"),
        "distill.logits": distill.get("alpha_ce" if is_distilbert else "alpha_distil"),
        "distill.mse": distill.get("alpha_mse"),
        "distill.cos": distill.get("alpha_cos"),
    }
    return {name: weight for name, weight in weights.items() if weight is not None}
