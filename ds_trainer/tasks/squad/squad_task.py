"""Extractive question answering: SQuAD v1.1 (arXiv 1606.05250) and v2 (arXiv 1806.03822), or data of their form.

An example is a window of a question's context. A model's answers stay tokens of windows until they are scored, where
the windows of a question are merged and tokens become characters of its context. Files are read in `squad_file.py`,
windows cut in `squad_windows.py`, answers counted in `squad_score.py`.

Of a span that is in several windows the best score wins. The original script takes it only from the window that has the
most context around it, which drops what a model finds in the others; later scripts have left that rule out, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.config.task_specs import SquadSpec
from ds_trainer.models.pretrained import (
    ANSWERER,
    check_fits,
    input_names,
    load_config,
    load_with_head,
    pad_token_id,
    tokenizer_state,
)
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Examples, Positions, fingerprint, pack, spread
from ds_trainer.tasks.squad import squad_file
from ds_trainer.tasks.squad.squad_file import Question
from ds_trainer.tasks.squad.squad_score import Candidate, n_best, score_v1, score_v2, with_probabilities
from ds_trainer.tasks.squad.squad_windows import Places, special_tokens, windows
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Task, check_finite, model_inputs

# token types also where the model takes none: a teacher of another family may
_DTYPES = {"input_ids": np.int32, "token_type_ids": np.uint8, "char_start": np.int32, "char_end": np.int32}
_INPUTS = ("input_ids", "token_type_ids")


class WindowAnswer(NamedTuple):
    """The best spans of one window, first and last position of each, with their logits; and those of "no answer".

    `finite`: whether all logits of the window are; where not, the spans mean nothing.
    """

    starts: list[int]
    ends: list[int]
    start_logits: list[float]
    end_logits: list[float]
    null_logits: tuple[float, float]
    finite: bool = True


class Verdict(NamedTuple):
    """What the windows of one question say together.

    Its text, "" where "no answer" is ahead by more than the threshold; the best text, whatever the threshold; the n
    best; and how much "no answer" is ahead.
    """

    text: str
    answer: str
    n_best: list[Candidate]
    null_odds: float


class SquadTask(Task):
    """SQuAD for the model folder `source` (or hub name), whose tokenizer, a fast one, it takes.

    Every rank must build it and ask for its splits. Labels are the `Places` of each window, (rows, 5). A tokenizer
    without a padding token is given the end of text for one, in place.
    """

    spec: SquadSpec
    logits_of: ClassVar[Literal["example", "token", "position"]] = "token"

    def __init__(self, spec: SquadSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(tokenizer, ANSWERER, cache_dir)
        _check_tokenizer(tokenizer, spec, source)
        self.spec = spec
        self._pad_token_id = pad_token_id(tokenizer)
        self._inputs = input_names(load_config(source, ANSWERER), ANSWERER)
        self._read: dict[str, list[Question]] = {}

    def build_model(self, folder: str | Path) -> nn.Module:
        model: nn.Module = load_with_head(folder, ANSWERER)
        check_fits(model, self.tokenizer, self.spec.max_seq_length)
        return model

    def questions(self, split: str) -> list[Question]:
        """The split's questions, up to its limit; read from the file at the first call, on the calling rank only."""
        if split not in self._read:
            found = squad_file.questions(self.spec, split)
            self._read[split] = [found[position] for position in spread(len(found), self.limit(split))]
        return self._read[split]

    def fingerprint(self, split: str) -> str:
        fields = ("version_2_with_negative", "max_seq_length", "doc_stride", "max_query_length")
        settings = {name: getattr(self.spec, name) for name in fields}
        source = squad_file.fingerprint(self.spec, split)
        return fingerprint("squad", split, source, settings, self.limit(split), tokenizer_state(self.tokenizer))

    def tokenised(self, split: str) -> Examples:
        started = time.monotonic()
        questions = self.questions(split)
        places: list[Places] = []
        owners: list[int] = []

        def chunks() -> Iterator[dict[str, list[list[int]]]]:
            for found in windows(self.tokenizer, self.spec, questions):
                places.extend(window.places for window in found)
                owners.extend(window.question for window in found)
                yield {name: [window.columns[name] for window in found] for name in _DTYPES}

        packed = pack(chunks(), _DTYPES, {})
        fields = {"labels": np.array(places, np.int32), "question": np.array(owners, np.int32)}
        examples = replace(packed, fields=fields)
        _tell(split, questions, examples, time.monotonic() - started)
        return examples

    def collate(self, examples: Examples, positions: Sequence[int] | Positions, draw: int = 0) -> Batch:
        ids = np.asarray(positions, dtype=np.int64)
        of_model = {name: flat for name, flat in examples.tokens.items() if name in _INPUTS}
        rows = Examples(examples.offsets, of_model)
        padded = rows.padded(ids, {"input_ids": self._pad_token_id}, self.spec.pad_to_multiple_of)
        inputs, others = model_inputs(padded, self._inputs)
        labels = examples.fields["labels"][ids].astype(np.int64)
        return Batch(inputs, torch.from_numpy(labels), torch.from_numpy(ids), others)

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Mean of the cross entropies over the positions of the answer's start and of its end."""
        start, end = self.logits(out, batch)
        labels = Places(*batch.labels.unbind(1))
        return (F.cross_entropy(start.float(), labels.start) + F.cross_entropy(end.float(), labels.end)) / 2

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Start and end, each (rows, length)."""
        padding = batch.mask == 0
        return out.start_logits.masked_fill(padding, PAD_LOGIT), out.end_logits.masked_fill(padding, PAD_LOGIT)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """A `WindowAnswer` for each window, of its `n_best_size` best spans of allowed length."""
        start, end = (logits.float() for logits in self.logits(out, batch))
        places = Places(*batch.labels.unbind(1))
        starts, ends, valid = best_spans(start, end, places, self.spec.max_answer_length, self.spec.n_best_size)
        columns = [starts, ends, start.gather(1, starts), end.gather(1, ends)]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        null = torch.stack([logits.gather(1, places.null[:, None])[:, 0] for logits in (start, end)], 1)
        finite = (start.isfinite() & end.isfinite()).all(1)
        told = zip(*(column.tolist() for column in (batch.ids, valid, null, finite)), rows, strict=True)
        return {
            id: WindowAnswer(a[:count], b[:count], c[:count], d[:count], (nulls[0], nulls[1]), sound)
            for id, count, nulls, sound, (a, b, c, d) in told
        }

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Exact match and F1 over the questions, in percent; for v2 all that its official script tells."""
        check_finite(split, [answer.finite for answer in answers.values()])
        verdicts = self._verdicts(split, answers)
        predictions = {id: verdict.text for id, verdict in verdicts.items()}
        golds = {question.id: [answer.text for answer in question.answers] for question in self.questions(split)}
        if not self.spec.version_2_with_negative:
            return score_v1(predictions, golds)
        odds = {id: verdict.null_odds for id, verdict in verdicts.items()}
        return score_v2(predictions, golds, odds, {id: verdict.answer for id, verdict in verdicts.items()})

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Share of the questions to which two models give the same text."""
        ours, theirs = self._verdicts(split, answers), self._verdicts(split, others)
        return sum(verdict.text == theirs[id].text for id, verdict in ours.items()) / len(ours)

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """The files of the original scripts: predictions, the n best, and for v2 the odds of "no answer"."""
        verdicts = self._verdicts(split, answers)
        files: dict[str, Any] = {
            "predictions.json": {id: verdict.text for id, verdict in verdicts.items()},
            "nbest_predictions.json": {id: with_probabilities(verdict.n_best) for id, verdict in verdicts.items()},
        }
        if self.spec.version_2_with_negative:
            files["null_odds.json"] = {id: verdict.null_odds for id, verdict in verdicts.items()}
        return files

    def _verdicts(self, split: str, answers: Mapping[int, WindowAnswer]) -> dict[str, Verdict]:
        """By question id, in the file's order."""
        examples, questions = self.examples(split), self.questions(split)
        candidates: list[list[Candidate]] = [[] for _ in questions]
        nulls: list[list[tuple[float, float]]] = [[] for _ in questions]
        for position, owner in enumerate(examples.fields["question"].tolist()):
            answer = answers[position]
            candidates[owner] += _candidates(questions[owner].context, examples.row(position), answer)
            nulls[owner].append(answer.null_logits)
        return {
            question.id: self._verdict(found, min(null, key=sum))
            for question, found, null in zip(questions, candidates, nulls, strict=True)
        }

    def _verdict(self, candidates: list[Candidate], null_logits: tuple[float, float]) -> Verdict:
        """`null_logits` are of the window that is the surest of an answer: one that has it is enough."""
        best = n_best(candidates, self.spec.n_best_size)
        null = Candidate("", 0, 0, *null_logits)
        text = best[0].text if best else ""
        # where there is nothing else to say, any threshold says nothing; infinity is no JSON
        odds = null.score - best[0].score if best else 0.0
        if not self.spec.version_2_with_negative:
            return Verdict(text, text, best or [null], odds)
        final = "" if odds > self.spec.null_score_diff_threshold else text
        return Verdict(final, text, sorted([*best, null], key=lambda each: -each.score), odds)


def best_spans(start: Tensor, end: Tensor, places: Places, max_length: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last positions, each (rows, size or fewer), of each row's best spans, best first; how many are valid.

    A span lies in the context, has at most `max_length` tokens, and its score is the sum of its two logits
    (rows, length). Logits that are not finite may change which are best, not which are valid. What follows a row's
    valid spans is there for the shape alone.
    """
    width = start.shape[1]
    max_length = min(max_length, width)
    position = torch.arange(width, device=start.device)
    inside = (position >= places.first[:, None]) & (position <= places.last[:, None])
    ends, ends_inside = (F.pad(each, (0, max_length - 1)).unfold(1, max_length, 1) for each in (end, inside))
    valid = (inside[:, :, None] & ends_inside).flatten(1)
    scores = (start[:, :, None] + ends).flatten(1).nan_to_num().masked_fill(~valid, -torch.inf)
    best = scores.topk(min(size, scores.shape[1]))
    first = best.indices // max_length
    # what is not valid may lie behind the row, where nothing can be gathered
    last = (first + best.indices % max_length).clamp(max=width - 1)
    return first, last, (best.values > -torch.inf).sum(1)


def _candidates(context: str, row: Mapping[str, Any], answer: WindowAnswer) -> Iterator[Candidate]:
    """The spans as text, without white space around, which byte-level tokens carry; those of nothing else left out."""
    begins, stops = row["char_start"][answer.starts].tolist(), row["char_end"][answer.ends].tolist()
    for begin, stop, *logits in zip(begins, stops, answer.start_logits, answer.end_logits, strict=True):
        text = context[begin:stop]
        begin += len(text) - len(text.lstrip())
        text = text.strip()
        if text:
            yield Candidate(text, begin, begin + len(text), *logits)


def _check_tokenizer(tokenizer: Any, spec: SquadSpec, source: str | Path) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {source} ({type(tokenizer).__name__}) is a slow one, which cannot tell which characters "
            f"a token is: take a model with a tokenizer.json"
        )
    special = special_tokens(tokenizer)
    certain, possible = (spec.gap_beside(length, special) for length in (1, spec.max_query_length))
    if certain:
        raise UserError(certain)
    if possible:
        distributed.warn(
            f"squad: a question of {spec.max_query_length} tokens about a long context would be refused: {possible}"
        )


def _tell(split: str, questions: Sequence[Question], examples: Examples, seconds: float) -> None:
    """Log the counts, and warn of answers that no window holds: nothing can be learnt from them."""
    labels = Places(*examples.fields["labels"].T)
    without = labels.start == labels.null
    held = set(examples.fields["question"][~without].tolist())
    lost = sum(bool(question.answers) and index not in held for index, question in enumerate(questions))
    distributed.info(
        f"squad {split}: {len(questions):,} questions in {len(examples):,} windows, {int(without.sum()):,} of them "
        f"without the answer, {examples.lengths.mean():.1f} tokens on average ({seconds:.1f} s)"
    )
    if lost:
        distributed.warn(
            f"squad {split}: the answers of {lost:,} questions are in no window: they are longer than the part that "
            f"windows share (raise max_seq_length or lower doc_stride), or the tokenizer makes no token of them"
        )
