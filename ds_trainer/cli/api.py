"""What a notebook calls: the commands' own work, on one process, without a launcher, from Python values.

Every function makes the command line that a user would have typed, checks it as the command does, and makes the same
call. What is trained here is, bit by bit, what the command trains.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.cli.evaluate import read_evaluate_job
from ds_trainer.cli.export import read_export_job
from ds_trainer.cli.train import read_train_job
from ds_trainer.config.recipe import Recipe
from ds_trainer.config.trust import Trust, trusting

if TYPE_CHECKING:
    from torch import nn

JsonFile = str | Path | Mapping[str, Any]
"""A JSON file, or its content."""


def train(
    recipe: Recipe | JsonFile,
    output_dir: str | Path,
    *flags: str,
    deepspeed_config: JsonFile | None = None,
    overwrite: bool = False,
    resume: bool = False,
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a recipe, as `launch/train.py` does; returns the results by phase. The model is `output_dir/model`.

    Without `deepspeed_config` the engine file is that of ZeRO stage 0 in fp32, with all numbers "auto". Further `flags`
    are those of the command, such as "--cache_dir", "DIR". Raises UserError with every mistake.
    """
    from ds_trainer.run import run

    with tempfile.TemporaryDirectory() as folder:
        content = recipe.model_dump(exclude_none=True) if isinstance(recipe, Recipe) else recipe
        files = {"--recipe": content, "--deepspeed_config": deepspeed_config or _ENGINE_FILE}
        words = ["--output_dir", str(output_dir), *flags]
        for flag, value in files.items():
            words += [flag, _file(value, Path(folder, f"{flag[2:]}.json"))]
        for plugin in plugins:
            words += ["--plugin", plugin]
        job = read_train_job([*words, *["--overwrite_output_dir"] * overwrite, *["--resume"] * resume])
    with trusting(job.trust):
        return run(job)


def evaluate(model: str | Path, *flags: str, **task: Any) -> dict[str, float]:
    """Score a model folder, or a checkpoint, as `launch/evaluate.py` does: `evaluate("OUT/model", name="sst2", ...)`.

    `task` are the fields of a recipe's task; without any, a checkpoint is scored on its phase's task.
    """
    from ds_trainer.scoring import evaluate_folder

    words = [word for name, value in task.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    job = read_evaluate_job([str(model), *words, *flags])
    with trusting(job.trust):
        return evaluate_folder(job)


def shrink(model: str | Path, output_dir: str | Path, *flags: str) -> dict[str, Any]:
    """Cut the heads and neurons that are wholly zero out of a folder's model, as `launch/export.py --shrink` does.

    Writes an ordinary, smaller model folder; returns the report of the export.
    """
    from ds_trainer.deploy.export_folder import export_folder

    job = read_export_job([str(model), "--shrink", "--output_dir", str(output_dir), *flags])
    report = io.StringIO()
    with trusting(job.trust):
        export_folder(job, report)
    return dict(json.loads(report.getvalue()))


def load_model(folder: str | Path, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> nn.Module:
    """Load the model of a folder that a run left, in evaluation mode, in fp32.

    With exit heads in the folder, its forward exits early: `logits` (rows, classes), and `exit_layers` (rows,), the
    layers that each sample went through. Raises UserError where the folder holds no trained model. By default weights
    are safetensors, and no code of the folder is run; `config/trust.py` says what the two permissions are.
    """
    from ds_trainer.techniques.exits.early_exit import load_for_inference

    with trusting(Trust(allow_pickle, trust_remote_code)):
        return load_for_inference(folder)


_NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_ENGINE_FILE = dict.fromkeys(_NUMBERS, "auto")


def _file(value: JsonFile, path: Path) -> str:
    """The path of a file with this content, `path` where there is none yet."""
    if not isinstance(value, Mapping):
        return str(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)
