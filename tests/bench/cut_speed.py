"""Seconds and peak memory of cutting half of a BERT's heads and neurons, in a process of its own, with random weights.

`python tests/bench/cut_speed.py`: MiniLM's shape (bar 30 s) and BERT-base's (bar 240 s), on 512 examples of 64 tokens,
two threads. Memory is what the process holds beyond its start, over that of the dense model with two more layers, the
Gram matrices of one block and the hidden states of all examples.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch
from figures import Figure, bert_shape, is_quick, report, use_threads
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.cut import cut_model
from ds_trainer.models.cut.layerwise import Calibration
from ds_trainer.ranks import distributed

SHAPES = {"minilm": (384, 6, 12, 30.0), "bert_base": (768, 12, 12, 240.0)}
"""Width, layers, heads, and the bar in seconds."""
EXAMPLES, TOKENS, BATCH = (16, 8, 4) if is_quick() else (512, 64, 32)


def main(name: str = "") -> None:
    if name:
        print(*measured(name))
        return
    figures = []
    for shape, (_, _, _, bar) in SHAPES.items():
        quick = ["--quick"] if is_quick() else []
        done = subprocess.run([sys.executable, __file__, shape, *quick], check=True, capture_output=True, text=True)
        seconds, held = map(float, done.stdout.split()[-2:])
        figures += [
            Figure(f"cut_speed/{shape}/seconds", seconds, bar),
            Figure(f"cut_speed/{shape}/memory_over_the_arithmetic", held, 1.0),
        ]
    report(*figures)


def measured(name: str) -> tuple[float, float]:
    """Return the seconds of a cut, and the bytes that the process held over those of the arithmetic."""
    use_threads(2)
    distributed.keep_freed_memory()
    hidden, layers, heads, _ = SHAPES[name]
    torch.manual_seed(0)
    start = peak()
    config = BertConfig(**bert_shape(hidden, layers, heads))
    model = BertForSequenceClassification(config)
    ids = torch.randint(0, config.vocab_size, (EXAMPLES, TOKENS))
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(BATCH)]
    attended = [batch["attention_mask"].bool() for batch in batches]
    calibration = Calibration(batches, attended, lambda model: None, lambda *_: 0.0, lambda *_: torch.zeros(()))
    allowed = arithmetic(model, config)
    started = time.perf_counter()
    cut_model(model, calibration, CutSpec(keep=0.5, uniform=True), torch.device("cpu"))
    return time.perf_counter() - started, (peak() - start) / allowed


def arithmetic(model: BertForSequenceClassification, config: BertConfig) -> float:
    """Return the bytes of the model in fp32, two layers, four Gram matrices in fp64, and all hidden states twice."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.bert.encoder.layer[0].parameters())
    states = 2 * EXAMPLES * TOKENS * config.hidden_size
    return 4.0 * (whole + 2 * layer + states) + 8.0 * 4 * config.intermediate_size**2


def peak() -> int:
    """Return the largest number of bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
