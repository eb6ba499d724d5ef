"""The recipe: model, task, phases, techniques, loss weights and schedules, as strict pydantic models.

Everything a user may write is declared here with its unit and default; an unknown key, a wrong type or a value out
of range is collected into one `ValueError` that names the path, what was found and what is allowed. Batch size,
precision, ZeRO, offload and clipping live in the engine file; the fields here that name one of them only fill its
"auto" values. Imports neither torch nor DeepSpeed, so that mistakes are told at once.
"""

from __future__ import annotations

import difflib
import json
import typing
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ds_trainer.schedules import LrSchedule, Shape


def _whole_or_fraction(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if whole or (isinstance(value, float) and 0 <= value <= 1):
        return value
    raise ValueError("write a whole number from 0 up, or a fraction of the phase from 0.0 to 1.0")


Fraction = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int | float, BeforeValidator(_whole_or_fraction)]
"""An int is optimizer steps, a float in [0, 1] a fraction of the phase."""
Units = Annotated[int | float, BeforeValidator(_whole_or_fraction)]
"""An int is multiples of the phase's `warmup_steps` (movement pruning's own unit), a float a fraction of the phase."""
Positive = Annotated[int, Field(strict=True, gt=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


_RESERVED = {"model", "previous", "initial_model", "tensorboard"}
Parsed = TypeVar("Parsed", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TokenizerSpec(Strict):
    """A WordPiece tokenizer trained on the task's training text, for a model built from a config alone."""

    vocab_size: Positive = 8192
    lowercase: bool = True


class ModelSpec(Strict):
    """Where the first phase's model comes from: a folder or hub name, or a `transformers` config for a new one."""

    name_or_path: str | None = None
    config: dict[str, Any] | None = Field(None, description="`model_type` and its fields; random weights")
    tokenizer: TokenizerSpec | None = Field(None, description="only with `config`")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if self.tokenizer is not None and self.config is None:
            raise ValueError("tokenizer is trained for a model of `config` only: remove it, the model brings its own")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError('config has no "model_type": add one that transformers knows, e.g. "bert"')
        return self


class TaskSpec(Strict):
    """A labelled-text task: a GLUE name, "docstrings" (embedded), or "text" with files or a hub data set."""

    name: str = "docstrings"
    data_dir: str | None = Field(None, description="folder of the task's files; without it the hub is asked")
    dataset: str | None = Field(
        None, description='hub data set for the task "text": name, owner/name or owner/name/config'
    )
    train_file: str | None = Field(None, description=".csv .tsv .jsonl .parquet, relative to data_dir")
    validation_file: str | None = None
    text_columns: list[str] | None = Field(None, min_length=1, max_length=2)
    label_column: str | None = None
    regression: bool = False
    metrics: list[Literal["accuracy", "f1", "matthews", "pearson", "spearman"]] | None = None
    max_seq_length: Annotated[int, Field(strict=True, ge=4)] = 128
    pad_to_multiple_of: Positive = Field(1, description="8 suits tensor cores")
    max_train_samples: Positive | None = None
    max_eval_samples: Positive | None = None


class GroupRule(Strict):
    """What holds for the parameters whose names match; the first rule that matches a parameter decides."""

    params: str = Field(description='name pattern with * and ?, e.g. "*.embeddings.*"')
    learning_rate: Rate | None = None
    weight_decay: Rate | None = None
    frozen: bool = False


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


class Techniques(Strict):
    prune: PruneSpec | None = None


class Phase(Strict):
    """What to train, how long, from which model, with which techniques and loss weights."""

    name: str = Field("train", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")
    start_from: str = Field("@previous", description='"@previous", "@model", "@NAME" of an earlier phase, or a folder')
    task: TaskSpec | None = Field(None, description="by default the recipe's")
    techniques: Techniques = Techniques()
    loss: dict[str, Rate] = Field(default_factory=lambda: {"task": 1.0}, description="weight of each loss term")
    groups: list[GroupRule] = []

    num_train_epochs: Annotated[float, Field(gt=0)] | None = None
    max_steps: Positive | None = Field(None, description="optimizer steps; wins over num_train_epochs")
    learning_rate: Rate | None = Field(None, description="fills optimizer.params.lr")
    lr_scheduler_type: LrSchedule = "linear"
    warmup_steps: Steps = 0
    weight_decay: Rate | None = None
    adam_beta1: Fraction | None = None
    adam_beta2: Fraction | None = None
    adam_epsilon: Rate | None = None
    max_grad_norm: Rate | None = Field(None, description="fills gradient_clipping")
    train_batch_size: Positive | None = None
    per_device_train_batch_size: Positive | None = Field(None, description="fills train_micro_batch_size_per_gpu")
    gradient_accumulation_steps: Positive | None = None
    bf16: bool | None = None
    fp16: bool | None = None

    per_device_eval_batch_size: Positive = 64
    logging_steps: Steps = 10
    eval_steps: Steps | None = Field(None, description="evaluate every so many steps; always at the end")
    save_steps: Steps | None = Field(None, description="write checkpoint-N every so many steps")
    save_total_limit: Positive | None = Field(None, description="keep the last so many checkpoints")

    @model_validator(mode="before")
    @classmethod
    def _penalty_weight(cls, data: Any) -> Any:
        """Move `final_lambda` into the loss table, the one home of loss weights."""
        prune = data.get("techniques", {}).get("prune") if _is_nested(data) else None
        if not isinstance(prune, dict) or prune.get("final_lambda") is None:
            return data
        loss = data.get("loss", {"task": 1.0})
        said = loss.get("prune.penalty", prune["final_lambda"]) if isinstance(loss, dict) else None
        if said != prune["final_lambda"]:
            raise ValueError(
                f"final_lambda is {prune['final_lambda']} and loss['prune.penalty'] is {said}: write only one of them"
            )
        return data | {"loss": loss | {"prune.penalty": prune["final_lambda"]}} if isinstance(loss, dict) else data

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if self.num_train_epochs is None and self.max_steps is None:
            raise ValueError("neither num_train_epochs nor max_steps is set: set one of them")
        prune = self.techniques.prune
        if prune and prune.regularization and "prune.penalty" not in self.loss:
            raise ValueError(f"regularization is {prune.regularization} but its weight is missing: set final_lambda")
        return self


class Recipe(Strict):
    """A whole run."""

    model: ModelSpec = ModelSpec()
    task: TaskSpec = TaskSpec()
    phases: list[Phase] = Field(min_length=1)
    output_dir: str | None = None
    cache_dir: str | None = Field(None, description="tokenised data; by default ~/.cache/ds_trainer")
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 42
    tensorboard: bool = True

    @model_validator(mode="after")
    def _phases_connect(self) -> Recipe:
        names: list[str] = []
        for phase in self.phases:
            if phase.name in _RESERVED or phase.name.startswith("checkpoint-"):
                raise ValueError(f'a phase is named "{phase.name}", a name of the run folder itself: rename it')
            if phase.name in names:
                raise ValueError(f'two phases are named "{phase.name}": rename one')
            source = phase.start_from.removeprefix("@")
            if phase.start_from.startswith("@") and source not in (*names, "previous", "model"):
                raise ValueError(
                    f'phase "{phase.name}" starts from "@{source}": allowed are "@previous", "@model"'
                    + "".join(f', "@{name}"' for name in names)
                )
            names.append(phase.name)
        return self


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Check a recipe; every mistake is told in one `ValueError`, one line each."""
    return _parse(Recipe, data, "recipe")


def parse_task(data: dict[str, Any]) -> TaskSpec:
    """Check a task by itself, as the evaluation of a model folder needs it."""
    return _parse(TaskSpec, data, "task")


def _parse(model: type[Parsed], data: dict[str, Any], what: str) -> Parsed:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(f"{what}: {_told(model, item)}" for item in error.errors())) from None


def recipe_schema() -> str:
    """The JSON schema of the recipe, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)


def _told(model: type[BaseModel], error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        found = error["input"]
        shown = "" if isinstance(found, dict | list) else f" (found {json.dumps(found, default=str)})"
        return f"{path}: {message}{shown}" if path else message
    known = _fields_at(model, error["loc"][:-1])
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.6)
    hint = f'did you mean "{near[0]}"?' if near else "known here: " + ", ".join(sorted(known))
    return f"{path}: unknown key; {hint}"


def _fields_at(model: Any, loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        if isinstance(part, int):
            continue
        model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields)


def _model_in(annotation: Any) -> Any:
    """The pydantic model inside `X`, `X | None` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(found for arg in typing.get_args(annotation) if (found := _model_in(arg)) is not None)


def _is_nested(data: Any) -> bool:
    return isinstance(data, dict) and isinstance(data.get("techniques", {}), dict)
