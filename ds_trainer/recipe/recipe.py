"""The recipe: model, task, phases, techniques, loss weights and schedules, as strict pydantic models.

Every field is declared here with its unit and default. Unknown keys, wrong types and values out of range are collected
into one UserError, which names the path of each, the value and what is allowed. Batch size, precision, ZeRO, offload
and clipping live in the engine file; the fields here that name one of them only fill its "auto" values. This module
imports neither torch nor DeepSpeed, so that mistakes are reported at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from ds_trainer.files.messages import shown
from ds_trainer.files.reading import read_json
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.exit_specs import EXITS_FILE, ExitsSpec, SavedExits
from ds_trainer.recipe.fields import Fraction, Positive, Rate, Share, Steps, Strict
from ds_trainer.recipe.schedules import LrSchedule
from ds_trainer.recipe.task_specs import (
    FAMILIES,
    AnyTask,
    LabelledSpec,
    TaskBase,
    TaskSpec,
    TextSpec,
    TokenSpec,
    family,
    greater_is_better,
)
from ds_trainer.recipe.technique_specs import StudentSpec, Techniques, loss_weights

_RESERVED = {"model", "previous", "initial_model", "starting_models", "eval", "tensorboard", "plots", "deepspeed"}
Parsed = TypeVar("Parsed", bound=BaseModel)


class TokenizerSpec(Strict):
    """A WordPiece tokenizer trained on the task's training text, for a model built from a config alone."""

    vocab_size: Positive = Field(8192, description="tokens at the most, special ones included")
    lowercase: bool = Field(True, description="write all letters small before the text is cut into tokens")


class ModelSpec(Strict):
    """Where the first phase's model comes from: a folder or hub name, or a `transformers` config for a new one."""

    name_or_path: str | None = Field(None, description="a folder, a checkpoint, or a name on the hub")
    config: dict[str, Any] | None = Field(None, description="`model_type` and its fields; random weights")
    tokenizer: TokenizerSpec | None = Field(None, description="only with `config`")

    def mistakes(self) -> Iterator[str]:
        if self.tokenizer is not None and self.config is None:
            yield "tokenizer is trained only for a model made from `config`: remove it, the model has one"
        if self.config is not None and "model_type" not in self.config:
            yield 'config has no "model_type": add one that transformers knows, e.g. "bert"'


class GroupRule(Strict):
    """Settings for the parameters whose names match; the first rule that matches a parameter decides."""

    params: str = Field(
        description='a pattern, e.g. "*.embeddings.*"; what techniques add is reached only by its name, "*.mask_scores"'
    )
    learning_rate: Rate | None = Field(None, description="by default that of the phase")
    weight_decay: Rate | None = Field(None, description="by default that of the phase, and 0 for biases and norms")
    frozen: bool = Field(False, description="leave these parameters as they are")


class Phase(Strict):
    """A stage of a run: which model is trained, how long, with which techniques and loss weights."""

    removed: ClassVar = {
        "histograms": (False, "read the weights of the exported model, e.g. by SummaryWriter.add_histogram"),
        "lr_restarts": (0, "write a phase for each part, whose rates start anew"),
    }

    name: str = Field("train", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$", description="also that of its folder")
    start_from: str = Field("@previous", description='"@previous", "@model", "@NAME" of an earlier phase, or a folder')
    student: StudentSpec | None = Field(None, description="start from a smaller model made of the one of start_from")
    cut: CutSpec | None = Field(None, description="start from the model of start_from with parts of it cut away")
    task: AnyTask | None = Field(None, description="by default the recipe's")
    techniques: Techniques = Field(Techniques(), description="what is trained beside the task")
    loss: dict[str, Rate] = Field({"task": 1.0}, description="weight of each loss term")
    groups: list[GroupRule] = Field([], description="settings of their own for some parameters")
    dropout: Share | None = Field(None, description="of the whole model in this phase; by default that of its config")

    num_train_epochs: Rate | None = Field(None, description="0 leaves the model that the phase starts from as it is")
    max_steps: Positive | None = Field(None, description="optimizer steps; wins over num_train_epochs")
    learning_rate: Rate | None = Field(None, description="fills optimizer.params.lr")
    lr_scheduler_type: LrSchedule | None = Field(None, description="by default that of the engine file, or linear")
    warmup_steps: Steps | None = Field(None, description="how long rates rise from 0")
    weight_decay: Rate | None = Field(None, description="fills optimizer.params.weight_decay; not of biases and norms")
    adam_beta1: Fraction | None = Field(None, description="fills the first of optimizer.params.betas")
    adam_beta2: Fraction | None = Field(None, description="fills the second of optimizer.params.betas")
    adam_epsilon: Rate | None = Field(None, description="fills optimizer.params.eps")
    max_grad_norm: Rate | None = Field(None, description="fills gradient_clipping")
    train_batch_size: Positive | None = Field(None, description="examples of a step on all ranks; fills the same key")
    per_device_train_batch_size: Positive | None = Field(None, description="fills train_micro_batch_size_per_gpu")
    gradient_accumulation_steps: Positive | None = Field(None, description="fills the same key")
    bf16: bool | None = Field(None, description="fills bf16.enabled")
    fp16: bool | None = Field(None, description="fills fp16.enabled")
    gradient_checkpointing: bool = Field(False, description="compute activations again in the backward: less memory")

    per_device_eval_batch_size: Positive = Field(64, description="examples of a batch on each rank at evaluation")
    max_skipped_steps: Positive = Field(50, description="in a row; fp16 with a scale of 2**32 skips 33 at the most")
    logging_steps: Steps = Field(10, description="steps between records of the log")
    eval_steps: Steps | None = Field(None, description="steps between evaluations; one is always at the end")
    save_steps: Steps | None = Field(None, description="steps between checkpoints")
    save_total_limit: Positive | None = Field(None, description="how many checkpoints to keep, the last ones")
    metric_for_best_model: str | None = Field(None, description="e.g. accuracy: also keep the best checkpoint by it")
    greater_is_better: bool | None = Field(None, description="whether more of that is better; by default its task says")
    load_best_model_at_end: bool = Field(False, description="export that checkpoint, not the last step")
    early_stopping_patience: Positive | None = Field(
        None, description="evaluations without a better one that end the phase"
    )
    shrink: bool = Field(False, description="cut out of the exported model the heads and neurons that are all zero")

    @property
    def trains(self) -> bool:
        """Whether the phase has optimizer steps."""
        return bool(self.max_steps or self.num_train_epochs)

    @property
    def sources(self) -> dict[str, str]:
        """The models that the phase is made of and taught by, as the recipe names them, by the path of the field."""
        of_techniques = {f"techniques.{name}.{field}": model for (name, field), model in self.techniques.models.items()}
        return {"start_from": self.start_from, **of_techniques}

    def prefers_more(self, metric: str, task: TaskBase) -> bool:
        """Return whether more of a score of the phase, with this task, is better. Raises UserError where it is unknown.

        `greater_is_better` is about `metric_for_best_model` or, without one, about any score that is asked for.
        """
        if self.greater_is_better is not None and self.metric_for_best_model in (None, metric):
            return self.greater_is_better
        greater = greater_is_better(metric, task, *(spec for _, spec in self.techniques))
        if greater is None:
            known = next(name for name in (*task.greater_is_better, *TaskBase.greater_is_better) if "*" not in name)
            way_out = f"Set greater_is_better, or name a score whose direction is known, such as {known}"
            raise UserError(f'phase "{self.name}": is a higher or a lower {shown(metric)} better? {way_out}')
        return greater

    @model_validator(mode="before")
    @classmethod
    def _one_home_of_weights(cls, data: Any) -> Any:
        """Move the techniques' loss weights into the loss table; its entries are their default terms."""
        if not _is_nested(data):
            return data
        loss, techniques = data.get("loss"), dict(data.get("techniques") or {})
        weights = loss_weights(techniques)
        for name, weight in weights.items():
            if loss and loss.get(name, weight) != weight:
                both = f"loss[{name!r}] is {shown(loss[name])}, and the techniques have {shown(weight)} for it"
                raise UserError(f"{both} (final_lambda and the alpha_* are loss weights): write only one of them")
        table = ({"task": 1.0} if loss is None else loss) | weights
        if techniques.get("exits") is not None and "exits.heads" not in table:
            # alone, the heads train beside a frozen model; in joint training their term has the loss of its head in it
            table = table | {"exits.heads": 1.0} | ({} if loss or "task" in weights else {"task": 0.0})
        distill = techniques.get("distill")
        if distill and distill.get("terms") is None:
            terms = [name.removeprefix("distill.") for name in table if name.startswith("distill.")]
            techniques["distill"] = distill | {"terms": terms}
            if not terms:
                raise UserError('distill: no term has a weight: set e.g. alpha_distil, or loss["distill.logits"]')
        return data | {"loss": table} | ({"techniques": techniques} if techniques else {})

    def mistakes(self) -> Iterator[str]:
        prune, exits, distill = self.techniques.prune, self.techniques.exits, self.techniques.distill
        if self.num_train_epochs is None and self.max_steps is None:
            yield "neither num_train_epochs nor max_steps is set: set one of them"
        elif idle := [name for name, spec in [*self.techniques, ("shrink", self.shrink)] if spec and not self.trains]:
            yield f"num_train_epochs is 0, and {' and '.join(idle)} would need training: drop one or the other"
        if self.student and self.cut:
            yield "student and cut are both set: make the student in a phase of its own, and cut its model"
        if prune and prune.regularization and "prune.penalty" not in self.loss:
            yield f"regularization is {prune.regularization} but its weight is missing: set final_lambda"
        for term in distill.terms if distill else ():
            if f"distill.{term}" not in self.loss:
                yield f'distill has the term {term} but no weight for it: set loss["distill.{term}"], e.g. to 1.0'
        by_metric = [name for name in ("load_best_model_at_end", "early_stopping_patience") if getattr(self, name)]
        if by_metric and self.metric_for_best_model is None:
            yield f"{by_metric[0]} needs metric_for_best_model, e.g. accuracy"
        if by_metric and prune:
            yield f"{by_metric[0]} with prune would export a step without the final density: drop one of them"
        if self.metric_for_best_model and not (self.save_steps and self.eval_steps):
            yield "metric_for_best_model needs eval_steps, and save_steps that fall on the same steps"
        others = " and ".join(name for name in ("prune", "distill") if getattr(self.techniques, name))
        if exits and exits.training == "heads" and others:
            way_out = 'set exits.training to "joint", or give the exits a phase of their own'
            yield f'exits.training is "heads", which freezes the model that {others} would train: {way_out}'


class Recipe(Strict):
    """A whole run."""

    model: ModelSpec = Field(ModelSpec(), description="what the first phase starts from")
    task: AnyTask = Field(TextSpec(), description="of every phase that has none of its own")
    phases: list[Phase] = Field(min_length=1, description="one after another, each from the model of the one before")
    output_dir: str | None = Field(None, description="the folder of the run; --output_dir in its place")
    cache_dir: str | None = Field(None, description="tokenised data; by default ~/.cache/ds_trainer")
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = Field(42, description="of weights, order and dropout")
    tensorboard: bool = Field(True, description="write the records for TensorBoard too")
    report: bool = Field(True, description="at the end, measure the phases' models side by side and write report.md")

    def earlier(self, phase: Phase, reference: str) -> Phase | None:
        """Return the earlier phase that a reference of this one, such as "@previous", names; None if it names none."""
        before = list(itertools.takewhile(lambda other: other.name != phase.name, self.phases))
        named = {f"@{other.name}": other for other in before}
        return before[-1] if reference == "@previous" and before else named.get(reference)

    def mistakes(self) -> Iterator[str]:
        names: list[str] = []
        for phase in self.phases:
            this, task, distill = f'phase "{phase.name}"', phase.task or self.task, phase.techniques.distill
            if phase.name in _RESERVED or phase.name.startswith(("checkpoint-", "superseded-", "damaged-")):
                yield f'a phase is named "{phase.name}", a name of the run folder itself: rename it'
            if phase.name in names:
                yield f'two phases are named "{phase.name}": rename one'
            for field, source in phase.sources.items():
                if source.startswith("@") and source[1:] not in (*names, "previous", "model"):
                    allowed = ", ".join(f'"@{name}"' for name in ("previous", "model", *names))
                    yield f'{field} of {this} is "{source}": allowed are {allowed}'
            if phase.techniques.exits:
                yield from self._exit_mistakes(this, task, phase.techniques.exits)
            if getattr(task, "loss", None) == "none" and phase.trains and phase.loss.get("task") != 0:
                way_out = 'set loss["task"] to 0, and give a term of distill a weight'
                yield f"{this} trains, and task.loss is none, which is nothing to train by: {way_out}"
            if phase.metric_for_best_model:
                phase.prefers_more(phase.metric_for_best_model, task)
            # where the answers of another model count, they must be of the same kind
            judged = phase.cut is not None and phase.cut.judges_answers
            models = {"teaches": distill.teacher if distill else "", "is cut for": phase.start_from if judged else ""}
            for verb, reference in models.items():
                other = self.earlier(phase, reference) or phase
                wanted, given = family(task), family(other.task or self.task)
                if wanted != given:
                    whose = f'"{other.name}", whose model {verb} it, of {given}'
                    yield f"{this} is of the family {wanted}, and {whose}: take a model of the same task"
            names.append(phase.name)

    def _exit_mistakes(self, this: str, task: TaskSpec, exits: ExitsSpec) -> Iterator[str]:
        """Allow exits on labelled text and tags, and calibration only on examples that no phase has trained on."""
        if not isinstance(task, LabelledSpec):
            yield f"{this} has exits, and its task is {task.name}: exits need labelled text or tags"
            return
        if isinstance(task, TokenSpec) and exits.pooling:
            yield f"{this} has exits.pooling, which the heads of {task.name} lack: drop it"
        if exits.calibrated and not task.held_out:
            way_out = "set task.held_out to their share, e.g. 0.02 (0.1 of a small training set)"
            yield f"{this} calibrates its exits, and no training examples are held out for that: {way_out}"
        data = ("name", "data_dir", "dataset", "train_file")
        for other in (other.task or self.task for other in self.phases):
            same = all(getattr(other, field) == getattr(task, field) for field in data)
            if same and isinstance(other, LabelledSpec) and other.held_out != task.held_out:
                shares = f"held_out is {other.held_out} in one phase and {task.held_out} in another on the same data"
                yield f"{shares}: one would train on what the other holds out; write the same in both"


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Check a recipe; a UserError has every mistake, one a line."""
    return _parse(Recipe, data, "recipe")


class TaskParser(Strict):
    """A task by itself."""

    task: AnyTask


def parse_task(data: dict[str, Any]) -> TaskSpec:
    """Check a task by itself, as the evaluation of a model folder needs it."""
    return _parse(TaskParser, {"task": data}, "").task


def parse_cut(data: Any) -> CutSpec:
    """Check a cut by itself: an object with its fields, or a number, the share to keep."""
    return _parse(CutSpec, data if isinstance(data, dict) else {"keep": data}, "cut")


def saved_exits(folder: str | Path) -> SavedExits | None:
    """Read the `exits.json` of a model folder; None where there is none, UserError where it is not valid."""
    path = os.path.join(folder, EXITS_FILE)
    return _parse(SavedExits, read_json(path, "the exits of a model,"), path) if os.path.isfile(path) else None


def task_of(phase: Phase, recipe: Recipe) -> TaskSpec:
    """Return the task of a phase.

    For MLM it has logits at every position if they are distilled beyond the masked ones.
    """
    task, distill = phase.task or recipe.task, phase.techniques.distill
    if task.name != "mlm" or distill is None:
        return task
    everywhere = not distill.restrict_ce_to_mask and bool({"logits", "mse"} & set(distill.terms))
    return task.model_copy(update={"head_positions": "all" if everywhere else "labels"})


def _parse(model: type[Parsed], data: dict[str, Any], file: str) -> Parsed:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [line for item in error.errors() for line in _lines(item)]
    raise UserError("\n".join(f"{file}: {line}" if file else line for line in lines))


def _lines(error: Any) -> list[str]:
    """Return the messages of one of pydantic's errors, with the path of the field as the user wrote it."""
    # pydantic puts the family of a task into the path, as the tag of the member of the union that it chose
    before = (None, *error["loc"])
    parts = zip(before, error["loc"], strict=False)
    path = ".".join(str(part) for last, part in parts if not (last == "task" and part in FAMILIES))
    if error["type"] == "extra_forbidden":
        return [path]
    message, value = error["msg"].removeprefix("Value error, "), error["input"]
    instead = f" (found {shown(value)})" if path and not isinstance(value, dict | list) else ""
    return [f"{path}: {line}{instead}" if path else line for line in message.split("\n")]


def _is_nested(data: Any) -> bool:
    """Whether a phase has the shape that its validator looks into; otherwise its fields report what is wrong."""
    if not isinstance(data, dict) or not isinstance(data.get("loss"), dict | None):
        return False
    techniques = data.get("techniques") or {}
    looked_into = ("prune", "exits", "distill")
    return isinstance(techniques, dict) and all(isinstance(techniques.get(name), dict | None) for name in looked_into)
