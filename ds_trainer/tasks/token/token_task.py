"""Token classification: a tag for every word, such as those of named entities.

An example is a window of a sentence: the words beyond `max_seq_length` go into further windows. A word has its loss
and its answer at its first piece; with `label_all_tokens` all its pieces have a loss. A word without a piece, such as
a zero-width space, is in no window, and its answer is O. `token_data.py` reads the sentences.

Tags are scored by `seqeval`, which reads IOB1, IOB2 and IOBES as the script of CoNLL-2000 does. An entity is predicted
rightly if its kind, its first and its last word are all right.
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
from seqeval.metrics.sequence_labeling import get_entities
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.models import classifiers
from ds_trainer.models.pretrained import TOKEN_CLASSIFIER
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import TokenSpec
from ds_trainer.tasks.data import ExampleIds, Examples, source_split
from ds_trainer.tasks.records import Records, Row
from ds_trainer.tasks.scores import check_logits
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Predict, Task, Unit
from ds_trainer.tasks.token import token_data
from ds_trainer.tasks.token.token_data import Sentence

OUTSIDE = "O"
"""The tag of a word that is in no entity."""
_TAG = re.compile(r"[BIES]-(.+)")
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
        self.kinds = entity_kinds(self.label_names)

    def source(self, split: str) -> Records[Sentence]:
        return token_data.records(self.spec, source_split(self.spec, split), self.label_names)

    def sentences(self, split: str) -> list[Sentence]:
        """Return the split's sentences, at most its limit. The first call reads the file, on the calling rank alone."""
        return [row.value for row in self.read(split)[1]]

    def hashed_values(self) -> list[Any]:
        return [self.label_names]

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

    def output_of(self, reader: Task, predict: Predict, batch: Batch) -> Any:
        """Give every labelled token the logits that the other model has at the first token of the same word.

        A word that `reader` has in no window gets 0 for O, which is its answer, and `PAD_LOGIT` for all other tags.
        """
        ours, theirs = self.examples(batch.split), reader.examples(batch.split)
        rows = [(ours.fields["sentence"][id], ours.row(id)) for id in batch.ids.tolist()]
        # the words of the labelled tokens: a token is of the word that began last, whose number is the largest so far
        words = [(owner, word) for owner, row in rows for word in np.maximum.accumulate(row["word"])[row["tag"] > 0]]
        places = {
            (owner, word): (window, column)
            for owner in {owner for owner, _ in words}
            for window in range(*np.searchsorted(theirs.fields["sentence"], [owner, owner + 1]))
            for column, word in enumerate(theirs.row(window)["word"])
            if word
        }
        windows = sorted({places[word][0] for word in words if word in places}) or [0]  # every rank runs the model
        asked = reader.collate(theirs, windows).to(batch.mask.device)
        out, width = predict(asked), asked.mask.shape[1]
        nothing = torch.tensor([[0.0 if tag == OUTSIDE else PAD_LOGIT for tag in self.label_names]])
        logits = torch.cat([out.logits.float().flatten(0, 1), nothing.to(out.logits.device, non_blocking=True)])
        first = {window: row * width for row, window in enumerate(windows)} | {None: len(logits) - 1}
        found = (places.get(word, (None, 0)) for word in words)
        at = torch.tensor([first[window] + column for window, column in found], dtype=torch.int64)
        laid_out = logits.new_zeros(batch.mask.numel(), logits.shape[1])
        laid_out[batch.others["head_positions"]] = logits[at.to(logits.device, non_blocking=True)]
        out.logits = laid_out.unflatten(0, batch.mask.shape)
        return out

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the predicted classes of the words that begin in each window; -1 where a logit is not finite."""
        (logits,) = self.logits(out, batch)
        first = batch.labels[:, 1] > 0
        predicted = torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)[first].cpu()
        rows = (batch.others["head_positions"][first] // batch.mask.shape[1]).cpu()
        per_row = torch.bincount(rows, minlength=len(batch.ids)).tolist()
        return {id: tags.tolist() for id, tags in zip(batch.ids.tolist(), predicted.split(per_row), strict=True)}

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        check_logits(split, [-1 not in classes for classes in answers.values()])
        gold = [sentence.tags for sentence in self.sentences(split)]
        return entity_scores(gold, self._predicted(split, answers), self.kinds)

    def decisions(self, answer: Any) -> Sequence[Any]:
        return answer

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
        # what stands around the tokens of "a" are the special ones
        (whole,) = encoded(["a"], True)
        start = whole.index(second[0])
        special = whole[:start], whole[start + len(second) :]
        before, behind = ([(token, 0, 0) for token in tokens] for tokens in special)
        return pieces, before, behind


def entity_kinds(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of entities that the tags name, sorted. Tags such as NOUN name none.

    Of B, I and O alone the only kind is `_`, as seqeval calls it. UserError where only some of the tags name a kind.
    """
    if set(tags) <= set("BIESO"):
        return ("_",)
    kinds = {match[1] for tag in tags if (match := _TAG.fullmatch(tag))}
    others = [tag for tag in tags if not _TAG.fullmatch(tag) and tag != OUTSIDE]
    if kinds and others:
        raise UserError(
            f"the tags {listed(others)} name no entity, and others do: write O, or B-, I-, E- or S- before a kind, "
            f"such as B-person"
        )
    return tuple(sorted(kinds))


def entity_scores(gold: list[list[str]], predicted: list[list[str]], kinds: Sequence[str]) -> dict[str, float]:
    """Return F1, precision and recall of the entities, the accuracy of the tags, and F1 for each kind as `f1/KIND`.

    The lists have a list of tags for each sentence. Without kinds there is only the accuracy.
    """
    pairs = [pair for sentences in zip(gold, predicted, strict=True) for pair in zip(*sentences, strict=True)]
    accuracy = {"accuracy": sum(one == other for one, other in pairs) / len(pairs)}
    if not kinds:
        return accuracy
    true, given = set(get_entities(gold)), set(get_entities(predicted))  # (kind, first, last)
    right = true & given

    def f1(kind: str | None = None) -> float:
        hits, *sizes = (sum(kind in (None, entity[0]) for entity in some) for some in (right, true, given))
        return 2 * hits / max(1, sum(sizes))

    shares = {"precision": len(right) / max(1, len(given)), "recall": len(right) / max(1, len(true))}
    return {"f1": f1()} | shares | accuracy | {f"f1/{kind}": f1(kind) for kind in kinds}


def _tags_in(spec: TokenSpec, split: str) -> tuple[str, ...]:
    """Return the tags of a split's sentences, O first and then sorted; UserError if these can be no words and tags."""
    records = token_data.records(spec, split)
    words, tags = dict[str, None](), dict[str, None]()
    for row in records.rows():
        words.update(dict.fromkeys(row.value.words))
        tags.update(dict.fromkeys(row.value.tags))
    if len(tags) > len(words) or all(re.fullmatch(r"[0-9.-]+", word) for word in words):
        raise UserError(
            f"{records.origin} has the words {listed(words, 3)}, and the tags {listed(tags, 3)}: name the columns of "
            f"both, in CoNLL files by word_column and tag_column, from 0 (-1 is the last)"
        )
    if len(tags) < 2:
        raise UserError(f"{records.origin} has the tags {listed(tags) or 'none'}: at least two are needed")
    return tuple(sorted(tags, key=lambda tag: (tag != OUTSIDE, tag)))
