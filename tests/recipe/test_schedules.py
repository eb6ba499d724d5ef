"""Schedules against their closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from ds_trainer.recipe.schedules import Schedule, interval, lr_multiplier, steps_of
from ds_trainer.recipe.technique_specs import PruneSpec
from ds_trainer.techniques.prune.prune import threshold_schedule
from ds_trainer.techniques.technique import PhaseLength


def original_threshold(step, total, warmup, initial, final, initial_warmup, final_warmup):
    """The schedule of movement pruning as its paper and scripts define it, warm-ups in units of `warmup` steps."""
    if step <= initial_warmup * warmup:
        return initial
    if step > total - final_warmup * warmup:
        return final
    hold = initial_warmup * warmup
    remaining = 1 - (step - hold) / (total - (initial_warmup + final_warmup) * warmup)
    return final + (initial - final) * remaining**3


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(0, 3), st.integers(0, 3))
def test_the_threshold_is_the_originals_at_every_step(step, warmup, initial_warmup, final_warmup):
    """In warm-up units the cubic schedule equals the published one."""
    spec = PruneSpec(
        initial_threshold=1.0, final_threshold=0.15, initial_warmup=initial_warmup, final_warmup=final_warmup
    )
    schedule = threshold_schedule(spec, PhaseLength(1000, warmup, 0))
    assert schedule(step) == pytest.approx(
        original_threshold(step, 1000, warmup, 1.0, 0.15, initial_warmup, final_warmup)
    )


def test_warmups_may_be_fractions_of_the_phase():
    """A float is a fraction of the phase, an int multiples of the learning rate's warm-up; both must fit."""
    for warmups, expected in (((0.1, 0.25), (20, 150)), ((1, 2), (7, 186))):
        spec = PruneSpec(initial_warmup=warmups[0], final_warmup=warmups[1])
        schedule = threshold_schedule(spec, PhaseLength(200, 7, 0))
        assert (schedule.start, schedule.end) == expected
    with pytest.raises(ValueError, match=r"hold the threshold for 80 \+ 160 steps, more than the phase's 200"):
        threshold_schedule(PruneSpec(initial_warmup=1, final_warmup=2), PhaseLength(200, 80, 0))


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cubic", 0.125), ("cosine", 0.5)])
def test_ramps(shape, middle):
    """Half-way the remaining part is that of the shape; the ends are exact and held. One of no length jumps."""
    schedule = Schedule(1.0, 0.0, 10, 20, shape)
    assert [schedule(step) for step in (0, 10, 20, 99)] == [1.0, 1.0, 0.0, 0.0]
    assert schedule(15) == pytest.approx(middle)
    assert [Schedule(1.0, 0.1, 5, 5, shape)(step) for step in (4, 5)] == [1.0, 0.1]


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_learning_rates_are_those_of_transformers(kind):
    """Every step's factor equals that of transformers' scheduler of the same name.

    But "constant" beside `warmup_steps` warms up, where transformers' ignores them without a word.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = "constant_with_warmup" if kind == "constant" else kind
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=5, num_training_steps=30)
    factor = lr_multiplier(kind, 5, 30)
    for step in range(30):
        assert factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_durations():
    """An int is steps, a float a fraction; an interval is a step at least, and only 0 and None are never."""
    assert (steps_of(7, 100), steps_of(0.25, 100), steps_of(1.0, 100), steps_of(1, 100)) == (7, 25, 100, 1)
    assert [interval(every, 5) for every in (0.1, 0.4, 3, 0, 0.0, None)] == [1, 2, 3, 0, 0, 0]
