"""The jobs of the commands: what each command has to do, once its flags and files are checked.

A field that is named like a flag takes that flag's value, and checks it; the command fills in the others.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ds_trainer.files.run_folder import MODEL_FILES
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.exit_specs import EXITS_FILE, ExitPolicy, ExitsSpec, SavedExits, policy_of
from ds_trainer.recipe.recipe import Phase, Recipe
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint
from ds_trainer.recipe.task_specs import TaskBase

OF_THE_TASK: Literal["task"] = "task"
"""In place of a length: the task's texts, as long as they are."""

BACKENDS = ("torch", "onnxruntime")

DEVICES = ("cpu", "cuda")

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our names of dtypes, and those of torch. Onnxruntime has fp32, and INT8: weights quantised dynamically."""
INT8 = "int8"

ONNX_FILE, INT8_FILE, EXPORT_REPORT = "model.onnx", "model.int8.onnx", "export.json"
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "model*.onnx")
REPLACED = (*WEIGHTS, *MODEL_FILES, EXPORT_REPORT)
"""The files that an export deletes where it writes another model in the place of one."""

_DISTINCT = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
Count = Annotated[int, Field(ge=1, le=2**20)]
Counts = Annotated[tuple[Count, ...], _DISTINCT]
Names = Annotated[tuple[str, ...], _DISTINCT]


@dataclass(frozen=True)
class Trust:
    """The permissions of model folders. By default weights are read from safetensors, and none of their code is run.

    The permissions are flags of the command, so that no downloaded recipe can grant itself any. Models are loaded in
    some fifteen places, by tasks, techniques and students that have no other use for the permissions: they are passed
    in a context variable instead of through every signature in between. Where it is not set, in a new thread for
    instance, nothing is permitted.
    """

    allow_pickle: bool = False
    """Read pytorch_model.bin where there are no safetensors; still as weights only, so that its code is not run."""
    trust_remote_code: bool = False
    """Run the Python files that a model's config names."""


_IN_FORCE: ContextVar[Trust] = ContextVar("trust", default=Trust())  # noqa: B039 - it is frozen


def trust_in_force() -> Trust:
    return _IN_FORCE.get()


@contextlib.contextmanager
def trusting(trust: Trust) -> Iterator[None]:
    """Load models under these permissions inside the block."""
    token = _IN_FORCE.set(trust)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


class CommandJob(BaseModel):
    """What the jobs of all commands have: what the user permits the model folders that it loads."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    trust: Trust


class TaskJob(CommandJob):
    """What the commands have that run a model on a task."""

    model: str
    """A model folder or hub name."""
    task: TaskBase
    batch_size: Count
    cache_dir: str | None


class TrainJob(CommandJob):
    """A checked training command: the recipe, the engine file as written, and what the flags request."""

    command: str
    """The command line as it was given, for the run's report."""
    recipe: Recipe
    engine_config: dict[str, Any]
    output: Path
    overwrite: bool
    resume: bool
    checkpoint: Path | None
    """The checkpoint that `--resume CHECKPOINT` names; None stands for the newest."""
    dry_run: Literal["table", "json"] | None
    world: Annotated[int, Field(ge=1)] | None
    """The number of ranks that a dry run is about, where it is not the number of those that run it."""
    timeout: Annotated[int, Field(ge=1)]
    """Seconds that a rank waits for another."""
    debug_port: Annotated[int, Field(gt=0, lt=2**16)] | None
    push_to_hub: str | None
    """The name of the repository that the run's model is sent to."""


class ValueRange(BaseModel):
    """The numbers from `low` to `high`, both included."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    low: float
    high: float
    log: bool = False
    """Draw numbers evenly by their logarithms."""
    whole: bool = False
    """Draw whole numbers only. It cannot be seen from the ends: the reader of JSON makes 1 of 1.0."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "ValueRange":
        if self.low >= self.high or (self.log and self.low <= 0):
            raise UserError("low must be below high, and above 0 with log")
        if self.whole and not (self.low.is_integer() and self.high.is_integer()):
            raise UserError("low and high must be whole numbers with whole")
        return self


class TuneJob(CommandJob):
    """A checked tuning command: the user's training command, and what may be varied."""

    train: TrainJob
    recipe_file: dict[str, Any]
    engine_file: dict[str, Any]
    """Both files as the user wrote them, with the command's flags and `--set`."""
    train_flags: tuple[str, ...]
    """Those of the training command whose values are not in the files."""
    phase: str
    """The phase that is to be fast, or the last one, whose model is scored."""
    space: dict[str, list[Any] | ValueRange] | None
    """The values to try, by the path of `--set`; None for the default, and without ranges where speed is the aim."""
    metric: str | None
    """The score to go by; None where speed is the aim."""
    greater_is_better: bool
    budget: Annotated[float, Field(gt=0)]
    """Seconds."""
    trial_timeout: Annotated[float, Field(gt=0)]
    """Seconds without a printed or logged line after which a trial counts as hung."""
    trial_steps: Annotated[int, Field(ge=8)]
    """The steps of a trial for speed, of which the last three quarters are timed."""
    num_gpus: Annotated[int, Field(ge=1)] | None
    """The ranks of every trial, where they are not varied."""
    hostfile: Path | None
    output: Path

    @property
    def tuned_phase(self) -> Phase:
        return next(phase for phase in self.train.recipe.phases if phase.name == self.phase)

    @property
    def sign(self) -> int:
        """-1 where less of the metric is better, else 1."""
        return 1 if self.greater_is_better else -1

    @property
    def unit(self) -> str:
        """What trials are compared by."""
        return self.metric or "examples/s"


class CalibrateJob(TaskJob):
    """A checked calibration command."""

    exits: ExitsSpec


class EvaluateJob(TaskJob):
    """A checked evaluation command. The model may also be a checkpoint, or the folder of a phase with several."""

    all_checkpoints: bool
    output_file: Path | None
    predictions_dir: Path | None
    checkpoints: tuple[SavedCheckpoint, ...]
    """What is scored in place of a model folder, in the order of their steps."""
    exits: ExitsSpec | None
    """What the flags request in place of the exit policy of the model folder, or None."""

    def exit_policy(self, saved: SavedExits | None) -> ExitPolicy | None:
        """Return the policy that the flags request for the exit heads of a folder; None if they request none.

        Raise UserError where it does not fit the heads, or where there are none.
        """
        if self.exits is None:
            return None
        if saved is None:
            raise UserError(f"an exit policy is given, and {self.model} has no {EXITS_FILE}, so no heads to exit at")
        if self.exits.patience is not None and saved.policy.of_regression:  # its tolerances stay
            return saved.policy.model_copy(update={"patience": self.exits.patience})
        return policy_of(self.exits, len(saved.layers), saved.policy.of_regression)


class ExportJob(CommandJob):
    """A checked export command."""

    model: Path
    output: Path
    """A folder; the model's own folder where only .onnx files are written."""
    shrink: bool
    cut: CutSpec | None
    onnx: bool
    quantize: str | None
    """ "int8", or None; only with `onnx`."""
    compact: str | None
    """ "fp16", the type of the values of a compact file, or None."""
    unpack: bool
    task: TaskBase | None
    """The task to take inputs from, to score on, and to fit a cut to."""
    batch_size: Count
    cache_dir: str | None
    checkpoint: SavedCheckpoint | None
    """The checkpoint that becomes the model folder first."""
    push_to_hub: str | None
    """The name of the repository that the output is sent to."""

    @property
    def plain(self) -> bool:
        """Whether the model folder of a checkpoint, or of a cut, is the output itself."""
        only_checkpoint = self.checkpoint is not None and not (self.shrink or self.onnx)
        return (only_checkpoint or self.cut is not None) and not self.compact

    @property
    def writes_folder(self) -> bool:
        """Whether the output is a model folder."""
        return self.shrink or self.unpack or self.compact is not None or self.plain

    @property
    def adds_onnx(self) -> bool:
        """Whether .onnx files come beside the weights that they are of, and not into a folder of their own."""
        return not self.writes_folder and os.path.realpath(self.output) == os.path.realpath(self.model)


class BenchmarkJob(CommandJob):
    """A checked benchmark command: model folders by label, the base of all ratios first, and what to measure at."""

    folders: dict[str, Path]
    backends: Names
    devices: Names | None
    """None: all devices of this machine."""
    dtypes: Names
    threads: Counts
    lengths: Annotated[tuple[Count | Literal["task"], ...], _DISTINCT]
    """In tokens; or `OF_THE_TASK`."""
    batch_sizes: Counts
    seconds: Annotated[float, Field(gt=0)]
    """For the calls of all folders at one setting."""
    task: TaskBase | None
    eval_batch_size: Count
    cache_dir: str | None
    output: Path | None
