"""SQuAD without a model: its files, the windows of contexts, and the counting of answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from support.squad_tasks import TOKENIZERS, hard_questions, word_pieces

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.records import Row
from ds_trainer.tasks.registry import check_data_files, training_texts
from ds_trainer.tasks.squad.squad_file import GoldAnswer, Question, records
from ds_trainer.tasks.squad.squad_score import (
    Candidate,
    best_threshold,
    exact,
    f1,
    n_best,
    normalised,
    score_v1,
    score_v2,
    with_probabilities,
)
from ds_trainer.tasks.squad.squad_windows import Tokens, tokenised, windows

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
    ('{"context": "c"}\n{"context"\n', r"train-v1\.1\.json, line 1: no column 'id'"),
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
    """The official names are looked for in the folder and its squad/, each split on its own."""
    spec = SquadSpec(data_dir=str(tmp_path))
    looked_for = f"looked for {tmp_path}/train-v1.1.json, {tmp_path}/squad/train-v1.1.json"
    assert check_data_files(spec)[0] == f"there is no file for the train split; {looked_for}"
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v1.1.json").write_text("broken")
    assert len(check_data_files(spec)) == 1
    v2 = spec.model_copy(update={"version_2_with_negative": True})
    assert "dev-v2.0.json" in check_data_files(v2, ["validation"])[0]
    named = SquadSpec(data_dir=str(tmp_path), train_file="mine.json", validation_file="squad/dev-v1.1.json")
    assert check_data_files(named) == [f"there is no file for the train split; looked for {tmp_path}/mine.json"]


def test_a_hub_data_set_is_read_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come as a list a field; one without any is unanswerable; mistakes name the question."""
    rows = [
        {"id": "a", "title": "T", "context": "c d", "question": "q", "answers": {"text": ["d"], "answer_start": [2]}},
        {"id": "b", "title": "T", "context": "c d", "question": "q", "answers": {"text": [], "answer_start": []}},
    ]
    hub = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: hub)
    v2 = SquadSpec(version_2_with_negative=True)
    assert check_data_files(v2) == []
    assert records(v2, "train").fingerprint() == hub._fingerprint
    assert [question.answers for question in read(v2)] == [(GoldAnswer("d", 2),), ()]
    with pytest.raises(ValueError, match=r"rajpurkar/squad \(train\), row 2: id 'b': the question has no"):
        read(SquadSpec())


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
    assert exact("The Cat!", "cat") == 1
    assert exact("cats", "cat") == 0
    assert f1("the cat sat on the mat", "a cat sat") == pytest.approx(2 * 1.0 * 0.5 / 1.5)
    assert f1("x x y", "x z") == pytest.approx(2 * (1 / 3) * (1 / 2) / (5 / 6))
    assert f1("dog", "cat") == 0
    assert f1("the", "a") == 0
    assert normalised(" The  U.S.A., an\tanthem—a “The” ") == "usa anthem— “ ”"
    assert normalised("Theory of A-the") == "theory of athe"
    assert normalised("Café\u00a0İ") == "café i̇"
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
        best, threshold = best_threshold(predictions, scores, odds, answerable)
        tried = [score_at(each, scores, silent, odds) for each in [-9.0, *odds.values()]]
        assert best == pytest.approx(max(tried))
        reached = score_at(threshold, scores, silent, odds)
        assert best == pytest.approx(reached) or (threshold == 0 and best == pytest.approx(tried[0]))


def test_the_n_best_have_different_texts_and_probabilities() -> None:
    """The better of two equal texts stays; the softmax is over the scores and survives large ones."""
    spans = [("x", 500.0, 500.0), ("y", 501.0, 500.0), ("x", 1.0, 0.0), ("z", 0.0, 0.0)]
    best = n_best([Candidate(text, 2 * i, 2 * i + 1, *logits) for i, (text, *logits) in enumerate(spans)], 2)
    assert [(each.text, each.start) for each in best] == [("y", 2), ("x", 0)]
    first, second = with_probabilities(best)
    assert (first["probability"], second["probability"]) == pytest.approx((1 / (1 + np.exp(-1)), 1 / (1 + np.e)))
    assert second.keys() == {"text", "probability", "start_logit", "end_logit", "start", "end"}
    assert n_best([], 3) == with_probabilities([]) == []
