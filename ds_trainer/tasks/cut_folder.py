"""The model that a cut makes of a model folder, fitted to training examples of a task."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.files.writing import write_json
from ds_trainer.models.cut.cut import cut_model, outline
from ds_trainer.models.folders import save_folder
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.calibration import calibration_of
from ds_trainer.tasks.task import Task

CUT_FILE = "cut.json"
"""The report of a cut, beside the model that it made."""


@dataclass(frozen=True)
class CutFolder:
    """A cut model with its tokenizer, and the report of the cut as JSON values."""

    model: Any
    tokenizer: Any
    report: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the model folder, with the report beside the model."""
        save_folder(self.model, self.tokenizer, folder, lambda aside: write_json(aside / CUT_FILE, self.report))


def cut_of(task: Task, source: str | Path, spec: CutSpec, seed: int) -> CutFolder:
    """Cut the model of a folder or hub name on this rank's device; collective. `seed` draws the examples.

    UserError where sizes are to be chosen by the answers of a model whose head is not trained.
    """
    started = time.perf_counter()
    if spec.cuts_blocks and not spec.uniform:
        _check_trained(task, source)
    torch.manual_seed(seed)  # for a head that is not trained: every rank must cut the same model
    calibration = calibration_of(task, spec.calibration_examples, seed)
    model, records = cut_model(task.build_model(source), calibration, spec, distributed.device())
    report = {
        "spec": spec.model_dump(exclude_defaults=True),
        "examples": min(spec.calibration_examples, len(task.examples("train"))),
        "seconds": round(time.perf_counter() - started, 1),
        "parts": [asdict(record) for record in records],
    }
    return CutFolder(model, task.tokenizer, report)


def _check_trained(task: Task, source: str | Path) -> None:
    try:
        task.check_trained(source)
    except UserError as error:
        raise UserError(f"cut: {error}: its answers cannot choose sizes. Fine-tune it first, or set uniform") from error


def outline_of(task: Task, source: str | Path, spec: CutSpec) -> CutFolder:
    """Return a model of about the shape that the cut will give, without running it: its weights mean nothing."""
    return CutFolder(outline(task.build_model(source), spec), task.tokenizer, {})
