"""An .onnx file in a folder of its own: what programs find there, and its card's lines, which answer as the model."""

from __future__ import annotations

import json
import re
import shutil
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
from ds_trainer.models.pretrained import CAUSAL_LM, CLASSIFIER, MASKED_LM, TOKEN_CLASSIFIER, load_trained


def exported(*arguments: object) -> int:
    return run_command(export_command, [str(argument) for argument in arguments])


def printed_by_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the card's only lines, and return what they print."""
    (lines,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    capsys.readouterr()
    exec(lines.replace("FOLDER", str(folder)), {})
    return capsys.readouterr().out.strip()


def saved(kind: Any, family: str, tokenizer: Any, folder: Path, **fields: Any) -> Any:
    """The model of a new folder, which has such a head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": len(tokenizer)} | fields)
    save_folder(randomised(kind.auto_class.from_config(config)), tokenizer, folder)
    return load_trained(folder).eval()


def test_a_shrunk_model_has_a_folder_that_programs_open(csv_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A plain config without code, a tokenizer that cuts where the task does, and a file of the shrunk model's numbers.

    An earlier export is replaced only when that is asked, and weights never are.
    """
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
    assert exported(model, "--onnx", "--output_dir", out) == 2
    assert exported(model, "--onnx", "--output_dir", out, "--overwrite") == 0
    assert not (out / "model.int8.onnx").exists()
    (shutil.copytree(model, tmp_path / "weights") / "model.onnx").write_bytes(b"")
    assert exported(model, "--onnx", "--output_dir", tmp_path / "weights", "--overwrite") == 2
    assert "holds another model (model.safetensors)" in capsys.readouterr().err


def test_the_card_s_lines_answer_questions(tmp_path: Path, capsys: Any) -> None:
    """With the words of the context between the likeliest start and end."""
    model = exported_models.save("qa", tmp_path / "model")
    assert exported(model, "--onnx", "--output_dir", tmp_path / "out") == 0
    shown = printed_by_card(tmp_path / "out", capsys)
    tokens = AutoTokenizer.from_pretrained(model)("Who came?", "Anna came by train.", return_tensors="pt")
    ((start,), (end,)) = by_torch(load_trained(model))(tokens)
    inside = [place for place, text in enumerate(tokens.sequence_ids(0)) if text == 1]
    pairs = [(first, last) for first in inside for last in inside if first <= last]
    first, last = max(pairs, key=lambda pair: start[pair[0]] + end[pair[1]])
    spans = tokens.token_to_chars(first).start, tokens.token_to_chars(last).end
    assert shown == "Anna came by train."[slice(*spans)]


def test_the_card_s_lines_tag_words(tmp_path: Path, capsys: Any) -> None:
    """Each word by its first piece."""
    labels = {"id2label": {0: "O", 1: "B-x", 2: "I-x"}, "pad_token_id": 0}
    tokenizer = word_pieces()
    model = saved(TOKEN_CLASSIFIER, "bert", tokenizer, tmp_path / "model", **labels)
    assert exported(tmp_path / "model", "--onnx", "--output_dir", tmp_path / "out") == 0
    words = ["Each", "word", "has", "a", "tag", "."]
    tokens = tokenizer([words], is_split_into_words=True, return_tensors="pt")
    tags = by_torch(model)(tokens)[0][0].argmax(-1).tolist()
    first = {word: tags[place] for place, word in reversed([*enumerate(tokens.word_ids(0))])}
    expected = "\n".join(f"{word} {model.config.id2label[first[place]]}" for place, word in enumerate(words))
    assert printed_by_card(tmp_path / "out", capsys) == expected


@pytest.mark.parametrize("head", ["regression", "multi_label_classification", "masked", "causal", "decoder", "two"])
def test_the_card_s_lines_decode_what_a_head_gives(head: str, tmp_path: Path, capsys: Any) -> None:
    """Scores, all classes above a half, a word, the next token, and a class by a decoder's last token."""
    texts, padding = ["A text.", "Another one."], {"pad_token_id": 0}
    if head in ("causal", "decoder"):
        tokenizer, padding = byte_pairs(), {}
        tokenizer.pad_token = None
        kind, family = (CAUSAL_LM if head == "causal" else CLASSIFIER), "gpt2"
    else:
        tokenizer, kind, family = word_pieces(), (MASKED_LM if head == "masked" else CLASSIFIER), "bert"
    numbers = {"regression": 1, "two": 2}
    of_head = {"num_labels": numbers.get(head, 3)} if kind is CLASSIFIER else {}
    if "_" in head or head == "regression":
        of_head["problem_type"] = head
    model = saved(kind, family, tokenizer, tmp_path / "model", **padding, **of_head)
    assert exported(tmp_path / "model", "--onnx", "--output_dir", tmp_path / "out") == 0
    if kind is not CLASSIFIER:
        texts = [f"It {tokenizer.mask_token} today." if head == "masked" else "Once upon a"]
    model.config.pad_token_id = AutoConfig.from_pretrained(tmp_path / "out").pad_token_id  # as the tasks set it
    batches = [tokenizer(text, return_tensors="pt") for text in texts]
    logits = [by_torch(model)(tokens)[0][0] for tokens in batches]
    shown = printed_by_card(tmp_path / "out", capsys)
    if head == "regression":
        values = [float(value) for value in shown.strip("[]").split()]
        assert values == pytest.approx([float(value) for value in logits], abs=1e-3)
    elif head == "multi_label_classification":
        assert shown == str([[f"LABEL_{place}" for place in range(3) if row[place] > 0] for row in logits])
    elif head in ("decoder", "two"):
        assert shown == str([f"LABEL_{int(row.argmax())}" for row in logits])
    else:
        is_place = batches[0]["input_ids"][0] == tokenizer.mask_token_id
        place = int(is_place.int().argmax()) if head == "masked" else -1
        assert shown == tokenizer.decode([int(logits[0][place].argmax())]).strip()
