"""SQuAD from files to a score: models of every family, windows merged, v2, artifacts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.squad_tasks import (
    SMALL,
    TOKENIZERS,
    YEAR,
    answered,
    bert,
    gpt2_tokenizer,
    hard_questions,
    nothing_ahead,
    perfect,
    save,
    squad,
    with_words_only,
    word_pieces,
    write,
)
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2Model,
)

from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.data import Examples
from ds_trainer.tasks.squad.squad_file import GoldAnswer, Question
from ds_trainer.tasks.squad.squad_task import SquadTask, WindowAnswer, best_spans
from ds_trainer.tasks.squad.squad_windows import SpanPositions
from ds_trainer.tasks.task import PAD_LOGIT


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = word_pieces()
    return save(bert(tokenizer), tokenizer, tmp_path_factory.mktemp("bert"))


def test_a_perfect_model_scores_100(tokenizer: Any, encoder: Path, tmp_path: Path) -> None:
    """Logits at the gold positions give every answer to the character, through windows, merging and files."""
    questions = with_words_only(4, 40)
    write(tmp_path, questions)
    spec = SquadSpec(data_dir=str(tmp_path), max_seq_length=200, doc_stride=50, max_query_length=40)
    task = SquadTask(spec, tokenizer, encoder, tmp_path / "cache")
    answers = answered(task, perfect)
    assert task.score("validation", answers) == {"exact_match": 100.0, "f1": 100.0}
    predictions = task.artifacts("validation", answers)["predictions.json"]
    assert list(predictions) == [question.id for question in questions]
    assert list(predictions.values()) == [question.answers[0].text for question in questions]


def test_an_answer_that_no_token_covers_is_counted(encoder: Path, tmp_path: Path, caplog: Any) -> None:
    """A control character that the tokenizer drops cannot be learnt: it is no answer in the window.

    Limits count questions, spread over the file; long questions are cut; a second question of an id is an error.
    """
    caplog.set_level("INFO", logger="ds_trainer")
    question = Question("q", "the a \x01 the", "the year " * 20, (GoldAnswer("\x01", 6),))
    task = squad(tmp_path, [question, *hard_questions(0, 4)], encoder, max_query_length=5, max_eval_samples=2)
    examples = task.examples("train")
    assert examples.fields["labels"][0, :2].tolist() == [0, 0]
    assert "the answers of 1 questions are in no window" in caplog.text
    assert f"squad train: {tmp_path}/data/train-v1.1.json: 5 questions kept; 5 questions in" in caplog.text
    asked = task.tokenizer(question.question, add_special_tokens=False)["input_ids"][:5]
    assert examples.row(0)["input_ids"][1:7].tolist() == [*asked, task.tokenizer.sep_token_id]
    assert [each.id for each in task.questions("validation")] == ["q", "q1"]
    with pytest.raises(ValueError, match="several questions have the same id: 'q'"):
        squad(tmp_path, [question, question], encoder).examples("train")


def test_two_models_agree_by_their_texts(encoder: Path, tmp_path: Path) -> None:
    """Whatever their logits are."""
    questions = [Question(f"q{i}", "the year state", "what?", (GoldAnswer("year", 4),)) for i in range(4)]
    task = squad(tmp_path, questions, encoder)
    answers = answered(task, perfect)
    others = {id: answer._replace(start_logits=[x / 2 for x in answer.start_logits]) for id, answer in answers.items()}
    assert task.agreement("validation", answers, others) == 1
    first = int(task.examples("validation").fields["labels"][0, 3])
    others[0] = WindowAnswer([first], [first], [9.0], [9.0], (0.0, 0.0))
    assert task.agreement("validation", answers, others) == 0.75


def test_nothing_is_answered_above_the_threshold_only(encoder: Path, tmp_path: Path) -> None:
    """The text stays where "no answer" is ahead by no more than null_score_diff_threshold."""
    for threshold, text in ((0.0, ""), (1.49, ""), (1.5, "year"), (2.0, "year")):
        fields = {"version_2_with_negative": True, "null_score_diff_threshold": threshold}
        task = squad(tmp_path, [YEAR], encoder, **fields)
        files = task.artifacts("validation", answered(task, nothing_ahead))
        assert files["predictions.json"] == {"q": text}
        assert files["null_odds.json"] == {"q": 1.5}
    plain = squad(tmp_path, [YEAR], encoder)
    files = plain.artifacts("validation", answered(plain, nothing_ahead))
    assert files["predictions.json"] == {"q": "year"}
    assert set(files) == {"predictions.json", "nbest_predictions.json"}


def test_the_windows_of_a_question_are_merged(encoder: Path, tmp_path: Path) -> None:
    """The best span of all windows wins, a text counts once, and "no answer" is as sure as in the least sure window."""
    question = max(hard_questions(6, 40), key=lambda each: len(each.context))
    task = squad(tmp_path, [question], encoder, version_2_with_negative=True, n_best_size=5, max_query_length=8)
    examples = task.examples("validation")
    assert len(examples) > 3
    labels = examples.fields["labels"]
    spans = [(int(row[3]), int(row[3])) for row in labels]
    answers = {
        id: WindowAnswer([start], [end], [float(id)], [0.0], (2.0 - id, 0.0)) for id, (start, end) in enumerate(spans)
    }
    files = task.artifacts("validation", answers)
    best = len(examples) - 1
    row = examples.row(best)
    text = question.context[row["char_start"][spans[best][0]] : row["char_end"][spans[best][1]]]
    nbest = files["nbest_predictions.json"][question.id]
    assert files["predictions.json"][question.id] == nbest[0]["text"] == text
    assert files["null_odds.json"][question.id] == pytest.approx(2.0 - best - best)
    texts = [entry["text"] for entry in nbest]
    assert len(set(texts)) == len(texts) <= 6
    assert "" in texts
    assert sum(entry["probability"] for entry in nbest) == pytest.approx(1)
    assert all(question.context[entry["start"] : entry["end"]] == entry["text"] for entry in nbest)


FAMILIES: dict[str, tuple[Callable[[], Any], Any]] = {
    "bert": (word_pieces, BertConfig),
    "gpt2": (gpt2_tokenizer, GPT2Config),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_models_answers_the_same_alone_and_in_a_batch(family: str, tmp_path: Path) -> None:
    """From files to scores and artifacts; padding changes no answer, and every window has a valid one."""
    make_tokenizer, config = FAMILIES[family]
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = AutoModel.from_config(config(vocab_size=len(tokenizer), pad_token_id=0, **SMALL))
    source = save(model, tokenizer, tmp_path / "model")
    task = squad(tmp_path, hard_questions(7, 12), source, n_best_size=3, max_seq_length=48)
    model = task.build_model(source).eval()
    with torch.no_grad():
        model.qa_outputs.weight.mul_(20)
        batched, alone = (answered(task, lambda batch: model(**batch.inputs), size) for size in (7, 1))
    assert task.agreement("validation", batched, alone) == 1
    for id, answer in batched.items():
        np.testing.assert_allclose(answer.null_logits, alone[id].null_logits, atol=1e-4)
        np.testing.assert_allclose(answer.start_logits, alone[id].start_logits, atol=1e-4)
        assert all(0 <= j - i < 30 for i, j in zip(answer.starts, answer.ends, strict=True))
    found = task.score("validation", batched)
    assert found == task.score("validation", alone)
    assert 0 <= found["exact_match"] <= found["f1"] <= 100
    files = task.artifacts("validation", batched)
    assert all(files["predictions.json"].values())


def test_a_batch_carries_what_the_model_takes_and_keeps_the_rest_apart(encoder: Path, tmp_path: Path) -> None:
    """Offsets go nowhere; token types go to `others` where the model knows none, for a teacher of another family."""
    task = squad(tmp_path, hard_questions(0, 6), encoder)
    batch = task.collate(task.examples("train"), [3, 1])
    assert batch.inputs.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert batch.others == {}
    assert batch.inputs["token_type_ids"][0, batch.labels[0, 3]] == 1
    distilled = DistilBertModel(DistilBertConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, hidden_dim=16))
    tokenizer = word_pieces()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    other = squad(tmp_path, hard_questions(0, 6), save(distilled, tokenizer, tmp_path / "distil"))
    of_student = other.collate(other.examples("train"), [3, 1])
    assert of_student.inputs.keys() == {"input_ids", "attention_mask"}
    of_teacher = other.inputs_for(task.build_model(encoder), of_student)
    assert all(torch.equal(of_teacher[name], value) for name, value in batch.inputs.items())


def test_the_loss_is_the_mean_over_start_and_end_without_padding(encoder: Path, tmp_path: Path) -> None:
    """In fp32 from bf16 logits; what the model says of padding counts nothing, however high."""
    task = squad(tmp_path, hard_questions(0, 6), encoder)
    examples: Examples = task.examples("train")
    positions = [int(examples.lengths.argmax()), int(examples.lengths.argmin())]
    batch = task.collate(examples, positions)
    out = perfect(batch)
    out.start_logits, out.end_logits = (logits.bfloat16() for logits in (out.start_logits / 10, out.end_logits / 10))
    short = int(examples.lengths.min())
    out.start_logits[1, short:] = out.end_logits[1, short:] = 50
    terms = []
    for row, length in ((0, int(examples.lengths.max())), (1, short)):
        for label, logits in ((0, out.start_logits), (1, out.end_logits)):
            logs = logits[row, :length].float().log_softmax(0)
            terms.append(-logs[batch.labels[row, label]])
    torch.testing.assert_close(task.loss(out, batch), torch.stack(terms).mean())
    start, end = task.logits(out, batch)
    assert start.shape == end.shape == batch.inputs["input_ids"].shape
    assert (start[1, short:] == torch.tensor(PAD_LOGIT).bfloat16()).all()


def test_windows_beside_a_long_question_have_no_gaps(encoder: Path, tmp_path: Path) -> None:
    """They are one window apart where doc_stride is more; a question that leaves no room at all is refused."""
    question = hard_questions(0, 1)[0]._replace(question="year " * 6, context="the a year state " * 20)
    question = question._replace(answers=(GoldAnswer("the", 0),))
    task = squad(tmp_path, [question], encoder, doc_stride=32)  # 40 - 3 special ones - 6 = 31
    examples = task.examples("train")
    places = examples.fields["labels"][:, 3:]
    context = task.tokenizer(question.context, add_special_tokens=False)["input_ids"]
    rows = [examples.row(index)["input_ids"][first : last + 1] for index, (first, last) in enumerate(places)]
    assert len(rows) > 2
    assert np.concatenate(rows).tolist() == context
    with pytest.raises(ValueError, match=r"question 'q0': max_seq_length 9 leaves no room .* lower max_query_length"):
        squad(tmp_path, [question], encoder, max_seq_length=9).examples("train")


def test_a_head_that_was_not_trained_has_no_score(encoder: Path, tmp_path: Path) -> None:
    """An encoder alone can be trained, and not evaluated."""
    with pytest.raises(ValueError, match="is no trained question answering head"):
        squad(tmp_path, hard_questions(0, 2), encoder).check_trained(encoder)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    tokenizer = gpt2_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    return save(GPT2Model(config), tokenizer, tmp_path / "gpt2")


def test_a_model_without_a_class_token_can_say_that_there_is_no_answer(gpt2: Path, tmp_path: Path) -> None:
    """A perfect GPT-2 scores 100 on v2, and its "no answer" is where it has seen the whole window."""
    fields = {"version_2_with_negative": True, "max_seq_length": 100, "doc_stride": 30}
    questions = with_words_only(5, 30)
    questions[::3] = [question._replace(answers=()) for question in questions[::3]]
    task = squad(tmp_path, questions, gpt2, **fields)
    answers = answered(task, perfect)
    found = task.score("validation", answers)
    assert {found[name] for name in ("exact_match", "HasAns_exact", "NoAns_exact", "best_exact", "best_f1")} == {100}
    assert found["NoAns_total"] == sum(not question.answers for question in task.questions("validation"))
    files = task.artifacts("validation", answers)
    for question in task.questions("validation"):
        assert (files["null_odds.json"][question.id] > 0) == (not question.answers)
        best = files["nbest_predictions.json"][question.id][0]["text"]
        assert best == files["predictions.json"][question.id]
        assert (best == "") == (not question.answers)
    assert json.loads(json.dumps(files, allow_nan=False)) == files
    examples = task.examples("validation")
    assert (examples.fields["labels"][:, 2] == examples.lengths - 1).all()


def test_logits_that_are_not_finite_have_no_score(encoder: Path, tmp_path: Path) -> None:
    """Wherever in the window; what stands at padding is no matter. The number of windows is told."""
    task = squad(tmp_path, with_words_only(4, 8), encoder, max_seq_length=100)

    def score(broken: int) -> dict[str, float]:
        def predict(batch: Any) -> SimpleNamespace:
            out = perfect(batch)
            out.end_logits[batch.ids < broken, 2] = math.nan
            out.start_logits[batch.mask == 0] = math.inf
            return out

        return task.score("validation", answered(task, predict))

    assert score(0)["f1"] == 100
    message = rf"logits that are not finite .* for 3 of {len(task.examples('validation'))} examples"
    with pytest.raises(ValueError, match=message):
        score(3)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_best_spans_are_the_best_of_all(value: float) -> None:
    """Against every pair by brute force: in the context, in order, no longer than allowed. Broken logits add none."""
    generator = torch.Generator().manual_seed(1)
    start, end = torch.randn(2, 5, 12, generator=generator)
    if value:
        start[:, [1, 4, 11]] = end[:, [0, 5, 11]] = value
    places = SpanPositions(None, None, None, torch.tensor([3, 2, 1, 5, 4]), torch.tensor([11, 9, 3, 5, 3]))
    firsts, lasts, valid = best_spans(start, end, places, 4, 9)
    assert valid.tolist() == [9, 9, 6, 1, 0]
    for row, count in enumerate(valid.tolist()):
        inside = range(int(places.first[row]), int(places.last[row]) + 1)
        pairs = [(i, j) for i in inside for j in inside if i <= j < i + 4]
        found = list(zip(firsts[row, :count].tolist(), lasts[row, :count].tolist(), strict=True))
        assert len(set(found)) == count
        assert set(found) <= set(pairs)
        if not value:
            assert found == sorted(pairs, key=lambda pair: -float(start[row, pair[0]] + end[row, pair[1]]))[:9]
    assert int(lasts.max()) < 12
