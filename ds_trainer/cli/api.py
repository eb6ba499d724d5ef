"""What a notebook calls: the work of the commands, in one process without a launcher, given Python values.

Every function checks its arguments as the command checks its flags, and makes the same call. A model trained here is,
bit by bit, the one that the command trains, and the same lines are shown. A checkpoint of a run can be given wherever
a model folder can. An error names the flag of the command: `--overwrite_output_dir` is `overwrite=True` here,
`--task_name sst2` is `name="sst2"`, and `--plugin` is `plugins=`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.cli import evaluate as evaluating
from ds_trainer.cli import export as exporting
from ds_trainer.cli import train as training
from ds_trainer.ranks.distributed import show_log
from ds_trainer.recipe.jobs import Trust, trusting
from ds_trainer.recipe.recipe import Recipe
from ds_trainer.recipe.saved_checkpoint import is_checkpoint, read_checkpoint

if TYPE_CHECKING:
    from torch import nn

JsonFile = str | Path | Mapping[str, Any]
"""A JSON file, the name of one in `ds_configs/`, or its content."""

_NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_ENGINE_FILE = dict.fromkeys(_NUMBERS, "auto")


class PhaseResults(dict[str, Any]):
    """The results of a run by phase, of which a notebook shows a table, since all that they hold would fill a page."""

    def __repr__(self) -> str:
        from ds_trainer.report.results import results_table

        return results_table(self)


def train(
    recipe: Recipe | JsonFile,
    output_dir: str | Path,
    *flags: str,
    deepspeed_config: JsonFile | None = None,
    overwrite: bool = False,
    resume: bool = False,
    plugins: Sequence[str] = (),
) -> PhaseResults:
    """Train a recipe, as `launch/train.py` does; returns the results by phase. The model is `output_dir/model`.

    Without `deepspeed_config` the engine file is that of ZeRO stage 0 in fp32, with all numbers "auto". Further `flags`
    are those of the command, such as "--cache_dir", "DIR". Raises UserError with every mistake.
    """
    show_log()
    switches = ["--overwrite_output_dir"] * overwrite + ["--resume"] * resume
    words = [*flags, *switches, *(f"--plugin={plugin}" for plugin in plugins)]
    files = {"recipe": recipe, "deepspeed_config": deepspeed_config or _ENGINE_FILE}
    job = training.read_train_job(words, **files, output_dir=output_dir)
    return PhaseResults(training.train(job))


def evaluate(model: str | Path, *flags: str, recipe: Recipe | JsonFile | None = None, **task: Any) -> dict[Any, Any]:
    """Score a model folder, or a checkpoint, as `launch/evaluate.py` does: `evaluate("OUT/model", name="sst2", ...)`.

    `task` are the fields of a recipe's task, beside those of the last phase of `recipe`. Without both, a checkpoint is
    scored on its phase's task. The scores are printed, too. With "--all_checkpoints" they are returned by step.
    """
    show_log()
    return evaluating.evaluate(evaluating.read_evaluate_job([str(model), *flags], recipe=recipe, fields=task))


def shrink(model: str | Path, output_dir: str | Path, *flags: str, overwrite: bool = False) -> dict[str, Any]:
    """Cut the heads and neurons that are wholly zero out of a model, as `launch/export.py --shrink` does.

    `model` is a model folder or a checkpoint. Writes an ordinary, smaller model folder; returns the export's report.
    """
    return _exported(model, flags, output_dir=output_dir, overwrite=overwrite, shrink=True)


def cut(
    model: str | Path,
    output_dir: str | Path,
    spec: float | Mapping[str, Any],
    *flags: str,
    recipe: Recipe | JsonFile | None = None,
    overwrite: bool = False,
    **task: Any,
) -> dict[str, Any]:
    """Cut a trained model, as `launch/export.py --cut` does: `cut("M", "OUT", 0.5, recipe="R")`.

    `spec` is the share of heads and neurons to keep, or the fields of a phase's cut. It is fitted to training examples
    of the task that `recipe` and `task` describe. Writes an ordinary model folder; returns the export's report.
    """
    place = {"output_dir": output_dir, "overwrite": overwrite}
    return _exported(model, flags, cut=spec, recipe=recipe, fields=task, **place)


def load_model(folder: str | Path, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> nn.Module:
    """Load the model of a model folder or a checkpoint, in evaluation mode, in fp32.

    With exit heads in the folder, its forward exits early: `logits` as the model gives them, and `exit_layers` (rows,),
    the layers that each sample went through. Raises UserError where the folder holds no trained model. By default
    weights are safetensors, and no code of the folder is run; `recipe/jobs.py` says what the two permissions are.
    """
    from ds_trainer.techniques.exits.early_exit import load_for_inference

    with trusting(Trust(allow_pickle, trust_remote_code)), contextlib.ExitStack() as until_loaded:
        if is_checkpoint(str(folder)):
            from ds_trainer.run.scoring import model_of  # loads DeepSpeed, which serving does not need

            folder, _ = until_loaded.enter_context(model_of(read_checkpoint(folder), None))
        return load_for_inference(folder)


def _exported(model: str | Path, flags: Sequence[str], **given: Any) -> dict[str, Any]:
    show_log()
    return exporting.export(exporting.read_export_job([str(model), *flags], **given))
