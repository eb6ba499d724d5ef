"""Phases stopped again and again, and resumed, beside the same phases that nothing stops: under the real engine.

`deepspeed --num_gpus 2 tests/resume_matrix.py RECIPE OUT` runs each of CASES twice, into OUT/CASE/{whole,stopped}.
The recipe's first phase is the teacher of the second, which is what is stopped.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

from ds_trainer import distributed
from ds_trainer.checkpoint import Checkpoints
from ds_trainer.command import TrainJob, read_train_job
from ds_trainer.failures import StoppedError
from ds_trainer.loop import train
from ds_trainer.report import Report
from ds_trainer.run import plan_phase
from ds_trainer.starting_models import StartingModels

STEPS, EVALUATE, SAVE = 18, 6, 5
"""240 examples in batches of 16: an epoch ends after step 15. It is asked whether to stop after every step, and 4 times
in an evaluation."""
STOPS = {"in an epoch": 4, "in an evaluation": 3, "at the end of an epoch": 4 + 5 + 4 + 4, "at the last evaluation": 5}
"""At which of these questions, from where a run goes on, it stops: after step 4; in the evaluation of step 6; after
step 15; in the evaluation after the last step."""
PRECISIONS = {"fp32": [], "bf16": ["--set", "bf16.enabled=true"]}
CASES = {f"zero{stage}-{precision}": [] for stage, precision in product(range(4), PRECISIONS)}
GLOBAL = [
    *("--set", "phases.prune.techniques.prune.global_topk=true"),
    *("--set", "phases.prune.techniques.prune.global_topk_frequency_compute=7"),
]
CASES |= {"global-zero2-fp32": GLOBAL, "global-zero3-fp32": GLOBAL}
CASES |= {"hybrid-zero3-fp32": [*GLOBAL, "--set", 'phases.prune.techniques.prune.granularity="hybrid"']}


class StopAfter:
    """Asks to stop when asked for the `count`th time; never where that is 0."""

    def __init__(self, count: int) -> None:
        self.left = count

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError("the test")


def job_of(recipe: str, case: str, output: Path) -> TrainJob:
    stage, precision = case.split("-")[-2:]
    return read_train_job(
        [
            *("--deepspeed_config", f"ds_configs/{stage}.json", "--recipe", recipe, "--output_dir", str(output)),
            *("--resume", *PRECISIONS[precision], *CASES[case], "--set", "phases.*.gradient_accumulation_steps=2"),
            *("--set", f"phases.prune.max_steps={STEPS}", "--set", f"phases.prune.save_steps={SAVE}"),
            *("--set", f"phases.prune.eval_steps={EVALUATE}"),
        ]
    )


def run_phase(job: TrainJob, number: int, models: StartingModels, stop: StopAfter) -> None:
    """One phase of the recipe, from its newest checkpoint."""
    phase = job.recipe.phases[number]
    checkpoints = Checkpoints(job.output, phase.save_total_limit)
    plan = plan_phase(job, phase, models.start(phase), models.teacher(phase), checkpoints.newest())
    examples = len(plan.task.examples("train"))
    with Report(job.output, phase.name, plan.clock.total, phase.loss, False, examples) as report:
        train(replace(plan, folder=job.output), report, checkpoints, stop)


def run_until_stopped(job: TrainJob, models: StartingModels, count: int) -> None:
    try:
        run_phase(job, 1, models, StopAfter(count))
    except StoppedError as stopped:
        distributed.info(f"{job.output.parent.name}: {stopped}")


def main(recipe: str, out: Path) -> None:
    distributed.start_logging()
    distributed.start()
    first = job_of(recipe, "zero0-fp32", out / "teacher")
    models = StartingModels(first.recipe, out / "starting")
    distributed.on_main(lambda: first.output.mkdir(parents=True))
    run_phase(first, 0, models, StopAfter(0))
    models.left["finetune"] = str(first.output / "model")
    for case in CASES:
        for name, stops in (("whole", []), ("stopped", list(STOPS.values()))):
            job = job_of(recipe, case, out / case / name)
            distributed.on_main(lambda folder=job.output: folder.mkdir(parents=True))
            for count in (*stops, 0):
                run_until_stopped(job, models, count)
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end
