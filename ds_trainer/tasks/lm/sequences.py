"""Turn documents into sequences of tokens that a language model can learn from, and pack sequences into rows.

A long text is cut into parts, each with the special tokens that the tokenizer adds to a text. A part that is too short
or mostly unknown is dropped, and counted.

A conversation is written by the tokenizer's chat template, with labels on the assistant's turns alone. A template may
mark these turns itself (`{% generation %}`). With any other, the conversation is rendered twice for each turn, up to
the prompt for it and up to its end: the turn is what the second text adds. A first message of the assistant answers
nothing, and has no labels.

Packing is best-fit (arXiv 2404.10830), which splits no document that fits. A row's `position_ids` begin at 0 with each
document, by which a model keeps the documents of a row apart.
"""

import re
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import Array, Chunk, Examples
from ds_trainer.tasks.lm.lm_text import Message

_CHUNK = 512
"""How many documents are tokenised at a time."""
_SEED = 0
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

    `special` are the ids of tokens that stand for no text.
    """

    def __init__(self, spec: LmSpec, tokenizer: Any, special: Iterable[int]) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        self.before, self.after = _frame(tokenizer)
        causal, end_of_text = spec.name == "clm", tokenizer.eos_token_id
        # as in GPT-2's training, an end of text closes a document, unless the tokenizer itself adds special tokens
        closes = causal and end_of_text is not None and not self.before and not self.after
        self.end = [end_of_text] if closes else []
        # GPT-2's unknown token is its end of text: counted as unknown, it would drop whole documents
        self.unknown = None if tokenizer.unk_token_id == end_of_text else tokenizer.unk_token_id
        self.never_predicted = frozenset(() if causal else special)
        self.room = spec.max_seq_length - len(self.before) - len(self.after)

    def sequences(self, documents: Iterable[str], tally: Tally) -> Iterator[Chunk]:
        """Yield the column "input_ids" of the sequences of some documents at a time; those dropped are in `tally`."""
        for some in tokenised_documents(documents, self.tokenizer):
            yield {"input_ids": [part for document in some for part in self._parts(document, tally)]}

    def _parts(self, document: Sequence[int], tally: Tally) -> Iterator[list[int]]:
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


class Conversations:
    """Turns the conversations of a task into sequences of tokens, of which some are labelled."""

    def __init__(self, spec: LmSpec, tokenizer: Any, source: str | Path) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {source} has no chat template, which messages_column needs: take that of a chat "
                f"model into the folder (chat_template.jinja), or write the conversations out as text (text_column)"
            )
        self._marks_turns = bool(re.search(r"{%-?\s*generation\b", tokenizer.get_chat_template()))

    def sequences(self, tokenised: Iterable[tuple[list[int], list[int]]], tally: Tally) -> Iterator[Chunk]:
        """Yield the columns "input_ids" and "labelled" of one conversation at a time, cut at max_seq_length.

        Those that are too short, or have no label, are counted in `tally` and dropped.
        """
        for tokens, labelled in tokenised:
            ids, labels = tokens[: self.spec.max_seq_length], labelled[: self.spec.max_seq_length]
            labels[:1] = [0]  # no token precedes it
            tally["documents"] += 1
            tally["split"] += len(ids) < len(tokens)
            if len(ids) < self.spec.min_seq_length:
                tally["short"] += 1
            elif not any(labels):
                tally["unlabelled"] += 1
            else:
                tally["examples"] += 1
                yield {"input_ids": [ids], "labelled": [labels]}

    def tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and 1 for each that belongs to a turn of the assistant, else 0.

        The template writes the special tokens, so that the tokenizer adds none.
        """
        try:
            if self._marks_turns:
                encoded = self.tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
                return encoded["input_ids"], encoded["assistant_masks"]
            text = self._render(messages)
            turns = list(self._turns(messages, text))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # a token that begins before a turn is not the model's to write, even if it ends inside
        labelled = [int(any(start <= first < end for start, end in turns)) for first, _ in encoded["offset_mapping"]]
        return encoded["input_ids"], labelled

    def _turns(self, messages: Sequence[Message], text: str) -> Iterator[tuple[int, int]]:
        """Yield where each turn of the assistant begins and ends in the rendered text, in characters."""
        for index, message in enumerate(messages):
            if not index or message["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], add_generation_prompt=True)
            until = self._render(messages[: index + 1])
            if not (until.startswith(prompt) and text.startswith(until)):
                where = "behind the prompt for an answer" if text.startswith(until) else "where others follow it"
                raise ValueError(
                    f"the chat template writes message {index + 1} in another way {where}, so that the assistant's "
                    f"turns cannot be found: mark the turns in the template ({{% generation %}} ... "
                    f"{{% endgeneration %}}), or end conversations with their first turn of the assistant"
                )
            yield len(prompt), len(until.rstrip())  # the model need not write the space between turns

    def _render(self, messages: Sequence[Message], **options: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))


def packed(documents: Examples, room: int) -> Examples:
    """Return rows of at most `room` tokens, each made of whole documents.

    Beside the columns of the documents they have `position_ids`, and `labelled`, which is 0 at each document's first
    token, as none of its tokens precedes that one. Without such a column all others are labelled.
    """
    rows = best_fit(documents.lengths, room)
    order = np.concatenate(rows)
    lengths, starts = documents.lengths[order], np.cumsum(documents.lengths[order])
    positions = np.arange(starts[-1]) - np.repeat(starts - lengths, lengths)
    index = np.repeat(documents.offsets[order], lengths) + positions
    tokens = {name: flat[index] for name, flat in documents.tokens.items()}
    labelled = tokens.get("labelled", np.uint8(1)) * (positions > 0)
    tokens |= {"position_ids": positions.astype(np.int32), "labelled": labelled.astype(np.uint8)}
    return Examples(np.concatenate([[0], starts[np.cumsum([len(row) for row in rows]) - 1]]), tokens)


def best_fit(lengths: Array, room: int) -> list[list[int]]:
    """Deal out lengths of at most `room`, from the longest to the shortest, each to the row that it fills best.

    Which of the equally long ones are in a row is left to chance, so that a row does not follow the order of the files.
    """
    shuffled = np.random.default_rng(_SEED).permutation(len(lengths))
    rows: list[list[int]] = []
    with_space = defaultdict[int, list[int]](list)
    spaces: list[int] = []  # the keys of `with_space` that have rows, in rising order
    for index in shuffled[np.argsort(-lengths[shuffled], kind="stable")].tolist():
        length = int(lengths[index])
        # the row that it fills best is the one with the least space that is large enough
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space, row = room, len(rows)
            rows.append([])
        else:
            space = spaces[place]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        rows[row].append(index)
        if space > length:
            if not with_space[space - length]:
                insort(spaces, space - length)
            with_space[space - length].append(row)
    return rows


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    ids = tokenizer("a")["input_ids"]
    special = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    text = [index for index, is_special in enumerate(special) if not is_special]
    return ids[: text[0]], ids[text[-1] + 1 :]
