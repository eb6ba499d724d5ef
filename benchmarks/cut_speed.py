"""Seconds and peak memory of cutting half of a BERT's heads and neurons, in a process of its own, with random weights.

`python benchmarks/cut_speed.py`: MiniLM's shape (bar 30 s) and BERT-base's (bar 240 s) with the same share in every
layer, and MiniLM's with sizes by loss (bar 60 s), on 512 examples of 64 tokens, two threads. Memory is what the process
holds beyond its start.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from figures import Figure, bert_shape, is_quick, report, use_threads
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.cuts.calibration import Calibration
from ds_trainer.cuts.cut import cut_model
from ds_trainer.ranks import distributed
from ds_trainer.recipe.cut_specs import CutSpec

SHAPES = {
    "minilm": (384, 6, True, 30.0),
    "minilm_by_loss": (384, 6, False, 60.0),
    "bert_base": (768, 12, True, 240.0),
}
"""Width, layers, whether every layer keeps the same share, and the bar in seconds."""
EXAMPLES, TOKENS, BATCH, PROBED = (16, 8, 4, 4) if is_quick() else (512, 64, 32, 64)


def main(name: str = "") -> None:
    if name:
        print(*measured(name))
        return
    figures = []
    for shape, (_, _, _, bar) in SHAPES.items():
        seconds, held = measured(shape) if is_quick() else measured_apart(shape)
        print(f"{shape}: {held / 1e6:.0f} MB")
        figures.append(Figure(f"cut_speed/{shape}/seconds", seconds, bar))
    report(*figures)


def measured_apart(name: str) -> list[float]:
    """Return what `measured` returns, from a process of its own, whose peak of memory is the cut's."""
    done = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()[-2:]]


def measured(name: str) -> tuple[float, int]:
    """Return the seconds of a cut, and the bytes that it holds at its peak."""
    use_threads(2)
    distributed.keep_freed_memory()
    hidden, layers, uniform, _ = SHAPES[name]
    torch.manual_seed(0)
    start = peak()
    config = BertConfig(**bert_shape(hidden, layers, 12))
    model = BertForSequenceClassification(config)
    ids = torch.randint(0, config.vocab_size, (EXAMPLES, TOKENS))
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(BATCH)]
    attended = [batch["attention_mask"].bool() for batch in batches]
    calibration = Calibration(
        batches, attended, answers(ids[:PROBED]), lambda *pair: float(F.mse_loss(*pair)), lambda *_: torch.zeros(())
    )
    started = time.perf_counter()
    cut_model(model, calibration, CutSpec(keep=0.5, uniform=uniform))
    return time.perf_counter() - started, peak() - start


def answers(ids: Tensor) -> Callable[[Any], Tensor]:
    """Return a function that computes a model's logits for these tokens (examples, length)."""
    return lambda model: torch.cat([model(part).logits for part in ids.split(BATCH)])


def peak() -> int:
    """Return the largest number of bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
