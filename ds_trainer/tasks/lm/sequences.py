"""Documents into sequences of tokens that a language model can learn from.

A long document is cut in parts, each with the special tokens that the tokenizer gives a text; what is too short or
mostly unknown is dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.ranks.failures import UserError

_TEXTS, _CHARACTERS = 4096, 1 << 22


@dataclass
class Tally:
    """What became of the documents. `examples` are counted before `max_train_samples` and `max_eval_samples`."""

    documents: int = 0
    split: int = 0
    examples: int = 0
    short: int = 0
    unknown: int = 0

    def as_notes(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cutter:
    """Cuts documents by a spec's lengths, and leaves out what is not worth learning from.

    `before` and `after` frame every part, `end` closes a document. `idle` tokens are never predicted.
    """

    spec: LmSpec
    before: list[int]
    after: list[int]
    end: list[int]
    unknown: int | None
    idle: frozenset[int]

    @property
    def room(self) -> int:
        """Tokens of a document that a part holds."""
        return self.spec.max_seq_length - len(self.before) - len(self.after)

    def parts(self, document: Sequence[int], tally: Tally) -> Iterator[list[int]]:
        """The sequences of a document's tokens, counted in `tally`."""
        whole = [*document, *self.end]
        tally.documents += 1
        tally.split += len(whole) > self.room
        for start in range(0, max(1, len(whole)), self.room):
            part = whole[start : start + self.room]
            sequence = [*self.before, *part, *self.after]
            if len(sequence) < max(2, self.spec.min_seq_length):
                tally.short += 1
            elif self._is_unknown(part):
                tally.unknown += 1
            else:
                tally.examples += 1
                yield sequence

    def _is_unknown(self, part: list[int]) -> bool:
        """Among the text's own tokens; a share of 0 still takes one unknown token."""
        found = 0 if self.unknown is None else part.count(self.unknown)
        return found >= max(1, self.spec.max_unknown * len(part)) or self.idle.issuperset(part)


def cutter_for(spec: LmSpec, tokenizer: Any, special: Iterable[int]) -> Cutter:
    """How this tokenizer's sequences are framed; ValueError where max_seq_length leaves no room for text.

    "clm" closes a document with the end of text, as GPT-2's training does, where the tokenizer itself adds nothing.
    GPT-2's unknown token, which is its end of text, is none.
    """
    before, after = _frame(tokenizer)
    causal, end_of_text = spec.name == "clm", tokenizer.eos_token_id
    end = [end_of_text] if causal and end_of_text is not None and not before and not after else []
    unknown = None if tokenizer.unk_token_id == end_of_text else tokenizer.unk_token_id
    cutter = Cutter(spec, before, after, end, unknown, frozenset() if causal else frozenset(special))
    if cutter.room < 1:
        raise UserError(
            f"max_seq_length is {spec.max_seq_length}, and the tokenizer adds {len(before) + len(after)} special "
            f"tokens: raise it"
        )
    return cutter


def tokenised_documents(texts: Iterable[str], tokenizer: Any) -> Iterator[list[list[int]]]:
    """Token ids of some documents at a time, without special tokens and uncut."""
    for chunk in _chunks(texts):
        yield tokenizer(
            chunk,
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    whole = tokenizer("a")["input_ids"]
    added = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    text = [place for place, is_added in enumerate(added) if not is_added]
    if not text:
        raise UserError("the tokenizer has no token for 'a': it cannot tell where its special tokens go")
    return whole[: text[0]], whole[text[-1] + 1 :]


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == _TEXTS or characters >= _CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
