"""Training on one GPU: examples/s, the share of the measured matmul peak, and how often the host waits for the GPU.

BERT-base, which classifies text, and a decoder of 1.2B weights (Llama 3.2 1B's shape) on causal language modelling,
both of random weights, on examples of exactly 128 and 512 tokens, by ds_configs/bf16.json. Each is trained plain,
masked (topK, weight by weight), distilled (from a model of its own size), with joint exits (BERT alone: exit heads are
of classifiers), and cut to half of its heads and neurons. Each takes turns with the plain one, in steps of the
project's own loop, records included. Then the plain one takes turns with Hugging Face's Trainer, by the same engine
file.

The operations are those of the products of the layers and of a language model's head by `models/costs.py`, three times
for a training step, and once for a teacher. The peak is that of a bf16 product of 8192 x 8192 x 8192, measured here.
Waits are those of a step between two records; the lines of code that wait are printed.

`python benchmarks/gpu.py [bert-128 bert-512 decoder-128 decoder-512]`; `--quick` takes tiny models, on a CPU too.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from against_hf_trainer import compared
from figures import ROOT, Figure, bert_shape, is_quick, ratio, report
from loop_overhead import LOG_EVERY, Loop, plan_of, started
from support.host_waits import host_waits, of

from ds_trainer.cuts.cut import outline_of
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.ranks.joining import silence_transformers
from ds_trainer.ranks.machine import seconds
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.run.phase import PhasePlan

ENGINE_FILE = ROOT / "ds_configs/bf16.json"
EXAMPLES, ROUNDS = (64, 1) if is_quick() else (1024, 6)
WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "bdgklmnprst"]
"""Each is one token of the tokenizer that is trained on them."""
DECODER = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
DECODER |= {"intermediate_size": 8192, "vocab_size": 32000, "head_dim": 64}
if is_quick():
    DECODER = bert_shape(0, 0, 0) | {"num_key_value_heads": 1, "head_dim": 16}
FILES = {"train_file": "train.csv", "validation_file": "train.csv"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": (
        {"model_type": "bert"} | bert_shape(768, layers=12, heads=12) | {"vocab_size": 30522},
        {"name": "text", "text_columns": ["text"], "label_column": "label"} | FILES,
    ),
    "decoder": (
        {"model_type": "llama"} | DECODER,
        {"name": "clm", "line_by_line": True, "train_file": "text.txt", "validation_file": "text.txt"},
    ),
}
"""The config of a model, and its task."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"prune": {"final_threshold": 0.15, "initial_warmup": 0, "mask_init": "uniform", "mask_scale": 0.01}},
    "distilled": {"distill": {"alpha_ce": 0.5, "alpha_distil": 0.5}},
    "exits": {"exits": {"training": "joint"}},
    "cut": {},
}


@dataclass(frozen=True)
class Case:
    kind: str
    tokens: int
    rows: int
    """Of a step."""
    trainer_bar: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}-{self.tokens}"


CASES = [Case("bert", 128, 64, 1.1), Case("bert", 512, 16), Case("decoder", 128, 32), Case("decoder", 512, 8)]
if is_quick():
    CASES = [Case("bert", 16, 4), Case("decoder", 16, 4)]


class Bench:
    """A case in a folder of its own: its text, its model, and the phases that train it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.device = case, folder, distributed.device()
        config, words = KINDS[case.kind]
        self.task = words | {"data_dir": str(folder), "max_seq_length": case.tokens}
        folder.mkdir()
        tokenizer = train_tokenizer(WORDS, 2000, lowercase=True)
        rng = random.Random(0)
        special = tokenizer.num_special_tokens_to_add()
        texts = [" ".join(rng.choices(WORDS, k=case.tokens - special)) for _ in range(EXAMPLES)]
        (folder / "text.txt").write_text("\n".join(texts) + "\n")
        (folder / "train.csv").write_text("text,label\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts)))
        whole = folder / "whole"
        create_folder(config, tokenizer, whole, seed=0)
        task = self.plan("plain").task
        save_folder(task.build_model(whole), tokenizer, whole)  # with a head, as a teacher must have one
        outline_of(task, str(whole), CutSpec(keep=0.5, uniform=True)).save(folder / "half")

    def plan(self, variant: str) -> PhasePlan:
        phase: dict[str, Any] = {"max_steps": 100_000, "train_batch_size": self.case.rows, "learning_rate": 1e-5}
        techniques = TECHNIQUES[variant]
        whole, out = str(self.folder / "whole"), self.folder / variant
        out.mkdir(exist_ok=True)
        if "distill" in techniques:
            techniques = {"distill": techniques["distill"] | {"teacher": whole}}
        phase |= {"logging_steps": LOG_EVERY, "techniques": techniques}
        source = str(self.folder / "half") if variant == "cut" else whole
        return plan_of({"task": self.task, "phases": [phase]}, ENGINE_FILE, out, source)

    def variants(self) -> list[str]:
        return [name for name in TECHNIQUES if name != "plain" and (name != "exits" or self.case.kind == "bert")]


def product_flops(module: Any, tokens: int) -> int:
    """The operations of a forward of one example: the layers' and those of a language model's head."""
    head = module.get_output_embeddings()
    return encoder_flops(module, tokens) + (2 * tokens * head.weight.numel() if head is not None else 0)


def matmul_peak(device: torch.device) -> float:
    """Operations per second of a large bf16 product of random numbers."""
    size, times = (256, 2) if is_quick() else (8192, 20)
    one, two = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(times):
            one @ two

    products()
    return 2 * size**3 * times / min(seconds(products, device) for _ in range(3))


def measured(bench: Bench, peak: float) -> Iterator[Figure]:
    """The variants beside the plain model, with a line of the table for each."""
    case, plain_seconds = bench.case, []
    with started(bench.plan("plain")) as plain:
        flops = product_flops(plain.engine.module, case.tokens)

        def figures(variant: str, loop: Loop, taken: float, operations: float) -> Iterator[Figure]:
            rate = LOG_EVERY * case.rows / taken
            waits = host_waits(loop.between_records, bench.device)
            ours, all_of_them = of("ds_trainer", waits) / LOG_EVERY, waits.total() / LOG_EVERY
            share = rate * operations / peak
            print(f"| {case} | {variant} | {rate:,.1f} | {share:.1%} | {ours:g} | {all_of_them:g} |", flush=True)
            show(waits)
            yield Figure(f"gpu/{case}/{variant}/examples_per_s", rate)
            yield Figure(f"gpu/{case}/{variant}/share_of_matmul_peak", share)
            yield Figure(f"gpu/{case}/{variant}/host_waits_per_step", ours, 0.0)

        for variant in bench.variants():
            with started(bench.plan(variant)) as loop:
                value, taken, of_plain = ratio(loop.steps, plain.steps, rounds=ROUNDS)
                plain_seconds.append(of_plain)
                forward = product_flops(loop.engine.module, case.tokens) if variant == "cut" else flops
                teacher = flops if variant == "distilled" else 0
                yield from figures(variant, loop, taken, 3 * forward + teacher)
                yield Figure(f"gpu/{case}/{variant}/step_over_plain", value)
        yield from figures("plain", plain, statistics.median(plain_seconds), 3 * flops)


def show(waits: Counter[str]) -> None:
    for place, count in waits.most_common(8):
        print(f"    {count / LOG_EVERY:g} waits a step: {place}", file=sys.stderr)


def against_trainer(bench: Bench) -> Iterator[Figure]:
    """Nothing but a line where Trainer cannot run for want of a package."""
    try:
        value = compared("random", bench.plan("plain"), ENGINE_FILE)
    except ImportError as error:
        print(f"{bench.case}: no comparison with Trainer: {str(error).strip().splitlines()[0]}")
        return
    yield Figure(f"gpu/{bench.case}/against_hf_trainer", value, bench.case.trainer_bar, at_least=True)


def main(*names: str) -> None:
    if not torch.cuda.is_available() and not is_quick():
        sys.exit("torch sees no GPU here: run it where torch.cuda.is_available(), or give --quick for tiny models")
    unknown = set(names) - {str(case) for case in CASES}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no case of this name: {', '.join(map(str, CASES))}")
    silence_transformers()
    distributed.start()
    peak = matmul_peak(distributed.device())
    figures = [Figure("gpu/matmul_peak_tflops", peak / 1e12)]
    print("| case | trained | examples/s | of the peak | our waits a step | all waits |\n|---|---|---|---|---|---|")
    parts: tuple[Callable[[Bench], Iterator[Figure]], ...] = (partial(measured, peak=peak), against_trainer)
    for case in CASES:
        if names and str(case) not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(case, Path(folder) / str(case))
            figures += [figure for part in parts for figure in part(bench)]
    report(*figures)


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
