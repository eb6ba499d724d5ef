"""Exits of token classifiers: a sequence leaves with all its tokens, by the least certain of them or by their mean."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.exhaustive import chosen
from support.exit_folders import TAGS, exiting, json_of, make_tagger, tags_spec
from support.exit_models import NEVER, between, classifier, early_exit, pad_of, texts
from support.exit_training import LENGTH
from torch import Tensor
from transformers import AutoModelForTokenClassification

from ds_trainer.cli.benchmark import read_benchmark_job
from ds_trainer.cli.calibrate import calibrate_command
from ds_trainer.cli.evaluate import read_evaluate_job
from ds_trainer.cli.export import export_command
from ds_trainer.config.exit_specs import ExitPolicy, ExitsSpec
from ds_trainer.deploy.benchmark import measure
from ds_trainer.models.folders import save_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward, Task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, load_for_inference
from ds_trainer.techniques.exits.exit_evaluation import all_heads, calibrate, evaluate_exits
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.exits.heads import read_exits, write_exits
from ds_trainer.techniques.exits.policy import doubt, doubts_of_all

FAMILIES = ("bert", "roberta", "distilbert", "electra", "deberta", "modernbert")
RULES = (("entropy", "least_certain"), ("confidence", "mean"), ("entropy", "mean"), ("patience", "least_certain"))
EVERY = [(family, *rule) for family in FAMILIES for rule in RULES]
SPECIAL = (5, 11, 23)
"""Ids that are in many of the texts: here they stand for special tokens."""


def tagger(family: str, criterion: str, over: str) -> EarlyExitModel:
    """A model with heads of their own mind, at thresholds of which about a third of the texts are below."""
    labels = 2 if criterion == "patience" else 3
    plain = classifier(family, labels, AutoModelForTokenClassification)
    model = EarlyExitModel(plain, early_exit(plain, NEVER).exit_heads, NEVER, SPECIAL).eval()
    ids, mask = texts(padding=pad_of(family))
    if criterion == "patience":
        with torch.no_grad():  # heads that mostly agree
            for head in model.exit_heads.values():
                head.steps[-1].weight.copy_(model.heads[-1].steps[-1].weight)
        model.policy = ExitPolicy(criterion="patience", patience=1)
        return model
    doubts = doubts_of_all(criterion, over, model.all_logits(ids, mask), model.counted(ids, mask))
    limits = [abs(between(values, 0.35)) for values in doubts]
    model.policy = ExitPolicy(criterion=criterion, thresholds=limits, sequence_uncertainty=over)
    return model


def leaves_at(model: EarlyExitModel, ids: Tensor, logits: Tensor) -> int:
    """The layer at which a text without padding leaves, token by token, in plain words; logits (heads, length, n)."""
    words = [place for place, id in enumerate(ids.tolist()) if id not in SPECIAL]
    shares = logits.double().softmax(-1)[:, words]
    policy, answers = model.policy, logits[:, words].argmax(-1).tolist()
    pick = (lambda values: sum(values) / len(values)) if policy.sequence_uncertainty == "mean" else max
    for head, layer in enumerate(model.layers[:-1]):
        if policy.criterion == "patience":
            if head and answers[head] == answers[head - 1]:
                return layer
        elif policy.criterion == "entropy":
            if pick([-sum(p * p.log() for p in row) for row in shares[head]]) < policy.thresholds[head]:
                return layer
        elif -pick([-max(row) for row in shares[head]]) > policy.thresholds[head]:
            return layer
    return model.layers[-1]


@pytest.mark.parametrize(
    ("family", "criterion", "over"), chosen(EVERY, lambda case: case[0] == "bert" or case[1:] == RULES[0])
)
def test_a_batch_leaves_as_its_sequences_do_alone(family, criterion, over):
    """The layer exactly, the logits of every token to 1e-4; both as the rule says it in plain words, token by token."""
    model = tagger(family, criterion, over)
    ids, mask = texts(padding=pad_of(family))
    out = model(ids, mask)
    assert len(set(out.exit_layers.tolist())) >= 3
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(ids[row : row + 1, :length])
        layer = leaves_at(model, ids[row, :length], model.all_logits(ids[row : row + 1, :length])[:, 0])
        assert out.exit_layers[row] == alone.exit_layers[0] == layer
        torch.testing.assert_close(out.logits[row, :length], alone.logits[0], atol=1e-4, rtol=0)


def test_a_doubt_is_that_of_the_tokens_that_count():
    """The largest, or the mean: whatever stands at other places, NaN too; a token of NaN that counts makes it NaN."""
    likeliest = torch.tensor([[0.9, 0.6, 0.5], [0.8, 0.7, 0.6]], dtype=torch.double)
    shares = torch.stack([likeliest, 1 - likeliest], -1)
    counted = torch.tensor([[True, True, False], [True, True, True]])
    found = {over: doubt("confidence", over, shares.log(), None, counted) for over in ("least_certain", "mean")}
    torch.testing.assert_close(found["least_certain"], torch.tensor([-0.6, -0.6], dtype=torch.double))
    torch.testing.assert_close(found["mean"], torch.tensor([-0.75, -0.7], dtype=torch.double))
    for over, expected in found.items():
        broken = shares.log()
        broken[0, 2] = torch.nan
        torch.testing.assert_close(doubt("confidence", over, broken, None, counted), expected)
        broken[0, 0] = torch.nan
        assert doubt("confidence", over, broken, None, counted)[0].isnan()
    before = shares.clone()
    before[0, 2], before[1, 1] = before[0, 2].flip(-1) + torch.tensor([0.0, 1.0]), before[1, 1].flip(-1)
    assert doubt("patience", "mean", shares, before, counted).tolist() == [0.0, 1.0]


def test_where_nothing_is_of_the_text_all_that_is_attended_counts():
    """A sequence of special tokens alone, such as a sentence that is `[SEP]`, is as sure as these are."""
    model = tagger("bert", *RULES[0])
    special = int(model.special_tokens[0])
    text = next(id for id in range(20) if id not in model.special_tokens)
    ids, mask = torch.tensor([[special] * 3, [special, text, text]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert model.counted(ids, mask).tolist() == [[True, True, False], [False, True, False]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A tagger with exits beside the files of its task; tests leave it as it is."""
    return make_tagger(tmp_path_factory.mktemp("tagger"), cache)


@pytest.fixture
def task(folder: Path, cache: Path) -> Task:
    return build_task(tags_spec(folder), folder, cache)


def run_early(model: EarlyExitModel, task: Task, split: str) -> tuple[dict[str, float], float]:
    """The scores and the mean layers of a split, run in batches of 13 in its own order."""
    examples, answers, layers = task.examples(split), {}, []
    for start in range(0, len(examples), 13):
        batch = task.collate(examples, range(len(examples))[start : start + 13])
        out = model(**batch.inputs)
        answers |= task.answers(out, batch)
        layers += out.exit_layers.tolist()
    return task.score(split, answers), sum(layers) / len(layers)


@pytest.mark.parametrize("over", ["least_certain", "mean"])
def test_what_is_found_offline_is_what_the_model_does(task: Task, folder: Path, over: str) -> None:
    """Points of each curve, set as the policy and run, have their entity scores and layers; so have single heads."""
    model = exiting(task, folder, ExitPolicy(criterion="entropy", thresholds=[1.3] * 3, sequence_uncertainty=over))
    of_split = evaluate_exits(model, task, 8)["splits"]["validation"]
    heads = all_heads(model, task, "validation", 8, model.policy)
    layers = set()
    for criterion, points in of_split["curves"].items():
        for point in [points[0], points[len(points) // 2], points[-1]]:
            policy = heads.policy(criterion, point["threshold"])
            scores, mean = run_early(exiting(task, folder, policy), task, "validation")
            assert (point["scores"], point["mean_layers"]) == (scores, pytest.approx(mean))
            layers.add(mean)
    assert len(layers) >= 5
    scores, mean = run_early(model, task, "validation")
    assert (of_split["early_exit"]["scores"], of_split["early_exit"]["mean_layers"]) == (scores, pytest.approx(mean))
    assert {"f1", "precision", "recall"} <= of_split["heads"]["1"].keys()
    nobody, _ = run_early(exiting(task, folder, NEVER), task, "validation")
    assert of_split["heads"]["4"] == nobody != of_split["heads"]["1"]


def test_calibration_reaches_its_target_by_entities(task: Task, folder: Path) -> None:
    """Run under the policy found, one threshold or one a head, held-out sentences are as fast and as good as told."""
    model = exiting(task, folder)
    for fields in ({"target_speedup": 1.3}, {"max_drop": 2.0}, {"max_drop": 2.0, "per_head": True}):
        policy, told = calibrate(model, task, 16, ExitsSpec(**fields))
        scores, mean = run_early(exiting(task, folder, policy), task, "held_out")
        assert (told["scores"], told["mean_layers"]) == (scores, pytest.approx(mean))
        if "max_drop" in fields:
            assert scores["f1"] >= told["full_scores"]["f1"] - 0.02 - 1e-6
        else:
            assert 4 / mean >= 1.3


def test_the_rule_and_the_special_tokens_stay_with_the_folder(
    folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the calibrating command, a reload, and thresholds that an evaluation gives in place of the folder's."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    task = flags_of(folder, cache)
    aim = ["--target_speedup", "1.2", "--per_head", "--sequence_uncertainty", "mean"]
    calibrate_command([str(model), *aim, *task])
    told = json_of(capsys.readouterr().out)
    saved = read_exits(model)
    assert saved.special_tokens == read_exits(folder).special_tokens == [0, 2, 3, 4]
    assert saved.policy == ExitPolicy(criterion="entropy", thresholds=told["thresholds"], sequence_uncertainty="mean")
    early = load_for_inference(model)
    assert isinstance(early, EarlyExitModel)
    assert (early.policy, early.special_tokens.tolist()) == (saved.policy, [0, 2, 3, 4])
    job = read_evaluate_job([str(model), "--early_exit_entropy", "0.5", *task])
    assert job.exit_policy(saved).sequence_uncertainty == "mean"


def flags_of(folder: Path, cache: Path) -> list[str]:
    """The flags of its task."""
    files = ["--set", 'train_file="train.conll"', "--set", 'validation_file="dev.conll"', "--set", "max_seq_length=24"]
    common = ["--task_name", "ner", "--data_dir", str(folder), "--cache_dir", str(cache)]
    return [*common, *files, "--set", "held_out=0.25"]


def test_heads_learn_from_labelled_tokens_alone(task: Task, folder: Path, tmp_path: Path) -> None:
    """So do their losses, on tags and on the own head; saved, they say at every token what they said in training."""
    (tmp_path / "plain").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, tmp_path / "plain")
    technique = Exits(ExitsSpec(terms=["heads", "distill"], sequence_uncertainty="mean"), LENGTH, task)
    model = technique.attach(task.build_model(tmp_path / "plain")).eval()
    batch = task.collate(task.examples("train"), range(9))
    forward = Forward(batch, model(**batch.inputs), 0)
    terms = technique.terms(forward)
    forward = Forward(batch, model(**batch.inputs), 0)
    said = [view.logits.detach() for view in technique.views(forward, None).values()]
    at, tags = batch.others["head_positions"], batch.labels[:, 0]
    rows = [logits.flatten(0, 1)[at] for logits in [*said, forward.out.logits.detach()]]
    assert len(at) < batch.mask.sum()
    losses = [float(F.cross_entropy(one, tags)) for one in rows]
    assert terms["exits.heads"].item() == pytest.approx(sum(losses[:-1]), rel=1e-5)
    kl = [F.kl_div((one / 2).log_softmax(-1), (rows[-1] / 2).softmax(-1), reduction="batchmean") for one in rows[:-1]]
    assert terms["exits.distill"].item() == pytest.approx(4 * float(sum(kl)), rel=1e-4)
    save_folder(technique.fold(model), task.tokenizer, tmp_path / "out", technique.save)
    saved, unknown = read_exits(tmp_path / "out"), task.tokenizer.unk_token_id
    assert (saved.pooling, saved.policy.sequence_uncertainty) == (None, "mean")
    assert {*saved.special_tokens, unknown} == {*task.tokenizer.all_special_ids} != {*saved.special_tokens}
    early = load_for_inference(tmp_path / "out")
    torch.testing.assert_close(early.all_logits(**batch.inputs), torch.stack([*said, forward.out.logits.detach()]))
    assert early(**batch.inputs).logits.shape == (*batch.mask.shape, len(TAGS))


def test_it_is_shrunk_and_measured_with_its_exits(folder: Path, cache: Path, task: Task, tmp_path: Path) -> None:
    """The shrunk folder has heads and policy; the benchmark runs and scores both both ways, as the model is run."""
    source, shrunk = tmp_path / "source", str(tmp_path / "shrunk")
    shutil.copytree(folder, source)
    weights = load_file(source / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.weight"][:, 8:] = 0  # neurons that do nothing
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    policy = ExitPolicy(criterion="entropy", thresholds=[1.4] * 3)
    write_exits(source, read_exits(source).model_copy(update={"policy": policy}))
    export_command([str(source), "--shrink", "--output_dir", shrunk])
    flags = ["--batch_sizes", "8", "--threads", "1", "--devices", "cpu", "--backends", "torch", "--seconds", "0.01"]
    told = measure(read_benchmark_job([str(source), shrunk, "--names", "a", "b", *flags, *flags_of(folder, cache)]))
    (one,) = told["measurements"]
    assert one["folders"].keys() | one["notes"].keys() == {"a", "a, early exit", "b", "b, early exit"}
    scores, _ = run_early(exiting(task, source), task, "validation")
    for described in told["folders"].values():
        assert described["scores"]["torch, early exit"] == scores != described["scores"]["torch"]
