"""Data files and run folders that are broken or hostile: read, or refused with their name and exit code 2.

Whatever the damage, a file gives rows or one `UserError`, and never a traceback. What is read is sound: labels that
exist, answers that are where they are said to be.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.fuzzing import ODD_FILES, Rule, as_json, fuzzed, json_bytes, noise, odd_file, spoilt_bytes, written
from support.official_files import OFFICIAL
from support.report_runs import write_run
from transformers import BertConfig, BertModel

from ds_trainer.cli.report import report_command
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import FAMILIES, family
from ds_trainer.report import figures
from ds_trainer.tasks.registry import build_task, check_data_files
from ds_trainer.tasks.text.text_data import GLUE

RULE = Rule()
WORDS = ["text", "label", "kind", "id", "data", "title", "context", "question", "answers", "answer_start", "nan", "0"]
WORDS += ["tokens", "tags"]
TEXT = b"it rains in the hills\n\nand it is wet\r\n"
CONTEXT = "Zürich’s 🏔 naïve café opened in 1999."
QAS = [
    {"id": "a", "question": "what?", "answers": [{"text": "1999", "answer_start": 32}]},
    {"id": "b", "question": "where?", "answers": [], "is_impossible": True},
    {"id": "c", "question": "which?", "answers": [{"text": "café", "answer_start": 17}], "is_impossible": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def put(path: Path, raw: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def read_rows(spec: Any) -> None:
    """Read the training split, and hold each of its rows to be sound."""
    for row in resolve_name(FAMILIES[family(spec)].data).records(spec, "train").rows():
        value = row.value
        if family(spec) == "text":
            assert value.label.strip() if isinstance(value.label, str) else math.isfinite(value.label)
        elif family(spec) == "squad":
            assert all(value.context.startswith(answer.text, answer.start) for answer in value.answers)
        elif family(spec) == "lm":
            assert value.strip()
        else:
            assert all(value.words)
            assert all(value.tags)
            assert len(value.words) == len(value.tags)


def held(spec: Any, *names: str, read: Callable[[Any], object] = read_rows) -> str:
    """Return the message of a task's files, "" where they are read; a quick check refuses only what reading does."""
    message = ""
    try:
        read(spec)
    except UserError as error:
        message = str(error)
        assert any(name in message for name in names), message
    mistakes = check_data_files(spec, ["train"])
    assert message or not mistakes, mistakes
    return message


def task(folder: Path, name: str, file: str | None = None, **fields: Any) -> Any:
    files = {"train_file": file, "validation_file": file} if file else {}
    return parse_task({"name": name, "data_dir": str(folder), **files, **fields})


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
            odd = [b"", b"nan", b"1e999", b"9" * 5000, b'"', b'"a', b"1", b"x" * 70_000, b"1_0", "٣".encode(), b" 0 "]
            cell = st.text(max_size=9).map(lambda text: text.encode(errors="surrogatepass")) | st.sampled_from(odd)
            row[at : at + data.draw(st.integers(0, 2), "cells")] = data.draw(st.lists(cell, max_size=2), "put")
        raw = b"\n".join(mark.join(row) for row in rows)
    return spoilt_bytes(data, raw) if how in ("bytes", "both") else raw


SOUND = {
    ("text", "a.csv"): b'text,kind\n"a ""pear""",1\n"an owl,\nold",0\n',
    ("text", "a.tsv"): b"text\tkind\na pear\t1\nan owl\t0\n",
    ("text", "a.jsonl"): b'{"text": "a pear", "kind": 1}\n{"text": "an owl", "kind": 0}\n{"text": "x", "kind": 2}',
    ("ner", "a.conll"): b"a\tO\npear\tB-fruit\n\t\nowl\tO\n",
    ("token", "a.jsonl"): b'{"tokens": ["a", "pear"], "tags": ["O", "B-fruit"]}\n{"tokens": ["owl"], "tags": ["O"]}',
    ("clm", "a.txt"): TEXT,
    ("mlm", "a.jsonl"): b'{"text": "it rains"}\n{"text": ""}\n{"text": "in the hills"}',
    ("squad", "train-v2.0.json"): json.dumps(
        {"data": [{"title": "Cafés", "paragraphs": [{"context": CONTEXT, "qas": QAS}]}]}
    ).encode(),
    **{(name, f"glue/{each.folder}/train.tsv"): "".join(OFFICIAL[name]).encode() for name, each in GLUE.items()},
}
"""A file of each task."""


def spoilt_file(data: st.DataObject, suffix: str, raw: bytes) -> bytes:
    if suffix == ".json":
        return json_bytes(data, json.loads(raw), WORDS)
    if suffix == ".jsonl":
        lines = map(json.loads, raw.split(b"\n"))
        return b"\n".join(
            json_bytes(data, line, WORDS) if data.draw(st.booleans()) else as_json(line).encode() for line in lines
        )
    return spoilt_bytes(data, raw) if suffix == ".txt" else delimited(data, raw, b"," if suffix == ".csv" else b"\t")


@fuzzed(150)
@given(data=st.data(), case=st.sampled_from(list(SOUND)))
def test_files_of_every_task(data: st.DataObject, case: tuple[str, str], folder: Path) -> None:
    """Classes, scores, tags, questions and documents: a sound file is read, and a spoilt one, or its mistake named."""
    name, file = case
    fields: dict[str, Any] = {}
    if name == "text":
        fields = {"text_columns": ["text"], "label_column": "kind", "regression": data.draw(st.booleans(), "scores")}
    elif name == "clm":
        fields["line_by_line"] = data.draw(st.booleans(), "line_by_line")
    elif name == "squad":
        fields["version_2_with_negative"] = True
    path = put(folder / file, SOUND[case])
    spec = task(folder, name, None if name in (*GLUE, "squad") else file, **fields)
    assert held(spec) == ""
    put(path, spoilt_file(data, path.suffix, SOUND[case]))
    held(spec, str(path))


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


@fuzzed(30)
@given(data=st.data())
def test_parquet_files(data: st.DataObject, folder: Path) -> None:
    """Columns of every type under the names that are asked for, and bytes changed anywhere."""
    sound = data.draw(st.integers(0, 3), "any columns") == 0
    some = st.lists(st.sampled_from(["text", "kind", "x", ""]), min_size=1, max_size=4) | st.just(["text", "kind"])
    names = ["text", "kind"] if sound else data.draw(some)
    arrays = [data.draw(st.sampled_from(COLUMNS[1:4] if sound else COLUMNS), "column") for _ in names]
    path = folder / "user.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names), path)
    if data.draw(st.booleans(), "bytes"):
        path.write_bytes(spoilt_bytes(data, path.read_bytes()))
    fields = {"text_columns": ["text"], "label_column": "kind", "regression": data.draw(st.booleans(), "regression")}
    held(task(folder, "text", path.name, **fields), str(path))


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model's folder with a tokenizer."""
    config = BertConfig(vocab_size=200, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(folder / "model")
    train_tokenizer([CONTEXT, TEXT.decode()], 120, True).save_pretrained(str(folder / "model"))
    return folder / "model"


ODD_TEXTS = [
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
    "x" * 3000,
    " ",
    "it ",
]
any_text = st.text(max_size=20) | st.lists(st.sampled_from(ODD_TEXTS), max_size=6).map("".join)


@fuzzed(40)
@given(data=st.data(), name=st.sampled_from(["text", "squad", "mlm"]), texts=st.lists(any_text, min_size=1, max_size=4))
def test_tokens(
    data: st.DataObject, name: str, texts: list[str], folder: Path, model: Path, tmp_path_factory: Any
) -> None:
    """Any text at all becomes tokens within the vocabulary and the length, or the split is refused as empty."""
    if name == "text":
        rows = [{"text": text, "kind": number % 2} for number, text in enumerate([*texts, "", "a"])]
        put(folder / "tokens.jsonl", "\n".join(map(json.dumps, rows)).encode())
        spec = task(folder, "text", "tokens.jsonl", text_columns=["text"], label_column="kind", max_seq_length=8)
    elif name == "squad":
        start = data.draw(st.integers(0, max(0, len(texts[0]) - 1)), "start")
        answer = {"text": texts[0][start : start + data.draw(st.integers(1, 9))], "answer_start": start}
        qas = [{"id": str(number), "question": text, "answers": [answer]} for number, text in enumerate(texts)]
        put(
            folder / "tokens.json", json.dumps({"data": [{"paragraphs": [{"context": texts[0], "qas": qas}]}]}).encode()
        )
        spec = task(folder, "squad", "tokens.json", max_seq_length=16, max_query_length=4, doc_stride=2)
    else:
        put(folder / "tokens.txt", "\n".join(texts).encode())
        spec = task(folder, "mlm", "tokens.txt", max_seq_length=8, min_seq_length=3)

    def read(spec: Any) -> None:
        examples = build_task(spec, model, tmp_path_factory.mktemp("cache")).examples("train")
        assert len(examples) > 0
        assert 0 <= examples.tokens["input_ids"].min() <= examples.tokens["input_ids"].max() < 200
        assert examples.lengths.max() <= spec.max_seq_length

    held(spec, "tokens", "train:", read=read)


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        *(("sst2", "train.tsv"), ("text", "a.csv"), ("text", "a.tsv"), ("text", "a.jsonl"), ("text", "a.parquet")),
        *(("squad", "a.json"), ("mlm", "a.txt"), ("clm", "a.jsonl"), ("mlm", "*.txt")),
    ],
)
def test_what_is_no_file_is_not_read(kind: str, name: str, file: str, tmp_path: Path) -> None:
    """An empty file, a folder, a pipe, a device without an end, a file beyond any memory: refused by name, at once."""
    odd_file(tmp_path / file.replace("*", "a"), kind)
    fields = {"text_columns": ["text"], "label_column": "kind"} if name == "text" else {}
    assert held(task(tmp_path, name, None if name == "sst2" else file, **fields), file, file.replace("*", "a"))


# Run folders


REPORTED = ["all_results.json", "recipe.json", "log.jsonl", "command.json", "eval/exits.json"]


@fuzzed(30)
@given(data=st.data())
def test_reports(data: st.DataObject, folder: Path) -> None:
    """The page is made of what can be read; a broken recipe or broken results are named, and nothing is written."""
    run, place = folder / "sound", folder / "out"
    if not run.exists():
        write_run(run)
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
    with written() as places, pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "check_installed", absent)  # they take seconds
        message = RULE.outcome("report", report_command, [str(place)], str(place))
    assert [path for path in places if not Path(path).is_relative_to(place)] == []
    assert (place / "report.md").is_file() == (not message)


def absent() -> None:
    raise ValueError("no figures here")


@fuzzed(40)
@given(data=st.data())
def test_the_list_of_a_run(data: st.DataObject, folder: Path) -> None:
    """Whatever the list of a run's files names, nothing outside of its folder is written or deleted."""
    place, beside = folder / "listed", folder / "beside"
    for path in (place / "model" / "config.json", place / "report.md", place / "mine.txt", beside / "config.json"):
        put(path, b"{}")
    words = ["model", "*", "**", "../beside", "../beside/*", "..", ".", "/", "mine.txt", "~", "x/../../beside"]
    raw = json_bytes(data, ["model", "report.md", "plots/*.png"], [*words, str(beside)])
    assume(max(map(len, raw.split(b'"'))) < 250)  # no file has a longer name
    put(place / ".ds_trainer.json", raw)
    with written() as places:
        RULE.outcome("run's list", lambda _: RunFolder(place).open(overwrite=True), [], ".ds_trainer.json")
    assert [path for path in places if not Path(path).is_relative_to(place)] == []
    assert (beside / "config.json").is_file()
