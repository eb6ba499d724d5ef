"""The model that a cut makes of a model folder, fitted to training examples of a task."""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.cuts.calibration import calibration_of, calibration_sizes
from ds_trainer.cuts.costs import cut_costs
from ds_trainer.cuts.cut import cut_model, outline
from ds_trainer.cuts.sizes import cut_sizes, outline_of_sizes
from ds_trainer.cuts.task_vocabulary import cut_vocabulary_for
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import save_folder
from ds_trainer.models.pretrained import dtype_of, meta_model
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.tasks.task import Task

CUT_FILE = "cut.json"
"""The report of a cut, beside the model that it made."""


@dataclass(frozen=True)
class CutResult:
    """A cut model with its tokenizer, and the report of the cut as JSON values."""

    model: Any
    tokenizer: Any
    report: dict[str, Any]

    @property
    def summary(self) -> str:
        """What was cut, in a line for the console."""
        parts, size, tokens = (self.report[name] for name in ("parts", "parameters", "tokens"))
        counts = [(size["before"], size["after"], "parameters")]
        if parts and parts[0]["unit"] == "weights":  # the rest are zeros
            whole, kept = (sum(part[name] for part in parts) for name in ("count", "kept"))
            counts = [(whole, kept, "weights of the encoder")]
        if sizes := self.report.get("sizes"):
            counts += [(sizes["before"][name], after, name) for name, after in sizes["after"].items()]
        counts.append((tokens["before"], tokens["after"], "tokens"))
        changes = [f", {before:,} -> {after:,} {unit}" for before, after, unit in counts if after < before]
        line = f"cut in {self.report['seconds']} s{''.join(changes)}"
        if not parts:
            return line
        mean, worst = statistics.mean(part["error"] for part in parts), max(parts, key=lambda part: part["error"])
        return f"{line}, error of the outputs {mean:.3f} on average, {worst['error']:.3f} in {worst['name']}"

    def save(self, folder: Path) -> None:
        """Write the model folder, with the report beside the model."""
        save_folder(self.model, self.tokenizer, folder, lambda aside: write_json(aside / CUT_FILE, self.report))


def cut_of(task: Task, source: str | Path, spec: CutSpec, seed: int) -> CutResult:
    """Cut the model of a folder or hub name on this rank's device; collective. `seed` draws the examples.

    Raises UserError as `check_trained` does, and StoppedError, within seconds of a request to stop the run.
    """
    started = time.perf_counter()
    check_trained(task, source, spec)
    torch.manual_seed(seed)  # for a head that is not trained: every rank must cut the same model
    model = task.build_model(source)
    before, examples, parts, sizes = _size(model), 0, [], dict[str, Any]()
    if spec.cuts_layers:
        examples = min(spec.calibration_examples, len(task.examples("train")))
        calibration = calibration_of(task, examples, seed)
        if spec.sizes:
            model, records, sizes = cut_sizes(model, calibration, spec)
        else:
            model, records = cut_model(model, calibration, spec)
        parts = [asdict(record) for record in records]
    model, tokenizer = _finished(model, task, source, spec)
    report = {
        "spec": spec.model_dump(exclude_defaults=True),
        "examples": examples,
        "parameters": {"before": before, "after": _size(model)},
        "tokens": {"before": len(task.tokenizer), "after": len(tokenizer)},
        "seconds": round(time.perf_counter() - started, 1),
        "parts": parts,
        **sizes,
    }
    return CutResult(model, tokenizer, report)


def check_trained(task: Task, source: str | Path, spec: CutSpec) -> None:
    """Raise UserError where a cut depends on the answers of a model whose head is not trained."""
    if not spec.judges_answers:
        return
    try:
        task.check_trained(source)
    except UserError as error:
        raise UserError(
            f"cut: {error}: its answers say nothing about what to keep. Fine-tune it first, or set keep with uniform "
            "and the method obs"
        ) from error


def outline_of(task: Task, source: str | Path, spec: CutSpec) -> CutResult:
    """Return a model of about the shape that the cut will give, without running it: its weights mean nothing."""
    model = task.build_model(source)
    if spec.cuts_layers:
        model = outline_of_sizes(model, spec) if spec.sizes else outline(model, spec)
    return CutResult(*_finished(model, task, source, spec), {})


def _finished(model: Any, task: Task, source: str | Path, spec: CutSpec) -> tuple[Any, Any]:
    """Return the model in the precision of its source, and the tokenizer; the vocabulary is cut if the spec says so."""
    model.to(dtype_of(source))
    if spec.vocabulary is None:
        return model, task.tokenizer
    return cut_vocabulary_for(spec.vocabulary, task.spec, model, task.tokenizer)


def expected_costs(task: Task, source: str | Path, spec: CutSpec, seed: int) -> dict[str, Any]:
    """Return what the cut of a folder or hub name will cost, without its weights; empty where no blocks are cut."""
    if not spec.cuts_blocks:
        return {}
    model = meta_model(source, task.head)
    batches, probes = calibration_sizes(task, spec.calibration_examples, seed)
    return cut_costs(model, spec, batches, probes, distributed.device())


def _size(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
