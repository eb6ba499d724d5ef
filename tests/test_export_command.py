"""`launch/export.py`: what it writes, that it scores, and that bad input leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import exported_models
import pytest
import torch
from exported_models import emptied, inputs
from launching import run_python
from safetensors.torch import load_file, save_file

from ds_trainer import export_folder, load_model
from ds_trainer.command import run_command
from ds_trainer.exit_specs import ExitPolicy, SavedExits
import ds_trainer
from ds_trainer.export_command import export_command, read_export_job
from ds_trainer.model_folder import COMPACT_FILE, is_compact
from ds_trainer.models import save_folder
from ds_trainer.onnx_file import by_torch, outputs, session
from ds_trainer.techniques.exit_heads import new_heads, save_heads


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("cls", "qa"):
        exported_models.save(kind, root / kind)
    return root


@pytest.fixture
def model(folders, tmp_path) -> Path:
    """A classifier's folder with heads and neurons that are zero."""
    return Path(shutil.copytree(folders / "cls", tmp_path / "model"))


@pytest.fixture
def task(csv_folder) -> list[str]:
    """The flags of a task that the classifier is of."""
    settings = {"validation_file": "validation.csv", "text_columns": ["text"], "label_column": "kind"}
    settings |= {"max_seq_length": 24, "max_eval_samples": 20}
    flags = ["--task_name", "text", "--data_dir", str(csv_folder)]
    return [*flags, *(part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}"))]


def exported(*arguments: object) -> int:
    return run_command(export_command, [str(argument) for argument in arguments])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_command_writes_and_scores_all_at_once(model, task, tmp_path):
    """As a process: a shrunk model as ONNX in fp32 and int8, each with a score, and a report on standard output."""
    out = tmp_path / "new" / "out"
    command = ["launch/export.py", str(model), "--shrink", "--onnx", "--quantize", "int8", "--output_dir", str(out)]
    done = run_python(*command, *task)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])  # DeepSpeed writes of itself before it
    assert report == json.loads((out / "export.json").read_text())
    assert report["scores"].keys() == {"model", "onnx", "int8"}
    assert report["scores"]["onnx"] == report["scores"]["model"]
    assert report["shrunk"]["max_difference"] <= 1e-5 * max(1, report["shrunk"]["largest"])
    assert report["shrunk"]["weights"]["sizes"] == {"heads": [1, 0], "neurons": [32, 0]}
    assert {"model.onnx", "model.int8.onnx", "model.safetensors", "tokenizer.json"} <= names(out)
    assert names(tmp_path) == {"model", "new"}  # what was made aside is gone
    asked = inputs(3, 9)
    (found,) = outputs(session(out / "model.onnx", 1), asked)
    assert abs(found - by_torch(emptied("cls"))(asked)[0]).max() < 1e-4
    assert abs(found - by_torch(load_model(out))(asked)[0]).max() < 1e-4


def test_onnx_goes_to_the_model_folder(folders, tmp_path, capsys):
    """Without --output_dir; without a task built-in sentences are compared, here by a model that answers questions."""
    model = Path(shutil.copytree(folders / "qa", tmp_path / "model"))
    before = names(model)
    assert exported(model, "--onnx") == 0
    assert names(model) == before | {"model.onnx", "export.json"}
    report = json.loads(capsys.readouterr().out)
    assert report["onnx"]["largest"] > 0
    assert report["onnx"]["max_difference"] <= 1e-4 * max(1, report["onnx"]["largest"])
    assert exported(model, "--onnx") == 2
    assert "model.onnx already" in capsys.readouterr().err
    assert exported(model, "--onnx", "--overwrite") == 0


def test_compact_and_back(model, task, tmp_path, capsys):
    """A compact folder has a score, is exported and loaded as any other, and comes back as it was in fp16."""
    assert exported(model, "--compact", "fp16", "--output_dir", tmp_path / "compact", *task) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scores"].keys() == {"model", "compact"}
    assert report["compact"]["bytes"]["compact"] == (tmp_path / "compact" / COMPACT_FILE).stat().st_size
    assert "model.safetensors" not in names(tmp_path / "compact")
    assert is_compact(tmp_path / "compact")
    assert exported(tmp_path / "compact", "--onnx") == 0
    assert (tmp_path / "compact" / "model.onnx").is_file()
    loaded = ds_trainer.load_model(tmp_path / "compact").state_dict()
    assert exported(tmp_path / "compact", "--unpack", "--output_dir", tmp_path / "back") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].half().float()) for name in before)
    assert all(torch.equal(after[name], loaded[name]) for name in before)


def test_shrunk_and_compact(model, tmp_path):
    """Both at once: the compact file is of the shrunk model."""
    assert exported(model, "--shrink", "--compact", "int8", "--output_dir", tmp_path / "out") == 0
    assert is_compact(tmp_path / "out")
    assert exported(tmp_path / "out", "--unpack", "--output_dir", tmp_path / "back") == 0
    logits = [load_model(folder)(**inputs(2, 8)).logits for folder in (model, tmp_path / "back")]
    assert torch.allclose(*logits, atol=0.3)


def test_overwriting_replaces_the_model_and_nothing_else(model, tmp_path):
    """Weights and .onnx files of the model that was there go, another file stays."""
    out = Path(shutil.copytree(model, tmp_path / "out"))
    (out / "notes.txt").write_text("mine")
    (out / "model.onnx").write_bytes(b"old")
    assert exported(model, "--compact", "fp16", "--output_dir", out, "--overwrite") == 0
    assert {COMPACT_FILE, "notes.txt"} <= names(out)
    assert not {"model.safetensors", "model.onnx"} & names(out)


def test_exit_heads(model, tmp_path, capsys):
    """They go with a shrunk model; the .onnx file is of the plain one, which is told."""
    saved = SavedExits(layers=[1], pooling="first", policy=ExitPolicy(criterion="entropy", thresholds=[0.5]))
    torch.manual_seed(0)
    save_heads(model, new_heads(emptied("cls"), [1], None), saved)
    assert exported(model, "--shrink", "--onnx", "--output_dir", tmp_path / "out") == 0
    assert "never exits early" in capsys.readouterr().err
    asked = inputs(4, 8)
    before, after = (load_model(folder)(**asked) for folder in (model, tmp_path / "out"))
    assert torch.equal(before.exit_layers, after.exit_layers)
    assert torch.allclose(before.logits, after.logits, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["nothing to do", "--shrink, --onnx, --compact or --unpack"]),
        (["--shrink"], ["give --output_dir"]),
        (["--shrink", "--output_dir", "MODEL"], ["the model folder itself"]),
        (["--shrink", "--output_dir", "FULL"], ["something else than a model"]),
        (["--compact", "fp16", "--output_dir", "OTHER"], ["not empty", "--overwrite"]),
        (["--onnx", "--output_dir", "FULL/notes.txt"], ["is a file"]),
        (["--compact", "int4"], ["int4", "fp16", "int8"]),
        (["--onnx", "--quantize", "int4"], ["int4", "int8"]),
        (["--quantize", "int8", "--shrink", "--output_dir", "NEW"], ["--quantize int8", "give --onnx"]),
        (["--unpack", "--output_dir", "NEW"], ["no model.compact.safetensors"]),
        (["--unpack", "--onnx"], ["--unpack goes with --output_dir alone"]),
        (["--onnx", "--task_name", "sst3"], ["sst3", "sst2"]),
        (["--onnx", "--task_name", "sst2", "--data_dir", "/nowhere"], ["/nowhere"]),
        (["--onnx", "--batch_size", "0", "--task_name", "sst2"], ["--batch_size is 0"]),
        (["--onxx"], ["--onxx", "usage:"]),
    ],
)
def test_mistakes_of_a_command(folders, tmp_path, flags, words):
    """Told before anything is loaded: what was found, what is allowed, what to change."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    model = folders / "cls"
    places = {"MODEL": model, "OTHER": folders / "qa", "FULL": tmp_path / "full", "NEW": tmp_path / "new"}
    given = [next((f"{p}{flag[len(n) :]}" for n, p in places.items() if flag.startswith(n)), flag) for flag in flags]
    with pytest.raises(ValueError) as caught:
        read_export_job([str(model), *given])
    assert [word for word in words if word not in str(caught.value)] == []
    assert names(tmp_path) == {"full"}


@pytest.mark.parametrize("missing", ["/nowhere/model", "some/hub-name"])
def test_a_missing_folder(missing, capsys):
    """Also a hub's name: what is exported lies on this machine."""
    assert exported(missing, "--onnx") == 2
    assert "does not exist" in capsys.readouterr().err


def test_nothing_to_shrink(folders, tmp_path, capsys):
    """Exit code 2, and no folder."""
    whole = emptied("cls")
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.1)
    save_folder(whole, exported_models.tokenizer(), tmp_path / "whole")
    assert exported(tmp_path / "whole", "--shrink", "--output_dir", tmp_path / "out") == 2
    assert "nothing to cut" in capsys.readouterr().err
    assert names(tmp_path) == {"whole"}


def test_a_failure_leaves_nothing(model, tmp_path, monkeypatch, capsys):
    """An .onnx file that does not agree is not left behind, and the model folder is as it was."""
    before = names(model)
    monkeypatch.setitem(export_folder.check_onnx.__globals__, "TOLERANCE", -1.0)
    assert exported(model, "--onnx") == 2
    assert "differ from the model's" in capsys.readouterr().err
    assert names(model) == before
    assert names(tmp_path) == {"model"}


def test_a_hostile_compact_folder_is_one_line(model, tmp_path, capsys):
    """A broken file is exit code 2, one message, nothing written."""
    assert exported(model, "--compact", "fp16", "--output_dir", tmp_path / "compact") == 0
    save_file({"x": torch.zeros(1)}, tmp_path / "compact" / COMPACT_FILE)
    assert exported(tmp_path / "compact", "--unpack", "--output_dir", tmp_path / "back") == 2
    assert "no compact file" in capsys.readouterr().err
    assert names(tmp_path) == {"model", "compact"}
