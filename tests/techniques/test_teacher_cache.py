"""Cached answers of a teacher that speaks of tokens: SQuAD's starts and ends, a vocabulary at every position, tags."""

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
from ds_trainer.tasks.registry import build_task, training_texts
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
