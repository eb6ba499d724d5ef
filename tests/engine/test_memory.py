"""The memory of a rank by arithmetic is that of the tensors that DeepSpeed's engine keeps; what a lack of it says.

As a script under `deepspeed --num_gpus N`, this file takes two steps of a small BERT under every ZeRO stage and writes
to its argument, by case, the bytes by arithmetic and those counted.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from support.launching import chosen, run_deepspeed

from ds_trainer.engine.memory import ModelSizes, PhaseMemory, offloaded, rank_memory
from ds_trainer.ranks import distributed
from ds_trainer.run.rehearsal import LiveMemory

SIZES = ModelSizes(trained=1000, frozen=200, largest=300)
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_arithmetic_equals_the_tensors_of_the_engine(ranks, tmp_path):
    """The peak of a step: ZeRO 0 to 3, fp32 and bf16, accumulation 1 and 2, with next to no activations.

    Each of them is taken on one of both numbers of ranks, and with --exhaustive on both.
    On 2 ranks a reduction may still hold its buffer when the next one begins, and ZeRO-3 in fp32 holds less, since its
    largest gradient is alone when the weights are gathered.
    """
    done = run_deepspeed(ranks, "tests/engine/test_memory.py", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    for case, (foretold, counted) in json.loads((tmp_path / "out.json").read_text()).items():
        margin = 0.12 if ranks == 2 else 0.01
        assert foretold == pytest.approx(counted, rel=margin), case


def test_optimizers_keep_their_own_number_of_values():
    momentum = {"type": "SGD", "params": {"momentum": 0.9}}
    for optimizer, states in ((None, 2), ({"type": "SGD"}, 0), (momentum, 1), ({"type": "Lion"}, 1)):
        config = BATCH | ({"optimizer": optimizer} if optimizer else {})
        assert rank_memory(SIZES, config, 4).held["optimizer"] == 4 * 1000 * states


def test_a_phase_is_described_by_its_parts():
    """The teacher's share, and the activations of a micro-batch.

    On a GPU, what is offloaded is in the memory of the host.
    """
    on_cpu, on_gpu = (PhaseMemory(SIZES, 1000, 500, 4000, 800, process=10_000, on_gpu=gpu) for gpu in (False, True))
    plain = on_cpu.describe(BATCH)
    assert (plain["ranks"], plain["teacher"], plain["activations"]) == (4, 4200, 2000)
    # gradients and the copy in which they are reduced are more than the activations
    tensors = 1200 * 4 + 1000 * 8 + 1000 * 8
    assert plain["peak"] == tensors + 300 * 4 + 4200 + 10_000
    whole = on_gpu.describe(BATCH)
    assert (whole["peak_of_the_gpu"], whole["peak_of_the_host"]) == (tensors + 4200, 10_000)
    config = BATCH | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    memory = rank_memory(SIZES, config, 4)
    assert offloaded(memory, config) == {"optimizer": 250 * 8, "master_weights": 250 * 4}
    described = on_gpu.describe(config)
    assert described["peak_of_the_host"] == 10_000 + 250 * 12
    assert described["peak_of_the_gpu"] == memory.peak(2000) + 4200 - 250 * 12


def counted(config: dict, vocabulary: int) -> tuple[int, int]:
    """The peak by arithmetic, and that of all tensors that live in the second step."""
    from transformers import BertConfig, BertForSequenceClassification

    from ds_trainer.engine import engine
    from ds_trainer.engine.engine import parameter_groups
    from ds_trainer.engine.engine_file import Hyperparameters

    base = Hyperparameters(1e-4)
    shape = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 256}
    with LiveMemory() as live:
        model = BertForSequenceClassification(BertConfig(**shape, vocab_size=vocabulary))
        groups = parameter_groups(model, [], [], base)
        sizes = ModelSizes.of(model, groups)
        ds_engine = engine.start_engine(model, groups, config, base, lambda step: 1.0)
        ids, labels = torch.tensor([[5, 6]]), torch.tensor([1])
        for step in range(2):
            live.peak = live.now if step else 0
            for _ in range(config["gradient_accumulation_steps"]):
                ds_engine.backward(ds_engine(input_ids=ids, labels=labels).loss)
                ds_engine.step()
    engine.stop_engine(ds_engine)
    return rank_memory(sizes, config, distributed.world_size()).peak(activations=0), live.peak


def main(out: str) -> None:
    distributed.start()
    alone = distributed.world_size() == 1
    every = product(range(4), ("fp32", "bf16"), (1, 2))
    # each on one of both numbers of ranks
    cases = chosen(every, lambda c: ((c[1] == "bf16") == (c[2] == 2)) != alone)
    results, sizes = {}, {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000}
    # a small vocabulary: most memory is taken where the backward begins, as ZeRO-3 has left the weights gathered
    for stage, precision, accumulation, vocabulary in [*((*case, 4000) for case in cases), (3, "fp32", 1, 50)]:
        config = {
            "train_batch_size": accumulation * distributed.world_size(),
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | sizes,
            "bf16": {"enabled": precision == "bf16"},
        }
        results[f"{stage}-{precision}-{accumulation}-{vocabulary}"] = counted(config, vocabulary)
    if distributed.is_main():
        Path(out).write_text(json.dumps(results))
    distributed.stop()
    distributed.leave(0)


if __name__ == "__main__":
    main(sys.argv[-1])
