"""Embedding tasks: what sources hold, batches of texts, losses and scores against plain references, the files."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ds_trainer.files.reading import read_value
from ds_trainer.models.folders import create_folder, train_tokenizer
from ds_trainer.models.pretrained import default_length
from ds_trainer.models.sentence_files import SentenceFiles, copy_sentence_files, read_sentence_files
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import EmbeddingSpec
from ds_trainer.tasks.embedding import embedding_data
from ds_trainer.tasks.embedding.embedding_data import EmbeddingRow, score_names
from ds_trainer.tasks.embedding.embedding_task import contrastive_loss, cosent_loss, search_scores
from ds_trainer.tasks.registry import build_task, check_data_files
from ds_trainer.tasks.scores import regression_scores
from ds_trainer.tasks.whole_step import WholeStep

TEXTS = ["it rains", "it is wet", "the cat sat on the mat", "no", "why is it so very wet", "a dry day", "old mats"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PAIRS = {"file": "pairs.jsonl", "text_columns": ["a", "p", "n"]}
NOTHING = torch.zeros((), dtype=torch.bool)
SCORED = {"file": "scored.csv", "text_columns": ["one", "two"], "score_column": "score", "name": "sts"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT, with files of texts in all forms beside it."""
    path = tmp_path_factory.mktemp("embedding")
    create_folder(
        {"model_type": "bert", "max_position_embeddings": 32, **SMALL}, train_tokenizer(TEXTS, 90, True), path, 0
    )
    rows = [{"a": one, "p": two, "n": TEXTS[:place]} for place, (one, two) in enumerate(pairwise(TEXTS), 1)]
    (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scored = [f"{one},{two},{place}" for place, (one, two) in enumerate(pairwise(TEXTS))]
    (path / "scored.csv").write_text("\n".join(["one,two,score", *scored]) + "\n")
    (path / "lines.txt").write_text("\n".join([*TEXTS, "", TEXTS[0]]) + "\n")
    beir = path / "beir"
    (beir / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{place}", "title": "T", "text": text} for place, text in enumerate(TEXTS)]
    (beir / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    queries = [{"_id": place, "text": text} for place, text in enumerate(TEXTS[:4])]
    (beir / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (beir / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n0\td0\t2\n0\td1\t1\n1\td1\t1\n3\td3\t0\n")
    return path


def task_of(folder, tmp_path, **fields):
    spec = {"name": "embedding", "data_dir": str(folder), "validation": [SCORED]} | fields
    return build_task(EmbeddingSpec(**spec), folder, tmp_path)


def test_rows_are_what_the_sources_hold(folder):
    """A list of negatives is as many texts; a search gives queries and documents; without a loss texts are distinct."""
    beir = {"file": "beir", "format": "beir", "name": "search"}
    spec = EmbeddingSpec(name="embedding", data_dir=str(folder), train=[PAIRS], validation=[SCORED, beir])
    read = [row.value for row in embedding_data.records(spec, "train").rows()]
    assert [len(row.texts) for row in read] == [3, 4, 5, 6, 7, 8]
    searched = [row.value for row in embedding_data.records(spec, "search").rows()]
    assert searched[0] == EmbeddingRow(("it rains",), ("query",), id="0", relevant={"d0": 2.0, "d1": 1.0})
    assert searched[2] == EmbeddingRow(("T it rains",), ("document",), id="d0")
    assert len(searched) == 2 + len(TEXTS)
    assert score_names(spec) == ["spearman", "pearson", "search/ndcg@10", "search/mrr@10", "search/recall@10"]
    plain = [{"file": "lines.txt"}, {"file": "scored.csv", "text_columns": ["one", "two"]}]
    texts = embedding_data.training_texts(
        EmbeddingSpec(name="embedding", data_dir=str(folder), train=plain, validation=[SCORED], loss="none")
    )
    assert texts == TEXTS


def test_a_batch_has_each_text_in_a_row(folder, tmp_path):
    """The rows are the texts of the examples in order, with their prompts, as the tokenizer alone gives them."""
    task = task_of(folder, tmp_path, train=[PAIRS | {"prompts": ["q", None, None]}], prompts={"q": "why "})
    examples = task.examples("train")
    batch = task.collate(examples, [4, 0])
    texts = [f"why {TEXTS[4]}", *TEXTS[5:6], *TEXTS[:5], f"why {TEXTS[0]}", TEXTS[1], TEXTS[0]]
    expected = task.tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch.inputs["input_ids"], expected["input_ids"])
    assert torch.equal(batch.mask, expected["attention_mask"])
    assert task.counts(examples, np.array([4, 0]))["label"] == len(texts)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_vectors_do_not_depend_on_the_padding(folder, tmp_path, pooling):
    """A text alone has the vector that it has beside longer ones, of length 1."""
    task = task_of(folder, tmp_path, pooling=pooling)
    model = task.build_model(folder).eval()
    examples = task.examples("sts")
    together = task.collate(examples, range(len(examples)))
    with torch.no_grad():
        (vectors,) = task.logits(model(**together.inputs), together)
        alone = task.collate(examples, [2])
        (own,) = task.logits(model(**alone.inputs), alone)
    assert torch.allclose(vectors[4:6], own, atol=1e-6)
    assert torch.allclose(own.norm(dim=1), torch.ones(2))


def test_losses_equal_plain_references():
    """Contrastive and CoSENT losses are the sums that the papers write, computed one term after another."""
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(7, 5, dtype=torch.float64))
    anchors, candidates = vectors[[0, 3, 5]], vectors[[1, 4, 6, 2]]
    terms = []
    for place, anchor in enumerate(anchors):
        exponentials = [math.exp(20 * float(anchor @ other)) for other in candidates]
        terms.append(-math.log(exponentials[place] / sum(exponentials)))
    assert float(contrastive_loss(anchors, candidates, 20.0, NOTHING)) == pytest.approx(sum(terms) / 3)
    cosines, scores = torch.tensor([0.9, 0.1, 0.5, 0.4]), torch.tensor([1.0, 3.0, 3.0, 2.0])
    total = sum(
        math.exp(20 * float(cosines[low] - cosines[high]))
        for low in range(4)
        for high in range(4)
        if scores[low] < scores[high]
    )
    assert float(cosent_loss(cosines, scores, 20.0)) == pytest.approx(math.log(1 + total))


def test_losses_are_those_of_sentence_transformers():
    """On the same vectors both losses have the values and the gradients of its classes."""
    losses = pytest.importorskip("sentence_transformers.losses")
    torch.manual_seed(1)
    parts = [torch.randn(6, 8, requires_grad=True) for _ in range(3)]
    scores = torch.tensor([0.0, 3.0, 1.0, 2.5, 2.5, 5.0])
    unit = [torch.nn.functional.normalize(part) for part in parts]
    pairs = [
        (
            contrastive_loss(unit[0], torch.cat(unit[1:]), 20.0, NOTHING),
            losses.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(parts, None),
        ),
        (
            cosent_loss((unit[0] * unit[1]).sum(1), scores, 20.0),
            losses.CoSENTLoss(None).compute_loss_from_embeddings(parts[:2], scores),
        ),
    ]
    for ours, theirs in pairs:
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
        slopes = [torch.autograd.grad(loss, parts[0], retain_graph=True)[0] for loss in (ours, theirs)]
        assert torch.allclose(*slopes, atol=1e-5)


def test_scores_equal_those_of_scipy():
    """Pearson and Spearman, with ties, are those of scipy."""
    stats = pytest.importorskip("scipy.stats")
    values, labels = np.array([0.1, 0.4, 0.4, -0.3, 0.9]), np.array([1.0, 2.0, 3.0, 0.0, 3.0])
    expected = {"pearson": stats.pearsonr(values, labels)[0], "spearman": stats.spearmanr(values, labels)[0]}
    assert regression_scores(values, labels) == pytest.approx(expected)


def test_search_scores_equal_hand_counts():
    """Grades are gains, discounted by rank; of equal documents the first comes first; recall counts all relevant."""
    rows = [
        EmbeddingRow(("q",), (None,), relevant={"a": 2.0, "c": 1.0}, id="0"),
        EmbeddingRow(("r",), (None,), relevant={"b": 1.0}, id="1"),
        *(EmbeddingRow((name,), (None,), id=name) for name in "abc"),
    ]
    vectors = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.1], [0.5, 0.1], [0.9, 0.0]])
    first = (1 + 2 / math.log2(3)) / (2 + 1 / math.log2(3))  # c, a, b
    second = 1 / math.log2(3)  # a, b, c
    scores = search_scores(vectors, rows)
    assert scores == pytest.approx({"ndcg@10": (first + second) / 2, "mrr@10": 0.75, "recall@10": 1.0})


@pytest.mark.parametrize("loss", ["contrastive", "cosent"])
def test_gradients_do_not_depend_on_the_micro_batches(folder, tmp_path, loss):
    """The mean of the micro-batches' gradients is the gradient of the whole step, for even and uneven parts."""
    sources = {"contrastive": PAIRS, "cosent": SCORED}
    task = task_of(folder, tmp_path, train=[sources[loss]], loss=loss, matryoshka_dims=[4])
    model, examples = task.build_model(folder).eval(), task.examples("train")
    ids = np.array([5, 1, 2, 0])

    def gradient(parts):
        model.zero_grad()
        batches = [task.collate(examples, part) for part in parts]
        with torch.no_grad():
            values = torch.cat([task.logits(model(**batch.inputs), batch)[0] for batch in batches])
        start = 0
        for batch in batches:
            step = WholeStep(ids, values, start, len(parts))
            start += len(batch.inputs["input_ids"])
            task.loss(model(**batch.inputs), replace(batch, step=step)).backward()
        return torch.cat([p.grad.flatten() / len(parts) for p in model.parameters() if p.grad is not None])

    model.zero_grad()
    whole = task.collate(examples, ids)
    task.loss(model(**whole.inputs), whole).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert expected.abs().max() > 1e-3
    for parts in ([ids], [ids[:2], ids[2:]], [ids[:1], ids[1:]], np.split(ids, 4)):
        assert torch.allclose(gradient(parts), expected, rtol=1e-5, atol=1e-6)


def test_files_of_sentence_transformers_come_back_as_they_were(tmp_path):
    """What is written is read again; what this library does not compute is refused in one sentence."""
    files = SentenceFiles("cls", False, 77, {"query": "Q: "}, "query", "dot")
    files.write(tmp_path, 16)
    assert read_sentence_files(tmp_path) == files
    pooling = tmp_path / "1_Pooling/config.json"
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}))
    with pytest.raises(UserError, match=r"mean\+max"):
        read_sentence_files(tmp_path)
    pooling.write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    with pytest.raises(UserError, match="prompts are left out"):
        read_sentence_files(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules, modules[1] | {"type": "x.Dense"}]))
    with pytest.raises(UserError, match="Dense"):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": [{"file": "lines.txt"}]}, "set loss to"),
        ({"train": [PAIRS], "loss": "cosent"}, "a score of two texts"),
        ({"train": [SCORED]}, "an anchor and its positive"),
        ({"validation": [PAIRS]}, "has no scores"),
        ({"validation": [SCORED, SCORED]}, "a name of its own"),
        ({"train": [PAIRS | {"prompts": ["q"]}]}, "write one each"),
        ({"train": [{"file": "a.csv", "dataset": "b", "text_columns": ["a"]}], "loss": "none"}, "one of the two"),
        ({"train": [{"file": "a.csv"}], "loss": "none"}, "text_columns"),
    ],
)
def test_mistakes_of_a_recipe_are_named(fields, message):
    with pytest.raises((ValidationError, UserError), match=message):
        EmbeddingSpec(**{"name": "embedding", "validation": [SCORED]} | fields)


def test_mistakes_in_files_are_named_with_their_places(folder, tmp_path):
    """A judgement of a document that is missing, a score that is no number, a missing file, an unknown prompt."""
    (folder / "beir/qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\n0\td99\t1\n")
    beir = {"file": "beir", "format": "beir", "split": "dev"}
    with pytest.raises(UserError, match=r"dev.tsv, line 2: there is no document 'd99'"):
        task_of(folder, tmp_path, validation=[beir]).examples("beir")
    (folder / "bad.csv").write_text("one,two,score\na,b,nan!\n")
    with pytest.raises(UserError, match=r"bad.csv, line 2: 'score' is 'nan!'"):
        task_of(folder, tmp_path, validation=[SCORED | {"file": "bad.csv"}]).examples("sts")
    spec = EmbeddingSpec(
        name="embedding", data_dir=str(folder), train=[PAIRS], validation=[SCORED | {"file": "no.csv"}]
    )
    assert "no.csv" in check_data_files(spec)[0]
    with pytest.raises(UserError, match="there is no prompt 'q'"):
        task_of(folder, tmp_path, train=[PAIRS | {"prompts": ["q", None, None]}])
    with pytest.raises(UserError, match="matryoshka_dims has 17"):
        task_of(folder, tmp_path, matryoshka_dims=[17])


def test_a_pair_with_an_empty_side_is_left_out_and_told(folder, tmp_path):
    (folder / "gaps.csv").write_text("one,two,score\na,b,1\na,,2\nc,d,3\n")
    task = task_of(folder, tmp_path, validation=[SCORED | {"file": "gaps.csv"}])
    assert len(task.examples("sts")) == 2
    assert "1 left out, whose 'two' is empty" in task.summary("sts")


def test_a_text_that_is_the_positive_of_another_pair_is_no_negative_of_it(folder, tmp_path):
    """Two pairs with one positive have the loss of each among the others, whichever of the two stands for it."""
    rows = [{"a": "it rains", "p": "no"}, {"a": "it is wet", "p": "no"}, {"a": "a dry day", "p": "old mats"}]
    (folder / "twins.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = task_of(folder, tmp_path, train=[{"file": "twins.jsonl", "text_columns": ["a", "p"]}])
    model, examples = task.build_model(folder).eval(), task.examples("train")

    def loss(*ids):
        batch = task.collate(examples, ids)
        return float(task.loss(model(**batch.inputs), batch).detach())

    assert loss(0, 1) == pytest.approx(0.0, abs=1e-6)
    batch = task.collate(examples, [0, 1, 2])
    (vectors,) = task.logits(model(**batch.inputs), batch)
    scores = 20 * vectors[0::2] @ vectors[1::2].T
    expected = [
        -scores[0, [0, 2]].log_softmax(0)[0],
        -scores[1, [1, 2]].log_softmax(0)[0],
        -scores[2].log_softmax(0)[2],
    ]
    assert loss(0, 1, 2) == pytest.approx(float(sum(expected)) / 3, rel=1e-5)


def test_prompts_are_those_that_sentence_transformers_takes(folder, tmp_path):
    """A document has "document" or else "passage"; a query has "query"; other texts have the default prompt or none."""
    beir = {"file": "beir", "format": "beir"}
    other = copied(folder, tmp_path / "prompted")
    SentenceFiles(prompts={"query": "q ", "passage": "p ", "all": "a "}, default_prompt_name="all").write(other, 16)
    spec = EmbeddingSpec(name="embedding", data_dir=str(folder), validation=[SCORED, beir], train=[PAIRS])
    task = build_task(spec, other, tmp_path / "cache")
    assert [task._prompt(name) for name in ("query", "document", None)] == ["q ", "p ", "a "]
    first = task.examples("beir").row(0)["input_ids"].tolist()
    assert first == task.tokenizer("q it rains")["input_ids"]


def test_what_decides_on_vectors_is_in_the_key(folder, tmp_path):
    """What is kept of a teacher, or made of a cut, follows pooling, length and prompts."""
    changes = [{}, {"pooling": "cls"}, {"normalize": False}, {"max_seq_length": 16}, {"prompts": {"a": "b"}}]
    assert len({task_of(folder, tmp_path, train=[PAIRS], **change).key("train") for change in changes}) == 5


def test_a_source_is_read_from_the_split_of_its_list(folder, tmp_path):
    """Judgements to train on are qrels/train.tsv, to score on qrels/test.tsv; negative ones do not count."""
    (folder / "beir/qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t1\n1\td2\t-1\n")
    beir = {"file": "beir", "format": "beir"}
    spec = EmbeddingSpec(name="embedding", data_dir=str(folder), train=[beir], validation=[beir])
    assert [row.value.texts for row in embedding_data.records(spec, "train").rows()] == [("it is wet", "T it is wet")]
    few = EmbeddingSpec(name="embedding", data_dir=str(folder), validation=[SCORED | {"max_examples": 2}])
    assert len(list(embedding_data.records(few, "sts").rows())) == 2


def test_a_query_is_no_result_of_itself():
    """A document with the id of a query is left out of its results, as in BEIR."""
    rows = [EmbeddingRow(("q",), (None,), id="a", relevant={"b": 1.0})]
    rows += [EmbeddingRow((name,), (None,), id=name) for name in "ab"]
    assert search_scores(np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.1]]), rows)["mrr@10"] == 1.0


def test_a_folder_of_sentence_transformers_says_its_length(folder, tmp_path):
    """Its files or its tokenizer say where texts are cut; without such files it is 512 tokens at the most."""
    other = copied(folder, tmp_path / "long")
    SentenceFiles(max_seq_length=20).write(other, 16)
    spec = EmbeddingSpec(name="embedding", data_dir=str(folder), validation=[SCORED])
    assert build_task(spec, other, tmp_path).spec.max_seq_length == 20
    config, tokenizer = SimpleNamespace(max_position_embeddings=8192), SimpleNamespace(model_max_length=8192)
    assert [default_length(tokenizer, config, most) for most in (None, 512)] == [8192, 512]


def test_files_beside_a_model_of_the_same_width_are_copied_as_they_are(folder, tmp_path):
    """Those that this library does not compute, too: an export of such a model keeps them."""
    source, target = tmp_path / "source", copied(folder, tmp_path / "target")
    copied(folder, source)
    SentenceFiles().write(source, 16)
    modules = [*read_value(source / "modules.json"), {"idx": 3, "name": "3", "path": "3_Dense", "type": "x.Dense"}]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "3_Dense").mkdir()
    (source / "3_Dense/model.safetensors").write_bytes(b"weights")
    copy_sentence_files(source, target)
    assert read_value(target / "modules.json") == modules
    assert (target / "3_Dense/model.safetensors").read_bytes() == b"weights"
    assert (target / "1_Pooling/config.json").exists()


def copied(folder, target):
    """Copy the model alone."""
    target.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, target / name)
    return target
