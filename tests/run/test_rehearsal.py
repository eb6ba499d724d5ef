"""The minutes of a dry run, and the memory that is counted for it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from ds_trainer.report.results import dry_run_table
from ds_trainer.run import rehearsal
from ds_trainer.run.rehearsal import LiveMemory, measure_time


def test_the_minutes_of_a_dry_run_are_measured_by_few_examples(monkeypatch):
    """A forward and backward takes 0.25 s an example here, so that four take the second that a batch may take: 16 take
    4 s, and 10 steps of two micro-batches 80 s. Every batch is taken twice: the first time loads what is loaded once.

    The minutes have the estimate of a cut in them; a phase that trains nothing has that alone.
    """
    taken: list[int] = []

    def seconds(take, device):
        take()
        return 0.25 * taken[-1]

    monkeypatch.setattr(rehearsal, "_forward_and_backward", lambda plan, prepared, ids: taken.append(len(ids)))
    monkeypatch.setattr(rehearsal, "seconds", seconds)
    plan = SimpleNamespace(
        engine_config={"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2},
        length=SimpleNamespace(total=10),
        task=SimpleNamespace(examples=lambda split: SimpleNamespace(lengths=np.arange(100))),
    )
    time = measure_time(plan, None)
    assert (time["seconds"], time["examples"], time["micro_batch"]) == (80.0, 4, 16)
    assert taken == [1, 1] + [4] * 6
    shared = {"steps": {"total": 10}, "engine_file": {"train_batch_size": 32}, "frozen_parameters": 5}
    shared |= {"parameter_groups": [{"parameters": 1000}, {"parameters": 200}]}
    held = {"memory_per_rank": {"ranks": 2, "peak_of_the_gpu": 2**30, "peak_of_the_host": 2**20}}
    phases = [
        {"phase": "half", "time": time} | shared | held,
        {"phase": "kept"} | shared,
    ]
    header, half, kept, *notes = dry_run_table(phases).splitlines()
    assert header.endswith("MiB of the GPU  MiB of the host  minutes")
    assert half.split() == ["half", "10", "32", "1,205", "1,200", "1,024", "1", "1.3"]
    assert kept.split() == ["kept", "10", "32", "1,205", "0", "<0.1"]
    assert "4 of the 16 examples of each" in "".join(notes)


def test_live_memory_counts_what_lives_at_once():
    """A tensor counts until it is freed, and so does what a backward needs; a view, and what existed before, do not."""
    before = torch.ones(100)
    with LiveMemory() as live:
        one = before * 2
        assert live.now == 400
        view = one[:50].t()
        before.add_(1)
        assert live.now == 400
        del one
        assert live.now == 400  # the view keeps it
        del view
        other = torch.zeros(10)
        assert (live.now, live.peak) == (40, 400)
        del other
    layer, rows = nn.Linear(8, 16), torch.ones(4, 8)
    with LiveMemory() as live:
        out = layer(rows).relu()
        assert live.now == 4 * 16 * 4
        out.sum().backward()
        assert live.peak > live.now
