"""The first tables and picture of README and results: all-MiniLM-L6-v2 for embeddings, cut, and what is deployed.

`python benchmarks/front_page.py [--output OUT] [--seeds N] [--data_dir DIR] [--write]`: for each seed the recipe
`stsb_cut`, beside it three of the six layers, trained by sentence-transformers for as many steps on the same texts, and
`launch/benchmark.py` of all models on STS-B's texts. sentence-transformers is installed from the package registry into
an environment below OUT. Scores are means over the seeds; sizes and times are those of the first, which is to run alone
on the machine. `--write` puts some rows into the README, all of them and the picture into docs/results.md. A second
call goes on where the first one stopped.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from against_pruners import call, environment
from cut_quality import RECIPES, finished, shorten, start
from figures import ROOT, SHARED, Figure, is_quick, milliseconds, report, run_flags
from markers import write_between

from ds_trainer.files.messages import markdown
from ds_trainer.files.reading import read_json
from ds_trainer.files.writing import write_json
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.report.figures import dress, new_figure, save
from ds_trainer.tasks.registry import training_texts

DENSE, RIVAL = "dense", "layers"
MODELS = {DENSE: "dense", "half": "half", "quarter": "quarter", "eighth": "eighth", "small": "quarter, 16,000 tokens"}
"""The models that are measured, and what the picture calls them. The last one is that of the whole run."""
LAYERS = (0,) if is_quick() else (0, 2, 4)
PACKAGES = (("--no-deps", "sentence-transformers==6.2.0"),)
TORCH, INT8 = ("torch", "fp32"), ("onnxruntime", "int8")
ROWS = (
    ("dense, in torch", DENSE, TORCH),
    ("half of its heads and neurons cut", "half", TORCH),
    ("a quarter left", "quarter", TORCH),
    ("an eighth left", "eighth", TORCH),
    ("a quarter, and 16,000 of 30,522 tokens", "small", TORCH),
    ("to serve, int8 in onnxruntime: dense", DENSE, INT8),
    ("to serve: a quarter, and 16,000 of 30,522 tokens, int8 in onnxruntime", "small", INT8),
    ("beside: 3 of 6 layers, by sentence-transformers", RIVAL, TORCH),
)
FIRST_ROWS = (0, 1, 2, 6)
"""The rows that the README shows; all are in docs/results.md."""
FIRST_COLUMNS = ("all-MiniLM-L6-v2", "STS-B test, Spearman", "MiB", "ms for 1 text", "ms for 32", "minutes")
SCORES = {"STS-B test, Spearman": "test/spearman", "SQuAD search, nDCG@10": "squad/ndcg@10"}
SIZES = (1, 32)


@dataclass(frozen=True)
class Measured:
    """One seed: the results of the run by phase, the content of its benchmark.json, and the rival's minutes."""

    results: dict[str, Any]
    benchmark: dict[str, Any]
    rival_minutes: float

    def score(self, model: str, runtime: tuple[str, str], name: str) -> float:
        scores = self.benchmark["folders"][model]["scores"]
        return 100 * float(scores["torch" if runtime == TORCH else ", ".join(runtime)][name])

    def milliseconds(self, model: str, runtime: tuple[str, str], size: int) -> float:
        case = dict(zip(("backend", "dtype"), runtime, strict=True)) | {"batch_size": size}
        found = (each for each in self.benchmark["measurements"] if case.items() <= each.items())
        return float(next(found)["folders"][model]["median_ms"])

    def mebibytes(self, model: str, runtime: tuple[str, str]) -> float:
        form = "safetensors" if runtime == TORCH else "onnx, int8"
        return float(self.benchmark["folders"][model]["bytes"][form] / 2**20)

    def minutes(self, model: str) -> float | None:
        """Of a phase with its cut and the teacher's answers; None for the dense model."""
        if model in (DENSE, RIVAL):
            return self.rival_minutes if model == RIVAL else None
        phases = [self.results[name] for name in (["quarter", "small"] if model == "small" else [model])]
        return sum(float(each["train"]["train_seconds"] + each["cut"]["seconds"]) for each in phases) / 60


def main() -> None:
    flags = run_flags("front_page")
    measured = [measure(flags.output.resolve(), seed, flags.data_dir) for seed in range(flags.seeds)]
    on = measured[0].benchmark["conditions"]
    rows = [row(measured, *which) for which in ROWS if which[1] in measured[0].benchmark["folders"]]
    first = [{name: rows[number][name] for name in FIRST_COLUMNS} for number in FIRST_ROWS]
    spread = f"Scores are means of {len(measured)} seeds, ± their standard deviation. " if len(measured) > 1 else ""
    under = f"\n\n{spread}Times are of one seed, on {on['cores']} cores of an {on['cpu']}.\n"
    print(markdown(rows) + under)
    save(picture(measured), flags.output / "front_page.png")
    if flags.write:
        write_between(ROOT / "README.md", "front_page", markdown(first) + under)
        write_between(ROOT / "docs/results.md", "front_page_rows", markdown(rows) + under)
        save(picture(measured), ROOT / "benchmarks/figures/front_page.png")
    report(*bars(measured))


def measure(output: Path, seed: int, data_dir: str) -> Measured:
    """Train the models of a seed and benchmark them; what an earlier call has done is read."""
    content = read_json(RECIPES / "stsb_cut.json", "the recipe") | {"model": start(), "seed": seed}
    content["task"]["data_dir"] = data_dir or str(SHARED / "data")
    if is_quick():
        shorten(content)
    folder = output / str(seed)
    results = finished(folder)
    if results is None:
        recipe = output / f"{seed}.json"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        write_json(recipe, content)
        words = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", recipe, "--output_dir", folder, "--resume"]
        command = [sys.executable, "launch/train.py", *map(str, words), "--set", "bf16.enabled=true"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        results = read_json(folder / "all_results.json", "the results")
    dense = content["model"].get("name_or_path", folder / "starting_models" / "initial_model")
    models = {DENSE: dense} | {name: folder / name / "model" for name in MODELS if name not in (DENSE, "small")}
    models["small"] = folder / "model"
    rival = folder / "sentence_transformers"
    if not is_quick():  # it needs the network
        models[RIVAL] = rival / "model"
        if not (rival / "seconds.json").is_file():
            by_sentence_transformers(content, dense, rival, output)
    file = folder / "benchmark" / "benchmark.json"
    if not file.is_file():
        words = [*models.values(), "--names", *models]
        words += ["--recipe", folder / "recipe.json", "--backends", "torch", "onnxruntime", "--dtypes", "fp32", "int8"]
        words += ["--batch_sizes", *SIZES, "--output_dir", file.parent]
        words += ["--seconds", "0.1", "--threads", "1"] if is_quick() else []
        subprocess.run([sys.executable, ROOT / "launch/benchmark.py", *map(str, words)], check=True, stdout=sys.stderr)
    minutes = 0.0 if is_quick() else json.loads((rival / "seconds.json").read_text()) / 60
    return Measured(results, read_json(file, "the benchmark"), minutes)


def by_sentence_transformers(content: dict[str, Any], dense: Any, folder: Path, output: Path) -> None:
    """Have sentence-transformers train some of the layers for the half's steps, on the same texts."""
    folder.mkdir(parents=True, exist_ok=True)
    (half,) = (phase for phase in content["phases"] if phase["name"] == "half")
    request = {name: half[name] for name in ("max_steps", "train_batch_size", "learning_rate", "warmup_steps")}
    request |= {"dense": str(dense), "layers": LAYERS, "seed": content["seed"], "out": str(folder)}
    request["texts"] = training_texts(parse_task(content["task"]))
    request["max_seq_length"] = content["task"]["max_seq_length"]
    write_json(folder / "request.json", request)
    python = environment(output / "environments" / "sentence_transformers", PACKAGES)
    call([python, str(ROOT / "benchmarks/pruners/layers_by_sentence_transformers.py"), str(folder / "request.json")])


def row(measured: list[Measured], label: str, model: str, runtime: tuple[str, str]) -> dict[str, str]:
    """Return the cells of a model."""
    first, cells = measured[0], {"all-MiniLM-L6-v2": label}
    for column, name in SCORES.items():
        scores = [one.score(model, runtime, name) for one in measured]
        several = len(scores) > 1 and model != DENSE  # which has no seed
        cells[column] = f"{statistics.mean(scores):.2f}" + (f" ± {statistics.stdev(scores):.2f}" if several else "")
    parameters = first.benchmark["folders"][model]["parameters"]["total"]
    cells |= {"parameters": f"{parameters / 1e6:.1f}M", "MiB": f"{first.mebibytes(model, runtime):.1f}"}
    for size in SIZES:
        took = first.milliseconds(model, runtime, size)
        cells["ms for 1 text" if size == 1 else f"ms for {size}"] = milliseconds(took)
    minutes = first.minutes(model)
    return cells | {"minutes": "" if minutes is None else f"{minutes:.1f}"}


def bars(measured: list[Measured]) -> Iterator[Figure]:
    """Yield what the smaller models score, and how many times as fast they are as the dense one in torch."""
    first, dense = measured[0], (DENSE, TORCH)

    def mean(model: str, runtime: tuple[str, str], name: str) -> float:
        return statistics.mean(one.score(model, runtime, name) for one in measured)

    least = {"half": 81.9, "quarter": 80.8, "eighth": 79.0}
    lost, speeds = {"half": 0.5, "quarter": 1.5, "eighth": 3.0}, {"half": 1.85, "quarter": 3.3}
    for model, bar in least.items():
        yield Figure(f"front_page/{model}/spearman", mean(model, TORCH, "test/spearman"), bar, at_least=True)
        drop = mean(*dense, "squad/ndcg@10") - mean(model, TORCH, "squad/ndcg@10")
        yield Figure(f"front_page/{model}/ndcg_lost", drop, lost[model])
        yield Figure(f"front_page/{model}/minutes", first.minutes(model) or 0.0, 12.0)
        faster = first.milliseconds(*dense, 32) / first.milliseconds(model, TORCH, 32)
        yield Figure(f"front_page/{model}/batch_32", faster, speeds.get(model), at_least=True)
    tokens = mean("quarter", TORCH, "test/spearman") - mean("small", TORCH, "test/spearman")
    yield Figure("front_page/small/spearman_lost_by_tokens", tokens, 0.3)
    rounding = mean("small", TORCH, "test/spearman") - mean("small", INT8, "test/spearman")
    yield Figure("front_page/served/spearman_lost_by_int8", rounding, 0.5)
    yield Figure("front_page/served/mebibytes", first.mebibytes("small", INT8), 9.0)
    for size in SIZES:
        faster = first.milliseconds(*dense, size) / first.milliseconds("small", INT8, size)
        yield Figure(f"front_page/served/batch_{size}", faster, 7.0, at_least=True)
    if RIVAL in first.benchmark["folders"]:
        ahead = mean("half", TORCH, "test/spearman") - mean(RIVAL, TORCH, "test/spearman")
        yield Figure("front_page/half/ahead_of_layers", ahead, 0.0, at_least=True)
        slower = first.milliseconds("half", TORCH, 32) / first.milliseconds(RIVAL, TORCH, 32)
        yield Figure("front_page/half/time_over_layers", slower, 1.0)


def picture(measured: list[Measured]) -> Any:
    """Draw the front: Spearman over how many times as fast as the dense model in torch one text is answered."""
    figure, (axes,) = new_figure(880, 420, "STS-B: score and speed of one embedding model, cut")
    base, name = measured[0].milliseconds(DENSE, TORCH, 1), SCORES["STS-B test, Spearman"]
    for runtime, colour, title in ((TORCH, "#0072b2", "in torch, fp32"), (INT8, "#d55e00", "in onnxruntime, int8")):
        models = [DENSE, "half", "quarter" if runtime == TORCH else "small", "eighth"]
        scores = [[one.score(model, runtime, name) for one in measured] for model in models]
        speeds = [base / measured[0].milliseconds(model, runtime, 1) for model in models]
        means = [statistics.mean(each) for each in scores]
        spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in scores]
        axes.errorbar(speeds, means, spreads, color=colour, fmt="o-", markersize=8, capsize=3, linewidth=1, label=title)
        for model, speed, mean, spread in zip(models, speeds, means, spreads, strict=True):
            style: dict[str, Any] = {"ha": "center", "fontsize": 9, "color": colour}
            axes.annotate(MODELS[model], (speed, mean + spread), (0, 8), textcoords="offset points", **style)
    dress(axes, "times as fast as the dense model in torch, one text at a time", "Spearman x 100, STS-B test")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 1, high + 0.6)  # room for the legend, and noise is not to look like a result
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
    axes.legend(loc="lower left", frameon=False)
    return figure


if __name__ == "__main__":
    main()
