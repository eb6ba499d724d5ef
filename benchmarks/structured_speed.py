"""What is gained where heads and neurons are cut out, and what it costs to learn which.

`python benchmarks/structured_speed.py [--hidden 768 --layers 6]`: a BERT of random weights, the shape of BERT-base
with half its layers, with all, 50% and 25% of its heads and neurons, at 128 tokens, 2 threads, fp32: the measured
speed-up of the encoder over the ratio of its FLOPs, in torch and in onnxruntime, all in turns; onnxruntime's time over
torch's; and an optimizer step of 16 x 128 tokens with a score for each head and neuron over one without.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Figure, bert_shape, is_quick, ratio, report, use_threads
from mask_cost import Run
from transformers import BertConfig, PreTrainedModel

from ds_trainer.deploy.measuring import in_turns
from ds_trainer.deploy.onnx_file import outputs, session, write_onnx
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.shrunk_model import shrunk_class
from ds_trainer.ranks import distributed
from ds_trainer.recipe.technique_specs import PruneSpec

TOKENS, THREADS = 128, 2
KEPT = (1.0, 0.5, 0.25)
BARS = {1: 0.75, 32: 0.85}
ROUNDS = {1: 1, 32: 1} if is_quick() else {1: 60, 32: 12}
ROWS = 16


class Encoder(PreTrainedModel):
    """The layers of a model alone: (rows, tokens, hidden) to `last_hidden_state` of the same shape."""

    config_class = BertConfig
    _supports_sdpa = True

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        self.layers = model.encoder

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.layers(hidden)


def shape_of(flags: argparse.Namespace) -> dict[str, int]:
    return bert_shape(flags.hidden, flags.layers, heads=12)


def encoder(flags: argparse.Namespace, kept: float) -> tuple[Any, int]:
    """The encoder that keeps this share of its heads and neurons, and its FLOPs for one example."""
    from transformers import BertModel

    torch.manual_seed(0)
    config = BertConfig(**shape_of(flags))
    if kept == 1:
        model = BertModel(config, add_pooling_layer=False)
    else:
        heads, neurons = (round(kept * n) for n in (config.num_attention_heads, config.intermediate_size))
        layers = config.num_hidden_layers
        config.shrunk = {"heads": [heads] * layers, "neurons": [neurons] * layers}
        model = shrunk_class(BertModel)(config, add_pooling_layer=False)
    return Encoder(model).eval(), encoder_flops(model, TOKENS)


def speed(flags: argparse.Namespace, folder: Path) -> list[Figure]:
    encoders = {kept: encoder(flags, kept) for kept in KEPT}
    hidden_size = encoders[1.0][0].config.hidden_size
    example = torch.randn(2, TOKENS, hidden_size)
    sessions = {}
    for kept, (model, _) in encoders.items():
        write_onnx(model, {"hidden": example}, folder / f"{kept}.onnx")
        sessions[kept] = session(folder / f"{kept}.onnx", THREADS)
    figures = []
    for batch, bar in BARS.items():
        hidden = torch.randn(batch, TOKENS, hidden_size)
        calls: dict[Any, Callable[[], object]] = {}
        for kept, (model, _) in encoders.items():
            calls["torch", kept] = partial(model, hidden)
            calls["onnxruntime", kept] = partial(outputs, sessions[kept], {"hidden": hidden})
        with torch.inference_mode():
            runs = {key: [call] for key, call in calls.items()}
            times = in_turns(runs, math.inf, torch.device("cpu"), ROUNDS[batch])
        for kept in KEPT:
            torch_s, onnx_s = (times[backend, kept] for backend in ("torch", "onnxruntime"))
            relative = statistics.median(a / b for a, b in zip(onnx_s, torch_s, strict=True))
            print(f"batch {batch}, {kept:.0%} kept: torch {1e3 * statistics.median(torch_s):.1f} ms, ", end="")
            print(f"onnxruntime {1e3 * statistics.median(onnx_s):.1f} ms")
            figures.append(Figure(f"structured_speed/onnxruntime_over_torch/batch_{batch}/{kept}", relative, 1.0))
            if kept < 1:
                fewer = encoders[1.0][1] / encoders[kept][1]
                for backend in ("torch", "onnxruntime"):
                    pairs = zip(times[backend, 1.0], times[backend, kept], strict=True)
                    value = statistics.median(whole / cut for whole, cut in pairs)
                    print(
                        f"  {backend}: {value:.2f} times as fast, of {fewer:.2f} times fewer FLOPs: {value / fewer:.2f}"
                    )
                    if backend == "torch":
                        name = f"structured_speed/{backend}/batch_{batch}/{kept}"
                        figures.append(Figure(name, value / fewer, bar, at_least=True))
    return figures


def training(flags: argparse.Namespace) -> Figure:
    spec = PruneSpec(granularity="hybrid", final_threshold=0.5, initial_warmup=0, final_warmup=0.3)
    scored, plain = (Run(shape_of(flags), each, ROWS, TOKENS) for each in (spec, None))
    value, seconds, other = ratio(scored.step, plain.step, rounds=16)
    print(f"a step with scores for heads and neurons {seconds:.3f} s, without {other:.3f} s")
    return Figure("structured_speed/training_step", value, 1.03)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one round of a small model: shows that it works")
    flags = parser.parse_args()
    distributed.start()
    use_threads(THREADS)
    distributed.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        figures = speed(flags, Path(folder))
    report(*figures, training(flags))


if __name__ == "__main__":
    main()
