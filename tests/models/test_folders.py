"""Models and tokenizers that a run makes for itself."""

from transformers import BertConfig, BertModel

from ds_trainer.models.folders import save_folder, train_tokenizer

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
