"""Documents of language modelling: how files become texts, and the messages about broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.lm.lm_text import records
from ds_trainer.tasks.registry import check_data_files, training_texts


def spec_of(folder: Path, train: str = "train.txt", **fields: Any) -> LmSpec:
    return LmSpec(**{"name": "mlm", "data_dir": str(folder), "train_file": train, "validation_file": train} | fields)


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="utf-8", newline="")


def read(spec: LmSpec, split: str = "train") -> list[str]:
    return [row.value for row in records(spec, split).rows()]


def test_a_line_a_file_or_a_record_is_a_document(tmp_path: Path) -> None:
    """Lines end at a newline, with or without a carriage return, and at nothing else; blank ones are no documents."""
    write(tmp_path, "train.txt", "one\u0085more\r\n\n  \n two \nthree")
    assert read(spec_of(tmp_path)) == training_texts(spec_of(tmp_path)) == ["one\u0085more", " two ", "three"]
    assert read(spec_of(tmp_path, line_by_line=False)) == ["one\u0085more\r\n\n  \n two \nthree"]
    rows = [{"body": "a\nb", "text": "no"}, {"body": " "}, {"body": None}, {"body": "c"}]
    write(tmp_path, "train.jsonl", "\n".join(map(json.dumps, rows)))
    assert read(spec_of(tmp_path, "train.jsonl", text_column="body")) == ["a\nb", "c"]
    write(tmp_path, "train.csv", 'body,text\n"a\nb",no\n,no\nc,no\n')
    assert read(spec_of(tmp_path, "train.csv", text_column="body")) == ["a\nb", "c"]


def test_a_file_may_give_nothing_where_another_gives_a_text(tmp_path: Path) -> None:
    """The summary says what each of the first files gave; where none gives a text, one error names them all."""
    write(tmp_path, "a.txt", "")
    write(tmp_path, "b.jsonl", '{"text": ""}\n')
    spec = spec_of(tmp_path, "?.*")
    with pytest.raises(ValueError, match=r"a\.txt has no examples: it is empty.*\n.*b\.jsonl has no examples"):
        read(spec)
    write(tmp_path, "c.txt", "one\n\n \ntwo\n\n\n")
    write(tmp_path, "d.txt", "text\n")
    assert check_data_files(spec) == []
    source = records(spec, "train")
    assert [row.value for row in source.rows()] == ["one", "two", "text"]
    gave = [
        f"{tmp_path}/a.txt: 0 lines kept",
        f"{tmp_path}/b.jsonl: 0 lines kept; 1 left out, whose 'text' is empty (line 1)",
        f"{tmp_path}/c.txt: 2 lines kept; 4 left out, whose 'text' is empty (lines 2, 3, 5, ...)",
        "1 more files",
    ]
    assert source.summary() == "; ".join(gave)


def test_a_pattern_reads_its_files_by_name(tmp_path: Path) -> None:
    """Brackets in data_dir's own name are no pattern; an absolute pattern works too."""
    folder, plain = tmp_path / "data [v1]", tmp_path / "plain"
    for each in (folder, plain):
        each.mkdir()
    for name in "bac":
        write(folder, f"part-{name}.txt", f"{name}\n{name}{name}\n")
    assert read(spec_of(folder, "part-*.txt")) == ["a", "aa", "b", "bb", "c", "cc"]
    assert read(spec_of(folder, "part-[ab].txt", line_by_line=False)) == ["a\naa\n", "b\nbb\n"]
    write(plain, "part-1.txt", "x")
    assert read(spec_of(folder, str(plain / "part-*.txt"))) == ["x"]
    write(folder, "odd[1].txt", "its name is no pattern")
    assert read(spec_of(folder, "odd[1].txt")) == ["its name is no pattern"]


def test_missing_files_and_wrong_settings_are_listed_before_anything_is_loaded(tmp_path: Path) -> None:
    """For both splits at once; the tokens of the training file are counted before "mlm" can mask any split."""
    nowhere = tmp_path / "nowhere"
    assert f"data_dir {nowhere} does not exist" in check_data_files(spec_of(nowhere))[0]
    write(tmp_path, "dev.txt", "text\n")
    spec = spec_of(tmp_path, validation_file="dev.txt")
    [message] = check_data_files(spec, ["validation"])
    assert message == f"there is no file for the train split; looked for {tmp_path / 'train.txt'}"
    causal = spec.model_copy(update={"name": "clm"})
    assert check_data_files(causal, ["validation"]) == []
    for fields, words in (
        ({"train_file": None}, 'the task "clm" has no file for the train split: set train_file'),
        ({"dataset": "wikitext"}, "dataset (wikitext) and files (train.txt) are both set"),
        ({"validation_file": None}, "needs train_file and validation_file, or dataset"),
    ):
        assert words in check_data_files(causal.model_copy(update=fields))[0]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    """An edit that keeps the size changes it; moving the folder does not; nor can text move between files unseen."""
    moved, hashes = tmp_path / "moved", []
    moved.mkdir()
    for folder, a, b in ((tmp_path, "a", "b"), (moved, "a", "b"), (tmp_path, "cb", "b"), (tmp_path, "c", "bb")):
        write(folder, "a.txt", a)
        write(folder, "b.txt", b)
        hashes.append(records(spec_of(folder, "?.txt"), "train").fingerprint())
    write(tmp_path, "b.txt", "bc")
    hashes.append(records(spec_of(tmp_path, "?.txt"), "train").fingerprint())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


def test_a_hub_data_set_gives_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may carry a configuration; blank rows are left out; a missing column is named with those there are."""
    hub = datasets.Dataset.from_dict({"text": ["", "a", "b\nc"], "number": [1, 2, 3]})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: asked.append((*names, split)) or hub)
    spec = LmSpec(name="clm", dataset="owner/name/part")
    assert read(spec) == read(LmSpec(name="clm", dataset="name"), "validation") == ["a", "b\nc"]
    assert asked == [("owner/name", "part", "train"), ("name", None, "validation")]
    with pytest.raises(ValueError, match=r"no column 'body'; the columns are: 'text', 'number'"):
        read(spec.model_copy(update={"text_column": "body"}))
