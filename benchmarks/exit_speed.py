"""Early exit against the same model run to its end: SST-2's validation set, batches of 1, 8, 32, 128, 1 and 2 threads.

`python benchmarks/exit_speed.py MODEL [DATA_DIR]`, MODEL a folder with exit heads and calibrated thresholds. Measured
speed-up / ideal (layers / mean layers used): at least 0.90 at batch 32 and 128, 0.85 at batch 1. With no sample
leaving, though every head is asked, they cost at most 1.05 of the plain model. Both sides run in inference mode.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import SHARED, Figure, is_quick, ratio, report, use_threads

from ds_trainer.ranks import distributed
from ds_trainer.recipe.exit_specs import ExitPolicy
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, with_exits

BARS = {1: 0.85, 32: 0.90, 128: 0.90}
"""Of measured / ideal speed-up, by batch size; what has no bar is printed."""
EXAMPLES = dict.fromkeys((1, 8, 32, 128), 8) if is_quick() else {1: 64, 8: 128, 32: 512, 128: 512}


def main(folder: str, data_dir: str = str(SHARED / "data" / "glue" / "SST-2")) -> None:
    distributed.keep_freed_memory()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as cache:
        task: Any = build_task(TextSpec(name="sst2", data_dir=data_dir), folder, cache)
        plain = task.build_model(folder).eval()
        early = with_exits(task.build_model(folder), Path(folder)).eval()
        examples = task.examples("validation")
        for threads in (1, 2):
            use_threads(threads)
            for size in (1, 8, 32, 128):
                chosen = spread(len(examples), EXAMPLES[size])
                batches = [task.collate(examples, chosen[i : i + size]).inputs for i in range(0, len(chosen), size)]
                figures += measured(plain, early, batches, f"batch_{size}/threads_{threads}", BARS.get(size))
    report(*figures)


def measured(plain: Any, early: EarlyExitModel, batches: list[Any], name: str, bar: float | None) -> list[Figure]:
    """The two ratios of one batch size and number of threads."""
    policy = early.policy
    mean = float(torch.cat([early(**batch).exit_layers for batch in batches]).float().mean())
    ideal = early.layers[-1] / mean
    speed, plain_s, early_s = ratio(over(plain, batches), over(early, batches), rounds=5, warmup=1)
    early.policy = ExitPolicy(criterion="entropy", thresholds=[0.0] * (len(early.layers) - 1))
    cost, _, _ = ratio(over(early, batches), over(plain, batches), rounds=5, warmup=1)
    early.policy = policy
    per_batch = 1e3 / len(batches)
    print(
        f"{name}: {plain_s * per_batch:.2f} ms a batch to the end, {early_s * per_batch:.2f} ms early; "
        f"{mean:.2f} layers, speed-up {speed:.3f} of {ideal:.3f} = {speed / ideal:.3f}; none leaving {cost:.3f}",
        flush=True,
    )
    share = [Figure(f"exit_speed/{name}/of_ideal", speed / ideal, bar, at_least=True)] if bar else []
    return [*share, Figure(f"exit_speed/{name}/none_leaving", cost, 1.05)]


def over(model: Any, batches: list[Any]) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        for batch in batches:
            model(**batch)

    return run


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
