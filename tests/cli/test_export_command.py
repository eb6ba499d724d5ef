"""`launch/export.py`: what it writes, that it scores, and that bad input leaves nothing behind."""

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
from safetensors.torch import load_file, save_file
from support import exported_models
from support.exported_models import emptied, inputs
from support.squad_examples import SMALL, hard_questions, word_pieces
from support.squad_tasks import write
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, BertForQuestionAnswering

from ds_trainer import load_model
from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command, read_export_job
from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.deploy import export_folder, onnx_file
from ds_trainer.deploy.onnx_file import by_torch, outputs, session
from ds_trainer.files.writing import is_aside
from ds_trainer.models.folders import save_folder
from ds_trainer.models.model_folder import COMPACT_FILE, is_compact
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.techniques.exits.heads import new_heads, save_heads


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


def test_the_command_writes_and_scores_all_at_once(model, task, tmp_path, capsys, monkeypatch):
    """A shrunk model as ONNX in fp32 and int8, each with a score, and the report alone on standard output."""
    build = export_folder.build_task

    def talkative(*arguments: object) -> object:
        print("as DeepSpeed does while it is loaded")
        return build(*arguments)

    monkeypatch.setattr(export_folder, "build_task", talkative)
    out = tmp_path / "new" / "out"
    assert exported(model, "--shrink", "--onnx", "--quantize", "int8", "--output_dir", out, *task) == 0
    report = json.loads(capsys.readouterr().out)
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
    assert names(model) == before | {"model.onnx", "export.json", "README.md"}
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
    loaded = load_model(tmp_path / "compact").state_dict()
    assert exported(tmp_path / "compact", "--unpack", "--output_dir", tmp_path / "back") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].half().float()) for name in before)
    assert all(torch.equal(after[name], loaded[name]) for name in before)


def test_shrunk_and_compact(model, tmp_path):
    """Both at once: the compact file is of the shrunk model."""
    assert exported(model, "--shrink", "--compact", "int8", "--output_dir", tmp_path / "out") == 0
    assert is_compact(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "export.json").read_text())
    assert report["shrunk"]["weights"]["sizes"] == {"heads": [1, 0], "neurons": [32, 0]}
    assert exported(tmp_path / "out", "--unpack", "--output_dir", tmp_path / "back") == 0
    assert exported(model, "--shrink", "--output_dir", tmp_path / "cut") == 0
    cut, back = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "back"))
    assert cut.keys() == back.keys()
    for name, weight in cut.items():
        assert torch.allclose(back[name], weight, rtol=0, atol=report["compact"]["max_error"])


def test_a_shrunk_folder_is_as_precise_as_its_source(model, tmp_path):
    """Half of fp32's bytes stay half: what is cut is never larger than what it was cut from."""
    dtype = "bfloat16"
    source = Path(shutil.copytree(model, tmp_path / "source"))
    load_model(model).to(getattr(torch, dtype)).save_pretrained(source)
    assert exported(source, "--shrink", "--output_dir", tmp_path / "cut") == 0
    kinds = {str(weight.dtype) for weight in load_file(tmp_path / "cut" / "model.safetensors").values()}
    assert kinds == {f"torch.{dtype}"}
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (source, tmp_path / "cut")]
    assert sizes[1] < sizes[0]


def test_overwriting_replaces_the_model_and_nothing_else(model, tmp_path):
    """Weights and .onnx files of the model that was there go, another file stays."""
    out = Path(shutil.copytree(model, tmp_path / "out"))
    (out / "notes.txt").write_text("mine")
    (out / "model.onnx").write_bytes(b"old")
    assert exported(model, "--compact", "fp16", "--output_dir", out, "--overwrite") == 0
    assert {COMPACT_FILE, "notes.txt"} <= names(out)
    assert not {"model.safetensors", "model.onnx"} & names(out)


def test_overwriting_leaves_nothing_of_the_old_model(model, folders, tmp_path):
    """Neither its exit heads nor its tokenizer nor its code: what is loaded is the new model alone."""
    out = Path(shutil.copytree(folders / "cls", tmp_path / "out"))
    saved = SavedExits(layers=[1], pooling="first", policy=ExitPolicy(criterion="entropy", thresholds=[9.0]))
    save_heads(out, new_heads(emptied("cls"), [1], None), saved)
    for name in ("shrunk_model.py", "vocab.txt", "model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (out / name).write_text("old")
    assert exported(model, "--compact", "fp16", "--output_dir", out, "--overwrite") == 0
    assert names(out) == {*names(model) - {"model.safetensors"}, COMPACT_FILE, "export.json", "README.md"}
    assert not hasattr(load_model(out)(**inputs(2, 8)), "exit_layers")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_between_two_models_waits(model, tmp_path, monkeypatch, number, code):
    """The old one is gone then: the new one is put in place whole before the process ends as asked."""
    out = Path(shutil.copytree(model, tmp_path / "out"))
    replace, moved = Path.replace, []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it

    def signalled(path: Path, target: Path) -> Path:
        if target.parent == out:
            moved.append(target.name)
            signal.raise_signal(number)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", signalled)
    command = [model, "--compact", "fp16", "--output_dir", out, "--overwrite"]
    try:
        if number == signal.SIGINT:
            assert exported(*command) == code
        else:
            with pytest.raises(SystemExit, match=str(code)):
                exported(*command)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(moved) > 3
    assert names(out) == {*names(model) - {"model.safetensors"}, COMPACT_FILE, "export.json", "README.md"}
    assert names(tmp_path) >= {"out"}
    assert not [name for name in names(tmp_path) if is_aside(Path(name))]
    assert load_model(out)(**inputs(2, 8)).logits.shape == (2, 3)


def test_a_full_disk_is_one_line(model, tmp_path, monkeypatch, capsys):
    """Of safetensors, too, whose error is its own; nothing stays behind."""

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("ds_trainer.models.compact.save_file", full)
    assert exported(model, "--compact", "fp16", "--output_dir", tmp_path / "out") == 1
    assert re.fullmatch("error: .*No space left on device.*\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert not [name for name in names(tmp_path) if is_aside(Path(name))]


def test_the_weights_come_last(model, folders, tmp_path, monkeypatch):
    """An end half-way leaves a folder without weights, never one with those of another model."""
    out = Path(shutil.copytree(folders / "qa", tmp_path / "out"))
    move = Path.replace

    def stop_at_weights(path: Path, target: Path) -> Path:
        if path.suffix == ".safetensors" and "made" in path.parts:
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(Path, "replace", stop_at_weights)
    assert exported(model, "--shrink", "--output_dir", out, "--overwrite") == 130
    assert json.loads((out / "config.json").read_text())["shrunk"] == {"heads": [1, 0], "neurons": [32, 0]}
    assert not list(out.glob("*.safetensors"))


def test_a_signal_leaves_nothing(model, tmp_path, monkeypatch):
    """SIGTERM ends the command as itself, and the model folder is as it was."""
    before, handler = names(model), signal.getsignal(signal.SIGTERM)
    seen = []

    def stopped(*_: object) -> None:
        seen.extend(names(model) - before)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(export_folder, "_written", stopped)
    with pytest.raises(SystemExit) as caught:
        exported(model, "--onnx")
    assert caught.value.code == 128 + signal.SIGTERM
    assert len(seen) == 1
    assert names(model) == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_place_that_takes_no_files(model, monkeypatch, capsys):
    """As in /proc: one line, whoever asks."""
    assert exported(model, "--shrink", "--output_dir", "/proc/new") == 2
    assert "cannot be" in capsys.readouterr().err


def test_a_stale_int8_file_goes(model):
    """It is of the .onnx file before; it is asked for as that is."""
    (model / "model.int8.onnx").write_bytes(b"old")
    assert exported(model, "--onnx") == 2
    assert exported(model, "--onnx", "--overwrite") == 0
    assert "model.onnx" in names(model)
    assert "model.int8.onnx" not in names(model)


def test_a_report_is_not_lost(model, tmp_path, capsys):
    """That of the folder stays in that of its .onnx files; a file of another kind is not replaced unasked."""
    assert exported(model, "--shrink", "--output_dir", tmp_path / "out") == 0
    first = json.loads((tmp_path / "out" / "export.json").read_text())
    for more in ([], ["--overwrite"]):
        assert exported(tmp_path / "out", "--onnx", *more) == 0
        report = json.loads((tmp_path / "out" / "export.json").read_text())
        assert (report["folder"], report["earlier"]) == (str(tmp_path / "out"), first)
    (model / "export.json").write_text('{"mine": 1}')
    capsys.readouterr()
    assert exported(model, "--onnx") == 2
    assert "no report of an export" in capsys.readouterr().err
    assert exported(model, "--onnx", "--overwrite") == 0


def test_a_tokenizer_of_another_model_is_told(model, tmp_path, capsys):
    """Its tokens have no embeddings."""
    tokens = load_tokenizer(model)
    tokens.add_tokens([f"new{n}" for n in range(9)])
    tokens.save_pretrained(model)
    for flags in (["--shrink"], ["--compact", "fp16"]):
        assert exported(model, *flags, "--output_dir", tmp_path / "out") == 2
        assert "do not belong together" in capsys.readouterr().err
    assert names(tmp_path) == {"model"}


def test_a_decoder_without_a_padding_token(tmp_path):
    """It is compared on batches, and its own config and tokenizer stay without."""
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
        before, after = (json.loads((tmp_path / folder / name).read_text()) for folder in ("model", "out"))
        for field in ("pad_token_id", "pad_token"):
            assert before.get(field) is after.get(field) is None


def test_squad_is_scored_by_the_files(tmp_path, capsys):
    """Answers of the .onnx files, in fp32 the model's own."""
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


def test_exit_heads(model, tmp_path, caplog):
    """They go with a shrunk model; the .onnx file is of the plain one, which is told."""
    saved = SavedExits(layers=[1], pooling="first", policy=ExitPolicy(criterion="entropy", thresholds=[0.5]))
    torch.manual_seed(0)
    save_heads(model, new_heads(emptied("cls"), [1], None), saved)
    assert exported(model, "--shrink", "--onnx", "--output_dir", tmp_path / "out") == 0
    assert "never exits early" in caplog.text
    asked = inputs(4, 8)
    before, after = (load_model(folder)(**asked) for folder in (model, tmp_path / "out"))
    assert torch.equal(before.exit_layers, after.exit_layers)
    assert torch.allclose(before.logits, after.logits, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["nothing to do", "--shrink, --cut, --onnx, --compact, --unpack, --import_from or --push_to_hub"]),
        (["--shrink"], ["give --output_dir"]),
        (["--shrink", "--output_dir", "MODEL"], ["stays as it is"]),
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
        (["--onnx", "--batch_size", "0"], ["--batch_size is 0"]),
        (["--onnx", "--output_dir", ""], ["--output_dir", "it is empty"]),
        (["--onnx", "--output_dir", "OTHER"], ["another model", "config.json"]),
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


@pytest.mark.parametrize(
    ("method", "threshold", "message"),
    [
        ("sigmoied_threshold", 0, None),
        ("sigmoied_threshold", 1, "sigmoied_threshold compares it with probabilities, from 0 to below 1"),
        ("topK", 1, None),
        ("topK", 0, "topK takes the share to keep, above 0 and up to 1"),
        ("threshold", -3, None),
        ("l0", None, None),
        ("l0", 0.5, "--threshold does not go with pruning_method l0"),
    ],
)
def test_a_threshold_of_another_program_fits_its_method(tmp_path, method, threshold, message):
    """A share, a probability, any score, or none at all: the others would fold another mask than the run's."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "masked_bert", "pruning_method": method}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    words = [str(tmp_path), "--import_from", "masked_bert", "--output_dir", str(tmp_path / "new")]
    words += [] if threshold is None else ["--threshold", str(threshold)]
    if message is None:
        assert read_export_job(words).threshold == threshold
        return
    with pytest.raises(ValueError, match=message):
        read_export_job(words)


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
    monkeypatch.setattr(onnx_file, "TOLERANCE", -1.0)
    assert exported(model, "--onnx") == 2
    assert "differ from the model's" in capsys.readouterr().err
    assert names(model) == before
    assert names(tmp_path) == {"model"}


def test_a_hostile_compact_folder_is_one_line(model, tmp_path, capsys):
    """A broken file is exit code 2, one message, nothing written."""
    assert exported(model, "--compact", "fp16", "--output_dir", tmp_path / "compact") == 0
    save_file({f"x{n}": torch.zeros(1) for n in range(9)}, tmp_path / "compact" / COMPACT_FILE)
    assert exported(tmp_path / "compact", "--unpack", "--output_dir", tmp_path / "back") == 2
    assert "no sound compact file" in capsys.readouterr().err
    assert names(tmp_path) == {"model", "compact"}
