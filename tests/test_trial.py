"""What a trial of a tuning takes its steps on, and when it ends."""

from __future__ import annotations

import numpy as np
import pytest

from ds_trainer.config.jobs import TrialRequest
from ds_trainer.trial import _rounds, trial_batches


@pytest.fixture
def request_of(tmp_path):
    def make(**fields) -> TrialRequest:
        return TrialRequest(phase="p", results=tmp_path / "results.json", models=tmp_path, **fields)

    return make


def test_the_longest_come_first_and_the_others_stand_for_an_epoch():
    """Each batch has examples of like lengths, and the mean over the typical ones is that of the data."""
    lengths = np.random.default_rng(0).integers(4, 128, 1000)
    longest, *typical = trial_batches(lengths, 20, 6)
    assert sorted(lengths[longest]) == sorted(lengths)[-20:]
    assert all(np.ptp(lengths[batch]) <= 4 for batch in typical)
    assert np.mean([lengths[batch].mean() for batch in typical]) == pytest.approx(lengths.mean(), rel=0.03)


def test_a_training_set_smaller_than_a_batch_is_repeated():
    batches = trial_batches(np.array([3, 9, 5]), 8, 2)
    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert set(batches[1].tolist()) == {0, 1, 2}


def test_rounds_alternate_between_the_start_and_the_end_of_the_phase(request_of):
    """At least two, and as many as fill the time."""
    steps = []

    def take(batch, step):
        steps.append(step)
        return 0.1

    rounds = list(_rounds(take, [np.array([0])] * 3, (0, 97), request_of(seconds=0.7)))
    assert rounds == [[0.1] * 3] * 3
    assert steps == [0, 1, 2, 97, 98, 99, 0, 1, 2]
    assert len(list(_rounds(take, [np.array([0])], (0, 97), request_of(seconds=0.01)))) == 2


@pytest.mark.parametrize(("seconds", "rounds"), [(0.14, 2), (0.16, 1)])
def test_a_hopeless_trial_ends_after_its_first_round(request_of, seconds, rounds):
    """Half as slow again as the best one."""
    request = request_of(seconds=0.01, seconds_to_beat=0.3)
    assert len(list(_rounds(lambda *_: seconds, [np.array([0])] * 3, (0, 5), request))) == rounds
