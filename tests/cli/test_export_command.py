"""`launch/export.py`: what it writes, that it scores, that bad input leaves nothing; and the benchmark's mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support import exported_models
from support.exported_models import emptied, inputs
from support.squad_tasks import SMALL, hard_questions, word_pieces, write
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, BertForQuestionAnswering

import ds_trainer
from ds_trainer import load_model
from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command, read_benchmark_job, read_export_job
from ds_trainer.deploy import export_folder, onnx_file
from ds_trainer.files.reading import read_object
from ds_trainer.files.writing import is_aside
from ds_trainer.models.folders import COMPACT_FILE, is_compact, save_folder
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.exit_specs import ExitPolicy, SavedExits
from ds_trainer.techniques.exits.early_exit import new_heads, save_heads


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
    settings = {"train_file": "train.csv", "validation_file": "validation.csv", "text_columns": ["text"]}
    settings |= {"label_column": "kind", "max_seq_length": 24, "max_eval_samples": 20}
    flags = ["--task_name", "text", "--data_dir", str(csv_folder)]
    return [*flags, *(part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}"))]


def exported(*arguments: object) -> int:
    return run_command(export_command, [str(argument) for argument in arguments])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def add_exits(folder: Path, threshold: float) -> None:
    saved = SavedExits(layers=[1], pooling="first", policy=ExitPolicy(criterion="entropy", thresholds=[threshold]))
    torch.manual_seed(0)
    save_heads(folder, new_heads(emptied("cls"), [1], None), saved)


def test_the_command_writes_and_scores_all_at_once(model, task, tmp_path, capsys, monkeypatch):
    """A shrunk model with exit heads as ONNX in fp32 and int8, each with a score.

    The report alone is on standard output. The .onnx file is of the plain model, which a warning says.
    """
    build = export_folder.build_task

    def talkative(*arguments: object) -> object:
        print("as DeepSpeed does while it is loaded")
        return build(*arguments)

    warnings: list[str] = []
    add_exits(model, 0.5)
    monkeypatch.setattr(export_folder, "build_task", talkative)
    monkeypatch.setattr(export_folder.distributed, "warn", warnings.append)
    out = tmp_path / "new" / "out"
    assert exported(model, "--shrink", "--onnx", "--quantize", "int8", "--output_dir", out, *task) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == read_object(out / "export.json")
    assert report["scores"].keys() == {"model", "onnx", "int8"}
    assert report["scores"]["onnx"] == report["scores"]["model"]
    assert report["shrunk"]["max_difference"] <= 1e-5 * max(1, report["shrunk"]["largest"])
    assert report["shrunk"]["weights"]["sizes"] == {"heads": [1, 0], "neurons": [32, 0]}
    assert {"model.onnx", "model.int8.onnx", "model.safetensors", "tokenizer.json"} <= names(out)
    assert names(tmp_path) == {"model", "new"}  # what was made aside is gone
    asked = inputs(4, 9)
    assert "never exits early" in warnings[0]
    before, after = (load_model(folder)(**asked) for folder in (model, out))
    assert torch.equal(before.exit_layers, after.exit_layers)
    assert torch.allclose(before.logits, after.logits, atol=1e-4)


def test_onnx_goes_to_the_model_folder(folders, tmp_path, capsys):
    """Without --output_dir; without a task built-in sentences are compared, here by a model that answers questions.

    An earlier .onnx file is replaced where that is asked, and its int8 file, which is stale, is deleted. The report of
    the folder stays in that of its .onnx files.
    """
    model, earlier = Path(shutil.copytree(folders / "qa", tmp_path / "model")), {"shrunk": {"weights": 1}}
    (model / "export.json").write_text(json.dumps(earlier))
    before = names(model)
    assert exported(model, "--onnx") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["onnx"]["largest"] > 0
    assert report["onnx"]["max_difference"] <= 1e-4 * max(1, report["onnx"]["largest"])
    (model / "model.int8.onnx").write_bytes(b"old")
    assert exported(model, "--onnx") == 2
    assert "has 'model.int8.onnx', 'model.onnx' already" in capsys.readouterr().err
    assert exported(model, "--onnx", "--overwrite") == 0
    assert names(model) == before | {"model.onnx", "README.md"}
    assert read_object(model / "export.json")["earlier"] == earlier


def test_compact_and_back(model, task, tmp_path, capsys):
    """A compact folder has a score, is exported as any other, and comes back as it was in fp16."""
    assert exported(model, "--compact", "fp16", "--output_dir", tmp_path / "compact", *task) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scores"].keys() == {"model", "compact"}
    assert report["compact"]["bytes"]["compact"] == (tmp_path / "compact" / COMPACT_FILE).stat().st_size
    assert is_compact(tmp_path / "compact")
    assert exported(tmp_path / "compact", "--onnx") == 0
    assert exported(tmp_path / "compact", "--unpack", "--output_dir", tmp_path / "back") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert all(torch.equal(after[name], before[name].half().float()) for name in before)


def test_a_shrunk_folder_is_as_precise_as_its_source(model, tmp_path):
    """Half of fp32's bytes stay half, and a compact file is of the shrunk model."""
    load_model(model).to(torch.bfloat16).save_pretrained(model)
    assert exported(model, "--shrink", "--output_dir", tmp_path / "cut") == 0
    cut = load_file(tmp_path / "cut" / "model.safetensors")
    assert {weight.dtype for weight in cut.values()} == {torch.bfloat16}
    assert exported(model, "--shrink", "--compact", "fp16", "--output_dir", tmp_path / "small") == 0
    small = load_model(tmp_path / "small").state_dict()
    assert all(torch.equal(small[name], weight.half().float()) for name, weight in cut.items())


def test_overwriting_leaves_nothing_of_the_old_model(model, folders, tmp_path):
    """Neither its exit heads nor its tokenizer nor its code, and .onnx files: another file stays."""
    out = Path(shutil.copytree(folders / "cls", tmp_path / "out"))
    add_exits(out, 9.0)
    old = ("shrunk_model.py", "vocab.txt", "model-00001-of-00002.safetensors", "pytorch_model.bin", "model.onnx")
    for name in (*old, "notes.txt"):
        (out / name).write_text("old")
    assert exported(model, "--compact", "fp16", "--output_dir", out, "--overwrite") == 0
    made = {*names(model) - {"model.safetensors"}, COMPACT_FILE, "export.json", "README.md"}
    assert names(out) == {*made, "notes.txt"}
    assert not hasattr(load_model(out)(**inputs(2, 8)), "exit_layers")


def test_a_signal_between_two_models_waits(model, tmp_path, monkeypatch):
    """The old one is gone then: the new one is put in place whole, its weights last, before the process ends."""
    out, replace, moved = Path(shutil.copytree(model, tmp_path / "out")), Path.replace, []

    def signalled(path: Path, target: Path) -> Path:
        if target.parent == out:
            moved.append(target.name)
            signal.raise_signal(signal.SIGTERM)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", signalled)
    with pytest.raises(SystemExit, match="143"):
        exported(model, "--compact", "fp16", "--output_dir", out, "--overwrite")
    assert moved[-2:] == [COMPACT_FILE, "README.md"]
    assert names(out) == {*names(model) - {"model.safetensors"}, COMPACT_FILE, "export.json", "README.md"}
    assert not [name for name in names(tmp_path) if is_aside(Path(name))]
    assert load_model(out)(**inputs(2, 8)).logits.shape == (2, 3)


def test_what_ends_a_command_leaves_nothing(model, tmp_path, monkeypatch, capsys):
    """A full disk is one line, a file that differs another, and SIGTERM ends the command: the folder is as it was."""
    before, handler = names(model), signal.getsignal(signal.SIGTERM)

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("ds_trainer.models.compact.save_file", full)
    assert exported(model, "--compact", "fp16", "--output_dir", tmp_path / "out") == 1
    assert re.fullmatch("error: .*No space left on device.*\n", capsys.readouterr().err)
    monkeypatch.setattr(onnx_file, "TOLERANCE", -1.0)
    assert exported(model, "--onnx") == 2
    assert "differ from the model's" in capsys.readouterr().err
    monkeypatch.setattr(export_folder, "_written", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        exported(model, "--onnx")
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert names(model) == before
    assert names(tmp_path) == {"model"}


def test_a_decoder_without_a_padding_token(tmp_path):
    """It is compared on batches, and its config and tokenizer stay without."""
    tokens = exported_models.tokenizer()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": len(tokens), "num_labels": 3}
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("gpt2", **sizes, eos_token_id=tokens.sep_token_id)
    )
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight[::2] = 0
        model.transformer.h[0].mlp.c_fc.bias[::2] = 0
    tokens.pad_token, tokens.eos_token = None, "[SEP]"
    save_folder(model, tokens, tmp_path / "model")
    assert exported(tmp_path / "model", "--shrink", "--onnx", "--output_dir", tmp_path / "out") == 0
    for name in ("config.json", "tokenizer_config.json"):
        before, after = (read_object(tmp_path / folder / name) for folder in ("model", "out"))
        for field in ("pad_token_id", "pad_token"):
            assert before.get(field) is after.get(field) is None


def test_squad_is_scored_by_the_files(tmp_path, capsys):
    """Answers of the .onnx files, in fp32 the model's."""
    tokenizer = word_pieces()
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL)
    save_folder(BertForQuestionAnswering(config), tokenizer, tmp_path / "model")
    write(tmp_path / "data", hard_questions(0, 6))
    task = ["--task_name", "squad", "--data_dir", tmp_path / "data"]
    task += ["--set", "max_seq_length=40", "--set", "doc_stride=11", "--set", "max_query_length=16"]
    assert exported(tmp_path / "model", "--onnx", "--quantize", "int8", *task) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores.keys() == {"model", "onnx", "int8"}
    assert scores["model"].keys() == scores["int8"].keys() >= {"exact_match", "f1"}
    assert scores["onnx"] == pytest.approx(scores["model"])


def test_a_cut_is_scored_exported_and_as_precise_as_its_source(model, task, tmp_path):
    """Heads, neurons and tokens of a bfloat16 folder; the .onnx file and the compact file are of the cut model."""
    config, whole = read_object(model / "config.json") | {"dtype": "bfloat16"}, len(load_tokenizer(model))
    (model / "config.json").write_text(json.dumps(config))
    spec = {"keep": 0.5, "uniform": True, "granularity": "neuron", "calibration_examples": 16}
    spec["reconstruct"] = False
    spec["vocabulary"], out = {"keep": 40}, tmp_path / "cut"
    report = ds_trainer.cut(model, out, spec, "--onnx", *task)
    assert report == read_object(out / "export.json")
    assert report["cut"] == read_object(out / "cut.json")
    assert (report["cut"]["examples"], report["cut"]["reconstruction"]) == (16, [])
    assert report["cut"]["tokens"] == {"before": whole, "after": len(load_tokenizer(out))}
    assert load_model(out).config.vocab_size == report["cut"]["tokens"]["after"] < whole
    weights = load_file(out / "model.safetensors").values()
    assert sum(weight.numel() for weight in weights) == report["cut"]["parameters"]["after"]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert report["scores"].keys() == {"model", "cut", "onnx"}
    assert report["scores"]["onnx"] == report["scores"]["cut"]
    ds_trainer.cut(model, tmp_path / "small", spec, "--compact", "fp16", *task)
    assert is_compact(tmp_path / "small")
    assert read_object(tmp_path / "small" / "export.json")["scores"]["cut"] == report["scores"]["cut"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "nothing to do: give --shrink, --cut, --onnx, --compact, --unpack or --push_to_hub"),
        ("--shrink", "give --output_dir"),
        ("--shrink --output_dir MODEL", "stays as it is"),
        ("--shrink --output_dir FULL", "already: give another, or --overwrite"),
        ("--quantize int8 --shrink --output_dir NEW", "--quantize int8 is for an ONNX file: give --onnx"),
        ("--unpack --output_dir NEW", "no model.compact.safetensors"),
        ("--unpack --onnx", "--unpack goes with --output_dir alone"),
        ("--onnx --task_name sst2 --data_dir /nowhere", "/nowhere"),
        ("--onnx --output_dir ", "--output_dir: it is empty"),
        ("--onnx --output_dir OTHER", "already: give another, or --overwrite"),
        ("--push_to_hub a/b --output_dir NEW", "nothing to do"),
        ("--cut 0.5 --output_dir NEW", "--cut fits the model to training examples"),
        ("--cut half --output_dir NEW TASK", "give the share to keep, such as 0.5"),
        ('--cut {"kep":0.5} --output_dir NEW TASK', 'did you mean "keep"'),
        ("--cut [0.7,0.5] --output_dir NEW TASK", "a list was removed in 0.3: write a phase for each share"),
        ("--cut 0.5 --shrink --output_dir NEW TASK", "drop --shrink"),
    ],
)
def test_mistakes_of_a_command(folders, task, tmp_path, flags, message):
    """Each is one clear message before anything is loaded or written."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    places = {"MODEL": folders / "cls", "OTHER": folders / "qa", "FULL": tmp_path / "full", "NEW": tmp_path / "new"}
    words = [next((w.replace(n, str(p)) for n, p in places.items() if w.startswith(n)), w) for w in flags.split(" ")]
    words = [word for word in words if word != "TASK"] + (task if "TASK" in words else [])
    with pytest.raises(ValueError, match=re.escape(message)):
        read_export_job([str(folders / "cls"), *(words if flags else [])])
    assert names(tmp_path) == {"full"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "0"], '--lengths is "0": it must be greater than or equal to 1'),
        (["--lengths", "task"], "--lengths task: no task: give --task_name"),
        (["--threads", "1000000"], "--threads is 1000000: this process may use"),
        (["--seconds", "nan"], '--seconds is "nan": it must be'),
        (["x", "x"], ", x, x: give each of the 3 folders its own"),
        (["gone"], "the model folder gone does not exist"),
        (["--output_dir", f"{__file__}/out"], "test_export_command.py is a file"),
        (["--backends", "all"], "onnxruntime cannot be imported: pip install onnxruntime"),
    ],
)
def test_mistakes_of_a_benchmark(folders, monkeypatch, more, message):
    """Among them a package that is missing, which other backends do not need."""
    find = "ds_trainer.cli.export.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(ValueError, match=re.escape(message)):
        read_benchmark_job([str(folders / "cls"), *more])
    assert read_benchmark_job([str(folders / "cls")]).backends == ("torch",)


def test_what_only_shows_with_the_model_ends_with_2_too(model, task, tmp_path, capsys, monkeypatch):
    """A place that takes no files, another model's tokenizer, exit heads that a cut would leave behind.

    Nothing is scored before, and nothing stays behind.
    """
    monkeypatch.setattr("ds_trainer.deploy.export_folder.score_folder", None)
    tokens, other = load_tokenizer(model), Path(shutil.copytree(model, tmp_path / "other"))
    tokens.add_tokens([f"new{n}" for n in range(9)])
    tokens.save_pretrained(other)
    exits = Path(shutil.copytree(model, tmp_path / "exits"))
    (exits / "exits.json").write_text("{}")
    before, out = names(tmp_path), tmp_path / "out"
    for folder, flags, message in (
        (model, ["--shrink", "--output_dir", "/proc/new"], "cannot be"),
        (other, ["--compact", "fp16", "--output_dir", out], "do not belong together"),
        (exits, ["--cut", "0.5", "--output_dir", out, *task], "has exit heads"),
    ):
        assert exported(folder, *flags) == 2
        assert message in capsys.readouterr().err
    assert names(tmp_path) == before
