"""The search for the fastest settings: what it skips and why, what wins, and that a second call goes on.

The trials are made up here; `tests/integration/test_tune.py` runs real ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ds_trainer.cli.train import read_train_job
from ds_trainer.cli.tune import read_tune_job
from ds_trainer.config.jobs import TrialRequest, TuneJob
from ds_trainer.engine.rank_memory import Activations, ModelSizes, PhaseMemory
from ds_trainer.ranks.failures import NothingFitsError, TuningFailedError
from ds_trainer.tuning import tune as tuning
from ds_trainer.tuning.order import order_of
from ds_trainer.tuning.results import training_command
from ds_trainer.tuning.space import Candidate, Machine, candidates, default_space
from ds_trainer.tuning.trials import FAILED, HUNG, MEASURED, NO_MEMORY, REFUSED, SKIPPED, Trial

MICRO, CHECKPOINTING = "train_micro_batch_size_per_gpu", "phases.prune.gradient_checkpointing"


def machine(bytes_free: int = 10**12, per_example: int = 1000, gpus: int = 0) -> Machine:
    lines = (Activations(64, False, 0, per_example), Activations(64, True, 0, per_example // 10))
    memory = PhaseMemory(ModelSizes(1000, 0, 100), 0, lines, 0, 0, 10_000, on_gpu=bool(gpus))
    return Machine(memory, hidden_size=32, gpus=gpus, bytes_free=bytes_free, identity={"data": "d"})


@dataclass
class MadeUp:
    """Trials whose speed, or outcome, is a function of the candidate; `calls` are those that were started."""

    result: Callable[[Candidate, int], float | str]
    calls: list[Candidate] = field(default_factory=list)

    def __call__(self, job: TuneJob, candidate: Candidate, request: TrialRequest, timeout: float) -> Trial:
        self.calls.append(candidate)
        result = self.result(candidate, len(self.calls))
        if isinstance(result, str):
            return Trial(candidate, result, "made up", lasted=0.001)
        return Trial(candidate, MEASURED, examples=16, seconds=(16 / result,), peak=20_000, lasted=0.001)


@pytest.fixture
def job(tiny_recipe, write_json, tmp_path) -> Callable[..., TuneJob]:
    def make(space: dict | None = None, *more: str) -> TuneJob:
        spaces = ["--space", write_json("space.json", space)] if space else []
        files = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", write_json("recipe.json", tiny_recipe)]
        return read_tune_job([*files, "--output_dir", str(tmp_path / "out"), *spaces, *more])

    return make


def run(monkeypatch, job: TuneJob, result, on: Machine | None = None):
    """The tuning's results, and the trials that were started."""
    trials = MadeUp(result)
    monkeypatch.setattr(tuning, "run_trial", trials)
    monkeypatch.setattr(tuning, "measure_machine", lambda job: on or machine())
    return tuning.tune(job), trials.calls


def micro_of(candidate: Candidate) -> int | None:
    return dict(candidate.settings).get(MICRO)


def test_the_fastest_wins_and_is_written(monkeypatch, job):
    """tuned.json is the user's file with the winner's settings, and the table has a row a trial."""
    tuned, _ = run(
        monkeypatch, made := job({MICRO: [16, 8, 4]}), lambda c, _: {None: 50, 16: 60, 8: 100, 4: 70}[micro_of(c)]
    )
    assert micro_of(tuned.winner) == 8
    written = json.loads((made.output / "tuned.json").read_text())
    assert written == made.train.engine_config | {MICRO: 8, "gradient_accumulation_steps": "auto"}
    page = (made.output / "tuned.md").read_text()
    assert "100.0 examples/s, 2.00 times the user's own (50.0)" in page
    assert f"--deepspeed_config {made.output}/tuned.json" in page
    assert (made.output / "tuned.png").stat().st_size > 1000


def test_the_users_own_file_wins_within_the_noise(monkeypatch, job):
    """The other is faster by 3%, and trials of one candidate are 6% from their median."""
    speeds = {1: 94, 2: 96, 3: 103, 4: 100, 5: 109, 6: 106}
    tuned, _ = run(monkeypatch, job({MICRO: [8]}), lambda c, n: speeds[n])
    assert sorted(tuned.speeds.values()) == pytest.approx([100, 103])
    assert 0.05 < tuned.noise < 0.07
    assert tuned.winner == tuned.own


def test_finalists_are_timed_again_in_turns(monkeypatch, job):
    """Two rounds of the three fastest and the user's own."""
    _, calls = run(monkeypatch, job({MICRO: [16, 8, 4]}), lambda c, _: {None: 50, 16: 90, 8: 100, 4: 95}[micro_of(c)])
    assert [micro_of(call) for call in calls] == [None, 16, 8, 4, *([8, 4, 16, None] * 2)]


def test_what_cannot_fit_by_arithmetic_is_not_started(monkeypatch, job):
    """Only beyond the margin; with checkpointing it fits."""
    free = 10_000 + 16_000 + 4_000 + 1_000 * 9
    space = {CHECKPOINTING: [False, True], MICRO: [16, 8, 4]}
    tuned, calls = run(monkeypatch, job(space), lambda c, _: 10.0 * (micro_of(c) or 1), machine(free, 3000))
    started = {(dict(call.settings)[CHECKPOINTING], micro_of(call)) for call in calls if call.settings}
    assert (False, 16) not in started
    assert {(False, 4), (True, 16)} <= started
    assert micro_of(tuned.winner) == 16
    assert any(trial.outcome == NO_MEMORY and "by arithmetic" in trial.reason for trial in tuned.trials)


def test_after_one_that_did_not_fit_larger_ones_are_skipped(monkeypatch, job):
    """And a failure of another kind says nothing about the others."""
    results = {None: 10.0, 2: HUNG, 4: NO_MEMORY, 8: 0.0, 16: 0.0}
    tuned, calls = run(monkeypatch, job({MICRO: [2, 4, 8, 16]}), lambda c, _: results[micro_of(c)])
    assert {micro_of(call) for call in calls} == {None, 2, 4}
    reasons = {micro_of(trial.candidate): trial.reason for trial in tuned.trials if trial.outcome == SKIPPED}
    assert reasons == dict.fromkeys((8, 16), "a smaller micro-batch did not fit")


def test_smaller_ones_are_skipped_once_they_get_slower(monkeypatch, job):
    speeds = {None: 10.0, 16: 100, 8: 80, 4: 70, 2: 60}
    _, calls = run(monkeypatch, job({MICRO: [16, 8, 4, 2]}), lambda c, _: speeds[micro_of(c)])
    assert {micro_of(call) for call in calls} == {None, 16, 8}


def test_checkpointing_is_not_tried_where_it_fits_without(monkeypatch, job):
    _, calls = run(monkeypatch, job({CHECKPOINTING: [False, True], MICRO: [8]}), lambda c, _: 10.0)
    assert not any(dict(call.settings).get(CHECKPOINTING) for call in calls)


def test_a_used_up_budget_ends_the_search(monkeypatch, job, caplog):
    """The user's own files are measured in any case, and win. Before a trial it is said what is tried."""
    caplog.set_level("INFO", "ds_trainer")
    tuned, calls = run(monkeypatch, job({MICRO: [16, 8]}, "--budget", "0.001s"), lambda c, _: 10.0)
    assert caplog.messages[0].startswith("trial 1: ")
    assert caplog.messages[0].endswith("(00:00 of the budget left)")
    assert [call.settings for call in calls] == [()]
    assert {trial.reason for trial in tuned.trials[1:]} == {"the budget was used up"}
    assert tuned.winner == tuned.own


@pytest.mark.parametrize(("outcome", "error"), [(NO_MEMORY, NothingFitsError), (FAILED, TuningFailedError)])
def test_a_tuning_without_any_result_says_why(monkeypatch, job, outcome, error):
    with pytest.raises(error, match="made up"):
        run(monkeypatch, job({MICRO: [16, 8]}), lambda c, _: outcome)


def test_a_search_that_had_no_time_does_not_say_that_nothing_fits(monkeypatch, job):
    with pytest.raises(TuningFailedError, match="the budget was used up"):
        run(monkeypatch, job({MICRO: [16, 8]}, "--budget", "0.001s"), lambda c, _: NO_MEMORY)


def test_the_users_own_file_is_not_changed_by_the_space(job):
    """The first value of a space is tried on a copy when the command is checked."""
    space = {"zero_optimization.stage": [1, 2], "gradient_clipping": [0.5]}
    made = job(space, "--set", "zero_optimization.stage=3", "--set", "phases.prune.dropout=0.1")
    assert made.engine_file == made.train.engine_config
    assert made.engine_file["zero_optimization"] == {"stage": 3}
    assert made.engine_file["gradient_clipping"] == "auto"


def test_the_printed_command_trains_the_winner(job):
    """Settings of the engine file are in tuned.json; the recipe's are in the command, the winner's after the user's."""
    made = job(None, "--set", "zero_optimization.stage=3", "--set", "phases.prune.dropout=0.1")
    settings = (("zero_optimization.stage", 2), (CHECKPOINTING, False))
    command = training_command(made, Candidate(2, threads=3, settings=settings))
    assert command.startswith("OMP_NUM_THREADS=3 deepspeed --num_gpus 2 --module ds_trainer.cli.train ")
    assert "zero_optimization" not in command
    assert f"--deepspeed_config {made.output}/tuned.json" in command
    dropout, checkpointing = (command.index(path) for path in ("phases.prune.dropout=0.1", f"{CHECKPOINTING}=false"))
    assert dropout < checkpointing
    words = command.split("ds_trainer.cli.train ")[1].split()
    words[words.index("--deepspeed_config") + 1] = "ds_configs/zero2.json"
    assert read_train_job([*words, "--dry_run"]).recipe.phases[1].dropout == 0.1


def test_a_second_call_goes_on(monkeypatch, job):
    """Killed after two trials, it starts the third; trials of other data are not used."""

    def killed(candidate: Candidate, number: int) -> float:
        if number == 3:
            raise KeyboardInterrupt
        return 20.0

    made = job({MICRO: [16, 8, 4]})
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, made, killed)
    _, calls = run(monkeypatch, made, lambda c, _: 20.0)
    assert [micro_of(call) for call in calls[:2]] == [8, 4]
    elsewhere = machine()
    elsewhere.identity["data"] = "other"
    _, calls = run(monkeypatch, made, lambda c, _: 20.0, elsewhere)
    assert calls[0].settings == ()


def test_a_large_space_is_sampled(monkeypatch, job):
    """Optuna's sampler is asked, and finds the best of 200 candidates in a quarter of them."""
    space = {"gradient_clipping": [round(0.1 * i, 1) for i in range(1, 41)], MICRO: [16, 8, 4, 2, 1]}
    made = job(space)
    seen: list[float] = []

    def speed(candidate: Candidate, number: int) -> float:
        values = dict(candidate.settings)
        value = 100 - abs(values.get("gradient_clipping", 9) - 1.0) + (values.get(MICRO) == 8)
        seen.append(value)
        if len(seen) == 50:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, made, speed)
    assert max(seen) > 100


def test_the_default_space_keeps_the_global_batch(job):
    """Every candidate divides it; on one rank only ZeRO 0 without offload, on a GPU offload too."""
    made = job()
    for on in (machine(), machine(gpus=2)):
        space = default_space(made, on)
        every = list(candidates(made, on, space))
        assert len(set(every)) == len(every) > 4
        for candidate in every[1:]:
            values = dict(candidate.settings)
            assert 16 % (values[MICRO] * candidate.ranks) == 0
            assert candidate.ranks == (on.gpus or candidate.ranks)
            assert candidate.ranks > 1 or values["zero_optimization.stage"] == 0
    assert any(dict(candidate.settings)["zero_optimization.offload_optimizer"] for candidate in every[1:])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({MICRO: ["auto"]}, "write whole numbers above 0"),
        ({MICRO: [8.5]}, "write whole numbers above 0"),
        ({"ranks": [0]}, "write whole numbers above 0"),
        ({"ranks": [2]}, "is fixed by the global batch, --num_gpus"),
        ({"train_batch_size": [8]}, "is fixed by the global batch"),
        ({"task.max_seq_length": [8]}, "a tuning varies keys of the engine file, phases.*, ranks and threads"),
        ({"phases.none.dropout": [0.1]}, "the list has no"),
        ({MICRO: 8}, "[values to try]"),
    ],
)
def test_mistakes_in_a_space_are_one_error(job, space, message):
    with pytest.raises(ValueError) as caught:
        job(space, "--num_gpus", "2")
    assert message in str(caught.value)


def test_a_stage_of_the_users_space_is_tried_on_one_rank(monkeypatch, job):
    """The default space leaves it out; what the user asks for is measured."""
    _, calls = run(monkeypatch, job({"zero_optimization.stage": [1, 2]}), lambda c, _: 10.0)
    assert {dict(call.settings).get("zero_optimization.stage") for call in calls} == {None, 1, 2}


def test_other_phases_are_checked_too(monkeypatch, job):
    """A micro-batch that does not divide the batch of another phase is refused without a trial."""
    made = job({MICRO: [16, 4]}, "--set", "phases.finetune.train_batch_size=4")
    tuned, calls = run(monkeypatch, made, lambda c, _: 10.0)
    assert {micro_of(call) for call in calls} == {None, 4}
    assert any(trial.outcome == REFUSED and "train_batch_size is 4" in trial.reason for trial in tuned.trials)


def test_an_order_without_optuna_is_that_of_the_space(monkeypatch, caplog):
    everything = [Candidate(1, settings=((MICRO, size),)) for size in range(1, 200)]
    monkeypatch.setitem(sys.modules, "optuna", None)
    order = order_of(everything, seed=1)
    assert [order.ask() for _ in range(3)] == everything[:3]
    assert "for want of optuna" in caplog.text


def test_a_sampled_order_gives_every_candidate_once():
    """Also those that the sampler does not draw."""
    everything = [Candidate(1, settings=((MICRO, size),)) for size in range(1, 140)]
    order, given = order_of(everything, seed=1), []
    order._draws = 1
    while candidate := order.ask():
        order.tell(1.0)
        given.append(candidate)
    assert sorted(given, key=str) == sorted(everything, key=str)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budget", "20"], "write a number and s, m or h"),
        (["--phase", "none"], "the phases that train are 'finetune', 'prune'"),
        (["--space", "missing.json"], "missing.json"),
        (
            ["--set", "phases.prune.per_device_train_batch_size=8"],
            "per_device_train_batch_size, which a tuning is to find",
        ),
        (["--num_gpus", "0"], "--num_gpus is 0"),
        (["--debug_port", "5678"], "--debug_port is for a run"),
    ],
)
def test_mistakes_are_one_error(job, more, message):
    with pytest.raises(ValueError) as caught:
        job(None, *more)
    assert message in str(caught.value)
