"""The names of the files of an export, and the report that it leaves. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_trainer.files.reading import read_value
from ds_trainer.files.run_folder import MODEL_FILES
from ds_trainer.ranks.failures import UserError

ONNX_FILE, INT8_FILE, REPORT = "model.onnx", "model.int8.onnx", "export.json"
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "model*.onnx")
REPLACED = (*WEIGHTS, *MODEL_FILES, REPORT)
"""The names of files of a model that goes where another is written in its place."""
ASIDE = ".export.", ".tmp"
"""How the name of a folder begins and ends that is written aside."""


def read_report(folder: Path) -> dict[str, Any] | None:
    """What an earlier export told of a folder, or None; ValueError where the file of that name is another."""
    if not os.path.lexists(folder / REPORT):
        return None
    found = read_value(folder / REPORT)
    if not isinstance(found, dict) or "folder" not in found:
        raise UserError(f"{folder / REPORT} is no report of an export")
    return found


def is_aside(name: str) -> bool:
    """Whether a folder's name is that of one that an export, running or killed, has made aside."""
    return name.startswith(ASIDE[0]) and name.endswith(ASIDE[1])
