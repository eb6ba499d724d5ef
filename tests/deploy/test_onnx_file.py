"""ONNX files: any batch and length, the torch model's numbers, whole and shrunk; int8; what is refused."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from support.exported_models import emptied, inputs, save
from support.launching import ROOT, exhaustive
from support.zeroed import KIN
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.deploy import onnx_file
from ds_trainer.deploy.onnx_file import by_torch, check_onnx, compare, outputs, predictor, quantise, session, write_onnx
from ds_trainer.models.pretrained import load_trained
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Batch

SHAPES = [(1, 1), (1, 7), (3, 20), (5, 64), (2, 2)]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 32, "pad_token_id": 0}
FAMILIES = {
    "roberta": (AutoModelForMaskedLM, SMALL | {"intermediate_size": 48, "max_position_embeddings": 80}),
    "modernbert": (
        AutoModelForTokenClassification,
        SMALL
        | {"intermediate_size": 48, "local_attention": 8, "bos_token_id": 1, "eos_token_id": 2}
        | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "gpt2": (AutoModelForCausalLM, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80, "vocab_size": 64}),
    "llama": (AutoModelForCausalLM, SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}),
}
if exhaustive():
    MLM = SMALL | {"intermediate_size": 48, "max_position_embeddings": 80}
    FAMILIES |= dict.fromkeys(("bert", "electra"), (AutoModelForMaskedLM, MLM))
    DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64}
    FAMILIES["distilbert"] = (AutoModelForMaskedLM, DISTILBERT)


@pytest.fixture(scope="module", params=["cls", "qa shrunk"])
def exported(request, tmp_path_factory):
    """A model, and the file that was written of it."""
    kind, _, cut = request.param.partition(" ")
    model = shrink(emptied(kind)) if cut else emptied(kind)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    write_onnx(model, inputs(2, 11), path)
    return model, path


def test_batch_and_length_are_free(exported):
    """Shapes other than the one that was traced, padded and not, give the torch model's outputs to 1e-5.

    Inputs and outputs are called as the model calls them; it keeps its kind of attention, and is in evaluation mode.
    """
    model, path = exported
    opened = session(path, 1)
    results = compare(model, partial(outputs, opened), [inputs(*shape) for shape in SHAPES])
    assert results["max_difference"] <= 1e-5 * max(1, results["largest"])
    assert results["largest"] > 0.1
    assert [node.name for node in opened.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    names = ["start_logits", "end_logits"] if "Question" in type(model).__name__ else ["logits"]
    assert [node.name for node in opened.get_outputs()] == names
    assert not model.training
    assert model.config._attn_implementation != "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """Masked, tags and causal; with windows and rotary places, at lengths beyond what was traced."""
    auto, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(family, **sizes)).eval()
    batches = [{name: inputs(*shape)[name] for name in ("input_ids", "attention_mask")} for shape in SHAPES]
    write_onnx(model, batches[2], tmp_path / "model.onnx")
    found = check_onnx(model, tmp_path / "model.onnx", batches)
    assert found["max_difference"] <= 1e-5 * max(1, found["largest"])


def test_a_file_that_differs_is_refused(exported):
    """A changed bias shows, with both numbers."""
    model, path = exported
    head = model.qa_outputs if hasattr(model, "qa_outputs") else model.classifier
    with torch.no_grad():
        head.bias += 0.01
    try:
        with pytest.raises(ValueError, match=r"differ from the model's by 0\.01"):
            check_onnx(model, path, [inputs(2, 5)])
    finally:
        with torch.no_grad():
            head.bias -= 0.01


def test_a_file_that_onnxruntime_cannot_run_is_refused(tmp_path):
    """The exporter writes wrong shapes for the rotary places of this family; the message names the class."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **KIN["cohere"], vocab_size=64))
    batch = {name: inputs(2, 5)[name] for name in ("input_ids", "attention_mask")}
    write_onnx(model, batch, tmp_path / "model.onnx")
    with pytest.raises(
        UserError, match=rf"^{type(model).__name__} does something that a trace does not hold.*cannot run"
    ):
        check_onnx(model, tmp_path / "model.onnx", [batch])


def test_a_predictor_stands_for_the_model_and_int8_is_smaller_and_close(tmp_path):
    """Outputs by name; for a language model's task at `head_positions` alone, token types taken as zeros.

    Weights of int8 make a file of less than half the size, with outputs near those of fp32, but not the same.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=64, **sizes)).eval()
    write_onnx(model, inputs(2, 5), tmp_path / "model.onnx")
    quantise(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    assert (tmp_path / "int8.onnx").stat().st_size < (tmp_path / "model.onnx").stat().st_size / 2
    found = compare(model, partial(outputs, session(tmp_path / "int8.onnx", 1)), [inputs(3, 9)])
    assert 0 < found["max_difference"] < 0.1 * found["largest"]
    batch = inputs(3, 6)
    places = torch.tensor([1, 4, 12])
    asked = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"head_positions": places}
    found = predictor(session(tmp_path / "model.onnx", 1))(Batch(asked, torch.zeros(3), torch.arange(3)))
    wanted = by_torch(model)(batch)[0].reshape(18, 64)[places]
    assert found.logits.shape == (1, 3, 64)
    assert np.allclose(found.logits[0], wanted, atol=1e-5)


def test_what_cannot_be_a_file_is_refused(monkeypatch, tmp_path):
    """More weights than the format holds, outputs that are not finite, and bytes that are no file."""
    model, path = emptied("cls"), tmp_path / "model.onnx"
    monkeypatch.setattr(onnx_file, "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"2 GiB"):
        write_onnx(model, inputs(2, 5), path)
    assert not path.exists()
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        compare(model, by_torch(model), [inputs(1, 3)])
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"cannot load .*model\.onnx"):
        session(path, 1)


def test_a_shrunk_model_has_a_folder_that_programs_open(csv_folder, tmp_path, capsys):
    """A plain config without code, a tokenizer that cuts where the task does, a file of the shrunk model's numbers.

    The program of docs/export.md answers as the model does.
    """
    model = save("cls", tmp_path / "model", cut=True)
    settings = {"validation_file": "validation.csv", "text_columns": ["text"], "label_column": "kind"}
    task = ["--task_name", "text", "--data_dir", csv_folder, "--set", "max_seq_length=24"]
    task += [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    out = tmp_path / "out"
    command = [model, "--onnx", "--quantize", "int8", "--output_dir", out, *task]
    assert run_command(export_command, [str(word) for word in command]) == 0
    config, tokenizer = AutoConfig.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (config.model_type, config.architectures) == ("bert", ["BertForSequenceClassification"])
    assert not {"auto_map", "layer_sizes"} & config.to_dict().keys()
    assert tokenizer.model_max_length == 24
    texts = tokenizer(["plum " * 99, "a saw"], padding=True, truncation=True, return_tensors="pt")
    assert texts["input_ids"].shape == (2, 24)
    assert "`model.onnx` and `model.int8.onnx`: in onnxruntime" in (out / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL)
    capsys.readouterr()
    exec(lines.replace("FOLDER", str(out)), {})
    shown = capsys.readouterr().out.strip()
    texts = tokenizer(["A text.", "Another one."], padding=True, return_tensors="pt")
    best = by_torch(load_trained(model))(texts)[0].argmax(-1).tolist()
    assert shown == str([config.id2label[each] for each in best])
