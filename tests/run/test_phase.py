"""Which checkpoint is the best, and when a phase ends."""

import dataclasses
from math import nan
from types import SimpleNamespace

import pytest

from ds_trainer.engine.checkpoint import Best, Checkpoint
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.run import phase
from ds_trainer.techniques.technique import PhaseLength

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


@pytest.fixture
def plan(tmp_path):
    """A phase of masked language modelling whose best checkpoint is told by its perplexity."""

    def of(**fields) -> phase.PhasePlan:
        spec = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "metric_for_best_model": "perplexity"} | fields
        recipe = parse_recipe({"task": {"name": "mlm", "dataset": "x"}, "phases": [spec]})
        spec, task = recipe.phases[0], SimpleNamespace(spec=recipe.task)
        return phase.PhasePlan(spec, spec.techniques, task, "", PhaseLength(6, 0, 0), CONFIG, None, tmp_path)

    return of


def test_the_best_checkpoint_is_that_of_the_lowest_perplexity(plan, tmp_path):
    """The first and worst would otherwise be exported, and the better ones deleted; the recipe can say otherwise.

    A score that is not finite is none.
    """
    for step, perplexity in ((1, nan), (2, 28428.0), (4, 24932.0), (6, 25377.0)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        position = dict.fromkeys([field.name for field in dataclasses.fields(Checkpoint)][1:], 1)
        position |= {"step": step, "evaluated": step, "scores": {"perplexity": perplexity}}
        write_marker(tmp_path / f"checkpoint-{step}", {}, position)
        if step == 1:
            assert plan().checkpoints.best_one() is None
    assert plan().checkpoints.best_one() == tmp_path / "checkpoint-4"
    assert plan(greater_is_better=True).checkpoints.best_one() == tmp_path / "checkpoint-2"


def test_patience_counts_the_evaluations_since_the_best():
    """Equal scores and those that are not finite are no better; other metrics do not count."""
    less, more = Best("loss", greater=False), Best("loss", greater=True)
    for curve, waited in (([], 0), ([3.0], 0), ([3.0, 2.0], 0), ([2.0, 3.0, 2.0, nan], 3), ([nan, 2.0, 4.0], 1)):
        assert less.waited({"loss": curve, "accuracy": [1.0, 0.0]}) == waited
        assert more.waited({"loss": [-score for score in curve]}) == waited


def test_a_phase_ends_where_less_is_better_and_its_patience_is_used_up(plan, monkeypatch):
    """Perplexities that rise are worse. Without patience no metric is asked for at each step."""
    patient = plan(early_stopping_patience=2)
    for curve, ends in (([2.0, 3.0], False), ([2.0, 3.0, 4.0], True), ([4.0, 3.0, 2.0], False)):
        assert patient.is_over(4, {"perplexity": curve}) is ends
    monkeypatch.setattr(phase.PhasePlan, "checkpoints", None)
    assert not plan().is_over(4, {"perplexity": [2.0, 3.0, 4.0]})
    assert patient.is_over(6, {})
    assert plan().is_over(6, {})
