"""The recipes of ds_configs/recipes: sound on small and large tasks, and the originals' to the letter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from launching import ROOT

from ds_trainer.command import read_train_job, said_by
from ds_trainer.data import steps_for
from ds_trainer.engine_file import settled_numbers
from ds_trainer.json_file import read_json
from ds_trainer.models import create_folder, train_tokenizer
from ds_trainer.recipe import Phase, Recipe, parse_recipe
from ds_trainer.run import plan_phase
from ds_trainer.schedules import steps_of
from ds_trainer.techniques.prune import threshold_schedule
from ds_trainer.techniques.technique import Clock

RECIPES = sorted((ROOT / "ds_configs" / "recipes").glob("*.json"))
SMALL, LARGE = 2_500, 70_000
"""Examples of RTE, and of SST-2 or SQuAD."""


def recipe_of(name: str) -> Recipe:
    return parse_recipe(read_json(ROOT / "ds_configs" / "recipes" / f"{name}.json", "the recipe"))


def phase_of(recipe: Recipe, name: str) -> Phase:
    return next(phase for phase in recipe.phases if phase.name == name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_holds_on_small_and_large_tasks(path: Path) -> None:
    """It parses, comments and all, has steps to take, and the threshold is held for no more of them than there are."""
    for phase in recipe_of(path.stem).phases:
        for examples in (SMALL, LARGE):
            batch = settled_numbers({}, said_by(phase), 1).train_batch_size
            total = phase.max_steps or steps_for(phase.num_train_epochs or 0, examples, batch)
            assert total > 0
            if phase.techniques.prune:
                threshold_schedule(phase.techniques.prune, Clock(total, steps_of(phase.warmup_steps, total), seed=0))


def test_movement_pruning_is_the_originals() -> None:
    """Its embeddings are frozen, and its warm-up is the original's share of the steps, on SQuAD and on MNLI."""
    for name, steps, warmup in (("squad_fine_prune_distil", 55_330, 5_400), ("glue_fine_prune_distil", 73_632, 12_000)):
        phase = phase_of(recipe_of(name), "prune")
        prune, distill = phase.techniques.prune, phase.techniques.distill
        assert prune
        assert distill
        assert [(rule.params, rule.frozen) for rule in phase.groups] == [("*.embeddings.*", True)]
        assert steps_of(phase.warmup_steps, steps) == pytest.approx(warmup, rel=1e-3)
        assert (prune.initial_warmup, prune.final_warmup, prune.schedule) == (1, 2, "cubic")
        assert (prune.mask_init, prune.mask_scale, prune.mask_scores_learning_rate) == ("constant", 0, 1e-2)
        assert (phase.learning_rate, distill.temperature) == (3e-5, 2)
        assert (phase.loss["task"], phase.loss["distill.logits"]) == (0.5, 0.5)


def test_distilbert_is_the_originals() -> None:
    """Adam's betas and epsilon, the rate, the clipping: as the optimizer of a run gets them, for BERT and for GPT-2."""
    for name, terms in (("mlm_distilbert", (5, 2, 1)), ("clm_distilgpt2", (5, 0.5, 1))):
        phase = phase_of(recipe_of(name), "distil")
        numbers = settled_numbers({}, said_by(phase), 1)
        assert (numbers.adam_beta1, numbers.adam_beta2, numbers.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert (numbers.learning_rate, numbers.weight_decay, numbers.max_grad_norm) == (5e-4, 0, 5)
        assert phase.warmup_steps == 0.05
        assert tuple(phase.loss[term] for term in ("distill.logits", "task", "distill.cos")) == terms


def test_the_defaults_that_recipes_of_originals_leave_out_are_the_scripts() -> None:
    """What their comments say of weight decay, betas, epsilon, clipping and warm-up holds of a run."""
    for name, rate, batch in (("squad_distil", 5e-5, 8), ("glue_deebert", 2e-5, 8)):
        for phase in recipe_of(name).phases:
            numbers = settled_numbers({}, said_by(phase), 1)
            assert (numbers.learning_rate, numbers.train_batch_size, phase.num_train_epochs) == (rate, batch, 3)
            assert (numbers.weight_decay, phase.warmup_steps, numbers.max_grad_norm) == (0, 0, 1)
            assert (numbers.adam_beta1, numbers.adam_beta2, numbers.adam_epsilon) == (0.9, 0.999, 1e-8)


def write_task(folder: Path, rows: int) -> list[str]:
    """The flags of a labelled task of so many training examples."""
    draw = random.Random(0)
    kinds = [draw.choice(list(WORDS)) for _ in range(rows)]
    lines = [f"{draw.choice(WORDS[kind].split())},{kind}" for kind in kinds]
    folder.mkdir()
    for name, part in (("train.csv", lines), ("validation.csv", lines[:20])):
        (folder / name).write_text("\n".join(["text,kind", *part]) + "\n")
    fields = {"train_file": "train.csv", "validation_file": "validation.csv", "text_columns": '["text"]'}
    fields |= {"label_column": "kind", "max_seq_length": "16"}
    settings = [part for name, value in fields.items() for part in ("--set", f"task.{name}={value}")]
    return ["--task_name", "text", "--data_dir", str(folder), *settings]


def test_fine_pruning_plans_on_a_small_task(tmp_path: Path) -> None:
    """On 2,500 examples, where 12,000 warm-up steps were more than the phase had: all but the training is done."""
    model: dict[str, Any] = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1}
    model |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32}
    create_folder(model, train_tokenizer([*WORDS.values()] * 5, 64, True), tmp_path / "model", seed=0)
    files = [
        "--deepspeed_config",
        "ds_configs/zero2.json",
        "--recipe",
        "ds_configs/recipes/glue_fine_prune_distil.json",
    ]
    places = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    job = read_train_job([*files, *places, *write_task(tmp_path / "data", SMALL)])
    teacher, prune = job.recipe.phases
    source = str(tmp_path / "model")
    plan = plan_phase(job, prune, source, teacher=source)
    built, groups, _ = plan.prepare()
    assert plan.clock.total == 469  # 6 epochs of 2,500 by 32
    assert plan.clock.warmup == 76  # 0.163 of them
    frozen = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in built.named_parameters() if ".embeddings." in name}
    assert len(frozen) == 5  # words, positions, token types, the norm's weight and bias
    assert {group.learning_rate for group in groups} == {3e-5, 1e-2}
    assert plan_phase(job, teacher, source).clock.total == 235
