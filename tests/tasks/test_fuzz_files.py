"""Data files that are broken or hostile: read, or refused with their name and exit code 2.

What is read is sound: labels that exist, answers that are where they are said to be.
"""

from __future__ import annotations

import math
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import NOISY, as_json, fuzzed, refusal, spoilt_bytes, spoilt_json
from support.labelled_files import OFFICIAL

from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import FAMILIES, family
from ds_trainer.tasks.registry import check_data_files

WORDS = ["text", "label", "kind", "data", "context", "question", "answers", "answer_start", "nan", "tokens", "tags"]
CONTEXT = "Zürich’s 🏔 naïve café opened in 1999."
QAS = [
    {"id": "a", "question": "what?", "answers": [{"text": "1999", "answer_start": 32}]},
    {"id": "b", "question": "where?", "answers": [], "is_impossible": True},
]
SOUND: dict[tuple[str, str], Any] = {
    ("text", "a.csv"): 'text,kind\n"a ""pear""",1\n"an owl,\nold",0\n',
    ("text", "a.jsonl"): [{"text": "a pear", "kind": 1}, {"text": "an owl", "kind": 0}],
    ("rte", "RTE/train.tsv"): "".join(OFFICIAL["rte"]),
    ("ner", "a.conll"): "a\tO\npear\tB-fruit\n\t\nowl\tO\n",
    ("token", "b.jsonl"): [{"tokens": ["a", "pear"], "tags": ["O", "B-fruit"]}, {"tokens": ["owl"], "tags": ["O"]}],
    ("clm", "a.txt"): "it rains in the hills\n\nand it is wet\r\n",
    ("squad", "train-v2.0.json"): {"data": [{"title": "Cafés", "paragraphs": [{"context": CONTEXT, "qas": QAS}]}]},
}
"""A file of each task: a text, a JSON value, or the lines of one."""
FIELDS = {
    "text": {"text_columns": ["text"], "label_column": "kind"},
    "squad": {"version_2_with_negative": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


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
            assert len([*filter(None, value.words)]) == len([*filter(None, value.tags)]) == len(value.words)


def refused(spec: Any, *names: str) -> str:
    """The message about a task's files, "" where they are read; a quick check refuses only what reading does."""
    message = refusal(lambda _: read_rows(spec), [], *names)
    mistakes = check_data_files(spec, ["train"])
    assert message or not mistakes, mistakes
    return message


@fuzzed(150)
@given(data=st.data(), case=st.sampled_from(list(SOUND)), regression=st.booleans())
def test_files_of_every_task(data: st.DataObject, case: tuple[str, str], regression: bool, folder: Path) -> None:
    """Classes, scores, tags, questions and documents: a sound file is read, and a spoilt one, or its mistake named."""
    (name, file), sound = case, SOUND[case]
    fields = {"name": name, "data_dir": str(folder), **FIELDS.get(name, {})}
    fields |= {} if name in ("rte", "squad") else {"train_file": file, "validation_file": file}
    spec = parse_task(fields | ({"regression": regression} if name == "text" else {}))
    if isinstance(sound, str):
        whole, spoilt = sound.encode(), spoilt_bytes(sound.encode())
    elif isinstance(sound, dict):
        whole, spoilt = as_json(sound), spoilt_json(sound, WORDS)
    else:
        lines = [st.just(as_json(line)) | spoilt_json(line, WORDS) for line in sound]
        whole, spoilt = b"\n".join(map(as_json, sound)), st.tuples(*lines).map(b"\n".join)
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole)
    assert refused(spec) == ""
    path.write_bytes(data.draw(spoilt | NOISY, "file"))
    refused(spec, str(path))
