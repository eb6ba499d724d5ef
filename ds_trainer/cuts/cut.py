"""Cut a trained model as a spec says, fitted to training examples of a task; outline the cut, and estimate its costs.

The outline is a model of about the shape that the cut gives, made without calibration examples. The costs follow from
the shapes of a model, whose weights are not read.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.cuts.allocation import MEASURED, allocate, check_budget, prices_of
from ds_trainer.cuts.blocks import cut_blocks, cut_places, uniform_counts
from ds_trainer.cuts.calibration import Calibration, calibration_of, calibration_sizes, check_sound, check_tokens
from ds_trainer.cuts.sizes import cut_sizes, outline_of_sizes, planned_sizes, sizes_now
from ds_trainer.cuts.surgeon import CutRecord, removal
from ds_trainer.cuts.vocabulary import cut_vocabulary_for
from ds_trainer.cuts.weights import cut_linears, cut_weights
from ds_trainer.files.writing import write_json
from ds_trainer.models.costs import encoder_flops, layer_flops
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import SIZES_OF, in_features, layers_of, out_features, rows_of
from ds_trainer.models.pretrained import dtype_of, meta_model
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.machine import seconds
from ds_trainer.recipe.cut_specs import STRUCTURED, CutSpec
from ds_trainer.tasks.task import Task

CUT_FILE = "cut.json"
"""The report of a cut, beside the model that it made."""
_PRODUCT, _REMOVED = 1024, 384
"""The size of the matrices by whose product a device is measured, and how many inputs are removed to measure that."""


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
        counts = [(size["before"], size["after"], "parameters"), (tokens["before"], tokens["after"], "tokens")]
        if parts and parts[0]["unit"] == "weights":  # the rest are zeros
            whole, kept = (sum(part[name] for part in parts) for name in ("count", "kept"))
            counts[0] = (whole, kept, "weights of the encoder")
        line = f"cut in {self.report['seconds']} s"
        line += "".join(f", {before:,} -> {after:,} {unit}" for before, after, unit in counts if after < before)
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
    model: Any = task.build_model(source)
    before, examples, records, sizes = model.num_parameters(), 0, list[CutRecord](), dict[str, Any]()
    if spec.cuts_layers:
        examples = min(spec.calibration_examples, len(task.examples("train")))
        calibration = calibration_of(task, examples, seed)
        if spec.sizes:
            model, records, sizes = cut_sizes(model, calibration, spec)
        else:
            model, records = cut_model(model, calibration, spec)
    model, tokenizer = _finished(model, task, source, spec)
    report = {
        "spec": spec.model_dump(exclude_defaults=True),
        "examples": examples,
        "parameters": {"before": before, "after": model.num_parameters()},
        "tokens": {"before": len(task.tokenizer), "after": len(tokenizer)},
        "seconds": round(time.perf_counter() - started, 1),
        "parts": [asdict(record) for record in records],
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
        counts = allocate(model, places, prices_of(model, places, spec, calibration.device), calibration, spec)
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


def expected_costs(task: Task, source: str | Path, spec: CutSpec, seed: int) -> dict[str, Any]:
    """Return what the cut of a folder or hub name will cost, without its weights; empty where no blocks are cut."""
    if not spec.cuts_blocks:
        return {}
    batches, probes = calibration_sizes(task, spec.calibration_examples, seed)
    return cut_costs(meta_model(source, task.head), spec, batches, probes, distributed.device())


def cut_costs(
    model: Any,
    spec: CutSpec,
    batches: Sequence[tuple[int, int]],
    probes: Sequence[tuple[int, int]],
    device: torch.device,
) -> dict[str, Any]:
    """Return the peak `bytes` of a cut by arithmetic, and `estimated_seconds`, as JSON values.

    The model may be on the meta device. The seconds count the operations as if every block were cut. Each layer runs
    over the calibration examples, in batches of (rows, length), once for each of its blocks, and once more for the
    layer after it. A choice over all layers does so twice, and runs the whole model on a few examples (`probes`) for
    each size that it tries. The runs by which a cut to sizes of the whole model chooses layers and channels are left
    out. How fast the device is at products and removals is measured. The seconds may be wrong by a factor of two.
    """
    layers, places = list(layers_of(model).values()), list(cut_places(model, spec).values())
    sweeps, tried = (1, 0) if spec.uniform or spec.sizes else (2, 1 + len(MEASURED) * len(places))
    if spec.sizes:
        now, sizes = sizes_now(model), planned_sizes(model, spec)
        smaller = {unit for unit in SIZES_OF.values() if getattr(sizes, unit) < getattr(now, unit)}
        places = [place for place in places if SIZES_OF[place.block.kind] in smaller]
    shapes = [(in_features(place.outer), out_features(place.outer)) for place in places]
    run = [*layers, *(place.layer for place in places)]
    passes = sum(rows * layer_flops(layer, length) for layer in run for rows, length in batches)
    padded = sum(rows * length for rows, length in batches)
    grams = sum(2 * padded * width**2 for width, _ in shapes)
    probed = sum(rows * encoder_flops(model, length) for rows, length in probes)
    matrix = torch.rand(_PRODUCT, _PRODUCT, device=device)
    product = min(seconds(lambda: matrix @ matrix, device) for _ in range(3)) / (2 * _PRODUCT**3)
    estimated = (sweeps * (passes + grams) + tried * probed) * product / distributed.world_size()
    if places and spec.method == "obs":  # all blocks are cut on the first rank
        inputs, out = min(_REMOVED, shapes[0][0]), shapes[0][1]
        weight, moments = torch.rand(out, inputs, device=device), torch.eye(inputs, device=device)
        removed = seconds(lambda: removal(weight, moments, 1), device) / _removal_operations(inputs, out)
        estimated += removed * sweeps * sum(_removal_operations(*shape) for shape in shapes)
    held = {
        "model": 4 * sum(parameter.numel() for parameter in model.parameters()),
        "largest_layer": 4 * max(sum(weight.numel() for weight in layer.parameters()) for layer in layers),
        # the surgeon holds six matrices of this size, in fp64
        "gram_matrices": 6 * 8 * max((width for width, _ in shapes), default=0) ** 2,
        # those that a layer gets, and those that it gives
        "hidden_states": 2 * 4 * padded * model.config.hidden_size // distributed.world_size(),
        "weights_tried": 4 * len(MEASURED) * sum(width * out for width, out in shapes) if tried else 0,
    }
    return {"bytes": held | {"total": sum(held.values())}, "estimated_seconds": round(estimated, 1)}


def _finished(model: Any, task: Task, source: str | Path, spec: CutSpec) -> tuple[Any, Any]:
    """Return the model in the precision of its source, and the tokenizer; the vocabulary is cut if the spec says so."""
    model.to(dtype_of(source))
    if spec.vocabulary is None:
        return model, task.tokenizer
    return cut_vocabulary_for(spec.vocabulary, task.spec, model, task.tokenizer)


def _removal_operations(width: int, out: int) -> int:
    """Count the inversion and the removals of all inputs of a layer (out, width)."""
    return 8 * width**3 // 3 + 2 * width**2 * out
