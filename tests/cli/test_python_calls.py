"""What a notebook sees of the public API: its names, its log, its errors and its results."""

from __future__ import annotations

import json
import logging

import pytest

import ds_trainer
from ds_trainer import Recipe, UserError, cut, evaluate, shrink, train
from ds_trainer.cli import api

RECIPE = {"model": {"name_or_path": "M"}, "task": {"name": "docstrings"}, "phases": [{"max_steps": 1}]}


@pytest.fixture
def log():
    """The library's logger as it is when a program imports the library."""
    log = logging.getLogger("ds_trainer")
    before = log.handlers, log.level, log.propagate
    log.handlers, log.level, log.propagate = [], logging.NOTSET, True
    yield log
    log.handlers, log.level, log.propagate = before


@pytest.fixture
def training(monkeypatch):
    """Let `train` read no job, and return what the function that is called with it returns."""

    def stub(run) -> None:
        monkeypatch.setattr(api.training, "read_train_job", lambda *words, **values: None)
        monkeypatch.setattr(api.training, "train", run)

    return stub


def test_the_names_are_ours(log):
    """`dir` names the API and no module that it imports, and every name can be had."""
    assert dir(ds_trainer) == sorted([*ds_trainer.__all__, "__version__"])
    assert all(getattr(ds_trainer, name) for name in ds_trainer.__all__)


@pytest.mark.parametrize(
    ("call", "messages"),
    [
        (lambda out: train(RECIPE, out), ["is not empty: give another, or --overwrite"]),
        (lambda out: train(RECIPE | {"x": 1}, out, deepspeed_config={"fp61": {}}), ["recipe: x: unk", "mean fp16"]),
        (lambda out: train(RECIPE | {"seed": out}, 123), ["recipe: output_dir: Input should be", "recipe: seed: "]),
        (lambda out: evaluate(out, recipe=RECIPE, max_seq_lenght=3), ['did you mean "max_seq_length"?']),
        (lambda out: cut(out, out, 0.5), ["--cut fits the model to", "stays as it is: give --output_dir"]),
        (lambda out: cut(out, out / "x", [0.5], recipe=Recipe.model_validate(RECIPE)), ["a phase for each share"]),
        (lambda out: shrink(out / "m", out), ["--output_dir: ", "already: give another, or --overwrite"]),
    ],
)
def test_errors_of_arguments_are_those_of_flags(log, monkeypatch, tmp_path, call, messages):
    """All mistakes come at once, whether files are given by name or as objects, and whatever an argument is."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(api.exporting, "folder_mistakes", lambda folder, trust: [])
    with pytest.raises(UserError) as caught:
        call(tmp_path)
    assert [message for message in messages if message not in str(caught.value)] == [], str(caught.value)


def test_results_are_a_dict_and_show_a_table(log, training, tmp_path):
    """Code that takes them for a dict goes on to work; what a notebook shows has a line for a phase."""
    trained = {
        "dense": {"eval": {"accuracy": 0.5}, "train": {"train_seconds": 3.0, "examples_per_s": 7.0}, "x": [0] * 99}
    }
    training(lambda job: trained)
    results = train(RECIPE, tmp_path)
    assert json.loads(json.dumps(results)) == trained
    header, line = repr(results).splitlines()
    assert (header.split()[:2], line.split()[:2]) == (["phase", "accuracy"], ["dense", "0.5000"])


def test_the_lines_of_the_command_are_shown(log, training, monkeypatch, capsys, tmp_path):
    """Also where a program has handlers that show warnings only; one that shows our lines, or has set up our log,
    gets each line once, by its own handlers."""
    training(lambda job: log.info("step 1") or {})
    monkeypatch.setattr(logging.root, "level", logging.WARNING)  # whatever other tests have set up
    log.manager._clear_cache()
    for _ in range(2):
        train(RECIPE, tmp_path)
    assert capsys.readouterr().err == "step 1\n" * 2
    log.handlers, log.level, log.propagate = [], logging.WARNING, True
    train(RECIPE, tmp_path)
    log.level = logging.NOTSET
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    logging.getLogger("ds_trainer").manager._clear_cache()
    train(RECIPE, tmp_path)
    assert capsys.readouterr().err == ""
