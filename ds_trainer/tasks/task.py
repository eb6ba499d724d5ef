"""The interface of a task: the data, the loss and the score of one family of problems.

A task knows nothing of techniques or DeepSpeed. Its data are `Examples`, which are tokenised once. A batch is collated
from the ids of its examples, so that the loop alone decides which rank sees which examples.

A plain task names the `columns` of its table, and implements `parse` (a record becomes texts and a label), `loss` and
`score`: `examples/ratings.py` is one. Reading, tokenising, the cache and its key, padding, and the parts that are held
out are common to all tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.models import classifiers, pretrained
from ds_trainer.models.pretrained import CLASSIFIER, TOKEN_CLASSIFIER, HeadKind, input_names, load_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.task_specs import LabelledSpec, TaskBase
from ds_trainer.tasks.data import (
    HELD_OUT,
    Array,
    ExampleIds,
    Examples,
    cached,
    fingerprint,
    hash_of,
    pack,
    part_of,
    source_split,
    spread,
)
from ds_trainer.tasks.records import GAPS, Record, Records, Row, table
from ds_trainer.tasks.scores import check_logits
from ds_trainer.tasks.whole_step import WholeStep

Unit = Literal["example", "label", "weight", "token"]
"""What a loss term is a mean over: the examples of a batch, their labels, their classes' weights, or their tokens.

All micro-batches have equally many examples, but different numbers of the other units. A term that does not depend on
the data, such as a penalty on weights, is the same in every micro-batch, and is treated as a mean over examples.
"""

_CHUNK = 1024
"""How many rows are tokenised at a time."""
PAD_LOGIT = -1e4
"""The logit of an entry that is no class, such as a padded position as the start of an answer; finite in any dtype."""


@dataclass(frozen=True)
class Batch:
    """A batch of examples: `inputs` go to the model, `labels` (in the task's own shape) to the loss.

    `ids` (rows,) are the indices of the examples in their `split`. `others` are inputs that this model does not take,
    but a teacher of another architecture may. `step` are the other examples of its optimizer step, for a loss that
    compares examples with each other.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    ids: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)
    split: str = "train"
    step: WholeStep | None = None

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
        return replace(self, inputs=inputs, labels=self.labels.to(device, non_blocking=True), others=others)


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
    """One family of problems.

    `source` is the model folder (or hub name) that the task is built for. Building the task and reading its splits are
    collective. A tokenizer without a padding token gets its end of text as one, in place.

    Spec: the class of the task's section in the recipe; only tasks of a plugin need it.
    head: the head that a model of this task has.
    columns: the columns of the table that a plain task reads.
    data: the module that reads the data in its place, as `Family.data` in `recipe/task_specs.py`.
    splits: the splits to evaluate on.
    held_out_split: the name of the split with training examples that no phase trains on; it takes a `LabelledSpec`.
    label_names: the names of the classes, in the model's order; empty where classes have no names.
    regression: whether `logits` are values to be compared by their difference, instead of scores of classes.
    multi_label: whether each column of `logits` is a class of its own that an example has or has not.
    vectors: whether `logits` are vectors, which mean something by their similarity to each other.
    by_query: whether `logits` are scores of documents; `labels` (rows, 2) are then whether it answers, and its query.
    logits_of: what a row of `logits` is for. "example": one example, whose columns are classes. "token": one example,
        whose columns are its tokens. "position": one unit "label" of an example, in their order.
    compares_examples: whether `loss` compares the examples of a step with each other, by their `logits`.
    loss_unit: what `loss` is a mean over.
    logits_unit: what a comparison of the `logits` of two models is a mean over.
    over_vocabulary: whether the classes of `logits` are the tokens of the vocabulary.
    inputs_vary: whether an example's inputs differ from one `draw` to the next.
    own_inputs: inputs that a model of `build_model` takes beyond those of its architecture.

    For the cache:

    family: the name of the family in the cache's key; by default the name of the task.
    token_columns: the dtypes of the columns of tokens that `encode` returns; with `COLUMN` an example has several rows.
    hashed_fields: the fields of the spec that decide on the tokenised examples; by default all that the spec adds.
    hashed_if_set: further ones, which came with a later version: unless they are set, the key is that of earlier ones.
    row_fields: the fields of the spec that decide which rows are read.
    """

    Spec: ClassVar[type[TaskBase]] = TaskBase
    spec: Any
    head: HeadKind
    columns: ClassVar[tuple[str, ...]] = ()
    data: ClassVar[Any] = None
    held_out_split: ClassVar[str] = HELD_OUT
    label_names: tuple[str, ...] = ()
    regression: bool = False
    multi_label: bool = False
    vectors: ClassVar[bool] = False
    by_query: ClassVar[bool] = False
    compares_examples: bool = False
    logits_of: ClassVar[Literal["example", "token", "position"]] = "example"
    loss_unit: Unit = "example"
    logits_unit: Unit = "example"
    over_vocabulary: ClassVar[bool] = False
    inputs_vary: bool = False
    own_inputs: ClassVar[frozenset[str]] = frozenset()
    family: ClassVar[str] = ""
    # the token types are kept even if the model takes none, since a teacher of another family may take them
    token_columns: ClassVar[Mapping[str, Any]] = {"input_ids": np.int32, "token_type_ids": np.uint8}
    hashed_fields: ClassVar[tuple[str, ...]] = ()
    hashed_if_set: ClassVar[tuple[str, ...]] = ()
    row_fields: ClassVar[tuple[str, ...]] = ("name",)

    def __init__(self, spec: Any, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        self.spec, self.tokenizer, self.cache_dir = spec, tokenizer, cache_dir
        self.splits: tuple[str, ...] = spec.scored_splits
        self.config = load_config(source, self.head)
        self._input_names = input_names(self.config, self.head)
        self.pad_token_id = pretrained.pad_token_id(tokenizer)
        self._examples: dict[str, Examples] = {}
        self._keys: dict[str, str] = {}
        self._read: dict[str, tuple[Records[Any], list[Row[Any]]]] = {}

    # The data, as it is read: these need no instance, so that mistakes are known before torch is loaded

    @classmethod
    def records(cls, spec: Any, split: str) -> Records[Any]:
        """Return the records of a split of the source; by default of a table, those with gaps being left out."""
        return table(spec, split, cls.columns, partial(cls.parse, spec), GAPS)

    @staticmethod
    def parse(spec: Any, record: Record) -> Any:
        """Return one or two texts, as a tuple, and the label; a ValueError becomes a mistake with the line's place."""
        raise NotImplementedError

    @classmethod
    def training_texts(cls, spec: Any) -> list[str]:
        """Return every text of the training split."""
        return [text for row in cls.records(spec, "train").rows() for text in row.value[0]]

    # What a family implements

    @abstractmethod
    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the scalar fp32 loss, the mean over the `loss_unit`s of the micro-batch; 0 where it has none."""

    @abstractmethod
    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Compute the task's metrics over all examples of a split; UserError for logits that are not finite."""

    # What a family may change

    def encode(self, rows: Sequence[Row[Any]]) -> dict[str, Any]:
        """Return the examples of some rows by columns: `token_columns`, lists of ids, and fields, arrays of values.

        A row may become several examples, or none. By default it is its texts, cut at `max_seq_length`, and `labels`.
        """
        texts, labels = zip(*(row.value for row in rows), strict=True)
        return self.tokens(*zip(*texts, strict=True)) | {"labels": self.label_array(labels)}

    def tokens(self, *texts: Sequence[str]) -> dict[str, Any]:
        """Return the columns of tokens of some texts, or of the pairs of two lists, cut at `max_seq_length`."""
        length, both = self.spec.max_seq_length, map(list, texts)
        encoded = self.tokenizer(*both, truncation=True, max_length=length, return_token_type_ids=True)
        return {name: encoded[name] for name in Task.token_columns}

    def label_array(self, labels: Sequence[Any]) -> Array:
        """Return the labels of some rows as an array."""
        return np.array(labels)

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load the model of `folder` (or a hub name) with this task's head, in fp32, on the CPU.

        The classes of a classifier are `label_names`, in this order.
        """
        if self.head in (CLASSIFIER, TOKEN_CLASSIFIER):
            model: Any = classifiers.load_model(folder, self.head, self.label_names, self.pad_token_id)
        else:
            model = pretrained.load_with_head(folder, self.head)
        if self.multi_label:
            model.config.problem_type = "multi_label_classification"
        pretrained.check_fits(model, self.tokenizer, self.spec.max_seq_length)
        return model

    def adapt(self, model: nn.Module) -> nn.Module:
        """Let a model that was made of another one run as those that `build_model` loads, in place."""
        return model

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        """Make a batch on the CPU, padded to its longest example.

        Random inputs (the masks of MLM) are a function of the example and of `draw`, which is 0 at evaluation.
        """
        ids = np.asarray(ids, dtype=np.int64)
        inputs, others = self.padded_inputs(*examples.batch_rows(ids))
        labels = examples.fields["labels"][ids]
        labels = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        return Batch(inputs, torch.from_numpy(labels), torch.from_numpy(ids), others)

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return logits, each (rows, classes). `logits_of` says what a row is; `PAD_LOGIT` marks what is no class."""
        return (out.logits,)

    def timed_inputs(self, examples: Examples, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return a batch of as many rows as there are ids, of these examples, by which a model is timed."""
        sequences, rows = examples.batch_rows(np.asarray(ids))
        if sequences is examples:
            return self.collate(examples, ids).inputs
        return self.padded_inputs(sequences, rows[: len(ids)])[0]

    def save(self, folder: Path) -> None:  # noqa: B027 - most tasks have none
        """Write the files that belong beside a model of this task into its folder."""

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the model's answer to each example by its id, so that an example which pads a shard counts once.

        By default it is the example's logits, (classes,) fp32 in numpy.
        """
        return dict(zip(batch.ids.tolist(), out.logits.detach().float().cpu().numpy(), strict=True))

    def stacked(self, split: str, answers: Mapping[int, Any]) -> Array:
        """Stack answers that are arrays, (n, ...), by their ids; UserError where one is not finite."""
        values = np.stack([answers[id] for id in range(len(answers))])
        check_logits(split, np.isfinite(values).reshape(len(values), -1).all(axis=1).tolist())
        return values

    def reads_otherwise(self, folder: str | Path) -> str:
        """Return in words how the model of a folder reads the same tokens otherwise than this task's; "" by default."""
        return ""

    def reader_spec(self, folder: str | Path) -> Any:
        """Return the spec by which the model of a folder reads the same texts in its own way."""
        return self.spec

    def output_of(self, reader: Task, predict: Predict, batch: Batch) -> Any:
        """Return the output of a model with the tokens of `reader` for a batch, laid out as that of this task."""
        theirs = reader.examples(batch.split)
        assert len(theirs) == len(self.examples(batch.split)), "one row is one example, whatever the tokenizer"
        return predict(reader.collate(theirs, batch.ids.numpy()).to(batch.mask.device))

    def decisions(self, answer: Any) -> Sequence[Any]:
        """Return what a model decides by an answer; two models are compared by their decisions."""
        if self.regression:
            return list(answer)
        return [tuple(answer > 0)] if self.multi_label else [answer.argmax()]

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Return the share of the decisions about the split's examples which two models have in common."""
        decided = ((self.decisions(answers[id]), self.decisions(others[id])) for id in answers)
        same = [one == other for ours, theirs in decided for one, other in zip(ours, theirs, strict=True)]
        return sum(same) / len(same)

    def limit(self, split: str) -> int | None:
        """Return the largest number of rows of the split to use; None where there is no limit, as for held-out rows."""
        if split == HELD_OUT:
            return None
        return self.spec.max_train_samples if split == "train" else self.spec.max_eval_samples

    def counts(self, examples: Examples, ids: ExampleIds) -> dict[Unit, float]:
        """Return how often each unit but "example" occurs in these examples; the same for every `draw`.

        The counts come from the memory of the host. So each rank can sum them up over the global batch before its first
        forward, without waiting for another rank or for the device.
        """
        return {"token": int(examples.lengths[ids].sum()), "label": len(examples.batch_rows(ids)[1])}

    def check_trained(self, folder: str | Path) -> None:
        """Raise UserError if a model has no trained head for this task, since its score would mean nothing."""
        if self.head in (CLASSIFIER, TOKEN_CLASSIFIER):
            classifiers.check_trained(folder, self.head, self.label_names, self.spec.name)
        elif not self.head.trained_in(load_config(folder, self.head)):
            raise UserError(f"{folder} is no trained {self.head.name}: fine-tune it first")

    def never_answered(self, split: str, answers: Mapping[int, Any]) -> dict[str, int]:
        """Return the classes that examples of a split have and a model never gives, with the number of examples."""
        return {}

    def further_scores(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return scores of the model itself beside those of `score`, which its views (exits, a teacher) have, too."""
        return {}

    def summary(self, split: str) -> str:
        """Return the line that rank 0 logs when it first uses a split, also where the examples come from the cache."""
        examples = self.examples(split)
        read = examples.notes.get("read", f"{len(examples):,} examples")  # caches of older versions have no such note
        return f"{self.spec.name} {split}: {self.source(split).origin}: {read}"

    def description(self, rows: Sequence[Row[Any]], examples: Examples) -> str:
        """Say in words which examples the rows of a split became."""
        lengths = examples.batch_rows(np.arange(len(examples)))[0].lengths
        of = f" of {len(lengths):,} sequences" * (len(lengths) != len(examples))
        at_limit = int((lengths >= self.spec.max_seq_length).sum())
        return f"{len(examples):,} examples{of}, {lengths.mean():.1f} tokens on average, {at_limit:,} at max_seq_length"

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """Return files by name, text or JSON values, that users expect beside the scores, such as predictions."""
        return {}

    def hashed_values(self) -> list[Any]:
        """Return further JSON values that decide on the tokenised examples."""
        return []

    # What all families share

    def source(self, split: str) -> Records[Any]:
        """Return the records from which a split's rows are taken, not yet read."""
        records: Records[Any] = (self.data or self).records(self.spec, source_split(self.spec, split))
        return records

    def read(self, split: str) -> tuple[Records[Any], list[Row[Any]]]:
        """Return the records of a split, and at most its limit of their rows; the calling rank alone reads them."""
        if split not in self._read:
            records = self.source(split)
            part = part_of(self.spec, split, list(records.rows()), records.origin)
            chosen = spread(len(part), self.limit(split))
            self._read[split] = records, [part[place]._replace(number=number) for number, place in enumerate(chosen)]
        return self._read[split]

    def tokenised(self, split: str) -> Examples:
        """Read and tokenise a split. A `UserError` names the mistakes in its files.

        `notes["read"]` says what was read and what was left out, for `summary`. It does not name the file, since
        another one with the same content has the same cache.
        """
        records, rows = self.read(split)
        shown = progress(rows, "tokenising", records.unit or records.entry)
        examples = pack(map(self.encode, iter(lambda: list(islice(shown, _CHUNK)), [])), self.token_columns)
        if not len(examples):
            raise UserError(f"{records.origin}: the tokenizer makes no token of it")
        if not examples.lengths.all():
            place = records.place(rows[int(examples.lengths.argmin())].place)
            raise UserError(f"{place}: the text is empty, and the tokenizer adds nothing to it")
        if split == "train":
            del self._read[split]  # no score needs these rows again, and they may fill the memory
        return replace(examples, notes={"read": f"{records.summary()}; {self.description(rows, examples)}"})

    def examples(self, split: str) -> Examples:
        """Return the tokenised split, memory-mapped from the cache. The first call for a split is collective."""
        if split not in self._examples:
            self._examples[split] = cached(self.cache_dir, self.key(split), lambda: self.tokenised(split))
            if distributed.is_main():  # other hosts may lack the source
                distributed.info_once(self.summary(split))
        return self._examples[split]

    def key(self, split: str) -> str:
        """Return rank 0's hash of all that a tokenised split depends on. The first call for a split is collective."""
        if split not in self._keys:  # it may read the whole source
            self._keys[split] = distributed.on_main(partial(self._fingerprint, split))
        return self._keys[split]

    def _fingerprint(self, split: str) -> str:
        fields = type(self.spec).model_fields
        names = [*(self.hashed_fields or ("name", *(name for name in fields if name not in LabelledSpec.model_fields)))]
        names += [name for name in self.hashed_if_set if getattr(self.spec, name) != fields[name].default]
        if self.spec.held_out_share and source_split(self.spec, split) == "train":
            names.append("held_out")
        settings = {name: getattr(self.spec, name) for name in names}
        more = [settings, self.limit(split), *self.hashed_values(), pretrained.tokenizer_state(self.tokenizer)]
        return fingerprint(self.family or self.spec.name, split, self.source(split).fingerprint(), *more)

    def held_out_key(self) -> str:
        """Return a hash that identifies the held-out examples in every run, "" if none; one rank can call it alone.

        Unlike a cache's key it does not depend on `CACHE_VERSION`, since it is stored in model folders.
        """
        if not self.spec.held_out_share:
            return ""
        fields = [getattr(self.spec, name) for name in (*self.row_fields, "held_out")]
        return hash_of([self.source("train").fingerprint(), *fields])

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
