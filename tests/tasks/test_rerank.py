"""Rerank tasks: what sources hold, batches of pairs, losses and scores against plain references, the mistakes."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ds_trainer.models.folders import create_folder, train_tokenizer
from ds_trainer.models.sentence_files import activation_of, copy_sentence_files, has_sentence_files
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import RerankSpec
from ds_trainer.tasks.losses import margin_mse
from ds_trainer.tasks.registry import build_task, check_data_files
from ds_trainer.tasks.rerank import rerank_data
from ds_trainer.tasks.rerank.rerank_data import RankRow
from ds_trainer.tasks.rerank.rerank_task import softmax_loss
from ds_trainer.tasks.task import Batch

TEXTS = ["it rains", "it is wet", "the cat sat on the mat", "no", "why is it so very wet", "a dry day", "old mats"]
SMALL = {"model_type": "bert", "max_position_embeddings": 24, "hidden_size": 16, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "intermediate_size": 24, "num_labels": 1}
LISTS = {"file": "lists.jsonl", "text_columns": ["query", "good", "bad"]}
ROWS = [
    {"query": "why", "good": "it rains", "bad": ["no", "old mats"]},
    {"query": "where is the cat", "good": ["the cat sat on the mat", "old mats"], "bad": "a dry day"},
    {"query": "wet", "good": ["it is wet"], "bad": []},
]
MARGIN_MSE = 4.71875
"""What MarginMSELoss of sentence-transformers 6.2 gives for the numbers of two queries with two negatives each."""
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny cross-encoder, with lists beside it."""
    path = tmp_path_factory.mktemp("rerank")
    create_folder(SMALL, train_tokenizer(TEXTS, 90, True), path, 0)
    (path / "lists.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return path


def task_of(folder, tmp_path, **fields):
    spec = {"name": "rerank", "data_dir": str(folder), "train": [LISTS], "validation": [LISTS]} | fields
    return build_task(RerankSpec(**spec), folder, tmp_path)


def batch_of(answers, queries) -> Batch:
    labels = torch.stack([torch.tensor(answers), torch.tensor(queries)], 1)
    return Batch({}, labels, torch.arange(max(queries) + 1))


def test_rows_are_what_the_sources_hold(folder):
    """Positives come first; a scored split has pairs, of some queries."""
    spec = RerankSpec(name="rerank", data_dir=str(folder), train=[LISTS], validation=[LISTS], max_eval_samples=2)
    read = [row.value for row in rerank_data.records(spec, "train").rows()]
    assert read[1] == RankRow("where is the cat", ("the cat sat on the mat", "old mats", "a dry day"), 2)
    pairs = [row.value for row in rerank_data.records(spec, "lists").rows()]
    assert [(pair.query, pair.documents[0], pair.positives, pair.number) for pair in pairs[:4]] == [
        ("why", "it rains", 1, 0),
        ("why", "no", 0, 0),
        ("why", "old mats", 0, 0),
        ("where is the cat", "the cat sat on the mat", 1, 1),
    ]
    assert len(pairs) == 6
    assert {"why", "no", "a dry day"} <= {*rerank_data.training_texts(spec)}


def test_a_batch_has_each_pair_in_a_row(folder, tmp_path):
    """The rows are the pairs as the tokenizer alone gives them, cut at the length; labels say whose they are."""
    task = task_of(folder, tmp_path, max_seq_length=8)
    examples = task.examples("train")
    batch = task.collate(examples, [1, 0])
    pairs = [("where is the cat", text) for text in ("the cat sat on the mat", "old mats", "a dry day")]
    pairs += [("why", text) for text in ("it rains", "no", "old mats")]
    expected = task.tokenizer(pairs, truncation=True, max_length=8, padding=True, return_tensors="pt")
    assert batch.inputs["input_ids"].shape[1] == 8
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert torch.equal((batch.inputs | batch.others)[name], expected[name])
    assert batch.labels.tolist() == [[1, 0], [1, 0], [0, 0], [1, 1], [0, 1], [0, 1]]
    assert task.counts(examples, np.array([1, 2])) == {"token": 3 * 8 + examples.lengths[2], "label": 4}
    assert task_of(folder, tmp_path).spec.max_seq_length == 24


def test_losses_equal_plain_references(folder, tmp_path):
    """A pair's binary cross entropy; a query's cross entropy, of its own documents alone, mean over its positives."""
    scores, answers, queries = [1.5, -0.5, 0.25, 2.0, 1.0], [1, 0, 1, 1, 0], [0, 0, 1, 1, 1]
    batch = batch_of(answers, queries)
    wanted = [
        math.log(1 + math.exp(-score if answer else score)) for score, answer in zip(scores, answers, strict=True)
    ]
    out = SimpleNamespace(logits=torch.tensor(scores)[:, None])
    assert float(task_of(folder, tmp_path).loss(out, batch)) == pytest.approx(sum(wanted) / 5)
    first = -math.log(math.exp(1.5) / (math.exp(1.5) + math.exp(-0.5)))
    total = math.exp(0.25) + math.exp(2) + math.exp(1)
    second = -(math.log(math.exp(0.25) / total) + math.log(math.exp(2) / total)) / 2
    task = task_of(folder, tmp_path, loss="softmax")
    assert (task.loss_unit, task_of(folder, tmp_path).loss_unit) == ("example", "label")
    assert float(task.loss(out, batch)) == pytest.approx((first + second) / 2)
    assert float(softmax_loss(torch.tensor([0.5]), torch.tensor([1.0]), batch_of([1], [0]))) == 0


def test_margins_are_those_of_sentence_transformers():
    """Wherever the scores lie; several positives have all pairs with negatives, and a query without is none."""
    student = torch.tensor([1.5, -0.5, 0.25, 2.0, 1.0, -1.25])[:, None]
    teacher = torch.tensor([9.0, 4.0, 7.5, 8.0, 8.5, 2.0])[:, None]
    batch = batch_of([1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1])
    assert float(margin_mse(student, teacher, batch)) == pytest.approx(MARGIN_MSE)
    assert float(margin_mse(student, teacher + 5, batch)) == pytest.approx(MARGIN_MSE)
    several = batch_of([1, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 2])
    distance = (student - teacher)[:, 0].tolist()
    first = ((distance[0] - distance[2]) ** 2 + (distance[1] - distance[2]) ** 2) / 2
    second = (distance[3] - distance[4]) ** 2
    assert float(margin_mse(student, teacher, several)) == pytest.approx((first + second) / 3)


def test_scores_equal_hand_counts(folder, tmp_path):
    """Ranks are within a query; of equal scores the documents that do not answer come first; NaN is refused."""
    task = task_of(folder, tmp_path)
    task.examples("lists")
    scores = [0.5, 0.9, 0.1, 0.3, 0.2, 0.3, -7.0]  # the second and third queries: a tie, and one document alone
    answers = {place: np.array([score], np.float32) for place, score in enumerate(scores)}
    discount = 1 / math.log2(3)
    second = (discount + 0.5) / (1 + discount)
    expected = {"ndcg@10": (discount + second + 1) / 3, "mrr@10": (0.5 + 0.5 + 1) / 3}
    assert task.score("lists", answers) == pytest.approx(expected)
    others = answers | {0: np.array([1.0], np.float32)}
    assert task.agreement("lists", answers, others) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="not finite"):
        task.score("lists", answers | {3: np.array([math.nan], np.float32)})


def test_the_activation_of_a_cross_encoder_is_kept(folder, tmp_path):
    """Each version of sentence-transformers names it in another place; without one it is the sigmoid."""
    task = task_of(folder, tmp_path)
    assert task.build_model(folder).config.sentence_transformers["activation_fn"].endswith(".Sigmoid")
    config = json.loads((folder / "config.json").read_text())
    made = tmp_path / "made"
    for place, value in (
        ("config.json", config | {"sbert_ce_default_activation_function": IDENTITY}),
        ("config.json", config | {"sentence_transformers": {"activation_fn": IDENTITY}}),
        ("config_sentence_transformers.json", {"activation_fn": IDENTITY, "model_type": "CrossEncoder"}),
    ):
        for each in (tmp_path / "source", made):
            each.mkdir(exist_ok=True)
            (each / "config.json").write_text(json.dumps(config))
        (tmp_path / "source/modules.json").write_text("[]")
        (tmp_path / "source" / place).write_text(json.dumps(value))
        assert activation_of(tmp_path / "source") == IDENTITY
        copy_sentence_files(tmp_path / "source", made)
        assert activation_of(made) == IDENTITY
        assert not has_sentence_files(tmp_path / "source")


@pytest.mark.parametrize(
    "source",
    [
        {"file": "lines.txt"},
        {"file": "a.csv", "text_columns": ["a"]},
        {"file": "a.csv", "text_columns": ["a", "b"], "score_column": "s"},
        {"file": "a.tsv", "format": "stsb"},
        LISTS | {"prompts": ["q", None, None]},
    ],
)
def test_a_source_without_lists_is_refused(source):
    """It names the columns that are asked for."""
    with pytest.raises(ValidationError, match="text_columns of a table name a query, the documents"):
        RerankSpec(name="rerank", train=[source], validation=[LISTS])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"good": []}, "line 2: 'good' is an empty list, and a query needs a document that answers it"),
        ({"good": ["x", " "]}, "line 2: 'good' has an empty text"),
        ({"bad": [3]}, "line 2: 'bad' has a whole number"),
        ({"query": ["a", "b"]}, "line 2: 'query' is a list, and must be one query"),
    ],
)
def test_mistakes_in_files_are_named_with_their_places(folder, tmp_path, row, message):
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, [ROWS[0], ROWS[0] | row])))
    with pytest.raises(UserError, match=message):
        task_of(folder, tmp_path, data_dir=str(tmp_path), train=[LISTS | {"file": "bad.jsonl"}]).examples("train")


def test_what_is_missing_is_told(folder, tmp_path):
    """A gap is left out and counted; files and sources that are not there, and a long limit are one sentence."""
    (tmp_path / "gaps.jsonl").write_text("\n".join(map(json.dumps, [ROWS[0], ROWS[0] | {"good": None}])))
    task = task_of(folder, tmp_path, data_dir=str(tmp_path), validation=[LISTS | {"file": "gaps.jsonl"}])
    assert "1 left out, whose 'good' is null" in task.summary("gaps")
    spec = RerankSpec(name="rerank", data_dir=str(folder), validation=[LISTS | {"file": "no.jsonl"}])
    mistakes = check_data_files(spec)
    assert "nothing to train on" in mistakes[0]
    assert "no.jsonl" in mistakes[1]
    with pytest.raises(UserError, match="max_seq_length is 25, and the model has 24 positions"):
        task_of(folder, tmp_path, max_seq_length=25).build_model(folder)
