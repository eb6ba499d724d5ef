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

from ds_trainer.config.recipe import DistillSpec, parse_task
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.ranks import progress
from ds_trainer.tasks.divergences import TopK
from ds_trainer.tasks.registry import build_task, training_texts
from ds_trainer.techniques.distill import teacher_cache
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.technique import PhaseLength


@pytest.fixture(scope="module", params=["squad", "clm", "ner"])
def told(request, tmp_path_factory) -> tuple[Any, str, Path]:
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


def test_cached_answers_equal_live_ones(told):
    """In any batch, with any padding: logits and the states of attended positions, to half precision."""
    spec, source, folder = told
    task = build_task(spec, source, folder / "cache")
    pairs = {"terms": ["logits", "cos"], "layer_pairs": [[0, 1], [-1, -1]]}
    techniques = [
        Distill(DistillSpec(teacher=source, cache_teacher=cached, **pairs), PhaseLength(1, 0, 0), task)
        for cached in (False, True)
    ]
    for technique in techniques:
        technique.attach(task.build_model(source))
        technique.start(torch.device("cpu"))
    examples = task.examples("train")
    for rows in ([0], [7, 3, 30], list(range(len(examples)))):
        batch = task.collate(examples, rows)
        live, cached = (technique._targets(batch) for technique in techniques)
        torch.testing.assert_close(cached.logits, live.logits, rtol=2e-3, atol=1e-3)
        mask = batch.inputs["attention_mask"][..., None]
        for layer, states in live.hidden.items():
            torch.testing.assert_close(cached.hidden[layer] * mask, states * mask, rtol=2e-3, atol=2e-3)


def test_tokenising_and_filling_the_cache_say_how_far_they_are(told, monkeypatch, caplog):
    """Of what is counted beforehand it is said how much there is: questions, sentences and forwards of the teacher."""
    spec, source, folder = told
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    task = build_task(spec, source, folder / "fresh")
    technique = Distill(DistillSpec(teacher=source, cache_teacher=True), PhaseLength(1, 0, 0), task)
    technique.attach(task.build_model(source))
    monkeypatch.setattr(teacher_cache, "_TOKENS", 16)
    with caplog.at_level("INFO", "ds_trainer"):
        technique.start(torch.device("cpu"))
    unit = {"squad": r"\d+ of \d+ question", "clm": r"\d+ document", "ner": r"\d+ of \d+ sentence"}[folder.name[:-1]]
    lines = "\n".join(caplog.messages)
    assert re.search(rf"^tokenising: {unit}s", lines, re.MULTILINE), lines
    assert re.search(r"^cache_teacher: the teacher answers the training set: 1 of \d+ forwards", lines, re.MULTILINE)


def test_a_top_k_cache_has_the_size_that_was_told_and_the_likeliest_tokens(told, caplog):
    """A dry run tells it, too, and beside its header the file has not a byte more. In any batch the tokens are the live
    teacher's, at the phase's temperature: of another one there is another cache.

    SQuAD and tags, which have no vocabulary, are refused, and so is a k that leaves no other tokens.
    """
    spec, source, folder = told
    task = build_task(spec, source, folder / "cache")
    fields = {"teacher": source, "cache_teacher": {"top_k": 8}}
    if not task.over_vocabulary:
        with pytest.raises(ValueError, match="top_k is for logits over a vocabulary"):
            Distill(DistillSpec(**fields), PhaseLength(1, 0, 0), task)
        return
    before = set((folder / "cache").glob("teacher-*/logits.0.npy"))
    for temperature in (1.0, 3.0):
        technique = Distill(DistillSpec(**fields, temperature=temperature), PhaseLength(1, 0, 0), task)
        technique.attach(task.build_model(source))
        examples = task.examples("train")
        labels = int(examples.offsets[-1]) - len(examples)  # the first token of an example is none
        for begin in (technique.rehearse, technique.start):
            with caplog.at_level("INFO", logger="ds_trainer"):
                begin(torch.device("cpu"))
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
    whole = Distill(DistillSpec(teacher=source, cache_teacher={"top_k": size}), PhaseLength(1, 0, 0), task)
    with pytest.raises(ValueError, match=f"top_k {size} is not below the {size} tokens of the teacher"):
        whole.attach(task.build_model(source))
