"""Cached answers of a teacher that speaks of tokens: SQuAD's starts and ends, a vocabulary at every position, tags."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distill_files import lm_files, squad_files, tag_files
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
)

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.ranks import progress
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.losses import TopK
from ds_trainer.tasks.registry import build_task, training_texts
from ds_trainer.techniques.distill import teacher as teacher_cache
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.distill.teacher import bytes_per_token, pack, unpack
from ds_trainer.techniques.technique import PhaseLength

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["squad", "clm", "ner"])
def source(request, tmp_path_factory) -> tuple[Any, str, Path]:
    """A task's spec, the folder of a random model for it, and a folder for caches."""
    folder = tmp_path_factory.mktemp(request.param)
    files = {"squad": squad_files, "clm": partial(lm_files, "clm"), "ner": tag_files}
    spec = parse_task(files[request.param](folder))
    tokenizer = train_tokenizer(training_texts(spec), 200, True)
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertConfig(vocab_size=len(tokenizer), num_labels=2, **shape)
    if request.param == "clm":
        model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2))
    else:
        auto = AutoModelForQuestionAnswering if request.param == "squad" else AutoModelForTokenClassification
        model = auto.from_config(bert)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return spec, str(folder / "model"), folder


def attached(task: Any, model: str, **fields: Any) -> Distill:
    technique = Distill(DistillSpec(teacher=model, **fields), PhaseLength(1, 0, 0), task)
    technique.attach(task.build_model(model))
    return technique


def test_cached_answers_equal_live_ones(source, monkeypatch, caplog):
    """In any batch, with any padding: logits and the states of attended positions, to half precision. While the cache
    is filled, and examples are tokenised, it is said how far they are."""
    spec, model, folder = source
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(teacher_cache, "_TOKENS", 16)
    task = build_task(spec, model, folder / "cache")
    pairs = {"terms": ["logits", "cos"], "layer_pairs": [[0, 1], [-1, -1]]}
    techniques = [attached(task, model, cache_teacher=cached, **pairs) for cached in (False, True)]
    with caplog.at_level("INFO", "ds_trainer"):
        for technique in techniques:
            technique.start(CPU)
    examples = task.examples("train")
    for rows in ([0], [7, 3, 30], list(range(len(examples)))):
        batch = task.collate(examples, rows)
        live, cached = (technique._targets(batch) for technique in techniques)
        torch.testing.assert_close(cached.logits, live.logits, rtol=2e-3, atol=1e-3)
        mask = batch.inputs["attention_mask"][..., None]
        assert live.hidden.keys() == cached.hidden.keys() == {1, -1}
        for layer, states in live.hidden.items():
            torch.testing.assert_close(cached.hidden[layer] * mask, states * mask, rtol=2e-3, atol=2e-3)
    unit = {"squad": r"\d+ of \d+ question", "clm": r"\d+ document", "ner": r"\d+ of \d+ sentence"}[folder.name[:-1]]
    lines = "\n".join(caplog.messages)
    assert re.search(rf"^tokenising: {unit}s", lines, re.MULTILINE), lines
    assert re.search(r"^cache_teacher: the teacher answers the training set: 1 of \d+ forwards", lines, re.MULTILINE)


def test_a_top_k_cache_has_the_size_that_was_told_and_the_likeliest_tokens(source, caplog):
    """A dry run tells it, too, and beside its header the file has not a byte more. In any batch the tokens are the live
    teacher's, at the phase's temperature: of another one there is another cache.

    SQuAD and tags, which have no vocabulary, are refused, and so is a k that leaves no other tokens.
    """
    spec, model, folder = source
    task = build_task(spec, model, folder / "cache")
    if not task.over_vocabulary:
        with pytest.raises(ValueError, match="top_k is for logits over a vocabulary"):
            attached(task, model, cache_teacher={"top_k": 8})
        return
    before = set((folder / "cache").glob("teacher-*/logits.0.npy"))
    examples = task.examples("train")
    labels = int(examples.offsets[-1]) - len(examples)  # the first token of an example is none
    for temperature in (1.0, 3.0):
        technique = attached(task, model, cache_teacher={"top_k": 8}, temperature=temperature)
        for begin in (technique.rehearse, technique.start):
            with caplog.at_level("INFO", logger="ds_trainer"):
                begin(CPU)
            said = caplog.messages[0]  # 2 * 9 bytes, and 8 ids of 6 bits
            assert said.startswith(f"cache_teacher: top_k 8 takes 24 bytes a token, 0.0 MB for the {labels} labels of")
            caplog.clear()
        (file,) = set((folder / "cache").glob("teacher-*/logits.0.npy")) - before
        before.add(file)
        assert file.stat().st_size == 128 + 24 * labels
        for rows in ([0], [7, 3, 30], list(range(len(examples)))):
            batch = task.collate(examples, rows)
            (kept,) = technique._targets(batch).logits
            (logits,) = task.logits(technique._teacher.predict(batch), batch)
            live = TopK.of(logits, 8, temperature)
            torch.testing.assert_close(kept.log_probs, live.log_probs, rtol=1e-3, atol=2e-3)
            ours, theirs = (logits.gather(-1, ids) for ids in (kept.ids, live.ids))  # those alike may change places
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    size = len(task.tokenizer)
    with pytest.raises(ValueError, match=f"top_k {size} is not below the {size} tokens of the teacher"):
        attached(task, model, cache_teacher={"top_k": size})


@pytest.mark.parametrize(("k", "vocabulary"), [(1, 2), (3, 5), (7, 30_522), (64, 32_000), (64, 32_769), (5, 1 << 18)])
def test_a_record_holds_the_ids_and_the_probabilities_to_half_precision(k, vocabulary):
    """Whatever the bits of an id: the lowest and the highest one too, and not a byte more than was told. For 64 of
    32,000 these are 250: 130 for the probabilities, and 120 for ids of 15 bits."""
    generator = torch.Generator().manual_seed(k)
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:k] for _ in range(9)])
    ids[0, 0], ids[1, -1] = 0, vocabulary - 1
    log_probs = torch.randn(9, k + 1, generator=generator).mul(4).log_softmax(-1)
    records = pack(TopK(ids, log_probs), vocabulary)
    assert records.shape == (9, bytes_per_token(k, vocabulary))
    assert (k, vocabulary) != (64, 32_000) or records.shape[1] == 250
    read = unpack(torch.from_numpy(records), k, vocabulary)
    assert torch.equal(read.ids, ids)
    torch.testing.assert_close(read.log_probs, log_probs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(read.log_probs.exp().sum(-1), torch.ones(9))
