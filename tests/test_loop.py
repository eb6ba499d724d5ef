"""A phase that starts, or goes on from a checkpoint, is put together in an order that matters."""

from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from ds_trainer import loop, phase
from ds_trainer.config.recipe import parse_recipe
from ds_trainer.engine.checkpoint import Best, CheckpointState, WholeCheckpoint
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.ranks.failures import OutOfMemoryError
from ds_trainer.tasks.evaluation import Evaluation
from ds_trainer.techniques.technique import PhaseLength, Technique

CHECKPOINT = Path("checkpoint-4")
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
    techniques={"noted": {"value": 3}},
    total=10,
    phase={},
)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


class Noted(Technique):
    """Writes down the hooks that are called."""

    name = "noted"

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def start(self, device) -> None:
        self.notes.append("start")

    def stop(self) -> None:
        self.notes.append("stop")

    def resume(self, state) -> None:
        self.notes.append(f"resume {state['value']}")

    def state(self):
        return {"value": 7}


@pytest.fixture
def notes() -> list[str]:
    return []


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


@pytest.fixture
def training_from(notes, monkeypatch):
    """Start the training of a phase that goes on from a checkpoint, with stubs for what takes a process group."""
    ds_engine = SimpleNamespace(device=None, train_batch_size=lambda: 1)
    settings = SimpleNamespace(restore=lambda _: None, changes_since=lambda _: "")
    for name, stub in (("start_engine", ds_engine), ("OptimizerSettings", settings)):
        monkeypatch.setattr(f"ds_trainer.engine.engine.{name}", lambda *_, stub=stub: stub)
    monkeypatch.setattr(loop, "StepWatch", lambda *_: None)
    monkeypatch.setattr(phase.PhasePlan, "identity", lambda *_: {})
    best = replace(STATE, step=2, techniques={"noted": {"value": 2}})
    checkpoints = SimpleNamespace(
        load=lambda _, place, __: notes.append(f"load {place}"),
        best_saved=lambda: WholeCheckpoint(Path("checkpoint-2"), best),
    )
    report = SimpleNamespace(open=lambda *_: notes.append("open"))
    task = SimpleNamespace(examples=lambda _: SimpleNamespace(lengths=[1]))
    best_of = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_steps": 2, "eval_steps": 2}
    spec = parse_recipe({"phases": [{"max_steps": 10, **best_of}]}).phases[0]
    monkeypatch.setattr(phase.PhasePlan, "checkpoints", checkpoints)
    plan = phase.PhasePlan(spec, spec.techniques, task, "", PhaseLength(10, 0, 0), CONFIG, None, Path())
    objective = SimpleNamespace(techniques=[Noted(notes)])
    monkeypatch.setattr(phase.PhasePlan, "prepare", lambda _: phase.PreparedPhase(nn.Linear(1, 1), [], objective))

    def make(resumed: bool) -> loop.Training:
        its = replace(plan, resumed=WholeCheckpoint(CHECKPOINT, STATE) if resumed else None)
        return loop.start_training(its, report, None)

    return make


def test_techniques_have_their_state_before_they_start(training_from, notes):
    """They do not measure again what the run that they continue has measured."""
    assert training_from(resumed=True).progress.step == 4
    assert notes == ["load checkpoint-4", "resume 3", "start", "open"]


def test_a_new_run_resumes_nothing(training_from, notes):
    """Its techniques start, and its report opens."""
    assert training_from(resumed=False).progress.step == 0
    assert notes == ["start", "open"]


def test_a_start_without_memory_says_where_it_was(training_from, monkeypatch):
    """A teacher may be too large for the memory, too: the message has the step, the arithmetic and the way out."""

    def too_large(*_) -> None:
        raise MemoryError("no room for the teacher")

    monkeypatch.setattr(Noted, "start", too_large)
    with pytest.raises(OutOfMemoryError, match=r"as training started: no room.* after step 4 .* ZeRO stage 0 .*Lower"):
        training_from(resumed=True)


def test_a_metric_that_no_score_has_costs_no_step(training_from, notes):
    """It shows at the first evaluation, and the corrected recipe goes on from that step."""
    training = training_from(resumed=True)
    training.progress.step = 6
    training.check_finite = lambda: None
    training.score = lambda step: Evaluation({"accuracy": 0.5})
    training.save = lambda: notes.append("save")
    training.plan = replace(training.plan, phase=training.plan.phase.model_copy(update={"metric_for_best_model": "f1"}))
    with pytest.raises(ValueError, match='metric_for_best_model is "f1"; the scores are accuracy'):
        training.evaluate_if_due()
    assert notes[-1] == "save"


def test_going_back_to_the_best_takes_the_techniques_back_too(training_from, notes):
    """Weights and state are of one step, which is that of what is exported."""
    training = training_from(resumed=True)
    training.score = lambda step: notes.append(f"score {step}")
    assert training.choose()[0] == 2
    assert notes[-3:] == ["load checkpoint-2", "resume 2", "score 2"]
    assert training.progress.step == 4, "how far training has come"


def test_what_is_exported_has_the_techniques_as_they_were(training_from, notes, monkeypatch):
    """They are built anew, and resume the state that training has come to, which is read before they stop."""
    training = training_from(resumed=False)
    training.report = SimpleNamespace(totals=dict, trained_on={})
    monkeypatch.setattr(phase.PhasePlan, "build", lambda _: (nn.Linear(1, 1), training.objective.techniques))
    monkeypatch.setattr(loop, "export_trained", lambda _, rebuild, *__: rebuild() and {})
    monkeypatch.setattr("ds_trainer.engine.engine.stop_engine", lambda _: notes.append("engine stops"))
    training.finish(10, Evaluation())
    assert notes[-3:] == ["stop", "resume 7", "engine stops"]
