"""Models and tokenizers that a run makes for itself."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, CTRLTokenizer

from ds_trainer.files.reading import folder_hash
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.models.pretrained import tokenizer_state

TEXTS = ["ships sail the wide salt sea", "wings and winds lift a bird", "seeds grow roots in worm clay"]


def test_the_same_texts_give_the_same_tokenizer():
    """Every training numbers and merges alike: a run with a model of its own is reproduced by its seed."""
    vocabularies = [train_tokenizer(TEXTS, 90, True).get_vocab() for _ in range(8)]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)


def test_only_bert_s_own_tokens_are_special():
    """Characters told to the trainer beforehand are ordinary pieces: text that spells one is not cut out."""
    tokenizer = train_tokenizer(TEXTS, 90, True)
    assert set(tokenizer.all_special_tokens) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert tokenizer.get_added_vocab().keys() == set(tokenizer.all_special_tokens)
    assert tokenizer.decode(tokenizer("wide winds").input_ids, skip_special_tokens=True) == "wide winds"


def test_a_saved_tokenizer_is_the_same_whether_it_was_used_or_not(tmp_path):
    """Tokenising leaves truncation and padding in a tokenizer, which a run with cached data has not done."""
    tokenizer = train_tokenizer(["it rains", "it is wet"] * 5, 60, True)
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    save_folder(model, tokenizer, tmp_path / "new")
    tokenizer(["it rains"], truncation=True, max_length=4, padding=True)
    save_folder(model, tokenizer, tmp_path / "used")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (tmp_path / "used" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "name",
    ["config.json", "pytorch_model.bin", "model.compact.safetensors", "vocab.txt", "modeling_own.py", "own/layers.py"],
)
def test_a_hash_stands_for_all_that_a_model_is_loaded_from(name: str, tmp_path: Path) -> None:
    """Weights in any form, the tokenizer, code: another content or another name is another model."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"one")
    one = folder_hash(tmp_path)
    for added in ("README.md", "model.onnx", "model.onnx.data", "export.json", ".lock"):
        (tmp_path / added).write_text("no part of the model")
    assert folder_hash(tmp_path) == one
    file.write_bytes(b"two")
    assert folder_hash(tmp_path) != one
    file.write_bytes(b"one")
    assert folder_hash(tmp_path) == one
    file.rename(file.with_stem("other"))
    assert folder_hash(tmp_path) != one


def test_a_tokenizer_of_plain_python_is_known_by_its_merges(tmp_path: Path) -> None:
    """With the same words and other merges, texts become other tokens: tokenised data must not be used again."""
    words = ["<unk>", *(f"{word}{end}" for word in ("a", "b", "c", "ab", "bc") for end in ("", "@@"))]
    (tmp_path / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))

    def with_merges(*merges: str) -> CTRLTokenizer:
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        return CTRLTokenizer.from_pretrained(tmp_path)

    one, other = with_merges("a b", "b c</w>"), with_merges("b c</w>", "a b")
    assert one.tokenize("abc") != other.tokenize("abc")
    assert one.get_vocab() == other.get_vocab()
    assert tokenizer_state(one) != tokenizer_state(other)
    one.save_pretrained(tmp_path / "copy")
    assert tokenizer_state(CTRLTokenizer.from_pretrained(tmp_path / "copy")) == tokenizer_state(one)
