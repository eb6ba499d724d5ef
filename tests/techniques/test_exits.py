"""The exits technique: its terms by hand, what it trains, and what is left of it in a model folder."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exit_folders import CLASSES, LENGTH, TAGS, make_folder, plan_for, randomise, spec_of
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from ds_trainer.deploy.export import save_folded
from ds_trainer.models.folders import save_folder
from ds_trainer.recipe.exit_specs import ExitPolicy, ExitsSpec
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.exits.early_exit import load_for_inference, read_exits
from ds_trainer.techniques.exits.exits import Exits

pytest_plugins = ("support.exit_fixtures",)

Source = tuple[TextSpec, Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, csv_folder, scores_spec) -> dict[str, Source]:
    """A task of classes and one of scores, and for each a model of 4 layers without exits."""
    root = tmp_path_factory.mktemp("plain")
    classes, scores = (make_folder(root / name, labels, None) for name, labels in (("a", CLASSES), ("b", [])))
    return {"classes": (spec_of(csv_folder), classes), "scores": (scores_spec, scores)}


def attached(source: Source, cache: Path, folder: Path | None = None, **fields: Any):
    """Task, model with heads that disagree, technique and a forward on a batch of 10."""
    spec, plain = source
    task = build_task(spec, plain, cache)
    technique = Exits(ExitsSpec(**fields), LENGTH, task)
    model = technique.attach(task.build_model(folder or plain))
    if folder is None:
        torch.manual_seed(4)
        randomise(model.exit_heads, 0.5)
    batch = task.collate(task.examples("train"), range(10))
    return task, model, technique, Forward(batch, model(**batch.inputs), 0)


def exported(source: Source, cache: Path, folder: Path, start: Path | None = None, **techniques: Any) -> Any:
    """Train nothing, fold and save as after the last step; the folded model."""
    plan = plan_for(*source, cache, **techniques)
    plan = replace(plan, source=str(start)) if start else plan
    model, attached = plan.build()
    if hasattr(model, "exit_heads"):
        torch.manual_seed(4)
        randomise(model.exit_heads, 0.5)
    for technique in attached:
        technique.on_step(LENGTH.total)
    batch = plan.task.collate(plan.task.examples("train"), range(8))
    save_folded(model.eval(), attached, plan.task, batch, folder)
    return model


def said_by_heads(model: Any, forward: Forward) -> list[Tensor]:
    """Each head's logits, from the hidden states that `transformers` gives: pooler and classifier, first token."""
    hidden, said = model(**forward.batch.inputs, output_hidden_states=True).hidden_states, []
    for name, head in model.exit_heads.items():
        dense, classifier = (module for module in head.modules() if isinstance(module, torch.nn.Linear))
        said.append(classifier(dense(hidden[int(name)][:, 0]).tanh()))
    return said


@pytest.mark.parametrize(("training", "layers"), [("heads", None), ("joint", None), ("joint", [2])])
def test_heads_learn_the_sum_of_their_losses_or_a_mean_weighted_by_layer(
    sources, training, layers, tmp_path, monkeypatch
):
    """Alone their sum; jointly PABEE's sum of j * loss_j over sum of j, the model's own head included as the last. No
    tensor is made of numbers meanwhile: on a GPU each would be a synchronisation."""
    _, model, technique, forward = attached(sources["classes"], tmp_path, training=training, layers=layers)
    said = said_by_heads(model, forward)
    if training == "joint":
        said.append(forward.out.logits)
    losses = [F.cross_entropy(one, forward.batch.labels) for one in said]
    weights = [*(layers or [1, 2, 3]), 4] if training == "joint" else [1] * len(said)
    expected = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    with monkeypatch.context() as context:
        context.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a tensor was made of numbers"))
        terms = technique.terms(forward)
    assert terms.keys() == {"exits.heads"} == set(technique.term_units)
    torch.testing.assert_close(terms["exits.heads"], expected / (sum(weights) if training == "joint" else 1))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("classes", {"layers": [1, 5]}, r"exits: layers are \[1, 5\], and the model has 4"),
        ("scores", {"criterion": "confidence"}, "exits: .*a regression has no probabilities"),
    ],
)
def test_what_does_not_go_with_the_model_is_told_when_it_is_attached(sources, kind, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        attached(sources[kind], tmp_path, **fields)


def test_folding_leaves_a_plain_model_and_a_folder_that_exits(sources, tmp_path):
    """No head, hook or score is in the model; the folder beside it loads, with heads that were not pruned."""
    exits = {"early_exit_entropy": [0.5, 0.6], "layers": [1, 3], "training": "joint"}
    prune = {"final_threshold": 0.25, "initial_warmup": 0, "final_warmup": 0}
    model = exported(sources["classes"], tmp_path, tmp_path / "out", exits=exits, prune=prune)
    plain = AutoModelForSequenceClassification.from_pretrained(sources["classes"][1])
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    saved = read_exits(tmp_path / "out")
    assert (saved.layers, saved.pooling, saved.held_out, saved.calibration) == ([1, 3], "first", 0.25, None)
    assert saved.policy == ExitPolicy(criterion="entropy", thresholds=[0.5, 0.6])
    assert saved.held_out_key == build_task(*sources["classes"], tmp_path).held_out_key() != ""
    assert all(
        bool((p != 0).all()) for p in load_for_inference(tmp_path / "out").exit_heads.parameters() if p.dim() > 1
    )


def test_the_saved_heads_are_those_that_were_trained(sources, tmp_path):
    """The folder's model says at each layer what the technique's view of it says, wherever the model was run meanwhile;
    a score has a tolerance per head."""
    task, model, technique, forward = attached(sources["scores"], tmp_path, pooling="mean")
    model(**task.collate(task.examples("train"), range(3)).inputs)
    views = technique.views(forward, None)
    assert list(views) == ["exit_1", "exit_2", "exit_3"]
    said = [view.logits.detach() for view in views.values()]
    save_folder(technique.fold(model), technique.task.tokenizer, tmp_path / "out", technique.save)
    logits = load_for_inference(tmp_path / "out").all_logits(**forward.batch.inputs)
    torch.testing.assert_close(logits, torch.stack([*said, forward.out.logits.detach()]))
    saved = read_exits(tmp_path / "out")
    policy = ExitPolicy(criterion="patience", patience=2, thresholds=[0.1] * 3)
    assert (saved.pooling, saved.policy) == ("mean", policy)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({}, "classes", "its exit heads are trained further"),
        ({"layers": [1], "pooling": "mean"}, "classes", "new exit heads, since "),
        ({}, "scores", "new exit heads, since "),
    ],
)
def test_heads_of_the_folder_are_trained_further_where_they_fit(sources, asked, kind, words, tmp_path, caplog):
    """Bit for bit, after the same layers, of the same pooling and classes; else they are copies of the own head. Which
    is said once, when training starts: a model is built for the rehearsal and for the export, too."""
    exported(sources["classes"], tmp_path, tmp_path / "out", exits={})
    with caplog.at_level("INFO", logger="ds_trainer"):
        _, model, technique, _ = attached(sources[kind], tmp_path, tmp_path / "out", training="joint", **asked)
        assert "exit heads" not in caplog.text
        technique.start(torch.device("cpu"))
    assert caplog.text.count(words) == 1
    if "further" in words:
        saved = load_for_inference(tmp_path / "out").exit_heads.state_dict()
        assert all(torch.equal(value, saved[name]) for name, value in model.exit_heads.state_dict().items())
        return
    assert technique.layers == asked.get("layers", [1, 2, 3])
    assert all(torch.equal(head.steps[-1].weight, model.classifier.weight) for head in model.exit_heads.values())
    assert {head.pooling for head in model.exit_heads.values()} == {asked.get("pooling", "first")}


def test_heads_alone_need_a_trained_head_of_the_models_own(sources, tmp_path):
    """Copies of a random one on a frozen model would be scored against it: told when training starts, and not before,
    since what stands for a model to come may have none; joint training trains it, too."""
    spec, plain = sources["classes"]
    BertModel(BertConfig.from_pretrained(plain)).save_pretrained(tmp_path / "encoder")
    task = build_task(spec, plain, tmp_path)
    for source, training in ((plain, "heads"), (tmp_path / "encoder", "joint"), (tmp_path / "encoder", "heads")):
        technique = Exits(ExitsSpec(training=training), LENGTH, task)
        technique.attach(task.build_model(source))
        if (source, training) != (tmp_path / "encoder", "heads"):
            technique.start(torch.device("cpu"))
    with pytest.raises(ValueError) as caught:
        technique.start(torch.device("cpu"))
    words = ['training is "heads"', "encoder has no trained head of 3 outputs", "fine-tune", 'set training to "joint"']
    assert [word for word in words if word not in str(caught.value)] == []
    several = SimpleNamespace(loss_unit="example", logits_unit="example", multi_label=True)
    with pytest.raises(ValueError, match="several labels"):
        Exits(ExitsSpec(), LENGTH, several)


def test_heads_learn_from_labelled_tokens_alone(tags_task, tagger, tmp_path):
    """Saved, they say at every token what they said in training."""
    task, plain = tags_task, shutil.copytree(tagger, tmp_path / "plain", ignore=shutil.ignore_patterns("exit*"))
    technique = Exits(ExitsSpec(), LENGTH, task)
    model = technique.attach(task.build_model(plain)).eval()
    batch = task.collate(task.examples("train"), range(9))
    forward = Forward(batch, model(**batch.inputs), 0)
    term = technique.terms(forward)["exits.heads"]
    said = [view.logits.detach() for view in technique.views(forward, None).values()]
    at, tags = batch.others["head_positions"], batch.labels[:, 0]
    rows = [logits.flatten(0, 1)[at] for logits in said]
    assert len(at) < batch.mask.sum()
    torch.testing.assert_close(term, sum(F.cross_entropy(one, tags) for one in rows))
    save_folder(technique.fold(model), task.tokenizer, tmp_path / "out", technique.save)
    saved, unknown = read_exits(tmp_path / "out"), task.tokenizer.unk_token_id
    assert saved.pooling is None
    assert {*saved.special_tokens, unknown} == {*task.tokenizer.all_special_ids} != {*saved.special_tokens}
    early = load_for_inference(tmp_path / "out")
    torch.testing.assert_close(early.all_logits(**batch.inputs), torch.stack([*said, forward.out.logits.detach()]))
    assert early(**batch.inputs).logits.shape == (*batch.mask.shape, len(TAGS))
