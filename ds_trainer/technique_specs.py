"""What a recipe may say of the techniques: pruning and distillation.

Their loss weights have one home, the phase's loss table: `final_lambda` and the `alpha_*` of the original scripts are
taken there by `recipe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ds_trainer.exit_specs import ExitsSpec
from ds_trainer.fields import Count, Positive, Rate, Strict, Units
from ds_trainer.schedules import Shape


class PruneSpec(Strict):
    """Movement pruning (arXiv 2005.07683), magnitude pruning, hard-concrete L0 (arXiv 1712.01312)."""

    pruning_method: Literal["topK", "threshold", "sigmoied_threshold", "magnitude", "l0"] = "topK"
    modules: list[str] | None = Field(
        None,
        min_length=1,
        description="name patterns of linear layers; by default every linear layer of the encoder",
    )
    mask_init: Literal["constant", "uniform", "kaiming"] = "constant"
    mask_scale: float = Field(0.0, description="the constant, or the half-width of the uniform range")
    initial_threshold: float = Field(1.0, description="by method: 1 for topK and magnitude, else 0")
    final_threshold: float = Field(
        0.15, description="share kept for topK and magnitude; for the others a score threshold, by default 0.1 (l0: 1)"
    )
    initial_warmup: Units = 1
    final_warmup: Units = 2
    schedule: Shape = "cubic"
    regularization: Literal["l1", "l0"] | None = None
    final_lambda: Rate | None = Field(None, description='becomes the loss weight "prune.penalty"')
    global_topk: bool = Field(False, description="one threshold over all layers")
    global_topk_frequency_compute: Positive = Field(1, description="optimizer steps between its refreshes")
    mask_scores_learning_rate: Rate = 1e-2
    train_weights: bool = Field(True, description="false trains only the scores (static model pruning)")

    @field_validator("pruning_method", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return "sigmoied_threshold" if value == "sigmoid_threshold" else value

    @field_validator("regularization", mode="before")
    @classmethod
    def _null(cls, value: Any) -> Any:
        return None if value == "null" else value

    @model_validator(mode="before")
    @classmethod
    def _thresholds_by_method(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        method = data.get("pruning_method", "topK")
        by_method = {"topK": (1.0, 0.15), "magnitude": (1.0, 0.15), "l0": (0.0, 1.0)}
        initial, final = by_method.get(method if isinstance(method, str) else "topK", (0.0, 0.1))
        return {"initial_threshold": initial, "final_threshold": final} | data

    @model_validator(mode="after")
    def _consistent(self) -> PruneSpec:
        by_share = self.pruning_method in ("topK", "magnitude")
        for name in ("initial_threshold", "final_threshold"):
            share = getattr(self, name)
            if by_share and not 0 < share <= 1:
                raise ValueError(f"{name} is {share}: {self.pruning_method} takes the share to keep, in (0, 1]")
        if self.global_topk and self.pruning_method not in ("topK", "magnitude"):
            raise ValueError(f"global_topk goes with topK or magnitude, not with {self.pruning_method}")
        if self.regularization and self.pruning_method == "magnitude":
            raise ValueError("regularization needs learned scores, and magnitude has none: set it to null")
        if self.final_lambda is not None and not self.regularization:
            raise ValueError('final_lambda weighs a penalty, and there is none: set regularization to "l1" or "l0"')
        if self.regularization and self.final_threshold == 0:
            raise ValueError("final_threshold is 0, and the penalty is scaled by threshold / final_threshold: raise it")
        if not self.train_weights and self.pruning_method == "magnitude":
            raise ValueError("train_weights is false and magnitude has no scores: nothing would be trained")
        return self


Term = Literal["logits", "mse", "cos", "hidden", "attention"]
LayerPair = Annotated[list[Annotated[int, Field(strict=True, ge=-1)]], Field(min_length=2, max_length=2)]


def _logits_alone() -> list[Term]:
    return ["logits"]


class DistillSpec(Strict):
    """Distillation from a frozen teacher, as DistilBERT (arXiv 1910.01108): KL, MSE and cosine, alone or together."""

    teacher: str = Field(description='a folder, a hub name, "@model", or "@NAME" of an earlier phase')
    terms: list[Term] = Field(
        default_factory=_logits_alone, min_length=1, description="by default those that the loss table weighs"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(
        2.0, description="of the logits term, which is scaled by its square"
    )
    restrict_ce_to_mask: bool = Field(False, description="MLM: distil the logits at the masked positions only")
    layer_pairs: list[LayerPair] = Field(
        default_factory=lambda: [[-1, -1]],
        min_length=1,
        description="[student, teacher] layers that cos, hidden and attention compare: 1 is the first layer, -1 the "
        "last, 0 the embeddings",
    )
    teacher_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    teacher_zero_stage: Literal[0, 3] = Field(0, description="3 partitions a large teacher over the ranks")
    cache_teacher: bool = Field(False, description="compute its outputs for the training set once, keep them on disk")
    freeze_pos_embs: bool = Field(False, description="freeze the student's position embeddings")
    freeze_token_type_embds: bool = Field(False, description="freeze the student's token-type embeddings")
    alpha_ce: Rate | None = Field(
        None,
        description="beside alpha_distil the weight of the task's own loss; beside alpha_mlm, alpha_clm or alpha_squad "
        "that of the distilled logits",
    )
    alpha_distil: Rate | None = Field(None, description='becomes the loss weight "distill.logits"')
    alpha_mlm: Rate | None = Field(None, description='becomes the loss weight "task"')
    alpha_clm: Rate | None = Field(None, description='becomes the loss weight "task"')
    alpha_squad: Rate | None = Field(None, description='becomes the loss weight "task"')
    alpha_mse: Rate | None = Field(None, description='becomes the loss weight "distill.mse"')
    alpha_cos: Rate | None = Field(None, description='becomes the loss weight "distill.cos"')

    @model_validator(mode="after")
    def _consistent(self) -> DistillSpec:
        if len(set(self.terms)) != len(self.terms):
            raise ValueError(f"terms names one twice: {', '.join(self.terms)}")
        if "attention" in self.terms and any(0 in pair for pair in self.layer_pairs):
            raise ValueError("layer_pairs has layer 0, the embeddings, which attend to nothing: drop it or the term")
        if self.cache_teacher and "attention" in self.terms:
            raise ValueError("cache_teacher does not keep attention maps: drop one of them")
        return self


_ALPHAS = tuple(name for name in DistillSpec.model_fields if name.startswith("alpha_"))


class Techniques(Strict):
    exits: ExitsSpec | None = None
    prune: PruneSpec | None = None
    distill: DistillSpec | None = None


class StudentSpec(Strict):
    """A smaller model to start from: chosen layers of the larger one, or a config of its own with random weights."""

    layers: list[Count] | None = Field(
        None, min_length=1, description="layers to copy, counted from 0; embeddings and head are copied too"
    )
    model_type: str | None = Field(None, description='family of the copy, by default the same; "distilbert" of a BERT')
    config: dict[str, Any] | None = Field(None, description="`model_type` and its fields: random weights instead")

    @model_validator(mode="after")
    def _one_way(self) -> StudentSpec:
        if (self.layers is None) == (self.config is None):
            raise ValueError("set layers to copy them, or config for random weights: one of the two")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError('config has no "model_type": add one that transformers knows, e.g. "bert"')
        if self.config is not None and self.model_type is not None:
            raise ValueError("model_type goes with layers: in config it is a field of its own")
        return self


def loss_weights(techniques: Mapping[str, Any]) -> dict[str, float]:
    """The entries of the loss table that `final_lambda` and the `alpha_*` in a phase's techniques ask for.

    The originals disagree on alpha_ce: beside alpha_mlm, alpha_clm or alpha_squad (DistilBERT) it weighs the distilled
    logits, beside alpha_distil (movement pruning) the task's own loss. ValueError where it is unclear which is meant.
    """
    prune, distill = (techniques.get(name) or {} for name in ("prune", "distill"))
    said = {name: distill.get(name) for name in _ALPHAS}
    told = [name for name in ("alpha_mlm", "alpha_clm", "alpha_squad", "alpha_distil") if said[name] is not None]
    # the scripts' own commands say alpha_clm 0 beside alpha_mlm
    rivals = [name for name in told if said[name] != 0] or told[:1]
    if len(rivals) > 1:
        raise ValueError(
            f"{' and '.join(rivals)} are both set: each tells what alpha_ce weighs, and weighs the same term; keep one"
        )
    if said["alpha_ce"] is not None and not rivals:
        raise ValueError(
            "alpha_ce is set alone: add alpha_distil (then alpha_ce weighs the task's loss), or alpha_mlm, alpha_clm "
            "or alpha_squad (then it weighs the distilled logits)"
        )
    tasks = [name for name in rivals if name != "alpha_distil"]
    task, logits = (tasks[0], "alpha_ce") if tasks else ("alpha_ce", "alpha_distil")
    weights = {
        "prune.penalty": prune.get("final_lambda"),
        "task": said[task],
        "distill.logits": said[logits],
        "distill.mse": said["alpha_mse"],
        "distill.cos": said["alpha_cos"],
    }
    return {name: weight for name, weight in weights.items() if weight is not None}
