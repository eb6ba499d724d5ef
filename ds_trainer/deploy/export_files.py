"""The names of the files of an export, and the report that it leaves. Loads no torch."""

import os
from pathlib import Path
from typing import Any

from ds_trainer.files.reading import read_value
from ds_trainer.files.run_folder import MODEL_FILES
from ds_trainer.ranks.failures import UserError

ONNX_FILE, INT8_FILE, REPORT = "model.onnx", "model.int8.onnx", "export.json"
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "model*.onnx")
REPLACED = (*WEIGHTS, *MODEL_FILES, REPORT)
"""The files that are deleted where another model is written in the place of one."""


def read_report(folder: Path) -> dict[str, Any] | None:
    """Read the report of an earlier export to a folder, None without one; UserError for another file of that name."""
    if not os.path.lexists(folder / REPORT):
        return None
    report = read_value(folder / REPORT)
    if not isinstance(report, dict) or "folder" not in report:
        raise UserError(f"{folder / REPORT} is no report of an export")
    return report
