"""What SQuAD's answers may be: of models without a class token, of broken logits, at other thresholds."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.squad_examples import gpt2_tokenizer, with_words_only
from support.squad_tasks import YEAR, answered, bert, nothing_ahead, perfect, save, squad, word_pieces
from transformers import GPT2Config, GPT2Model

from ds_trainer.tasks.squad.squad_file import Question
from ds_trainer.tasks.squad.squad_task import best_spans
from ds_trainer.tasks.squad.squad_windows import SpanPositions


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = word_pieces()
    return save(bert(tokenizer), tokenizer, tmp_path_factory.mktemp("bert"))


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    tokenizer = gpt2_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    return save(GPT2Model(config), tokenizer, tmp_path / "gpt2")


def v2_questions(count: int) -> list[Question]:
    """Every third has no answer."""
    return [
        question._replace(answers=()) if number % 3 == 0 else question
        for number, question in enumerate(with_words_only(5, count))
    ]


def test_a_model_without_a_class_token_can_say_that_there_is_no_answer(gpt2: Path, tmp_path: Path) -> None:
    """A perfect GPT-2 scores 100 on v2, and its "no answer" is where it has seen the whole window."""
    fields = {"version_2_with_negative": True, "max_seq_length": 100, "doc_stride": 30}
    task = squad(tmp_path, v2_questions(30), gpt2, **fields)
    found = task.score("validation", answered(task, perfect))
    assert {found[name] for name in ("exact_match", "HasAns_exact", "NoAns_exact", "best_f1")} == {100}
    examples = task.examples("validation")
    assert (examples.fields["labels"][:, 2] == examples.lengths - 1).all()
    model = task.build_model(gpt2).eval()
    row = task.collate(examples, [0]).inputs
    other = {**row, "input_ids": row["input_ids"].clone()}
    other["input_ids"][0, examples.fields["labels"][0, 4]] += 1
    with torch.no_grad():
        one, changed = (model(**inputs).start_logits[0] for inputs in (row, other))
    assert one[0] == changed[0], "position 0 sees nothing"
    assert one[-1] != changed[-1]


def test_no_threshold_hides_a_better_one(encoder: Path, tmp_path: Path) -> None:
    """The best threshold is that of the texts before any was made "", whatever threshold is in use."""
    for threshold, reached in ((0.0, 0), (2.0, 100)):
        fields = {"version_2_with_negative": True, "null_score_diff_threshold": threshold}
        task = squad(tmp_path, [YEAR], encoder, **fields)
        found = task.score("validation", answered(task, nothing_ahead))
        assert found["exact_match"] == found["HasAns_f1"] == reached
        assert (found["best_exact"], found["best_exact_thresh"]) == (100, 1.5)
        assert (found["best_f1"], found["best_f1_thresh"]) == (100, 1.5)


def test_one_text_for_every_question_is_a_constant_answer(encoder: Path, tmp_path: Path) -> None:
    """No text counts as one, too. A perfect model's texts differ; a single question can have but one."""
    fields = {"version_2_with_negative": True, "max_seq_length": 100}
    task = squad(tmp_path, v2_questions(9), encoder, **fields)

    def silent(batch: Any) -> SimpleNamespace:
        out = perfect(batch)
        out.start_logits[:, 0], out.end_logits[:, 0] = 99.0, 99.0
        return out

    assert task.constant_answer("validation", answered(task, silent)) == '""'
    assert task.constant_answer("validation", answered(task, perfect)) is None
    alone = squad(tmp_path, [YEAR], encoder, **fields)
    assert alone.constant_answer("validation", answered(alone, perfect)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_have_no_score(value: float, encoder: Path, tmp_path: Path) -> None:
    """Wherever in the window; what stands at padding is no matter. The number of windows is told."""
    task = squad(tmp_path, with_words_only(4, 8), encoder, max_seq_length=100)
    lengths = task.examples("validation").lengths

    def predict(broken: int) -> Any:
        def out_of(batch: Any) -> SimpleNamespace:
            out = perfect(batch)
            out.end_logits[batch.ids < broken, 2] = value
            out.start_logits[batch.mask == 0] = value
            return out

        return out_of

    assert task.score("validation", answered(task, predict(0)))["f1"] == 100
    message = rf"validation: the model gives logits that are not finite .* for 3 of {len(lengths)} examples"
    with pytest.raises(ValueError, match=message):
        task.score("validation", answered(task, predict(3)))


def test_best_spans_are_the_best_of_all() -> None:
    """Against every pair by brute force: in the context, in order, no longer than allowed, no -inf among the valid."""
    generator = torch.Generator().manual_seed(1)
    start, end = torch.randn(2, 5, 12, generator=generator)
    places = SpanPositions(None, None, None, torch.tensor([3, 2, 1, 5, 4]), torch.tensor([11, 9, 3, 5, 3]))
    firsts, lasts, valid = best_spans(start, end, places, 4, 9)
    for row in range(5):
        inside = range(int(places.first[row]), int(places.last[row]) + 1)
        pairs = [(i, j) for i in inside for j in inside if i <= j < i + 4]
        expected = sorted(pairs, key=lambda pair: -float(start[row, pair[0]] + end[row, pair[1]]))[:9]
        assert int(valid[row]) == len(expected)
        assert list(zip(firsts[row].tolist(), lasts[row].tolist(), strict=True))[: len(expected)] == expected
    assert valid.tolist() == [9, 9, 6, 1, 0]
    assert int(lasts.max()) < 12


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_spans_are_valid_whatever_the_logits(value: float) -> None:
    """In the context, in order, no longer than allowed, and as many as there are: broken logits add none."""
    generator = torch.Generator().manual_seed(1)
    start, end = torch.randn(2, 4, 12, generator=generator)
    start[:, [1, 4, 11]] = value
    end[:, [0, 5, 11]] = value
    places = SpanPositions(None, None, None, torch.tensor([3, 2, 4, 5]), torch.tensor([9, 4, 4, 4]))
    firsts, lasts, valid = best_spans(start, end, places, 3, 30)
    assert valid.tolist() == [18, 6, 1, 0]
    for row, count in enumerate(valid.tolist()):
        pairs = list(zip(firsts[row, :count].tolist(), lasts[row, :count].tolist(), strict=True))
        assert len(set(pairs)) == count
        assert all(places.first[row] <= i <= j <= places.last[row] and j - i < 3 for i, j in pairs)
