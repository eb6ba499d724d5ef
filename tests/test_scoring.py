"""What an evaluation apart from a run writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_trainer.scoring import _write_evaluation


def test_a_task_without_predictions_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A language model is scored by its loss; an empty folder alone would look like a mistake."""
    job: Any = SimpleNamespace(output_file=None, predictions_dir=tmp_path / "a", task=SimpleNamespace(name="clm"))
    _write_evaluation(job, {"loss": 1.0}, {})
    assert "a gets no predictions: the task clm is scored by its loss" in caplog.text
    caplog.clear()
    _write_evaluation(job, {"accuracy": 1.0}, {"predictions.csv": "line,label,answer\n"})
    assert caplog.text == ""
