"""`examples/import_older_models.py`: folders of movement pruning's scripts and of DeeBERT, against their own rules.

The folders are as those programs of 2020 write them: a pickle in torch's old format, a vocab.txt, an old config.
"""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.exported_models import TEXTS, inputs
from support.launching import ROOT, run_script
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from ds_trainer import load_model
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer, load_trained
from ds_trainer.recipe.exit_specs import ExitPolicy
from ds_trainer.techniques.exits.early_exit import read_exits, with_exits

PROGRAM = "examples/import_older_models.py"
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 40}
LAYERS, CLASSES, WORDS = 3, 3, 300


def write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    if any(name.startswith("roberta.") for name in state):
        tokens = ByteLevelBPETokenizer()
        tokens.train_from_iterator(TEXTS, WORDS, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
        tokens.save_model(str(folder))
    else:
        ids = train_tokenizer(TEXTS, WORDS, True).get_vocab()
        (folder / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.__getitem__)) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "max_len": 512, "init_inputs": []}')
    (folder / "config.json").write_text(json.dumps({"output_past": True, "pruned_heads": {}} | config))
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def randomised(model: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return dict(model.state_dict())


def masked_bert(folder: Path, method: str) -> Path:
    """A masked BERT's folder: scores with many ties, some of them extreme."""
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "num_hidden_layers": 2, **SIZES}
    state = randomised(BertForSequenceClassification(BertConfig(**size, num_labels=CLASSES)))
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    for name in [name for name in state if ".encoder." in name and state[name].dim() == 2]:
        if method == "magnitude":
            state[name] = (state[name] * 4).round() / 4  # ties of absolute values, of both signs
        else:
            scores = (torch.randn_like(state[name]) * 3).round() / 3
            state[f"{name.removesuffix('weight')}mask_scores"] = scores
    config = {"model_type": "masked_bert", "pruning_method": method, "mask_init": "constant", **size}
    return write_folder(folder, config | {"id2label": {"0": "bird", "1": "fruit", "2": "tool"}}, state)


def reference_mask(weight: np.ndarray, scores: np.ndarray, method: str, threshold: float) -> np.ndarray:
    """Of the scripts, by numpy, one number at a time where they count."""
    flat = (np.abs(weight) if method == "magnitude" else scores).ravel()
    logistic = (1 / (1 + np.exp(-flat.astype(np.float32)))).astype(np.float32)
    if method == "l0":
        return np.minimum(1, np.maximum(0, logistic * 1.2 - 0.1)).reshape(weight.shape)
    if method in ("topK", "magnitude"):
        kept = sorted(range(flat.size), key=lambda place: (-flat[place], place))[: math.floor(threshold * flat.size)]
        mask = np.zeros(flat.size)
        mask[kept] = 1
        return mask.reshape(weight.shape)
    mask = (logistic if method == "sigmoied_threshold" else flat) > threshold
    least = math.floor(0.005 * flat.size) + 1
    if mask.sum() < least:
        mask = flat > np.sort(flat)[flat.size - least - 1]
    return mask.astype(float).reshape(weight.shape)


@pytest.mark.parametrize(
    ("method", "threshold"),
    [
        *(("topK", 0.15), ("topK", 0.004), ("magnitude", 0.3), ("l0", None)),
        *(("threshold", 0.0), ("threshold", 1e9), ("sigmoied_threshold", 0.1), ("sigmoied_threshold", 0.999999)),
    ],
)
def test_a_masked_bert_is_folded_as_its_script_does(method: str, threshold: float | None, tmp_path: Path) -> None:
    """Every weight to the bit, of l0 to 1e-6, with ties and floors; the result is a BERT that transformers loads."""
    source, new = masked_bert(tmp_path / "masked", method), tmp_path / "plain"
    runpy.run_path(str(ROOT / PROGRAM))["import_masked_bert"](source, new, threshold)
    before = torch.load(source / "pytorch_model.bin", weights_only=True)
    after = load_file(new / "model.safetensors")
    masked = [name for name in after if ".encoder." in name and after[name].dim() == 2]
    assert len(masked) == 12
    assert after.keys() == {name for name in before if not name.endswith(("mask_scores", "position_ids"))}
    for name, weight in after.items():
        wanted = before[name].numpy()
        if name in masked:
            scores = before.get(f"{name.removesuffix('weight')}mask_scores", before[name]).numpy()
            wanted = wanted * reference_mask(wanted, scores, method, threshold or 0.0).astype(np.float32)
        # numpy's exponential function rounds otherwise than torch's
        np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-6 if method == "l0" else 0, atol=0)
    config = AutoModelForSequenceClassification.from_pretrained(new).config
    assert config.id2label == {0: "bird", 1: "fruit", 2: "tool"}
    assert not {"pruning_method", "mask_init"} & config.to_dict().keys()
    words = (source / "vocab.txt").read_text().splitlines()
    assert load_tokenizer(new)("the old apple").input_ids == [2, *map(words.index, ("the", "old", "apple")), 3]


def deebert(folder: Path, family: str) -> Path:
    """A folder of DeeBERT's second stage, as its fork of transformers of 2019 writes it: no model_type, no labels."""
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "num_hidden_layers": LAYERS, "num_labels": CLASSES, **SIZES}
    if family == "bert":
        state = randomised(BertForSequenceClassification(BertConfig(**size)))
    else:
        state = randomised(RobertaForSequenceClassification(RobertaConfig(**size)))
        for kind in ("weight", "bias"):
            state[f"roberta.pooler.dense.{kind}"] = state.pop(f"classifier.dense.{kind}")
            state[f"classifier.{kind}"] = state.pop(f"classifier.out_proj.{kind}")
    for layer in range(LAYERS):
        stem = f"{family}.encoder.highway.{layer}"
        state |= {f"{stem}.pooler.dense.weight": torch.randn(16, 16), f"{stem}.pooler.dense.bias": torch.randn(16)}
        state[f"{stem}.classifier.weight"] = torch.randn(CLASSES, 16) / (6 - 4 * layer)
        state[f"{stem}.classifier.bias"] = torch.randn(CLASSES)
    return write_folder(folder, {**size, "finetuning_task": "mrpc", "type_vocab_size": 2}, state)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@torch.no_grad()
def test_a_deebert_folder_exits_where_deebert_does(family: str, tmp_path: Path) -> None:
    """Logits and layers of the early-exit model, over thresholds, are those of DeeBERT's rule; the rest is plain."""
    source, new = deebert(tmp_path / "deebert", family), tmp_path / "exits"
    runpy.run_path(str(ROOT / PROGRAM))["import_deebert"](source, new)
    asked, plain = inputs(8, 9), load_trained(new).eval()
    # the layer's state -> pooler -> classifier, in plain torch, the model's own last
    state = torch.load(source / "pytorch_model.bin", weights_only=True)
    stems = [f"{family}.encoder.highway.{layer}." for layer in range(LAYERS - 1)]
    places = [
        *((f"{stem}pooler.dense", f"{stem}classifier") for stem in stems),
        (f"{family}.pooler.dense", "classifier"),
    ]
    logits = []
    for hidden, (pooler, classifier) in zip(
        plain(**asked, output_hidden_states=True).hidden_states[1:], places, strict=True
    ):
        pooled = torch.tanh(F.linear(hidden[:, 0], state[f"{pooler}.weight"], state[f"{pooler}.bias"]))
        logits.append(F.linear(pooled, state[f"{classifier}.weight"], state[f"{classifier}.bias"]))
    assert type(plain).__name__.lower() == f"{family}forsequenceclassification"
    torch.testing.assert_close(plain(**asked).logits, logits[-1], atol=1e-5, rtol=1e-5)
    saved = read_exits(new)
    assert (saved.layers, saved.pooling, saved.policy.criterion) == ([1, 2], "first", "entropy")
    entropies = [-(one.softmax(-1) * one.log_softmax(-1)).sum(-1) for one in logits]
    left = set()
    for limit in (0.0, *saved.policy.thresholds[:1], 0.3, 0.6, 0.9, 2.0):
        policy = ExitPolicy(criterion="entropy", thresholds=[limit] * (LAYERS - 1))
        out = with_exits(plain, new, policy).eval()(**asked)
        for row in range(8):
            layer = next((n for n in range(1, LAYERS) if entropies[n - 1][row] < limit), LAYERS)
            assert int(out.exit_layers[row]) == layer
            torch.testing.assert_close(out.logits[row], logits[layer - 1][row], atol=1e-5, rtol=1e-5)
            left.add(layer)
    assert left == {1, 2, 3}


def test_the_program_writes_a_folder(tmp_path: Path) -> None:
    """With the threshold that the old folder does not hold, and not without."""
    source, new = masked_bert(tmp_path / "masked", "topK"), tmp_path / "new"
    with pytest.raises(SystemExit, match="give --threshold"):
        runpy.run_path(str(ROOT / PROGRAM))["import_masked_bert"](source, new, None)
    done = run_script(PROGRAM, "masked_bert", str(source), str(new), "--threshold", "0.5")
    assert done.returncode == 0, done.stderr
    assert load_model(new).config.num_hidden_layers == 2
