"""Cut a long context into windows that overlap, each one model input together with its question.

The windows of a context start a fixed number of tokens apart, as in arXiv 1810.04805, or one window apart where a
question leaves less room than that. The truncation of a tokenizer fixes their overlap instead, so that windows would
start closer together the longer the question is. Therefore question and context are tokenised separately, and joined as
the tokenizer joins a pair. A fast tokenizer is needed.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ds_trainer.files.messages import quoted
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.data import Array
from ds_trainer.tasks.records import Row
from ds_trainer.tasks.squad_file import Question

NO_CHARACTER = -1
"""`char_start` and `char_end` of a token that is not part of the context."""


class SpanPositions(NamedTuple):
    """Token positions in a window: the first and last token of the answer, the token that stands for "no answer", and
    the first and last token of the context.

    If the window does not hold the whole answer, `start` and `end` are `null`. Each field is an int, or a tensor or an
    array with one entry for each window of a batch.
    """

    start: Any
    end: Any
    null: Any
    first: Any
    last: Any


class Window(NamedTuple):
    """One model input: the index of its question in the split, its token columns and its `SpanPositions`.

    The columns `char_start` and `char_end` say which characters of the context a token covers.
    """

    question: int
    columns: dict[str, list[int]]
    positions: SpanPositions


class Tokens(NamedTuple):
    """A tokenised text without special tokens; `spans` holds the first character of each token and the one after it."""

    ids: list[int]
    spans: Array
    """(tokens, 2)"""

    def covering(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last token that hold a character from `start` to `end`; None if no token does."""
        covering = np.flatnonzero((self.spans[:, 0] < end) & (self.spans[:, 1] > start))
        return (int(covering[0]), int(covering[-1])) if len(covering) else None


class _PairForm:
    """How a tokenizer joins a question and a context: the special tokens before, between and behind them.

    If the tokenizer has no class token (GPT-2), an end of text behind the context stands for "no answer": a causal
    model has seen the whole window there, while a token of the context could itself be an answer.
    """

    def __init__(self, tokenizer: Any, spec: SquadSpec) -> None:
        self.spec = spec
        pair = tokenizer("a", "a", return_token_type_ids=True)
        question, context = (
            [index for index, side in enumerate(pair.sequence_ids(0)) if side == wanted] for wanted in (0, 1)
        )
        frames = slice(question[0]), slice(question[-1] + 1, context[0]), slice(context[-1] + 1, None)
        self.ids = [pair["input_ids"][frame] for frame in frames]
        self.types = [pair["token_type_ids"][frame] for frame in frames]
        self.question_type, self.context_type = (pair["token_type_ids"][side[0]] for side in (question, context))
        cls_id = tokenizer.cls_token_id
        if cls_id is None and not self.ids[2]:
            if tokenizer.eos_token_id is None:
                raise UserError('the tokenizer has no token for "no answer": give it a cls_token or an eos_token')
            self.ids[2], self.types[2] = [tokenizer.eos_token_id], [self.context_type]
        before, _, behind = self.ids
        self.null = -1
        """The position of "no answer" in a window, from its end if negative: a class token, or else the last token."""
        if cls_id in before:
            self.null = before.index(cls_id)
        elif cls_id in behind:
            self.null = behind.index(cls_id) - len(behind)

    def windows_of(self, index: int, question: Question, ids: list[int], context: Tokens) -> Iterator[Window]:
        """Yield the windows of a question number `index`, with its tokens `ids`, over its context."""
        ids = ids[: self.spec.max_query_length]
        room = self.spec.max_seq_length - sum(map(len, self.ids)) - len(ids)
        if room < 1:
            raise UserError(
                f"question {quoted(question.id)}: max_seq_length {self.spec.max_seq_length} leaves no room for the "
                f"context beside a question of {len(ids)} tokens: raise it, or lower max_query_length"
            )
        stride = min(self.spec.doc_stride, room)  # a long question leaves so little room that windows would have gaps
        answer = None
        if question.answers:  # the first one is to be learnt, without white space around it
            text, start = question.answers[0]
            start += len(text) - len(text.lstrip())
            answer = context.covering(start, start + len(text.strip()))
        first = len(self.ids[0]) + len(ids) + len(self.ids[1])
        # the last window holds the last token
        for begin in range(0, max(1, len(context.ids) - room + stride), stride):
            columns = self._columns(ids, context, slice(begin, begin + room))
            length = len(columns["input_ids"])
            last = length - len(self.ids[2]) - 1
            start = end = null = self.null % length
            if answer and begin <= answer[0] and answer[1] - begin <= last - first:
                start, end = (token - begin + first for token in answer)
            yield Window(index, columns, SpanPositions(start, end, null, first, last))

    def _columns(self, question: list[int], context: Tokens, part: slice) -> dict[str, list[int]]:
        """Return the token columns of a question that is joined with a part of a context."""
        before, between, behind = self.ids
        ids, spans = context.ids[part], context.spans[part]
        outside = [NO_CHARACTER] * (len(before) + len(question) + len(between))
        after = [NO_CHARACTER] * len(behind)
        types = [self.question_type] * len(question), [self.context_type] * len(ids)
        return {
            "input_ids": [*before, *question, *between, *ids, *behind],
            "token_type_ids": [*self.types[0], *types[0], *self.types[1], *types[1], *self.types[2]],
            "char_start": [*outside, *spans[:, 0].tolist(), *after],
            "char_end": [*outside, *spans[:, 1].tolist(), *after],
        }


def windows(tokenizer: Any, spec: SquadSpec, rows: Sequence[Row[Question]]) -> list[Window]:
    """Return all windows in the order of their questions."""
    form, questions = _PairForm(tokenizer, spec), [row.value for row in rows]
    contexts = list(dict.fromkeys(question.context for question in questions))
    by_context = dict(zip(contexts, tokenised(tokenizer, contexts), strict=True))
    texts = tokenised(tokenizer, [question.question for question in questions])
    return [
        window
        for row, tokens in zip(rows, texts, strict=True)
        for window in form.windows_of(row.number, row.value, tokens.ids, by_context[row.value.context])
    ]


def tokenised(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Tokenise whole texts without special tokens."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    rows = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [Tokens(ids, _with_marks(text, np.array(spans, np.int64).reshape(-1, 2))) for text, ids, spans in rows]


def _with_marks(text: str, spans: Array) -> Array:
    """Extend tokens by combining marks after them that the tokenizer drops: an accent is part of its letter."""
    if text.isascii():
        return spans
    limits = [*spans[1:, 0].tolist(), len(text)]
    for index, (end, limit) in enumerate(zip(spans[:, 1].tolist(), limits, strict=False)):
        while end < limit and unicodedata.category(text[end]).startswith("M"):
            end += 1
        spans[index, 1] = end
    return spans
