"""SQuAD's files: what is read, and that every fault is one error with its file, article and question id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.registry import check_data_files, training_texts
from ds_trainer.tasks.squad.squad_file import GoldAnswer, Question, records

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


FIRST = r"train-v1\.1\.json is not in SQuAD's form: data\.0\.paragraphs\.0\."
QUESTION = r"train-v1\.1\.json, question 1: id 'a': "
FAULTS = [
    ('{"data": [\n  {"title": }]}', r"is not in SQuAD's form: Invalid JSON: expected value at line 2 column 13"),
    ({"data": []}, r"train-v1\.1\.json has no examples"),
    (content(A, context=None), FIRST + "context: Input should be a valid string"),
    ([flat(A), {**flat(B), "context": 1}], r"train-v1\.1\.json, row 2: context: Input should be a valid string"),
    ([flat(A), {"context": "c"}], r"train-v1\.1\.json, row 2: no column 'id', 'question', 'answers'"),
    ('{"context": "c"}\n{"context"\n', r"train-v1\.1\.json, line 1: no column 'id'"),
    (content({**A, "is_impossible": "no"}, "x"), r"qas\.0\.is_impossible: .* valid boolean \(and 1 more mistakes\)"),
    (content(asked("a"), context=" \t"), QUESTION + "the context is blank"),
    (content({**A, "answers": [{"text": "café", "answer_start": 18}]}), QUESTION + r".* has 'afé ', not 'café'"),
    (content({**A, "answers": [{"text": ".", "answer_start": -1}]}), QUESTION + "answer_start is -1"),
    (content({**A, "answers": [{"text": " ", "answer_start": 8}]}), QUESTION + "the text of an answer is empty"),
    (content(asked("a")), QUESTION + "the question has no answer: set version_2_with_negative to true"),
    (content({**A, "is_impossible": True}), QUESTION + "is_impossible is true, and there are answers"),
    (content(asked("a", is_impossible=False)), QUESTION + "is_impossible is false, and there are no answers"),
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


def test_windows_that_would_leave_gaps_are_refused() -> None:
    """Gaps beside any question at all are a mistake in the settings; beside a long one, only the data can tell."""
    assert SquadSpec(max_seq_length=192, doc_stride=128, max_query_length=64)
    words = r"leaves 38 .* in no window: lower doc_stride or .*raise max_seq_length to 130 or more"
    with pytest.raises(ValueError, match=words):
        SquadSpec(max_seq_length=40)


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
