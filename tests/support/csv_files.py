"""CSV files of labelled text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_trainer.recipe.task_specs import TextSpec

SENTENCES = ["it rains", "it is wet", "it is dry today", "the cat sat on the mat", "no", "why is it so very wet"]


def write_csv(folder: Path, labels: list[Any]) -> TextSpec:
    rows = [f"{text},{label}\n" for text, label in zip(SENTENCES * 3, labels, strict=False)]
    for file in ("train.csv", "dev.csv"):
        (folder / file).write_text("text,label\n" + "".join(rows), encoding="utf-8")
    files = {"data_dir": str(folder), "train_file": "train.csv", "validation_file": "dev.csv"}
    return TextSpec(name="text", text_columns=["text"], label_column="label", **files)
