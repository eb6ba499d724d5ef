"""SQuAD tasks: questions of every script, a tokenizer of every kind to read them with, files, and models' outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.tiny_tokenizers import byte_level
from tokenizers import processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.data import evaluation_shard
from ds_trainer.tasks.squad.squad_score import normalised
from ds_trainer.tasks.squad.squad_task import SquadTask, WindowAnswer
from ds_trainer.tasks.squad_file import GoldAnswer, Question

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


def word_pieces() -> Any:
    """`[CLS] q [SEP] c [SEP]`, token types by side."""
    trained = train_tokenizer(TEXTS, 300, True)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, model_input_names=names, **trained.special_tokens_map
    )


def _byte_pairs() -> Any:
    return byte_level(TEXTS, 500, ["<pad>", "<s>", "</s>", "<unk>", "<mask>"])


def roberta_tokenizer() -> Any:
    """`<s> q </s></s> c </s>`, offsets trimmed of the space before a word."""
    backend, names = _byte_pairs(), ["input_ids", "attention_mask"]
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False)
    special = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **special)


def gpt2_tokenizer() -> Any:
    """No special tokens at all."""
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=_byte_pairs(), model_input_names=names, eos_token="</s>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "word pieces": word_pieces,
    "roberta": roberta_tokenizer,
    "gpt2": gpt2_tokenizer,
}


def write(folder: Path, questions: list[Question]) -> None:
    """A file of one article with a paragraph a question, for both splits of v1.1 and v2."""
    paragraphs = []
    for id, context, question, golds in questions:
        answers = [{"text": text, "answer_start": start} for text, start in golds]
        paragraphs.append({"context": context, "qas": [{"id": id, "question": question, "answers": answers}]})
    folder.mkdir(exist_ok=True)
    for name in ("train-v1.1.json", "dev-v1.1.json", "train-v2.0.json", "dev-v2.0.json"):
        text = json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]})
        (folder / name).write_text(text, encoding="utf-8")


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bert(tokenizer: Any) -> Any:
    return BertModel(BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL))


def squad(folder: Path, questions: list[Question], source: Path | None = None, **fields: Any) -> SquadTask:
    """The task over these questions, with small windows."""
    write(folder / "data", questions)
    if source is None:
        tokenizer = word_pieces()
        source = save(bert(tokenizer), tokenizer, folder / "bert")
    settings = {"max_seq_length": 40, "doc_stride": 11, "max_query_length": 16, **fields}
    spec = SquadSpec(data_dir=str(folder / "data"), **settings)
    return SquadTask(spec, load_tokenizer(source), source, folder / "cache")


YEAR = Question("q", "the year", "what?", (GoldAnswer("year", 4),))


def nothing_ahead(batch: Any) -> SimpleNamespace:
    """A perfect model's output, but for "no answer", which is ahead of every answer by 1.5."""
    out = perfect(batch)
    out.start_logits[:, 0], out.end_logits[:, 0] = 21.0, 20.5
    return out


def perfect(batch: Any) -> SimpleNamespace:
    """The output of a model that knows every window's labels."""
    rows, width = batch.inputs["input_ids"].shape
    generator = torch.Generator().manual_seed(0)
    start, end = torch.rand(2, rows, width, generator=generator)
    start[range(rows), batch.labels[:, 0]] = end[range(rows), batch.labels[:, 1]] = 20
    return SimpleNamespace(start_logits=start, end_logits=end)


def answered(task: SquadTask, predict: Callable[[Any], Any], size: int = 7) -> dict[int, WindowAnswer]:
    """What `predict` says to each window of the validation split, in batches by length."""
    examples = task.examples("validation")
    answers: dict[int, WindowAnswer] = {}
    for positions in evaluation_shard(examples.lengths, 0, 1, size):
        batch = task.collate(examples, positions)
        answers |= task.answers(predict(batch), batch)
    return answers
