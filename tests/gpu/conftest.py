"""What runs on one GPU: one rank over NCCL, in the process of the tests. Without a GPU all of it is skipped.

Two ranks cannot share a GPU: NCCL refuses it, and DeepSpeed has no other backend for tensors on a GPU. What is between
ranks is tested on CPUs. `pytest tests/gpu --on_cpu` runs on a CPU what needs no GPU, so that these tests can be tested.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from support.launching import ROOT

from ds_trainer.ranks import distributed

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: the same products every time
sys.path.append(str(ROOT / "benchmarks"))


def pytest_addoption(parser):
    parser.addoption("--on_cpu", action="store_true", help="run those tests for GPUs that need none")


@pytest.fixture(scope="session", autouse=True)
def device(request) -> torch.device:
    """The GPU."""
    if not torch.cuda.is_available():
        if not request.config.getoption("--on_cpu", default=False):
            pytest.skip("torch sees no GPU here")
        get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch computes it
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; of matrix products it is off by default
    return distributed.device()


@pytest.fixture(scope="session")
def gpu(device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(scope="module")
def world(device):
    """A process group of one rank: of NCCL on a GPU."""
    distributed.start()
    yield
    distributed.stop()


@pytest.fixture(scope="module")
def deterministic():
    """Operations that always give the same bits, wherever torch has one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
