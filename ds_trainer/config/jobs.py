"""The jobs of the commands: what each is to do, once its flags and files are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.config.exit_specs import ExitPolicy, ExitsSpec
from ds_trainer.config.recipe import Recipe, TaskSpec
from ds_trainer.config.saved_checkpoint import SavedCheckpoint
from ds_trainer.config.trust import Trust

OF_THE_TASK = "task"
"""In the place of a length: the task's texts, as long as they are."""

BACKENDS = ("torch", "compile", "onnxruntime")

DEVICES = ("cpu", "cuda")

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""How the flag says them, and torch; onnxruntime has fp32 of them, and "int8", weights quantised dynamically."""


@dataclass(frozen=True)
class TrainJob:
    """A checked training command: the recipe, the engine file as written, and what the flags ask."""

    command: str
    """As it was given, for the run's report."""
    recipe: Recipe
    engine_config: dict[str, Any]
    output: Path
    overwrite: bool
    resume: bool
    checkpoint: Path | None
    """To resume from, in place of the newest."""
    dry_run: bool
    timeout: int
    """Seconds a rank waits for another."""
    trust: Trust
    debug_port: int | None


@dataclass(frozen=True)
class CalibrateJob:
    """A checked calibration command."""

    model: str
    task: TaskSpec
    batch_size: int
    cache_dir: str | None
    exits: ExitsSpec
    trust: Trust


@dataclass(frozen=True)
class EvaluateJob:
    """A checked evaluation command."""

    model: str
    """A model folder or hub name; a checkpoint; or the folder of a phase, all of whose checkpoints are scored."""
    task: TaskSpec
    batch_size: int
    cache_dir: str | None
    output_file: Path | None
    predictions_dir: Path | None
    exit_policy: ExitPolicy | None
    """In place of the model folder's."""
    trust: Trust
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    """What is scored in place of a model folder, in the order of steps."""
    policy_for: Callable[[str], ExitPolicy | None] = lambda _: None
    """The `exit_policy` for a model folder that a checkpoint becomes: what heads it has shows then."""


@dataclass(frozen=True)
class ExportJob:
    """A checked export command."""

    model: Path
    output: Path
    """A folder; the model's own where only .onnx files are written."""
    shrink: bool
    onnx: bool
    quantize: str | None
    """ "int8", or None; only with `onnx`."""
    compact: str | None
    """How the values of a compact file are held, or None."""
    unpack: bool
    import_from: str | None
    """The program that wrote the folder, where it is not this one or transformers."""
    threshold: float | None
    """What a masked BERT is folded at."""
    task: TaskSpec | None
    """To take inputs from, and to score on."""
    batch_size: int
    cache_dir: str | None
    trust: Trust
    checkpoint: SavedCheckpoint | None = None
    """What becomes the model folder first."""

    @property
    def plain(self) -> bool:
        """Whether the model folder of a checkpoint is the output itself."""
        return self.checkpoint is not None and not (self.shrink or self.onnx or self.compact)

    @property
    def writes_folder(self) -> bool:
        """Whether the output is a model folder."""
        return self.shrink or self.unpack or self.compact is not None or self.import_from is not None or self.plain


@dataclass(frozen=True)
class BenchmarkJob:
    """A checked command: model folders by label, the base of all ratios first, and what to measure them at."""

    folders: dict[str, Path]
    backends: tuple[str, ...]
    devices: tuple[str, ...] | None
    """None: those that are there."""
    dtypes: tuple[str, ...]
    threads: tuple[int, ...]
    lengths: tuple[int | str, ...]
    """In tokens; or `OF_THE_TASK`."""
    batch_sizes: tuple[int, ...]
    seconds: float
    """For the calls of all folders at one setting."""
    task: TaskSpec | None
    eval_batch_size: int
    cache_dir: str | None
    output: Path | None
    trust: Trust
