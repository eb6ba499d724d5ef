"""Documents of language modelling: how files become texts, and what is said of broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.tasks.lm.lm_text import check_data_files, documents, fingerprint, training_texts


def spec_of(folder: Path, train: str = "train.txt", **fields: Any) -> LmSpec:
    return LmSpec(name="mlm", data_dir=str(folder), train_file=train, validation_file=train, **fields)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(spec: LmSpec) -> list[str]:
    return list(documents(spec, "train"))


def test_a_line_is_a_document_and_blank_ones_are_none(tmp_path: Path) -> None:
    """Lines end at a newline, with or without a carriage return, and at nothing else; spaces stay."""
    write(tmp_path, "train.txt", "one\u0085more\r\n\n  \n two \nthree")
    assert read(spec_of(tmp_path)) == ["one\u0085more", " two ", "three"]
    assert training_texts(spec_of(tmp_path)) == ["one\u0085more", " two ", "three"]


def test_a_file_is_one_document_when_asked_for(tmp_path: Path) -> None:
    """With line_by_line false, line breaks are part of the text."""
    write(tmp_path, "train.txt", "one\n\ntwo\n")
    assert read(spec_of(tmp_path, line_by_line=False)) == ["one\n\ntwo\n"]


def test_a_record_is_a_document_whatever_line_breaks_it_has(tmp_path: Path) -> None:
    """A .jsonl file gives the column that was named, and no other."""
    rows = [{"body": "a\nb", "text": "no"}, {"body": " "}, {"body": None}, {"body": "c"}]
    write(tmp_path, "train.jsonl", "\n".join(map(json.dumps, rows)))
    assert read(spec_of(tmp_path, "train.jsonl", text_column="body")) == ["a\nb", "c"]


def test_what_each_file_gave_is_told(tmp_path: Path) -> None:
    """Also blank lines and gaps, each with its first places."""
    write(tmp_path, "a.txt", "one\n\n \ntwo\n\n\n")
    write(tmp_path, "b.jsonl", '{"text": null}\n{"text": "NA"}\n')
    told: list[str] = []
    assert list(documents(spec_of(tmp_path, "?.*"), "train", told=told)) == ["one", "two", "NA"]
    assert told == [
        f"{tmp_path}/a.txt: 2 lines kept; 4 left out, whose 'text' is empty (lines 2, 3, 5, ...)",
        f"{tmp_path}/b.jsonl: 1 lines kept; 1 left out, whose 'text' is null (line 1)",
    ]


def test_a_file_may_give_nothing_where_another_gives_a_text(tmp_path: Path) -> None:
    """It is told, and no error; where all are such, one error names them all."""
    write(tmp_path, "a.txt", "")
    write(tmp_path, "b.txt", " \n")
    write(tmp_path, "c.jsonl", '{"text": ""}\n')
    spec = spec_of(tmp_path, "?.*")
    with pytest.raises(ValueError, match=r"a\.txt has no examples: it is empty.*\n.*b\.txt has.*\n.*c\.jsonl has"):
        read(spec)
    assert "c.jsonl has no examples" in "".join(check_data_files(spec_of(tmp_path, "c.*")))
    write(tmp_path, "d.txt", "text\n")
    told: list[str] = []
    assert check_data_files(spec) == []
    assert list(documents(spec, "train", told=told)) == ["text"]
    given = {"a.txt": 0, "b.txt": 0, "c.jsonl": 0, "d.txt": 1}
    expected = [f"{tmp_path}/{name}: {count} lines kept" for name, count in given.items()]
    assert [line.partition("; ")[0] for line in told] == expected


def test_a_pattern_reads_its_files_by_name(tmp_path: Path) -> None:
    """Brackets in data_dir's own name are no pattern; an absolute pattern works too."""
    folder = tmp_path / "data [v1]"
    folder.mkdir()
    for name in "bac":
        write(folder, f"part-{name}.txt", f"{name}\n{name}{name}\n")
    assert read(spec_of(folder, "part-*.txt")) == ["a", "aa", "b", "bb", "c", "cc"]
    assert read(spec_of(folder, "part-[ab].txt", line_by_line=False)) == ["a\naa\n", "b\nbb\n"]
    plain = tmp_path / "plain"
    plain.mkdir()
    write(plain, "part-1.txt", "x")
    assert read(spec_of(folder, str(plain / "part-*.txt"))) == ["x"]
    write(folder, "odd[1].txt", "its name is no pattern")
    assert read(spec_of(folder, "odd[1].txt")) == ["its name is no pattern"]


BROKEN = [
    ("train.txt", b"good\nb\xe9d\n", r"train\.txt, line 2: not UTF-8"),
    ("train.jsonl", b'{"text": "a"}\n{"text"\n', r"train\.jsonl, line 2: not JSON: .*column \d+"),
    ("train.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', r"line 3: no column 'text'; the columns are: 'txt'"),
    ("train.jsonl", b'{"text": "a"}\n{"text": 5}\n', r"line 2: 'text' is a whole number, and must be text"),
    ("train.jsonl", b"", r"train\.jsonl is empty"),
    ("train.txt", b"", r"train\.txt is empty"),
    ("train.jsonl", b"\n", r"train\.jsonl has no examples"),
    ("train.csv", b"text\n", r"train\.csv: the ending '\.csv' is unknown: use \.txt or \.jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_told_with_its_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """Each fault is one ValueError that names file, line and what was found."""
    write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        read(spec_of(tmp_path, name))


def test_missing_files_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    """A folder, a file and a pattern without a match are each told, for both splits at once."""
    nowhere = tmp_path / "nowhere"
    assert [m.split(";")[0] for m in check_data_files(spec_of(nowhere))] == [f"data_dir {nowhere} does not exist"] * 2
    [message] = check_data_files(spec_of(tmp_path), ["train"])
    assert message == f"there is no file for the train split; looked for {tmp_path / 'train.txt'}"
    causal = spec_of(tmp_path, "part-*.txt").model_copy(update={"name": "clm"})
    [message] = check_data_files(causal, ["validation"])
    assert message == f"there is no file for the validation split; looked for {tmp_path / 'part-*.txt'}"
    write(tmp_path, "part.jsonl", '{"body": "a"}\n')
    [message] = check_data_files(spec_of(tmp_path, "part.jsonl"), ["train"])
    assert message.endswith("line 1: no column 'text'; the columns are: 'body'")
    write(tmp_path, "train.txt", "text\n")
    assert check_data_files(spec_of(tmp_path)) == []


def test_masking_a_split_needs_the_training_file_that_is_named(tmp_path: Path) -> None:
    """Its tokens are counted: "mlm" is told of a missing one whatever is asked for, "clm" only where it trains."""
    write(tmp_path, "dev.txt", "text\n")
    spec = spec_of(tmp_path).model_copy(update={"validation_file": "dev.txt"})
    [message] = check_data_files(spec, ["validation"])
    assert message.startswith("there is no file for the train split")
    assert check_data_files(spec.model_copy(update={"name": "clm"}), ["validation"]) == []
    assert check_data_files(spec.model_copy(update={"train_file": None}), ["validation"]) == []


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"dataset": "wikitext", "train_file": "a.txt"}, r"dataset \(wikitext\) and files \(a\.txt\) are both set"),
    ({"train_file": "a.txt"}, "needs train_file and validation_file, or dataset"),
]


@pytest.mark.parametrize(("fields", "message"), SETTINGS)
def test_settings_that_cannot_work_are_told(fields: dict[str, Any], message: str) -> None:
    """The check, which every command runs first, names each mistake."""
    assert re.search(message, "\n".join(check_data_files(LmSpec(name="clm", **fields))))


def test_evaluation_needs_no_training_file(tmp_path: Path) -> None:
    """Training without one is told, with the field to set."""
    write(tmp_path, "dev.txt", "text")
    spec = LmSpec(name="clm", data_dir=str(tmp_path), validation_file="dev.txt")
    assert check_data_files(spec, ["validation"]) == []
    assert check_data_files(spec) == ['the task "clm" has no file for the train split: set train_file']


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    """An edit that keeps the size changes it; moving the folder does not; nor can text move between files unseen."""
    for name in "ab":
        write(tmp_path, f"{name}.txt", name)
    spec = spec_of(tmp_path, "?.txt")
    before = fingerprint(spec, "train")
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in "ab":
        write(moved, f"{name}.txt", name)
    assert fingerprint(spec_of(moved, "?.txt"), "train") == before
    write(tmp_path, "a.txt", "c")
    edited = fingerprint(spec, "train")
    assert edited != before
    write(tmp_path, "b.txt", "bb")
    longer = fingerprint(spec, "train")
    write(tmp_path, "a.txt", "cb")
    write(tmp_path, "b.txt", "b")
    assert fingerprint(spec, "train") not in (before, edited, longer)


def test_a_hub_data_set_gives_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may carry a configuration; blank rows are left out; a missing column is told with those there are."""
    asked = []

    def load_dataset(path: str, configuration: str | None, split: str) -> Any:
        asked.append((path, configuration, split))
        return datasets.Dataset.from_dict({"text": ["", "a", "b\nc"], "number": [1, 2, 3]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = LmSpec(name="clm", dataset="owner/name/part")
    assert list(documents(spec, "train")) == ["a", "b\nc"]
    assert list(documents(LmSpec(name="clm", dataset="name"), "validation")) == ["a", "b\nc"]
    assert asked == [("owner/name", "part", "train"), ("name", None, "validation")]
    assert fingerprint(spec, "train")
    with pytest.raises(ValueError, match=r"no column 'body'; the columns are: 'text', 'number'"):
        list(documents(spec.model_copy(update={"text_column": "body"}), "train"))
    with pytest.raises(ValueError, match=r"row 1: 'number' is a whole number, and must be text"):
        list(documents(spec.model_copy(update={"text_column": "number"}), "train"))
