"""Language modelling from documents to a score: sequences, batches, losses, answers, and models that are refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.lm_files import LINES, SMALL, decoder_folder
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
    ViTConfig,
)

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.lm.lm_task import LmAnswer, LmTask

KINDS = ("bert", "gpt2", "llama")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model with its tokenizer of each kind."""
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    tokenizer = train_tokenizer(LINES * 5, 150, True)
    torch.manual_seed(0)
    bert = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL)
    AutoModelForMaskedLM.from_config(bert).save_pretrained(found["bert"])
    tokenizer.save_pretrained(found["bert"])
    decoder_folder(found["gpt2"], GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=128))
    decoder_folder(found["llama"], LlamaConfig(max_position_embeddings=128, **SMALL))
    return found


@pytest.fixture
def build(folders: dict[str, Path], tmp_path: Path) -> Any:
    """Build the task of a kind of model over some lines, with what is asked for in its spec."""

    def build(kind: str, lines: list[str] | None = None, cache: str = "cache", **fields: Any) -> LmTask:
        (tmp_path / "text.txt").write_text("\n".join(lines or LINES), encoding="utf-8")
        settings = {"train_file": "text.txt", "validation_file": "text.txt", "min_seq_length": 4} | fields
        spec = LmSpec(name="mlm" if kind == "bert" else "clm", data_dir=str(tmp_path), **settings)
        return LmTask(spec, load_tokenizer(folders[kind]), folders[kind], tmp_path / cache)

    return build


def rows_of(task: LmTask, split: str = "train") -> list[list[int]]:
    examples = task.examples(split)
    return [examples.row(position)["input_ids"].tolist() for position in range(len(examples))]


@pytest.mark.parametrize("kind", KINDS)
def test_long_documents_are_split_and_lose_nothing(kind: str, build: Any) -> None:
    """The parts of a document, special tokens taken off, are its tokens in order; each part has the specials.

    But for a last part of one token, of which nothing can be predicted.
    """
    length = 9
    task = build(kind, min_seq_length=0, max_seq_length=length)
    tokenizer, rows = task.tokenizer, rows_of(task)
    assert max(map(len, rows)) <= length
    before, after = {"bert": ([tokenizer.cls_token_id], [tokenizer.sep_token_id]), "llama": ([1], [])}.get(
        kind, ([], [])
    )
    end = [tokenizer.eos_token_id] if kind == "gpt2" else []
    found, expected = [], []
    for row in rows:
        assert row[: len(before)] == before
        assert row[len(row) - len(after) :] == after
        found += row[len(before) : len(row) - len(after)]
    for line in LINES:
        tokens = [*tokenizer(line, add_special_tokens=False)["input_ids"], *end]
        alone = not (before or after) and len(tokens) % length == 1
        expected += tokens[: len(tokens) - alone]
    assert found == expected


def test_what_is_dropped_is_counted_and_told(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Short and unknown examples go, in one log line with all counts."""
    caplog.set_level("INFO", logger="ds_trainer")
    task = build("bert", ["no", "no no", "", *LINES[3:], "ж ж ж ж ж ж no", "ж no no no it is"], min_seq_length=6)
    examples = task.examples("train")
    tokens = int(examples.lengths.sum())
    assert (
        f"text.txt: 6 documents kept; 1 left out, whose 'text' is empty (line 3); "
        f"6 documents (0 split) give 3 examples of {tokens} tokens; 2 parts shorter than min_seq_length (6) "
        f"and 1 of unknown tokens (max_unknown 0.5) are dropped"
    ) in caplog.text
    with pytest.raises(ValueError, match=r"text\.txt has no examples: 1 left out, whose 'text' is empty \(line 1\)"):
        build("bert", [" ", ""]).examples("train")
    with pytest.raises(ValueError, match=r"mlm train has no example: 5 documents .* 5 parts shorter than min_seq_len"):
        build("bert", min_seq_length=100).examples("train")
    # GPT-2's unknown token is its end of text, which closes each document and is not unknown
    assert [row[-1] for row in rows_of(build("gpt2", max_unknown=0.0))] == [0] * 4
    # a limit is spread over the examples
    whole, limited = rows_of(build("bert")), build("bert", max_train_samples=2, max_eval_samples=3)
    assert rows_of(limited) == [whole[0], whole[2]]
    assert len(limited.examples("validation")) == 3


@pytest.mark.parametrize(("max_unknown", "kept"), [(0.0, 0), (0.5, 1), (0.6, 2), (1.0, 2)])
def test_the_limit_of_unknown_tokens_is_exact(max_unknown: float, kept: int, build: Any) -> None:
    """A share at the limit is dropped; 0 drops what has any; text that is nothing but unknown always goes."""
    lines = ["ж ж no no", "ж no no no", "ж ж ж ж"]
    if kept:
        assert len(build("bert", lines, max_unknown=max_unknown).examples("train")) == kept
        return
    with pytest.raises(ValueError, match=r"has no example: 3 documents .*; 0 parts shorter .* and 3 of unknown tokens"):
        build("bert", lines, max_unknown=max_unknown).examples("train")


def test_masked_labels_are_the_tokens_at_the_heads(build: Any) -> None:
    """Heads are at the chosen tokens alone, the label is what stood there, everything else is as in the example."""
    task = build("bert", word_mask=1.0, word_keep=0.0, word_rand=0.0, mlm_mask_prop=0.3)
    examples = task.examples("train")
    batch = task.collate(examples, [2, 0], draw=5)
    assert set(batch.inputs) == {"input_ids", "attention_mask", "head_positions"}
    padded = examples.padded([2, 0], {"input_ids": task.tokenizer.pad_token_id})
    ids, heads = batch.inputs["input_ids"].flatten(), batch.inputs["head_positions"]
    assert heads.dtype == batch.labels.dtype == torch.int64
    assert (ids[heads] == task.tokenizer.mask_token_id).all()
    ids[heads] = batch.labels
    assert ids.tolist() == padded["input_ids"].ravel().tolist()
    assert not set(batch.labels.tolist()) & set(task.tokenizer.all_special_ids)
    per_row = torch.bincount(heads // batch.inputs["input_ids"].shape[1]).tolist()
    assert per_row == [max(1, round(0.3 * (length - 2))) for length in examples.lengths[[2, 0]]]
    assert batch.ids.tolist() == [2, 0]
    assert task.inputs_vary


def test_rare_tokens_are_those_of_the_training_split(build: Any, tmp_path: Path) -> None:
    """The validation split is masked by the training counts; without a training file, by its own."""
    (tmp_path / "dev.txt").write_text("\n".join(["cat " * 20, *LINES]), encoding="utf-8")
    task = build("bert", validation_file="dev.txt")
    task.examples("validation")
    ids = np.concatenate([np.array(row) for row in rows_of(task)])
    the, cat = (task.tokenizer.convert_tokens_to_ids(word) for word in ("the", "cat"))
    weights = task._masking.weights
    assert weights[the] == pytest.approx(float((ids == the).sum()) ** -0.7)
    alone = build("bert", train_file=None, validation_file="dev.txt")
    alone.examples("validation")
    dev = np.concatenate([np.array(row) for row in rows_of(alone, "validation")])
    assert alone._masking.weights[cat] == pytest.approx(float((dev == cat).sum()) ** -0.7)
    assert alone._masking.weights[cat] < weights[cat]


def test_all_positions_give_the_same_loss_and_answers_as_the_labels_alone(
    build: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With head_positions "all" there are logits at every token, and a loss where there was one."""
    few, all_ = build("bert", mlm_mask_prop=0.3), build("bert", head_positions="all", mlm_mask_prop=0.3)
    model = few.build_model(folders["bert"]).eval()
    batches = [task.collate(task.examples("train"), range(4), 1) for task in (few, all_)]
    outs = [model(**batch.inputs) for batch in batches]
    assert len(batches[1].labels) == batches[1].inputs["attention_mask"].sum()
    torch.testing.assert_close(few.loss(outs[0], batches[0]), all_.loss(outs[1], batches[1]))
    answers = [task.answers(out, batch) for task, out, batch in zip((few, all_), outs, batches, strict=True)]
    assert few.score("train", answers[0]) == pytest.approx(all_.score("train", answers[1]))
    assert all_.logits(outs[1], batches[1])[0].shape == (len(batches[1].labels), len(few.tokenizer))
    # bf16 logits are read as fp32, a chunk of one row gives what one of all gives, and no score is made of NaN
    out = SimpleNamespace(logits=torch.randn(1, len(batches[1].labels), len(few.tokenizer)).bfloat16())
    whole = all_.answers(out, batches[1])
    monkeypatch.setattr("ds_trainer.tasks.lm.lm_task._CHUNK_VALUES", 1)
    assert all_.answers(out, batches[1]) == whole
    nll = F.cross_entropy(out.logits[0].float(), batches[1].labels, reduction="sum")
    assert sum(answer.nll for answer in whole.values()) == pytest.approx(float(nll), rel=1e-5)
    assert all_.loss(out, batches[1]).dtype == torch.float32
    labelled = (batches[1].labels >= 0).nonzero()[:, 0]
    out.logits[0, labelled[[0, -1]], 7] = math.nan
    with pytest.raises(ValueError, match=r"train: the model gives logits that are not finite .* for 2 of 4 examples"):
        all_.score("train", all_.answers(out, batches[1]))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_labels_are_the_next_tokens(kind: str, build: Any, folders: Any) -> None:
    """A head at each token but a row's last; the loss is that of transformers, which shifts by itself."""
    task = build(kind)
    examples = task.examples("train")
    batch = task.collate(examples, range(3))
    ids, attended = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    expected = [i for row in rows_of(task)[:3] for i in row[1:]]
    assert batch.labels.tolist() == expected
    assert ids.flatten()[batch.inputs["head_positions"] + 1].tolist() == expected
    assert not task.inputs_vary
    model = task.build_model(folders[kind]).eval()
    theirs = model(input_ids=ids, attention_mask=attended, labels=ids.masked_fill(attended == 0, -100)).loss
    torch.testing.assert_close(task.loss(model(**batch.inputs), batch), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_neither_loss_nor_answers(kind: str, build: Any, folders: Any) -> None:
    """An example's answer is the same alone, beside a longer one, and padded to a multiple of 64."""
    task, wide = build(kind), build(kind, pad_to_multiple_of=64)
    model = task.build_model(folders[kind]).eval()
    examples = task.examples("validation")
    wide.examples("validation")

    def answers(task: LmTask, positions: list[int]) -> dict[int, LmAnswer]:
        batch = task.collate(examples, positions)
        out = model(**batch.inputs)
        found = task.answers(out, batch)
        total = sum(answer.nll for answer in found.values()) / len(batch.labels)
        assert task.loss(out, batch).item() == pytest.approx(total, rel=1e-5)
        return found

    alone = answers(task, [0])[0]
    for found in (answers(task, [1, 0, 2])[0], answers(wide, [0, 1])[0]):
        assert found.nll == pytest.approx(alone.nll, rel=1e-5)
        assert found[1:] == alone[1:]


def test_score_and_agreement_by_hand(build: Any) -> None:
    """Every token weighs the same, however many an example has; an absurd loss has the largest perplexity there is."""
    task = build("bert")
    answers = {0: LmAnswer(2.0, 1, [5, 6, 7]), 1: LmAnswer(1.0, 1, [8])}
    assert task.score("train", answers) == {"perplexity": pytest.approx(math.exp(0.75)), "loss": 0.75, "accuracy": 0.5}
    others = {0: LmAnswer(0.0, 0, [5, 9, 7]), 1: LmAnswer(0.0, 0, [9])}
    assert task.agreement("train", answers, others) == 0.5
    assert task.agreement("train", answers, answers) == 1.0
    for loss in (709.8, 1e6, 1e300):
        largest = task.score("train", {0: LmAnswer(loss, 0, [1])})["perplexity"]
        assert largest == pytest.approx(sys.float_info.max)
        assert json.loads(json.dumps(largest, allow_nan=False)) == largest


def test_what_cannot_work_is_refused(build: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """No mask token, no such head, and a model that has no trained head."""
    task = build("bert")
    encoder = tmp_path / "encoder"
    BertConfig.from_pretrained(folders["bert"], architectures=["BertModel"]).save_pretrained(encoder)
    with pytest.raises(ValueError, match="is no trained masked language model"):
        task.check_trained(encoder)
    with pytest.raises(ValueError, match="has no mask token"):
        LmTask(task.spec, load_tokenizer(folders["gpt2"]), folders["bert"], tmp_path)
    ViTConfig().save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="is a vit model: transformers has no masked language model for it"):
        LmTask(task.spec, task.tokenizer, tmp_path / "vit", tmp_path)


def test_models_that_see_later_tokens_are_refused_until_they_are_causal(build: Any, tmp_path: Path) -> None:
    """A forward tells. The settings that the message names help."""
    task = build("gpt2")
    for is_decoder in (False, True):
        config = RobertaConfig(vocab_size=300, is_decoder=is_decoder, **SMALL)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(is_decoder))
    with pytest.raises(ValueError, match="is a roberta model whose tokens see those after them"):
        task.build_model(tmp_path / "False")
    assert task.build_model(tmp_path / "True")
