"""The terms that wait for a record: as few as may be, and the record is the same."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from ds_trainer.loop import SETTLE_EVERY
from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.report.log import Report
from ds_trainer.techniques.exits import exits

STEPS = 4 * SETTLE_EVERY + 7
VALUES = torch.rand(STEPS, generator=torch.Generator().manual_seed(0))


def add(report: Report, step: int, value: float | torch.Tensor) -> None:
    batch = SimpleNamespace(ids=torch.tensor([step]), tokens=3)
    report.add(step, {"task": torch.as_tensor(value), "other": torch.tensor(2.0)}, batch)


def opened(folder, state=None) -> Report:
    report = Report(folder, "tiny", STEPS, {"task": 1.0, "other": 0.5}, tensorboard=False, training_examples=4)
    report.open(0, 0, state)
    return report


def run(report: Report, steps: range) -> None:
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


def test_the_state_of_an_older_version_is_read(tmp_path):
    """Its checkpoints held the terms of single micro-batches beside the sums."""
    state = opened(tmp_path).state() | {"names": ["task", "other"], "counts": {"examples": 3, "tokens": 9}}
    state |= {"pending": [[1.0, 2.0], [4.0, 2.0]], "settled": {"micro_batches": 1, "terms": [4.0, 2.0]}}
    assert opened(tmp_path, state).flush(3, {})["train/term/task"] == 3.0


def test_a_full_disk_costs_a_record_and_not_the_run(tmp_path, monkeypatch):
    """It is a warning; a resumed run drops the line that was cut short."""
    warnings = []
    monkeypatch.setattr("ds_trainer.ranks.distributed.warn", warnings.append)
    report = opened(tmp_path)
    report._log.close()
    report._log = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    report.write(1, {"train/loss": 1.0})
    assert "the record of step 1 cannot be written: [Errno 28] No space left" in warnings[0]


def test_a_term_that_is_not_finite_is_found_after_settled_ones(tmp_path):
    """It is named by its step."""
    report = opened(tmp_path)
    run(report, range(SETTLE_EVERY))
    add(report, SETTLE_EVERY, math.nan)
    with pytest.raises(NonFiniteLossError, match=f"the loss of step {SETTLE_EVERY + 1} is not finite"):
        report.check_finite()


def test_the_heads_losses_do_not_grow_either(monkeypatch):
    """Exits keep a bounded number, and read the mean of all; a state carries both."""
    monkeypatch.setattr(exits, "_MOST_PENDING", 4)

    def heads() -> exits.Exits:
        made = exits.Exits(
            SimpleNamespace(terms=["heads"]), None, SimpleNamespace(loss_unit="example", logits_unit="example")
        )
        made.layers = [1, 2]
        return made

    whole, second = heads(), None
    rows = torch.rand(11, 2, generator=torch.Generator().manual_seed(1))
    for step, row in enumerate(rows):
        for technique in filter(None, (whole, second)):
            technique.on_step(step)
            technique._losses.append(row)
            assert len(technique._losses) <= 4
        if step == 5:
            second = heads()
            second.resume(json.loads(json.dumps(whole.state())))
    expected = rows.double().mean(0).tolist()
    readings = whole.readings()
    assert list(readings.values()) == pytest.approx(expected, rel=1e-12)
    assert second.readings() == readings
    assert whole.readings() == {}
