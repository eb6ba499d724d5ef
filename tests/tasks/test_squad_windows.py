"""Windows of contexts: answers exact to the character, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.squad_tasks import TOKENIZERS, gpt2_tokenizer, hard_questions, word_pieces

from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.records import Row
from ds_trainer.tasks.squad.squad_file import Question
from ds_trainer.tasks.squad.squad_windows import Tokens, tokenised, windows

SHORT = SquadSpec(max_seq_length=40, doc_stride=11, max_query_length=16)


def rows_of(tokenizer: Any, spec: SquadSpec, questions: list[Question]) -> Iterator[tuple[Question, list[Any]]]:
    """Every question with its windows."""
    found: list[list[Any]] = [[] for _ in questions]
    for window in windows(tokenizer, spec, [Row(each, 1, number) for number, each in enumerate(questions)]):
        found[window.question].append(window)
    yield from zip(questions, found, strict=True)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def test_windows_are_the_tokenizers_own_pairs(tokenizer: Any) -> None:
    """Each window equals what the library cuts when its overlap is set to keep windows doc_stride apart.

    But for an end of text where there is no class token.
    """
    several = 0
    for question, found in rows_of(tokenizer, SHORT.model_copy(update={"max_query_length": 20}), hard_questions(1)):
        asked = tokenizer(question.question, add_special_tokens=False)["input_ids"]
        if len(asked) > 20:
            continue
        end = [] if tokenizer.cls_token_id is not None else [tokenizer.eos_token_id]
        room = 40 - len(asked) - len(end) - tokenizer.num_special_tokens_to_add(pair=True)
        expected = tokenizer(
            question.question,
            question.context,
            truncation="only_second",
            max_length=40 - len(end),
            stride=room - SHORT.doc_stride if room > SHORT.doc_stride else 0,
            return_overflowing_tokens=True,
            return_token_type_ids=True,
        )
        if room > SHORT.doc_stride:
            assert [window.columns["input_ids"] for window in found] == [[*ids, *end] for ids in expected["input_ids"]]
            assert {len(window.columns["input_ids"]) for window in found[:-1]} <= {40}
            # where the model takes them: the library gives the later windows of the others other types than the first
            if "token_type_ids" in tokenizer.model_input_names:
                assert [window.columns["token_type_ids"] for window in found] == expected["token_type_ids"]
            several += len(found) > 1
    assert several > 5


def test_a_class_token_at_the_end_is_found() -> None:
    """XLNet puts it last: "no answer" is there, wherever the row ends."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_pieces()
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    pair = "$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A:0 [SEP]:0 [CLS]:2", pair=pair, special_tokens=ids
    )
    for _, found in rows_of(tokenizer, SHORT, hard_questions(3, 10)):
        for window in found:
            assert window.columns["input_ids"][window.positions.null] == tokenizer.cls_token_id
            assert window.positions.null == len(window.columns["input_ids"]) - 1
            assert window.columns["token_type_ids"][-1] == 2


def test_without_a_class_token_an_end_of_text_says_that_there_is_no_answer() -> None:
    """GPT-2's rows get one behind the context, where a causal model has seen it all, and which is no answer itself."""
    tokenizer = gpt2_tokenizer()
    for _, found in rows_of(tokenizer, SHORT, hard_questions(3, 10)):
        for window in found:
            ids, places = window.columns["input_ids"], window.positions
            assert places.null == len(ids) - 1 == places.last + 1
            assert ids[-1] == tokenizer.eos_token_id
            assert window.columns["char_end"][-1] == -1
            assert {len(column) for column in window.columns.values()} == {len(ids)}
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no token for .no answer.: give it a cls_token or an eos_token"):
        list(rows_of(tokenizer, SHORT, hard_questions(3, 1)))


def test_accents_that_the_tokenizer_drops_belong_to_their_letter() -> None:
    """A decomposed é at the end of an answer is kept whole; plain gaps are left alone."""
    tokenizer = word_pieces()
    [tokens] = tokenised(tokenizer, ["cafe\u0301 re\u0301sume\u0301\u0323 ok"])
    assert tokens.spans[0, 0] == 0
    assert [end for end in tokens.spans[:, 1].tolist() if end in (4, 5, 13, 14, 15)] == [5, 15]
    assert Tokens([1, 2], np.array([[0, 5], [5, 6]])).covering(5, 5) is None
