"""Phases stopped again and again, and resumed, beside the same phases that nothing stops: under the real engine.

`deepspeed --num_gpus 2 tests/support/resume_matrix.py RECIPE OUT` runs each of CASES and BEST twice, into
OUT/CASE/{whole,stopped}, with the phase's results beside, and each of ONLY_WHOLE once. What `hyperparameters.py` sees
goes to OUT/hyperparameters.json. The recipe's first phase is the teacher of the second, which is what is stopped.
Wherever a run that nothing stops saves a checkpoint-N, its engine is exported as well, to `exported-N`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from support import hyperparameters
from support.launching import WORDS, chosen, exhaustive

from ds_trainer.cli.train import read_train_job
from ds_trainer.deploy.export import export_trained
from ds_trainer.engine.checkpoint import Checkpoints
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.report.log import RunLog
from ds_trainer.run import loop
from ds_trainer.run.phase import plan_phase
from ds_trainer.run.starting_models import StartingModels

STEPS, EVALUATE, SAVE = 18, 6, 5
"""240 examples in batches of 16: an epoch ends after step 15. It is asked whether to stop after every step, and 4 times
in an evaluation."""
STOPS = {"in an epoch": 4, "in an evaluation": 3, "at the end of an epoch": 4 + 5 + 4 + 4, "at the last evaluation": 5}
"""At which of these questions, from where a run goes on, it stops: after step 4; in the evaluation of step 6; after
step 15; in the evaluation after the last step."""
FEW_STOPS = [4 + 3, 4 + 5 + 4 + 4]
"""The second and the third of these alone, for all but one of the cases where they represent all."""
PRECISIONS = {
    "fp32": [],
    "bf16": ["--set", "bf16.enabled=true"],
    "fp16": ["--set", 'fp16={"enabled": true, "initial_scale_power": 8}'],
    "autocast": ["--set", 'torch_autocast={"enabled": true, "dtype": "bfloat16"}'],
}
CASES = {f"zero{stage}-{precision}": {} for stage, precision in product(range(4), ("fp32", "bf16"))}
_GLOBAL = "techniques.prune.global_topk"
GLOBAL = {_GLOBAL: True, f"{_GLOBAL}_frequency_compute": 7}
HYBRID = GLOBAL | {"techniques.prune.granularity": "hybrid"}
CASES |= {"global-zero2-fp32": GLOBAL, "global-zero3-fp32": GLOBAL, "hybrid-zero3-fp32": HYBRID}
NER = {"name": "ner", "train_file": "train.conll", "validation_file": "validation.conll", "max_seq_length": 32}
TAGGED = {"task": NER, "techniques.distill": None, "techniques.exits": {"training": "joint"}}
CASES |= {f"ner-zero{stage}-bf16": TAGGED for stage in range(4)}
_SIZES = ("num_hidden_layers", "num_attention_heads")
HEADS = {"techniques": {"exits": {"layers": [1]}}, "loss": {"task": 0.0, "exits.heads": 1.0}}
L0 = {
    "pruning_method": "l0",
    "mask_scale": 2.197,
    "regularization": "l0",
    "final_lambda": 5.0,
    "initial_warmup": 0,
    "final_warmup": 0,
}
JOINT = {
    "techniques.exits": {"training": "joint"},
    "techniques.distill": {"teacher": "@finetune", "terms": ["logits", "hidden"]},
    "loss": {"task": 0.0, "exits.heads": 1.0, "distill.logits": 0.5, "distill.hidden": 0.5},
    # half as wide as its teacher, so that there is a projection
    "student": {
        "config": {"model_type": "bert", **dict.fromkeys(_SIZES, 2), "hidden_size": 16, "intermediate_size": 32}
    },
}
STATIC = {"techniques": {"prune": {"final_threshold": 0.3, "train_weights": False, "initial_warmup": 0}}}
PACKED = {
    "task": {"name": "clm", "max_seq_length": 24, "min_seq_length": 2, "packing": True}
    | dict.fromkeys(("train_file", "validation_file"), "packed.txt"),
    "student": {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}},
    "techniques": {"prune": {"final_threshold": 0.3, "initial_warmup": 0}},
}
"""Its 60 rows, in which 4 epochs end after step 15, hold the documents of `DOCUMENTS`."""
DOCUMENTS = [" ".join(WORDS[kind].split()[: 1 + n % 4]) for n in range(106) for kind in WORDS]
CASES["packed-zero1-bf16"] = PACKED
OTHERS = {
    "all": (JOINT, "zero0-fp32 zero1-bf16 zero2-autocast zero3-fp32 zero3-bf16"),
    "heads": (HEADS, "zero2-fp16 zero3-fp16"),
    "static": (STATIC, "zero0-bf16 zero3-bf16"),
    # cut by what was chosen the step before, of which the scores of the checkpoint know nothing
    "shrunk": (HYBRID | {f"{_GLOBAL}_frequency_compute": 2, "shrink": True}, "zero1-bf16 zero3-bf16"),
    "l0": ({"techniques": {"prune": L0}, "loss": {"task": 1.0, "prune.penalty": 5.0}}, "zero2-fp32 zero3-autocast"),
}
ONLY_WHOLE = {f"{name}-{engine}": changes for name, (changes, engines) in OTHERS.items() for engine in engines.split()}
_REPRESENT = "zero0-fp32 zero2-fp32 hybrid-zero3-fp32 ner-zero2-bf16 all-zero2-autocast all-zero3-bf16 "
_REPRESENT += "heads-zero3-fp16 packed-zero1-bf16 static-zero3-bf16 shrunk-zero1-bf16 l0-zero2-fp32 "
_REPRESENT += "best-apart-zero3-fp32 kept-zero1-bf16"
"""Everything that an export folds, puts beside the model or cuts out, with frozen weights, in every precision."""
FEW, OFTEN = 4, 3
"""Their steps, and how often they save."""

BEST = {"best-zero2-fp32": (6, True), "best-apart-zero3-fp32": (4, True), "kept-zero1-bf16": (6, False)}
"""`save_steps`, and whether the best checkpoint is what is exported; without, it is only kept, beside one other."""
CASES, ONLY_WHOLE, BEST = (
    {name: cases[name] for name in chosen(cases, _REPRESENT.split().__contains__)}
    for cases in (CASES, ONLY_WHOLE, BEST)
)
OFTEN_STOPPED = list(CASES) if exhaustive() else ["hybrid-zero3-fp32"]
BEST_STOPS = [5 + 2, 4 + 5 + 2, 4 + 5 + 2, 4 + 2]
"""In the midst of every evaluation, of 4 questions each, and of that of the best checkpoint at the end. What was cut
short is the first thing that the next run does."""


def changes_of(case: str) -> dict[str, Any]:
    """Fields of the phase, by their path; the best checkpoint is the worst, since that one comes early."""
    if case not in BEST:
        steps, save = (STEPS, SAVE) if case in CASES else (FEW, OFTEN)
        return {"max_steps": steps, "save_steps": save, **(CASES | ONLY_WHOLE)[case]}
    save, load = BEST[case]
    fields = {"metric_for_best_model": "accuracy", "greater_is_better": False, "load_best_model_at_end": load}
    fields |= {"max_steps": STEPS, "save_steps": save, "save_total_limit": 1}
    return fields | ({"techniques.prune": None} if load else {})


class StopAfter:
    """Asks to stop when asked for the `count`th time; never where that is 0."""

    def __init__(self, count: int) -> None:
        self.left = count

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError("the test")


def data_of(recipe: str) -> str:
    return json.loads(Path(recipe).read_text())["task"]["data_dir"]


def job_of(recipe: str, case: str, output: Path) -> TrainJob:
    stage, precision = case.split("-")[-2:]
    changes = {"eval_steps": EVALUATE, **changes_of(case)}
    accumulated = 2 if precision == "fp32" else 1  # in all it would double the time
    if "task" in changes:
        changes["task"] = {"data_dir": data_of(recipe), **changes["task"]}
    return read_train_job(
        [
            *("--deepspeed_config", f"ds_configs/{stage}.json", "--recipe", recipe, "--output_dir", str(output)),
            *("--resume", *PRECISIONS[precision], "--set", f"phases.*.gradient_accumulation_steps={accumulated}"),
            *("--set", "zero_optimization.reduce_bucket_size=1000000"),
            *(
                word
                for path, value in changes.items()
                for word in ("--set", f"phases.prune.{path}={json.dumps(value)}")
            ),
        ]
    )


def run_phase(job: TrainJob, number: int, models: StartingModels, stop: StopAfter) -> None:
    """One phase of the recipe, from its newest checkpoint; its results go to the folder."""
    phase = job.recipe.phases[number]
    checkpoints = Checkpoints(job.output)
    plan = plan_phase(job, phase, models, checkpoints.newest())
    examples = len(plan.task.examples("train"))
    with RunLog(job.output, phase.name, plan.length.total, phase.loss, False, examples) as report:
        results = loop.train(replace(plan, folder=job.output), report, stop)
        distributed.on_main(lambda: (job.output / "results.json").write_text(json.dumps(results)))
        checkpoints.drop_passing()


def run_until_stopped(job: TrainJob, models: StartingModels, count: int) -> None:
    try:
        run_phase(job, 1, models, StopAfter(count))
    except StoppedError as stopped:
        distributed.info(f"{job.output.parent.name}: {stopped}")


_save = loop.Training.save


def save_and_export(training: loop.Training) -> None:
    """Save a checkpoint, and export the engine as it is at that step."""
    before = training.progress.saved
    _save(training)
    plan, step = training.plan, training.progress.step
    if training.progress.saved != before and plan.folder.name == "whole":
        rebuild, folder = partial(plan.rebuild, training.technique_states()), plan.folder / f"exported-{step}"
        export_trained(training.engine, rebuild, plan.task, step, folder, plan.phase.shrink)


def make_run_folder(job: TrainJob, out: Path, models: StartingModels) -> None:
    """What a run leaves beside its checkpoints: the recipe, the models of earlier phases and those it has made."""
    job.output.mkdir(parents=True)
    (job.output / "recipe.json").write_text(json.dumps(job.recipe.model_dump()))
    (job.output / "finetune").symlink_to(out / "teacher")
    (job.output / "starting_models").symlink_to(models.folder)


def main(recipe: str, out: Path) -> None:
    get_accelerator().is_fp16_supported = lambda: True
    loop.Training.save = save_and_export
    loop.SETTLE_EVERY = 3  # other steps than those of the records, and of the stops
    distributed.start_logging()
    distributed.start()
    distributed.on_main(lambda: Path(data_of(recipe), "packed.txt").write_text("\n".join(DOCUMENTS)))
    first = job_of(recipe, "zero0-fp32", out / "teacher")
    distributed.on_main(lambda: first.output.mkdir(parents=True))
    run_phase(first, 0, StartingModels(first.recipe, out / "starting"), StopAfter(0))
    stopped = {case: list(STOPS.values()) if case in OFTEN_STOPPED else FEW_STOPS for case in CASES}
    stopped |= dict.fromkeys(BEST, BEST_STOPS)
    for case in (*CASES, *BEST, *ONLY_WHOLE):
        models = StartingModels(first.recipe, out / case / "starting")
        models.add("finetune", first.output / "model")
        for name, stops in {"whole": [], "stopped": stopped.get(case)}.items():
            if stops is None:
                continue
            job = job_of(recipe, case, out / case / name)
            distributed.on_main(partial(make_run_folder, job, out, models))
            for count in (*stops, 0):
                if (job.output / "results.json").exists():
                    break
                run_until_stopped(job, models, count)
    seen = hyperparameters.run_all(out / "hyperparameters")
    distributed.on_main(lambda: (out / "hyperparameters.json").write_text(json.dumps(seen)))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end
