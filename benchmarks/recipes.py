"""What shipped recipes reach: a row for each phase, with its score, its size and speed, and what the training took.

`python benchmarks/recipes.py [NAME ...] [--output OUT] [--seeds N] [--data_dir DIR] [--write]` runs all of `ALL`, or
those that are named, with the model and the data of ../shared, and first those that they start from. Where several
seeds run, scores and speed-ups are means over them, and all else is of the first. Runs that are there are read, and one
that was stopped goes on. `--write` puts the rows into the table of docs/results.md, whose other rows stay.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cut_quality import RECIPES, finished, shorten, start
from figures import ROOT, SHARED, is_quick, milliseconds, run_flags, with_spread
from markers import write_rows

from ds_trainer import train
from ds_trainer.files.messages import markdown
from ds_trainer.files.reading import read_json


@dataclass(frozen=True)
class Run:
    """A recipe, and how it is run: in bf16, by default on one rank."""

    data: str
    recipe: str
    metric: str = "accuracy"
    start: str = ""
    """RUN/PHASE, whose model it starts from in place of the pretrained one."""
    ranks: int = 1
    engine: str = "zero0"
    settings: tuple[str, ...] = ()
    seeds: int = 1

    @property
    def how(self) -> str:
        """What differs from the plain command."""
        parallel = [f"{self.ranks} ranks, {self.engine}"] if self.ranks > 1 else []
        started = [f"from {self.start}"] if self.start else []
        return "; ".join([*parallel, *started, *(f"`--set {setting}`" for setting in self.settings)])


SST2 = "glue/SST-2"
_PRUNED = Run(SST2, "sst2_prune_finetuned", start="sst2_methods/finetune", ranks=2)
_EXITS = Run("glue/RTE", "glue_exits")
_LONGER = ("phases.finetune.num_train_epochs=10", "phases.finetune.learning_rate=5e-5")
ALL = {
    "sst2_methods": Run(SST2, "sst2_methods"),
    "sst2_l0": Run(SST2, "sst2_l0", seeds=3),
    "sst2_structured": Run(SST2, "sst2_structured"),
    "sst2_small": Run(SST2, "sst2_small", start="sst2_methods/finetune", seeds=3),
    "zero2": replace(_PRUNED, engine="zero2"),
    "zero3": replace(_PRUNED, engine="zero3", settings=("phases.0.max_steps=300",), seeds=3),
    "sst2_student": replace(_PRUNED, recipe="sst2_student", engine="zero2"),
    "sst2_prune_distil_exits": Run(SST2, "sst2_prune_distil_exits"),
    "sst2_exits": Run(SST2, "sst2_exits"),
    "cola_exits": replace(_EXITS, data="glue/CoLA", metric="matthews", settings=("task.name=cola",), seeds=3),
    "rte_exits": replace(_EXITS, settings=_LONGER),
    "wnut17_exits": Run(
        "wnut17", "wnut17_exits", "f1", settings=("task.validation_file=emerging.test.annotated",), seeds=3
    ),
    "squad_structured": Run("squad", "squad_structured", "f1"),
    "wikitext_mlm": Run("wikitext-2", "wikitext_mlm", "loss", ranks=2, engine="zero2", seeds=3),
}
"""The runs by the name of their folder, after those that they start from."""
QUICK = ("sst2_methods", "zero2", "sst2_exits")


def main() -> None:
    flags = run_flags("recipes", QUICK if is_quick() else tuple(ALL))
    lines = list[dict[str, str]]()
    for name in flags.names:
        seeds = range(min(flags.seeds, ALL[name].seeds))
        lines += rows(name, ALL[name], [trained(name, flags.output.resolve(), seed, flags.data_dir) for seed in seeds])
    print(markdown(lines))
    if flags.write:
        write_rows(ROOT / "docs/results.md", "recipes", markdown(lines))


def trained(name: str, output: Path, seed: int, data_dir: str) -> dict[str, Any]:
    """Train a seed of a run, unless it is there, and return its results by phase."""
    run, folder = ALL[name], output / f"{name}_{seed}"
    if results := finished(folder):
        return results
    content = read_json(RECIPES / f"{run.recipe}.json", "the recipe") | {"model": start(), "seed": seed}
    content["task"]["data_dir"] = data_dir or str(SHARED / "data" / run.data)
    if run.start:
        before, phase = run.start.split("/")
        trained(before, output, 0, data_dir)
        content["model"] = {"name_or_path": str(output / f"{before}_0" / phase / "model")}
    settings = [word for setting in ("bf16.enabled=true", *run.settings) for word in ("--set", setting)]
    if is_quick():
        shorten(content)
    if run.ranks == 1 or is_quick():
        return train(content, folder, *settings, resume=True)
    recipe = output / f"{name}.json"
    recipe.write_text(json.dumps(content))
    words = ["launch/train.py", "--deepspeed_config", f"ds_configs/{run.engine}.json", "--recipe", str(recipe)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(run.ranks)]
    command = [*launcher, *words, *settings, "--output_dir", str(folder), "--resume"]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return read_json(folder / "all_results.json", "the results")


def rows(name: str, run: Run, results: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the row of each phase, and one more where its samples leave early."""
    for phase, first in results[0].items():
        scores = [of_seed[phase]["eval"] for of_seed in results]
        size, training = first.get("size", {"bytes": 0}), first["train"]
        row = {"run": name, "phase": phase, "score": with_spread([each[run.metric] for each in scores])}
        row |= {"encoder weights": f"{first['weights']['encoder']['kept']:,}", "MiB": f"{size['bytes'] / 2**20:.1f}"}
        latency = ", ".join(milliseconds(of_batch["median_ms"]) for of_batch in first.get("latency", {}).values())
        row |= {"ms, batch 1, 32": latency, "steps": f"{training['steps']:,}"}
        yield row | {"seconds": f"{training['train_seconds']:.0f}", "how": run.how}
        early = f"early_exit/{run.metric}"
        if early in scores[0]:
            layers = with_spread([each["early_exit/mean_layers"] for each in scores])
            row = {"run": name, "phase": f"leaving after {layers} layers"}
            row |= {"score": with_spread([each[early] for each in scores])}
            speeds = [list(speed_ups(of_seed[phase])) for of_seed in results]
            faster = ", ".join(with_spread(list(of_batch), digits=2) for of_batch in zip(*speeds, strict=True))
            yield row | {"ms, batch 1, 32": f"{faster} times as fast"}


def speed_ups(results: dict[str, Any]) -> Iterator[float]:
    """Yield for each batch size how many times as fast a phase's model is where samples leave early."""
    for size, whole in results.get("latency", {}).items():
        yield whole["median_ms"] / results["early_exit_latency"][size]["median_ms"]


if __name__ == "__main__":
    main()
