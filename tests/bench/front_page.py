"""The first table and the first picture of the README: a dense model, what cuts make of it, and what is deployed.

`python tests/bench/front_page.py [SEEDS] [OUTPUT_DIR] [DATA_DIR] [--write]`: for each seed the recipe `sst2_cut`, and
`launch/benchmark.py` of its models on SST-2's texts, which are the two commands that the README gives. It prints a
table of the means; `--write` puts it, and the picture, into the README. The runs are those of `cut_quality.py sst2`, in
the same folder; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cut_quality import ROOT, comparison_of, cuts_folder, trained
from figures import is_quick

from ds_trainer.files.json_file import read_json
from ds_trainer.files.tables import markdown
from ds_trainer.report.drawing import dress, one_panel, save

sys.path.insert(0, str(ROOT / "tests"))
from tools.markers import write_between

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
    ("to serve: a quarter, and 16,000 of 30,522 tokens", "small", INT8),
)
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


def main(seeds: str = "3", output: str = "runs/cut_quality", data_dir: str = "") -> None:
    folder = Path(output) / "sst2"
    measured = [measure(folder, seed, data_dir) for seed in range(1 if is_quick() else int(seeds))]
    on = measured[0].benchmark["conditions"]
    text = f"{markdown([row(measured, *which) for which in ROWS])}\n\n"
    text += f"Means of {len(measured)} seeds, ± their standard deviation, on {on['cores']} cores of an {on['cpu']}.\n"
    print(text)
    save(picture(measured), folder / "front_page.png")
    if "--write" in sys.argv:
        write_between(ROOT / "README.md", "front_page", text)
        save(picture(measured), ROOT / "tests/bench/figures/front_page.png")


def measure(folder: Path, seed: int, data_dir: str) -> Measured:
    """Train the models of a seed and benchmark them; what an earlier call has done is read."""
    results = trained(comparison_of("sst2", data_dir), folder, seed)
    run = cuts_folder(folder, seed)
    file = run / "benchmark" / "benchmark.json"
    if not (file.is_file() and read_json(file, "the benchmark")["finished"]):
        words = [*(run / phase / "model" for phase in list(MODELS)[:-1]), run / "model", "--names", *MODELS]
        words += ["--recipe", run / "recipe.json", "--backends", "torch", "onnxruntime", "--dtypes", "fp32", "int8"]
        words += ["--batch_sizes", *SIZES, "--output_dir", file.parent]
        words += ["--seconds", "0.1", "--threads", "1"] if is_quick() else []
        subprocess.run([sys.executable, ROOT / "launch/benchmark.py", *map(str, words)], check=True, stdout=sys.stderr)
    return Measured(results, read_json(file, "the benchmark"))


def row(measured: list[Measured], label: str, phase: str, runtime: tuple[str, str]) -> dict[str, str]:
    """Return the cells of a model."""

    def mean(value: Callable[[Measured], float]) -> float:
        return statistics.mean(map(value, measured))

    parameters = measured[0].benchmark["folders"][phase]["parameters"]["total"]
    cells = {
        "all-MiniLM-L6-v2 on SST-2": label,
        "accuracy": with_spread([one.accuracy(phase, runtime) for one in measured]),
    }
    cells |= {"parameters": f"{parameters / 1e6:.1f}M", "MiB": f"{mean(lambda one: one.mebibytes(phase, runtime)):.1f}"}
    for size in SIZES:
        took = mean(lambda one, size=size: one.milliseconds(phase, runtime, size))
        cells[f"ms, batch {size}"] = f"{took:.1f}" if took < 100 else f"{took:.0f}"
    # `small` drops tokens of the quarter without any training
    minutes = mean(lambda one: one.minutes("quarter" if phase == "small" else phase))
    return cells | {"minutes of training": f"{'' if phase == 'finetune' else '+ '}{minutes:.1f}"}


def with_spread(values: list[float]) -> str:
    """Return the mean, and with several values their standard deviation."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def picture(measured: list[Measured]) -> Any:
    """Draw the front: accuracy over how many times as fast as the dense model in torch one text is answered."""
    figure, axes = one_panel(880, 420, "SST-2: accuracy and speed of one model, cut")
    base = statistics.mean(one.milliseconds("finetune", TORCH, 1) for one in measured)
    for runtime, colour, name in ((TORCH, "#0072b2", "in torch, fp32"), (INT8, "#d55e00", "in onnxruntime, int8")):
        phases = [phase for phase in MODELS if runtime == INT8 or phase != "small"]
        scores = [[one.accuracy(phase, runtime) for one in measured] for phase in phases]
        speeds = [base / statistics.mean(one.milliseconds(phase, runtime, 1) for one in measured) for phase in phases]
        means = [statistics.mean(each) for each in scores]
        spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in scores]
        axes.errorbar(speeds, means, spreads, color=colour, fmt="o", markersize=8, capsize=3, label=name)
        for phase, speed, mean in zip(phases, speeds, means, strict=True):
            axes.annotate(MODELS[phase], (speed, mean), (7, -13), textcoords="offset points", fontsize=9, color=colour)
    dress(axes, "times as fast as the dense model in torch, one text at a time", "accuracy")
    axes.legend(loc="lower left", frameon=False)
    return figure


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--")))
