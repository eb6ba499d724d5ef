"""What masking costs: an optimizer step, an evaluation, and memory, of a masked (topK) model over a plain one.

BERT of 6 layers x 384 (22M parameters, random weights), 32 x 64 tokens, fp32, 2 threads, one rank, ZeRO 0, in one
process: `python benchmarks/mask_cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from figures import Figure, bert_shape, ratio, report, use_threads

from ds_trainer.engine import engine
from ds_trainer.engine.engine import parameter_groups
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.ranks import distributed
from ds_trainer.recipe.technique_specs import PruneSpec
from ds_trainer.techniques.prune.prune import Prune
from ds_trainer.techniques.technique import PhaseLength

ROWS, TOKENS = 32, 64
BASE = Hyperparameters(5e-5)
STEPS = 1000


class Run:
    """A classifier of this shape under the engine, pruned if there is a spec, and how to step and evaluate it."""

    def __init__(
        self,
        shape: dict[str, int],
        spec: PruneSpec | None,
        rows: int = ROWS,
        tokens: int = TOKENS,
        accumulation: int = 1,
    ) -> None:
        from transformers import AutoModelForSequenceClassification, BertConfig

        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(BertConfig(**shape))
        self.techniques = [Prune(spec, PhaseLength(STEPS, 0, seed=1), cast(Any, None))] if spec else []
        for technique in self.techniques:
            model = technique.attach(model)
        rules = [rule for technique in self.techniques for rule in technique.parameter_rules(model)]
        settings = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        self.accumulation = accumulation
        self.engine = engine.start_engine(
            model, parameter_groups(model, [], rules, BASE), settings, BASE, lambda _: 1.0
        )
        self.inputs = {
            "input_ids": torch.randint(1000, 30000, (rows, tokens)),
            "attention_mask": torch.ones(rows, tokens).long(),
        }
        self.labels = torch.randint(0, 2, (rows,))
        self.step_number = 0

    def step(self) -> None:
        self.engine.train()
        for technique in self.techniques:
            technique.on_step(self.step_number)
        for _ in range(self.accumulation):
            loss = F.cross_entropy(self.engine(**self.inputs).logits, self.labels)
            self.engine.backward(loss)
            self.engine.step()
        self.step_number += 1

    @torch.no_grad()
    def evaluate(self) -> None:
        self.engine.eval()
        self.engine(**self.inputs)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator held at once during the call, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    memory = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in memory))


def extra_memory(plain: Run, masked: Run) -> float:
    """Rise of the peak over the plain model's / (the scores' gradients and one buffer of the largest weight)."""

    def pass_of(run: Run) -> Callable[[], None]:
        model = run.engine.module.train()
        return lambda: F.cross_entropy(model(**run.inputs).logits, run.labels).backward()

    for technique in masked.techniques:
        technique.on_step(masked.step_number)
    peaks = []
    for run in (plain, masked):
        pass_of(run)()  # finds the thresholds
        run.engine.module.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        peaks.append(peak_bytes(pass_of(run)))
    layers = [layer for technique in masked.techniques for layer in technique.layers.values()]
    width = layers[0].weight.element_size()
    scores = sum(layer.weight_size for layer in layers) * width
    return (peaks[1] - peaks[0]) / (scores + max(layer.weight_size for layer in layers) * width)


def main() -> None:
    distributed.start()
    use_threads(2)
    shape, figures = bert_shape(384, layers=6, heads=12), []
    spec = PruneSpec(initial_warmup=0, final_warmup=0.3, mask_init="uniform", mask_scale=0.01)
    for accumulation, bar in ((1, 1.15), (4, 1.08)):
        plain, masked = (Run(shape, each, accumulation=accumulation) for each in (None, spec))
        rounds = 24 // accumulation
        value, seconds, other = ratio(masked.step, plain.step, rounds=rounds)
        print(f"accumulation {accumulation}: masked {seconds:.3f} s, plain {other:.3f} s a step")
        figures.append(Figure(f"mask_cost/step/accumulation_{accumulation}", value, bar))
        if accumulation == 1:
            value, seconds, other = ratio(masked.evaluate, plain.evaluate, rounds=40)
            print(f"evaluation: masked {seconds * 1e3:.1f} ms, plain {other * 1e3:.1f} ms a batch")
            figures.append(Figure("mask_cost/evaluation", value, 1.02))
            figures.append(Figure("mask_cost/memory", extra_memory(plain, masked), 1.0))
        plain.engine.destroy()
        masked.engine.destroy()
    report(*figures)


if __name__ == "__main__":
    main()
