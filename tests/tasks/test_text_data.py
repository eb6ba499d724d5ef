"""Files in, rows out: formats, GLUE's official files, the hub's data sets, and what is said of broken files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.official_files import OFFICIAL

from ds_trainer.config.recipe import TextSpec
from ds_trainer.files import reading
from ds_trainer.tasks import records
from ds_trainer.tasks.records import FileRecords
from ds_trainer.tasks.registry import check_data_files
from ds_trainer.tasks.text.glue import GLUE, is_regression
from ds_trainer.tasks.text.text_data import TextRow, fingerprint, read_split

REAL = Path(__file__).parents[3] / "shared" / "data"


EXPECTED = {
    "cola": (TextRow(("The more we study verbs, the crazier they get.",), "acceptable", 1), "unacceptable"),
    "sst2": (TextRow(('a "bonus ',), "positive", 2), "negative"),
    "mrpc": (TextRow(('Amrozi "said', "He said"), "equivalent", 2), "not_equivalent"),
    "stsb": (TextRow(("A plane", "An air plane"), 5.0, 2), 3.8),
    "qqp": (TextRow(("How do I\u0085read?", "How to read?"), "duplicate", 2), "not_duplicate"),
    "mnli": (TextRow(("It rains", "It is wet"), "entailment", 2), "contradiction"),
    "qnli": (TextRow(("When?", "In May."), "entailment", 2), "not_entailment"),
    "rte": (TextRow(("No weapons.", "Weapons."), "not_entailment", 2), "entailment"),
    "wnli": (TextRow(("I pin it.", "The pin."), "entailment", 2), "not_entailment"),
}


def write_glue(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("train.tsv", *GLUE[name].evaluation.values()):
        (folder / file).write_text("".join(OFFICIAL[name]), encoding="utf-8", newline="")
    return folder


def text_spec(folder: Path, file: str, **fields: object) -> TextSpec:
    settings = {"text_columns": ["text"], "label_column": "label", "train_file": file, "validation_file": file}
    return TextSpec.model_validate({"name": "text", "data_dir": str(folder), **settings, **fields})


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("place", ["", "{}", "glue/{}"])
def test_official_files_are_read_wherever_they_lie(name: str, place: str, tmp_path: Path) -> None:
    """Every task's files, in data_dir or in its own folder there, give the texts and labels of the right columns."""
    write_glue(name, tmp_path / place.format(GLUE[name].folder))
    spec = TextSpec(name=name, data_dir=str(tmp_path))
    assert check_data_files(spec) == []
    for split in ("train", *GLUE[name].evaluation):
        found = read_split(spec, split)
        assert (found.rows[0], found.rows[1].label) == EXPECTED[name]
        assert len(found.rows) == 2
        assert found.records.left_out == ({"with a wrong number of fields": [3]} if name == "qqp" else {})


def test_the_files_of_the_tasks_own_folder_win(tmp_path: Path) -> None:
    """Where data_dir itself holds another task's train.tsv, the task's own folder is read."""
    write_glue("rte", tmp_path)
    write_glue("sst2", tmp_path / "SST-2")
    assert read_split(TextSpec(name="sst2", data_dir=str(tmp_path)), "train").rows[0].label == "positive"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.csv", 'text,label,other\n"one, ""two""\nthree",yes,1\nfour,no,2\n'),
        ("a.tsv", 'text\tlabel\none, "two"\u2028three\tyes\nfour\tno\n'),
        ("a.jsonl", '{"text": "one, \\"two\\"\\nthree", "label": "yes"}\n\n{"label": "no", "text": "four"}\n'),
    ],
)
def test_users_files_are_read_by_their_ending(file: str, content: str, tmp_path: Path) -> None:
    """CSV quotes, TSV does not; JSON lines may leave blank ones; a byte order mark changes nothing."""
    (tmp_path / file).write_text("\ufeff" + content, encoding="utf-8", newline="")
    spec = text_spec(tmp_path, file)
    assert check_data_files(spec) == []
    rows = read_split(spec, "train").rows
    assert [" ".join(row.texts[0].split()) for row in rows] == ['one, "two" three', "four"]
    assert [row.label for row in rows] == ["yes", "no"]
    assert rows[1].place == (4 if file == "a.csv" else 3)


def test_parquet_files_are_read_with_integer_labels(tmp_path: Path) -> None:
    """Labels that are whole numbers, floats included, become the same names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"], "label": [1.0, 0.0], "x": [0, 0]}), tmp_path / "a.parquet")
    spec = text_spec(tmp_path, "a.parquet")
    assert check_data_files(spec) == []
    assert [row.label for row in read_split(spec, "train").rows] == ["1", "0"]
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["1"]), pa.array(["b"])], ["text", "label", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: more than one column 'text': rename or remove all but one"):
        read_split(spec, "train")


def test_columns_of_a_table_without_a_header_are_numbers(tmp_path: Path) -> None:
    """From 0, as in many public sets; a number that no column has is told with those there are."""
    numbers = {"header": False, "text_columns": [2, 1], "label_column": 0}
    (tmp_path / "a.csv").write_text('3,"good, one",text\n1,bad,title\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("3\tgood, one\ttext\n1\tbad\ttitle\n", encoding="utf-8")
    for file in ("a.csv", "a.tsv"):
        rows = read_split(text_spec(tmp_path, file, **numbers), "train").rows
        assert [(*row.texts, row.label, row.place) for row in rows] == [
            ("text", "good, one", "3", 1),
            ("title", "bad", "1", 2),
        ]
    mistake, _ = check_data_files(text_spec(tmp_path, "a.csv", **numbers | {"label_column": 3}))
    assert mistake.endswith("a.csv, line 1: no column '3'; the columns are: '0', '1', '2'")


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("a.csv", {"text_columns": [1], "label_column": 0}, "column 1, 0: header is true, so that columns have names"),
        ("a.csv", {"header": False}, "column 'text', 'label': header is false, so that columns have numbers, from 0"),
        (
            "a.jsonl",
            {"header": False, "text_columns": [1], "label_column": 0},
            "header is false, and the columns of 'a.jsonl', 'a.jsonl' have names: drop header",
        ),
        (
            "a.csv",
            {"header": False, "text_columns": None, "label_column": None},
            'the task "text" needs text_columns: one or two column numbers',
        ),
    ],
)
def test_columns_that_do_not_suit_the_header_are_told(
    file: str, fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Before any file is looked for."""
    assert check_data_files(text_spec(tmp_path, file, **fields))[0] == message


def test_the_memory_of_a_control_group_counts(tmp_path, monkeypatch) -> None:
    """Where it is less than the host's; "max" is none."""
    monkeypatch.setattr(reading, "_CGROUP_LIMITS", (tmp_path / "absent", tmp_path / "limit"))
    (tmp_path / "limit").write_text("max\n")
    host = reading.memory_limit()
    (tmp_path / "limit").write_text("800\n")
    assert (reading.memory_limit(), reading.largest_file()) == (800, 100)
    (tmp_path / "limit").write_text(f"{2 * host}\n")
    assert reading.memory_limit() == host
    (tmp_path / "limit").write_text("800\n")
    (tmp_path / "a.csv").write_text("text,label\n" + "a,1\n" * 25)
    with pytest.raises(ValueError, match=r"a\.csv has 111 bytes: at most 100"):
        read_split(text_spec(tmp_path, "a.csv"), "train")


BROKEN = {
    "missing column": ("a.csv", b"text,lable\nx,1\n", r"a\.csv, line 1: no column 'label'; .* are: 'text', 'lable'"),
    "empty file": ("a.tsv", b"", r"a\.tsv.*the columns are: none"),
    "header only": ("a.csv", b"text,label\n", r"a\.csv has no examples"),
    "empty jsonl": ("a.jsonl", b"\n", r"a\.jsonl has no examples"),
    "encoding": ("a.csv", b"text,label\nok,1\ncaf\xe9,1\n", r"a\.csv, line 3: not UTF-8"),
    "utf-16": ("a.tsv", "text\tlabel\n".encode("utf-16"), r"a\.tsv, line 1: not UTF-8 .*save the file as UTF-8"),
    "json": (
        "a.jsonl",
        b'{"text": "a", "label": 1}\n{"text": \n',
        r"a\.jsonl, line 2: not JSON: EOF while parsing a value at column 8",
    ),
    "half a character": ("a.jsonl", b'{"text": "a\\ud800 b", "label": 1}\n', r"a\.jsonl, line 1: not JSON: .* at col"),
    "zero bytes": ("a.jsonl", b'{"text": "a", "label": 1}\n\0\0\n', r"a\.jsonl, line 2: not JSON: expected value"),
    "column twice": ("a.csv", b"text,label,text\na,1,b\n", r"a\.csv, line 1: more than one column 'text': rename"),
    "column twice in tsv": ("a.tsv", b"label\ttext\tlabel\na\t1\tb\n", r"a\.tsv, line 1: more than one column 'label'"),
    "no object": ("a.jsonl", b'["a", 1]\n', r"a\.jsonl, line 1: a list where a JSON object"),
    "no field": (
        "a.jsonl",
        b'{"text": "a", "label": 1}\n{"text": "b"}',
        r"a\.jsonl, line 2: no column 'label'.*'text'",
    ),
    "nothing but gaps": (
        "a.jsonl",
        b'{"text": null, "label": 1}\n{"text": " ", "label": 1}\n{"text": "a", "label": NaN}\n',
        r"a\.jsonl has no examples: 1 left out, whose 'text' is null \(line 1\), 1 whose 'text' is empty \(line 2\)",
    ),
    "few fields": ("a.tsv", b"text\tlabel\na\t1\nb\n", r"a\.tsv, line 3: 1 fields where 2 are expected"),
    "many fields": ("a.csv", b"text,label\na,1\na, b,1\n", r"a\.csv, line 3: 3 fields where 2 are expected"),
    "open quote": ("a.csv", b'text,label\n"a,1\nb,1\n', r"a\.csv, line 2: not CSV"),
    "no list": (
        "a.csv",
        b"text,label\na,['x\na,['x]\n",
        r"a\.csv, line 3: 'label' is .*; where it is the name of a class, set multi_label to false",
    ),
    "not parquet": ("a.parquet", b"PAR1 no", r"a\.parquet is not a readable parquet file"),
    "ending": ("a.txt", b"text\n", r"a\.txt: the ending '\.txt' is unknown: use \.csv"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    """Each fault is one ValueError that says the file, the line and the fault."""
    file, content, message = BROKEN[case]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_split(text_spec(tmp_path, file), "train")


@pytest.mark.parametrize("value", ["six", "nan", "inf", "", "5.1"])
def test_a_score_that_is_no_number_in_range_is_refused(value: str, tmp_path: Path) -> None:
    """STS-B's scores are finite and from 0 to 5."""
    header, rows = OFFICIAL["stsb"]
    (tmp_path / "train.tsv").write_text(header + rows.replace("3.800", value), encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: 'score' is .* a number from 0 to 5"):
        read_split(TextSpec(name="stsb", data_dir=str(tmp_path)), "train")


TABLE = {
    "text": ["one", 'he said "hi"', None, "a\nb", "None", " ", "NA", "two"],
    "label": [1.0, 2.0, 1.0, None, 1.0, 2.0, 1.0, 2.0],
}
RULE = [(("one",), "1"), (('he said "hi"',), "2"), (("None",), "1"), (("two",), "2")]


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("a.csv", {}),
        ("a.csv", {"na_rep": "nan"}),
        ("a.tsv", {"sep": "\t"}),
        ("a.tsv", {"sep": "\t", "na_rep": "NaN"}),
        ("a.tsv", {"sep": "\t", "quoting": csv.QUOTE_ALL}),
        ("a.jsonl", {}),
        ("a.parquet", {}),
    ],
)
def test_what_pandas_writes_is_read_by_one_rule(file: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the format: rows with a gap are left out and counted, `1.0` is `1`, quotes are the writer's."""
    pandas = pytest.importorskip("pandas")
    frame, path = pandas.DataFrame(TABLE), tmp_path / file
    if file == "a.jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif file == "a.parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, **options)
    split = read_split(text_spec(tmp_path, file), "train")
    assert [(row.texts, row.label) for row in split.rows] == RULE
    assert sum(map(len, split.records.left_out.values())) == 4
    assert split.records.told().startswith(f"4 {split.records.entry}s kept; ")


def test_what_is_left_out_is_told_with_its_first_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By column and by what stands there; the words that mean a gap are a setting, and no row is lost without them."""
    gaps = "".join(f"t,{label}\n" for label in ["NA", "", "nan", "NA", "NA", "NA"])
    (tmp_path / "a.csv").write_text("text,label\nt,1\n" + gaps, encoding="utf-8")
    spec = text_spec(tmp_path, "a.csv")
    told = "1 lines kept; 4 left out, whose 'label' is 'NA' (lines 3, 6, 7, ...), 1 whose 'label' is empty (line 4), 1"
    assert read_split(spec, "train").records.told().startswith(told)
    named = text_spec(tmp_path, "a.csv", missing=["1"])
    assert [row.label for row in read_split(named, "train").rows] == ["NA", "nan", "NA", "NA", "NA"]
    assert len({fingerprint(each, "train") for each in (spec, named)}) == 2
    with monkeypatch.context() as patch:  # a field that does not count reads no row again
        patch.setattr(FileRecords, "parsed", None)
        fingerprint(text_spec(tmp_path, "a.csv", max_seq_length=7), "train")
    (tmp_path / "a.csv").write_text("text,label\nt,1\n", encoding="utf-8")
    assert fingerprint(spec, "train") == reading.content_hash(tmp_path / "a.csv").hex()  # as in earlier versions


QUOTES = {
    "doubled": ('"he said ""hi"""\t1\n', 'he said "hi"'),
    "a line break": ('"a\nb"\t1\n', "a\nb"),
    "a tab": ('"a\tb"\t1\n', "a\tb"),
    "one that stands alone": ('5" wide\t1\n"he said ""hi"""\t1\n', '5" wide'),
    "a quotation": ('"Great."\t1\n', '"Great."'),
    "a quotation over two rows": ('"I came.\t1\nI saw."\t1\n', '"I came.'),
    "a quotation after a tab": ('a\t1\n"b" he said\t1\n', "a"),
}


@pytest.mark.parametrize("case", QUOTES)
def test_quotes_of_a_tsv_file_are_a_writers_where_it_shows(case: str, tmp_path: Path) -> None:
    """Otherwise they are text, as GLUE's; either is told, and `quoting` decides."""
    rows, expected = QUOTES[case]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + rows, encoding="utf-8")
    split = read_split(text_spec(tmp_path, "a.tsv"), "train")
    assert split.rows[0].texts == (expected,)
    told = "read as part of the text" if expected.count('"') % 2 or rows.startswith(('"G', "a")) else "a CSV writer"
    assert told in split.records.told()
    if case == "a quotation":
        forced = read_split(text_spec(tmp_path, "a.tsv", quoting=True), "train")
        assert forced.rows[0].texts == ("Great.",)
        assert "quotes" not in forced.records.told()
        (tmp_path / "a.csv").write_text('text,label\n"Great.",1\n', encoding="utf-8")
        assert read_split(text_spec(tmp_path, "a.csv", quoting=False), "train").rows[0].texts == ('"Great."',)


def test_quotes_are_looked_for_once_in_a_file(tmp_path: Path) -> None:
    """However often it is read, also by another spec; a changed file is looked through again."""
    before = records._shows_quoting.cache_info().misses
    for scans, rows in ((1, '"a"\t1\n'), (2, '"a ""b"""\t1\n')):
        (tmp_path / "a.tsv").write_text("text\tlabel\n" + rows, encoding="utf-8")
        for length in (7, 8):
            spec = text_spec(tmp_path, "a.tsv", max_seq_length=length)
            assert check_data_files(spec) == []
            assert fingerprint(spec, "train").endswith("quoting") == (scans == 2)
            assert read_split(spec, "train").rows[0].texts == (('"a"', 'a "b"')[scans - 1],)
        assert records._shows_quoting.cache_info().misses == before + scans


@pytest.mark.parametrize("value", ["Infinity", "true", '"high"'])
def test_a_users_score_must_be_finite(value: str, tmp_path: Path) -> None:
    """JSON can say infinity and true: none is a score; any finite number is."""
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "label": -7e3}}\n{{"text": "a", "label": {value}}}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: 'label' is .* must be a finite number"):
        read_split(text_spec(tmp_path, "a.jsonl", regression=True), "train")


def test_an_unknown_label_is_told_with_the_allowed_ones(tmp_path: Path) -> None:
    """A label that GLUE does not know names its line and the known ones."""
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\t1\nbad\t2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: unknown label '2' in 'label': .* one of '0', '1'"):
        read_split(TextSpec(name="sst2", data_dir=str(tmp_path)), "train")


def test_missing_files_and_bad_settings_are_all_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """One call collects them, naming what was looked for, within three seconds and without torch or numpy."""
    script = (
        "import sys, json; from ds_trainer.tasks.registry import check_data_files\n"
        "from ds_trainer.config.recipe import TextSpec\n"
        "specs = [TextSpec.model_validate(data) for data in json.loads(sys.argv[1])]\n"
        "print(json.dumps([check_data_files(spec) for spec in specs])); print({'torch', 'numpy'} & set(sys.modules))"
    )
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\t1\n", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("sentense\tlabel\n", encoding="utf-8")
    specs = [
        {"name": "mnli", "data_dir": str(tmp_path / "none")},
        {"name": "sst2", "data_dir": str(tmp_path)},
        {"name": "sst-2"},
        {"name": "text", "metrics": ["pearson"]},
        {"name": "docstrings"},
    ]
    started = time.monotonic()
    run = [sys.executable, "-c", script, json.dumps(specs)]
    told, loaded = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert time.monotonic() - started < 3
    assert loaded == "set()"
    missing, columns, name, settings, fine = json.loads(told)
    assert len(missing) == 3
    assert all("does not exist; looked for" in text and "MNLI" in text for text in missing)
    assert len(columns) == 1
    assert "dev.tsv, line 1: no column 'sentence'; the columns are: 'sentense', 'label'" in columns[0]
    assert "did you mean 'sst2'" in name[0]
    assert [text.split()[0] for text in settings] == ["metrics:", "the", "the", "the"]
    assert fine == []


def test_the_header_check_reads_no_further_than_the_first_record(tmp_path: Path) -> None:
    """A fault in a later line is left to the reader: large files must not delay the first seconds."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\nbroken\n', encoding="utf-8")
    assert check_data_files(text_spec(tmp_path, "a.jsonl")) == []


@pytest.mark.parametrize("name", GLUE)
def test_hub_rows_equal_those_of_the_official_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set in the hub's form gives the same texts and label names as the files."""
    datasets = pytest.importorskip("datasets")
    write_glue(name, tmp_path)
    expected = read_split(TextSpec(name=name, data_dir=str(tmp_path)), "train").rows
    glue, regression = GLUE[name], is_regression(TextSpec(name=name))
    names = list(glue.labels.values())
    kind = datasets.Value("float32") if regression else datasets.ClassLabel(names=names)
    hub_columns = glue.hub_columns or glue.columns
    columns = {column: [row.texts[i] for row in expected] for i, column in enumerate(hub_columns)}
    columns["label"] = [row.label if regression else names.index(str(row.label)) for row in expected]
    features = datasets.Features({column: datasets.Value("string") for column in hub_columns} | {"label": kind})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: dataset)
    found = read_split(TextSpec(name=name), "train").rows
    assert [row.texts for row in found] == [row.texts for row in expected]
    assert [row.label for row in found] == pytest.approx([row.label for row in expected]) or not regression
    assert regression or [row.label for row in found] == [row.label for row in expected]
    assert fingerprint(TextSpec(name=name), "train") == dataset._fingerprint


def test_the_hub_is_asked_by_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLUE's tasks are configurations of one data set, where MNLI's validation split has another name."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path: str, configuration: str | None, split: str) -> SimpleNamespace:
        asked.append((path, configuration, split))
        return SimpleNamespace(_fingerprint="f00")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for split in ("train", "validation", "validation_mismatched"):
        assert fingerprint(TextSpec(name="mnli"), split) == "f00"
    splits = ("train", "validation_matched", "validation_mismatched")
    assert asked == [("nyu-mll/glue", "mnli", split) for split in splits]


def test_a_hub_split_without_labels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's unlabelled examples carry -1, which is no class."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    dataset = datasets.Dataset.from_dict({"sentence": ["x"], "label": [-1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: dataset)
    with pytest.raises(ValueError, match=r"nyu-mll/glue/sst2 \(train\), row 1: unknown label"):
        read_split(TextSpec(name="sst2"), "train")


@pytest.mark.real
@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data")
@pytest.mark.parametrize(
    ("name", "train", "validation"), [("sst2", 67_349, 872), ("cola", 8_551, 1_043), ("rte", 2_490, 277)]
)
def test_the_real_files_are_read_whole(name: str, train: int, validation: int) -> None:
    """GLUE as it ships has the published numbers of examples."""
    spec = TextSpec(name=name, data_dir=str(REAL))
    assert [len(read_split(spec, split).rows) for split in ("train", "validation")] == [train, validation]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.jsonl", b'\n\r\n{"text": "a", "label": "x"}\n'),
        ("a.tsv", b"\n\r\ntext\tlabel\na\tx\n"),
        ("a.csv", b"\n\r\ntext,label\na,x\n"),
        ("a.csv", b'text,"a\nb",label\na,1,x\n'),
        ("a.csv", b"text,label\ra,x\r"),  # as old spreadsheets end lines
        ("a.csv", b"text,label,b,b\na,x,1,2\n"),  # nobody reads b
    ],
)
def test_the_check_takes_what_can_be_read(file: str, content: bytes, tmp_path: Path) -> None:
    """Blank lines before the header or the first record, or a header over two lines."""
    (tmp_path / file).write_bytes(content)
    spec = text_spec(tmp_path, file)
    assert check_data_files(spec) == []
    assert [(row.texts, row.label) for row in read_split(spec, "train").rows] == [(("a",), "x")]
