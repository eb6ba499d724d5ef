"""Models with exit heads, as a phase trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.exit_models import randomise

from ds_trainer.config.recipe import ExitsSpec, TextSpec, parse_recipe
from ds_trainer.deploy.export import save_folded
from ds_trainer.engine.optim import Hyperparameters
from ds_trainer.phase import PhasePlan
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.technique import PhaseLength

LENGTH = PhaseLength(total=4, warmup=0, seed=0)


SENTENCES = ["it rains", "it is wet", "it is dry today", "the cat sat on the mat", "no", "why is it so very wet"]


BOTH = ["heads", "distill"]


DEPTH = 3


def spec_of(folder: str, **fields: Any) -> TextSpec:
    path = Path(folder)
    files = {"data_dir": str(path.parent), "train_file": f"{path.name}.csv", "validation_file": f"{path.name}.csv"}
    regression = path.name == "scores"
    return TextSpec(name="text", text_columns=["text"], label_column="label", regression=regression, **files, **fields)


def attached(folder: str, cache: Path, source: str | None = None, **fields: Any):
    """Task, model with heads that disagree, technique and the latest forward on a batch of 10."""
    task = build_task(spec_of(folder), folder, cache)
    technique = Exits(ExitsSpec(**fields), LENGTH, task)
    model = technique.attach(task.build_model(source or folder))
    if source is None:
        torch.manual_seed(4)
        randomise(model.exit_heads, 0.5)
    batch = task.collate(task.examples("train"), range(10))
    return task, model, technique, Forward(batch, model(**batch.inputs), 0)


def plan_for(folder: str, cache: Path, **techniques: Any) -> PhasePlan:
    recipe = parse_recipe({"phases": [{"max_steps": 1, "techniques": techniques}]})
    (phase,) = recipe.phases
    task = build_task(spec_of(folder), folder, cache)
    return PhasePlan(phase, phase.techniques, task, folder, LENGTH, {}, Hyperparameters(1e-3), cache)


def exported(plan: PhasePlan, folder: Path) -> tuple[Any, list[Any]]:
    """Train nothing, fold and save as after the last step; the folded model, and its techniques."""
    model, techniques = plan.build()
    if hasattr(model, "exit_heads"):
        torch.manual_seed(4)
        randomise(model.exit_heads, 0.5)
    for technique in techniques:
        technique.on_step(LENGTH.total)
    batch = plan.task.collate(plan.task.examples("train"), range(8))
    save_folded(model.eval(), techniques, plan.task, batch, folder)
    return model, techniques
