"""The forwards of a step whose loss compares all of its examples."""

from __future__ import annotations

import json

import numpy as np
import torch

from ds_trainer.models.folders import create_folder, train_tokenizer
from ds_trainer.recipe.task_specs import EmbeddingSpec
from ds_trainer.run.forwards import forwards
from ds_trainer.tasks.registry import build_task

TEXTS = ["it rains", "it is wet", "the cat sat on the mat", "no"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


class Engine:
    """A model that counts its forwards, as an engine calls it."""

    def __init__(self, model):
        self.model, self.graded = model, []

    def __call__(self, **inputs):
        self.graded.append(torch.is_grad_enabled())
        return self.model(**inputs)


def test_both_forwards_of_a_micro_batch_drop_the_same(tmp_path):
    """In training, with dropout, the values that other micro-batches see are those that get the gradient.

    Each micro-batch has its own dropout, and a step of one micro-batch runs once.
    """
    config = {"model_type": "bert", "max_position_embeddings": 32, "hidden_dropout_prob": 0.3, **SMALL}
    create_folder(config, train_tokenizer(TEXTS, 60, True), tmp_path, 0)
    rows = [{"a": TEXTS[0], "p": TEXTS[1]}] * 4
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"file": "pairs.jsonl", "text_columns": ["a", "p"]}
    scored = source | {"score_column": "s"}
    files = {"data_dir": str(tmp_path), "train": [source], "validation": [scored]}
    spec = EmbeddingSpec(name="embedding", max_seq_length=16, **files)
    task = build_task(spec, tmp_path, tmp_path / "cache")
    engine, examples, ids = Engine(task.build_model(tmp_path).train()), task.examples("train"), np.arange(4)
    parts = [(task.collate(examples, part), {}) for part in (ids[:2], ids[2:])]
    seen = []
    for batch, out, _ in forwards(task, parts, ids, engine, seed=3):
        own = task.logits(out, batch)[0]
        others = batch.step.values[batch.step.start : batch.step.start + len(own)]
        assert own.requires_grad
        assert torch.equal(own.detach(), others)
        seen.append(others)
    assert engine.graded == [False, True, True]  # the first needs no second forward
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)
    engine.graded.clear()
    ((batch, _, _),) = forwards(task, [(task.collate(examples, ids), {})], ids, engine, seed=3)
    assert engine.graded == [True]
    assert batch.step.parts == 1
