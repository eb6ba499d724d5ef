"""Turn documents into sequences of tokens that a language model can learn from.

A long document is cut into parts, each with the special tokens that the tokenizer adds to a text. A part that is too
short or mostly unknown is dropped, and counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import LmSpec

_CHUNK = 512


Tally = Counter[str]
"""The numbers of "documents", of those that were "split" (conversations are cut), and of the parts that became
"examples", were too "short", of "unknown" tokens, or "unlabelled". Examples are counted before packing, also those that
`max_train_samples` or `max_eval_samples` leaves out."""


def summary(tally: Tally, spec: LmSpec, tokens: int) -> str:
    """Return the counts in words, with the number of tokens of the examples."""
    documents, cut = "documents", "split"
    short = f"{tally['short']:,} parts shorter than min_seq_length ({spec.min_seq_length})"
    dropped = f"{tally['unknown']:,} of unknown tokens (max_unknown {spec.max_unknown:g})"
    if spec.messages_column:
        documents, cut = "conversations", "cut at max_seq_length"
        dropped = f"{tally['unlabelled']:,} without a turn of the assistant"
    counted = f"{tally['documents']:,} {documents} ({tally['split']:,} {cut}) give {tally['examples']:,} examples"
    return f"{counted} of {tokens:,} tokens; {short} and {dropped} are dropped"


class Cutter:
    """Cut documents into sequences of at most `max_seq_length` tokens, and drop what is not worth learning from.

    `special` are the ids of tokens that stand for no text. It is an error if max_seq_length leaves no room for text.
    """

    def __init__(self, spec: LmSpec, tokenizer: Any, special: Iterable[int]) -> None:
        self.spec = spec
        self.before, self.after = _frame(tokenizer)
        causal, end_of_text = spec.name == "clm", tokenizer.eos_token_id
        # as in GPT-2's training, an end of text closes a document, unless the tokenizer itself adds special tokens
        closes = causal and end_of_text is not None and not self.before and not self.after
        self.end = [end_of_text] if closes else []
        # GPT-2's unknown token is its end of text: counted as unknown, it would drop whole documents
        self.unknown = None if tokenizer.unk_token_id == end_of_text else tokenizer.unk_token_id
        self.never_predicted = frozenset(() if causal else special)
        self.room = spec.max_seq_length - len(self.before) - len(self.after)
        if self.room < 1:
            added = spec.max_seq_length - self.room
            raise UserError(f"max_seq_length is {spec.max_seq_length}, and {added} of its tokens are special: raise it")

    def parts(self, document: Sequence[int], tally: Tally) -> Iterator[list[int]]:
        """Yield the sequences of one document's tokens, and count them in `tally`."""
        whole = [*document, *self.end]
        tally["documents"] += 1
        tally["split"] += len(whole) > self.room
        for start in range(0, max(1, len(whole)), self.room):
            part = whole[start : start + self.room]
            sequence = [*self.before, *part, *self.after]
            if len(sequence) < max(2, self.spec.min_seq_length):
                tally["short"] += 1
            elif self._is_unknown(part):
                tally["unknown"] += 1
            else:
                tally["examples"] += 1
                yield sequence

    def _is_unknown(self, part: list[int]) -> bool:
        """Return whether the share of unknown tokens reaches max_unknown; at max_unknown 0, a single one is enough."""
        unknown = 0 if self.unknown is None else part.count(self.unknown)
        return unknown >= max(1, self.spec.max_unknown * len(part)) or self.never_predicted.issuperset(part)


def tokenised_documents(texts: Iterable[str], tokenizer: Any) -> Iterator[list[list[int]]]:
    """Yield the token ids of whole documents, some documents at a time, without special tokens."""
    texts = iter(texts)
    while chunk := list(islice(texts, _CHUNK)):
        yield tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    ids = tokenizer("a")["input_ids"]
    special = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    text = [index for index, is_special in enumerate(special) if not is_special]
    if not text:
        raise UserError("the tokenizer has no token for 'a', so that the places of its special tokens are unknown")
    return ids[: text[0]], ids[text[-1] + 1 :]
