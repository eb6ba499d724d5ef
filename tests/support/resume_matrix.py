"""Phases stopped again and again, and resumed, beside the same phases that nothing stops: under the real engine.

`deepspeed --num_gpus 2 tests/support/resume_matrix.py RECIPE OUT` runs each of CASES and BEST twice, into
OUT/CASE/{whole,stopped}, with the phase's results beside, and each of ONLY_WHOLE once. The recipe's first phase is the
teacher of the second, which is what is stopped. Wherever a run that nothing stops saves a checkpoint-N, its engine is
exported as well, to `exported-N`. OUT/settings.json has what a tiny net does that is trained, saved, and gone on with
under other hyperparameters, with every kind of optimizer: SETTINGS.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from support.launching import WORDS, exhaustive
from torch import nn

from ds_trainer.cli.train import read_train_job
from ds_trainer.deploy.export import export_trained
from ds_trainer.engine import engine
from ds_trainer.engine.checkpoint import Checkpoints
from ds_trainer.engine.engine import parameter_groups
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.recipe.recipe import GroupRule
from ds_trainer.report.log import RunLog
from ds_trainer.run import loop
from ds_trainer.run.phase import plan_phase
from ds_trainer.run.starting_models import StartingModels

STEPS, EVALUATE, SAVE = 9, 3, 5
FEWER = {"max_train_samples": 80}
"""80 examples in batches of 16: an epoch ends after step 5. It is asked whether to stop after every step, and twice in
an evaluation."""
STOPS = {
    "in an epoch": 2,
    "in an evaluation": 2,
    "at the end of an epoch": 2 + 2,
    "at the last evaluation": 1 + 2 + 2 + 1,
}
"""At which of these questions, from where a run goes on, it stops: after step 2; in the evaluation of step 3, which the
next run does first; after step 5; in the evaluation after the last step."""
FEW_STOPS = [3 + 1, 2 + 2]
"""The second and the third of these alone, for all but one of the cases where they represent all."""
PRECISIONS = {
    "fp32": [],
    "bf16": ["--set", "bf16.enabled=true"],
    "fp16": ["--set", 'fp16={"enabled": true, "initial_scale_power": 8}'],
    "autocast": ["--set", 'torch_autocast={"enabled": true, "dtype": "bfloat16"}'],
}
_GLOBAL = "techniques.prune.global_topk"
GLOBAL = {_GLOBAL: True, f"{_GLOBAL}_frequency_compute": 3}
HYBRID = GLOBAL | {"techniques.prune.granularity": "hybrid"}
NER = {"name": "ner", "train_file": "train.conll", "validation_file": "validation.conll", "max_seq_length": 32}
TAGGED = {"task": NER, "techniques.distill": None, "techniques.exits": {"training": "joint"}}
_SIZES = ("num_hidden_layers", "num_attention_heads")
HEADS = {"techniques": {"exits": {"layers": [1]}}, "loss": {"task": 0.0, "exits.heads": 1.0}}
_L0 = {"pruning_method": "l0", "regularization": "l0", "mask_scale": 2.197, "final_lambda": 5.0}
_L0 |= {"initial_warmup": 0, "final_warmup": 0}
L0 = {"techniques": {"prune": _L0}, "loss": {"task": 1.0, "prune.penalty": 5.0}}
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
    "per_device_eval_batch_size": 8,
}
"""Its 20 rows, in which 4 epochs end after step 5, hold the documents of `DOCUMENTS`."""
DOCUMENTS = [" ".join(WORDS[kind].split()[: 1 + n % 4]) for n in range(36) for kind in WORDS]


def cases_of(variants: dict[str, tuple[dict[str, Any], str, str]]) -> dict[str, dict[str, Any]]:
    """The changes to the phase by variant and engine: the first engines, and with `--exhaustive` the others as well."""
    return {
        f"{name}-{engine}": changes
        for name, (changes, some, others) in variants.items()
        for engine in (*some.split(), *(others.split() if exhaustive() else ()))
    }


CASES = cases_of(
    {
        "plain": ({}, "zero0-fp32 zero2-fp32", "zero1-fp32 zero3-fp32 zero0-bf16 zero1-bf16 zero2-bf16 zero3-bf16"),
        "global": (GLOBAL, "", "zero2-fp32 zero3-fp32"),
        "hybrid": (HYBRID, "zero3-fp32", ""),
        "ner": (TAGGED, "zero2-bf16", "zero0-bf16 zero1-bf16 zero3-bf16"),
        "packed": (PACKED, "zero1-bf16", ""),
    }
)
ONLY_WHOLE = cases_of(
    {
        "all": (JOINT, "zero2-autocast zero3-bf16", "zero0-fp32 zero1-bf16 zero3-fp32"),
        "heads": (HEADS, "zero3-fp16", "zero2-fp16"),
        "static": (STATIC, "zero3-bf16", "zero0-bf16"),
        # cut by what was chosen the step before, of which the scores of the checkpoint know nothing
        "shrunk": (HYBRID | {f"{_GLOBAL}_frequency_compute": 2, "shrink": True}, "zero1-bf16", "zero3-bf16"),
        "l0": (L0, "zero2-fp32", "zero3-autocast"),
    }
)
"""Everything that an export folds, puts beside the model or cuts out, with frozen weights, in every precision."""
FEW, OFTEN = 4, 3
"""Their steps, and how often they save."""

BEST = {"best-apart-zero2-fp32": (2, True), "kept-zero1-bf16": (3, False)}
"""`save_steps`, and whether the best checkpoint is what is exported; without, it is only kept, beside one other."""
OFTEN_STOPPED = list(CASES) if exhaustive() else ["hybrid-zero3-fp32"]
BEST_STOPS = [3 + 1, 2 + 3 + 1, 2 + 3 + 1, 2 + 1]
"""In the midst of every evaluation, of 2 questions each, and of that of the best checkpoint at the end. What was cut
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
    changes = {"eval_steps": EVALUATE, "per_device_eval_batch_size": 16, **changes_of(case)}
    accumulated = 2 if precision == "fp32" else 1  # in all it would double the time
    if "task" in changes:
        changes["task"] = FEWER | {"data_dir": data_of(recipe), **changes["task"]}
    return read_train_job(
        [
            *("--deepspeed_config", f"ds_configs/{stage}.json", "--recipe", recipe, "--output_dir", str(output)),
            *("--resume", *PRECISIONS[precision], "--set", f"phases.*.gradient_accumulation_steps={accumulated}"),
            *("--set", "zero_optimization.reduce_bucket_size=1000000"),
            *("--set", f"task.max_train_samples={FEWER['max_train_samples']}"),
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


OLD, NEW = Hyperparameters(0.01, 0.1), Hyperparameters(0.02, 0.0, (0.8, 0.98), 1e-6)
SAVED_AT, TRAINED = 3, 5


@dataclass(frozen=True)
class Setting:
    """What the engine file says, and what it says in the run that goes on from a checkpoint, beside the recipe."""

    stage: int = 0
    words: dict[str, Any] = field(default_factory=dict)
    new_words: dict[str, Any] = field(default_factory=dict)


def _block(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True}


def _schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


_FP16, _BF16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}, {"bf16": {"enabled": True}}
_WINDOW = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7}}
_ADAM = {"lr": 0.02, "weight_decay": 0.0, "betas": [0.8, 0.98], "eps": 1e-6}
_WARMUP = {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_type": "linear"}
_CYCLE = {"cycle_min_lr": 1e-3, "cycle_first_step_size": 4}
SETTINGS = {
    **{f"torch AdamW, stage {stage}": Setting(stage) for stage in (0, 3)},
    **{f"fp16, stage {stage}": Setting(stage, _FP16, _WINDOW) for stage in (0, 1, 3)},
    "bf16, stage 2": Setting(2, _BF16, _BF16),
    "AdamW of DeepSpeed, stage 3": Setting(3, _block("AdamW", lr=0.01), _block("AdamW", **_ADAM)),
    "SGD": Setting(1, _block("SGD", lr=0.01, momentum=0.5), _block("SGD", lr=0.02, momentum=0.9, nesterov=True)),
    "WarmupDecayLR": Setting(
        2,
        _schedule("WarmupDecayLR", warmup_max_lr=0.01, **_WARMUP),
        _schedule("WarmupDecayLR", warmup_max_lr=0.02, **_WARMUP),
    ),
    "OneCycle": Setting(
        0, _schedule("OneCycle", cycle_max_lr=0.01, **_CYCLE), _schedule("OneCycle", cycle_max_lr=0.02, **_CYCLE)
    ),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(torch.tanh(self.body(x))).float() - 1).pow(2).mean()


def started(setting: Setting, words: dict[str, Any], base: Hyperparameters) -> engine.Engine:
    net = Net()
    # a group of a weight and a vector where neither decays, and two where one does
    groups = parameter_groups(net, [GroupRule(params="head.*")], [], base)
    zero = {"stage": setting.stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": zero} | words
    config["gradient_clipping"] = 1.0 if base is OLD else 0.5
    return engine.start_engine(net, groups, config, base, lambda step: 0.9**step)


def train(running: engine.Engine, until: int) -> list[torch.Tensor]:
    """What this rank holds of the weights after the steps."""
    while running.global_steps < until:
        generator = torch.Generator().manual_seed(10 * running.global_steps + distributed.rank())
        rows = torch.randn(4, 6, generator=generator).to(next(running.module.parameters()).dtype)
        running.backward(running(rows))
        running.step()
    return [getattr(p, "ds_tensor", p).detach().clone() for p in running.module.parameters()]


def settings(running: engine.Engine) -> list[dict[str, Any]]:
    """Every group's hyperparameters but the rate; JSON values."""
    kept = [{k: v for k, v in g.items() if k not in ("params", "step", "lr")} for g in running.optimizer.param_groups]
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in kept]


def gone_on(folder: Path, setting: Setting, words: dict[str, Any], base: Hyperparameters) -> dict[str, Any]:
    """Go on from the checkpoint with the settings of `words` and `base`."""
    running = started(setting, words, base)
    fresh, in_files = settings(running), engine.OptimizerSettings(running)
    running.load_checkpoint(str(folder), tag="saved")
    loaded = settings(running)
    in_files.restore(running)
    found = {"fresh": fresh, "loaded": loaded, "now": settings(running)}
    found["rates"] = [group["lr"] for group in running.optimizer.param_groups]
    found["clip"] = getattr(running.optimizer, "clip_grad", None)
    scaler = getattr(running.optimizer, "loss_scale_config", None) or getattr(running.optimizer, "loss_scaler", None)
    found["scaler"] = [getattr(scaler, name, None) for name in ("scale_window", "cur_scale", "cur_iter")]
    found["weights"] = train(running, TRAINED)
    found["last_rate"] = running.optimizer.param_groups[0]["lr"]
    engine.stop_engine(running)
    return found


def run_setting(setting: Setting, folder: Path) -> dict[str, Any]:
    running = started(setting, setting.words, OLD)
    train(running, SAVED_AT)
    running.save_checkpoint(str(folder), tag="saved", save_latest=False)
    whole = train(running, TRAINED)
    engine.stop_engine(running)
    same, other = gone_on(folder, setting, setting.words, OLD), gone_on(folder, setting, setting.new_words, NEW)
    weights = same.pop("weights"), other.pop("weights")
    bits = [all(torch.equal(*pair) for pair in zip(whole, found, strict=True)) for found in weights]
    return {"same": same | {"bits": bits[0]}, "other": other | {"bits": bits[1]}}


def main(recipe: str, out: Path) -> None:
    get_accelerator().is_fp16_supported = lambda: True
    loop.Training.save = save_and_export
    loop.SETTLE_EVERY = 3  # other steps than those of the records, and of the stops
    distributed.start_logging()
    distributed.start()
    distributed.on_main(lambda: Path(data_of(recipe), "packed.txt").write_text("\n".join(DOCUMENTS)))
    first = job_of(recipe, "plain-zero0-fp32", out / "teacher")
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
    seen = {name: run_setting(setting, out / name.replace(" ", "-")) for name, setting in SETTINGS.items()}
    distributed.on_main(lambda: (out / "settings.json").write_text(json.dumps(seen)))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end
