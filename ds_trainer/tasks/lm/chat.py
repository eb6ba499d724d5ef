"""Conversations as the tokenizer's chat template writes them, with labels on the assistant's turns alone.

A template may mark these turns itself (`{% generation %}`). With any other, the conversation is rendered twice for each
turn, up to the prompt for it and up to its end: the turn is what the second text adds. A first message of the assistant
answers nothing, and has no labels.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import Chunk
from ds_trainer.tasks.lm.lm_text import Message
from ds_trainer.tasks.lm.sequences import Tally


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
