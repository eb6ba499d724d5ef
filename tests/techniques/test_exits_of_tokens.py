"""Exits of token classifiers: a sequence leaves with all its tokens, once the least certain of them would."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.exit_folders import LENGTH, TAGS, exiting, json_of, make_tagger, tags_spec
from support.exit_models import NEVER, between, classifier, early_exit, pad_of, texts
from support.launching import chosen
from torch import Tensor
from transformers import AutoModelForTokenClassification

from ds_trainer.cli.evaluate import calibrate_command
from ds_trainer.models.folders import save_folder
from ds_trainer.recipe.exit_specs import ExitPolicy, ExitsSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward, Task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, doubts_of_all, load_for_inference, read_exits
from ds_trainer.techniques.exits.exit_evaluation import all_heads, evaluate_exits
from ds_trainer.techniques.exits.exits import Exits

FAMILIES = ("bert", "roberta", "distilbert", "electra", "deberta", "modernbert")
EVERY = [(family, criterion) for family in FAMILIES for criterion in ("entropy", "confidence", "patience")]
SPECIAL = (5, 11, 23)
"""Ids that are in many of the texts: here they stand for special tokens."""


def tagger(family: str, criterion: str) -> EarlyExitModel:
    """A model with heads that disagree, at thresholds of which about a third of the texts are below."""
    plain = classifier(family, 2 if criterion == "patience" else 3, AutoModelForTokenClassification)
    model = EarlyExitModel(plain, early_exit(plain, NEVER).exit_heads, NEVER, SPECIAL).eval()
    ids, mask = texts(padding=pad_of(family))
    if criterion == "patience":
        with torch.no_grad():  # heads that mostly agree
            for head in model.exit_heads.values():
                head.steps[-1].weight.copy_(model.heads[-1].steps[-1].weight)
        model.policy = ExitPolicy(criterion="patience", patience=1)
        return model
    doubts = doubts_of_all(criterion, model.all_logits(ids, mask), model.counted(ids, mask))
    model.policy = ExitPolicy(criterion=criterion, thresholds=[abs(between(values, 0.35)) for values in doubts])
    return model


def leaves_at(model: EarlyExitModel, ids: Tensor, logits: Tensor) -> int:
    """The layer at which a text without padding leaves, token by token, in plain words; logits (heads, length, n)."""
    words = [place for place, id in enumerate(ids.tolist()) if id not in SPECIAL]
    shares = logits.double().softmax(-1)[:, words]
    policy, answers = model.policy, logits[:, words].argmax(-1).tolist()
    for head, layer in enumerate(model.layers[:-1]):
        if policy.criterion == "patience":
            leaves = head > 0 and answers[head] == answers[head - 1]
        elif policy.criterion == "entropy":
            leaves = max(-sum(p * p.log() for p in row) for row in shares[head]) < policy.thresholds[head]
        else:
            leaves = min(max(row) for row in shares[head]) > policy.thresholds[head]
        if leaves:
            return layer
    return model.layers[-1]


@pytest.mark.parametrize(("family", "criterion"), chosen(EVERY, lambda case: case[0] == "bert" or case[1] == "entropy"))
def test_a_batch_leaves_as_its_sequences_do_alone(family, criterion):
    """The layer exactly, the logits of every token to 1e-4; both as the rule says it in plain words, token by token."""
    model = tagger(family, criterion)
    ids, mask = texts(padding=pad_of(family))
    out = model(ids, mask)
    assert len(set(out.exit_layers.tolist())) >= 3
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(ids[row : row + 1, :length])
        layer = leaves_at(model, ids[row, :length], model.all_logits(ids[row : row + 1, :length])[:, 0])
        assert out.exit_layers[row] == alone.exit_layers[0] == layer
        torch.testing.assert_close(out.logits[row, :length], alone.logits[0], atol=1e-4, rtol=0)


def test_where_nothing_is_of_the_text_all_that_is_attended_counts():
    """A sequence of special tokens alone, such as a sentence that is `[SEP]`, is as sure as these are."""
    model = tagger("bert", "entropy")
    text = next(id for id in range(20) if id not in SPECIAL)
    ids, mask = torch.tensor([[SPECIAL[0]] * 3, [SPECIAL[0], text, text]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert model.counted(ids, mask).tolist() == [[True, True, False], [False, True, False]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, csv_folder: Path, cache: Path) -> Path:
    """A tagger with exits; tests leave it as it is."""
    return make_tagger(tmp_path_factory.mktemp("tagger"), csv_folder, cache)


@pytest.fixture
def task(csv_folder: Path, folder: Path, cache: Path) -> Task:
    return build_task(tags_spec(csv_folder), folder, cache)


def run_early(model: EarlyExitModel, task: Task, split: str) -> tuple[dict[str, float], float]:
    """The scores and the mean layers of a split, run in batches of 13 in its own order."""
    examples, answers, layers = task.examples(split), {}, []
    for start in range(0, len(examples), 13):
        batch = task.collate(examples, range(len(examples))[start : start + 13])
        out = model(**batch.inputs)
        answers |= task.answers(out, batch)
        layers += out.exit_layers.tolist()
    return task.score(split, answers), pytest.approx(sum(layers) / len(layers))


def test_what_is_computed_from_all_heads_is_what_the_model_does(task: Task, folder: Path) -> None:
    """Points of each curve, set as the policy and run, have their entity scores and layers; so have single heads."""
    model = exiting(task, folder)
    of_split = evaluate_exits(folder, task, 8)[1]["splits"]["validation"]
    heads = all_heads(model, task, "validation", 8, None)
    for criterion, points in of_split["curves"].items():
        for point in [points[0], points[len(points) // 2], points[-1]]:
            policy = heads.policy(criterion, point["threshold"])
            assert (point["scores"], point["mean_layers"]) == run_early(
                exiting(task, folder, policy), task, "validation"
            )
    early = of_split["early_exit"]
    assert len([count for count in early["exit_counts"].values() if count]) >= 2
    assert (early["scores"], early["mean_layers"]) == run_early(model, task, "validation")
    assert {"f1", "precision", "recall"} <= of_split["heads"]["1"].keys()
    nobody, _ = run_early(exiting(task, folder, NEVER), task, "validation")
    assert of_split["heads"]["4"] == nobody != of_split["heads"]["1"]


def test_a_command_calibrates_by_entities(
    csv_folder: Path, folder: Path, cache: Path, task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run under the new policy, held-out sentences are as fast and as good as printed; special tokens stay."""
    for aim, value in (("target_speedup", 1.2), ("max_drop", 2.0)):
        model = tmp_path / aim
        shutil.copytree(folder, model)
        calibrate_command([str(model), f"--{aim}", str(value), *flags_of(csv_folder, cache)])
        record = json_of(capsys.readouterr().out)
        early = load_for_inference(model)
        assert isinstance(early, EarlyExitModel)
        assert early.special_tokens.tolist() == read_exits(folder).special_tokens == [0, 2, 3, 4]
        assert (record["scores"], record["mean_layers"]) == run_early(exiting(task, model), task, "held_out")
        reached = record["expected_speedup"] if aim == "target_speedup" else record["scores"]["f1"] + 1e-6
        assert reached >= (value if aim == "target_speedup" else record["full_scores"]["f1"] - value / 100)


def flags_of(csv_folder: Path, cache: Path) -> list[str]:
    """The flags of its task."""
    files = ["--set", 'train_file="train.conll"', "--set", 'validation_file="validation.conll"']
    common = ["--task_name", "ner", "--data_dir", str(csv_folder), "--cache_dir", str(cache)]
    return [*common, *files, "--set", "max_seq_length=32", "--set", "held_out=0.25"]


def test_heads_learn_from_labelled_tokens_alone(task: Task, folder: Path, tmp_path: Path) -> None:
    """Saved, they say at every token what they said in training."""
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("exit*"))
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
