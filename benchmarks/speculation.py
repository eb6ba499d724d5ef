"""Greedy generation that drafts with the model's own first layers, after LayerSkip's training and after a plain one.

`python benchmarks/speculation.py [STEPS]`. A Llama of 16 layers x 192 is trained twice from scratch on wikitext-2, for
the same steps from the same weights: plainly, and with layer dropout and early-exit losses. Exit layer and number of
drafted tokens are chosen on prompts apart, for each model its fastest. Then each goes on from 200 prompts of the
held-out text, without and with `assistant_early_exit`, interleaved, in fp32 with 2 threads: the text must be the same,
and with LayerSkip it must come faster. Printed beside: the perplexity of every exit, and what the training costs.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Figure, is_quick, ratio, report, use_threads

from ds_trainer.cli.api import load_model, train
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks import distributed

ROOT = Path(__file__).resolve().parents[1]
WIKITEXT = ROOT.parent / "shared/data/wikitext-2"
PLUGIN = str(ROOT / "examples/layer_skip.py")
LAYERS, WIDTH, VOCABULARY = (4, 32, 128) if is_quick() else (16, 192, 4096)
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = (2, 4, 6) if is_quick() else (200, 32, 48)
CHOSEN_ON, ROUNDS = (1, 1) if is_quick() else (10, 10)
EXITS, DRAFTS = ([2], [3]) if is_quick() else ([2, 3, 4, 6, 8], [3, 5, 8])
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer_skip": {
        "techniques": {"layer_skip": {"layer_dropout": 0.1, "dropout_schedule": "exponential"}},
        "loss": {"task": 1.0, "layer_skip.exits": 1.0},
    },
}


def recipe_of(data: Path, steps: int) -> dict[str, Any]:
    config = {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": WIDTH // 16, "max_position_embeddings": 256, "tie_word_embeddings": True}
    phase = {"start_from": "@model", "max_steps": steps, "train_batch_size": 16, "learning_rate": 1e-3}
    phase |= {"warmup_steps": 0.1, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    return {
        "model": {"config": config, "tokenizer": {"vocab_size": VOCABULARY}},
        "task": {"name": "clm", "data_dir": str(data), "train_file": "valid.txt", "validation_file": "test.txt"}
        | {"max_seq_length": 64, "max_eval_samples": 400},
        "phases": [{"name": name, **phase, **fields} for name, fields in METHODS.items()],
        "report": False,
        "tensorboard": False,
    }


def prompts_of(data: Path, tokenizer: Any) -> list[torch.Tensor]:
    """The first tokens of long enough paragraphs of the held-out text, evenly spaced; without the end token."""
    lines = [line for line in (data / "test.txt").read_text().splitlines() if len(line.split()) >= PROMPT_TOKENS]
    wanted = PROMPTS + CHOSEN_ON
    spaced = [lines[index * len(lines) // wanted] for index in range(wanted)]
    return [tokenizer(line, return_tensors="pt").input_ids[:, :PROMPT_TOKENS] for line in spaced]


class Generation:
    """At every call, greedy continuations of the next part of the prompts, drafted by the first `exit_layer` layers."""

    def __init__(self, model: Any, parts: list[list[torch.Tensor]], exit_layer: int = 0, drafts: int = 0) -> None:
        self.model, self.parts, self.exit_layer, self.drafts = model, iter(parts), exit_layer, drafts
        self.texts: list[list[int]] = []
        self.calls = {"first": 0, "last": 0}
        """How often the first and the last layer were run: for every drafted token, and for every verification."""

    def __call__(self) -> None:
        settings, layers = self.model.generation_config, self.model.model.layers
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = self.drafts or None, "constant"
        wanted = {"do_sample": False, "min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
        if self.exit_layer:
            wanted["assistant_early_exit"] = self.exit_layer
        hooks = [
            layers[index].register_forward_hook(self.counter(name)) for name, index in (("first", 0), ("last", -1))
        ]
        for ids in next(self.parts):
            self.texts.append(self.model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)[0].tolist())
        for hook in hooks:
            hook.remove()

    def counter(self, name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self.calls[name] += 1

        return count

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that all layers agree with; each verification gives one of its own."""
        kept = len(self.texts) * NEW_TOKENS - self.calls["last"]
        return kept / max(1, self.calls["first"] - self.calls["last"])


def fastest(model: Any, prompts: list[torch.Tensor]) -> tuple[int, int]:
    """The exit layer and the number of drafted tokens with which these prompts take least time."""
    seconds = {}
    for setting in itertools.product(EXITS, DRAFTS):
        generation, start = Generation(model, [prompts], *setting), time.perf_counter()
        generation()
        seconds[setting] = time.perf_counter() - start
        print(
            f"  exit {setting[0]}, {setting[1]} drafted, {generation.acceptance:.2f} kept: {seconds[setting]:.2f} s",
            flush=True,
        )
    return min(seconds, key=seconds.__getitem__)


def figures_of(name: str, folder: Path, prompts: list[torch.Tensor]) -> list[Figure]:
    model: Any = load_model(folder)
    print_curve(name, model, prompts)
    settings, size = fastest(model, prompts[PROMPTS:]), PROMPTS // ROUNDS
    parts = [prompts[begin : begin + size] for begin in range(0, PROMPTS, size)]
    whole, drafted = Generation(model, parts), Generation(model, parts, *settings)
    speed, *seconds = ratio(whole, drafted, rounds=ROUNDS, warmup=0)
    same = sum(one == other for one, other in zip(whole.texts, drafted.texts, strict=True))
    rates = [size * NEW_TOKENS / taken for taken in seconds]
    print(f"{name}: exit {settings[0]}, {settings[1]} drafted: {rates[0]:.1f} and {rates[1]:.1f} tokens/s")
    print(f"{name}: {drafted.texts[0]}", flush=True)
    return [
        Figure(f"speculation/{name}/same_texts", same, PROMPTS, at_least=True),
        Figure(f"speculation/{name}/speed_up", speed, 1.0 if name == "layer_skip" else None, at_least=True),
        Figure(f"speculation/{name}/acceptance", drafted.acceptance),
    ]


@torch.inference_mode()
def print_curve(name: str, model: Any, prompts: list[torch.Tensor]) -> None:
    """The perplexity of the prompts by the first layers alone, up to all of them."""
    curve = {}
    for layers in [*EXITS, LAYERS]:
        model.config.num_hidden_layers = layers
        losses = [float(model(ids, labels=ids, use_cache=False).loss) for ids in prompts]
        curve[layers] = round(math.exp(sum(losses) / len(losses)), 1)
    print(f"{name}: perplexity by layers {curve}", flush=True)


def some_text(folder: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=3)) for _ in range(40)]
    for file in ("valid.txt", "test.txt"):
        (folder / file).write_text("\n".join(" ".join(draw.choices(words, k=14)) for _ in range(60)) + "\n")
    return folder


def main(steps: str = "300") -> None:
    use_threads(2)
    distributed.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = some_text(folder) if is_quick() else WIKITEXT
        recipe = recipe_of(data, 2 if is_quick() else int(steps))
        results = train(recipe, folder / "out", "--cache_dir", str(folder / "cache"), plugins=[PLUGIN])
        models = {"plain": folder / "out/plain/model", "layer_skip": folder / "out/model"}
        prompts = prompts_of(data, load_tokenizer(models["plain"]))
        figures = [figure for method in METHODS for figure in figures_of(method, models[method], prompts)]
        plain, skip = (results[method]["train"]["train_seconds"] for method in METHODS)
        perplexities = [results[method]["eval"]["perplexity"] for method in METHODS]
    report(
        *figures,
        Figure("speculation/training_seconds", skip / plain),
        Figure("speculation/perplexity", perplexities[1] / perplexities[0]),
    )


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
