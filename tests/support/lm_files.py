"""Text and a tokenizer for language modelling."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedTokenizerFast,
)

LINES = [
    "it rains in the hills and it is wet in the valley",
    "the cat sat on the mat and the dog lay by the door of the old house near the wide river all day long",
    "no",
    "why is it so very wet and why is it never dry in the hills",
    "a dog and a cat and a bird are in the old house by the river",
]


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def bytes_tokenizer(beginning: bool) -> Any:
    """Byte-level BPE with an end of text and no padding, as GPT-2's; `beginning`: "<s>" before a text, as Llama's."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(LINES, trainer)
    if beginning:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<end>", bos_token="<s>")
