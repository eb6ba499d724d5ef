"""The interface of a task: the data, the loss and the score of one family of problems.

A task knows nothing of techniques or DeepSpeed. Its data are `Examples`, which are tokenised once. A batch is collated
from the ids of its examples, so that the loop alone decides which rank sees which examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ds_trainer.config.task_specs import TaskBase
from ds_trainer.models.pretrained import HeadKind, input_names, load_config, pad_token_id, tokenizer_state
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import ExampleIds, Examples, cached, fingerprint

Unit = Literal["example", "label", "weight", "token"]
"""What a loss term is a mean over: the examples of a batch, their labels, their classes' weights, their tokens, or the
pairs of tokens of which one attends to the other.

All micro-batches have equally many examples, but different numbers of the other units. A term that does not depend on
the data, such as a penalty on weights, is the same in every micro-batch, and is treated as a mean over examples.
"""

PAD_LOGIT = -1e4
"""The logit of an entry that is no class, such as a padded position as the start of an answer; finite in any dtype."""


@dataclass(frozen=True)
class Batch:
    """A batch of examples: `inputs` go to the model, `labels` (in the task's own shape) to the loss.

    `ids` (rows,) are the indices of the examples in their split. `others` are inputs that this model does not take, but
    a teacher of another architecture may.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    ids: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of positions that the model computes, padding included."""
        return self.inputs["input_ids"].numel()

    @property
    def mask(self) -> Tensor:
        """(rows, length), 1 where there is a token, even if the model takes no mask."""
        return (self.inputs | self.others)["attention_mask"]

    def to(self, device: torch.device) -> Batch:
        """Copy all tensors but `ids` to a device."""
        inputs, others = (
            {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
            for tensors in (self.inputs, self.others)
        )
        return Batch(inputs, self.labels.to(device, non_blocking=True), self.ids, others)


Predict = Callable[[Batch], Any]
"""A way to run a model: it maps a batch to the model's output."""


@dataclass(frozen=True)
class Forward:
    """One micro-batch, the model's output for it, and the optimizer step that it belongs to.

    `shares` are the weights of means over this micro-batch: for each unit, its count in this micro-batch, divided by
    the average count over the step's micro-batches on all ranks. A missing unit has the weight 1.
    """

    batch: Batch
    out: Any
    step: int
    shares: Mapping[Unit, float] = field(default_factory=dict)


class Task(ABC):
    """One family of problems. A subclass sets `head`, and implements the abstract methods.

    `source` is the model folder (or hub name) that the task is built for. Building the task and reading its splits are
    collective. A tokenizer without a padding token gets its end of text as one, in place.

    head: the head that a model of this task has.
    splits: the splits to evaluate on.
    held_out_split: the name of the split with training examples that no phase trains on; it takes a `LabelledSpec`.
    label_names: the names of the classes, in the model's order; empty where classes have no names.
    regression: whether `logits` are values to be compared by their difference, instead of scores of classes.
    multi_label: whether each column of `logits` is a class of its own that an example has or has not.
    logits_of: what a row of `logits` is for. "example": one example, whose columns are classes. "token": one example,
        whose columns are its tokens. "position": one entry of `head_positions` among the inputs or the
        others of a batch.
    loss_unit: what `loss` is a mean over.
    logits_unit: what a comparison of the `logits` of two models is a mean over.
    Spec: the class of the task's section in the recipe; only tasks of a plugin need it.
    over_vocabulary: whether the classes of `logits` are the tokens of the vocabulary.
    inputs_vary: whether an example's inputs differ from one `draw` to the next.
    own_inputs: inputs that a model of `build_model` takes beyond those of its architecture.
    """

    Spec: ClassVar[type[TaskBase]] = TaskBase
    spec: Any
    head: HeadKind
    splits: tuple[str, ...] = ("validation",)
    held_out_split: ClassVar[str] = "held_out"
    label_names: tuple[str, ...] = ()
    regression: bool = False
    multi_label: bool = False
    logits_of: ClassVar[Literal["example", "token", "position"]] = "example"
    loss_unit: Unit = "example"
    logits_unit: Unit = "example"
    over_vocabulary: ClassVar[bool] = False
    inputs_vary: bool = False
    own_inputs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, spec: Any, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        self.spec, self.tokenizer, self.cache_dir = spec, tokenizer, cache_dir
        self.config = load_config(source, self.head)
        self._input_names = input_names(self.config, self.head)
        self.pad_token_id = pad_token_id(tokenizer)
        self._examples: dict[str, Examples] = {}
        self._keys: dict[str, str] = {}

    # What a family implements

    @abstractmethod
    def fingerprint(self, split: str) -> str:
        """Return a hash of everything on this host that determines the result of `tokenised`."""

    @abstractmethod
    def tokenised(self, split: str) -> Examples:
        """Read and tokenise a split. A `UserError` names the mistakes in its files.

        `notes["read"]` says what was read and what was left out, for `summary`. It does not name the file, since
        another one with the same content has the same cache.
        """

    @abstractmethod
    def build_model(self, folder: str | Path) -> nn.Module:
        """Load the model of `folder` (or a hub name) with this task's head, in fp32, on the CPU."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """Let a model that was made of another one run as those that `build_model` loads, in place."""
        return model

    @abstractmethod
    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        """Make a batch on the CPU, padded to its longest example.

        Random inputs (the masks of MLM) are a function of the example and of `draw`, which is 0 at evaluation.
        """

    @abstractmethod
    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the scalar fp32 loss, the mean over the `loss_unit`s of the micro-batch; 0 where it has none."""

    @abstractmethod
    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return logits, each (rows, classes). `logits_of` says what a row is; `PAD_LOGIT` marks what is no class."""

    @abstractmethod
    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the model's answer to each example by its id, so that an example which pads a shard counts once."""

    @abstractmethod
    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Compute the task's metrics over all examples of a split; UserError for logits that are not finite."""

    # What a family may change

    def limit(self, split: str) -> int | None:
        """Return the largest number of examples of the split to use; None for all, as of those that are held out."""
        if split == self.held_out_split:
            return None
        return self.spec.max_train_samples if split == "train" else self.spec.max_eval_samples

    def counts(self, examples: Examples, ids: ExampleIds) -> dict[Unit, float]:
        """Return how often each unit but "example" occurs in these examples; the same for every `draw`.

        The counts come from the memory of the host. So each rank can sum them up over the global batch before its first
        forward, without waiting for another rank or for the device.
        """
        return {"token": int(examples.lengths[ids].sum())}

    def check_trained(self, folder: str | Path) -> None:
        """Raise UserError if a model has no trained head for this task, since its score would mean nothing."""
        if not self.head.trained_in(load_config(folder, self.head)):
            raise UserError(f"{folder} is no trained {self.head.name}: fine-tune it first")

    def held_out_key(self) -> str:
        """Return a hash that identifies the held-out examples in every run, "" if none; one rank can call it alone."""
        return ""

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Return the share of the split's examples to which two models give the same answer."""
        return sum(answers[id] == others[id] for id in answers) / len(answers)

    def constant_answer(self, split: str, answers: Mapping[int, Any]) -> str | None:
        """Return the answer that a model gives to every example of a split although their labels differ, if it does."""
        return None

    def never_answered(self, split: str, answers: Mapping[int, Any]) -> dict[str, int]:
        """Return the classes that examples of a split have and a model never gives, with the number of examples."""
        return {}

    def further_scores(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return scores of the model itself beside those of `score`, which its views (exits, a teacher) have, too."""
        return {}

    @property
    def decided_on(self) -> str | None:
        """The split whose answers `decide` gets before a newly trained model is scored; None if there is none."""
        return None

    def decide(self, answers: Mapping[int, Any]) -> None:  # noqa: B027 - most tasks have nothing to settle
        """Settle, on rank 0, what the scores and the exported folder depend on, such as a threshold."""

    def restore(self, scores: Mapping[str, float]) -> None:  # noqa: B027 - as above
        """Take over what `decide` had settled for a checkpoint with these scores."""

    def summary(self, split: str) -> str:
        """Return the line that rank 0 logs when it first uses a split, also where the examples come from the cache."""
        examples = self.examples(split)
        read = examples.notes.get("read") or f"{len(examples):,} examples"
        return ": ".join(filter(None, (f"{self.spec.name} {split}", self.origin(split), read)))

    def origin(self, split: str) -> str:
        """Return the file, or whatever else, that a split is read from; only rank 0 asks."""
        return ""

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """Return files by name, text or JSON values, that users expect beside the scores, such as predictions."""
        return {}

    # What all families share

    def examples(self, split: str) -> Examples:
        """Return the tokenised split, memory-mapped from the cache. The first call for a split is collective."""
        if split not in self._examples:
            self._examples[split] = cached(self.cache_dir, self.key(split), lambda: self.tokenised(split))
            if distributed.is_main():  # other hosts may lack the source
                distributed.info_once(self.summary(split))
        return self._examples[split]

    def cache_key(self, family: str, split: str, source: str, fields: Sequence[str], *more: Any) -> str:
        """Return a hash of the source's hash, these fields of the spec, the limit, the tokenizer and more values."""
        settings = {name: getattr(self.spec, name) for name in fields}
        return fingerprint(family, split, source, settings, self.limit(split), *more, tokenizer_state(self.tokenizer))

    def key(self, split: str) -> str:
        """Return rank 0's fingerprint of a split on every rank. The first call for a split is collective."""
        if split not in self._keys:  # it may read the whole source
            self._keys[split] = distributed.on_main(lambda: self.fingerprint(split))
        return self._keys[split]

    def padded_inputs(self, examples: Examples, ids: ExampleIds) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return examples as padded tensors: those that the task's model takes, and the others."""
        columns = examples.padded(ids, {"input_ids": self.pad_token_id}, self.spec.pad_to_multiple_of)
        others = {name: torch.from_numpy(column) for name, column in columns.items()}
        return {name: others.pop(name) for name in list(others) if name in self._input_names}, others

    def inputs_for(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the inputs of a batch that another model of this task takes, such as a teacher."""
        names = input_names(model.config, self.head) | self.own_inputs
        return {name: value for name, value in (batch.inputs | batch.others).items() if name in names}

    @property
    def hidden_size(self) -> int:
        """The model's width, for the engine file's "auto" bucket sizes."""
        return int(self.config.get_text_config().hidden_size)


def check_finite(split: str, finite: Sequence[bool]) -> None:
    """Raise UserError unless `finite`, which has one entry for each example, is true throughout."""
    broken = len(finite) - sum(finite)
    if broken:
        raise UserError(
            f"{split}: the model gives logits that are not finite (NaN or infinity) for {broken:,} of {len(finite):,} "
            f"examples, which cannot be scored: train again with a lower learning rate, or in bf16 instead of fp16"
        )
