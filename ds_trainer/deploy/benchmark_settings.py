"""What a benchmark takes times at: the combinations of what is asked for that there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_trainer.config.jobs import DTYPES, OF_THE_TASK, BenchmarkJob
from ds_trainer.models.model_folder import INT8
from ds_trainer.ranks.failures import UserError

_OF_ONNX = ("fp32", INT8)
_ONNX_RUNS = "runs here on the CPU in fp32 and int8"


@dataclass(frozen=True)
class Setting:
    """What times are taken at."""

    backend: str
    device: str
    dtype: str
    threads: int
    length: int | str
    batch_size: int

    def __str__(self) -> str:
        tokens = "the task's texts" if self.length == OF_THE_TASK else f"{self.length} tokens"
        return f"{self.backend}, {self.device}, {self.dtype}, threads {self.threads}, {tokens}, batch {self.batch_size}"


def settings(job: BenchmarkJob, devices: Sequence[str]) -> list[Setting]:
    """Every combination that there is: onnxruntime on the CPU in fp32 and int8, a GPU with the first number of threads.

    ValueError where there is none.
    """
    every = itertools.product(job.backends, devices, job.dtypes, job.threads, job.lengths, job.batch_sizes)
    chosen = [
        setting
        for setting in itertools.starmap(Setting, every)
        if _is_run(setting) and not (setting.device == "cuda" and setting.threads != job.threads[0])
    ]
    if not chosen:
        raise UserError(
            f"there is nothing to measure: onnxruntime {_ONNX_RUNS}, and torch not in int8: give --dtypes fp32 and "
            f"--devices cpu, or another backend"
        )
    return chosen


def left_out(job: BenchmarkJob, devices: Sequence[str]) -> Iterator[str]:
    """A line for what was asked for and `settings` has not."""
    if "onnxruntime" in job.backends:
        others = [dtype for dtype in job.dtypes if dtype not in _OF_ONNX]
        others += [device for device in devices if device != "cpu"]
        if others:
            yield f"onnxruntime, {', '.join(others)}: not measured: it {_ONNX_RUNS}"
    by_torch = [backend for backend in job.backends if backend != "onnxruntime"]
    if by_torch and INT8 in job.dtypes:
        yield f"{', '.join(by_torch)}, {INT8}: not measured: it is for onnxruntime"
    if "cuda" in devices and job.threads[1:]:
        yield f"cuda: measured with threads {job.threads[0]} alone, which are the host's"


def _is_run(setting: Setting) -> bool:
    if setting.backend == "onnxruntime":
        return setting.device == "cpu" and setting.dtype in _OF_ONNX
    return setting.dtype in DTYPES
