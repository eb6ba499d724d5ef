"""Steps that do no good: skipped ones are counted and reported; too many of them, or spoilt weights, end the run."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.launching import run_deepspeed
from support.numerics_matrix import DECAY, RANKS, SKIPPING, SOUND, SPOILT, STOPPED

from ds_trainer.engine.numerics import StepWatch


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The outcome of every case on each of two ranks: name -> [rank 0's, rank 1's]."""
    out = tmp_path_factory.mktemp("numerics") / "seen.json"
    done = run_deepspeed(RANKS, "tests/support/numerics_matrix.py", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), done.stderr


def of_all_ranks(seen, name):
    """A case's outcome, the same on every rank."""
    ranks = seen[0][name]
    assert len(ranks) == RANKS
    # text, since NaN differs from itself
    assert {json.dumps(outcome) for outcome in ranks} == {json.dumps(ranks[0])}
    return ranks[0]


@pytest.mark.parametrize("name", SKIPPING)
def test_a_skipped_step_is_counted_and_reported(seen, name):
    """Infinite gradients on one rank cost both the step: counted, reported, weights finite, the schedule unchanged."""
    outcome = of_all_ranks(seen, name)
    assert (outcome["global_steps"], outcome["skipped_steps"], outcome["error"]) == (4, 1, None)
    assert outcome["finite"]
    rates = outcome["rates"]
    assert rates[2] == rates[1]
    assert rates[3] != rates[2]
    log = seen[1].split(f"case {name}\n")[1].split("\ncase ")[0]
    assert "tiny: step 3 was skipped" in log
    assert ("the loss scale is now" in log) == ("fp16" in SKIPPING[name].precision)


def test_the_norm_is_the_same_whatever_the_precision(seen):
    """The logged norm is that of the unscaled loss, also without ZeRO."""
    names = [name for name in SKIPPING if SKIPPING[name].precision != "autocast"]
    first = {
        name: of_all_ranks(seen, name)["norms"][0] for name in (*names, "fp32-0", "fp32-0, unclipped", "autocast-0")
    }
    assert first == {name: pytest.approx(first["fp32-1"], rel=5e-3) for name in first}


@pytest.mark.parametrize("name", SPOILT)
def test_a_step_that_spoils_the_weights_ends_the_run(seen, name):
    """Where DeepSpeed takes such a step, both ranks stop at the next check, with one message."""
    outcome = of_all_ranks(seen, name)
    assert not outcome["finite"], "DeepSpeed did not take the step: the case shows nothing"
    assert outcome["global_steps"] == 4
    assert "the gradients of step 3 are not finite" in outcome["error"]


@pytest.mark.parametrize("name", STOPPED)
def test_skipping_without_end_ends_the_run(seen, name):
    """After max_skipped steps in a row both ranks stop: the message has the steps, the scale, and what to change."""
    outcome, case = of_all_ranks(seen, name), STOPPED[name]
    assert outcome["finite"]
    assert outcome["skipped_steps"] == case.max_skipped
    first = case.infinite[0] + 1 if case.infinite else 1
    last = first + case.max_skipped - 1
    assert f"{case.max_skipped} steps from {first} to {last} were skipped" in outcome["error"]
    assert f"The weights are those of step {first - 1}" in outcome["error"]
    scale = {"fixed scale": 128, "autocast-fp16": 65536}.get(name, 1)
    assert f"the loss scale is {scale}. Lower learning_rate" in outcome["error"]


def test_a_run_that_goes_on_is_left_alone(seen):
    """Neither skips with steps between them nor those of a scale that starts too high end a run."""
    gap, start = of_all_ranks(seen, "with a gap"), of_all_ranks(seen, "high start")
    assert (gap["error"], gap["skipped_steps"], gap["global_steps"]) == (None, 4, 9)
    assert start["error"] is None
    assert 8 < start["skipped_steps"] < SOUND["high start"].max_skipped
    taken = start["global_steps"] - start["skipped_steps"]
    assert start["rates"][-1] == pytest.approx(start["rates"][0] * DECAY**taken)


def test_nothing_leaves_the_device_after_a_step():
    """A gradient norm, here on a device that cannot be read, is kept as it is until a check, which does read it."""
    norm = torch.zeros((), device="meta")
    of_meta = SimpleNamespace(global_steps=1, optimizer=object(), device=torch.device("meta"))
    of_meta.was_step_applied, of_meta.get_global_grad_norm = lambda: True, lambda: norm
    watch = StepWatch(of_meta, "tiny", 3)
    watch.after_step()
    for read in (watch.check, norm.item):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            read()
