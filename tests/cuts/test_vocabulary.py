"""Tokens are cut out of tokenizers and models: which stay, what texts then become, and that outputs are as before."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import KINDS, SENTENCES, of_class, word_pieces
from support.zeroed import ENCODERS, FAMILIES, model_of, randomised
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from ds_trainer.cuts.vocabulary import Vocabulary, cut_vocabulary, cut_vocabulary_for
from ds_trainer.models.folders import save_folder
from ds_trainer.recipe.cut_specs import VocabularySpec
from ds_trainer.recipe.task_specs import TextSpec

WORDS = " ".join(SENTENCES).split()
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text("tehrainsdmou", max_size=9), st.text(max_size=5)), max_size=6
).map(" ".join)
"""Words that the tokenizers know, such that they can spell, and any characters."""
FEW = settings(max_examples=40, deadline=None, derandomize=True)


@cache
def known(kind: str) -> tuple[Any, Vocabulary]:
    tokenizer = KINDS[kind]()
    return tokenizer, Vocabulary(tokenizer)


def without_others(kind: str, texts: list[str]) -> tuple[Any, Any, set[str]]:
    """A tokenizer, the one with the tokens of these texts alone, and the tokens of that."""
    tokenizer, vocabulary = known(kind)
    kept = vocabulary.select([token for text in texts for token in tokens_of(tokenizer, text)], [])
    return tokenizer, vocabulary.tokenizer_of(kept), set(kept)


def tokens_of(tokenizer: Any, *texts: str) -> list[str]:
    """The tokens of a text, or of a pair, with the special ones around them; "<unk>" where one is unknown."""
    return tokenizer.convert_ids_to_tokens(tokenizer(*texts)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_kept_tokens_are_tokenised_as_before(kind: str) -> None:
    """The tokens that the smaller tokenizer was made for, and any other text whose tokens happen to be kept: the same
    tokens at the same places, framed by the same special ones, alone and in pairs."""

    @FEW
    @given(seen=st.lists(TEXTS, min_size=1, max_size=4), others=st.lists(TEXTS, max_size=4))
    def holds(seen: list[str], others: list[str]) -> None:
        tokenizer, cut, kept = without_others(kind, seen)
        assert all(kept.issuperset(tokens_of(tokenizer, text)) for text in seen)
        for texts in ((seen[0],), (seen[0], seen[-1]), *((text,) for text in others)):
            if kept.issuperset(tokens_of(tokenizer, *texts)):
                assert tokens_of(cut, *texts) == tokens_of(tokenizer, *texts)
                places = [each(*texts, return_offsets_mapping=True)["offset_mapping"] for each in (cut, tokenizer)]
                assert places[0] == places[1]

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_is_tokenised_and_decoded(kind: str) -> None:
    """Ids are rows of the smaller vocabulary; a text in ASCII is unknown only where it was; a tokenizer of bytes gives
    any text back."""

    @FEW
    @given(text=TEXTS)
    def holds(text: str) -> None:
        tokenizer, cut, kept = without_others(kind, ["the mat", "rains"])
        ids = cut(text)["input_ids"]
        decoded = cut.decode(ids, skip_special_tokens=True)
        assert all(0 <= id < len(kept) == len(cut) for id in ids)
        if kind == "byte_pairs":
            assert decoded == tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
        if text.isascii() and tokenizer.unk_token not in tokens_of(tokenizer, text):
            assert cut.unk_token not in tokens_of(cut, text)

    holds()


def test_a_token_of_bpe_stays_with_every_token_that_it_can_be_merged_from() -> None:
    """Two merges give "abc", and the characters beside it decide which of them is used: the parts of both stay."""
    vocabulary = {token: number for number, token in enumerate(["a", "b", "c", "d", "bc", "ab", "abc", "bcd", "cd"])}
    merges = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc"), ("bc", "d"), ("c", "d")]
    raw = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    cut = Vocabulary(tokenizer)
    assert cut.select(["abc"], []) == ["a", "b", "c", "d", "bc", "ab", "abc"]
    smaller = cut.tokenizer_of(cut.select(["abc"], []))
    assert smaller.tokenize("abcab") == tokenizer.tokenize("abcab") == ["abc", "ab"]
    assert (tokenizer.tokenize("cd"), smaller.tokenize("cd")) == (["cd"], ["c", "d"])


def test_unknown_characters_cost_a_unigram_tokenizer_what_they_did() -> None:
    """The score of an unknown character follows from the worst token, which stays although no text has it."""
    pieces = [("<unk>", 0.0), ("ab", -9.0), ("b", -1.0), ("xy", -20.0), ("z", -2.0), ("zz", -3.0)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0)), unk_token="<unk>")
    vocabulary = Vocabulary(tokenizer)
    kept = vocabulary.select(["ab"], [])
    assert kept == ["<unk>", "ab", "b", "xy", "z"]
    assert vocabulary.tokenizer_of(kept).tokenize("ab") == tokenizer.tokenize("ab") == ["ab"]


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_number_asked_for_stays(kind: str) -> None:
    """With a limit: those that must, then the first of the wanted ones that fit with all that they need."""
    _, vocabulary = known(kind)
    least = len(vocabulary.select([], []))
    wanted = sorted(vocabulary.ids, key=vocabulary.ids.__getitem__)
    for most in (least, least + 1, least + 7, len(wanted) - 1):
        kept = vocabulary.select(wanted, [], most)
        assert len(kept) == most
    with pytest.raises(ValueError, match=f"keep is {least - 1}, and {least} tokens must stay: .*: raise it"):
        vocabulary.select(wanted, [], least - 1)
    for most in (len(wanted), None):
        with pytest.raises(ValueError, match=f"all {len(wanted)} tokens of the tokenizer would stay"):
            vocabulary.select(wanted, [], most)


def test_other_tokenizers_are_refused() -> None:
    """Those that are written in Python, that know whole words alone, or whose class fixes the number of a token."""
    with pytest.raises(ValueError, match="of a ByT5Tokenizer cannot be cut, only that of a fast one"):
        Vocabulary(transformers.ByT5Tokenizer())
    raw = Tokenizer(models.WordLevel({"[UNK]": 0, "it": 1}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="kinds 'WordPiece', 'BPE'"):
        Vocabulary(PreTrainedTokenizerFast(tokenizer_object=raw))
    pieces = [("▁rain", -3.0), ("▁hills", -3.0), ("<unk>", 0.0), ("<pad>", 0.0), ("</s>", 0.0)]
    vocabulary = Vocabulary(transformers.T5Tokenizer(vocab=pieces, extra_ids=0))
    with pytest.raises(ValueError, match="a T5Tokenizer loads its tokens differently once they are renumbered"):
        vocabulary.tokenizer_of(vocabulary.select([], []))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_pieces()


def seen(tokenizer: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(" ".join(SENTENCES[:2]))["input_ids"])


def outputs(model: Any, tokenizer: Any) -> torch.Tensor:
    """The logits for two texts, one after another: none is padded."""
    batches = [tokenizer(text, return_tensors="pt").input_ids for text in SENTENCES[:2]]
    with torch.no_grad():
        return torch.cat([model(input_ids=ids).logits.flatten(0, -2) for ids in batches])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_tokens_that_stay_are_those_of_the_whole_model(family: str, tied: bool, tokenizer: Any) -> None:
    """Heads over the vocabulary are cut, tied to the embeddings or not, and their biases, by whatever names a family
    gives them; padded rows of embeddings go, too. The given model stays as it is."""
    kind = transformers.AutoModelForMaskedLM if family in ENCODERS else transformers.AutoModelForCausalLM
    fields = FAMILIES[family] | {"vocab_size": len(tokenizer) + 7, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = randomised(kind.from_config(transformers.AutoConfig.for_model(family, **fields)))
    smaller, cut = cut_vocabulary(model, tokenizer, seen(tokenizer))
    rows = [tokenizer.get_vocab()[token] for token in sorted(cut.get_vocab(), key=cut.get_vocab().get)]
    torch.testing.assert_close(outputs(smaller, cut), outputs(model, tokenizer)[:, rows], rtol=1e-6, atol=1e-6)
    shared = smaller.get_output_embeddings().weight is smaller.get_input_embeddings().weight
    assert shared == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert not any(len(tokenizer) + 7 in parameter.shape for parameter in smaller.parameters())
    assert smaller.config.vocab_size == smaller.get_input_embeddings().num_embeddings == len(cut) < len(tokenizer)
    assert type(smaller) is type(model)
    assert model.config.vocab_size == len(tokenizer) + 7


def test_configs_name_the_same_tokens_as_before(tokenizer: Any) -> None:
    """By new numbers, in lists as well; tokens that they name stay. The number of a row without a token goes, and one
    that no row had stays."""
    named = tokenizer.get_vocab()
    model = model_of("gpt2", vocab_size=len(tokenizer) + 2, pad_token_id=named["[PAD]"])
    model.config.bos_token_id, model.config.eos_token_id = named["happiness"], 5000
    model.config.sep_token_id = len(tokenizer) + 1
    model.generation_config.eos_token_id = [named["[SEP]"], named["mitten"]]
    model.generation_config.bad_words_ids = [[named["##en"], named["kitten"]], [named["[UNK]"]]]
    smaller, cut = cut_vocabulary(model, tokenizer, [])
    ids = cut.get_vocab()
    assert smaller.config.pad_token_id == ids["[PAD]"]
    assert (smaller.config.bos_token_id, smaller.config.eos_token_id) == (ids["happiness"], 5000)
    assert smaller.config.sep_token_id is None
    assert smaller.generation_config.eos_token_id == [ids["[SEP]"], ids["mitten"]]
    assert smaller.generation_config.bad_words_ids == [[ids["##en"], ids["kitten"]], [ids["[UNK]"]]]
    assert model.config.bos_token_id == named["happiness"]


def test_folders_are_loaded_by_the_auto_classes(tmp_path: Path) -> None:
    """For every kind of tokenizer, and for classes that make theirs anew: plain files, and logits as before."""
    made = {kind: build() for kind, build in KINDS.items()}
    made |= {name: of_class(name) for name in ("bert", "roberta", "gpt2", "deberta")}
    for name, tokenizer in made.items():
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token
        model = model_of("bert", vocab_size=len(tokenizer))
        save_folder(*cut_vocabulary(model, tokenizer, seen(tokenizer)), tmp_path / name)
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        after = outputs(loaded, AutoTokenizer.from_pretrained(tmp_path / name))
        torch.testing.assert_close(after, outputs(model, tokenizer), rtol=1e-6, atol=1e-6)


def test_a_model_that_depends_on_the_numbers_of_tokens_is_refused(tokenizer: Any) -> None:
    """RoBERTa counts positions from the number of its padding token: here it would move, and all positions with it."""
    padding = tokenizer.get_vocab()["mitten"]
    model = model_of("roberta", vocab_size=len(tokenizer), pad_token_id=padding, max_position_embeddings=400)
    with pytest.raises(ValueError, match="RobertaForSequenceClassification computes something else once its tokens"):
        cut_vocabulary(model, tokenizer, seen(tokenizer))


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


def test_the_seen_tokens_stay_or_the_most_frequent_ones(task: TextSpec, tokenizer: Any) -> None:
    """No others than those that spell any text; the validation texts do not count.

    With a number, exactly as many stay, and each of them is at least as frequent as each that goes.
    """
    kept = cut("seen", task, tokenizer)
    counts = Counter(token for text in SENTENCES[:2] for token in tokenizer.tokenize(text))
    assert ordinary(kept) == counts.keys() & ordinary(tokenizer)
    assert {"unhappy", "happiness"} <= ordinary(tokenizer) - ordinary(kept)
    fewer = cut(len(kept) - 3, task, tokenizer)
    gone = counts.keys() - fewer.get_vocab().keys()
    assert (len(fewer), len(gone)) == (len(kept) - 3, 3)
    assert max(counts[token] for token in gone) <= min(counts[token] for token in ordinary(fewer))


def test_the_tokens_of_a_file_stay(task: TextSpec, tokenizer: Any, tmp_path: Path) -> None:
    """A blank line and a line end of Windows are none of them; the training texts are not read.

    A file without tokens, or with others than the tokenizer's, is refused.
    """
    listed = tmp_path / "tokens.txt"
    listed.write_bytes(b"unhappy\r\n\nkitten\n##en\n")
    (tmp_path / "train.csv").unlink()
    assert ordinary(cut(str(listed), task, tokenizer)) == {"unhappy", "kitten", "##en"}
    for content, message in (
        ("\n\n", "tokens.txt has no tokens"),
        ("rain\nzebra\nokapi\n", "2 tokens .* 'okapi', 'zebra'"),
    ):
        listed.write_text(content)
        with pytest.raises(ValueError, match=message):
            cut(str(listed), task, tokenizer)
