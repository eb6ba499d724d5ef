"""Which tokens stay, and how a tokenizer with fewer of them tokenises texts."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import KINDS, SENTENCES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast, T5Tokenizer

from ds_trainer.cuts.vocabulary import Vocabulary

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
def test_exactly_so_many_tokens_stay(kind: str) -> None:
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


def test_a_class_that_fixes_the_number_of_a_token_is_refused() -> None:
    """Its unknown token would become another one, where an ordinary token in front of it went."""
    pieces = [("▁rain", -3.0), ("▁hills", -3.0), ("<unk>", 0.0), ("<pad>", 0.0), ("</s>", 0.0)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    with pytest.raises(ValueError, match="a T5Tokenizer loads its tokens differently once they are renumbered"):
        Vocabulary(tokenizer).tokenizer_of(Vocabulary(tokenizer).select([], []))


def test_other_tokenizers_are_refused() -> None:
    """Those that are written in Python, and those that know whole words alone."""
    with pytest.raises(ValueError, match="of a ByT5Tokenizer cannot be cut, since it is written in Python"):
        Vocabulary(ByT5Tokenizer())
    raw = Tokenizer(models.WordLevel({"[UNK]": 0, "it": 1}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="of a WordLevel tokenizer cannot be cut: known are 'WordPiece', 'BPE'"):
        Vocabulary(PreTrainedTokenizerFast(tokenizer_object=raw))
