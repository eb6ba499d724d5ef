"""Tokenizers of every kind, trained on a few sentences."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, DebertaV2Tokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, RobertaTokenizer

from ds_trainer.models.folders import train_tokenizer

SENTENCES = [
    "the rain in the hills and the rains of the valley",
    "it rained and rained, raining on trains and drains",
    "a naïve café in the straße keeps the kitten and the mitten",
    "the mat, the cat and the hat sat on that; this is thin",
    "unhappy happiness happens in happenings of hills",
    "no one knows the nose of the noses: 12 + 34 = 46",
]
_NAMES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
_SPECIAL = list(_NAMES.values())


def word_pieces() -> Any:
    return train_tokenizer(SENTENCES * 3, 170, True)


def byte_level(texts: list[str], size: int, special: list[str]) -> Tokenizer:
    """Byte-level BPE without special tokens around a text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = {"vocab_size": size, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    raw.train_from_iterator(texts, trainers.BpeTrainer(**learner))
    return raw


def byte_pairs() -> Any:
    """Byte-level BPE in RoBERTa's form."""
    raw = byte_level(SENTENCES * 3, 360, _SPECIAL)
    ends = (("</s>", raw.token_to_id("</s>")), ("<s>", raw.token_to_id("<s>")))
    raw.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    return _fast(raw, cls_token="<s>", sep_token="</s>")


def character_pairs() -> Any:
    """BPE of characters, which marks the ends of words and has an unknown token, as in GPT; numbered from the end."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    raw.normalizer, raw.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=180, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False, min_frequency=1
    )
    _train(raw, trainer)
    tokenizer = _fast(raw)
    tokenizer.add_tokens(["kitten", "happiness"])
    return tokenizer


def unigrams() -> Any:
    """Unigram, with special tokens behind a text as XLNet has them; a character that it does not have is unknown."""
    return _fast(_unigram())


def unigrams_and_bytes() -> Any:
    """The same, but a character that it does not have becomes the tokens of its bytes, as Llama's and Gemma's do."""
    raw = _unigram()
    model = json.loads(raw.to_str())["model"]
    vocabulary = [*map(tuple, model["vocab"]), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    raw.model = models.Unigram(vocabulary, model["unk_id"], byte_fallback=True)
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _fast(raw)


KINDS = {each.__name__: each for each in (word_pieces, byte_pairs, character_pairs, unigrams, unigrams_and_bytes)}


def of_class(name: str) -> Any:
    """A tokenizer of a class of transformers, which makes all but the tokens and merges anew where it is loaded."""
    pairs, pieces = (json.loads(each().backend_tokenizer.to_str())["model"] for each in (byte_pairs, unigrams))
    merges = [tuple(pair) for pair in pairs["merges"]]
    if name == "bert":
        return BertTokenizer(vocab=word_pieces().get_vocab())
    if name == "roberta":
        return RobertaTokenizer(vocab=pairs["vocab"], merges=merges)
    if name == "gpt2":
        return GPT2Tokenizer(vocab=pairs["vocab"], merges=merges, eos_token="</s>", unk_token="<unk>", bos_token="<s>")
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    return DebertaV2Tokenizer(vocab=[*map(tuple, pieces["vocab"])], mask_token="<mask>", **special)


def _unigram() -> Any:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    learner = {"vocab_size": 150, "special_tokens": _SPECIAL, "unk_token": "<unk>", "show_progress": False}
    _train(raw, trainers.UnigramTrainer(**learner))
    raw.post_processor = processors.TemplateProcessing(
        single="$A </s> <s>",
        pair="$A </s> $B </s> <s>",
        special_tokens=[(token, raw.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    return raw


def _train(raw: Any, trainer: Any) -> None:
    raw.train_from_iterator(SENTENCES * 3, trainer)


def _fast(raw: Any, **special: str) -> Any:
    names = {f"{name}_token": token for name, token in _NAMES.items() if raw.token_to_id(token) is not None}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names, **special)
