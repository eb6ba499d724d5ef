"""Takes two steps of a small BERT under every ZeRO stage and writes what its tensors took; started by a test.

`deepspeed --num_gpus N tests/support/memory_worker.py OUT` writes, by case, the bytes by arithmetic and those counted.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import torch
from support.exhaustive import chosen
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.engine import engine
from ds_trainer.engine.live_memory import LiveMemory
from ds_trainer.engine.optim import Hyperparameters, parameter_groups
from ds_trainer.engine.rank_memory import ModelSizes, rank_memory
from ds_trainer.ranks import distributed

BASE = Hyperparameters(1e-4)
ACCUMULATIONS = (1, 2)


VOCABULARY = 4000
MANY_LAYERS = "3-fp32-1 without a large parameter"
"""A case in which most memory is taken where the backward begins: ZeRO-3 has left the weights gathered."""


def config_of(stage: int, precision: str, accumulation: int) -> dict:
    sizes = {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000}
    return {
        "train_batch_size": accumulation * distributed.world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | sizes,
        "bf16": {"enabled": precision == "bf16"},
    }


def counted(config: dict, vocabulary: int = VOCABULARY) -> tuple[int, int]:
    """The peak by arithmetic, and that of all tensors that live in the second step."""
    shape = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 256}
    with LiveMemory() as live:
        model = BertForSequenceClassification(BertConfig(**shape, vocab_size=vocabulary))
        groups = parameter_groups(model, [], [], BASE)
        sizes = ModelSizes.of(model, groups)
        ds_engine = engine.start_engine(model, groups, config, BASE, lambda step: 1.0)
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
    results = {}
    alone = distributed.world_size() == 1
    every = product(range(4), ("fp32", "bf16"), ACCUMULATIONS)
    # each on one of both numbers of ranks
    for stage, precision, accumulation in chosen(every, lambda c: ((c[1] == "bf16") == (c[2] == 2)) != alone):
        results[f"{stage}-{precision}-{accumulation}"] = counted(config_of(stage, precision, accumulation))
    results[MANY_LAYERS] = counted(config_of(3, "fp32", 1), vocabulary=50)
    if distributed.is_main():
        Path(out).write_text(json.dumps(results))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-1])
    distributed.leave(0)
