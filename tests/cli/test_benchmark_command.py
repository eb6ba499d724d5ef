"""The benchmark's command: its mistakes, before torch is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import exported_models

from ds_trainer.cli.export import read_benchmark_job


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_models.save("cls", tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "0"], '--lengths is "0": it must be greater than or equal to 1'),
        (["--lengths", "task"], "--lengths task: no task: give --task_name"),
        (["--batch_sizes", "1.5"], '--batch_sizes is "1.5": it must be a valid integer'),
        (["--threads", "1000000"], "--threads is 1000000: this process may use"),
        (["--seconds", "nan"], '--seconds is "nan": it must be'),
        (["--names", "a", "b"], "the names are a, b: give each of the 1 folders its own by --names"),
        (["x", "x"], ", x, x: give each of the 3 folders its own"),
        (["gone"], "the model folder gone does not exist"),
        (["--output_dir", f"{__file__}/out"], "test_benchmark_command.py is a file"),
        (["--data_dir", "gone"], "no task: give --task_name"),
    ],
)
def test_mistakes_show_before_torch_is_loaded(plain: Path, more: list[str], message: str) -> None:
    """One ValueError each."""
    with pytest.raises(ValueError) as caught:
        read_benchmark_job([str(plain), *more])
    assert message in str(caught.value)


def test_a_missing_onnxruntime_is_named(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install; other backends need none of it."""
    find = "ds_trainer.cli.export.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == "onnxruntime" else object())
    for backend in ("onnxruntime", "all"):
        with pytest.raises(ValueError, match=r"onnxruntime cannot be imported: pip install onnxruntime"):
            read_benchmark_job([str(plain), "--backends", backend])
    assert read_benchmark_job([str(plain)]).backends == ("torch",)
