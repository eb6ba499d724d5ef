"""Extractive question answering: SQuAD v1.1 (arXiv 1606.05250) and v2 (arXiv 1806.03822), or data of their form.

An example is a window of a question's context. The model's answers are token positions in windows. To score them, the
windows of a question are merged, and tokens become characters of its context. `squad_file.py` reads the files,
`squad_windows.py` cuts the windows, `squad_score.py` computes the scores.

If a span is in several windows, its best score counts. BERT's script takes it only from the window with the most
context around it, and so drops answers of other windows; later scripts have given up this rule, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.models.pretrained import ANSWERER
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks import squad_file
from ds_trainer.tasks.data import ExampleIds, Examples
from ds_trainer.tasks.records import Records, Row
from ds_trainer.tasks.scores import check_logits
from ds_trainer.tasks.squad.squad_score import Candidate, n_best, score_v1, score_v2, with_probabilities
from ds_trainer.tasks.squad.squad_windows import SpanPositions, windows
from ds_trainer.tasks.squad_file import Question
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Task

_COLUMNS = {**Task.token_columns, "char_start": np.int32, "char_end": np.int32}


class WindowAnswer(NamedTuple):
    """The best spans of one window: their first and last positions, their logits, and the logits of "no answer".

    If `finite` is false, the window has a logit that is not finite, and the spans mean nothing.
    """

    starts: list[int]
    ends: list[int]
    start_logits: list[float]
    end_logits: list[float]
    null_logits: tuple[float, float]
    finite: bool = True


class Verdict(NamedTuple):
    """The answer to one question, merged from its windows.

    `null_odds` is by how much "no answer" scores above the best text. `text` is "" if that is more than the threshold;
    `answer` is the best text whatever the threshold.
    """

    text: str
    answer: str
    n_best: list[Candidate]
    null_odds: float


class SquadTask(Task):
    """SQuAD, with a fast tokenizer. Labels are the `SpanPositions` of each window, (rows, 5) int64."""

    spec: SquadSpec
    head = ANSWERER
    logits_of: ClassVar[Literal["example", "token", "position"]] = "token"
    family = "squad"
    token_columns = _COLUMNS
    hashed_fields = ("version_2_with_negative", "max_seq_length", "doc_stride", "max_query_length")
    data: ClassVar[Any] = squad_file

    def read(self, split: str) -> tuple[Records[Question], list[Row[Question]]]:
        records, rows = super().read(split)
        twice = [id for id, count in Counter(row.value.id for row in rows).items() if count > 1]
        if twice:
            raise UserError(f"{records.origin}: several questions have the same id: {listed(twice)}")
        return records, rows

    def questions(self, split: str) -> list[Question]:
        """Return the split's questions, at most its limit. The first call reads the file, on the calling rank alone."""
        return [row.value for row in self.read(split)[1]]

    def encode(self, rows: Sequence[Row[Question]]) -> dict[str, Any]:
        """Return the windows of some questions, with their `SpanPositions` and the indices of their questions."""
        cut = windows(self.tokenizer, self.spec, rows)
        fields = {"labels": [window.positions for window in cut], "question": [window.question for window in cut]}
        columns = {name: [window.columns[name] for window in cut] for name in _COLUMNS}
        return columns | {name: np.array(values, np.int32) for name, values in fields.items()}

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        tokens = {name: examples.tokens[name] for name in Task.token_columns}
        return super().collate(replace(examples, tokens=tokens), ids, draw)

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the mean of two cross entropies over positions, for the start and for the end of the answer."""
        start, end = self.logits(out, batch)
        labels = SpanPositions(*batch.labels.unbind(1))
        return (F.cross_entropy(start.float(), labels.start) + F.cross_entropy(end.float(), labels.end)) / 2

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return the logits of start and end, each (rows, length)."""
        padding = batch.mask == 0
        return out.start_logits.masked_fill(padding, PAD_LOGIT), out.end_logits.masked_fill(padding, PAD_LOGIT)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return a `WindowAnswer` for each window, with at most `n_best_size` spans."""
        start, end = (logits.float() for logits in self.logits(out, batch))
        labels = SpanPositions(*batch.labels.unbind(1))
        starts, ends, valid = best_spans(start, end, labels, self.spec.max_answer_length, self.spec.n_best_size)
        null = torch.stack([logits.gather(1, labels.null[:, None])[:, 0] for logits in (start, end)], 1)
        finite = (start.isfinite() & end.isfinite()).all(1)
        columns = (batch.ids, valid, starts, ends, start.gather(1, starts), end.gather(1, ends), null, finite)
        return {
            id: WindowAnswer(a[:count], b[:count], c[:count], d[:count], (nulls[0], nulls[1]), is_finite)
            for id, count, a, b, c, d, nulls, is_finite in zip(*(column.tolist() for column in columns), strict=True)
        }

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return exact match and F1 over the questions, in percent; for v2 all numbers of the official script."""
        check_logits(split, [answer.finite for answer in answers.values()])
        verdicts = self._verdicts(split, answers)
        predictions = {id: verdict.text for id, verdict in verdicts.items()}
        golds = {question.id: [answer.text for answer in question.answers] for question in self.questions(split)}
        if not self.spec.version_2_with_negative:
            return score_v1(predictions, golds)
        odds = {id: verdict.null_odds for id, verdict in verdicts.items()}
        return score_v2(predictions, golds, odds, {id: verdict.answer for id, verdict in verdicts.items()})

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Return the share of the questions to which two models give the same text."""
        ours, theirs = self._verdicts(split, answers), self._verdicts(split, others)
        return sum(verdict.text == theirs[id].text for id, verdict in ours.items()) / len(ours)

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """Return the files of the original scripts: predictions, the n best, and for v2 the odds of "no answer"."""
        verdicts = self._verdicts(split, answers)
        files: dict[str, Any] = {
            "predictions.json": {id: verdict.text for id, verdict in verdicts.items()},
            "nbest_predictions.json": {id: with_probabilities(verdict.n_best) for id, verdict in verdicts.items()},
        }
        if self.spec.version_2_with_negative:
            files["null_odds.json"] = {id: verdict.null_odds for id, verdict in verdicts.items()}
        return files

    def description(self, rows: Sequence[Row[Question]], examples: Examples) -> str:
        """Describe windows and answers: nothing can be learned from an answer that is in no window."""
        labels = SpanPositions(*examples.fields["labels"].T)
        without = labels.start == labels.null
        held = set(examples.fields["question"][~without].tolist())
        lost = sum(bool(row.value.answers) and row.number not in held for row in rows)
        return (
            f"{len(rows):,} questions in {len(examples):,} windows, {int(without.sum()):,} without the answer; "
            f"{examples.lengths.mean():.1f} tokens on average; the answers of {lost:,} questions are in no window"
        )

    def _verdicts(self, split: str, answers: Mapping[int, WindowAnswer]) -> dict[str, Verdict]:
        """Merge the windows of each question; the verdicts are by question id, in the order of the file."""
        examples, questions = self.examples(split), self.questions(split)
        candidates: list[list[Candidate]] = [[] for _ in questions]
        nulls: list[list[tuple[float, float]]] = [[] for _ in questions]
        for index, owner in enumerate(examples.fields["question"].tolist()):
            candidates[owner] += _candidates(questions[owner].context, examples.row(index), answers[index])
            nulls[owner].append(answers[index].null_logits)
        # the lowest "no answer" score of all windows counts: it is enough if one window holds the answer
        return {
            question.id: self._verdict(spans, min(null, key=sum))
            for question, spans, null in zip(questions, candidates, nulls, strict=True)
        }

    def _verdict(self, candidates: list[Candidate], null_logits: tuple[float, float]) -> Verdict:
        best = n_best(candidates, self.spec.n_best_size)
        null = Candidate("", 0, 0, *null_logits)
        text = best[0].text if best else ""
        # without a candidate the text is "" at any threshold, and the odds would be infinite, which JSON cannot hold
        odds = null.score - best[0].score if best else 0.0
        if not self.spec.version_2_with_negative:
            return Verdict(text, text, best or [null], odds)
        final = "" if odds > self.spec.null_score_diff_threshold else text
        return Verdict(final, text, sorted([*best, null], key=lambda candidate: -candidate.score), odds)


def best_spans(
    start: Tensor, end: Tensor, labels: SpanPositions, max_length: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and last positions of each row's best spans, best first, and how many of them are valid.

    `start` and `end` are logits (rows, length). A valid span lies in the context and has at most `max_length` tokens;
    its score is the sum of its two logits. The positions are (rows, at most size), and those beyond a row's number of
    valid spans mean nothing. Logits that are not finite may change which spans are best, but not which are valid.
    """
    width = start.shape[1]
    max_length = min(max_length, width)
    position = torch.arange(width, device=start.device)
    inside = (position >= labels.first[:, None]) & (position <= labels.last[:, None])
    # entry [row, i, d] is about the span from token i to token i + d; ends beyond the row are padded as invalid
    ends, ends_inside = (F.pad(each, (0, max_length - 1)).unfold(1, max_length, 1) for each in (end, inside))
    valid = (inside[:, :, None] & ends_inside).flatten(1)
    scores = (start[:, :, None] + ends).flatten(1).nan_to_num().masked_fill(~valid, -torch.inf)
    best = scores.topk(min(size, scores.shape[1]))
    first = best.indices // max_length
    # an invalid span may end behind the row, where the caller could not gather a logit
    last = (first + best.indices % max_length).clamp(max=width - 1)
    return first, last, (best.values > -torch.inf).sum(1)


def _candidates(context: str, row: Mapping[str, Any], answer: WindowAnswer) -> Iterator[Candidate]:
    """Yield the spans as texts. Byte-level tokens carry white space, which is stripped; empty texts are left out."""
    begins, stops = row["char_start"][answer.starts].tolist(), row["char_end"][answer.ends].tolist()
    for begin, stop, *logits in zip(begins, stops, answer.start_logits, answer.end_logits, strict=True):
        text = context[begin:stop]
        begin += len(text) - len(text.lstrip())
        text = text.strip()
        if text:
            yield Candidate(text, begin, begin + len(text), *logits)
