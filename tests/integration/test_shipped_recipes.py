"""The recipes of ds_configs/recipes: sound on small and large tasks, with the numbers of the originals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launching import ROOT

from ds_trainer.engine.engine_file import settled_numbers
from ds_trainer.files.reading import read_json
from ds_trainer.recipe.recipe import Recipe, parse_recipe
from ds_trainer.recipe.schedules import steps_of
from ds_trainer.tasks.data import steps_for
from ds_trainer.techniques.prune.prune import threshold_schedule
from ds_trainer.techniques.technique import PhaseLength

RECIPES = sorted((ROOT / "ds_configs" / "recipes").glob("*.json"))
SMALL, LARGE = 2_500, 70_000
"""Examples of RTE, and of SST-2 or SQuAD."""

_SOFT = "prune.initial_warmup=1 prune.final_warmup=2 prune.schedule=cubic prune.mask_init=constant prune.mask_scale=0 "
_SOFT += "prune.mask_scores_learning_rate=0.01 start_from=@model learning_rate=3e-05 loss:task=0.5 "
_SOFT += "loss:distill.logits=0.5 distill.temperature=2 distill.alpha_ce=0.5 distill.alpha_distil=0.5 "
_DISTIL = "per_device_train_batch_size=5 warmup_steps=0.05 num_train_epochs=3 student.layers=[0,2,4,7,9,11] "
_DISTIL += "distill.temperature=2 distill.alpha_ce=5 distill.alpha_cos=1 distill.freeze_pos_embs=true "
_THREE = "num_train_epochs=3 train_batch_size=8 "
ORIGINALS = {
    "squad_fine_prune_distil/prune": _SOFT + "prune.pruning_method=sigmoied_threshold prune.initial_threshold=0 "
    "prune.final_threshold=0.1 prune.regularization=l1 prune.final_lambda=400 loss:prune.penalty=400 "
    "num_train_epochs=10 train_batch_size=16",
    "glue_fine_prune_distil/prune": _SOFT + "prune.pruning_method=topK prune.initial_threshold=1 "
    "prune.final_threshold=0.15 num_train_epochs=6 train_batch_size=32",
    "mlm_distilbert/distil": _DISTIL + "distill.alpha_mlm=2 distill.restrict_ce_to_mask=false train_batch_size=4000 "
    "loss:task=2 loss:distill.logits=5 loss:distill.cos=1 task.mlm_smoothing=0.7 task.mlm_mask_prop=0.15",
    "clm_distilgpt2/distil": _DISTIL + "distill.alpha_clm=0.5 train_batch_size=1000 loss:task=0.5",
    "squad_distil/distil": _THREE + "learning_rate=5e-05 distill.temperature=2 distill.alpha_squad=0.5 loss:task=0.5",
    "glue_deebert/exits": _THREE + "learning_rate=2e-05 exits.training=heads exits.pooling=first "
    "exits.criterion=entropy exits.early_exit_entropy=0.1 loss:task=0 loss:exits.heads=1",
}
"""What decides the training of each original, by recipe and phase: fields of the phase, its techniques and its loss."""


def recipe_of(name: str) -> Recipe:
    return parse_recipe(read_json(ROOT / "ds_configs" / "recipes" / f"{name}.json", "the recipe"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_holds_on_small_and_large_tasks(path: Path) -> None:
    """It parses, comments and all, has steps to take, and the threshold is held for no more of them than there are."""
    for phase in recipe_of(path.stem).phases:
        for examples in (SMALL, LARGE):
            batch = settled_numbers({}, phase, 1).train_batch_size
            total = phase.max_steps or steps_for(phase.num_train_epochs or 0, examples, batch)
            assert total > 0 or not phase.trains
            if phase.techniques.prune:
                threshold_schedule(
                    phase.techniques.prune, PhaseLength(total, steps_of(phase.warmup_steps, total), seed=0)
                )


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_recipe_of_an_original_says_the_originals_numbers(name: str) -> None:
    """What the original's command line gives is what the phase of that recipe has."""
    recipe_name, phase_name = name.split("/")
    recipe = recipe_of(recipe_name).model_dump(exclude_unset=True)
    phase = next(phase for phase in recipe["phases"] if phase["name"] == phase_name)
    fields = phase | phase["techniques"] | {"task": recipe["task"]}
    for word in ORIGINALS[name].split():
        path, value = word.split("=")
        first, *more = path.split(":") if ":" in path else path.split(".")
        found = fields[first][more[0]] if more else fields[first]
        assert str(found) == value or found == json.loads(value), word


SHARES = {"half": 0.5, "quarter": 0.25, "eighth": 0.125, "sparse": 0.15}


@pytest.mark.parametrize("name", ["sst2_cut", "squad_cut", "glue_cut", "wnut17_cut"])
def test_the_phases_of_a_recipe_of_cuts_keep_what_they_are_named_after(name: str) -> None:
    """Each is a share of the dense model, which teaches them all; what was pruned weight by weight keeps its zeros."""
    finetune, *cuts = [phase for phase in recipe_of(name).phases if phase.trains]
    kept = {f"@{finetune.name}": 1.0}
    for phase in cuts:
        assert phase.cut is not None
        assert phase.techniques.distill is not None
        kept[f"@{phase.name}"] = phase.cut.keep * kept[phase.start_from]
        assert kept[f"@{phase.name}"] == SHARES[phase.name]
        assert phase.techniques.distill.teacher == f"@{finetune.name}"
        assert phase.cut.cuts_blocks or phase.techniques.keep_zeros
        assert (phase.warmup_steps, phase.dropout) == (0.1, 0.0)


def test_the_optimizers_and_warm_ups_of_originals_are_theirs() -> None:
    """Those that a recipe gives, and the defaults that it leaves out: rate, decay, betas, epsilon, clipping.

    Fine-pruning freezes the embeddings.
    """
    usual, of_distilbert = ((0.9, 0.999), 1e-8, 0, 1), ((0.9, 0.98), 1e-6, 0, 5)
    optimizers = {"mlm_distilbert": (5e-4, *of_distilbert), "clm_distilgpt2": (5e-4, *of_distilbert)}
    optimizers |= {"squad_distil": (5e-5, *usual), "glue_deebert": (2e-5, *usual)}
    for name, expected in optimizers.items():
        numbers = settled_numbers({}, recipe_of(name).phases[-1], 1)
        ours = numbers.optimizer
        assert (ours.lr, ours.betas, ours.eps, ours.weight_decay, numbers.max_grad_norm) == expected, name
    for name, steps, warmup in (("squad_fine_prune_distil", 55_330, 5_400), ("glue_fine_prune_distil", 73_632, 12_000)):
        prune = recipe_of(name).phases[-1]
        assert steps_of(prune.warmup_steps, steps) == pytest.approx(warmup, rel=1e-3)
        assert [(rule.params, rule.frozen) for rule in prune.groups] == [("*.embeddings.*", True)]
