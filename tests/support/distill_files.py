"""Files for runs that distill."""

from __future__ import annotations

import json
from pathlib import Path


def squad_files(folder: Path) -> dict:
    """Who keeps what, asked of sentences in which the keeper stands; every tenth is longer than the others."""
    keepers, things = ("anna", "boris", "carla", "dmitri", "elena"), ("keys", "maps", "tools", "books")
    paragraphs = []
    for number in range(40):
        keeper, thing = keepers[number % 5], things[number % 4]
        context = f"in house {number} the {thing} are kept by {keeper} since the winter" + " and the spring" * (
            number % 10 == 0
        )
        answer = {"text": keeper, "answer_start": context.index(keeper)}
        question = {"id": f"q{number}", "question": f"who keeps the {thing}?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (folder / name).write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return {"name": "squad", "data_dir": str(folder), "max_seq_length": 48, "max_query_length": 16, "doc_stride": 16}


_PAIRS = [(w, x) for w in "abcdef" for x in "ghijkl"]


def lm_files(name: str, folder: Path) -> dict:
    lines = [f"the {w} sails over the {x} sea and the {y} wind" for w in "abcd" for x in "efg" for y in "hijk"]
    for file in ("train.txt", "valid.txt"):
        (folder / file).write_text("\n".join(lines) + "\n")
    files = {"train_file": "train.txt", "validation_file": "valid.txt"}
    return {"name": name, "data_dir": str(folder), "max_seq_length": 32, "min_seq_length": 4, **files}


def tag_files(folder: Path) -> dict:
    """Things that sail over things, tagged; the seventh sentence is longer than the others."""
    sentences = [f"the {w} sails over the {x} sea".split() * (1 + (n % 7 == 6)) for n, (w, x) in enumerate(_PAIRS)]
    rows = ["\n".join(f"{word}\t{'B-thing' if len(word) == 1 else 'O'}" for word in words) for words in sentences]
    (folder / "tags.conll").write_text("\n\n".join(rows) + "\n")
    files = {"train_file": "tags.conll", "validation_file": "tags.conll"}
    return {"name": "ner", "data_dir": str(folder), "max_seq_length": 16, **files}
