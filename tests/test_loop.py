"""Which checkpoint is the best, and when a phase ends."""

from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_trainer import phase
from ds_trainer.config.recipe import parse_recipe
from ds_trainer.engine.checkpoint import Best, CheckpointState
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.techniques.technique import PhaseLength

STATE = CheckpointState(
    step=4,
    examples=4,
    batch_size=1,
    order_batch_size=1,
    identity={},
    asked=True,
    evaluated=4,
    scores={},
    report=None,
    techniques={},
    total=10,
    phase={},
)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


def test_the_best_checkpoint_is_that_of_the_lowest_perplexity(tmp_path):
    """And not the first and worst, which would be exported, and the better ones deleted; unless the recipe says so."""
    for step, perplexity in ((2, 28428.0), (4, 24932.0), (6, 25377.0)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = replace(STATE, step=step, evaluated=step, scores={"perplexity": perplexity})
        position = asdict(state) | {"order": 1}
        del position["order_batch_size"]
        write_marker(tmp_path / f"checkpoint-{step}", {}, position)
    fields = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "metric_for_best_model": "perplexity"}
    for said, best in (({}, 4), ({"greater_is_better": True}, 2)):
        recipe = parse_recipe({"task": {"name": "mlm", "dataset": "x"}, "phases": [fields | said]})
        spec, task = recipe.phases[0], SimpleNamespace(spec=recipe.task)
        plan = phase.PhasePlan(spec, spec.techniques, task, "", PhaseLength(6, 0, 0), CONFIG, None, tmp_path)
        assert plan.checkpoints.best_one() == tmp_path / f"checkpoint-{best}"


def test_patience_counts_the_evaluations_since_the_best():
    """Equal scores and those that are not finite are no better; other metrics do not count."""
    less, more = Best("loss", greater=False), Best("loss", greater=True)
    for curve, waited in (([], 0), ([3.0], 0), ([3.0, 2.0], 0), ([2.0, 3.0, 2.0, nan], 3), ([nan, 2.0, 4.0], 1)):
        assert less.waited({"loss": curve, "accuracy": [1.0, 0.0]}) == waited
        assert more.waited({"loss": [-score for score in curve]}) == waited


@pytest.mark.parametrize(
    ("patience", "curve", "ends"),
    [
        (2, [2.0, 3.0], False),
        (2, [2.0, 3.0, 4.0], True),
        (2, [4.0, 3.0, 2.0], False),
        (None, [2.0, 3.0, 4.0], False),
    ],
)
def test_a_phase_ends_where_less_is_better_and_its_patience_is_used_up(patience, curve, ends, monkeypatch):
    """Perplexities that rise are worse. Without patience no metric is asked for at each step."""
    fields = {"max_steps": 6, "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "perplexity"}
    recipe = parse_recipe(
        {"task": {"name": "mlm", "dataset": "x"}, "phases": [fields | {"early_stopping_patience": patience}]}
    )
    if patience is None:
        monkeypatch.setattr(phase.PhasePlan, "checkpoints", None)
    spec, task = recipe.phases[0], SimpleNamespace(spec=recipe.task)
    plan = phase.PhasePlan(spec, spec.techniques, task, "", PhaseLength(6, 0, 0), CONFIG, None, Path())
    assert plan.is_over(4, {"perplexity": curve}) is ends
    assert plan.is_over(6, {})
