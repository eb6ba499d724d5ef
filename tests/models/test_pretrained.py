"""Model folders whose config, tokenizer and weights do not say the same, or nothing that can be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.labelled_files import write_csv
from support.launching import ROOT
from transformers import BertConfig

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import (
    ANSWERER,
    CLASSIFIER,
    MASKED_LM,
    HeadKind,
    identity_of,
    load_config,
    load_tokenizer,
    load_with_head,
    tokenizer_state,
)
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.registry import build_task

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXTS = ["it rains", "it is wet", "no"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TEXTS * 5, 60, True)


@pytest.fixture
def folder_of(tokenizer: Any, tmp_path: Path) -> Callable[..., Path]:
    """A folder of a small BERT of a class, some of its weights changed."""

    def make(name: str, change: Callable[[dict[str, Any]], dict[str, Any]] = dict, **fields: Any) -> Path:
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL, **fields)
        getattr(transformers, name)(config).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        path = tmp_path / "model" / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})
        return tmp_path / "model"

    return make


def without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


HEADS: list[tuple[str, HeadKind, str, str]] = [
    ("BertForQuestionAnswering", ANSWERER, "qa_outputs.", "qa_outputs.bias, qa_outputs.weight"),
    ("BertForMaskedLM", MASKED_LM, "transform.dense.weight", "cls.predictions.transform.dense.weight"),
]


@pytest.mark.parametrize(("name", "kind", "part", "named"), HEADS)
def test_a_head_that_the_config_claims_must_be_in_the_weights(
    name: str, kind: HeadKind, part: str, named: str, folder_of: Any
) -> None:
    """A missing one would be scored at random: its weights are named instead."""
    assert load_with_head(folder_of(name), kind)
    folder = folder_of(name, without(part))
    with pytest.raises(UserError, match=rf"{named} of the head are missing or of another shape.*take {name} out"):
        load_with_head(folder, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    assert load_with_head(folder, kind), "as the message says"


def test_a_classifier_that_the_config_claims_must_be_in_the_weights(folder_of: Any, tmp_path: Path) -> None:
    """Where its classes fit and it would be kept; one of other classes is new either way. The pooler may be new."""
    spec = write_csv(tmp_path, ["a", "a", "b"])
    name = "BertForSequenceClassification"
    for folder in (folder_of(name, without("pooler")), folder_of(name, without("classifier."), num_labels=3)):
        assert build_task(spec, folder, tmp_path / "cache").build_model(folder)
    folder = folder_of(name, without("classifier."))
    task = build_task(spec, folder, tmp_path / "cache")
    with pytest.raises(UserError, match=r"classifier\.bias, classifier\.weight of the head are missing"):
        task.build_model(folder)


def test_pre_training_holds_a_masked_language_model_too(folder_of: Any) -> None:
    """BERT as it was published has both heads of its pre-training; its weights are taken. ELECTRA's is another."""
    folder = folder_of("BertForPreTraining")
    assert MASKED_LM.trained_in(load_config(folder, MASKED_LM))
    assert not CLASSIFIER.trained_in(load_config(folder, CLASSIFIER))
    expected = load_file(folder / "model.safetensors")["cls.predictions.transform.dense.weight"]
    assert torch.equal(load_with_head(folder, MASKED_LM).cls.predictions.transform.dense.weight, expected)
    electra = transformers.ElectraConfig(architectures=["ElectraForPreTraining"])
    assert not MASKED_LM.trained_in(electra)


def test_a_hub_name_stands_for_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays where its model changes. Without a version nothing is used again: a folder is asked for."""
    config = BertConfig()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    config._commit_hash = "1f2e"
    assert identity_of("owner/versioned") == "1f2e"
    config._commit_hash = None
    with pytest.raises(UserError, match="the hub does not report the version of owner/versioned: give a folder"):
        identity_of("owner/versioned")


def test_weights_that_a_wrapper_named_are_refused(folder_of: Any) -> None:
    """All of the encoder is missing; the cure is that of docs/troubles.md."""
    prefix = "module._orig_mod."
    folder = folder_of("BertForQuestionAnswering", lambda weights: {prefix + k: v for k, v in weights.items()})
    with pytest.raises(UserError, match=r"of the encoder are missing or of another shape, bert\.embeddings"):
        load_with_head(folder, ANSWERER)
    cure = (ROOT / "docs" / "troubles.md").read_text().split("```python\n")[1].split("```")[0]
    exec(cure.replace("FOLDER", str(folder)), {})
    assert load_with_head(folder, ANSWERER)


@pytest.mark.parametrize("token", ["eos_token", "unk_token", "cls_token"])
def test_special_tokens_are_part_of_a_tokenizers_state(token: str, folder_of: Any, tmp_path: Path) -> None:
    """They decide what examples are, and are not all in the tokenizer's own file: another one is another cache."""
    folder = folder_of("BertForMaskedLM")
    one, other = load_tokenizer(folder), load_tokenizer(folder)
    setattr(other, token, "[MASK]")
    assert tokenizer_state(one) == tokenizer_state(load_tokenizer(folder))
    assert tokenizer_state(one) != tokenizer_state(other)
    assert json.loads(json.dumps(tokenizer_state(one))) == tokenizer_state(one)
