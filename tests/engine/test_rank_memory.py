"""The memory of a rank by arithmetic equals the bytes of the tensors that DeepSpeed's engine really keeps."""

from __future__ import annotations

import json

import pytest
import torch
from support.launching import run_deepspeed
from torch import nn

from ds_trainer.engine.live_memory import LiveMemory
from ds_trainer.engine.rank_memory import Activations, ModelSizes, PhaseMemory, offloaded, rank_memory

SIZES = ModelSizes(trained=1000, frozen=200, largest=300)
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_arithmetic_equals_the_tensors_of_the_engine(ranks, tmp_path):
    """The peak of a step: ZeRO 0 to 3, fp32 and bf16, accumulation 1 and 2, with next to no activations.

    Each of them is taken on one of both numbers of ranks, and with --exhaustive on both.
    ZeRO-3 in fp32 on 2 ranks holds less, since its largest gradient is alone when the weights are gathered.
    """
    done = run_deepspeed(ranks, "tests/support/memory_worker.py", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    for case, (foretold, counted) in json.loads((tmp_path / "out.json").read_text()).items():
        margin = 0.07 if case.startswith("3-fp32") and ranks == 2 else 0.01
        assert foretold == pytest.approx(counted, rel=margin), case


def test_live_memory_counts_what_lives_at_once():
    """A tensor counts until it is freed; a view, and what existed before, do not."""
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


def test_live_memory_counts_what_a_backward_needs():
    """Of a linear layer with a ReLU: the output of the first, which the second keeps as its own."""
    layer, rows = nn.Linear(8, 16), torch.ones(4, 8)
    with LiveMemory() as live:
        out = layer(rows).relu()
        assert live.now == 4 * 16 * 4
        out.sum().backward()
        assert live.peak > live.now


def test_more_ranks_hold_less_under_zero():
    """Without ZeRO every rank holds all; stage 1 shares the states, 2 the gradients too, and 3 the parameters."""
    small = {"reduce_bucket_size": 10, "stage3_prefetch_bucket_size": 10}
    files = [BATCH | {"zero_optimization": {"stage": stage} | small} for stage in range(4)]
    peaks = [[rank_memory(SIZES, file, world).peak(0) for world in (1, 8)] for file in files]
    assert peaks[0][0] == peaks[0][1]
    assert peaks[1][1] >= peaks[2][1] > peaks[3][1]
    assert all(alone > one_of_eight for alone, one_of_eight in peaks[1:])


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(None, 2), ({"type": "SGD"}, 0), ({"type": "SGD", "params": {"momentum": 0.9}}, 1), ({"type": "Lion"}, 1)],
)
def test_optimizers_keep_their_own_number_of_values(optimizer, states):
    config = BATCH | ({"optimizer": optimizer} if optimizer else {})
    assert rank_memory(SIZES, config, 4).held["optimizer"] == 4 * 1000 * states


def phase_memory(on_gpu: bool) -> PhaseMemory:
    lines = (Activations(128, False, 1000, 500), Activations(128, True, 1000, 50))
    return PhaseMemory(SIZES, 100, lines, teacher=4000, shared_teacher=800, process=10_000, on_gpu=on_gpu)


def test_a_phase_is_described_by_its_parts():
    """The teacher's share, the activations of the longest examples, with and without checkpointing, and the scores."""
    plain, again = (phase_memory(False).describe(BATCH, checkpointing) for checkpointing in (False, True))
    assert (plain["ranks"], plain["teacher"]) == (4, 4200)
    assert (plain["activations"], again["activations"]) == (2000, 1100)
    assert plain["of_which_mask_scores"] == 100 * (4 + 8 + 4 + 4)
    # gradients and the copy in which they are reduced are more than the activations
    assert plain["peak"] == 1200 * 4 + 1000 * 8 + 1000 * 8 + 300 * 4 + 4200 + 10_000


def test_what_is_offloaded_is_in_the_hosts_memory():
    config = BATCH | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    memory = rank_memory(SIZES, config, 4)
    assert offloaded(memory, config) == {"optimizer": 250 * 8, "master_weights": 250 * 4}
    described = phase_memory(True).describe(config, False)
    assert described["peak_of_the_host"] == 10_000 + 250 * 12
