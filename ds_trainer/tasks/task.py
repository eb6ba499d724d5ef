"""What a task is: data, loss and score of one family of problems.

A task knows nothing of techniques, ranks or DeepSpeed. Its data are `Examples`, tokenised once; batches are
collated from positions, so that the loop alone decides which rank sees what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.config.task_specs import TaskSpec
from ds_trainer.models.pretrained import HeadKind, input_names, load_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Examples, PaddedRows, cached
from ds_trainer.tasks.losses import PAD_LOGIT

__all__ = ["PAD_LOGIT", "Batch", "Task", "Unit"]

if TYPE_CHECKING:
    from ds_trainer.tasks.data import Positions


Unit = Literal["example", "label", "token", "pair"]
"""What the mean of a loss term is taken over: the examples of a batch, the places that carry a label, the attended
positions, or the pairs of positions of which one attends to the other.

Micro-batches have equally many examples, and different numbers of all else. A term that is no mean over data, such as a
penalty on weights, is alike in every micro-batch and counts as one over examples.
"""


@dataclass(frozen=True)
class Batch:
    """`inputs` go to the model; `labels` (as the task needs them) and `ids` (rows,), places in the split, stay here.

    `others` are inputs that this model does not take and another model of the same examples may.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    ids: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Positions the model computes, padding included."""
        return self.inputs["input_ids"].numel()

    @property
    def mask(self) -> Tensor:
        """(rows, length), 1 where there is a token; also where the model takes no mask."""
        return (self.inputs | self.others)["attention_mask"]

    def to(self, device: torch.device) -> Batch:
        inputs, others = (
            {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
            for tensors in (self.inputs, self.others)
        )
        return Batch(inputs, self.labels.to(device, non_blocking=True), self.ids, others)


Predict = Callable[[Batch], Any]
"""A way to run a model: batch -> model output."""


@dataclass(frozen=True)
class Forward:
    """One micro-batch, what the model made of it, and the optimizer step it belongs to.

    `shares` say by unit how many there are in the micro-batch, over the mean of all micro-batches of the step on all
    ranks; a unit that is not named is in equal parts in all of them.
    """

    batch: Batch
    out: Any
    step: int
    shares: Mapping[Unit, float] = field(default_factory=dict)


class Task(ABC):
    """One family of problems; one subclass a family."""

    spec: TaskSpec
    tokenizer: Any
    head: HeadKind
    cache_dir: Path
    splits: tuple[str, ...] = ("validation",)
    """The splits to evaluate on."""
    held_out_split: ClassVar[str] = "held_out"
    """The split of training examples that no phase trains on; only tasks of labelled text have it."""
    label_names: tuple[str, ...] = ()
    """The classes in the model's order, where they have names."""
    regression: bool = False
    """Whether `logits` are values to be compared by their difference, not scores of classes."""
    logits_of: ClassVar[Literal["example", "token", "position"]] = "example"
    """What a row of `logits` is: an example; an example, and its columns are the tokens; or a place of
    `inputs["head_positions"]`."""
    loss_unit: ClassVar[Unit] = "example"
    """What `loss` is a mean over."""
    logits_unit: Unit = "example"
    """What a comparison of the `logits` of two models is a mean over."""
    inputs_vary: bool = False
    """Whether an example's inputs differ from one `draw` to the next."""

    def __init__(self, tokenizer: Any, head: HeadKind, cache_dir: Path) -> None:
        self.tokenizer, self.head, self.cache_dir = tokenizer, head, cache_dir
        self._examples: dict[str, Examples] = {}

    def examples(self, split: str) -> Examples:
        """The tokenised split, memory-mapped from the cache. The first call for a split is collective."""
        if split not in self._examples:
            self._examples[split] = cached(self.cache_dir, self.key(split), lambda: self.tokenised(split))
        return self._examples[split]

    def key(self, split: str) -> str:
        """What tells this tokenised split from every other, on every rank; collective."""
        return distributed.on_main(lambda: self.fingerprint(split))

    def counts(self, examples: Examples, positions: Positions) -> dict[Unit, int]:
        """How many of each unit but "example" these examples bring to a batch, whatever `draw` it is of.

        It is found from what every host has in memory, so that each rank knows the sums over the global batch before
        its first forward, without asking another rank or the device.
        """
        lengths = examples.lengths[positions]
        return {"token": int(lengths.sum()), "pair": int(np.square(lengths).sum())}

    def limit(self, split: str) -> int | None:
        """How many examples of the split to use at most."""
        return self.spec.max_train_samples if split == "train" else self.spec.max_eval_samples

    def hidden_size(self, folder: str | Path) -> int:
        """The model's width, known without loading it, for the engine file's "auto" bucket sizes."""
        return int(load_config(folder, self.head).get_text_config().hidden_size)

    def check_trained(self, folder: str | Path) -> None:
        """Refuse, by ValueError, a model that has no trained head for this task: its score would mean nothing."""
        if not self.head.trained_in(load_config(folder, self.head)):
            raise UserError(f"{folder} is no trained {self.head.name}: fine-tune it first")

    def held_out_key(self) -> str:
        """What tells the held-out examples from all others, whatever reads them; empty where there are none.

        Not collective: this rank alone reads the files.
        """
        return ""

    def inputs_for(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """The batch's inputs as another model of this task takes them, a teacher of another family say."""
        names = input_names(model.config, self.head) | self.own_inputs
        return {name: value for name, value in (batch.inputs | batch.others).items() if name in names}

    own_inputs: ClassVar[frozenset[str]] = frozenset()
    """Inputs that a model of `build_model` takes beyond those of its architecture."""

    @abstractmethod
    def fingerprint(self, split: str) -> str:
        """Hash of all that decides what `tokenised` gives, on this host."""

    @abstractmethod
    def tokenised(self, split: str) -> Examples:
        """Read and tokenise the split; ValueError tells what is wrong with its files."""

    @abstractmethod
    def build_model(self, folder: str | Path) -> nn.Module:
        """Load the model of `folder` (or hub name) with this task's head, in fp32, on the CPU."""

    @abstractmethod
    def collate(self, examples: Examples, positions: Sequence[int] | Positions, draw: int = 0) -> Batch:
        """A batch on the CPU, padded to its longest row.

        What is random in the inputs (the masks of MLM) is a function of the example and of `draw`, 0 at evaluation.
        """

    @abstractmethod
    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Scalar fp32 loss, the mean over the `loss_unit`s of the micro-batch; 0 where it has none."""

    @abstractmethod
    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Each (rows, classes), `PAD_LOGIT` where a place is no class. Rows need not be examples."""

    @abstractmethod
    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """What the model says of each example, by its id: examples that pad a shard fall out."""

    @abstractmethod
    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """The task's metrics over all examples of the split; ValueError where a model's logits are not finite."""

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Share of the split's examples of which two models say the same."""
        return sum(answers[id] == others[id] for id in answers) / len(answers)

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """JSON files, by name, that a user of this task expects beside its score: predictions."""
        return {}


def model_inputs(padded: PaddedRows, taken: Container[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The columns and the attention mask as tensors: those that a model takes by their names, and the others."""
    columns = {name: torch.from_numpy(column) for name, column in padded.columns.items()}
    columns["attention_mask"] = torch.from_numpy(padded.mask)
    others = {name: columns.pop(name) for name in list(columns) if name not in taken}
    return columns, others


def check_finite(split: str, finite: Sequence[bool]) -> None:
    """Refuse answers that come of logits that are not finite: one for each example, false where they are not."""
    broken = len(finite) - sum(finite)
    if broken:
        raise UserError(
            f"{split}: the model gives logits that are not finite (NaN or infinity) for {broken:,} of {len(finite):,} "
            f"examples, so that there is nothing to score: its weights are broken, or too large for its precision; "
            f"train again with a lower learning rate, or in bf16 instead of fp16"
        )
