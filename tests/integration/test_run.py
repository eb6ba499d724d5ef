"""The main job end to end, by the command a user types: two ranks, two phases, everything it leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from support.launching import becomes_model, log_of, read, train

from ds_trainer.cli.command import run_command
from ds_trainer.cli.evaluate import evaluate_command, read_evaluate_job
from ds_trainer.cli.export import export_command, read_export_job
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.models.folders import COMPACT_FILE
from ds_trainer.ranks import machine
from ds_trainer.recipe.saved_checkpoint import is_checkpoint


@pytest.fixture(scope="module")
def recipe_file(tiny_recipe, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.json"
    finetune, prune = tiny_recipe["phases"]
    phases = [finetune | {"max_steps": 20, "eval_steps": 10}, prune]
    path.write_text("// a comment\n" + json.dumps(tiny_recipe | {"phases": phases}))
    return path


@pytest.fixture(scope="module")
def output(recipe_file, tmp_path_factory) -> Path:
    """The run of two ranks under ZeRO 3."""
    folder = tmp_path_factory.mktemp("run") / "out"
    train(2, recipe_file, folder, engine="ds_configs/zero3.json")
    return folder


@pytest.fixture(scope="module")
def alone(recipe_file, tmp_path_factory) -> Path:
    """The same recipe in one process under ZeRO 0, with accumulation, without a launcher."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    more = ("--set", "phases.*.gradient_accumulation_steps=2", "--set", "phases.finetune.save_steps=10")
    train(0, recipe_file, folder, *more, engine="ds_configs/zero0.json")
    return folder


def test_the_run_folder_is_complete(output):
    """Resolved files, log, events, results, checkpoints and models are all where docs/runs.md says."""
    names = ["recipe.json", "deepspeed_config.json", "log.jsonl", "tensorboard", "model/model.safetensors"]
    names += ["train_results.json", "eval_results.json", "all_results.json", "checkpoint-4", "checkpoint-12"]
    names += ["finetune/model/model.safetensors", "finetune/deepspeed_config.json", "model/tokenizer.json"]
    assert [name for name in names if not (output / name).exists()] == []
    assert "auto" not in (output / "deepspeed_config.json").read_text()
    assert read(output / "deepspeed_config.json")["gradient_clipping"] == 1.0
    recipe = read(output / "recipe.json")
    assert recipe["phases"][1]["techniques"]["prune"]["schedule"] == "cubic"
    assert "cache_dir" not in recipe, "recipes are passed on, and where data is cached is the choice of a user"


def test_the_log_has_every_reading(output):
    """Rates of every group, gradient norm, loss scale, skipped steps, throughput, threshold and densities."""
    records = log_of(output, "prune")
    assert len(records) == 6
    wanted = {f"train/{name}" for name in ("grad_norm", "loss_scale", "skipped_steps", "examples_per_s")}
    wanted |= {f"train/{name}" for name in ("tokens_per_s", "lr/*.mask_scores", "lr/weights", "lr/vectors")}
    assert wanted | {"prune/threshold", "prune/density"} <= records[-1].keys()
    assert len([name for name in records[-1] if name.startswith("prune/density/")]) == 12


def test_every_record_has_its_epoch_and_the_peak_memory_of_every_rank(output):
    """Epochs are the examples seen over the 240 of training, in records of training and of evaluation alike. Memory is
    that of both processes, more than the libraries take."""
    peaks = {name: [] for name in ("memory/resident/rank0", "memory/resident/rank1")}
    for phase in ("finetune", "prune"):
        records = log_of(output, phase, "step")
        assert [r["epoch"] for r in records] == [pytest.approx(16 * r["step"] / 240) for r in records]
        assert any("eval/accuracy" in record for record in records)
        assert read(output / "all_results.json")[phase]["train"]["epochs"] == pytest.approx(records[-1]["epoch"])
    for record in records:
        prefix = "" if "train/loss" in record else "eval/"
        assert {f"{prefix}{name}" for name in peaks} == {name for name in record if "memory/" in name}
        for name, values in peaks.items():
            values.append(record[f"{prefix}{name}"])
    assert all(200 << 20 < value < 8 << 30 for values in peaks.values() for value in values)
    assert peaks["memory/resident/rank0"] != peaks["memory/resident/rank1"]


def test_the_results_say_what_every_phase_was_trained_on(output):
    """Library versions, hosts and devices, once; beside the phase's own results, so that all keys are phases."""
    results = read(output / "all_results.json")
    assert list(results) == ["finetune", "prune"]
    for found in results.values():
        (session,) = found["trained_on"]
        assert session["versions"] == machine.versions()
        assert session["versions"].keys() == {"ds_trainer", "python", "torch", "transformers", "deepspeed", "numpy"}
        assert session["hosts"] == {socket.gethostname(): {machine.device_name(): 2}}


def test_tensorboard_has_what_the_log_has(output):
    """Every scalar of the log's last training record is in the event file, at its step, with its value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard" / "prune"))
    events.Reload()
    record = log_of(output, "prune")[-1]
    for name in record.keys() - {"phase", "step"}:
        last = events.Scalars(name)[-1]
        assert (last.step, last.value) == (record["step"], pytest.approx(record[name], rel=1e-6))


def test_plain_transformers_loads_the_pruned_model(output):
    """AutoModel loads the folder; its encoder has exactly the asked zeros, as all_results.json counts them."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert model(**tokenizer("some apple", return_tensors="pt")).logits.shape == (1, 3)
    assert sorted(model.config.id2label.values()) == ["bird", "fruit", "tool"]
    weights = read(output / "all_results.json")["prune"]["weights"]
    assert len(weights["layers"]) == 12
    for name, counts in weights["layers"].items():
        matrix = model.get_submodule(name).weight
        assert counts == {"kept": int(matrix.count_nonzero()), "total": matrix.numel()}
        assert counts["kept"] == round(0.25 * matrix.numel())
    assert weights["encoder"]["kept"] == sum(counts["kept"] for counts in weights["layers"].values())
    assert weights["model"]["total"] == sum(p.numel() for p in model.parameters())


def test_the_last_checkpoint_is_the_exported_model(output, alone, tmp_path):
    """Of 2 ranks under ZeRO 3, and of one without ZeRO; of the last phase and of an earlier one.

    A checkpoint is of the phase that wrote it, whatever a later --resume wrote into the recipe.
    """
    assert becomes_model(output / "checkpoint-12", output / "model", tmp_path / "of two")
    assert becomes_model(alone / "finetune" / "checkpoint-20", alone / "finetune" / "model", tmp_path / "earlier")
    assert not becomes_model(alone / "checkpoint-4", alone / "model", tmp_path / "of another step")
    run = Path(shutil.copytree(alone, tmp_path / "out"))
    edit_recipe(run, lambda recipe: recipe["phases"][1].update(max_steps=99, learning_rate=1.0))
    edit_recipe(run, lambda recipe: recipe["phases"][1]["techniques"]["prune"].update(final_threshold=0.9))
    edit_recipe(run, lambda recipe: recipe.update(seed=7))
    assert becomes_model(run / "checkpoint-12", run / "model", tmp_path / "target")


def test_a_checkpoint_is_exported_as_a_model_folder_is(alone, tmp_path, capsys):
    """With any other flags at once: compact, as ONNX and with scores, of which the checkpoint's is the run's own."""
    flags = ["--compact", "fp16", "--onnx", "--output_dir", str(tmp_path / "target"), "--recipe"]
    export_command([str(alone / "checkpoint-12"), *flags, str(alone / "recipe.json")])
    report = read(tmp_path / "target" / "export.json")
    assert json.loads(capsys.readouterr().out) == report
    assert {"checkpoint", "compact", "onnx", "scores"} <= report.keys()
    assert report["scores"]["model"]["accuracy"] == read(alone / "eval_results.json")["prune"]["accuracy"]
    assert {"model.onnx", COMPACT_FILE} <= {path.name for path in (tmp_path / "target").iterdir()}
    export_command([str(alone / "checkpoint-12"), "--onnx", "--output_dir", str(tmp_path / "onnx")])
    written = {path.name for path in (tmp_path / "onnx").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert written == {"model.onnx", "export.json", "README.md", "config.json", *tokenizer}


def test_checkpoints_are_scored_by_what_their_run_says(alone, tmp_path, capfd):
    """One of each phase, without any flag, scores what its phase did; all of a phase go to a table, a file, a figure.

    Of these, a checkpoint that has changed on the disk is told and left out. Nothing else in the run is touched.
    """
    run = Path(shutil.copytree(alone, tmp_path / "out"))
    spoil(run / "checkpoint-8")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    one, other, aside = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "aside"
    commands = [
        f"{run}/checkpoint-12 --output_file {one}",
        f"{run}/finetune/checkpoint-20 --set max_eval_samples=null --output_file {other}",
        f"{run} --all_checkpoints",
        f"{run}/finetune --all_checkpoints --predictions_dir {aside}",
    ]
    assert [run_command(evaluate_command, command.split()) for command in commands] == [0] * 4
    printed = capfd.readouterr()
    expected = read(run / "eval_results.json")
    for name, file in (("prune", one), ("finetune", other)):
        assert read(file) == {key: value for key, value in expected[name].items() if key in read(file)}
        assert {key for key in read(file) if not key.startswith("f1/")} == {"accuracy", "macro_f1"}
    found = read(run / "checkpoints.json")
    assert (found["phase"], [row["step"] for row in found["checkpoints"]]) == ("prune", [4, 12])
    assert found["checkpoints"][-1]["scores"] == read(one)
    assert found["checkpoints"][-1]["density"] == pytest.approx(0.25)
    assert found["checkpoints"][0]["density"] > 0.3
    assert "checkpoint-8 is damaged (mp_rank_00_model_states.pt is not what was written: its checksum" in printed.err
    rows = [line.split() for line in printed.out.splitlines() if line.split()[:1] in (["4"], ["12"], ["10"], ["20"])]
    at_4 = f"{100 * found['checkpoints'][0]['density']:.1f}%"
    assert [(row[0], row[-1]) for row in rows] == [("4", at_4), ("12", "25.0%"), ("10", "100.0%"), ("20", "100.0%")]
    assert read(aside / "checkpoints.json")["phase"] == "finetune"
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed == {"checkpoints.json", ".ds_trainer.json"}


def spoil(checkpoint: Path) -> None:
    """Change one byte in the midst of the weights."""
    file = checkpoint / "mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit_recipe(run: Path, change) -> None:
    recipe = read(run / "recipe.json")
    change(recipe)
    (run / "recipe.json").write_text(json.dumps(recipe))


def change_start(run: Path) -> None:
    config = run / "finetune/model/config.json"
    config.write_text(json.dumps(read(config) | {"num_hidden_layers": 1}))


HOSTILE = [
    (lambda run: spoil(run / "checkpoint-4"), "checkpoint-4 is damaged (mp_rank_00_model_states.pt is not"),
    (lambda run: (run / "recipe.json").unlink(), "does not lie in the folder of a run: neither "),
    (
        lambda run: edit_recipe(run, lambda recipe: recipe["phases"][1].update(name="cut")),
        "was written by the phase prune",
    ),
    (lambda run: shutil.rmtree(run / "finetune"), "finetune/model does not exist"),
    (change_start, "do not fit the model that "),
]


@pytest.mark.parametrize(("change", "said"), HOSTILE)
def test_a_checkpoint_that_cannot_be_read_is_told(change, said, alone, tmp_path, capsys):
    """One error, exit code 2, and not a file more than there was."""
    run = Path(shutil.copytree(alone, tmp_path / "out"))
    change(run)
    assert refused(run / "checkpoint-4", tmp_path, capsys).count(said) == 1


def refused(checkpoint: Path, root: Path, capsys) -> str:
    before = sorted(root.rglob("*"))
    capsys.readouterr()
    assert run_command(export_command, [str(checkpoint), "--output_dir", str(root / "target")]) == 2
    assert sorted(root.rglob("*")) == before
    text = capsys.readouterr().err
    assert text.count("error: ") == 1
    return text


def test_a_checkpoint_beside_a_run_is_read(alone, tmp_path):
    """A run under way keeps other runs out of its folder, and no reader."""
    run = Path(shutil.copytree(alone, tmp_path / "out"))
    RunFolder(run).lock()
    assert run_command(export_command, [str(run / "checkpoint-4"), "--output_dir", str(tmp_path / "target")]) == 0


def test_what_a_command_asks_of_checkpoints_is_checked(alone, tmp_path, monkeypatch):
    """Where there are none, heads that a phase does not have, several ranks, an output in the checkpoint itself."""
    for read_job, words, said in (
        (read_evaluate_job, (alone / "model", "--all_checkpoints"), "holds no checkpoint-N: name the output folder"),
        (read_evaluate_job, (alone / "checkpoint-4", "--patience", "2"), "checkpoint-4 has no exits.json, so no heads"),
        (read_export_job, (alone / "checkpoint-4", "--onnx"), "is what is exported, and stays as it is: give --output"),
        (read_export_job, (alone / "checkpoint-4", "--unpack"), "--unpack goes with --output_dir alone"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_job([str(word) for word in words])
    shutil.copytree(alone / "model", tmp_path / "checkpoint-7")
    assert not is_checkpoint(str(tmp_path / "checkpoint-7")), "a model folder of another trainer has such a name, too"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="scored by one process: start it with python"):
        read_evaluate_job([str(alone / "checkpoint-4")])


def test_an_optimizer_block_gets_our_groups(recipe_file, tmp_path):
    """DeepSpeed's own AdamW, named in the engine file, trains as the one handed over, with the groups' own rates."""
    engine = tmp_path / "engine.json"
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    secret = {"comet": {"enabled": False, "api_key": "of-the-test-123"}, "log_level": "info"}
    block = {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": "auto"}
    engine.write_text(json.dumps(block | secret))
    more = ("--set", "phases.*.max_steps=4", "--set", "phases.*.lr_scheduler_type=constant")
    for name, config in (("block", str(engine)), ("none", "ds_configs/zero0.json")):
        done = train(1, recipe_file, tmp_path / name, *more, engine=config)
        assert "of-the-test-123" not in done.stdout + done.stderr
        assert ("api_key=" in done.stdout + done.stderr) == (name == "block"), "DeepSpeed prints its config"
    for one, two in zip(log_of(tmp_path / "block", "prune"), log_of(tmp_path / "none", "prune"), strict=True):
        rates = {name: value for name, value in two.items() if name.startswith("train/lr/")}
        assert one["train/loss"] == pytest.approx(two["train/loss"], rel=2e-2)  # the groups' order differs
        assert {name: one[name] for name in rates} == rates
        assert len(set(rates.values())) == 2


FEW_DOCSTRINGS = "from ds_trainer.tasks.text import docstrings; docstrings.CLASS_CAP = 100"


def test_the_embedded_default_runs(server, tmp_path):
    """The quickstart's recipe, shortened: data from docstrings, a tokenizer trained on them, all phases, one table."""
    short = {"phases.*.max_steps": 2, "task.max_train_samples": 300, "task.max_eval_samples": 50, "report": "false"}
    short |= {"phases.quarter.cut.calibration_examples": 16, "phases.quarter.cut.reconstruct": '{"steps": 1}'}
    words = [word for field, value in short.items() for word in ("--set", f"{field}={value}")]
    run = server.run(0, tmp_path / "out", "--recipe", "quickstart", *words, sabotage={0: FEW_DOCSTRINGS})
    assert run.codes() == [0], run.text[-4000:]
    table = [line.split() for line in run.text.splitlines() if line.startswith(("finetune ", "prune ", "quarter "))]
    assert [row[0] for row in table] == ["finetune", "prune", "quarter"]
    assert "(10.0%)" in table[1]
    assert len(read(tmp_path / "out" / "model" / "config.json")["id2label"]) == 5
