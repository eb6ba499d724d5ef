"""What the exits technique refuses or replaces as a phase starts and ends: untrained heads, other heads, lost bits."""

from typing import Any

import pytest
import torch
from support.exit_training import BOTH, LENGTH, attached, exported, plan_for, spec_of
from transformers import BertConfig, BertModel

from ds_trainer.config.recipe import ExitsSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.exits import Exits


def test_heads_of_another_number_of_classes_are_made_anew(folders, tmp_path, caplog):
    """The own head is replaced for such a task, and so are the heads; why is told."""
    exported(plan_for(folders["classes"], tmp_path, exits={}), tmp_path / "out")
    with caplog.at_level("INFO", logger="ds_trainer"):
        task = build_task(spec_of(folders["scores"]), str(tmp_path / "out"), tmp_path)
        technique = Exits(ExitsSpec(training="joint"), LENGTH, task)
        model = technique.attach(task.build_model(tmp_path / "out"))
        technique.start(torch.device("cpu"))
    assert "new exit heads, since " in caplog.text
    assert all(torch.equal(head.steps[-1].weight, model.classifier.weight) for head in model.exit_heads.values())


def test_heads_alone_need_a_trained_head_of_the_models_own(folders, tmp_path):
    """Copies of a random one on a frozen model would be scored against it: told when training starts, and not before,
    since what stands for a model to come may have none; joint training trains it, too."""
    BertModel(BertConfig.from_pretrained(folders["classes"])).save_pretrained(tmp_path / "encoder")
    for source, training in (("encoder", "heads"), (folders["classes"], "heads"), ("encoder", "joint")):
        path = str(tmp_path / source)
        task = build_task(spec_of(folders["classes"]), folders["classes"], tmp_path)
        technique = Exits(ExitsSpec(training=training), LENGTH, task)
        technique.attach(task.build_model(path))
        if (source, training) != ("encoder", "heads"):
            technique.start(torch.device("cpu"))
            continue
        with pytest.raises(ValueError) as caught:
            technique.start(torch.device("cpu"))
        words = ['training is "heads"', f"{path} has no trained head of 3 outputs", "fine-tune", 'training to "joint"']
        assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("training", ["heads", "joint"])
def test_weights_wait_for_no_device(folders, training, tmp_path, monkeypatch):
    """No tensor is made of numbers while the terms are computed: on a GPU each would be a synchronisation."""
    _, _, technique, forward = attached(folders["classes"], tmp_path, training=training, terms=BOTH)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was made of numbers")

    monkeypatch.setattr(torch, "tensor", never)
    assert technique.terms(forward).keys() == {"exits.heads", "exits.distill"}
