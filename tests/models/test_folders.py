"""Models and tokenizers that a run makes for itself."""

from ds_trainer.models.folders import train_tokenizer

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
