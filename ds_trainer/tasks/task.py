"""What a task is: data, loss and score of one family of problems.

A task knows nothing of techniques, ranks or DeepSpeed. Its data are `Examples`, tokenised once; batches are
collated from positions, so that the loop alone decides which rank sees what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ds_trainer.data import Examples, Positions


@dataclass(frozen=True)
class Batch:
    """`inputs` go to the model's forward, `labels` and `ids` (rows,) stay here; ids are places in the split."""

    inputs: dict[str, Tensor]
    labels: Tensor
    ids: Tensor

    @property
    def tokens(self) -> int:
        """Positions the model computes, padding included."""
        return self.inputs["input_ids"].numel()

    def to(self, device: torch.device) -> Batch:
        inputs = {name: value.to(device, non_blocking=True) for name, value in self.inputs.items()}
        return Batch(inputs, self.labels.to(device, non_blocking=True), self.ids)


class Task(ABC):
    """One family of problems; one subclass a family."""

    tokenizer: Any
    splits: tuple[str, ...] = ("validation",)
    """The splits to evaluate on."""

    @abstractmethod
    def build_model(self, folder: str | Path) -> nn.Module:
        """Load the model of `folder` (or hub name) with this task's head, in fp32, on the CPU."""

    @abstractmethod
    def check_trained(self, folder: str | Path) -> None:
        """Refuse, by ValueError, a model that has no trained head for this task: its score would mean nothing."""

    @abstractmethod
    def hidden_size(self, folder: str | Path) -> int:
        """The model's width, known without loading it."""

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """The tokenised split, memory-mapped from the cache."""

    @abstractmethod
    def collate(self, examples: Examples, positions: Sequence[int] | Positions) -> Batch:
        """A batch on the CPU, padded to its longest row."""

    @abstractmethod
    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Scalar fp32 loss, mean over the micro-batch."""

    @abstractmethod
    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Each (rows, classes)."""

    @abstractmethod
    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """What the model says of each example, by its id: examples that pad a shard fall out."""

    @abstractmethod
    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """The task's metrics over all examples of the split."""
