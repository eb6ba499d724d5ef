"""The cases of a benchmark: every combination of backend, device, type, threads, length and batch size that can run."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_trainer.config.jobs import DTYPES, OF_THE_TASK, BenchmarkJob
from ds_trainer.models.model_folder import INT8
from ds_trainer.ranks.failures import UserError

ONLY = "onnxruntime runs here on the CPU in fp32 and int8, torch in all types but int8"


@dataclass(frozen=True)
class BenchmarkCase:
    """The conditions that all models are timed under together."""

    backend: str
    device: str
    dtype: str
    threads: int
    length: int | str
    batch_size: int

    def __str__(self) -> str:
        return ", ".join(words(asdict(self)).values())


def words(case: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a case, as `benchmark.json` has them, in words."""
    return {
        **{name: case[name] for name in ("backend", "device", "dtype")},
        "threads": f"threads {case['threads']}",
        "length": "the task's texts" if case["length"] == OF_THE_TASK else f"{case['length']} tokens",
        "batch_size": f"batch {case['batch_size']}",
    }


def benchmark_cases(job: BenchmarkJob, devices: Sequence[str]) -> tuple[list[BenchmarkCase], list[str]]:
    """The cases that can be run, and a note where others were requested.

    A GPU is measured with the first number of threads alone, since they are the host's. UserError without any case.
    """
    requested = itertools.product(job.backends, devices, job.dtypes, job.threads, job.lengths, job.batch_sizes)
    every = [
        case
        for case in itertools.starmap(BenchmarkCase, requested)
        if not (case.device == "cuda" and case.threads != job.threads[0])
    ]
    cases = [case for case in every if _can_run(case)]
    if not cases:
        raise UserError(
            f"there is nothing to measure: {ONLY}: give --dtypes fp32 and --devices cpu, or another backend"
        )
    return cases, [f"not all combinations were measured: {ONLY}"] if len(cases) < len(every) else []


def _can_run(case: BenchmarkCase) -> bool:
    if case.backend == "onnxruntime":
        return case.device == "cpu" and case.dtype in ("fp32", INT8)
    return case.dtype in DTYPES
