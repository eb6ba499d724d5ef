"""Files in, rows out: formats, GLUE's official files, the hub's data sets, and the messages about broken files."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.labelled_files import OFFICIAL
from support.launching import exhaustive

from ds_trainer.files import reading
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.records import FileRecords
from ds_trainer.tasks.registry import check_data_files
from ds_trainer.tasks.text import docstrings
from ds_trainer.tasks.text.docstrings import CLASS_CAP, _first_paragraphs
from ds_trainer.tasks.text.text_data import GLUE, is_regression, records

EXPECTED = {
    "cola": (("The more we study verbs, the crazier they get.",), "acceptable", "unacceptable", 1),
    "sst2": (('a "bonus ',), "positive", "negative", 2),
    "mrpc": (('Amrozi "said', "He said"), "equivalent", "not_equivalent", 2),
    "stsb": (("A plane", "An air plane"), 5.0, 3.8, 2),
    "qqp": (("How do I\u0085read?", "How to read?"), "duplicate", "not_duplicate", 2),
    "mnli": (("It rains", "It is wet"), "entailment", "contradiction", 2),
    "qnli": (("When?", "In May."), "entailment", "not_entailment", 2),
    "rte": (("No weapons.", "Weapons."), "not_entailment", "entailment", 2),
    "wnli": (("I pin it.", "The pin."), "entailment", "not_entailment", 2),
}


def write_glue(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("train.tsv", *GLUE[name].evaluation.values()):
        (folder / file).write_text("".join(OFFICIAL[name]), encoding="utf-8", newline="")


def text_spec(folder: Path, file: str, **fields: object) -> TextSpec:
    settings = {"text_columns": ["text"], "label_column": "label", "train_file": file, "validation_file": file}
    return TextSpec.model_validate({"name": "text", "data_dir": str(folder), **settings, **fields})


def read(spec: TextSpec, split: str = "train") -> list[Any]:
    return [row.value for row in records(spec, split).rows()]


@pytest.mark.parametrize("name", GLUE)
def test_official_files_and_the_hub_give_the_same_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files may lie in data_dir, or in the task's folder there, which wins; the hub has names of its own."""
    datasets = pytest.importorskip("datasets")
    for number, place in enumerate(("", "{}", "glue/{}")):
        write_glue(name, tmp_path / str(number) / place.format(GLUE[name].folder))
        spec = TextSpec(name=name, data_dir=str(tmp_path / str(number)))
        assert check_data_files(spec) == []
        for split in ("train", *GLUE[name].evaluation):
            source = records(spec, split)
            first, second = source.rows()
            assert (*first.value, second.value.label, first.place) == EXPECTED[name]
            assert source.left_out == ({"with a wrong number of fields": [3]} if name == "qqp" else {})
    other = "sst2" if name != "sst2" else "rte"
    write_glue(other, tmp_path / "1")
    assert read(TextSpec(name=name, data_dir=str(tmp_path / "1")))[0].texts == EXPECTED[name][0]
    expected, glue = read(spec), GLUE[name]
    names, regression = list(glue.labels.values()), is_regression(spec)
    kind = datasets.Value("float64") if regression else datasets.ClassLabel(names=names)
    columns = {each: [row.texts[i] for row in expected] for i, each in enumerate(glue.hub_columns or glue.columns)}
    columns["label"] = [row.label if regression else names.index(row.label) for row in expected]
    features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")) | {"label": kind})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: asked.append((*names, split)) or dataset)
    assert read(TextSpec(name=name)) == expected
    assert records(TextSpec(name=name), "validation").fingerprint() == dataset._fingerprint
    validation = "validation_matched" if name == "mnli" else "validation"
    assert asked == [("nyu-mll/glue", name, "train"), ("nyu-mll/glue", name, validation)]


def test_a_hub_split_without_labels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's unlabelled examples carry -1, which is no class; a hub out of reach names the way out."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    dataset = datasets.Dataset.from_dict({"sentence": ["x"], "label": [-1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: dataset)
    with pytest.raises(ValueError, match=r"nyu-mll/glue/sst2 \(train\), row 1: unknown label"):
        read(TextSpec(name="sst2"))

    def unreachable(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"me/qa/fr \(train\) cannot be loaded: no network\. .* set data_dir"):
        read(TextSpec(name="text", dataset="me/qa/fr", text_columns=["a"], label_column="b"))


READABLE = {
    "csv": ("a.csv", '\ufefftext,label,other\n"one, ""two""\nthree",yes,1\nfour,no,2\n', 4),
    "tsv": ("a.tsv", '\ufefftext\tlabel\none, "two"\u2028three\tyes\nfour\tno\n', 3),
    "jsonl": ("a.jsonl", '\n{"text": "one, \\"two\\"\\nthree", "label": "yes"}\n{"label": "no", "text": "four"}\n', 3),
    "carriage returns": ("a.csv", 'text,label\r"one, ""two"" three",yes\rfour,no\r', 3),
    "a header over two lines": ("a.csv", 'text,"a\nb",label\n"one, ""two"" three",1,yes\nfour,2,no\n', 4),
    "a column twice that is not read": ("a.csv", 'text,label,b,b\n"one, ""two"" three",yes,1,2\nfour,no,1,2\n', 3),
}


@pytest.mark.parametrize("case", READABLE)
def test_users_files_are_read_by_their_ending(case: str, tmp_path: Path) -> None:
    """CSV quotes, TSV does not; JSON lines may leave blank ones; a byte order mark changes nothing."""
    file, content, place = READABLE[case]
    (tmp_path / file).write_text(content, encoding="utf-8", newline="")
    spec = text_spec(tmp_path, file)
    assert check_data_files(spec) == []
    first, second = records(spec, "train").rows()
    assert [" ".join(row.value.texts[0].split()) for row in (first, second)] == ['one, "two" three', "four"]
    assert (first.value.label, second.value.label, second.place) == ("yes", "no", place)


def test_columns_of_a_table_without_a_header_are_numbers(tmp_path: Path) -> None:
    """From 0, as in many public sets; settings that do not suit the header are mistakes before any file is read."""
    numbers = {"header": False, "text_columns": [2, 1], "label_column": 0}
    (tmp_path / "a.csv").write_text('3,"good, one",text\n1,bad,title\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("3\tgood, one\ttext\n1\tbad\ttitle\n", encoding="utf-8")
    for file in ("a.csv", "a.tsv"):
        assert read(text_spec(tmp_path, file, **numbers)) == [(("text", "good, one"), "3"), (("title", "bad"), "1")]
    for fields, message in (
        (numbers | {"label_column": 3}, f"{tmp_path}/a.csv, line 1: no column '3'; the columns are: '0', '1', '2'"),
        (numbers | {"header": True}, "column 2, 1, 0: header is true, so that columns have names"),
        ({"header": False}, "column 'text', 'label': header is false, so that columns have numbers, from 0"),
        ({"text_columns": None}, 'the task "text" needs text_columns: one or two column names'),
    ):
        assert check_data_files(text_spec(tmp_path, "a.csv", **fields))[0] == message


BROKEN = {
    "missing column": ("a.csv", b"text,lable\nx,1\n", r"a\.csv, line 1: no column 'label'; .* are: 'text', 'lable'"),
    "semicolons": ("a.csv", b"text;label\nx;1\n", r"no column 'text', 'label'; .*; cells must be apart by commas"),
    "encoding": ("a.csv", b"text,label\nok,1\ncaf\xe9,1\n", r"a\.csv, line 3: not UTF-8"),
    "half a character": ("a.jsonl", b'{"text": "a\\ud800 b", "label": 1}\n', r"a\.jsonl, line 1: not JSON: .* at col"),
    "column twice": ("a.csv", b"text,label,text\na,1,b\n", r"a\.csv, line 1: more than one column 'text': rename"),
    "no object": ("a.jsonl", b'["a", 1]\n', r"a\.jsonl, line 1: a list where a JSON object"),
    "few fields": ("a.tsv", b"text\tlabel\na\t1\nb\n", r"a\.tsv, line 3: 1 fields where 2 are expected"),
    "open quote": ("a.csv", b'text,label\n"a,1\nb,1\n', r"a\.csv, line 2: not CSV"),
    "whose quotes": ("a.tsv", b'text\tlabel\na\t1\n"b"\t1\n', r"line 3: a cell begins with a quote: set quoting"),
    "not parquet": ("a.parquet", b"PAR1 no", r"a\.parquet is not a readable parquet file"),
    "ending": ("a.txt", b"text\n", r"a\.txt: the ending '\.txt' is unknown: use \.csv"),
    "nothing but gaps": (
        "a.jsonl",
        b'{"text": null, "label": 1}\n{"text": " ", "label": 1}\n{"text": "a", "label": NaN}\n',
        r"a\.jsonl has no examples: 1 left out, whose 'text' is null \(line 1\), 1 whose 'text' is empty \(line 2\)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    """Each fault is one ValueError that names the file, the line and the fault."""
    file, content, message = BROKEN[case]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(text_spec(tmp_path, file))


def test_one_error_lists_the_first_mistakes_of_the_rows(tmp_path: Path) -> None:
    """Each with its line, up to twenty; a check before the run stops at the first row, which may be sound."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n' + '{"text": 5, "label": 1}\n' * 30)
    with pytest.raises(ValueError, match="'text' is a whole number, and must be text") as caught:
        read(text_spec(tmp_path, "a.jsonl"))
    assert [line.split(": ")[0].split(", ")[1] for line in str(caught.value).splitlines()] == [
        f"line {number}" for number in range(2, 22)
    ]
    assert check_data_files(text_spec(tmp_path, "a.jsonl")) == []


@pytest.mark.parametrize("value", ["six", "nan", "5.1"])
def test_a_score_that_is_no_number_in_its_range_is_refused(value: str, tmp_path: Path) -> None:
    """STS-B's are from 0 to 5; those of a user's regression are any finite ones."""
    (tmp_path / "train.tsv").write_text("".join(OFFICIAL["stsb"]).replace("3.800", value), encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 3: 'score' is .* a number from 0 to 5"):
        read(TextSpec(name="stsb", data_dir=str(tmp_path)))
    value = {"six": "true", "nan": "Infinity"}.get(value, '"high"')
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "label": -7e3}}\n{{"text": "a", "label": {value}}}\n')
    with pytest.raises(ValueError, match=r"line 2: 'label' is .* a finite number"):
        read(text_spec(tmp_path, "a.jsonl", regression=True))


TABLE = {
    "text": ["one", 'he said "hi"', None, "a\nb", "None", " ", "NA", "two"],
    "label": [1.0, 2.0, 1.0, None, 1.0, 2.0, 1.0, 2.0],
}
RULE = [(("one",), "1"), (('he said "hi"',), "2"), (("None",), "1"), (("two",), "2")]
PANDAS: dict[str, Callable[[Any, Path], object]] = {
    "a.csv": lambda frame, path: frame.to_csv(path, index=False, na_rep="nan"),
    "a.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t", na_rep="NaN", quoting=csv.QUOTE_ALL),
    "a.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "a.parquet": lambda frame, path: frame.to_parquet(path),
}


@pytest.mark.parametrize("file", PANDAS)
def test_what_pandas_writes_is_read_by_one_rule(file: str, tmp_path: Path) -> None:
    """Whatever the format: rows with a gap are left out and counted, `1.0` is `1`, quotes are the writer's."""
    PANDAS[file](pytest.importorskip("pandas").DataFrame(TABLE), tmp_path / file)
    source = records(text_spec(tmp_path, file, quoting=True), "train")
    assert [row.value for row in source.rows()] == RULE
    assert source.summary().startswith(f"4 {source.entry}s kept; ")


def test_gaps_are_counted_and_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By column and by what stands there; the words that mean a gap are a setting; without gaps the key is as it was.

    Version 0.2 left no row out, so that its caches are good only for files without gaps.
    """
    gaps = "".join(f"t,{label}\n" for label in ["NA", "", "nan", "NA", "NA", "NA"])
    (tmp_path / "a.csv").write_text("text,label\nt,1\n" + gaps, encoding="utf-8")
    spec, named = text_spec(tmp_path, "a.csv"), text_spec(tmp_path, "a.csv", missing=["1"])
    source = records(spec, "train")
    assert len(list(source.rows())) == 1
    counted = "1 lines kept; 4 left out, whose 'label' is 'NA' (lines 3, 6, 7, ...), 1 whose 'label' is empty (line 4)"
    assert source.summary().startswith(counted)
    assert [row.label for row in read(named)] == ["NA", "nan", "NA", "NA", "NA"]
    assert len({records(each, "train").fingerprint() for each in (spec, named)}) == 2
    with monkeypatch.context() as patch:  # a field that does not count reads no row again
        patch.setattr(FileRecords, "_read", None)
        records(text_spec(tmp_path, "a.csv", max_seq_length=7), "train").fingerprint()
    (tmp_path / "a.csv").write_text("text,label\nt,1\n", encoding="utf-8")
    assert records(spec, "train").fingerprint() == reading.content_hash(tmp_path / "a.csv").hex()


def test_quotes_are_part_of_the_text_where_quoting_is_false(tmp_path: Path) -> None:
    """In tables of both kinds; such a table has another fingerprint than one whose quotes are taken off."""
    fingerprints = []
    for file, mark in (("a.csv", ","), ("a.tsv", "\t")):
        (tmp_path / file).write_text(f'text{mark}label\n"Great."{mark}1\n', encoding="utf-8")
        for quoting, text in ((False, '"Great."'), (True, "Great.")):
            source = records(text_spec(tmp_path, file, quoting=quoting), "train")
            assert next(source.rows()).value.texts == (text,)
            fingerprints.append(source.fingerprint())
    # where version 0.2 did the same, they are the hash of the file
    assert [fingerprint.endswith("quoting") for fingerprint in fingerprints] == [True, False, False, True]


def test_mistakes_of_every_kind_are_listed_without_reading_rows(tmp_path: Path) -> None:
    """One call collects them, naming what was looked for."""
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\t1\n", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("sentense\tlabel\n", encoding="utf-8")
    missing = check_data_files(TextSpec(name="mnli", data_dir=str(tmp_path / "none")))
    assert len(missing) == 3
    assert all("does not exist; looked for" in text and "MNLI" in text for text in missing)
    [columns] = check_data_files(TextSpec(name="sst2", data_dir=str(tmp_path)))
    assert "dev.tsv, line 1: no column 'sentence'; the columns are: 'sentense', 'label'" in columns
    assert 'did you mean "sst2"' in check_data_files(TextSpec(name="sst-2"))[0]
    mistakes = check_data_files(TextSpec(name="text", metrics=["pearson"]))
    assert [text.split()[0] for text in mistakes] == ["metrics:", "the", "the", "the"]
    assert check_data_files(TextSpec(name="docstrings")) == []


def test_docstrings_are_the_first_paragraphs_of_5_to_60_words(tmp_path: Path) -> None:
    """Read from source that is never run; names that hold the answer are masked; short ones are left out."""
    source = (
        '"""Compute the `torch.Tensor` product\nof two numpy arrays here.\n\nMore."""\nraise SystemExit\n'
        'class A:\n    """Too short."""\n'
        '    def f(self):\n        """Return DeepSpeedEngine, PyTorch and np.ndarray."""\n'
    )
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert list(_first_paragraphs(tmp_path / "a.py")) == [
        "Compute the `this.Tensor` product of two this arrays here.",
        "Return this, this and this.this.",
    ]


def test_docstrings_are_real_distinct_and_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of hundreds to thousands, capped; no text is twice, in a split, in both or in two classes.

    The two largest packages take most of the time, and are read with --exhaustive.
    """
    packages = docstrings.PACKAGES if exhaustive() else ("deepspeed", "numpy", "python")
    monkeypatch.setattr(docstrings, "PACKAGES", packages)
    extracted = docstrings.extracted.__wrapped__()
    monkeypatch.setattr(docstrings, "extracted", lambda: extracted)
    splits = {split: [row.value for row in records(TextSpec(), split).rows()] for split in ("train", "validation")}
    texts = [row.texts[0] for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts)
    assert 0.08 < len(splits["validation"]) / len(texts) < 0.3
    for rows in splits.values():
        counts = {name: sum(row.label == name for row in rows) for name in {row.label for row in rows}}
        assert len(counts) == len(packages)
        assert min(counts.values()) > 100
        assert max(counts.values()) <= CLASS_CAP
        assert len({row.label for row in rows[:50]}) >= len(packages) - 1, "shuffled"
