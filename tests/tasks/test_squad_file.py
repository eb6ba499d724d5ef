"""SQuAD's files: what is read, and that every fault is one error with its file, article and question id."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.config.task_specs import SquadSpec
from ds_trainer.tasks.squad import squad_file
from ds_trainer.tasks.squad.squad_file import Answer, check_data_files, fingerprint, questions, training_texts

CONTEXT = "Zürich’s 🏔 naïve café opened in 1999."


def asked(id: str, *answers: str, context: str = CONTEXT, **fields: Any) -> dict[str, Any]:
    found = [{"text": text, "answer_start": context.index(text)} for text in answers]
    return {"id": id, "question": f"what is {id}?", "answers": found, **fields}


def content(*qas: Any, **paragraph: Any) -> dict[str, Any]:
    article = {"title": "Cafés", "paragraphs": [{"context": CONTEXT, "qas": list(qas), **paragraph}]}
    return {"version": "1.1", "data": [article]}


def written(folder: Path, data: Any, **fields: Any) -> SquadSpec:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    for name in ("train-v1.1.json", "dev-v1.1.json", "train-v2.0.json", "dev-v2.0.json"):
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return SquadSpec(data_dir=str(folder), **fields)


def test_questions_are_read_with_all_their_answers(tmp_path: Path) -> None:
    """Every question comes in the file's order, with each answer's text and place, and its article's title."""
    spec = written(tmp_path, content(asked("a", "🏔 naïve", "1999"), asked("b", "café")))
    first, second = questions(spec, "validation")
    assert first == ("a", "Cafés", CONTEXT, "what is a?", (Answer("🏔 naïve", 9), Answer("1999", 32)), False)
    assert [answer.text for answer in second.answers] == ["café"]


def test_v2_has_questions_without_an_answer(tmp_path: Path) -> None:
    """They are read where the spec says v2, whether or not the file repeats it as is_impossible."""
    impossible = asked("b", is_impossible=True, plausible_answers=[{"text": "x", "answer_start": 0}])
    spec = written(
        tmp_path,
        content(asked("a", "café", is_impossible=False), impossible, asked("c")),
        version_2_with_negative=True,
    )
    assert [(question.impossible, len(question.answers)) for question in questions(spec, "train")] == [
        (False, 1),
        (True, 0),
        (True, 0),
    ]


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Windows editors put one in front."""
    assert len(questions(written(tmp_path, "\ufeff" + json.dumps(content(asked("a", "café")))), "train")) == 1


def test_an_article_needs_no_title(tmp_path: Path) -> None:
    """Data of the same form often has none; faults then name the article by its number."""
    data = content(asked("a", "café"))
    del data["data"][0]["title"]
    assert questions(written(tmp_path, data), "train")[0].title == ""
    data["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 0
    with pytest.raises(ValueError, match=r"train-v1\.1\.json, article 1, question 'a': answer_start is 0"):
        questions(written(tmp_path, data), "train")


def without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


A, B = asked("a", "café"), asked("b", "1999")
PLACE = r"train-v1\.1\.json, article 'Cafés', question "
FAULTS = [
    ("", r"train-v1\.1\.json is empty"),
    ('{"data": [\n  {"title": }]}', r"train-v1\.1\.json, line 2, column 13: not JSON: Expecting value"),
    ('{"data": %s}' % ("9" * 5000), r"train-v1\.1\.json is not JSON .* a number has thousands of digits"),
    ("[" * 100_000, r"train-v1\.1\.json is nested too deeply"),
    ([], 'must be an object with a list of articles, "data"'),
    ({"data": {}}, 'must be an object with a list of articles, "data"'),
    ({"data": []}, r"train-v1\.1\.json has no questions"),
    (content(), r"train-v1\.1\.json has no questions"),
    ({"data": ["x"]}, r"train-v1\.1\.json, article 1: text where an object is expected"),
    ({"data": [{"title": "T"}]}, r"article 'T': no field 'paragraphs'; fields found: 'title'"),
    ({"data": [{"title": 5, "paragraphs": []}]}, r"article 1: 'title' is a whole number, and must be text"),
    ({"data": [{"title": "T", "paragraphs": [{"context": "c"}]}]}, r"article 'T': no field 'qas'"),
    (content(A, context=None), PLACE + "'a': 'context' is null, and must be text"),
    (content(A, context="caf\ud800"), PLACE + "'a': 'context' holds half a surrogate pair"),
    (content("x"), r"article 'Cafés', question 1 of a paragraph: text where an object is expected"),
    (content(A, without(B, "id")), "article 'Cafés', question 2 of a paragraph: no field 'id'; fields found: 'qu"),
    (content(A, {**B, "id": 7}), "question 2 of a paragraph: 'id' is a whole number, and must be text"),
    (content(without(A, "question")), PLACE + "'a': no field 'question'"),
    (content(asked("a"), context=" \t"), PLACE + "'a': the context is blank"),
    (content({**A, "question": "\udc00?"}), PLACE + "'a': 'question' holds half a surrogate pair"),
    (content(without(A, "answers")), PLACE + "'a': no field 'answers'"),
    (content({**A, "answers": {}}), PLACE + "'a': 'answers' is an object, and must be a list"),
    (content({**A, "answers": ["café"]}), PLACE + "'a': text where an object is expected"),
    (content({**A, "answers": [{"text": "café"}]}), PLACE + "'a': no field 'answer_start'"),
    (
        content({**A, "answers": [{"text": "café", "answer_start": "17"}]}),
        PLACE + "'a': 'answer_start' is text, and must be a whole number",
    ),
    (content({**A, "answers": [{"text": "Z", "answer_start": False}]}), "'answer_start' is false"),
    (
        content({**A, "answers": [{"text": "café", "answer_start": 18}]}),
        PLACE + r"'a': answer_start is 18, where the context has 'afé ', not 'café'",
    ),
    (content({**A, "answers": [{"text": ".", "answer_start": -1}]}), PLACE + "'a': answer_start is -1"),
    (content({**A, "answers": [{"text": "x", "answer_start": 999}]}), "answer_start is 999, where the context has ''"),
    (content({**A, "answers": [{"text": " ", "answer_start": 8}]}), PLACE + "'a': the text of an answer is empty"),
    (content(A, {**B, "id": "a"}), PLACE + "'a': the id is not unique: article 'Cafés' has it too"),
    (content(A, asked("b")), PLACE + "'b': the question has no answer: set version_2_with_negative to true"),
    (content({**A, "is_impossible": True}), PLACE + "'a': is_impossible is true, and there are answers"),
    (content({**A, "is_impossible": "no"}), PLACE + "'a': 'is_impossible' is text, and must be true or false"),
    (content(asked("a", is_impossible=False)), PLACE + "'a': no answers, and is_impossible is false"),
]


@pytest.mark.parametrize(("data", "message"), FAULTS)
def test_a_fault_is_told_with_its_place(data: Any, message: str, tmp_path: Path) -> None:
    """Each is a ValueError of one line that names the file, the article and the question."""
    if isinstance(data, dict):
        data = json.dumps(data)  # as escapes, so that half a surrogate pair is JSON
    with pytest.raises(ValueError, match=message) as caught:
        questions(written(tmp_path, data), "train")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_faults_of_a_kind_are_told_once_and_counted(tmp_path: Path) -> None:
    """One error holds the first fault of every kind, and how many more there are."""
    wrong = [{**asked(f"w{i}", "café"), "answers": [{"text": "café", "answer_start": i}]} for i in range(1200)]
    with pytest.raises(ValueError, match=r"2 kinds of faults") as caught:
        questions(written(tmp_path, content(*wrong, A, A)), "train")
    _, first, second = str(caught.value).splitlines()
    assert first.startswith("article 'Cafés', question 'w0': answer_start is 0")
    assert first.endswith("(and 1,198 more of this kind)")  # one of them is right
    assert second == "article 'Cafés', question 'a': the id is not unique: article 'Cafés' has it too"


def test_files_that_are_not_there_are_told_without_reading(tmp_path: Path) -> None:
    """The official names are looked for in the folder and its squad/, each split on its own."""
    spec = SquadSpec(data_dir=str(tmp_path))
    looked_for = f"looked for {tmp_path}/train-v1.1.json, {tmp_path}/squad/train-v1.1.json"
    assert check_data_files(spec)[0] == f"no file for the train split of squad; {looked_for}"
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v1.1.json").write_text("broken")
    assert len(check_data_files(spec)) == 1
    assert check_data_files(spec, ["validation"]) == []
    v2 = spec.model_copy(update={"version_2_with_negative": True})
    assert "dev-v2.0.json" in check_data_files(v2, ["validation"])[0]
    named = SquadSpec(data_dir=str(tmp_path), train_file="mine.json", validation_file="squad/dev-v1.1.json")
    assert check_data_files(named) == [f"no file for the train split of squad; looked for {tmp_path}/mine.json"]
    assert f"data_dir {tmp_path}/none does not exist" in check_data_files(SquadSpec(data_dir=f"{tmp_path}/none"))[0]


def test_a_name_that_is_too_long_is_that_of_no_file(tmp_path: Path) -> None:
    """Not an error of the system."""
    [mistake] = check_data_files(SquadSpec(data_dir=str(tmp_path), validation_file="x" * 5000), ["validation"])
    assert mistake.startswith("no file for the validation split of squad; looked for")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"max_seq_length": 40},
            "leaves 38 .*; lower doc_stride to 38 or less, or raise max_seq_length to 130 or more$",
        ),
        (
            {"max_seq_length": 4, "doc_stride": 3},
            "leaves 2 .*; lower doc_stride to 2 or less, or raise max_seq_length to 5",
        ),
    ],
)
def test_windows_that_would_leave_gaps_are_told_with_every_way_out(fields: dict[str, int], words: str) -> None:
    """Those that would leave some beside any question at all: what a long one would leave, the data tell."""
    assert SquadSpec(max_seq_length=128, doc_stride=64, max_query_length=64)
    assert SquadSpec(max_seq_length=192, doc_stride=128, max_query_length=64)
    with pytest.raises(ValueError) as caught:
        SquadSpec(**fields)
    [error] = caught.value.errors()
    assert re.search(words, error["msg"])


def test_a_dataset_and_files_exclude_each_other() -> None:
    """Only one can be meant."""
    [mistake] = check_data_files(SquadSpec(dataset="me/qa", train_file="x.json"))
    assert mistake == "dataset (me/qa) and files (x.json) are both set: keep one"


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    """An edited file has another one; the same content elsewhere the same."""
    spec = written(tmp_path, content(A))
    (tmp_path / "other").mkdir()
    before = fingerprint(spec, "train")
    assert before == fingerprint(written(tmp_path / "other", content(A)), "train")
    assert before != fingerprint(written(tmp_path, content(B)), "train")


def test_training_texts_hold_every_context_once(tmp_path: Path) -> None:
    """Contexts, then questions, of the training split."""
    assert training_texts(written(tmp_path, content(A, B))) == [CONTEXT, "what is a?", "what is b?"]


class Hub:
    """What `datasets` gives, with the hub's columns."""

    column_names = ("id", "title", "context", "question", "answers")
    _fingerprint = "f00"

    def __init__(self, *rows: dict[str, Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self._rows)


def test_a_hub_data_set_is_read_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come as a list a field; one without any is unanswerable; faults name article and id."""
    rows = [
        {"id": "a", "title": "T", "context": "c d", "question": "q", "answers": {"text": ["d"], "answer_start": [2]}},
        {"id": "b", "title": "T", "context": "c d", "question": "q", "answers": {"text": [], "answer_start": []}},
    ]
    monkeypatch.setattr(squad_file, "fetch", lambda name, split: Hub(*rows))
    v2 = SquadSpec(version_2_with_negative=True)
    assert check_data_files(v2) == []
    assert fingerprint(v2, "train") == "f00"
    assert [question.answers for question in questions(v2, "train")] == [(Answer("d", 2),), ()]
    with pytest.raises(ValueError, match=r"rajpurkar/squad \(train\), article 'T', question 'b': the question has no"):
        questions(SquadSpec(), "train")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, the way out is a folder of files."""
    import datasets

    def unreachable(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"me/qa \(fr, train\) cannot be had: no network\. .* give data_dir"):
        questions(SquadSpec(dataset="me/qa/fr"), "train")


def test_reading_loads_nothing_heavy() -> None:
    """Neither torch nor numpy is needed to tell what is wrong with a file."""
    code = "import sys, ds_trainer.tasks.squad.squad_file; assert not {'torch', 'numpy', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
