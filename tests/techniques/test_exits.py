"""The exits technique: its terms by hand, what it trains, and what is left of it in a model folder."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exit_training import BOTH, LENGTH, attached, exported, plan_for, spec_of
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from ds_trainer.config.exit_specs import ExitPolicy
from ds_trainer.config.recipe import ExitsSpec
from ds_trainer.models.folders import save_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, load_for_inference
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.exits.heads import EXITS_FILE, HEADS_FILE, has_exits, read_exits


def said_by_heads(model: Any, forward: Forward) -> dict[int, Tensor]:
    """Each head's logits, from the hidden states that `transformers` gives: pooler and classifier, first token."""
    hidden = model(**forward.batch.inputs, output_hidden_states=True).hidden_states
    found = {}
    for name, head in model.exit_heads.items():
        dense, classifier = (module for module in head.modules() if isinstance(module, torch.nn.Linear))
        found[int(name)] = classifier(dense(hidden[int(name)][:, 0]).tanh())
    return found


@pytest.mark.parametrize(("kind", "weights"), [("classes", None), ("scores", [0.5, 0.0])])
def test_heads_alone_learn_the_sum_of_their_losses(folders, kind, weights, tmp_path):
    """The model's own is not in it; each loss is the task's on that head's logits, times the head's weight, by
    default 1."""
    _, model, technique, forward = attached(folders[kind], tmp_path, head_weights=weights)
    labels = forward.batch.labels
    said = said_by_heads(model, forward)
    losses = [
        F.cross_entropy(one, labels) if kind == "classes" else (one.squeeze(-1) - labels).square().mean()
        for one in said.values()
    ]
    expected = sum(weight * loss for weight, loss in zip(weights or [1, 1], losses, strict=True))
    (term,) = technique.terms(forward).values()
    torch.testing.assert_close(term, expected)
    assert abs(float((losses[0] - losses[1]).detach())) > 0.01


@pytest.mark.parametrize("weights", [None, [3.0, 0.0, 1.0]])
def test_joint_training_learns_a_mean_weighted_by_the_layer(folders, weights, tmp_path):
    """PABEE's: sum of j * loss_j over sum of j, the model's own head included as the last; or by other weights."""
    _, model, technique, forward = attached(folders["classes"], tmp_path, training="joint", head_weights=weights)
    said = [*said_by_heads(model, forward).values(), forward.out.logits]
    losses = torch.stack([F.cross_entropy(one, forward.batch.labels) for one in said])
    by_layer = torch.tensor(weights or [1.0, 2.0, 3.0])
    torch.testing.assert_close(technique.terms(forward)["exits.heads"], (by_layer * losses).sum() / by_layer.sum())
    assert technique.term_units == {"exits.heads": "example"}


def test_weights_are_by_the_number_of_the_layer_not_of_the_head(folders, tmp_path):
    """A single head after layer 2 of 3 weighs 2, and the own one 3."""
    _, model, technique, forward = attached(folders["classes"], tmp_path, training="joint", layers=[2])
    one, own = said_by_heads(model, forward)[2], forward.out.logits
    labels = forward.batch.labels
    expected = (2 * F.cross_entropy(one, labels) + 3 * F.cross_entropy(own, labels)) / 5
    torch.testing.assert_close(technique.terms(forward)["exits.heads"], expected)


@pytest.mark.parametrize("training", ["heads", "joint"])
def test_the_own_head_teaches_the_others(folders, training, tmp_path):
    """exits.distill: T^2 * KL(own || head) at temperature T, summed over the heads, or with joint training their
    mean weighted by the layer."""
    _, model, technique, forward = attached(
        folders["classes"], tmp_path, training=training, terms=BOTH, temperature=3.0
    )
    own = (forward.out.logits / 3).detach()
    kls = torch.stack(
        [
            9 * F.kl_div((one / 3).log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="batchmean")
            for one in said_by_heads(model, forward).values()
        ]
    )
    expected = kls.sum() if training == "heads" else (torch.tensor([1.0, 2.0]) * kls).sum() / 3
    found = technique.terms(forward)
    torch.testing.assert_close(found["exits.distill"], expected)
    assert found.keys() == {"exits.heads", "exits.distill"} == set(technique.term_units)
    assert float(expected.detach()) > 0.01


def test_a_regression_is_taught_by_squared_error(folders, tmp_path):
    """A score has no distribution."""
    _, model, technique, forward = attached(folders["scores"], tmp_path, terms=["distill"])
    said = said_by_heads(model, forward).values()
    expected = sum((one - forward.out.logits).square().mean() for one in said)
    (term,) = technique.terms(forward).values()
    torch.testing.assert_close(term, expected)


@pytest.mark.parametrize("kind", ["classes", "scores"])
def test_the_teaching_head_learns_nothing_from_its_pupils(folders, kind, tmp_path):
    """No gradient of exits.distill reaches the own head; the layers below the heads get one, in joint training."""
    _, model, technique, forward = attached(folders[kind], tmp_path, terms=["distill"], training="joint")
    before = forward.out.logits.detach().clone()
    technique.terms(forward)["exits.distill"].backward()
    assert torch.equal(forward.out.logits, before)
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert not any(name.startswith(("classifier", "bert.pooler", "bert.encoder.layer.2")) for name in reached)
    assert {name for name, _ in model.named_parameters() if name.startswith("exit_heads.")} <= reached
    assert {"bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"} <= reached


def test_both_terms_can_be_learned_at_once(folders, tmp_path):
    """The teacher's logits are still the model's after exits.distill has looked at them: a second backward is fine."""
    task, model, technique, forward = attached(folders["classes"], tmp_path, terms=BOTH, training="joint")
    expected = task.loss(SimpleNamespace(logits=forward.out.logits.detach().clone()), forward.batch)
    found = technique.terms(forward)
    own = task.loss(forward.out, forward.batch)
    torch.testing.assert_close(own.detach(), expected)
    (own + found["exits.heads"] + found["exits.distill"]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_in_the_second_stage_only_the_heads_are_trained(folders, tmp_path):
    """Every parameter of the backbone and of the own head is frozen, none of the heads'; a step changes them alone."""
    plan = plan_for(folders["classes"], tmp_path, exits={})
    model, groups, objective = plan.prepare()
    trained = {name for group in groups for name in group.parameters}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("exit_heads.")}
    assert objective.weights == {"task": 0.0, "exits.heads": 1.0}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = plan.task.collate(plan.task.examples("train"), range(8))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss, _ = objective(Forward(batch, model(**batch.inputs), 0))
    loss.backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained


def test_joint_training_trains_everything(folders, tmp_path):
    """No parameter is frozen, and each gets a gradient."""
    plan = plan_for(folders["classes"], tmp_path, exits={"training": "joint"})
    model, _, objective = plan.prepare()
    assert all(p.requires_grad for p in model.parameters())
    batch = plan.task.collate(plan.task.examples("train"), range(8))
    objective(Forward(batch, model(**batch.inputs), 0))[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_heads_are_trained_whatever_pruning_freezes(folders, tmp_path):
    """Static pruning freezes all weights but its scores: heads beside it are trained, and nothing else."""
    prune = {"train_weights": False, "initial_warmup": 0, "final_warmup": 0}
    plan = plan_for(folders["classes"], tmp_path, exits={"training": "joint"}, prune=prune)
    model = plan.prepare().model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if name.endswith("mask_scores")}
    assert {name for name, _ in model.named_parameters() if name.startswith("exit_heads")} <= trained
    assert all(name.endswith("mask_scores") or name.startswith("exit_heads.") for name in trained)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_weights": [1.0]}, ["head_weights are [1.0]", "give 2 numbers", "after layers [1, 2]"]),
        ({"head_weights": [1.0, 1.0], "training": "joint"}, ["give 3 numbers", "one for the model's own"]),
        ({"head_weights": [0.0, 0.0, 1.0], "training": "joint"}, ["not all of them 0"]),
        ({"layers": [1, 4]}, ["names layer 4", "the model has 3", "1 to 3"]),
        ({"target_speedup": 3.5}, ["target_speedup 3.5", "the fastest is 3", "layer 1 of 3"]),
        ({"target_speedup": 1.6, "layers": [2]}, ["target_speedup 1.6", "the fastest is 1.5", "layer 2 of 3"]),
        ({"target_speedup": 1.6, "criterion": "patience"}, ["the fastest is 1.5", "layer 2 of 3"]),
        ({"max_drop": 1, "criterion": "patience", "per_head": True}, ["per_head: patience is the same for all"]),
        ({"layers": [3]}, ["the last layer, 3, has the model's own head"]),
        ({"early_exit_entropy": [0.1, 0.2, 0.3]}, ["3 thresholds for 2 heads by entropy"]),
        ({"criterion": "confidence", "early_exit_confidence": [0.9]}, ["1 thresholds for 2 heads"]),
    ],
)
def test_what_does_not_go_with_the_model_is_told_at_once(folders, fields, words, tmp_path):
    """When the technique is attached, with what to write instead."""
    with pytest.raises(ValueError) as caught:
        attached(folders["classes"], tmp_path, **fields)
    assert [word for word in ["exits: ", *words] if word not in str(caught.value)] == []


def test_a_criterion_that_a_regression_has_not_is_told(folders, tmp_path):
    """Entropy of a score means nothing."""
    with pytest.raises(ValueError, match='a regression has no probabilities: set "patience"'):
        attached(folders["scores"], tmp_path, criterion="confidence")


def test_a_model_of_one_layer_has_nowhere_to_leave(folders, tmp_path):
    """Before its last layer there is none."""
    config = BertConfig.from_pretrained(folders["classes"], num_hidden_layers=1)
    task = build_task(spec_of(folders["classes"]), folders["classes"], tmp_path)
    with pytest.raises(ValueError, match="the last layer, 1, has the model's own head"):
        Exits(ExitsSpec(), LENGTH, task).attach(BertForSequenceClassification(config))


@pytest.mark.parametrize(("layers", "heads"), [(None, [1, 2]), ([2, 3], [2])])
def test_heads_are_after_the_layers_asked_for(folders, layers, heads, tmp_path):
    """All but the last by default; the last, where it is named, has the model's own; their order is the model's."""
    _, model, technique, _ = attached(folders["classes"], tmp_path, layers=layers)
    assert technique.layers == list(map(int, technique.heads)) == heads
    assert list(model.exit_heads) == [str(layer) for layer in heads]


def test_each_head_is_one_view(folders, tmp_path):
    """exit_1, exit_2: the head's own logits, which the task can answer from."""
    task, model, technique, forward = attached(folders["classes"], tmp_path)
    views = technique.views(forward, None)
    assert list(views) == ["exit_1", "exit_2"]
    for layer, logits in said_by_heads(model, forward).items():
        torch.testing.assert_close(views[f"exit_{layer}"].logits, logits)
    assert task.answers(views["exit_1"], forward.batch).keys() == set(range(10))
    assert technique.cheap_views


def test_readings_are_each_heads_mean_loss_since_the_last(folders, tmp_path):
    """Unweighted, over the forwards since; nothing where there were none."""
    task, model, technique, forward = attached(folders["classes"], tmp_path, head_weights=[5.0, 0.0])
    expected = []
    for rows in (range(5), range(5, 10)):
        batch = task.collate(task.examples("train"), rows)
        forward = Forward(batch, model(**batch.inputs), 0)
        technique.terms(forward)
        said = said_by_heads(model, forward).values()
        expected.append([float(F.cross_entropy(one, batch.labels).detach()) for one in said])
    means = torch.tensor(expected).mean(0).tolist()
    assert technique.readings() == {f"exits/loss/{i + 1}": pytest.approx(mean) for i, mean in enumerate(means)}
    assert technique.readings() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_in_the_precision_of_the_heads(folders, dtype, tmp_path):
    """Under autocast the states come in another than the weights of the heads: they are cast, the loss is fp32."""
    _, model, technique, forward = attached(folders["classes"], tmp_path)
    model.exit_heads.to(dtype)
    assert {view.logits.dtype for view in technique.views(forward, None).values()} == {dtype}
    model(**forward.batch.inputs)
    assert technique.terms(forward)["exits.heads"].dtype == torch.float32


def test_folding_leaves_a_plain_model_and_a_folder_that_exits(folders, tmp_path):
    """No head is in the model or its weights; the folder beside them says where they are and loads."""
    plan = plan_for(folders["classes"], tmp_path, exits={"early_exit_entropy": [0.5, 0.6], "layers": [1, 2]})
    model, _ = exported(plan, tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(folders["classes"])
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    found, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))
    saved = read_exits(tmp_path / "out")
    assert saved.layers == [1, 2]
    assert (saved.pooling, saved.held_out, saved.calibration) == ("first", 0.0, None)
    assert saved.policy == ExitPolicy(criterion="entropy", thresholds=[0.5, 0.6])
    early = load_for_inference(tmp_path / "out")
    assert isinstance(early, EarlyExitModel)
    assert early.layers == [1, 2, 3]


def test_the_saved_heads_are_those_that_were_trained(folders, tmp_path):
    """The folder's model says at each layer what the technique's heads said while training."""
    _, model, technique, forward = attached(folders["classes"], tmp_path, pooling="mean")
    said = {name: view.logits.detach() for name, view in technique.views(forward, None).items()}
    own = forward.out.logits.detach()
    save_folder(technique.fold(model), technique.task.tokenizer, tmp_path / "out", technique.save)
    early = load_for_inference(tmp_path / "out")
    logits = early.all_logits(**forward.batch.inputs)
    torch.testing.assert_close(logits, torch.stack([*said.values(), own]))
    assert read_exits(tmp_path / "out").pooling == "mean"


def test_held_out_is_told_in_the_folder(folders, tmp_path):
    """What calibration later may look at is what this phase did not train on."""
    task = build_task(spec_of(folders["classes"], held_out=0.25), folders["classes"], tmp_path)
    technique = Exits(ExitsSpec(), LENGTH, task)
    model = technique.attach(task.build_model(folders["classes"]))
    save_folder(technique.fold(model), task.tokenizer, tmp_path / "out", technique.save)
    saved = read_exits(tmp_path / "out")
    assert (saved.held_out, saved.held_out_key) == (0.25, task.held_out_key())
    assert saved.held_out_key


def test_a_regression_saves_patience_with_a_tolerance_a_head(folders, tmp_path):
    """The default criterion of a score, and the default tolerance for each head."""
    exported(plan_for(folders["scores"], tmp_path, exits={}), tmp_path / "out")
    policy = read_exits(tmp_path / "out").policy
    assert policy == ExitPolicy(criterion="patience", patience=2, thresholds=[0.1, 0.1])
    assert load_for_inference(tmp_path / "out").regression


def test_a_pruned_model_with_exits_folds_to_a_plain_one(folders, tmp_path):
    """Neither scores nor heads in the model; the asked zeros in its weights; the heads beside it."""
    prune = {"final_threshold": 0.25, "initial_warmup": 0, "final_warmup": 0, "mask_init": "kaiming"}
    plan = plan_for(folders["classes"], tmp_path, exits={"training": "joint"}, prune=prune)
    model, (exits, *_) = exported(plan, tmp_path / "out")
    assert exits.name == "exits"
    plain = AutoModelForSequenceClassification.from_pretrained(folders["classes"])
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, weight in model.bert.encoder.named_parameters():
        if weight.dim() > 1:
            assert int(weight.count_nonzero()) == weight.numel() // 4, name
    early = load_for_inference(tmp_path / "out")
    assert isinstance(early, EarlyExitModel)
    assert all(bool((p != 0).all()) for name, p in early.exit_heads.named_parameters() if p.dim() > 1)


def test_heads_of_the_folder_are_trained_further(folders, tmp_path, caplog):
    """A phase that starts from a model with heads after the same layers goes on with them, bit for bit."""
    exported(plan_for(folders["classes"], tmp_path, exits={}), tmp_path / "out")
    with caplog.at_level("INFO", logger="ds_trainer"):
        _, again, technique, _ = attached(folders["classes"], tmp_path, source=str(tmp_path / "out"), training="joint")
        assert "exit heads" not in caplog.text, "a model is built for the rehearsal and for the export, too"
        technique.start(torch.device("cpu"))
    assert caplog.text.count("its exit heads are trained further") == 1
    saved = load_for_inference(tmp_path / "out").exit_heads.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in again.exit_heads.state_dict().items())
    own = [step for step in again.exit_heads["1"].steps if isinstance(step, torch.nn.Linear)]
    assert not torch.equal(own[0].weight, again.classifier.weight)


@pytest.mark.parametrize("asked", [{"layers": [1]}, {"pooling": "mean"}])
def test_heads_of_another_kind_are_made_anew(folders, asked, tmp_path, caplog):
    """After other layers, or with another pooling: copies of the own head, and it is told."""
    exported(plan_for(folders["classes"], tmp_path, exits={}), tmp_path / "out")
    with caplog.at_level("INFO", logger="ds_trainer"):
        _, model, technique, _ = attached(folders["classes"], tmp_path, source=str(tmp_path / "out"), **asked)
        technique.start(torch.device("cpu"))
    assert caplog.text.count("out: new exit heads, since ") == 1
    assert technique.layers == asked.get("layers", [1, 2])
    assert all(torch.equal(head.steps[-1].weight, model.classifier.weight) for head in model.exit_heads.values())
    assert {head.pooling for head in model.exit_heads.values()} == {asked.get("pooling", "first")}


def test_a_phase_without_exits_leaves_no_heads(folders, tmp_path):
    """Whatever the folder it starts from: a model that was trained on has outgrown them."""
    exported(plan_for(folders["classes"], tmp_path, exits={}), tmp_path / "first")
    assert has_exits(tmp_path / "first")
    plan = replace(plan_for(folders["classes"], tmp_path), source=str(tmp_path / "first"))
    exported(plan, tmp_path / "second")
    assert not {EXITS_FILE, HEADS_FILE} & {path.name for path in (tmp_path / "second").iterdir()}


def test_broken_heads_in_the_folder_are_told_when_the_phase_starts(folders, tmp_path):
    """Not replaced by new ones without a word."""
    exported(plan_for(folders["classes"], tmp_path, exits={}), tmp_path / "out")
    (tmp_path / "out" / HEADS_FILE).write_bytes(b"")
    with pytest.raises(ValueError, match="does not hold the heads of this model"):
        attached(folders["classes"], tmp_path, source=str(tmp_path / "out"))
