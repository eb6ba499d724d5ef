"""Questions of every script, and a tokenizer of every kind to read them with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.tasks.squad.squad_file import GoldAnswer, Question
from ds_trainer.tasks.squad.squad_score import normalised

_SCRIPTS = """
the a year 1980s $3.50 state-of-the-art U.S.A. O'Neill (in) 90% Zürich naïve ﬁnal ½ end. a/b x² µm km² ǅ Ω 𝔘𝔫𝔦
cafe\u0301 re\u0301sume\u0301 n\u0303andu\u0301 e\u0301\u0323 İstanbul straße z\u200bw «quoted» “q” it’s [SEP] </s>
日本語 東京タワー 한국어 русский عَرَبِيّ हिन्दी ไทย 🏔 👩🏽 👍🏿! 👨\u200d👩\u200d👧 ❤\ufe0f
"""
WORDS = _SCRIPTS.split()
SPACES = [" ", " ", " ", "  ", "\n", "\u00a0", "\t"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def hard_questions(seed: int, count: int = 60) -> list[Question]:
    """Contexts of every script; the answers are whole words (even places) or any characters (odd ones)."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        words = rng.choices(WORDS, k=rng.randint(1, 60))
        places, context = [], ""
        for word in words:
            places.append((len(context), len(context) + len(word)))
            context += word + rng.choice(SPACES)
        first = rng.randrange(len(words))
        start, end = places[first][0], places[min(len(words) - 1, first + rng.randrange(4))][1]
        if number % 2:
            start = rng.randrange(len(context))
            end = rng.randint(start + 1, min(len(context), start + 20))
        if not context[start:end].strip():
            start, end = places[0]
        asked = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        found.append(Question(f"q{number}", context, asked, (GoldAnswer(context[start:end], start),)))
    return found


def with_words_only(seed: int, count: int) -> list[Question]:
    """The hard questions whose answers are whole words, articles alone left out: in v1.1 they are worth no F1."""
    whole = hard_questions(seed, 2 * count)[::2]
    texts = {question.id: question.answers[0].text for question in whole}
    return [each for each in whole if texts[each.id].strip("\u200b") == texts[each.id] and normalised(texts[each.id])]


TEXTS = [text for question in hard_questions(0, 200) for text in (question.context, question.question)]


def word_pieces(lowercase: bool = True) -> Any:
    """`[CLS] q [SEP] c [SEP]`, token types by side."""
    trained = train_tokenizer(TEXTS, 300, lowercase)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, model_input_names=names, **trained.special_tokens_map
    )


_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_SPECIALS |= {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}


def _byte_pairs() -> Any:
    from tokenizers import ByteLevelBPETokenizer

    learner = ByteLevelBPETokenizer(add_prefix_space=False)
    learner.train_from_iterator(TEXTS, 500, special_tokens=["<pad>", "<s>", "</s>", "<unk>", "<mask>"])
    return learner._tokenizer


def roberta_tokenizer() -> Any:
    """`<s> q </s></s> c </s>`, offsets trimmed of the space before a word."""
    from tokenizers.processors import RobertaProcessing

    backend = _byte_pairs()
    backend.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True, add_prefix_space=False)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **_SPECIALS)


def modernbert_tokenizer() -> Any:
    """Byte-level, a template, and offsets with the space before a word."""
    from tokenizers.processors import TemplateProcessing

    backend = _byte_pairs()
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **_SPECIALS)


def gpt2_tokenizer() -> Any:
    """No special tokens at all."""
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=_byte_pairs(), model_input_names=names, eos_token="</s>")


def deberta_tokenizer() -> Any:
    """Unigram over text with its spaces as `▁`, token types by side."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    specials = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=specials, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **_SPECIALS)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "word pieces": word_pieces,
    "cased word pieces": lambda: word_pieces(lowercase=False),
    "roberta": roberta_tokenizer,
    "modernbert": modernbert_tokenizer,
    "gpt2": gpt2_tokenizer,
    "deberta": deberta_tokenizer,
}
