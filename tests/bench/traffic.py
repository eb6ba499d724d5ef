"""What collectives carry: by arithmetic over DeepSpeed's communication log on 2 and 4 ranks, and the tables of a plan.

`python tests/bench/traffic.py` takes the cases of `tests/support/traffic_worker.py` on 2 and on 4 ranks and prints, for
each, the bytes by arithmetic, by the log and by torch's dispatcher. Its figure is the largest difference between the
first two. `--tables` prints the tables of `docs/scaling.md`, and `--write FILE` puts them between its two markers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import ROOT, Figure, is_quick, report
from support.forked_ranks import OwnForks
from tools.markers import write_between
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config, LlamaConfig

from ds_trainer.config.recipe import parse_recipe
from ds_trainer.engine.engine_file import read_engine_file, resolve_engine_file
from ds_trainer.engine.optim import Hyperparameters, parameter_groups
from ds_trainer.engine.rank_memory import ModelSizes, rank_memory
from ds_trainer.engine.rank_traffic import on_the_wire, rank_traffic
from ds_trainer.models.layers import encoder_linears
from ds_trainer.tasks.data import BatchPlan, shard

WORLDS, GIB = (1, 8, 64, 512), 2**30
TOKENS, FLOPS, LINKS = 8192, 0.4 * 989e12, {"200 Gb/s": 25e9, "400 Gb/s": 50e9}
"""Assumed of a rank: its tokens a step, its operations per second, and the bytes per second of its link."""
MODELS: dict[str, tuple[Any, Any]] = {
    "BERT-large": (
        AutoModelForMaskedLM,
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    ),
    "GPT-2 XL": (AutoModelForCausalLM, GPT2Config(n_embd=1600, n_layer=48, n_head=25)),
    "Llama 7B": (AutoModelForCausalLM, LlamaConfig()),
}
METHODS = ("plain", "pruned", "distilled", "distilled, partitioned teacher")


@dataclass(frozen=True)
class Model:
    """A model that is trained whole, and what its encoder's linear layers have in weights."""

    sizes: ModelSizes
    linears: tuple[int, ...]
    hidden: int

    @classmethod
    def of(cls, name: str) -> Model:
        kind, config = MODELS[name]
        with torch.device("meta"):
            model = kind.from_config(config)
        sizes = ModelSizes.of(model, parameter_groups(model, [], [], Hyperparameters(1e-4)))
        return cls(sizes, tuple(one.weight.numel() for one in encoder_linears(model).values()), config.hidden_size)

    def under(self, method: str) -> ModelSizes:
        """The sizes with a score for each weight, where it is pruned by movement."""
        if method != "pruned":
            return self.sizes
        each = self.sizes.each + self.linears
        return replace(self.sizes, trained=sum(each), each=each)

    def config(self, stage: int, world: int) -> dict[str, Any]:
        """The shipped engine file of a stage, as a phase in bf16 resolves it."""
        phase = parse_recipe({"phases": [{"max_steps": 1, "bf16": True}]}).phases[0]
        file = read_engine_file(ROOT / f"ds_configs/zero{stage}.json")
        return resolve_engine_file(file, phase, world, hidden_size=self.hidden, total_steps=1, warmup_steps=0)

    def held(self, method: str, stage: int, world: int) -> int:
        """The bytes of a rank without activations. The teacher is as large as the student, in bf16."""
        teacher = 2 * sum(self.sizes.each) if method.startswith("distilled") else 0
        shared = world if method.endswith("partitioned teacher") else 1
        return rank_memory(self.under(method), self.config(stage, world), world).peak(0) + teacher // shared

    def sent(self, method: str, stage: int, world: int) -> int:
        """The bytes that a rank sends in a step of one micro-batch."""
        teacher = 2 * sum(self.sizes.each) if method.endswith("partitioned teacher") else 0
        return on_the_wire(rank_traffic(self.under(method), self.config(stage, world), world, teacher), world)

    def seconds(self, method: str) -> float:
        """What a rank computes for: 6 operations a weight and token, and 2 for a teacher's."""
        return (8 if method.startswith("distilled") else 6) * sum(self.sizes.each) * TOKENS / FLOPS


def tables() -> str:
    models = {name: Model.of(name) for name in MODELS}
    lines = ["GiB that a rank holds, without activations:", ""]
    lines += [f"| model | method | ZeRO | 1 rank | {' | '.join(f'{world} ranks' for world in WORLDS[1:])} |"]
    lines += ["|---" * (3 + len(WORLDS)) + "|"]
    for name, model in models.items():
        for method in METHODS:
            for stage in range(4):
                cells = [f"{model.held(method, stage, world) / GIB:,.1f}" for world in WORLDS]
                lines.append(f"| {name} | {method} | {stage} | {' | '.join(cells)} |")
    heads = [*(f"{world} ranks" for world in WORLDS[1:]), "computing", *(f"512 ranks at {link}" for link in LINKS)]
    lines += [
        "",
        "GiB that a rank sends in a step, and seconds:",
        "",
        f"| model | method | ZeRO | {' | '.join(heads)} |",
    ]
    lines.append("|---" * (3 + len(heads)) + "|")
    for name, model in models.items():
        for method in METHODS:
            for stage, shown in ((0, "0"), (1, "1, 2"), (3, "3")):
                sent = [model.sent(method, stage, world) for world in WORLDS[1:]]
                times = [model.seconds(method), *(sent[-1] / speed for speed in LINKS.values())]
                cells = [f"{size / GIB:,.2f}" for size in sent] + [f"{time:.2f}" for time in times]
                lines.append(f"| {name} | {method} | {shown} | {' | '.join(cells)} |")
    lines += ["", "The padded tokens of the rank with most over the mean of all ranks:", ""]
    lines += ["| ranks | mean of 16 steps | worst step |", "|---|---|---|"]
    for world in WORLDS[1:]:
        ratios = imbalance(world)
        lines.append(f"| {world} | {np.mean(ratios):.2f} | {max(ratios):.2f} |")
    return "\n".join(lines) + "\n"


def imbalance(world: int, rows: int = 8) -> list[float]:
    """How much more the rank with the longest batch has than the mean, in steps of so many examples a rank."""
    lengths = np.clip(np.random.default_rng(0).lognormal(2.4, 0.6, 200_000), 3, 128).astype(np.int64)
    plan, ratios = BatchPlan(lengths, world * rows, seed=0), []
    for step in range(16):
        ids = plan.indices(step)
        widest = [lengths[shard(ids, lengths, rank, world, 1)].max() for rank in range(world)]
        ratios.append(float(max(widest) / np.mean(widest)))
    return ratios


def measured(ranks: int, out: Path) -> dict[str, Any]:
    quick = ["--quick"] if is_quick() else []
    with OwnForks() as forks:
        done = forks.run_script(ranks, ["tests/support/traffic_worker.py", *quick, str(out)], timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def main() -> None:
    if "--tables" in sys.argv:
        print(tables(), end="")
    elif "--write" in sys.argv:
        write_between(Path(sys.argv[sys.argv.index("--write") + 1]), "traffic", tables())
    else:
        worst = 0.0
        for ranks in (2,) if is_quick() else (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                results = measured(ranks, Path(folder, "out.json"))
            print(f"\n| {ranks} ranks | arithmetic | log | calls | dispatched | waits |\n|---|---|---|---|---|---|")
            for name, case in results.items():
                cells = (case[key] for key in ("foretold", "log", "calls", "dispatched", "waits"))
                print(f"| {name} | {' | '.join(map(str, cells))} |")
                errors = [abs(size / case["log"][operation] - 1) for operation, size in case["foretold"].items()]
                worst = max(worst, *errors) if case["exact"] else worst
        report(Figure("traffic_error", worst, 0.05))


if __name__ == "__main__":
    main()
