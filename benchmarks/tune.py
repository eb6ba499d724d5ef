"""A tuned file against the files of `ds_configs/`: examples per second of the winner over the fastest of the others.

`launch/tune.py` has 6 minutes for each of two phases: `quickstart`'s pruning, and, where ../shared is there, SST-2 with
a teacher. Then the winner and the engine files of its precision, those on 1 and on 2 ranks, are timed in turns, in
trials of the same form: `python benchmarks/tune.py`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from figures import ROOT, SHARED, Figure, is_quick, report

from ds_trainer.cli.tune import read_tune_job
from ds_trainer.tasks.text import docstrings
from ds_trainer.tune.search import tune
from ds_trainer.tune.trials import RANKS, prepare, run_trial

FILES = ("zero0",) if is_quick() else ("zero0", "zero1", "zero2", "zero3")
RANKS_TRIED, ROUNDS = ((1,), 1) if is_quick() else ((1, 2), 2)
BUDGET, STEPS = ("10m", "8") if is_quick() else ("6m", "20")
if is_quick():
    docstrings.CLASS_CAP = 100  # of trials that are forked from this process, as in the tests


def subjects() -> dict[str, list[str]]:
    """The arguments of a training command by name, without an engine file."""
    recipes = ROOT / "ds_configs/recipes"
    found = {"quickstart": ["--recipe", str(recipes / "quickstart.json"), "--phase", "prune"]}
    if SHARED.is_dir() and not is_quick():
        places = {"model_name_or_path": SHARED / "models/minilm-l6", "data_dir": SHARED / "data/glue/SST-2"}
        flags = [word for name, place in places.items() for word in (f"--{name}", str(place))]
        recipe = str(recipes / "sst2_prune_distil_exits.json")
        found["sst2_with_a_teacher"] = ["--recipe", recipe, "--phase", "compress", *flags]
    return found


def main() -> None:
    figures = []
    with tempfile.TemporaryDirectory() as name:
        for subject, words in subjects().items():
            out = Path(name) / subject
            limits = ["--output_dir", str(out), "--budget", BUDGET, "--trial_steps", STEPS]
            jobs = {
                file: read_tune_job(["--deepspeed_config", str(ROOT / f"ds_configs/{file}.json"), *words, *limits])
                for file in {*FILES, "zero2"}
            }
            batch = {"train_batch_size": 32}  # the one that both recipes have
            contestants = [("zero2", {RANKS: 1} | batch)]
            if is_quick():
                prepare(jobs["zero2"])  # all that trials need; that a tuning ends is shown by the tests
            else:
                contestants = [("zero2", tune(jobs["zero2"]).settings)]
            contestants += [(file, {RANKS: ranks} | batch) for file in FILES for ranks in RANKS_TRIED]
            speeds: list[list[float]] = [[] for _ in contestants]
            for _ in range(ROUNDS):
                for values, (file, settings) in zip(speeds, contestants, strict=True):
                    trial = run_trial(jobs[file], settings, out / "trials" / "bench", lambda step, score: False)
                    assert trial.value is not None, f"{file} with {settings}: {trial.outcome}: {trial.reason}"
                    values.append(trial.value)
            first, *others = map(statistics.median, speeds)
            for (file, settings), speed in zip(contestants, [first, *others], strict=True):
                print(f"{subject}: {file} with {settings}: {speed:.1f} examples/s")
            figures.append(Figure(f"tune/{subject}", first / max(others), 0.97, at_least=True))
    report(*figures)


if __name__ == "__main__":
    main()
