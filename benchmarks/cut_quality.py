"""What a cut costs in score, over seeds: at once, and after its training.

`python benchmarks/cut_quality.py [NAME ...] [--output OUT] [--seeds N] [--data_dir DIR] [--write]` takes sst2, squad,
cola, rte and wnut17, or those that are named, and runs the recipe of its cuts in bf16, for each seed. It prints a table
of scores, means over the seeds, with the mean seconds of the cut and of training, and each bar as a figure. Runs that
are there are read, and one that was stopped goes on. Bars are points lost against the dense model, or scores. `--write`
puts the rows into the table of docs/results.md, whose other rows stay.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from figures import ROOT, SHARED, Figure, bert_shape, is_quick, report, run_flags, with_spread
from markers import write_rows

from ds_trainer import train
from ds_trainer.files.messages import markdown
from ds_trainer.files.reading import read_json
from ds_trainer.files.run_folder import STATUS

RECIPES = ROOT / "ds_configs" / "recipes"


@dataclass(frozen=True)
class Bar:
    """A bar of a phase's score in points: `one_shot` is the cut before any training."""

    phase: str
    lost: float | None = None
    """The most points that may be lost against the dense model; or else `score` is the least score."""
    score: float | None = None
    one_shot: bool = False


@dataclass(frozen=True)
class Comparison:
    """A task, the recipe of its cuts, and its bars."""

    recipe: str
    metric: str
    data: str
    bars: tuple[Bar, ...] = ()
    task: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    points: float = 100.0
    """The points of a metric's 1: SQuAD's are points already."""


COMPARISONS = {
    "sst2": Comparison(
        "sst2_cut",
        "accuracy",
        "glue/SST-2",
        (
            Bar("half", lost=1.5, one_shot=True),
            Bar("quarter", lost=4.0, one_shot=True),
            Bar("quarter", lost=1.0),
            Bar("eighth", lost=2.5),
            Bar("sparse", score=87.0),
        ),
    ),
    "squad": Comparison(
        "squad_cut",
        "f1",
        "squad",
        (
            Bar("half", score=54.0, one_shot=True),
            Bar("half", score=59.0),
            Bar("quarter", score=57.0),
            Bar("sparse", score=50.0),
        ),
        seeds=1,
        points=1.0,
    ),
    "cola": Comparison("glue_cut", "matthews", "glue/CoLA", bars=(Bar("half", lost=3.0),), task={"name": "cola"}),
    "rte": Comparison("glue_cut", "accuracy", "glue/RTE", bars=(Bar("half", lost=3.0),), task={"name": "rte"}),
    "wnut17": Comparison("wnut17_cut", "f1", "wnut17", task={"validation_file": "emerging.test.annotated"}),
}
"""The bars of CoLA and RTE are one standard error of their validation sets, of 1,043 and 277 examples."""


LABELS = {
    "finetune": "dense",
    "half": "half of the heads and neurons",
    "quarter": "a quarter",
    "eighth": "an eighth",
    "sparse": "15% of the weights, one by one",
    "small": "the quarter with fewer tokens",
}
"""What the table calls the phases."""


def main() -> None:
    flags = run_flags("cut_quality", ["sst2"] if is_quick() else list(COMPARISONS))
    lines, figures = list[dict[str, str]](), list[Figure]()
    for name in flags.names:
        comparison = comparison_of(name, flags.data_dir)
        seeds = range(min(flags.seeds, comparison.seeds))
        results = [trained(comparison, flags.output / name, seed) for seed in seeds]
        lines += rows(name, comparison, results)
        figures += [judged(bar, scores_of(comparison, results), name) for bar in comparison.bars]
    print(markdown(lines))
    if flags.write:
        write_rows(ROOT / "docs/results.md", "cuts", markdown(lines))
    report(*figures)


def scores_of(comparison: Comparison, results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the scores of all seeds by phase, in points, and as "PHASE, one shot" those before any training."""
    scores: dict[str, list[float]] = {}
    for phase in results[0]:
        of_phase = {phase: [of_seed[phase]["eval"] for of_seed in results]}
        if "cut" in results[0][phase]:
            of_phase[f"{phase}, one shot"] = [of_seed[phase]["cut"]["scores"] for of_seed in results]
        for name, evals in of_phase.items():
            scores[name] = [comparison.points * each[comparison.metric] for each in evals]
    return scores


def rows(name: str, comparison: Comparison, results: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the row of each phase."""
    points = scores_of(comparison, results)
    scores = {key: with_spread([each / comparison.points for each in of_seeds]) for key, of_seeds in points.items()}
    for phase in results[0]:
        took = [of_seed[phase]["train"]["train_seconds"] for of_seed in results]
        row = {"data": f"{name}, {comparison.metric}", "model": LABELS.get(phase, phase)}
        row |= {"after the cut, untrained": scores.get(f"{phase}, one shot", "")}
        row |= {"trained on": scores[phase] if any(took) else "", "seconds": f"{statistics.mean(took):.0f}"}
        if "cut" in results[0][phase]:
            cut = statistics.mean(of_seed[phase]["cut"]["seconds"] for of_seed in results)
            row["seconds"] = f"{cut:.0f} + {row['seconds']}"
        yield row


def comparison_of(name: str, data_dir: str = "") -> Comparison:
    """Return a comparison with its data."""
    comparison = COMPARISONS[name]
    data = data_dir or str(SHARED / "data" / comparison.data)
    return replace(comparison, task=comparison.task | {"data_dir": data})


def trained(comparison: Comparison, folder: Path, seed: int) -> dict[str, Any]:
    """Run the recipe of the cuts from the pretrained model, or go on with it, and return its results by phase."""
    return run(recipe_of(comparison, seed), cuts_folder(folder, seed))


def recipe_of(comparison: Comparison, seed: int) -> dict[str, Any]:
    """Return the recipe of the cuts, which starts from the pretrained model."""
    content = read_json(RECIPES / f"{comparison.recipe}.json", "the recipe")
    content |= {"model": start(), "seed": seed}
    content["task"] |= comparison.task
    if is_quick():
        shorten(content)
    return content


def run(content: dict[str, Any], output: Path) -> dict[str, Any]:
    """Train a recipe in bf16, or go on with it, and return its results by phase."""
    return finished(output) or train(content, output, "--set", "bf16.enabled=true", resume=True)


def start() -> dict[str, Any]:
    """Return the pretrained model as a recipe's section; a new and tiny one where the run is quick."""
    if is_quick():
        config = {"model_type": "bert", **bert_shape(384, layers=6, heads=12)}
        return {"config": config, "tokenizer": {"vocab_size": 256}}
    return {"name_or_path": str(SHARED / "models" / "minilm-l6")}


def cuts_folder(folder: Path, seed: int) -> Path:
    """Return the output folder of a seed's cuts; a phase's model lies in PHASE/model below it."""
    return (folder / f"cuts_{seed}").resolve()


def finished(output: Path) -> dict[str, Any] | None:
    """Return the results of a run that is done; resumed, it would measure its models again, beside what runs now."""
    status = output / STATUS
    if status.is_file() and read_json(status, "the status")["state"] == "finished":
        return read_json(output / "all_results.json", "the results")
    return None


def shorten(content: dict[str, Any]) -> None:
    """Leave one step of each phase, and no report."""
    content["report"] = content["tensorboard"] = False
    for phase in content["phases"]:
        if phase.get("num_train_epochs") != 0:
            phase |= {"max_steps": 1, "train_batch_size": 4, "warmup_steps": 0}
        if "cut" in phase:
            phase["cut"] |= {"calibration_examples": 16, "reconstruct": {"tokens": 256, "steps": 1}}
        if "vocabulary" in phase.get("cut", {}):
            phase["cut"]["vocabulary"] = {"keep": 30}
        if "prune" in phase.get("techniques", {}):
            phase["techniques"]["prune"] |= {"initial_warmup": 0, "final_warmup": 0}


def judged(bar: Bar, scores: dict[str, list[float]], name: str) -> Figure:
    """Compare the mean over seeds with a bar."""
    score = statistics.mean(scores[f"{bar.phase}, one shot" if bar.one_shot else bar.phase])
    label = f"cut_quality/{name}/{bar.phase}{'/one_shot' if bar.one_shot else ''}"
    if bar.score is not None:
        return Figure(label, score, bar.score, at_least=True)
    assert bar.lost is not None
    return Figure(f"{label}/points_lost", statistics.mean(scores["finetune"]) - score, bar.lost)


if __name__ == "__main__":
    main()
