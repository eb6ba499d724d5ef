"""Text and a tokenizer for language modelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.tiny_tokenizers import byte_level
from tokenizers import processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.lm.lm_task import LmTask

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
    raw = byte_level(LINES, 300, ["<end>", "<s>"])
    if beginning:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<end>", bos_token="<s>")


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template in which the end of text ends every turn."""


def decoder_folder(folder: Path, config: Any, template: str | None = None) -> Path:
    """A decoder with random weights and Llama's way to begin a text, or GPT-2's, with a chat template."""
    tokenizer = bytes_tokenizer(config.model_type == "llama")
    tokenizer.chat_template = template
    torch.manual_seed(0)
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lm_task(folder: Path, source: Path, documents: list[Any], **fields: Any) -> LmTask:
    """The task "clm" over lines, or over conversations (lists of messages), with a cache of its own in `folder`."""
    if isinstance(documents[0], str):
        fields = {"train_file": "text.txt", "validation_file": "text.txt"} | fields
        (folder / "text.txt").write_text("\n".join(documents))
    else:
        files = {"train_file": "chat.jsonl", "validation_file": "chat.jsonl", "messages_column": "messages"}
        fields = files | fields
        (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in documents))
    spec = LmSpec(name="clm", data_dir=str(folder), **{"min_seq_length": 2} | fields)
    return LmTask(spec, load_tokenizer(source), source, folder / "cache")


def chat(*contents: str, system: str = "") -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns
