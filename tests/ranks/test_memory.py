"""Memory that runs out becomes one error, with the memory that the rank held and the cure."""

import re
import weakref

import numpy as np
import pytest
import torch

from ds_trainer.engine import memory
from ds_trainer.engine.memory import evaluation_cure, held, training_cure
from ds_trainer.engine.rank_memory import ModelSizes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import OutOfMemoryError, exit_code
from ds_trainer.ranks.joining import out_of_memory_named

RUNNING_OUT = {
    "torch": lambda: torch.empty(10**15),
    "numpy": lambda: np.empty(10**15),
    "python": lambda: bytearray(10**15),
}


@pytest.mark.parametrize("allocator", RUNNING_OUT)
def test_whatever_allocator_fails_it_is_one_error_with_a_code_of_its_own(allocator):
    """Torch, numpy and Python each have another error for it."""
    with pytest.raises(OutOfMemoryError) as error, out_of_memory_named(" in a test", lambda: "The cure."):
        RUNNING_OUT[allocator]()
    assert re.fullmatch(r"rank 0 \(host .+\) ran out of memory in a test: .+\. The cure\.", str(error.value))
    assert exit_code(error.value) == 6


def test_other_errors_stay_what_they_are():
    """A wrong shape is no matter of memory; an error that was reported already stays the same."""
    for mistake in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OutOfMemoryError("x"), KeyError("x")):
        with pytest.raises(type(mistake)) as error, out_of_memory_named(""):
            raise mistake
        assert error.value is mistake


def test_what_the_failed_step_held_is_free_again():
    """The message and status.json are written after it, and need some memory, too."""
    kept = []

    def step() -> None:
        activations = torch.ones(10)
        kept.append(weakref.ref(activations))
        torch.empty(10**15)

    with pytest.raises(OutOfMemoryError), out_of_memory_named(""):
        step()
    assert kept[0]() is None


def test_the_cure_names_what_can_still_be_changed(monkeypatch):
    """No batch of less than one, no stage above 3, no sharing by one rank."""
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    assert training_cure(config, recomputes=False) == (
        "Lower per_device_train_batch_size (train_micro_batch_size_per_gpu, now 8) and raise "
        "gradient_accumulation_steps (now 2) as much, or set gradient_checkpointing in the phase, or lower the task's "
        "max_seq_length."
    )
    monkeypatch.setattr(memory.distributed, "world_size", lambda: 2)
    assert "raise zero_optimization.stage (now 2)" in training_cure(config, recomputes=True)
    last = config | {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    assert training_cure(last, recomputes=True) == evaluation_cure("x", 1, last) == "Lower the task's max_seq_length."
    assert evaluation_cure("x", 2, config).startswith("Lower x (now 2), or raise zero_optimization.stage (now 2), or ")


def test_what_was_held_adds_up():
    """The message has the parts of the arithmetic, and the rest of this process's peak."""
    sizes = ModelSizes(trained=1 << 18, frozen=1 << 17, largest=1 << 10)
    text = held(sizes, {"gradient_accumulation_steps": 1})
    parts = "parameters 1.50 MiB, master_weights 0.00 MiB, optimizer 2.00 MiB, gradients 1.00 MiB; the peak"
    assert f"of ZeRO stage 0 it holds {parts}" in text


def test_what_fails_on_rank_0_for_all_is_told_by_rank_0():
    """Only rank 0 scores: the other ranks end with the same exit code, and without a message."""
    error = distributed._for_other_ranks(MemoryError("Unable to allocate 7 PiB"))
    assert (type(error), getattr(error, "reporter", None)) == (OutOfMemoryError, 0)
