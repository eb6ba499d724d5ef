"""Folders of models that the tests of early exits share."""

import pytest
import torch
from support.exit_models import randomise
from support.exit_training import DEPTH, SENTENCES
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.models.folders import train_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Model folders of a classifier and of a regressor, and the files of a task for each."""
    root = tmp_path_factory.mktemp("exits")
    tokenizer = train_tokenizer(SENTENCES * 5, 60, True)
    for name in ("classes", "scores"):
        labels = {"num_labels": 1} if name == "scores" else {"id2label": {0: "no", 1: "yes", 2: "maybe"}}
        shape = {"hidden_size": 16, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 16}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **shape, **off, **labels))
        randomise(model, 0.2).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        rows = [
            (SENTENCES[number % 6], str(number / 10) if name == "scores" else ("no", "yes", "maybe")[number % 3])
            for number in range(24)
        ]
        (root / f"{name}.csv").write_text("\n".join(["text,label", *map(",".join, rows)]) + "\n")
    return {name: str(root / name) for name in ("classes", "scores")}
