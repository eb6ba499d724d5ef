"""What runs the models of a benchmark: torch as it is, torch.compile, onnxruntime."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_trainer.deploy.latency import Run, eager
from ds_trainer.deploy.onnx_file import outputs, session

_MOST_COMPILED = 1000


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, which is on the CPU and in fp32; where it is to be elsewhere or in another type, a copy that is."""
    if device.type == "cpu" and dtype == torch.float32:
        return model
    return copy.deepcopy(model).to(device, dtype)


def compiled(model: Any, of_one_shape: bool) -> Run:
    """By torch.compile, which compiles at the first calls, inside of `compiling`: for inputs of their shape, or any."""
    return eager(torch.compile(model, dynamic=False if of_one_shape else None))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile anew, since code is for a number of threads, and as often as asked.

    By default models of one class together are compiled eight times, and then run uncompiled without a word.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED, accumulated_recompile_limit=_MOST_COMPILED):
        try:
            yield
        finally:
            torch._dynamo.reset()


def onnx(path: Path, threads: int) -> Run:
    """By onnxruntime on the CPU, from a file that `write_onnx` has written; outputs are numpy arrays."""
    return partial(outputs, session(path, threads))
