"""SQuAD from files to a score: what is read, the windows of contexts, models, answers merged and counted, artifacts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.squad_tasks import (
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
from transformers import GPT2Config, GPT2Model

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.data import Examples
from ds_trainer.tasks.records import Row
from ds_trainer.tasks.registry import check_data_files, training_texts
from ds_trainer.tasks.squad import squad_score
from ds_trainer.tasks.squad.squad_score import Candidate, score_v1, score_v2
from ds_trainer.tasks.squad.squad_task import SquadTask, WindowAnswer, best_spans
from ds_trainer.tasks.squad.squad_windows import SpanPositions, Tokens, tokenised, windows
from ds_trainer.tasks.squad_file import GoldAnswer, Question, records
from ds_trainer.tasks.task import PAD_LOGIT

CONTEXT = "Zürich’s 🏔 naïve café opened in 1999."


def asked(id: str, *answers: str, context: str = CONTEXT, **fields: Any) -> dict[str, Any]:
    found = [{"text": text, "answer_start": context.index(text)} for text in answers]
    return {"id": id, "question": f"what is {id}?", "answers": found, **fields}


def content(*qas: Any, **paragraph: Any) -> dict[str, Any]:
    return {"version": "1.1", "data": [{"paragraphs": [{"context": CONTEXT, "qas": list(qas), **paragraph}]}]}


def written(folder: Path, data: Any, **fields: Any) -> SquadSpec:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    for name in ("train-v1.1.json", "dev-v1.1.json", "train-v2.0.json", "dev-v2.0.json"):
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return SquadSpec(data_dir=str(folder), **fields)


def read(spec: SquadSpec) -> list[Question]:
    return [row.value for row in records(spec, "train").rows()]


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """The question as the hub has it: with its context, and a list for each field of its answers."""
    answers = {name: [answer[name] for answer in record["answers"]] for name in ("text", "answer_start")}
    return {**record, "title": "T", "context": CONTEXT, "answers": answers}


A, B = asked("a", "café"), asked("b", "1999")


def test_questions_are_read_with_all_their_answers(tmp_path: Path) -> None:
    """In the file's order, which may begin with a byte order mark; v2 has questions without an answer."""
    impossible = asked("b", is_impossible=True, plausible_answers=[{"text": "x", "answer_start": 0}])
    data = content(asked("a", "🏔 naïve", "1999", is_impossible=False), impossible, asked("c"))
    first, *others = read(written(tmp_path, "\ufeff" + json.dumps(data), version_2_with_negative=True))
    assert first == ("a", CONTEXT, "what is a?", (GoldAnswer("🏔 naïve", 9), GoldAnswer("1999", 32)))
    assert [question.answers for question in others] == [(), ()]
    assert training_texts(written(tmp_path, content(A, B))) == [CONTEXT, "what is a?", "what is b?"]


@pytest.mark.parametrize("form", ["lines", "lines in .json", "array", "array as data", "official"])
def test_flat_records_and_whole_numbers_as_ids_are_read(form: str, tmp_path: Path) -> None:
    """As the hub and its scripts write them, the questions are those of the official form, and their ids are text."""
    questions = [{**A, "id": 7}, B]
    rows = list(map(flat, questions))
    rows[1]["answers"] = B["answers"]  # a list of objects is read, too
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    forms = {"array": rows, "array as data": {"version": 1, "data": rows}, "official": content(*questions)}
    spec = written(tmp_path, forms.get(form, lines))
    if form == "lines":
        (tmp_path / "a.jsonl").write_text(lines)
        spec = SquadSpec(data_dir=str(tmp_path), train_file="a.jsonl", validation_file="a.jsonl")
    assert [(question.id, question.answers[0].text) for question in read(spec)] == [("7", "café"), ("b", "1999")]
    assert check_data_files(spec) == []


QUESTION = r"train-v1\.1\.json, question 1: id 'a': "
FAULTS = [
    ('{"data": [\n  {"title": }]}', r"is not JSON: expected value at line 2 column 13"),
    ({"data": []}, r"train-v1\.1\.json has no examples"),
    ({"data": [{"paragraphs": [{"qas": [A]}]}]}, r"train-v1\.1\.json is not in SQuAD's form, which is "),
    (content(A, context=None), r"train-v1\.1\.json, question 1: context: Input should be a valid string"),
    ([flat(A), {**flat(B), "context": 1}], r"train-v1\.1\.json, row 2: context: Input should be a valid string"),
    ([flat(A), {"context": "c"}], r"train-v1\.1\.json, row 2: no column 'id', 'question', 'answers'"),
    (content(asked("a"), context=" \t"), QUESTION + "the context is blank"),
    (content({**A, "answers": [{"text": "café", "answer_start": 18}]}), QUESTION + r".* has 'afé ', not 'café'"),
    (content({**A, "answers": [{"text": ".", "answer_start": -1}]}), QUESTION + "answer_start is -1"),
    (content({**A, "answers": [{"text": " ", "answer_start": 8}]}), QUESTION + "the text of an answer is empty"),
    (content(asked("a")), QUESTION + "the question has no answer: set version_2_with_negative to true"),
]


@pytest.mark.parametrize(("data", "message"), FAULTS)
def test_a_fault_is_named_with_its_place(data: Any, message: str, tmp_path: Path) -> None:
    """Each is a `UserError` of one line that names the file, and the question or the path of the value."""
    with pytest.raises(UserError, match=message) as caught:
        read(written(tmp_path, data))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_missing_files_are_listed_without_reading(tmp_path: Path) -> None:
    """The official names are looked for in the folder and its squad/, each on its own; without a folder, the hub."""
    v2 = SquadSpec(data_dir=str(tmp_path), version_2_with_negative=True)
    looked_for = f"looked for {tmp_path}/train-v2.0.json, {tmp_path}/squad/train-v2.0.json"
    assert check_data_files(v2)[0] == f"there is no file for the train split; {looked_for}"
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v2.0.json").write_text("broken")
    assert len(check_data_files(v2)) == 1
    hub = [SquadSpec(version_2_with_negative=negative) for negative in (False, True)]
    assert [records(spec, "dev").origin for spec in hub] == ["rajpurkar/squad (dev)", "rajpurkar/squad_v2 (dev)"]
    assert check_data_files(hub[1]) == []


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


def test_accents_that_the_tokenizer_drops_belong_to_their_letter() -> None:
    """A decomposed é at the end of an answer is kept whole; plain gaps are left alone."""
    tokenizer = word_pieces()
    [tokens] = tokenised(tokenizer, ["cafe\u0301 re\u0301sume\u0301\u0323 ok"])
    assert tokens.spans[0, 0] == 0
    assert [end for end in tokens.spans[:, 1].tolist() if end in (4, 5, 13, 14, 15)] == [5, 15]
    assert Tokens([1, 2], np.array([[0, 5], [5, 6]])).covering(5, 5) is None


def test_exact_and_f1_equal_hand_computed_values() -> None:
    """Words count as often as they occur; articles and punctuation do not."""
    assert squad_score.exact("The Cat!", "cat") == 1
    assert squad_score.exact("cats", "cat") == 0
    assert squad_score.f1("the cat sat on the mat", "a cat sat") == pytest.approx(2 * 1.0 * 0.5 / 1.5)
    assert squad_score.f1("x x y", "x z") == pytest.approx(2 * (1 / 3) * (1 / 2) / (5 / 6))
    assert squad_score.f1("dog", "cat") == 0
    assert squad_score.f1("the", "a") == 0
    assert squad_score.normalised(" The  U.S.A., an\tanthem—a “The” ") == "usa anthem— “ ”"
    assert squad_score.normalised("Theory of A-the") == "theory of athe"
    assert squad_score.normalised("Café\u00a0İ") == "café i̇"
    # v1.1's F1 of two empty texts is 0, and v2's is 1: such a gold text is no answer to give
    assert score_v1({"c": "an"}, {"c": ["the"]}) == {"exact_match": 100, "f1": 0}
    found = score_v2({"a": ""}, {"a": ["the"]}, {"a": 1.0}, {"a": ""})
    assert found["exact_match"] == found["f1"] == found["HasAns_f1"] == 100
    assert not [name for name in found if name.startswith("NoAns")]


def test_v2_scores_equal_hand_computed_values() -> None:
    """Two questions with an answer, two without; in each part one is right."""
    golds = {"a": ["old town"], "b": ["moon", "the"], "c": [], "d": []}
    predictions = {"a": "the old town hall", "b": "moon", "c": "", "d": "sun"}
    odds = {"a": -3.0, "b": 2.0, "c": 5.0, "d": 1.0}
    found = score_v2(predictions, golds, odds, predictions)
    assert found == {
        "exact_match": 50.0,
        "f1": pytest.approx(100 * (0.8 + 1 + 1 + 0) / 4),
        "total": 4.0,
        "HasAns_exact": 50.0,
        "HasAns_f1": pytest.approx(90.0),
        "HasAns_total": 2.0,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2.0,
        # from 2 for silence, exact goes by a: +0, d: -1, b: +1; F1 by a: +0.8, d: -1, b: +1
        "best_exact": 50.0,
        "best_exact_thresh": 0.0,
        "best_f1": pytest.approx(70.0),
        "best_f1_thresh": -3.0,
    }
    # what the run made "" at 0 is right: answering up to 1.5 would be worth 100, and silence cannot hide that
    golds, odds = {"a": ["moon"], "b": ["sun"], "c": []}, {"a": -1.0, "b": 1.5, "c": 9.0}
    found = score_v2({"a": "moon", "b": "", "c": ""}, golds, odds, {"a": "moon", "b": "sun", "c": "sky"})
    assert found["f1"] == found["exact_match"] == pytest.approx(200 / 3)
    assert found["HasAns_f1"] == 50
    assert (
        (found["best_f1"], found["best_f1_thresh"]) == (found["best_exact"], found["best_exact_thresh"]) == (100, 1.5)
    )


def score_at(threshold: float, scores: dict[str, float], silent: dict[str, float], odds: dict[str, float]) -> float:
    """Percent, with silence above the threshold."""
    return 100 * sum(scores[id] if odds[id] <= threshold else silent[id] for id in scores) / len(scores)


def test_the_best_threshold_is_the_best_of_all() -> None:
    """Against trying every threshold: answering up to it gives the score, and no other gives more."""
    rng = random.Random(0)
    for _ in range(200):
        ids = [f"q{i}" for i in range(rng.randint(1, 8))]
        answerable = {id for id in ids if rng.random() < 0.5}
        predictions = {id: rng.choice(["", "x"]) for id in ids}
        silent = {id: float(id not in answerable) for id in ids}
        scores = {id: rng.random() if id in answerable else 1.0 for id in ids}
        scores = {id: score if predictions[id] else silent[id] for id, score in scores.items()}
        scores |= {id: 0.0 for id in ids if predictions[id] and id not in answerable}
        odds = {id: rng.uniform(-5, 5) for id in ids}
        best, threshold = squad_score.best_threshold(predictions, scores, odds, answerable)
        tried = [score_at(each, scores, silent, odds) for each in [-9.0, *odds.values()]]
        assert best == pytest.approx(max(tried))
        reached = score_at(threshold, scores, silent, odds)
        assert best == pytest.approx(reached) or (threshold == 0 and best == pytest.approx(tried[0]))


def test_the_n_best_have_different_texts_and_probabilities() -> None:
    """The better of two equal texts stays; the softmax is over the scores and survives large ones."""
    spans = [("x", 500.0, 500.0), ("y", 501.0, 500.0), ("x", 1.0, 0.0), ("z", 0.0, 0.0)]
    best = squad_score.n_best(
        [Candidate(text, 2 * i, 2 * i + 1, *logits) for i, (text, *logits) in enumerate(spans)], 2
    )
    assert [(each.text, each.start) for each in best] == [("y", 2), ("x", 0)]
    first, second = squad_score.with_probabilities(best)
    assert (first["probability"], second["probability"]) == pytest.approx((1 / (1 + np.exp(-1)), 1 / (1 + np.e)))
    assert second.keys() == {"text", "probability", "start_logit", "end_logit", "start", "end"}
    assert squad_score.n_best([], 3) == squad_score.with_probabilities([]) == []


# Models and their answers


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


def test_a_model_without_a_class_token_can_say_that_there_is_no_answer(tmp_path: Path) -> None:
    """A perfect GPT-2 scores 100 on v2, and its "no answer" is where it has seen the whole window."""
    tokenizer = gpt2_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    gpt2 = save(GPT2Model(config), tokenizer, tmp_path / "gpt2")
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
    """Wherever in the window; what stands at padding is no matter. The message has the number of windows."""
    task = squad(tmp_path, with_words_only(4, 8), encoder, max_seq_length=100)

    def broken(batch: Any) -> SimpleNamespace:
        out = perfect(batch)
        out.end_logits[batch.ids < 3, 2] = math.nan
        out.start_logits[batch.mask == 0] = math.inf
        return out

    message = rf"logits that are not finite .* for 3 of {len(task.examples('validation'))} examples"
    with pytest.raises(ValueError, match=message):
        task.score("validation", answered(task, broken))


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
