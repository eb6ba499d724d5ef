"""Data files and run folders that are broken or hostile: read, or told with their name and exit code 2.

Whatever the damage, a file gives rows or one `UserError`, and never a traceback. What is read is sound: labels that
exist, answers that are where they are said to be.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.fuzzing import (
    ODD_FILES,
    Rule,
    as_json,
    fuzzed,
    json_bytes,
    noise,
    odd_file,
    skip_unless_whole,
    spoilt_bytes,
    written,
)
from support.official_files import OFFICIAL
from support.report_runs import write_run
from transformers import BertConfig, BertModel

from ds_trainer.cli.report import report_command
from ds_trainer.config.recipe import parse_task
from ds_trainer.config.task_specs import LmSpec, SquadSpec, TextSpec, TokenSpec
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.report import figures
from ds_trainer.tasks.lm import lm_text
from ds_trainer.tasks.registry import build_task, check_data_files
from ds_trainer.tasks.squad import squad_file
from ds_trainer.tasks.text.glue import GLUE
from ds_trainer.tasks.text.text_data import read_split
from ds_trainer.tasks.token.token_data import read_split as read_tagged

RULE = Rule()
WORDS = ["text", "label", "kind", "id", "data", "title", "context", "question", "answers", "answer_start", "nan", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def put(path: Path, raw: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def held(kind: str, spec: Any, read: Callable[[], object], *names: str) -> str:
    """Return the message of a task's files, "" where they are read; a quick check never tells what reading does not."""
    message = ""
    try:
        read()
    except UserError as error:
        message = str(error)
        assert any(name in message for name in names), message
    (RULE.told if message else RULE.taken)[kind] += 1
    mistakes = check_data_files(spec, ["train"])
    assert message or not mistakes, mistakes
    return message


def read_text_rows(spec: TextSpec) -> None:
    for row in read_split(spec, "train").rows:
        assert row.label.strip() if isinstance(row.label, str) else math.isfinite(row.label)


def read_questions(spec: SquadSpec) -> None:
    for question in squad_file.questions(spec, "train"):
        assert all(question.context.startswith(answer.text, answer.start) for answer in question.answers)


def read_documents(spec: LmSpec) -> None:
    for text in lm_text.documents(spec, "train"):
        assert text.strip()


def read_tags(spec: TokenSpec) -> None:
    for sentence in read_tagged(spec, "train").sentences:
        assert all(sentence.words)
        assert all(sentence.tags)
        assert len(sentence.words) == len(sentence.tags) > 0 or spec.name == "token"


READ = {TextSpec: read_text_rows, SquadSpec: read_questions, LmSpec: read_documents, TokenSpec: read_tags}


def task(folder: Path, name: str, file: str | None = None, **fields: Any) -> Any:
    files = {"train_file": file, "validation_file": file} if file else {}
    return parse_task({"name": name, "data_dir": str(folder), **files, **fields})


def read_by(spec: Any) -> Callable[[], None]:
    return lambda: READ[type(spec)](spec)


# Labelled text


def delimited(data: st.DataObject, raw: bytes, mark: bytes) -> bytes:
    """Lines and fields dropped, doubled, swapped or replaced, or any bytes."""
    how = data.draw(st.sampled_from(["cells", "cells", "bytes", "bytes", "both", "random"]), "how")
    if how == "random":
        return data.draw(noise(), "bytes")
    if how in ("cells", "both"):
        rows = [line.split(mark) for line in raw.split(b"\n")]
        for _ in range(data.draw(st.integers(1, 3))):
            row = data.draw(st.sampled_from(rows), "row")
            at = data.draw(st.integers(0, len(row)), "cell")
            cell = st.text(max_size=9).map(lambda text: text.encode(errors="surrogatepass")) | st.sampled_from(
                [b"", b"nan", b"1e999", b"9" * 5000, b'"', b'"a', b"1", b"x" * 70_000, b"1_0", "٣".encode(), b" 0 "]
            )
            row[at : at + data.draw(st.integers(0, 2), "cells")] = data.draw(st.lists(cell, max_size=2), "put")
        raw = b"\n".join(mark.join(row) for row in rows)
    return spoilt_bytes(data, raw) if how in ("bytes", "both") else raw


@fuzzed(60)
@given(data=st.data())
def test_glue_files(data: st.DataObject, folder: Path) -> None:
    """Each of GLUE's official files."""
    name = data.draw(st.sampled_from(sorted(GLUE)), "task")
    raw = delimited(data, "".join(OFFICIAL[name]).encode(), b"\t")
    path = put(folder / "glue" / GLUE[name].folder / "train.tsv", raw)
    spec = task(folder, name)
    held("glue", spec, read_by(spec), str(path))


@fuzzed(110)
@given(data=st.data())
def test_files_of_a_user(data: st.DataObject, folder: Path) -> None:
    """.csv, .tsv and .jsonl, of classes and of scores."""
    suffix = data.draw(st.sampled_from([".csv", ".tsv", ".jsonl"]), "suffix")
    records = [{"text": "a pear", "kind": 1}, {"text": "an owl, old", "kind": 0}, {"text": "x", "kind": 2.5}]
    if suffix == ".jsonl":
        raw = b"\n".join(json_bytes(data, each, WORDS) if data.draw(st.booleans()) else _line(each) for each in records)
    elif suffix == ".csv":
        raw = delimited(data, b'text,kind\n"a ""pear""",1\n"an owl,\nold",0\n', b",")
    else:
        raw = delimited(data, b"text\tkind\na pear\t1\nan owl\t0\n", b"\t")
    path = put(folder / f"user{suffix}", raw)
    fields = {"text_columns": ["text"], "label_column": "kind", "regression": data.draw(st.booleans(), "regression")}
    spec = task(folder, "text", path.name, **fields)
    held(suffix, spec, read_by(spec), str(path))


def _line(record: dict[str, Any]) -> bytes:
    return as_json(record).encode()


@fuzzed(60)
@given(data=st.data())
def test_files_of_tags(data: st.DataObject, folder: Path) -> None:
    """CoNLL and .jsonl."""
    name = data.draw(st.sampled_from(["ner", "token"]), "task")
    rows = [{"tokens": ["a", "pear"], "tags": ["O", "B-fruit"]}, {"tokens": ["owl"], "tags": ["O"]}]
    if name == "token":
        words = [*WORDS, "tokens", "tags"]
        raw = b"\n".join(json_bytes(data, each, words) if data.draw(st.booleans()) else _line(each) for each in rows)
    else:
        raw = delimited(data, b"a\tO\npear\tB-fruit\n\t\nowl O\n", b"\t")
    path = put(folder / "tags.jsonl", raw)
    spec = task(folder, name, path.name)
    held(name, spec, read_by(spec), str(path))


COLUMNS = [
    pyarrow.array(["a pear", "an owl", None]),
    pyarrow.array(["a pear", "an owl", "x"]),
    pyarrow.array([1, 0, 2]),
    pyarrow.array([1.5, math.nan, math.inf]),
    pyarrow.array([[1], [], None]),
    pyarrow.array([{"a": 1}, {"a": None}, None]),
    pyarrow.array([b"\xff", b"", None]),
    pyarrow.array([None, None, None]),
    pyarrow.array([True, False, None]),
    pyarrow.array(["a", "b", "a"]).dictionary_encode(),
    pyarrow.array([2**62, -(2**62), 0], pyarrow.timestamp("us")),
    pyarrow.array([2**62, -(2**62), 0], pyarrow.timestamp("ns", "Nowhere/Land")),
    pyarrow.array([2**31 - 1, -(2**31), 0], pyarrow.date32()),
    pyarrow.array([2**62, 1, 2], pyarrow.duration("s")),
    pyarrow.array([10**37, 1, 2], pyarrow.decimal128(38, 0)),
    pyarrow.StringArray.from_buffers(
        3, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\5\0\0\0\6\0\0\0"), pyarrow.py_buffer(b"\xff\xfe\xed\xa0\x80a")
    ),  # no UTF-8
]


@fuzzed(50)
@given(data=st.data())
def test_parquet_files(data: st.DataObject, folder: Path) -> None:
    """Columns of every type under the names that are asked for, and bytes changed anywhere."""
    names = data.draw(
        st.lists(st.sampled_from(["text", "kind", "x", ""]), min_size=1, max_size=4) | st.just(["text", "kind"])
    )
    if sound := data.draw(st.integers(0, 3), "any columns") == 0:
        names = ["text", "kind"]
    arrays = [data.draw(st.sampled_from(COLUMNS[1:4] if sound else COLUMNS), "column") for _ in names]
    path = folder / "user.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names), path)
    if data.draw(st.booleans(), "bytes"):
        path.write_bytes(spoilt_bytes(data, path.read_bytes()))
    fields = {"text_columns": ["text"], "label_column": "kind", "regression": data.draw(st.booleans(), "regression")}
    spec = task(folder, "text", path.name, **fields)
    held(".parquet", spec, read_by(spec), str(path))


# Questions

CONTEXT = "Zürich’s 🏔 naïve café opened in 1999."
QAS = [
    {"id": "a", "question": "what?", "answers": [{"text": "1999", "answer_start": 32}]},
    {"id": "b", "question": "where?", "answers": [], "is_impossible": True},
    {"id": "c", "question": "which?", "answers": [{"text": "café", "answer_start": 17}], "is_impossible": False},
]


@fuzzed(75)
@given(data=st.data())
def test_squad_files(data: st.DataObject, folder: Path) -> None:
    """SQuAD's JSON, v1.1 and v2."""
    v2 = data.draw(st.booleans(), "v2")
    asked = QAS if v2 else [QAS[0], QAS[2]]
    sound = {"version": "1.1", "data": [{"title": "Cafés", "paragraphs": [{"context": CONTEXT, "qas": asked}]}]}
    path = put(folder / f"train-v{'2.0' if v2 else '1.1'}.json", json_bytes(data, sound, WORDS))
    spec = task(folder, "squad", version_2_with_negative=v2)
    held("squad", spec, read_by(spec), str(path))


# Language modelling


@fuzzed(60)
@given(data=st.data())
def test_documents(data: st.DataObject, folder: Path) -> None:
    """Plain text and records."""
    suffix = data.draw(st.sampled_from([".txt", ".jsonl"]), "suffix")
    raw = b"it rains in the hills\n\nand it is wet\r\n"
    if suffix == ".txt":
        raw = data.draw(noise()) if data.draw(st.integers(0, 4)) == 0 else spoilt_bytes(data, raw)
    else:
        raw = b"\n".join(json_bytes(data, {"text": line.decode()}, WORDS) for line in raw.split(b"\n"))
    path = put(folder / f"lm{suffix}", raw)
    by_line = data.draw(st.booleans(), "line_by_line")
    spec = task(folder, data.draw(st.sampled_from(["mlm", "clm"])), path.name, line_by_line=by_line)
    held("lm", spec, read_by(spec), str(path))


# To the tokens


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder with a tokenizer."""
    place = folder / "model"
    config = BertConfig(vocab_size=200, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(place)
    tokenizer = train_tokenizer([CONTEXT, "it rains in the hills and it is wet"], 120, True)
    tokenizer.save_pretrained(str(place))
    return place


def any_text() -> st.SearchStrategy[str]:
    odd = [
        "\u0000",
        "\u200b",
        "\u202e",
        "\ufeff",
        "\u0301",
        "👩🏽",
        "[SEP]",
        "[MASK]",
        "İ",
        "ﬁ",
        "\U000e0001",
        "x" * 3000,
    ]
    return st.text(max_size=20) | st.lists(st.sampled_from([*odd, " ", "it ", "rains "]), max_size=6).map("".join)


@fuzzed(100)
@given(data=st.data())
def test_tokens(data: st.DataObject, folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any text at all becomes tokens within the vocabulary and the length, or the split is told to be empty."""
    family = data.draw(st.sampled_from(["text", "squad", "mlm"]), "family")
    texts = data.draw(st.lists(any_text(), min_size=1, max_size=4), "texts")
    if family == "text":
        rows = [{"text": text, "kind": number % 2} for number, text in enumerate([*texts, "", "a"])]
        put(folder / "tokens.jsonl", "\n".join(map(json.dumps, rows)).encode())
        spec = task(folder, "text", "tokens.jsonl", text_columns=["text"], label_column="kind", max_seq_length=8)
    elif family == "squad":
        qas = [{"id": str(n), "question": text, "answers": [_answer(data, texts[0])]} for n, text in enumerate(texts)]
        sound = {"data": [{"paragraphs": [{"context": texts[0], "qas": qas}]}]}
        put(folder / "tokens.json", json.dumps(sound).encode())
        lengths = {"max_seq_length": 16, "max_query_length": 4, "doc_stride": 2}
        spec = task(folder, "squad", "tokens.json", **lengths)
    else:
        put(folder / "tokens.txt", "\n".join(texts).encode())
        spec = task(folder, "mlm", "tokens.txt", max_seq_length=8, min_seq_length=3)

    def read() -> None:
        examples = build_task(spec, model, tmp_path_factory.mktemp("cache")).examples("train")
        assert len(examples) > 0
        assert 0 <= examples.tokens["input_ids"].min() <= examples.tokens["input_ids"].max() < 200
        assert examples.lengths.max() <= spec.max_seq_length

    held(f"tokens of {family}", spec, read, "tokens", "train:")


def _answer(data: st.DataObject, context: str) -> dict[str, Any]:
    start = data.draw(st.integers(0, max(0, len(context) - 1)), "start")
    return {"text": context[start : start + data.draw(st.integers(1, 9))], "answer_start": start}


# Files that are none


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        *(("sst2", "train.tsv"), ("text", "a.csv"), ("text", "a.tsv"), ("text", "a.jsonl"), ("text", "a.parquet")),
        *(("squad", "a.json"), ("mlm", "a.txt"), ("clm", "a.jsonl"), ("mlm", "*.txt")),
    ],
)
def test_what_is_no_file_is_not_read(kind: str, name: str, file: str, tmp_path: Path) -> None:
    """An empty file, a folder, a pipe, a device without an end, a file beyond any memory: told by name, at once."""
    odd_file(tmp_path / file.replace("*", "a"), kind)
    fields = {"text_columns": ["text"], "label_column": "kind"} if name == "text" else {}
    spec = task(tmp_path, name, None if name == "sst2" else file, **fields)
    assert held("no file", spec, read_by(spec), file, file.replace("*", "a"))


# Run folders


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "sound")


@pytest.fixture(scope="module")
def _without_figures() -> Iterator[None]:
    def absent() -> None:
        raise ValueError("no figures here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "check_installed", absent)
        yield


REPORTED = ["all_results.json", "recipe.json", "log.jsonl", "command.json", "eval/exits.json"]


def _reported(data: st.DataObject, run: Path, place: Path) -> None:
    """Put a copy of the run at the place, a file of it spoilt, and hold that its report is made there, or told."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run, place)
    name = data.draw(st.sampled_from(REPORTED), "file")
    lines = (run / name).read_text().splitlines()
    if name == "log.jsonl":
        raw = b"\n".join(json_bytes(data, json.loads(line), ["phase", "step"]) for line in lines[:2])
        raw += "\n".join(["", *lines[2:]]).encode()
    else:
        raw = json_bytes(data, json.loads("".join(lines)), ["eval", "exits", "weights", "phases", "name", "splits"])
    put(place / name, raw)
    with written() as places:
        message = RULE.outcome("report", report_command, [str(place)], str(place))
    assert [path for path in places if not Path(path).is_relative_to(place)] == []
    assert (place / "report.md").is_file() == (not message)


@pytest.mark.usefixtures("_without_figures")
@fuzzed(60)
@given(data=st.data())
def test_reports(data: st.DataObject, run: Path, folder: Path) -> None:
    """The page is made of what can be read; of a broken recipe or results it is told which, and nothing is written."""
    _reported(data, run, folder / "out")


@fuzzed(10)
@given(data=st.data())
def test_reports_with_figures(data: st.DataObject, run: Path, folder: Path) -> None:
    """Figures of what is there, however odd, are drawn or left out, and take no time or memory without an end."""
    _reported(data, run, folder / "drawn")


@fuzzed(80)
@given(data=st.data())
def test_the_list_of_a_run(data: st.DataObject, folder: Path) -> None:
    """Whatever the list of a run's files names, nothing outside of its folder is written or deleted."""
    place, beside = folder / "listed", folder / "beside"
    for path in (place / "model" / "config.json", place / "report.md", place / "mine.txt", beside / "config.json"):
        put(path, b"{}")
    words = [
        "model",
        "*",
        "**",
        "../beside",
        "../beside/*",
        "..",
        ".",
        str(beside),
        "/",
        "mine.txt",
        "~",
        "x/../../beside",
    ]
    raw = json_bytes(data, ["model", "report.md", "plots/*.png"], words)
    assume(max(map(len, raw.split(b'"'))) < 250)  # no file has a longer name
    put(place / ".ds_trainer.json", raw)
    with written() as places:
        RULE.outcome("run's list", lambda _: RunFolder(place).open(overwrite=True), [], ".ds_trainer.json")
    assert [path for path in places if not Path(path).is_relative_to(place)] == []
    assert (beside / "config.json").is_file()


def test_the_count(request: pytest.FixtureRequest) -> None:
    """At least 500 inputs that hypothesis made were run here, of every kind some that were sound; more were not."""
    skip_unless_whole(request)
    print(f"taken {dict(RULE.taken)}, told {dict(RULE.told)}")
    kinds = {*RULE.taken, *RULE.told} - {"no file"}
    assert sum(RULE.taken[kind] + RULE.told[kind] for kind in kinds) >= 500
    assert min(RULE.taken[kind] for kind in kinds) > 0
    assert min(RULE.told[kind] for kind in kinds if not kind.startswith("tokens")) > 0
