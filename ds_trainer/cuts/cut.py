"""Cut a trained model as a spec says, fitted to training examples of a task; or outline the cut.

The outline is a model of about the shape that the cut gives, made without calibration examples.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.cuts.allocation import allocate, check_budget, prices_of
from ds_trainer.cuts.blocks import cut_blocks, cut_places, uniform_counts
from ds_trainer.cuts.calibration import Calibration, calibration_of, check_sound, check_tokens
from ds_trainer.cuts.reconstruction import Kept, LayerRecord, reconstruct, reconstruction_set
from ds_trainer.cuts.sizes import cut_sizes, outline_of_sizes
from ds_trainer.cuts.surgeon import CutRecord
from ds_trainer.cuts.vocabulary import cut_vocabulary_for
from ds_trainer.cuts.weights import cut_linears, cut_weights
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import encoder_layers, in_features, rows_of
from ds_trainer.models.pretrained import dtype_of
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import STRUCTURED, CutSpec
from ds_trainer.tasks.task import Task

CUT_FILE = "cut.json"
"""The report of a cut, beside the model that it made."""


@dataclass(frozen=True)
class CutResult:
    """A cut model with its tokenizer, the report of the cut as JSON values, and the task that it was fitted to."""

    model: Any
    tokenizer: Any
    report: dict[str, Any]
    task: Task

    @property
    def summary(self) -> str:
        """What was cut, in a line for the console."""
        parts, size, tokens = (self.report[name] for name in ("parts", "parameters", "tokens"))
        counts = [(size["before"], size["after"], "parameters"), (tokens["before"], tokens["after"], "tokens")]
        if parts and parts[0]["unit"] == "weights":  # the rest are zeros
            whole, kept = (sum(part[name] for part in parts) for name in ("count", "kept"))
            counts[0] = (whole, kept, "weights of the encoder")
        line = f"cut in {self.report['seconds']} s"
        line += "".join(f", {before:,} -> {after:,} {unit}" for before, after, unit in counts if after < before)
        if parts:
            mean, worst = statistics.mean(part["error"] for part in parts), max(parts, key=lambda part: part["error"])
            line += f", error of the outputs {mean:.3f} on average, {worst['error']:.3f} in {worst['name']}"
        if layers := self.report["reconstruction"]:
            before, after = (statistics.mean(layer[when] for layer in layers) for when in ("before", "after"))
            line += f"; of whole layers {before:.3f}, reconstructed {after:.3f}"
        return line

    def save(self, folder: Path) -> None:
        """Write the model folder, with the report beside the model."""

        def finish(aside: Path) -> None:
            write_json(aside / CUT_FILE, self.report)
            self.task.save(aside)

        save_folder(self.model, self.tokenizer, folder, finish)


def cut_of(task: Task, source: str | Path, spec: CutSpec, seed: int) -> CutResult:
    """Cut the model of a folder or hub name on this rank's device; collective. `seed` draws the examples.

    Raises UserError as `check_trained` does, and StoppedError, within seconds of a request to stop the run.
    """
    started = time.perf_counter()
    check_trained(task, source, spec)
    torch.manual_seed(seed)  # for a head that is not trained: every rank must cut the same model
    model: Any = task.build_model(source)
    before, examples, records, sizes = model.num_parameters(), 0, list[CutRecord](), dict[str, Any]()
    reconstructed = list[LayerRecord]()
    if spec.cuts_layers:
        examples = min(spec.calibration_examples, len(task.examples("train")))
        calibration = calibration_of(task, examples, seed)
        kept = Kept(range(len(encoder_layers(model))))
        if spec.sizes:
            model, records, sizes, kept = cut_sizes(model, calibration, spec)
        else:
            model, records = cut_model(model, calibration, spec)
        if spec.reconstruct:
            # the dense model is loaded again, not copied before the cut, which would hold two models all the time
            dense, texts = task.build_model(source).eval(), reconstruction_set(task, spec.reconstruct, seed + 1)
            reconstructed = reconstruct(model, dense, kept, texts, spec.reconstruct)
            del dense, texts
    model, tokenizer = _finished(model, task, source, spec)
    report = {
        "spec": spec.model_dump(exclude_defaults=True),
        "examples": examples,
        "parameters": {"before": before, "after": model.num_parameters()},
        "tokens": {"before": len(task.tokenizer), "after": len(tokenizer)},
        "seconds": round(time.perf_counter() - started, 1),
        "parts": [asdict(record) for record in records],
        "reconstruction": [asdict(record) for record in reconstructed],
        **sizes,
    }
    return CutResult(model, tokenizer, report, task)


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
    return CutResult(*_finished(model, task, source, spec), {}, task)


def cut_model(model: Any, calibration: Calibration, spec: CutSpec) -> tuple[Any, list[CutRecord]]:
    """Return the cut model, on the CPU, and what was done where; collective. The given model is changed.

    UserError where the model's family is unknown, its weights are not finite, or the spec keeps less than must stay,
    or everything.
    """
    check_sound(model, calibration)
    model.eval().cpu()
    if spec.granularity not in STRUCTURED:
        check_tokens(cut_linears(model, spec).values(), calibration, spec)
        return model, cut_weights(model, calibration, spec)
    places = cut_places(model, spec)
    if spec.uniform:
        counts = uniform_counts(places, spec.share)
    else:
        prices = prices_of(model, places, spec, calibration.device)
        places, counts = allocate(model, places, prices, calibration, spec)
    check_tokens([place.outer for place in places.values()], calibration, spec)
    records = cut_blocks(model, places, counts, calibration, spec)
    return shrink(model), records


@torch.no_grad()
def outline(model: Any, spec: CutSpec) -> Any:
    """Return a model of about the shape that a cut gives, made without calibration examples.

    Where the spec chooses over all layers, the layers of the cut model differ from these, which keep about its share.
    UserError where a cut is sure to fail.
    """
    if spec.granularity not in STRUCTURED:
        for linear in cut_linears(model, spec).values():
            linear.weight[:, ::2] = 0
        return model
    places = cut_places(model, spec)
    counts = uniform_counts(places, spec.share) if spec.uniform else {}
    if not spec.uniform and spec.target_latency is None:  # seconds are measured by the cut itself
        check_budget(places, prices_of(model, places, spec, torch.device("cpu")), spec)
    for name, place in places.items():
        # a choice over all layers removes something, also where the share of each one would round to all of it
        kept = counts.get(name, max(place.lowest, min(1, place.count - 1), int(spec.share * place.count)))
        rows_of(place.outer.weight, type(place.outer))[:, in_features(place.outer) // place.count * kept :] = 0
    return shrink(model)


def _finished(model: Any, task: Task, source: str | Path, spec: CutSpec) -> tuple[Any, Any]:
    """Return the model in the precision of its source, and the tokenizer; the vocabulary is cut if the spec says so."""
    model.to(dtype_of(source))
    if spec.vocabulary is None:
        return model, task.tokenizer
    return cut_vocabulary_for(spec.vocabulary, task.spec, model, task.tokenizer)
