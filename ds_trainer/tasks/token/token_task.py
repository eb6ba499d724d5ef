"""Token classification: a tag for every word, such as those of named entities.

An example is a window of a sentence: the words beyond `max_seq_length` go into further windows. A word has its loss
and its answer at its first piece; with `label_all_tokens` all its pieces have a loss. A word without a piece, such as
a zero-width space, is in no window, and its answer is O. `token_data.py` reads the sentences, and `entities.py` scores
them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.models import classifiers
from ds_trainer.models.pretrained import TOKEN_CLASSIFIER
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import TokenSpec
from ds_trainer.tasks.data import ExampleIds, Examples
from ds_trainer.tasks.held_out import source_split
from ds_trainer.tasks.records import Records, Row
from ds_trainer.tasks.task import Batch, Task, Unit, check_finite
from ds_trainer.tasks.token import entities, token_data
from ds_trainer.tasks.token.entities import OUTSIDE
from ds_trainer.tasks.token.token_data import Sentence

_COLUMNS = {"input_ids": np.int32, "tag": np.int32, "word": np.int32}
"""The columns of tokens. `tag` is 1 + the class of a labelled token. `word` is 1 + the place in the sentence of the
word that begins here. Elsewhere both are 0."""

_Token = tuple[int, int, int]
"""A token by these columns."""


class TokenTask(Task):
    """Tags of words. Labels are (n, 2) int64, a row for each labelled token, at `others["head_positions"]`: its class,
    and 1 where it is the first piece of a word."""

    spec: TokenSpec
    head = TOKEN_CLASSIFIER
    logits_of: ClassVar[Literal["example", "token", "position"]] = "position"
    loss_unit: Unit = "label"
    logits_unit: Unit = "label"
    family = "token"
    token_columns = _COLUMNS
    hashed_fields = ("name", "tokens_column", "tags_column", "label_all_tokens", "max_seq_length")
    hashed_if_set = ("word_column", "tag_column")
    data: ClassVar[Any] = token_data

    def __init__(self, spec: TokenSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(spec, tokenizer, source, cache_dir)
        head = classifiers.trained_head(self.config, TOKEN_CLASSIFIER)
        tags = classifiers.class_names(spec, head, partial(_tags_in, spec))
        self.label_names = classifiers.label_order(tags, head)
        self.kinds = entities.kinds_of(self.label_names)

    def source(self, split: str) -> Records[Sentence]:
        return token_data.records(self.spec, source_split(self.spec, split), self.label_names)

    def sentences(self, split: str) -> list[Sentence]:
        """Return the split's sentences, at most its limit. The first call reads the file, on the calling rank alone."""
        return [row.value for row in self.read(split)[1]]

    def hashed_values(self) -> list[Any]:
        return [self.label_names]

    def summary(self, split: str) -> str:
        if self.kinds:
            return super().summary(split)
        tags = listed([name for name in self.label_names if name != OUTSIDE][:3])
        return (
            f"{super().summary(split)}; its tags, such as {tags}, name no entities, which are written B-person and "
            f"I-person: the score is the accuracy of tags alone"
        )

    def description(self, rows: Sequence[Row[Sentence]], examples: Examples) -> str:
        words, tagged = sum(len(row.value.words) for row in rows), int((examples.tokens["word"] > 0).sum())
        return (
            f"{words:,} words of {len(rows):,} sentences in {len(examples):,} windows, "
            f"{examples.lengths.mean():.1f} tokens on average; the tokenizer makes no token of {words - tagged:,} words"
        )

    def counts(self, examples: Examples, ids: ExampleIds) -> dict[Unit, float]:
        return super().counts(examples, ids) | {"label": int(examples.fields["labels"][ids].sum())}

    def encode(self, rows: Sequence[Row[Sentence]]) -> dict[str, Any]:
        """Return windows; the fields are the number of labelled tokens in each, and the index of its sentence."""
        windows, owners = list[list[_Token]](), list[int]()
        pieces_of, before, behind = self._pieces({word for row in rows for word in row.value.words})
        room = self.spec.max_seq_length - len(before) - len(behind)
        for row in rows:
            for window in self._windows(row.value, pieces_of, room):
                windows.append([*before, *window, *behind])
                owners.append(row.number)
        labels = [sum(label > 0 for _, label, _ in window) for window in windows]
        columns = {
            name: [[token[place] for token in window] for window in windows] for place, name in enumerate(_COLUMNS)
        }
        return columns | {"labels": np.array(labels, np.int32), "sentence": np.array(owners, np.int32)}

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        ids = np.asarray(ids, dtype=np.int64)
        inputs, others = self.padded_inputs(examples, ids)
        tags, words = others.pop("tag").flatten(), others.pop("word").flatten()
        positions = tags.nonzero()[:, 0]
        labels = torch.stack([tags[positions] - 1, (words[positions] > 0).long()], 1)
        return Batch(inputs, labels, torch.from_numpy(ids), others | {"head_positions": positions})

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy over the labelled tokens of the micro-batch."""
        (logits,) = self.logits(out, batch)
        return F.cross_entropy(logits.float(), batch.labels[:, 0], reduction="sum") / max(1, len(batch.labels))

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return (labelled tokens, classes)."""
        return (out.logits.flatten(0, 1)[batch.others["head_positions"]],)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the predicted classes of the words that begin in each window; -1 where a logit is not finite."""
        (logits,) = self.logits(out, batch)
        first = batch.labels[:, 1] > 0
        predicted = torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)[first].cpu()
        rows = (batch.others["head_positions"][first] // batch.mask.shape[1]).cpu()
        per_row = torch.bincount(rows, minlength=len(batch.ids)).tolist()
        return {id: tags.tolist() for id, tags in zip(batch.ids.tolist(), predicted.split(per_row), strict=True)}

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        check_finite(split, [-1 not in classes for classes in answers.values()])
        gold = [sentence.tags for sentence in self.sentences(split)]
        return entities.score(gold, self._predicted(split, answers), self.kinds)

    def decisions(self, answer: Any) -> Sequence[Any]:
        return answer

    def constant_answer(self, split: str, answers: Mapping[int, Any]) -> str | None:
        predicted = {index for classes in answers.values() for index in classes}
        tags = {tag for sentence in self.sentences(split) for tag in sentence.tags}
        return self.label_names[predicted.pop()] if len(predicted) == 1 < len(tags) else None

    def never_answered(self, split: str, answers: Mapping[int, Any]) -> dict[str, int]:
        given = {self.label_names[index] for classes in answers.values() for index in classes}
        counts = Counter(tag for sentence in self.sentences(split) for tag in sentence.tags)
        return {tag: counts[tag] for tag in self.label_names if counts[tag] and tag not in given}

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """Return the sentences as CoNLL, each line a word, its tag and the predicted one, apart by tabs."""
        lines = []
        for sentence, predicted in zip(self.sentences(split), self._predicted(split, answers), strict=True):
            words = [re.sub(r"\s", "_", word) for word in sentence.words]
            lines += ["\t".join(row) for row in zip(words, sentence.tags, predicted, strict=True)] + [""]
        return {"predictions.conll": "\n".join(lines)}

    def _predicted(self, split: str, answers: Mapping[int, Any]) -> list[list[str]]:
        """Join the windows of each sentence to a tag for each of its words."""
        examples = self.examples(split)
        tags = [[OUTSIDE] * len(sentence.words) for sentence in self.sentences(split)]
        for index, owner in enumerate(examples.fields["sentence"].tolist()):
            words = examples.row(index)["word"]
            for word, predicted in zip(words[words > 0].tolist(), answers[index], strict=True):
                tags[owner][word - 1] = self.label_names[predicted]
        return tags

    def _windows(self, sentence: Sentence, pieces_of: Mapping[str, list[int]], room: int) -> Iterator[list[_Token]]:
        """Yield the tokens of a sentence's windows, without the special ones; a window ends before a whole word."""
        window: list[_Token] = []
        for place, (word, tag) in enumerate(zip(sentence.words, sentence.tags, strict=True), 1):
            pieces = pieces_of[word][:room]
            if len(window) + len(pieces) > room:
                yield window
                window = []
            label = 1 + self.label_names.index(tag)
            window += [(pieces[0], label, place)] if pieces else []
            window += [(piece, label if self.spec.label_all_tokens else 0, 0) for piece in pieces[1:]]
        if window:
            yield window

    def _pieces(self, words: set[str]) -> tuple[dict[str, list[int]], list[_Token], list[_Token]]:
        """Return the tokens of each word, and the special tokens before and behind a sentence."""
        tokenizer = self.tokenizer

        def encoded(texts: list[str], special: bool) -> list[list[int]]:
            return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]

        # byte-level tokenizers know a word by the space before it, of which others would make a token of its own
        both, first, second = encoded(["b a", "b", "a"], False)
        space = "" if both == first + second else " "
        ordered = sorted(words)
        pieces = dict(zip(ordered, encoded([space + word for word in ordered], False), strict=True))
        (whole,) = encoded(["a"], True)
        start = whole.index(second[0])
        special = whole[:start], whole[start + len(second) :]
        before, behind = ([(token, 0, 0) for token in tokens] for tokens in special)
        return pieces, before, behind


def _tags_in(spec: TokenSpec, split: str) -> tuple[str, ...]:
    """Return the tags of a split's sentences, O first and then sorted."""
    records = token_data.records(spec, split)
    tags = {tag for row in records.rows() for tag in row.value.tags}
    if len(tags) < 2:
        raise UserError(f"{records.origin} has the tags {listed(tags) or 'none'}: at least two are needed")
    return tuple(sorted(tags, key=lambda tag: (tag != OUTSIDE, tag)))
