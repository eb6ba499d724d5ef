"""Export a trained engine as an ordinary model folder: gather, fold the masks, cut, save, reload and compare."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.models.folders import as_user_error, save_folder
from ds_trainer.models.layers import count_weights, sizes_of, whole_state_dict, whole_totals
from ds_trainer.models.shrink import NothingToCutError, shrink
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.technique import Technique

TOLERANCE = 1e-5
"""By how much outputs in fp32 may differ, where the largest is 1 or less; a share of the largest where it is more."""

Rebuild = Callable[[], tuple[nn.Module, Sequence[Technique]]]
"""Builds the phase's model with its techniques attached, as it was before the engine took it."""


def export_trained(
    engine: Any, rebuild: Rebuild, task: Task, step: int, folder: Path, shrinks: bool = False
) -> dict[str, Any]:
    """Write a trained engine as a `transformers` folder and report its weights; to be called on every rank.

    The weights are gathered to rank 0, one at a time.
    """
    engine.empty_partition_cache()  # ZeRO-3 may still be fetching what it took to come next after an evaluation
    state = whole_state_dict(engine.module, keep=distributed.is_main())
    task.examples(task.splits[0])  # every rank takes part in this, unlike in what follows
    return distributed.on_main(partial(export_state_dict, state, rebuild, task, step, folder, shrinks))


def export_state_dict(
    state: Mapping[str, Tensor], rebuild: Rebuild, task: Task, step: int, folder: Path, shrinks: bool = False
) -> dict[str, Any]:
    """Write the whole weights that a phase had at a step as a model folder, and report them; on one rank.

    The weights are put into a model built anew, so that the techniques fold whole tensors under every ZeRO stage. They
    are saved in the precision they were trained in.
    """
    examples = task.examples(task.splits[0])
    batch = task.collate(examples, range(min(8, len(examples))))
    model, techniques = rebuild()
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    with as_user_error(f"the weights of step {step} do not fit the model that their phase starts from"):
        model.to(dtype).load_state_dict(state)
    for technique in techniques:
        technique.on_step(step)
    return save_folded(model.eval(), techniques, task, batch, folder, shrinks)


@torch.no_grad()
def save_folded(
    model: Any, techniques: Sequence[Technique], task: Task, batch: Batch, folder: Path, shrinks: bool = False
) -> dict[str, Any]:
    """Fold and save a model, once the reloaded folder gives the masked model's logits on a real batch.

    Where it `shrinks`, the heads and neurons that pruning emptied are cut out; without any there is a warning. Returns
    `max_logit_difference`, and the counts of the folder's `weights`, with the totals `before` a cut. In 16 bits a cut
    model rounds differently from the masked one. So the folded model is compared with the masked one in their
    precision, and the cut model with the folded one in fp32.
    """
    what = f"{folder} is not written: the exported model's logits"
    expected = task.logits(model(**batch.inputs), batch)
    # a technique may need another implementation than the default, and they do not round alike
    attention = model.config._attn_implementation
    for technique in techniques:
        model = technique.fold(model)
    folded = model
    if shrinks:
        try:
            model = shrink(folded)
        except NothingToCutError as error:
            distributed.warn(f"{error}. The model is exported as it is")
    totals, dtype, tolerance = whole_totals(folded), next(model.parameters()).dtype, TOLERANCE
    if model is not folded:
        given = task.logits(folded(**batch.inputs), batch)
        check_same(differences(zip(expected, given, strict=True)), TOLERANCE, what)
        expected = task.logits(folded.float()(**batch.inputs), batch)
        dtype, tolerance = torch.float32, tolerance_in(dtype)
    del folded
    cut_as_trained(task.tokenizer, task)
    results: dict[str, Any] = {}

    def finish(aside: Path) -> None:
        task.save(aside)
        for technique in techniques:
            technique.save(aside)
        reloaded: Any = task.build_model(aside).to(dtype).eval()
        reloaded.set_attn_implementation(attention)
        given = task.logits(reloaded(**batch.inputs), batch)
        compared = differences(zip(expected, given, strict=True))
        check_same(compared, tolerance, what)
        results["max_logit_difference"] = compared["max_difference"]
        results["weights"] = count_weights(reloaded)
        if results["weights"]["model"]["total"] < totals["model"]:
            results["weights"] |= {"sizes": sizes_of(reloaded), "before": totals}

    save_folder(model, task.tokenizer, folder, finish)
    return results


def cut_as_trained(tokenizer: Any, task: Task) -> None:
    """Name the length at which a task cuts texts in its tokenizer, so that whoever opens its folder cuts them there.

    A language model's texts are not cut but split, and its tokenizer stays as it is.
    """
    if not task.over_vocabulary:
        tokenizer.model_max_length = getattr(task.spec, "max_seq_length", tokenizer.model_max_length)


def differences(outputs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compare pairs of an expected output and the one to check: `max_difference`, and the `largest` one expected.

    UserError where an output is not finite.
    """
    difference = largest = 0.0
    for expected, given in outputs:
        if not (expected.isfinite().all() and given.isfinite().all()):
            raise UserError("the model's outputs are not finite (NaN or infinity): its weights are broken")
        if expected.numel():
            difference = max(difference, float((given.double() - expected.double()).abs().max()))
            largest = max(largest, float(expected.abs().max()))
    return {"max_difference": difference, "largest": largest}


def agree(compared: Mapping[str, float], tolerance: float) -> bool:
    """Return whether `differences` are within a tolerance, a share of the largest output where that is more than 1."""
    return compared["max_difference"] <= tolerance * max(1.0, compared["largest"])


def check_same(compared: Mapping[str, float], tolerance: float, what: str) -> None:
    """Raise RuntimeError where `differences` are more than rounding: this library made a mistake."""
    if not agree(compared, tolerance):
        raise RuntimeError(f"{what} differ by {compared['max_difference']}")


def tolerance_in(dtype: torch.dtype) -> float:
    """Return by how much the outputs of a shrunk model may differ that is saved in this precision.

    The constants of what was cut are added to biases, which are then rounded to that precision.
    """
    return max(TOLERANCE, 4 * torch.finfo(dtype).eps)
