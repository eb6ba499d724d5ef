"""The tokens of a task's training texts, the most frequent ones, or those of a file are the vocabulary of a model."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.distill_files import lm_files, squad_files
from support.tiny_tokenizers import SENTENCES, byte_pairs, word_pieces
from support.zeroed import FAMILIES, model_of
from transformers import AutoConfig, BertForMaskedLM, BertForQuestionAnswering, GPT2LMHeadModel

from ds_trainer.cuts.vocabulary import cut_vocabulary_for
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.recipe.cut_specs import VocabularySpec
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.registry import build_task, training_texts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_pieces()


@pytest.fixture
def task(tmp_path: Path) -> TextSpec:
    """Two training texts; the validation texts hold other tokens."""
    files = {"train.csv": SENTENCES[:2], "dev.csv": SENTENCES[4:]}
    for name, texts in files.items():
        rows = [f'"{text}",{label}' for text, label in zip(texts, ("yes", "no"), strict=True)]
        (tmp_path / name).write_text("\n".join(["text,label", *rows]) + "\n")
    names = {"train_file": "train.csv", "validation_file": "dev.csv"}
    return TextSpec(name="text", data_dir=str(tmp_path), text_columns=["text"], label_column="label", **names)


def cut(keep: Any, task: Any, tokenizer: Any) -> Any:
    """The tokenizer of a cut model."""
    model = model_of("bert", vocab_size=len(tokenizer))
    smaller, kept = cut_vocabulary_for(VocabularySpec(keep=keep), task, model, tokenizer)
    assert smaller.config.vocab_size == len(kept)
    return kept


def ordinary(tokenizer: Any) -> set[str]:
    """The tokens that are neither special nor single characters."""
    return {token for token in tokenizer.get_vocab() if len(token.removeprefix("##")) > 1 and token[0] != "["}


def test_the_tokens_of_the_training_texts_stay(task: TextSpec, tokenizer: Any) -> None:
    """And no others than those that spell any text; the validation texts do not count."""
    kept = cut("seen", task, tokenizer)
    assert ordinary(kept) == {t for text in SENTENCES[:2] for t in tokenizer.tokenize(text)} & ordinary(tokenizer)
    assert {"unhappy", "happiness"} <= ordinary(tokenizer) - ordinary(kept)


def test_the_most_frequent_tokens_stay(task: TextSpec, tokenizer: Any) -> None:
    """Exactly so many in all; every token that stays is at least as frequent as each that goes."""
    least = len(cut("seen", task, tokenizer)) - 3
    kept = cut(least, task, tokenizer)
    counts = Counter(token for text in SENTENCES[:2] for token in tokenizer.tokenize(text))
    gone = counts.keys() - kept.get_vocab().keys()
    assert len(kept) == least
    assert len(gone) == 3
    assert max(counts[token] for token in gone) <= min(counts[token] for token in ordinary(kept))


def test_the_tokens_of_a_file_stay(task: TextSpec, tokenizer: Any, tmp_path: Path) -> None:
    """A blank line and a line end of Windows are none of them; the training texts are not read."""
    (tmp_path / "tokens.txt").write_bytes(b"unhappy\r\n\nkitten\n##en\n")
    (tmp_path / "train.csv").unlink()
    assert ordinary(cut(str(tmp_path / "tokens.txt"), task, tokenizer)) == {"unhappy", "kitten", "##en"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokens.txt does not exist"),
        ("\n\n", "tokens.txt has no tokens: write one in each line"),
        ("rain\nzebra\nokapi\n", "lists 2 tokens that the tokenizer does not have, such as 'okapi', 'zebra': write"),
    ],
)
def test_a_file_that_names_no_token_is_refused(
    content: str | None, message: str, task: TextSpec, tokenizer: Any, tmp_path: Path
) -> None:
    """The message names the file, or some of its tokens."""
    if content is not None:
        (tmp_path / "tokens.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        cut(str(tmp_path / "tokens.txt"), task, tokenizer)


@pytest.mark.parametrize(("keep", "message"), [(3, "tokens must stay"), (9999, "all 145 tokens .* would stay")])
def test_a_number_that_cannot_be_kept_is_refused(keep: int, message: str, task: TextSpec, tokenizer: Any) -> None:
    """Fewer than spell any text, or all."""
    with pytest.raises(ValueError, match=message):
        cut(keep, task, tokenizer)


@pytest.mark.parametrize(
    ("kind", "head"), [("squad", BertForQuestionAnswering), ("mlm", BertForMaskedLM), ("clm", GPT2LMHeadModel)]
)
def test_every_family_gives_its_texts_and_runs_on_the_cut_model(kind: str, head: Any, tmp_path: Path) -> None:
    """Contexts and questions, or documents: the training examples have the tokens that they had before."""
    spec = parse_task(squad_files(tmp_path) if kind == "squad" else lm_files(kind, tmp_path))
    tokenizer = byte_pairs() if kind == "clm" else train_tokenizer([*SENTENCES, *training_texts(spec)], 300, True)
    family = "gpt2" if kind == "clm" else "bert"
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": len(tokenizer), "n_positions": 64})
    model = head(config).eval()
    smaller, kept = cut_vocabulary_for(VocabularySpec(keep="seen"), spec, model, tokenizer)
    tokens = []
    for name, each, its in (("whole", model, tokenizer), ("cut", smaller, kept)):
        save_folder(each, its, tmp_path / name)
        task = build_task(spec, tmp_path / name, tmp_path / "cache")
        task.build_model(tmp_path / name)
        tokens.append(its.convert_ids_to_tokens(task.examples("train").tokens["input_ids"].tolist()))
    assert len(kept) < len(tokenizer)
    assert tokens[0] == tokens[1]
