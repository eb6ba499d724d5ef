"""Turn documents into sequences of tokens that a language model can learn from.

A long document is cut into parts, each with the special tokens that the tokenizer adds to a text. A part that is too
short or mostly unknown is dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.ranks.failures import UserError

_CHUNK = 512


@dataclass
class Tally:
    """How many documents were read, how many of them were split, and how many parts became examples or were dropped.

    `examples` are counted before `max_train_samples` and `max_eval_samples`.
    """

    documents: int = 0
    split: int = 0
    examples: int = 0
    short: int = 0
    unknown: int = 0


class Cutter:
    """Cut documents into sequences by a spec's lengths, and drop what is not worth learning from.

    "clm" closes a document with the end of text, as GPT-2's training does, where the tokenizer itself adds nothing.
    An unknown token that is also the end of text, as GPT-2's, does not count as unknown. `special` are ids of tokens
    that stand for no text. It is an error if max_seq_length leaves no room for text.
    """

    def __init__(self, spec: LmSpec, tokenizer: Any, special: Iterable[int]) -> None:
        self.spec = spec
        self.before, self.after = _frame(tokenizer)
        causal, end_of_text = spec.name == "clm", tokenizer.eos_token_id
        closes = causal and end_of_text is not None and not self.before and not self.after
        self.end = [end_of_text] if closes else []
        self.unknown = None if tokenizer.unk_token_id == end_of_text else tokenizer.unk_token_id
        self.never_predicted = frozenset(() if causal else special)
        self.room = spec.max_seq_length - len(self.before) - len(self.after)
        if self.room < 1:
            raise UserError(
                f"max_seq_length is {spec.max_seq_length}, and the tokenizer adds {len(self.before) + len(self.after)} "
                f"special tokens: raise it"
            )

    def parts(self, document: Sequence[int], tally: Tally) -> Iterator[list[int]]:
        """Yield the sequences of a document's tokens, and count them in `tally`."""
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
        """Return whether too many of the text's own tokens are unknown; max_unknown 0 drops from the first one on."""
        unknown = 0 if self.unknown is None else part.count(self.unknown)
        return unknown >= max(1, self.spec.max_unknown * len(part)) or self.never_predicted.issuperset(part)


def tokenised_documents(texts: Iterable[str], tokenizer: Any) -> Iterator[list[list[int]]]:
    """Yield the token ids of some documents at a time, without special tokens and uncut."""
    texts = iter(texts)
    while chunk := list(islice(texts, _CHUNK)):
        yield tokenizer(
            chunk,
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text."""
    ids = tokenizer("a")["input_ids"]
    special = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    text = [index for index, is_special in enumerate(special) if not is_special]
    if not text:
        raise UserError("the tokenizer has no token for 'a': it cannot tell where its special tokens go")
    return ids[: text[0]], ids[text[-1] + 1 :]
