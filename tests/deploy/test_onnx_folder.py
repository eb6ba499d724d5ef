"""An .onnx file in a folder of its own: what programs find there, and its card's lines, which answer as the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exported_models
from support.tiny_tokenizers import byte_pairs, word_pieces
from support.zeroed import FAMILIES, randomised
from transformers import AutoConfig, AutoTokenizer

from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.deploy.onnx_file import by_torch, outputs, session
from ds_trainer.models.folders import save_folder
from ds_trainer.models.pretrained import (
    ANSWERER,
    CAUSAL_LM,
    CLASSIFIER,
    MASKED_LM,
    TOKEN_CLASSIFIER,
    load_trained,
)


def exported(*arguments: object) -> int:
    return run_command(export_command, [str(argument) for argument in arguments])


def printed_by_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the card's only lines, and return what they print."""
    (lines,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    capsys.readouterr()
    exec(lines.replace("FOLDER", str(folder)), {})
    return capsys.readouterr().out.strip()


def test_a_shrunk_model_has_a_folder_that_programs_open(csv_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A plain config without code, a tokenizer that cuts where the task does, a file of the shrunk model's numbers."""
    model = exported_models.save("cls", tmp_path / "model", cut=True)
    settings = {"validation_file": "validation.csv", "text_columns": ["text"], "label_column": "kind"}
    task = ["--task_name", "text", "--data_dir", csv_folder, "--set", "max_seq_length=24"]
    task += [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    out = tmp_path / "out"
    assert exported(model, "--onnx", "--quantize", "int8", "--output_dir", out, *task) == 0
    config, tokenizer = AutoConfig.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (config.model_type, config.architectures) == ("bert", ["BertForSequenceClassification"])
    assert not {"auto_map", "layer_sizes"} & config.to_dict().keys()
    assert tokenizer.model_max_length == 24
    texts = tokenizer(["plum " * 99, "a saw"], padding=True, truncation=True, return_tensors="pt")
    assert texts["input_ids"].shape == (2, 24)
    (given,) = outputs(session(out / "model.onnx", 1), texts)
    torch.testing.assert_close(given, by_torch(load_trained(model))(texts)[0], rtol=1e-4, atol=1e-4)
    shown = printed_by_card(out, capsys)
    texts = tokenizer(["A text.", "Another one."], padding=True, return_tensors="pt")
    best = by_torch(load_trained(model))(texts)[0].argmax(-1).tolist()
    assert shown == str([config.id2label[each] for each in best])


HEADS = {
    "regression": (CLASSIFIER, {"num_labels": 1, "problem_type": "regression"}),
    "multi_label_classification": (CLASSIFIER, {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "decoder": (CLASSIFIER, {"num_labels": 2}),
    "tags": (TOKEN_CLASSIFIER, {"id2label": {0: "O", 1: "B-x", 2: "I-x"}}),
    "masked": (MASKED_LM, {}),
    "causal": (CAUSAL_LM, {}),
    "questions": (ANSWERER, {}),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_card_s_lines_print_what_the_model_answers(head: str, tmp_path: Path, capsys: Any) -> None:
    """Scores, all likely classes, a class by a decoder's last token, tags, a word, the next one, a span."""
    kind, fields = HEADS[head]
    if head in ("causal", "decoder"):
        tokenizer, family = byte_pairs(), "gpt2"
        tokenizer.pad_token = None
    else:
        tokenizer, family = word_pieces(), "bert"
        fields = fields | {"pad_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": len(tokenizer)} | fields)
    save_folder(randomised(kind.auto_class.from_config(config)), tokenizer, tmp_path / "model")
    model = load_trained(tmp_path / "model").eval()
    assert exported(tmp_path / "model", "--onnx", "--output_dir", tmp_path / "out") == 0
    printed = printed_by_card(tmp_path / "out", capsys)
    model.config.pad_token_id = AutoConfig.from_pretrained(tmp_path / "out").pad_token_id  # as the tasks set it
    texts = {"tags": ["Each word has a tag ."], "masked": [f"It {tokenizer.mask_token} today."]}
    texts |= {"causal": ["Once upon a"], "questions": [("Who came?", "Anna came by train.")]}
    given = [text if isinstance(text, tuple) else (text,) for text in texts.get(head, ["A text.", "Another one."])]
    batches = [tokenizer(*text, return_tensors="pt") for text in given]
    answers = [by_torch(model)(tokens) for tokens in batches]
    logits, ids = answers[0][0][0], batches[0]["input_ids"][0]
    if head == "regression":
        values = [float(value) for value in printed.strip("[]").split()]
        assert values == pytest.approx([float(answer[0]) for answer in answers], abs=1e-3)
        return
    best, names = logits.argmax(-1), model.config.id2label
    first, last = best, answers[0][-1][0].argmax(-1)
    expected = {
        "multi_label_classification": lambda: [
            [names[i] for i in range(3) if a[0][0, i].sigmoid() > 0.4] for a in answers
        ],
        "decoder": lambda: [names[int(answer[0].argmax())] for answer in answers],
        "tags": lambda: list(zip(tokenizer.convert_ids_to_tokens(ids), [names[int(i)] for i in best], strict=True)),
        "masked": lambda: tokenizer.decode(best[ids == tokenizer.mask_token_id]),
        "causal": lambda: tokenizer.decode([int(best[-1])]),
        "questions": lambda: tokenizer.decode(ids[first : last + 1]),
    }
    assert printed == str(expected[head]()).strip()
