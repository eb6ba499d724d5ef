"""The terms that wait for a record: as few as may be, and the record is the same."""

from __future__ import annotations

import json
import logging
import math
import resource
from types import SimpleNamespace

import pytest
import torch

from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.report import log as module
from ds_trainer.report.log import RunLog
from ds_trainer.run.loop import SETTLE_EVERY

STEPS = 4 * SETTLE_EVERY + 7
VALUES = torch.rand(STEPS, generator=torch.Generator().manual_seed(0))


def add(report: RunLog, step: int, value: float | torch.Tensor) -> None:
    batch = SimpleNamespace(ids=torch.tensor([step]), tokens=3)
    report.add(step, {"task": torch.as_tensor(value), "other": torch.tensor(2.0)}, batch)


def opened(folder, state=None) -> RunLog:
    report = RunLog(folder, "tiny", STEPS, {"task": 1.0, "other": 0.5}, tensorboard=False, training_examples=4)
    report.open(0, 0, state)
    return report


def run(report: RunLog, steps: range) -> None:
    """What the loop does after each of the steps where no record is due."""
    for step in steps:
        add(report, step, VALUES[step])
        if (step + 1) % SETTLE_EVERY == 0:
            report.check_finite()


def test_what_waits_for_a_record_does_not_grow(tmp_path):
    """Without a record in sight, checked steps are kept as sums, and so in a checkpoint; the mean is that of all."""
    report = opened(tmp_path)
    run(report, range(STEPS))
    assert len(report._pending) == STEPS % SETTLE_EVERY
    assert len(json.dumps(report.state())) < 1000
    record = report.flush(STEPS, {})
    assert record["train/term/task"] == pytest.approx(float(VALUES.double().mean()), rel=1e-12)
    assert record["train/term/other"] == 2.0
    assert report.totals()["train_loss"] == pytest.approx(record["train/loss"])
    add(report, STEPS, 1.0)
    assert report.flush(STEPS + 1, {})["train/term/task"] == 1.0, "a record begins anew"


@pytest.mark.parametrize("step", [1, SETTLE_EVERY, 2 * SETTLE_EVERY + 1, STEPS - 1])
def test_a_stop_between_does_not_change_a_bit(tmp_path, step):
    """A report resumed from its state, through JSON as in a checkpoint, writes the record of one without a stop."""
    whole, first = opened(tmp_path), opened(tmp_path)
    run(whole, range(STEPS))
    run(first, range(step))
    second = opened(tmp_path, json.loads(json.dumps(first.state())))
    run(second, range(step, STEPS))
    records = [report.flush(STEPS, {}) for report in (whole, second)]
    assert [records[0][f"train/term/{name}"] for name in ("task", "other")] == [
        records[1][f"train/term/{name}"] for name in ("task", "other")
    ]


def test_a_line_says_how_far_the_phase_is_and_how_long_it_will_take(tmp_path, monkeypatch, caplog):
    """Steps of all steps, the epoch, and the time left, by the clock since this session began, at whatever step."""
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    report = opened(tmp_path)
    report.open(STEPS - 107, 0)
    add(report, STEPS - 107, 1.0)
    clock[0] += 70.0
    with caplog.at_level(logging.INFO, "ds_trainer"):
        report.flush(STEPS - 100, {"train/lr/all": 1e-3})
    assert caplog.messages[0].startswith("tiny: step 307 of 407  epoch 0.25  loss 2.0000  lr 1.00e-03  ")
    assert caplog.messages[0].endswith(" examples/s  16:40 left")


def test_a_full_disk_costs_records_and_not_the_run(tmp_path, monkeypatch):
    """One warning for all of them; what was written of a line is dropped, so that later records are whole."""
    warnings = []
    monkeypatch.setattr("ds_trainer.ranks.distributed.warn", warnings.append)
    report, log = opened(tmp_path), tmp_path / "log.jsonl"
    report.write(1, {"train/loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 20, limits[1]))
    try:
        for step in (2, 3):
            report.write(step, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    report.write(4, {"train/loss": 1.0})
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4]
    assert len(warnings) == 1
    assert "the record of step 2 cannot be written: [Errno 28] No space left" in warnings[0]


def test_a_term_that_is_not_finite_is_found_after_settled_ones(tmp_path):
    """It is named by its step."""
    report = opened(tmp_path)
    run(report, range(SETTLE_EVERY))
    add(report, SETTLE_EVERY, math.nan)
    with pytest.raises(NonFiniteLossError, match=f"the loss of step {SETTLE_EVERY + 1} is not finite"):
        report.check_finite()
