"""A tuned file against the files of `ds_configs/`: examples per second of the winner over the fastest of the others.

`launch/tune.py` has 4 minutes for each of two phases: `quickstart`'s pruning, and, where ../shared is there, SST-2 with
a teacher. Then the winner and the engine files of its precision, those on 1 and on 2 ranks, are timed in turns, in
trials of the same form: `python tests/bench/tune.py`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import ROOT, SHARED, Figure, is_quick, report

from ds_trainer.cli.tune import read_tune_job
from ds_trainer.config.jobs import TrialRequest
from ds_trainer.config.settings import parse_setting
from ds_trainer.tuning.space import Candidate
from ds_trainer.tuning.trials import MEASURED, run_trial

FILES = ("zero0",) if is_quick() else ("zero0", "zero1", "zero2", "zero3")
RANKS, ROUNDS = ((1,), 1) if is_quick() else ((1, 2), 2)
BUDGET, SECONDS = ("1s", "0.1s") if is_quick() else ("4m", "3s")
Contestant = tuple[Path, Candidate]
"""An engine file, and with what it is run."""


def subjects() -> dict[str, list[str]]:
    """The arguments of a training command by name, without an engine file."""
    recipes = ROOT / "ds_configs/recipes"
    found = {"quickstart": ["--recipe", str(recipes / "quickstart.json"), "--phase", "prune"]}
    if SHARED.is_dir() and not is_quick():
        model = [
            "--model_name_or_path",
            str(SHARED / "models/minilm-l6"),
            "--data_dir",
            str(SHARED / "data/glue/SST-2"),
        ]
        recipe = str(recipes / "sst2_prune_distil_exits.json")
        found["sst2_with_a_teacher"] = ["--recipe", recipe, "--phase", "compress", *model]
    return found


def tuned(words: list[str], out: Path) -> Contestant:
    """Tune from zero2.json; the winner."""
    files = ["--deepspeed_config", str(ROOT / "ds_configs/zero2.json"), *words, "--output_dir", str(out)]
    limits = ["--budget", BUDGET, "--trial_seconds", SECONDS]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/tune.py"), *files, *limits], stderr=subprocess.PIPE, text=True
    )
    print(done.stderr, flush=True)
    assert done.returncode == 0
    train = done.stderr.split("train with:")[1].split()
    parsed = [parse_setting(train[place + 1]) for place, word in enumerate(train) if word == "--set"]
    settings = [(".".join(path), value) for path, value in parsed]
    return contestant(out / "tuned.json", int(train[train.index("--num_gpus") + 1]), settings)


def contestant(file: Path, ranks: int, settings: Sequence[tuple[str, Any]] = ()) -> Contestant:
    """With the global batch that all have in common, where neither the recipe nor the file sets one."""
    batch = [("train_batch_size", 32)] if json.loads(file.read_text()).get("train_batch_size") == "auto" else []
    return file, Candidate(ranks, settings=(*settings, *batch))


def speeds(words: list[str], out: Path, contestants: list[Contestant]) -> list[float]:
    """Examples per second of each, the median of trials in turns."""
    measured: list[list[float]] = [[] for _ in contestants]
    for _ in range(ROUNDS):
        for values, (file, candidate) in zip(measured, contestants, strict=True):
            job = read_tune_job(["--deepspeed_config", str(file), *words, "--output_dir", str(out)])
            folder = out / "trials"
            request = TrialRequest(
                phase=job.phase,
                results=folder / "bench" / "results.json",
                models=folder / "models",
                seconds=0.1 if is_quick() else 3.0,
            )
            trial = run_trial(job, candidate, request, 300)
            assert trial.outcome == MEASURED, f"{file.name} on {candidate.ranks}: {trial.outcome}: {trial.reason}"
            values.append(trial.speed)
    return [statistics.median(values) for values in measured]


def main() -> None:
    figures = []
    with tempfile.TemporaryDirectory() as name:
        for subject, words in subjects().items():
            out = Path(name) / subject
            fixed = [contestant(ROOT / f"ds_configs/{file}.json", ranks) for file in FILES for ranks in RANKS]
            contestants = [tuned(words, out), *fixed]
            first, *others = speeds(words, out, contestants)
            for (file, candidate), speed in zip(contestants, [first, *others], strict=True):
                print(f"{subject}: {file.name} on {candidate.ranks} rank(s): {speed:.1f} examples/s")
            figures.append(Figure(f"tune/{subject}", first / max(others), 0.97, at_least=True))
    report(*figures)


if __name__ == "__main__":
    main()
