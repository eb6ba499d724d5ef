"""The first tables and picture of README and results: a dense model, what cuts make of it, and what is deployed.

`python benchmarks/front_page.py [--output OUT] [--seeds N] [--data_dir DIR] [--write]`: for each seed the recipe
`sst2_cut`, and `launch/benchmark.py` of its models on SST-2's texts, with the two commands that docs/results.md gives.
Scores are means over the seeds; sizes and times are those of the first, which is to run alone on the machine. `--write`
puts three rows into the README, all of them and the picture into docs/results.md. The runs are those of
`cut_quality.py sst2`, in the same folder; a second call goes on where the first one stopped. Bars are those of the last
row against the first.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cut_quality import comparison_of, cuts_folder, trained
from figures import ROOT, Figure, is_quick, milliseconds, report, run_flags, with_spread
from markers import write_between

from ds_trainer.files.messages import markdown
from ds_trainer.files.reading import read_json
from ds_trainer.report.figures import dress, new_figure, save

MODELS = {
    "finetune": "dense",
    "half": "half",
    "quarter": "quarter",
    "eighth": "eighth",
    "small": "quarter, 16,000 tokens",
}
"""The phases whose models are measured, and what the picture calls them. The last one is that of the whole run."""
TORCH, INT8 = ("torch", "fp32"), ("onnxruntime", "int8")
ROWS = (
    ("dense, in torch", "finetune", TORCH),
    ("half of its heads and neurons cut", "half", TORCH),
    ("a quarter left", "quarter", TORCH),
    ("an eighth left", "eighth", TORCH),
    ("to serve, int8 in onnxruntime: dense", "finetune", INT8),
    ("to serve: a quarter, and 16,000 of 30,522 tokens, int8 in onnxruntime", "small", INT8),
)
FIRST_ROWS = (0, 2, 5)
"""The rows that the README shows; all are in docs/results.md."""
FIRST_COLUMNS = ("all-MiniLM-L6-v2 on SST-2", "accuracy", "MiB", "ms for 1 text", "ms for 32")
SIZES = (1, 32)


@dataclass(frozen=True)
class Measured:
    """One seed: the results of the run by phase, and the content of its benchmark.json."""

    results: dict[str, Any]
    benchmark: dict[str, Any]

    def accuracy(self, phase: str, runtime: tuple[str, str]) -> float:
        scores = self.benchmark["folders"][phase]["scores"]
        return float(scores["torch" if runtime == TORCH else ", ".join(runtime)]["accuracy"])

    def milliseconds(self, phase: str, runtime: tuple[str, str], size: int) -> float:
        case = dict(zip(("backend", "dtype"), runtime, strict=True)) | {"batch_size": size}
        found = (each for each in self.benchmark["measurements"] if case.items() <= each.items())
        return float(next(found)["folders"][phase]["median_ms"])

    def mebibytes(self, phase: str, runtime: tuple[str, str]) -> float:
        form = "safetensors" if runtime == TORCH else "onnx, int8"
        return float(self.benchmark["folders"][phase]["bytes"][form] / 2**20)

    def minutes(self, phase: str) -> float:
        """Of the phase itself, with its cut."""
        of_phase = self.results[phase]
        return float((of_phase["train"]["train_seconds"] + of_phase.get("cut", {}).get("seconds", 0.0)) / 60)


def main() -> None:
    flags = run_flags("cut_quality")
    folder = flags.output / "sst2"
    measured = [measure(folder, seed, flags.data_dir) for seed in range(flags.seeds)]
    on = measured[0].benchmark["conditions"]
    rows = [row(measured, *which) for which in ROWS]
    first = [{name: rows[number][name] for name in FIRST_COLUMNS} for number in FIRST_ROWS]
    spread = f"Accuracies are means of {len(measured)} seeds, ± their standard deviation. " if len(measured) > 1 else ""
    under = f"\n\n{spread}Times are of one seed, on {on['cores']} cores of an {on['cpu']}.\n"
    print(markdown(rows) + under)
    save(picture(measured), folder / "front_page.png")
    if flags.write:
        write_between(ROOT / "README.md", "front_page", markdown(first) + under)
        write_between(ROOT / "docs/results.md", "front_page_rows", markdown(rows) + under)
        save(picture(measured), ROOT / "benchmarks/figures/front_page.png")
    report(*served(measured))


def measure(folder: Path, seed: int, data_dir: str) -> Measured:
    """Train the models of a seed and benchmark them; what an earlier call has done is read."""
    results = trained(comparison_of("sst2", data_dir), folder, seed)
    run = cuts_folder(folder, seed)
    file = run / "benchmark" / "benchmark.json"
    if not file.is_file():
        words = [*(run / phase / "model" for phase in list(MODELS)[:-1]), run / "model", "--names", *MODELS]
        words += ["--recipe", run / "recipe.json", "--backends", "torch", "onnxruntime", "--dtypes", "fp32", "int8"]
        words += ["--batch_sizes", *SIZES, "--output_dir", file.parent]
        words += ["--seconds", "0.1", "--threads", "1"] if is_quick() else []
        subprocess.run([sys.executable, ROOT / "launch/benchmark.py", *map(str, words)], check=True, stdout=sys.stderr)
    return Measured(results, read_json(file, "the benchmark"))


def row(measured: list[Measured], label: str, phase: str, runtime: tuple[str, str]) -> dict[str, str]:
    """Return the cells of a model."""
    first = measured[0]
    scores = [one.accuracy(phase, runtime) for one in measured]
    parameters = first.benchmark["folders"][phase]["parameters"]["total"]
    cells = {"all-MiniLM-L6-v2 on SST-2": label, "accuracy": with_spread(scores)}
    cells |= {"parameters": f"{parameters / 1e6:.1f}M", "MiB": f"{first.mebibytes(phase, runtime):.1f}"}
    for size in SIZES:
        took = first.milliseconds(phase, runtime, size)
        cells["ms for 1 text" if size == 1 else f"ms for {size}"] = milliseconds(took)
    minutes = first.minutes("quarter" if phase == "small" else phase)  # `small` drops its tokens without any training
    return cells | {"minutes of training": f"{'' if phase == 'finetune' else '+ '}{minutes:.1f}"}


def served(measured: list[Measured]) -> Iterator[Figure]:
    """Yield what the file to serve loses and gains against the dense model in torch, whose weights are in fp32."""
    first, dense, small = measured[0], ("finetune", TORCH), ("small", INT8)
    weights = 4 * first.benchmark["folders"]["finetune"]["parameters"]["total"] / 2**20
    lost = [100 * (one.accuracy(*dense) - one.accuracy(*small)) for one in measured]
    yield Figure("front_page/bytes", first.mebibytes(*small) / weights, 0.2)
    yield Figure("front_page/points_lost", statistics.mean(lost), 1.0)
    for size in SIZES:
        faster = first.milliseconds(*dense, size) / first.milliseconds(*small, size)
        yield Figure(f"front_page/batch_{size}", faster, 5.0, at_least=True)


def picture(measured: list[Measured]) -> Any:
    """Draw the front: accuracy over how many times as fast as the dense model in torch one text is answered."""
    figure, (axes,) = new_figure(880, 420, "SST-2: accuracy and speed of one model, cut")
    base = measured[0].milliseconds("finetune", TORCH, 1)
    for runtime, colour, name in ((TORCH, "#0072b2", "in torch, fp32"), (INT8, "#d55e00", "in onnxruntime, int8")):
        phases = ["finetune", "half", "quarter" if runtime == TORCH else "small", "eighth"]
        scores = [[one.accuracy(phase, runtime) for one in measured] for phase in phases]
        speeds = [base / measured[0].milliseconds(phase, runtime, 1) for phase in phases]
        means = [statistics.mean(each) for each in scores]
        spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in scores]
        axes.errorbar(speeds, means, spreads, color=colour, fmt="o-", markersize=8, capsize=3, linewidth=1, label=name)
        for phase, speed, mean, spread in zip(phases, speeds, means, spreads, strict=True):
            style: dict[str, Any] = {"ha": "center", "fontsize": 9, "color": colour}
            axes.annotate(MODELS[phase], (speed, mean + spread), (0, 8), textcoords="offset points", **style)
    dress(axes, "times as fast as the dense model in torch, one text at a time", "accuracy")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.01, high + 0.006)  # room for the legend, and noise is not to look like a result
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
    axes.legend(loc="lower left", frameon=False)
    return figure


if __name__ == "__main__":
    main()
