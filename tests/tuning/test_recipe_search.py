"""The tuning of a recipe: what is tried, which runs end early, what wins, and that a second call goes on.

The runs are made up here; `tests/integration/test_tune_recipe.py` has real ones.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ds_trainer.cli.tune import read_tune_job
from ds_trainer.config.jobs import RecipeTuneJob
from ds_trainer.ranks.failures import NothingFitsError, TuningFailedError, UserError
from ds_trainer.tuning import recipe_search
from ds_trainer.tuning.recipe_results import are_unbeaten, table
from ds_trainer.tuning.recipe_search import tune_recipe
from ds_trainer.tuning.recipe_trials import ENDED_EARLY, NO_SCORE, RecipeTrial, held_out_settings, run_recipe_trial
from ds_trainer.tuning.space import Candidate
from ds_trainer.tuning.trials import FAILED, HUNG, MEASURED, NO_MEMORY, NOT_FINITE, REFUSED, SKIPPED

RATE, STEPS = "phases.prune.learning_rate", "phases.finetune.max_steps"
FACTS = {"gpus": 0, "held_out": 100, "data": "d", "machine": {}}


@dataclass
class MadeUp:
    """Runs of a given curve, the last value of which is their score, or of an outcome; `calls` are those that ran."""

    result: Callable[[dict, int], list[float] | str]
    calls: list[dict] = field(default_factory=list)

    def __call__(self, job, candidate, folder, cannot_win) -> RecipeTrial:
        self.calls.append(dict(candidate.settings))
        result = self.result(self.calls[-1], len(self.calls))
        if isinstance(result, str):
            return RecipeTrial(candidate, result, "made up", lasted=0.001)
        curve = []
        for step, score in enumerate(result, start=1):
            curve.append([10 * step, score])
            if cannot_win(*curve[-1]):
                return RecipeTrial(candidate, ENDED_EARLY, "made up", curve=curve, lasted=0.001)
        costs = {"MiB": 10.0 + len(self.calls)}
        (folder / "model").mkdir(parents=True)
        return RecipeTrial(
            candidate, MEASURED, run=folder.name, score=result[-1], curve=curve, costs=costs, lasted=0.001
        )


@pytest.fixture
def job(tiny_recipe, write_json, tmp_path) -> Callable[..., RecipeTuneJob]:
    def make(space: dict | str, *more: str, held_out: float = 0.1) -> RecipeTuneJob:
        recipe = copy.deepcopy(tiny_recipe)
        recipe["task"]["held_out"] = held_out
        files = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", write_json("recipe.json", recipe)]
        inline = space if isinstance(space, str) else json.dumps(space)
        metric = [] if "--metric" in more else ["--metric", "eval/accuracy"]
        return read_tune_job([*files, "--output_dir", str(tmp_path / "out"), "--recipe_space", inline, *metric, *more])

    return make


def run(monkeypatch, job: RecipeTuneJob, result, facts: dict = FACTS):
    """The tuning's results, and the settings of the runs that were started."""
    runs = MadeUp(result)
    monkeypatch.setattr(recipe_search, "run_recipe_trial", runs)
    monkeypatch.setattr(recipe_search, "measured_on_one_rank", lambda job, what: facts)
    return tune_recipe(job), runs.calls


def test_the_best_score_wins_and_its_recipe_is_written(monkeypatch, job, tmp_path):
    """The user's own is the first; the file is the user's with the winner's value, and `--recipe` takes it."""
    made = job({RATE: [1e-3, 2e-3, 3e-3]}, "--set", "phases.prune.dropout=0.1", "--seed", "7")
    scores = {None: 0.5, 1e-3: 0.6, 2e-3: 0.9, 3e-3: 0.7}
    tuned, calls = run(monkeypatch, made, lambda values, _: [scores[values.get(RATE)]])
    assert calls == [{}, {RATE: 1e-3}, {RATE: 2e-3}, {RATE: 3e-3}]
    assert dict(tuned.winner.candidate.settings) == {RATE: 2e-3}
    written = json.loads((made.output / "tuned_recipe.json").read_text())
    expected = copy.deepcopy(made.recipe_file)
    expected["phases"][1]["learning_rate"] = 2e-3
    assert written == expected
    assert (written["seed"], written["phases"][1]["dropout"]) == (7, 0.1)
    assert "score_held_out" not in json.dumps(written)
    page = (made.output / "tuned_recipe.md").read_text()
    assert f"--recipe {made.output}/tuned_recipe.json" in page
    assert "prune.learning_rate 0.002: accuracy 0.9000 on 100 held-out examples, the user's own recipe 0.5000" in page
    assert "beyond one standard error of so many examples, 0.0300" in page
    assert (made.output / "tuned_recipe.png").stat().st_size > 1000


def test_less_wins_where_less_is_better(monkeypatch, job):
    """Of seconds that an exit technique measures, and of any score where the recipe says so."""
    made = job({RATE: [1e-3]}, "--metric", "early_exit/agreement", "--set", "phases.prune.greater_is_better=false")
    tuned, _ = run(monkeypatch, made, lambda values, _: [0.4 if values else 0.5])
    assert dict(tuned.winner.candidate.settings) == {RATE: 1e-3}
    assert [row["early_exit/agreement"] for row in table(tuned, made.metric)] == ["0.4000", "0.5000"]
    with pytest.raises(UserError, match=r'is a higher or a lower "early_exit/seconds" better.* such as accuracy'):
        job({RATE: [1e-3]}, "--metric", "early_exit/seconds")  # no phase has exits


@pytest.mark.parametrize(("best", "where"), [(0.52, "within"), (0.56, "beyond")])
def test_a_difference_that_may_be_chance_is_told(monkeypatch, job, best, where):
    """The standard error of 0.5 on 100 examples is 0.05."""
    made = job({RATE: [1e-3]})
    run(monkeypatch, made, lambda values, _: [best if values else 0.5])
    assert f"The difference is {where} one standard error" in (made.output / "tuned_recipe.md").read_text()


def test_of_equal_scores_the_users_own_wins(monkeypatch, job):
    tuned, _ = run(monkeypatch, job({RATE: [1e-3]}), lambda *_: [0.5])
    assert tuned.winner is tuned.trials[0]
    assert tuned.winner.candidate.settings == ()


def test_settings_of_the_engine_file_are_in_the_command(monkeypatch, job):
    made = job({"gradient_clipping": [0.5], RATE: [1e-3]})
    run(monkeypatch, made, lambda values, _: [0.9 if values else 0.5])
    page = (made.output / "tuned_recipe.md").read_text()
    assert "--set gradient_clipping=0.5" in page
    assert f"--set {RATE}" not in page


def test_a_run_that_cannot_win_is_ended_early(monkeypatch, job):
    """From the fourth on, after a third of the steps, and not where it was better before."""
    curves = {None: [0.3, 0.6, 0.9], 1e-3: [0.3, 0.6, 0.8], 2e-3: [0.1, 0.1, 0.1], 3e-3: [0.9, 0.1, 0.1]}
    curves |= {6e-3: [0.1, 0.7, 0.9], 5e-3: [0.1, 0.1, 0.9]}
    made = job({RATE: [1e-3, 2e-3, 3e-3, 6e-3, 5e-3]})
    tuned, _ = run(monkeypatch, made, lambda values, _: [*curves[values.get(RATE)], 0.5])
    outcomes = {dict(trial.candidate.settings).get(RATE): trial for trial in tuned.trials}
    assert [rate for rate, trial in outcomes.items() if trial.outcome == ENDED_EARLY] == [5e-3]
    assert len(outcomes[5e-3].curve) == 2


@pytest.mark.parametrize("outcome", [FAILED, HUNG, NOT_FINITE, NO_MEMORY, NO_SCORE, REFUSED])
def test_a_run_without_a_score_is_a_result_and_the_search_goes_on(monkeypatch, job, outcome):
    made = job({RATE: [1e-3, 2e-3]})
    tuned, _ = run(monkeypatch, made, lambda values, _: outcome if values.get(RATE) == 1e-3 else [0.5])
    assert [trial.outcome for trial in tuned.trials] == [MEASURED, outcome, MEASURED]
    assert f"{outcome}: made up" in (made.output / "tuned_recipe.md").read_text()


def test_the_users_own_may_fail(monkeypatch, job):
    tuned, _ = run(monkeypatch, job({RATE: [1e-3]}), lambda values, _: [0.4] if values else FAILED)
    assert tuned.winner.score == 0.4


@pytest.mark.parametrize(("outcome", "error"), [(NO_MEMORY, NothingFitsError), (FAILED, TuningFailedError)])
def test_a_tuning_without_any_score_says_why(monkeypatch, job, outcome, error):
    with pytest.raises(error, match="made up"):
        run(monkeypatch, job({RATE: [1e-3]}), lambda *_: outcome)


def test_a_metric_that_the_run_has_not_ends_the_tuning(monkeypatch, job):
    with pytest.raises(UserError, match="--metric is eval/teacher/accuracy: made up"):
        run(monkeypatch, job({RATE: [1e-3]}, "--metric", "eval/teacher/accuracy"), lambda *_: NO_SCORE)


def test_a_used_up_budget_ends_the_search(monkeypatch, job, caplog):
    """Before a trial it is said what is tried and what is left."""
    caplog.set_level("INFO", "ds_trainer")
    tuned, calls = run(monkeypatch, job({RATE: [1e-3, 2e-3]}, "--budget", "0.001s"), lambda *_: [0.5])
    assert calls == [{}]
    assert caplog.messages[0] == "trial 1: the user's own recipe (00:00 of the budget left)"
    assert [trial.outcome for trial in tuned.trials] == [MEASURED, SKIPPED]


def test_combinations_that_are_wrong_are_refused_and_known_ones_not_repeated(monkeypatch, job):
    """A value of the user's own recipe is no new run."""
    made = job({STEPS: [60, 40], "phases.finetune.num_train_epochs": [None, 1]})
    tuned, calls = run(monkeypatch, made, lambda *_: [0.5])
    assert len(calls) == 4  # of five candidates, one is the user's own
    made = job({"phases.prune.save_steps": [4, None], "phases.prune.eval_steps": [4, None], RATE: [1e-3]},
               "--set", "phases.prune.eval_steps=4", "--set", "phases.prune.metric_for_best_model=null")  # fmt: skip
    made.recipe_file["phases"][1]["metric_for_best_model"] = "accuracy"
    tuned, calls = run(monkeypatch, made, lambda *_: [0.5])
    assert [trial.outcome for trial in tuned.trials].count(REFUSED) == 3


def test_a_second_call_goes_on(monkeypatch, job):
    """Killed in its last run, it starts that; with other data it starts again. Early ends do not change by it.

    All that is known counts, also where there is no time for a run.
    """
    curves = [[0.5, 0.6], [0.5, 0.6], [0.5, 0.6], [0.1, 0.1], [0.9, 0.9]]

    def killed(values: dict, number: int) -> list[float]:
        if number == 5:
            raise KeyboardInterrupt
        return curves[number - 1]

    made = job({RATE: [1e-3, 2e-3, 3e-3, 5e-3]})
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, made, killed)
    tuned, calls = run(monkeypatch, made, lambda *_: curves[-1])
    assert calls == [{RATE: 5e-3}]
    assert [trial.outcome for trial in tuned.trials] == [MEASURED, MEASURED, MEASURED, ENDED_EARLY, MEASURED]
    assert tuned.winner.score == 0.9
    again, calls = run(monkeypatch, made.model_copy(update={"budget": 0.001}), lambda *_: [0.5])
    assert (calls, again.trials) == ([], tuned.trials)
    shutil.rmtree(made.output / "trials")
    _, calls = run(monkeypatch, made, lambda *_: [0.5, 0.6], FACTS | {"data": "other"})
    assert len(calls) == 5


@pytest.mark.parametrize("varied", [False, True])
def test_another_model_or_teacher_in_the_same_folder_is_measured_anew(monkeypatch, job, tmp_path, varied):
    """Whether the recipe names the folder, or only a value that is tried; its code counts, a card or an export not."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text('{"model_type": "bert"}')
    save_file({"w": np.zeros(1)}, tmp_path / "teacher" / "model.safetensors")
    place, teacher = "phases.prune.techniques.distill.teacher", str(tmp_path / "teacher")
    fields = {"teacher": "@finetune" if varied else teacher, "alpha_distil": 1.0}
    made = job(
        {place: [teacher]} if varied else {RATE: [1e-3]},
        *("--set", f"phases.prune.techniques.distill={json.dumps(fields)}"),
    )
    for weight, calls in ((0, 2), (0, 0), (1, 1 if varied else 2)):
        save_file({"w": np.full(1, weight)}, tmp_path / "teacher" / "model.safetensors")
        shutil.rmtree(made.output / "trials", ignore_errors=True)
        assert len(run(monkeypatch, made, lambda *_: [0.5])[1]) == calls
    (tmp_path / "teacher" / "code").mkdir()
    for name, calls in (("README.md", 0), ("model.onnx", 0), ("code/layers.py", 1 if varied else 2)):
        (tmp_path / "teacher" / name).write_text("added")
        shutil.rmtree(made.output / "trials", ignore_errors=True)
        assert len(run(monkeypatch, made, lambda *_: [0.5])[1]) == calls


def test_a_range_is_sampled(monkeypatch, job):
    """Optuna comes within a factor of 2 of the best rate of four decades in 40 runs; whole numbers stay whole."""
    made = job({RATE: {"low": 1e-6, "high": 1e-2, "log": True}, STEPS: {"low": 10, "high": 99, "whole": True}})
    seen: list[dict] = []

    def score(values: dict, number: int) -> list[float]:
        if number > 40:
            raise KeyboardInterrupt
        seen.append(values)
        return [1 - abs(math.log10(values.get(RATE, 1e-2) / 1e-4)) / 4]

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, made, score)
    drawn = seen[1:]
    assert all(1e-6 <= values[RATE] <= 1e-2 for values in drawn)
    assert all(isinstance(values[STEPS], int) and 10 <= values[STEPS] <= 99 for values in drawn)
    assert any(0.5e-4 < values[RATE] < 2e-4 for values in drawn)
    assert min(values[RATE] for values in drawn) < 1e-4 < max(values[RATE] for values in drawn)


def test_only_models_of_the_front_are_kept(monkeypatch, job):
    """The third scores less than the first, and is larger."""
    scores = {None: 0.5, 1e-3: 0.9, 2e-3: 0.4}
    made = job({RATE: [1e-3, 2e-3]})
    tuned, _ = run(monkeypatch, made, lambda values, _: [scores[values.get(RATE)]])
    kept = {path.parent.name for path in (made.output / "trials").glob("*/model")}
    assert kept == {tuned.trials[0].run, tuned.trials[1].run}
    marks = {row["accuracy"]: row["on the front of"] for row in table(tuned, "accuracy")}
    assert marks == {"0.9000": "MiB", "0.5000": "MiB", "0.4000": ""}


def test_the_best_model_is_kept_where_nothing_has_a_cost(monkeypatch, job):
    """A run without a report has no size and no latency, and so no front."""
    monkeypatch.setattr(recipe_search, "fronts_of", lambda *_: {})
    made = job({RATE: [1e-3, 2e-3]})
    tuned, _ = run(monkeypatch, made, lambda values, _: [values.get(RATE, 0.5)])
    assert [path.parent.name for path in (made.output / "trials").glob("*/model")] == [tuned.winner.run]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_the_front_beats_all_others(points):
    """Whoever is not on it is beaten by one that is; of those on it none beats another."""
    front = [point for point, unbeaten in zip(points, are_unbeaten(points), strict=True) if unbeaten]

    def beats(one, other) -> bool:
        return one[0] >= other[0] and one[1] <= other[1] and one != other

    assert front
    assert not any(beats(one, other) for one in front for other in front)
    assert all(point in front or any(beats(one, point) for one in front) for point in points)
    assert max(points, key=lambda point: (point[0], -point[1])) in front


def test_without_held_out_examples_nothing_is_tuned(job):
    with pytest.raises(UserError) as caught:
        job({RATE: [1e-3]}, held_out=0.0)
    assert "task.held_out is 0" in str(caught.value)
    assert "--set task.held_out=0.1" in str(caught.value)
    assert job({RATE: [1e-3]}, "--set", "task.held_out=0.1", held_out=0.0).recipe_file["task"]["held_out"] == 0.1


def test_every_phase_is_scored_on_held_out_examples():
    """Those with a task of their own by their place."""
    phases = [{"name": "a"}, {"name": "b", "task": {"name": "sst2"}}]
    expected = ["task.score_held_out=true", "phases.1.task.score_held_out=true"]
    assert held_out_settings({"phases": phases}) == expected
    assert held_out_settings({"phases": phases[1:]}) == ["phases.0.task.score_held_out=true"]


@pytest.mark.parametrize(
    ("space", "more", "message"),
    [
        ({"phases.prune.learning_rat": [1e-3]}, [], 'phases.1.learning_rat: unknown key; did you mean "learning_rate"'),
        ({RATE: [1e-3, "fast"]}, [], f'--recipe_space {RATE}, "fast": recipe: phases.1.learning_rate'),
        ({RATE: {"low": -1.0, "high": 1.0}}, [], f"--recipe_space {RATE}, -1.0: recipe: phases.1.learning_rate"),
        ({STEPS: {"low": 10, "high": 100}}, [], "Input should be a valid integer"),
        ({STEPS: {"low": 10, "high": 20.5, "whole": True}}, [], "must be whole numbers"),
        ({"phases.none.dropout": [0.1]}, [], "the list has no"),
        ({"zero_optimization.stage": [7]}, [], "zero_optimization.stage is 7"),
        ({"task.held_out": [0.2]}, [], "could not be compared"),
        ({"seed": [1, 2]}, ["--seed", "3"], "--seed is given too, and wins"),
        ({RATE: 1e-3}, [], "write {"),
        ({RATE: []}, [], "no values to try"),
        ({RATE: {"low": 0, "high": 1, "log": True}}, [], "low must be below high"),
        ("{", [], "--recipe_space is not JSON"),
        ("missing.json", [], "missing.json"),
        ({RATE: [1e-3]}, ["--space", "space.json"], "--space is for tuning the speed: tune that first"),
        ({RATE: [1e-3]}, ["--phase", "prune"], "--phase is for tuning the speed"),
        ({RATE: [1e-3]}, ["--metric", "eval/f2"], "the task text has eval/accuracy"),
        ({"task.header": [False]}, [], "scores on other held-out examples could not be compared"),
        (
            {RATE: [1e-3]},
            ["--set", 'phases.finetune.task={"name": "mlm", "dataset": "x"}'],
            "only labelled text and tagged words have held-out examples",
        ),
    ],
)
def test_mistakes_are_one_error_before_anything_trains(job, space, more, message):
    with pytest.raises(UserError) as caught:
        job(space, *more)
    assert message in str(caught.value)


def test_the_metric_and_the_space_go_together(job, write_json, tiny_recipe, tmp_path):
    files = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", write_json("recipe.json", tiny_recipe)]
    for more in (["--metric", "eval/accuracy"], ["--recipe_space", "{}"]):
        with pytest.raises(UserError, match="go together"):
            read_tune_job([*files, "--output_dir", str(tmp_path / "out"), *more])


RUN = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--output_dir") + 1])
(out / "arguments").write_text(" ".join(sys.argv))
for step in range(1, 4):
    records = [{"phase": "finetune", "step": step, "eval/accuracy": 0.0}]
    records += [{"phase": "prune", "step": step, "eval/accuracy": step / 10}]
    with (out / "log.jsonl").open("a") as log:
        log.writelines(json.dumps(record) + "\\n" for record in records)
if "phases.prune.learning_rate=0.5" in sys.argv:
    (out / "log.jsonl").open("a").write('{"phase": "prune", "st')
    time.sleep(60)
last = {"eval": {"accuracy": 0.3}, "train": {"train_seconds": 2.0}, "size": {"bytes": 2**20}}
last["latency"] = {"batch_1": {"median_ms": 5.0}}
first = {"eval": {"accuracy": 0.0}, "train": {"train_seconds": 1.0}}
(out / "all_results.json").write_text(json.dumps({"finetune": first, "prune": last}))
(out / "checkpoint-3").mkdir()
(out / "status.json").write_text('{"state": "finished"}')
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path) -> None:
    """In place of training, a module that writes what a run writes."""
    (tmp_path / "written_run.py").write_text(RUN)
    monkeypatch.setattr("ds_trainer.tuning.trials._TRAIN", "written_run")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def followed(job: RecipeTuneJob, rate: float, cannot_win=lambda *_: False) -> tuple[RecipeTrial, Path]:
    folder = job.output / "trials" / "one"
    return run_recipe_trial(job, Candidate(1, settings=((RATE, rate),)), folder, cannot_win), folder


def test_a_finished_run_gives_its_score_and_costs(stand_in, job):
    trial, folder = followed(job({RATE: [0.5]}), 0.1)
    assert (trial.outcome, trial.score, trial.trained) == (MEASURED, 0.3, 3.0)
    assert trial.costs == {"MiB": 1.0, "ms (batch 1)": 5.0}
    assert trial.curve == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert not (folder / "checkpoint-3").exists()
    assert "task.score_held_out=true" in (folder / "arguments").read_text()


def test_a_run_is_ended_where_its_evaluations_say_so(stand_in, job):
    """Only those of the last phase count; a second run in the folder does not see the first one's."""
    trial, _ = followed(job({RATE: [0.5]}), 0.5, lambda step, score: step == 2)
    assert (trial.outcome, trial.score) == (ENDED_EARLY, None)
    assert trial.curve[:2] == [(1, 0.1), (2, 0.2)]
    assert trial.lasted < 30
    trial, _ = followed(job({RATE: [0.5]}), 0.1, lambda step, score: False)
    assert (trial.outcome, len(trial.curve)) == (MEASURED, 3)


def test_a_silent_run_hangs(stand_in, job):
    trial, _ = followed(job({RATE: [0.5]}, "--trial_timeout", "1s"), 0.5)
    assert (trial.outcome, trial.reason) == (HUNG, "it printed and logged nothing for 1 s")


def test_a_run_without_the_metric_says_what_it_has(stand_in, job):
    trial, _ = followed(job({RATE: [0.5]}, "--metric", "teacher/agreement"), 0.1)
    assert (trial.outcome, trial.reason) == (NO_SCORE, "the run has the scores accuracy")


def test_optuna_is_needed(monkeypatch, job):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match="pip install"):
        tune_recipe(job({RATE: [1e-3]}))
