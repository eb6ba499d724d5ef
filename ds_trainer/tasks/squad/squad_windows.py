"""Cut a long context into windows that overlap, each one model input together with its question.

As arXiv 1810.04805 does for SQuAD: the windows of a context start a fixed number of tokens apart. A tokenizer's own
truncation fixes the overlap instead, so that windows would be nearer to each other the longer the question. Here
question and context are tokenised alone and joined as the tokenizer joins a pair. A tokenizer without a class token
(GPT-2) gets an end of text behind that, to stand for "no answer": there a causal model has seen everything, and it is
no token of the context, which could be an answer itself. Needs a fast tokenizer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ds_trainer.config.task_specs import SquadSpec
from ds_trainer.files.messages import quoted
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Array
from ds_trainer.tasks.squad.squad_file import Question

_CHUNK = 1024
NO_CHARACTER = -1
"""Where a token is none of the context."""


class Places(NamedTuple):
    """Positions in a row: the answer's first and last token, what stands for "no answer", the context's first and last.

    Where the answer is not in the window, its first and last token are those of "no answer". Each an int, or one for
    each row of a batch.
    """

    start: Any
    end: Any
    null: Any
    first: Any
    last: Any


class Window(NamedTuple):
    """One row: the place of its question in the split, its token columns and its `Places`.

    Columns `char_start` and `char_end` tell which characters of the context a token is.
    """

    question: int
    columns: dict[str, list[int]]
    places: Places


@dataclass(frozen=True)
class Tokens:
    """A tokenised text without special tokens, and the characters of each token."""

    ids: list[int]
    starts: list[int]
    ends: list[int]

    @cached_property
    def _spans(self) -> Array:
        return np.array([self.starts, self.ends], np.int64).reshape(2, -1)

    def covering(self, start: int, end: int) -> tuple[int, int] | None:
        """First and last token that hold any character from `start` to `end`; None where none does."""
        found = np.flatnonzero((self._spans[0] < end) & (self._spans[1] > start))
        return (int(found[0]), int(found[-1])) if len(found) else None


class PairForm(NamedTuple):
    """How a tokenizer joins a question and a context: ids and types of the special tokens around them."""

    ids: tuple[list[int], list[int], list[int]]
    types: tuple[list[int], list[int], list[int]]
    question_type: int
    context_type: int
    cls_id: int | None

    @property
    def special(self) -> int:
        """How many special tokens a row has."""
        return sum(map(len, self.ids))

    def null(self, question: int, context: int) -> int:
        """Where the class token is, for so many tokens of question and context; without one, the end of the row."""
        before, between, behind = self.ids
        if self.cls_id in before:
            return before.index(self.cls_id)
        if self.cls_id in behind:
            return len(before) + question + len(between) + context + behind.index(self.cls_id)
        return self.special + question + context - 1


def windows(tokenizer: Any, spec: SquadSpec, questions: Sequence[Question]) -> Iterator[list[Window]]:
    """All windows, in the order of their questions, some at a time.

    ValueError at a question that leaves the windows of its context too little room to touch each other.
    """
    form = pair_form(tokenizer, questions)
    for begin in range(0, len(questions), _CHUNK):
        part = questions[begin : begin + _CHUNK]
        contexts = list(dict.fromkeys(question.context for question in part))
        by_context = dict(zip(contexts, tokenised(tokenizer, contexts), strict=True))
        asked = tokenised(tokenizer, [question.question for question in part])
        yield [
            window
            for index, (question, tokens) in enumerate(zip(part, asked, strict=True), begin)
            for window in _of_question(index, question, tokens.ids, by_context[question.context], form, spec)
        ]


def special_tokens(tokenizer: Any) -> int:
    """How many special tokens a row has, at most."""
    return int(tokenizer.num_special_tokens_to_add(pair=True)) + (tokenizer.cls_token_id is None)


def pair_form(tokenizer: Any, questions: Sequence[Question]) -> PairForm:
    """The form, read off the first pair of which the tokenizer makes tokens on both sides."""
    for question in questions:
        row = tokenizer(
            question.question,
            question.context,
            truncation=False,
            padding=False,
            return_token_type_ids=True,
            verbose=False,
        )
        sides = row.sequence_ids(0)
        if 0 in sides and 1 in sides:
            form = _form(row["input_ids"], row["token_type_ids"], sides, tokenizer.cls_token_id)
            return _with_end(form, tokenizer.eos_token_id)
    raise UserError("the tokenizer makes no tokens of any question and its context: they do not belong together")


def tokenised(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Each text whole, without special tokens, whatever truncation and padding the tokenizer was saved with."""
    found = tokenizer(
        texts,
        add_special_tokens=False,
        truncation=False,
        padding=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [
        _tokens(text, ids, offsets)
        for text, ids, offsets in zip(texts, found["input_ids"], found["offset_mapping"], strict=True)
    ]


def window_starts(tokens: int, room: int, doc_stride: int) -> range:
    """The first token of each window of at most `room` tokens; the last window holds the last token."""
    return range(0, max(1, tokens - room + doc_stride), doc_stride)


def _form(ids: list[int], types: list[int], sides: list[int | None], cls_id: int | None) -> PairForm:
    question, context = ([place for place, side in enumerate(sides) if side == wanted] for wanted in (0, 1))
    if question[-1] > context[0]:
        raise UserError("the tokenizer puts the second text of a pair before the first: questions must come first")
    before, between, behind = slice(question[0]), slice(question[-1] + 1, context[0]), slice(context[-1] + 1, None)
    return PairForm(
        (ids[before], ids[between], ids[behind]),
        (types[before], types[between], types[behind]),
        types[question[0]],
        types[context[0]],
        cls_id,
    )


def _with_end(form: PairForm, end_of_text: int | None) -> PairForm:
    """The form with a token that can stand for "no answer"."""
    if form.cls_id is not None or form.ids[2]:
        return form
    if end_of_text is None:
        raise UserError(
            "the tokenizer has neither a class token nor an end of text to stand for no answer: give it an eos_token"
        )
    return form._replace(ids=(*form.ids[:2], [end_of_text]), types=(*form.types[:2], [form.context_type]))


def _tokens(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Tokens:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    if not text.isascii():
        _take_in_marks(text, starts, ends)
    return Tokens(ids, starts, ends)


def _take_in_marks(text: str, starts: list[int], ends: list[int]) -> None:
    """Count combining marks that the tokenizer drops to the token before them: an accent is part of its letter."""
    for index, end in enumerate(ends):
        limit = starts[index + 1] if index + 1 < len(starts) else len(text)
        while end < limit and unicodedata.category(text[end]).startswith("M"):
            end += 1
        ends[index] = end


def _of_question(
    index: int, question: Question, asked: list[int], context: Tokens, form: PairForm, spec: SquadSpec
) -> Iterator[Window]:
    asked = asked[: spec.max_query_length]
    room = spec.max_seq_length - form.special - len(asked)
    mistake = spec.gap_beside(len(asked), form.special)
    if mistake and len(context.ids) > room:
        raise UserError(f"question {quoted(question.id)}: {mistake}")
    answer = _answer_tokens(question, context)
    for begin in window_starts(len(context.ids), room, spec.doc_stride):
        part = slice(begin, begin + room)
        columns = _columns(asked, context, part, form)
        yield Window(index, columns, _places(len(asked), len(context.ids[part]), begin, answer, form))


def _answer_tokens(question: Question, context: Tokens) -> tuple[int, int] | None:
    """The tokens of the first answer, which is the one to learn; white space around it would reach a further token."""
    if not question.answers:
        return None
    text, start = question.answers[0]
    start += len(text) - len(text.lstrip())
    return context.covering(start, start + len(text.strip()))


def _columns(asked: list[int], context: Tokens, part: slice, form: PairForm) -> dict[str, list[int]]:
    before, between, behind = form.ids
    ids, types = context.ids[part], form.types
    outside = [NO_CHARACTER] * (len(before) + len(asked) + len(between))
    after = [NO_CHARACTER] * len(behind)
    of_question, of_context = [form.question_type] * len(asked), [form.context_type] * len(ids)
    return {
        "input_ids": [*before, *asked, *between, *ids, *behind],
        "token_type_ids": [*types[0], *of_question, *types[1], *of_context, *types[2]],
        "char_start": [*outside, *context.starts[part], *after],
        "char_end": [*outside, *context.ends[part], *after],
    }


def _places(asked: int, held: int, begin: int, answer: tuple[int, int] | None, form: PairForm) -> Places:
    first = len(form.ids[0]) + asked + len(form.ids[1])
    null = form.null(asked, held)
    if answer is None or answer[0] < begin or answer[1] >= begin + held:
        return Places(null, null, null, first, first + held - 1)
    shift = first - begin
    return Places(answer[0] + shift, answer[1] + shift, null, first, first + held - 1)
