"""Cuts by this library beside those of other pruners: the same dense model, the same examples, the same size.

`python benchmarks/against_pruners.py [NAME ...] [--output OUT] [--seeds N] [--data_dir DIR] [--write]` takes sst2,
squad and wnut17, or those that are named. For each seed it fine-tunes the dense model, cuts it to a half and a quarter
of the weights in heads and neurons by each method, and trains each of these models for a quarter of an epoch with the
dense one as the teacher, as the recipe of the library's own cuts does. All methods get the same calibration examples.
Each cuts in a process of its own, whose CPU seconds and peak memory are reported; TextPruner and Torch-Pruning are
installed from the package registry into environments below OUT, which borrow torch from this one. The models of a seed
are timed together, call by call. What is done stays in OUT, and is not done again; to measure a method again, delete
its folders, OUT/NAME/SEED/SIZE/METHOD. `--write` puts the rows into the table of docs/results.md.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from cut_quality import Comparison, comparison_of, recipe_of, run
from figures import ROOT, Figure, is_quick, milliseconds, report, run_flags, with_spread
from markers import write_rows
from torch import Tensor

from ds_trainer.cuts.calibration import drawn
from ds_trainer.deploy.measuring import BATCH_SIZES, CASE, FOR_P95, load_measured, measured_in
from ds_trainer.files.messages import markdown
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import FIELD, build_like, count_weights, encoder_layers
from ds_trainer.models.pretrained import dtype_of
from ds_trainer.models.shrink import head_width, simplest_config
from ds_trainer.recipe.jobs import OF_THE_TASK
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.tasks.evaluation import Evaluation, score_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.squad.squad_windows import SpanPositions
from ds_trainer.tasks.task import Batch, Task

WORKERS = ROOT / "benchmarks" / "pruners"
SHARES = {"quarter": 0.25} if is_quick() else {"half": 0.5, "quarter": 0.25}
EXAMPLES = 16 if is_quick() else 512
TIME_LIMIT = 0.2 if is_quick() else 600.0
"""Seconds in which the models of a seed are timed, for each size of a batch."""


@dataclass(frozen=True)
class Method:
    """A module of `pruners/`, for this library the spec of the cut, and what each call of pip has to install."""

    module: str
    spec: dict[str, Any] = field(default_factory=dict)
    packages: tuple[tuple[str, ...], ...] = ()


OURS, MAGNITUDE = "this library", {"method": "magnitude", "uniform": True, "update_weights": False}
TEXTPRUNER = (("transformers==4.46.3",), ("--no-deps", "textpruner==1.1.post2"))
RIVALS = {
    "Kwon et al.": Method("by_kwon"),
    "TextPruner 1.1.post2": Method("by_textpruner", packages=TEXTPRUNER),
    "Torch-Pruning 1.6.1": Method("by_torch_pruning", packages=(("--no-deps", "torch-pruning==1.6.1"),)),
    "magnitude": Method("by_library", MAGNITUDE | {"reconstruct": False}),
}
METHODS = {
    OURS: Method("by_library", {"reconstruct": "same examples"}),
    f"{OURS} without reconstruction": Method("by_library", {"reconstruct": False}),
    f"{OURS} as it comes": Method("by_library"),
    **RIVALS,
}
if is_quick():  # without the network
    METHODS = {name: METHODS[name] for name in (OURS, "Kwon et al.")}
COLUMNS = ["weights", "score", "agrees", "score, trained on", "agrees, trained on", "ms 1", "ms 32"]
COLUMNS += ["CPU s", "peak MiB"]
Results = dict[str, dict[str, Any]]
"""What was measured, by the columns of the table, of each model: "dense", "half, magnitude" and so on."""


def main() -> None:
    flags = run_flags("against_pruners", ["sst2"] if is_quick() else ["sst2", "squad", "wnut17"])
    lines, figures = list[dict[str, str]](), list[Figure]()
    for name in flags.names:
        comparison, folder = comparison_of(name, flags.data_dir), flags.output.resolve() / name
        seeds = [Seed(comparison, folder / str(seed), seed).results() for seed in range(flags.seeds)]
        lines += rows(f"{name}, {comparison.metric}", seeds)
        figures += [figure for size in SHARES for figure in beside_the_best(name, size, seeds)]
    print(markdown(lines))
    if flags.write:
        write_rows(ROOT / "docs/results.md", "pruners", markdown(lines))
    report(*figures)


@dataclass(frozen=True)
class Seed:
    """A task and a seed: the dense model, and all that is made of it in a folder."""

    comparison: Comparison
    folder: Path
    seed: int

    def results(self) -> Results:
        """Cut, train, score and time what is not done yet. A method that fails has its `error` alone."""
        names = {f"{size}, {label}": (size, label) for size in SHARES for label in METHODS}
        cuts = {name: self.cut(*each) for name, each in names.items()}
        ran = [name for name, result in cuts.items() if "error" not in result]
        timed = {"dense": self.dense} | {name: self.folder_of(*names[name]) / "cut" for name in ran}
        times = kept(self.folder / f"times_of_{len(timed)}.json", lambda: self.times(timed))
        trained = {name: self.trained(*names[name]) for name in ran}
        results = {"dense": self.scores(self.dense)} | cuts
        return {name: each | trained.get(name, {}) | times.get(name, {}) for name, each in results.items()}

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return recipe_of(self.comparison, self.seed) | {"report": False, "tensorboard": False}

    @cached_property
    def dense(self) -> Path:
        """The folder of the dense model, which the first phase of the recipe trains."""
        run(self.recipe | {"phases": self.recipe["phases"][:1]}, self.folder / "dense")
        return self.folder / "dense" / "model"

    @cached_property
    def task(self) -> Task:
        return build_task(parse_task(self.recipe["task"]), self.dense)

    @cached_property
    def dense_evaluation(self) -> Evaluation:
        return score_folder(self.task, self.dense, 32)

    @cached_property
    def batches(self) -> Path:
        """The file of the calibration batches, with labels as the models of transformers take them."""
        examples, file = self.task.examples("train"), self.folder / "batches.pt"
        batches = [self.task.collate(examples, ids) for ids in drawn(self.task, EXAMPLES, self.seed, batch=32)[0]]
        torch.save([batch.inputs | labels_of(batch) for batch in batches], file)
        return file

    def folder_of(self, size: str, label: str) -> Path:
        return self.folder / size / label.replace(" ", "_")

    def scores(self, model: Path) -> dict[str, Any]:
        """Return a model's score, how often it agrees with the dense one, and the number of the encoder's weights."""
        dense, split = self.dense_evaluation, self.task.splits[0]
        measured = dense if model == self.dense else score_folder(self.task, model, 32)
        agrees = float(self.task.agreement(split, dense.answers[split], measured.answers[split]))
        weights = count_weights(self.task.build_model(model))["encoder"]["total"]
        return {"score": measured.scores[self.comparison.metric], "agrees": agrees, "weights": weights}

    def cut(self, size: str, label: str) -> dict[str, Any]:
        """Return the scores and the costs of a cut, or the `error` of its process."""
        folder, method = self.folder_of(size, label), METHODS[label]

        def make() -> dict[str, Any]:
            print(f"{folder}: cutting", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            request = {"dense": str(self.dense), "batches": str(self.batches), "share": SHARES[size]}
            request |= {"spec": method.spec | {"calibration_examples": EXAMPLES}, "task": self.recipe["task"]}
            write_json(folder / "request.json", request | {"seed": self.seed, "out": str(folder)})
            call_worker(method, folder / "request.json", self.folder.parents[1])
            save_cut(self.task, self.dense, torch.load(folder / "weights.pt"), folder / "cut")
            return self.scores(folder / "cut") | json.loads((folder / "costs.json").read_text())

        try:
            return kept(folder / "cut.json", make)
        except subprocess.CalledProcessError as error:  # it is not kept, and tried again by the next call
            return {"error": str(error.stderr or error).strip().splitlines()[-1][:200]}

    def trained(self, size: str, label: str) -> dict[str, Any]:
        """Train a cut model for a quarter of an epoch, as the recipe trains its own cut of this size."""
        folder = self.folder_of(size, label)

        def make() -> dict[str, Any]:
            (phase,) = (each for each in self.recipe["phases"] if each["name"] == size)
            distill = phase["techniques"]["distill"] | {"teacher": str(self.dense)}
            phase = phase | {"cut": None, "start_from": str(folder / "cut"), "num_train_epochs": 0.25}
            run(self.recipe | {"phases": [phase | {"techniques": {"distill": distill}}]}, folder / "run")
            scores = self.scores(folder / "run" / "model")
            shutil.rmtree(folder / "run")  # the models of all tasks and seeds would take many GB
            return {f"{name}, trained on": value for name, value in scores.items()}

        return kept(folder / "trained.json", make)

    def times(self, folders: dict[str, Path]) -> Results:
        """Return the median milliseconds of each model, as "ms 1" and "ms 32", by the task's texts, in turns."""
        models = {name: load_measured(folder, self.task) for name, folder in folders.items()}
        times: Results = {name: {} for name in folders}
        for batch in BATCH_SIZES:
            case = dict(zip(CASE, ("torch", "cpu", "fp32", torch.get_num_threads(), OF_THE_TASK, batch), strict=True))
            for name, numbers in measured_in(models, case, TIME_LIMIT, FOR_P95)["folders"].items():
                times[name][f"ms {batch}"] = numbers["median_ms"]
        return times


def kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what an earlier call has kept in a file; or else make it, and keep it."""
    if not file.is_file():
        write_json(file, make())
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def labels_of(batch: Batch) -> dict[str, Tensor]:
    """Return the labels of a batch of texts, of questions with the positions of their answers, or of tagged words."""
    if "head_positions" in batch.others:
        labels = torch.full_like(batch.inputs["input_ids"], -100)
        labels.view(-1)[batch.others["head_positions"]] = batch.labels[:, 0]
        return {"labels": labels}
    if batch.labels.ndim == 1:
        return {"labels": batch.labels}
    positions = SpanPositions(*batch.labels.unbind(1))
    return {"start_positions": positions.start, "end_positions": positions.end}


def call_worker(method: Method, request: Path, output: Path) -> None:
    """Run a method on a request in its environment; in this process where the run is quick."""
    if is_quick():
        sys.path.insert(0, str(WORKERS))
        importlib.import_module("worker").main(method.module, str(request))
        return
    python, path = sys.executable, str(ROOT)
    if method.packages:
        python, path = environment(output / "environments" / method.module, method.packages), ""
    call([python, str(WORKERS / "worker.py"), method.module, str(request)], PYTHONPATH=path)


def environment(folder: Path, packages: tuple[tuple[str, ...], ...]) -> str:
    """Return the Python of a virtual environment, made unless it is there; what it lacks is taken from this one."""
    python, made = str(folder / "bin" / "python"), folder / "made"
    if not made.is_file():
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
        for words in packages:
            call([python, "-m", "pip", "install", "--quiet", *words])
        (site,) = folder.glob("lib/*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # its own packages are found first
        made.touch()
    return python


def call(words: list[str], **variables: str) -> None:
    subprocess.run(words, env=os.environ | variables, check=True, text=True, stdout=sys.stderr, stderr=subprocess.PIPE)


def save_cut(task: Task, dense: Path, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the folder of a smaller model, whose sizes are those of its weights, in the precision of the dense one."""
    model: Any = task.build_model(dense)
    heads = [weights[f"{name}.attention.output.dense.weight"].shape[1] for name in encoder_layers(model)]
    neurons = [weights[f"{name}.output.dense.weight"].shape[1] for name in encoder_layers(model)]
    config = copy.deepcopy(model.config)
    setattr(config, FIELD, {"heads": [inputs // head_width(config) for inputs in heads], "neurons": neurons})
    small = build_like(model, simplest_config(model, config))
    small.load_state_dict({name: weights[name] for name in small.state_dict()})
    save_folder(small.to(dtype_of(dense)), task.tokenizer, folder)


def rows(name: str, seeds: list[Results]) -> Iterator[dict[str, str]]:
    """Yield the row of each model, with means over the seeds."""
    for model in seeds[0]:
        row, results = {"data": name, "model": model}, [of_seed[model] for of_seed in seeds]
        for column in COLUMNS:
            values = [result[column] for result in results if column in result]
            row[column] = shown(column, values) if values else ""
        errors = [result["error"] for result in results if "error" in result]
        yield row | ({"score": f"it ends with {errors[0]}"} if errors else {})


def shown(column: str, values: list[float]) -> str:
    if column.startswith(("score", "agrees")):
        return with_spread(values)
    mean = statistics.mean(values)
    return f"{mean / 1e6:.2f}M" if column == "weights" else milliseconds(mean)


def beside_the_best(name: str, size: str, seeds: list[Results]) -> Iterator[Figure]:
    """Yield by how much this library's cut agrees more often than the best rival's, and its milliseconds over those."""

    def mean(label: str, key: str) -> float:
        return statistics.mean(of_seed[f"{size}, {label}"][key] for of_seed in seeds)

    ran = [label for label in RIVALS if all("ms 32" in of_seed.get(f"{size}, {label}", {}) for of_seed in seeds)]
    best = max(ran, key=lambda label: mean(label, "agrees"))
    ahead = mean(OURS, "agrees") - mean(best, "agrees")
    yield Figure(f"against_pruners/{name}/{size}/agreement_ahead", ahead, 0.0, at_least=True)
    yield Figure(f"against_pruners/{name}/{size}/milliseconds_ratio", mean(OURS, "ms 32") / mean(best, "ms 32"))


if __name__ == "__main__":
    main()
