"""Model folders from anywhere: one message and exit code 2; no traceback, no hang, no code run, no memory taken."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.evil import Evil
from support.launching import ROOT
from support.peak_memory import takes_less_than
from support.spoiling import (
    INDEX,
    WEIGHTS,
    Spoil,
    cut,
    drop,
    edit,
    entry,
    header,
    index_of,
    link,
    pipe,
    put,
    reshaped,
    sparse,
    table,
)
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import ds_trainer
from ds_trainer.cli.train import run_command
from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.deploy.serving import Classifier
from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.models.pretrained import CLASSIFIER, load_tokenizer, load_with_head
from ds_trainer.techniques.exits.heads import new_heads, save_heads

SECONDS = 60
MEBIBYTES = 700
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A small classifier with exit heads, and beside it a GPT-2."""
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["it rains", "it is wet", "no"] * 5, 60, True)
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = BertForSequenceClassification(BertConfig(**size, **SIZES))
    save_folder(model, tokenizer, folder / "bert")
    layers = [1, 2]
    saved = SavedExits(layers=layers, pooling="first", policy=ExitPolicy(criterion="entropy", thresholds=[0.5, 0.5]))
    save_heads(folder / "bert", new_heads(model, layers, None), saved)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=len(tokenizer), n_positions=32))
    save_folder(gpt2, tokenizer, folder / "gpt2")
    return folder


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    """No test here may hang or take much memory."""
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no answer in {SECONDS} s"))
    signal.alarm(SECONDS)
    with takes_less_than(MEBIBYTES):
        yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def copied(good: Path, target: Path, kind: str = "bert") -> Path:
    return Path(shutil.copytree(good / kind, target / kind))


def refusal(folder: Path, capfd, **permitted: bool) -> str:
    """The message of a command that loads the folder; it must be one of ours, and short."""

    def load(words: Any) -> None:
        load_tokenizer(words[0])
        ds_trainer.load_model(words[0], **permitted)

    capfd.readouterr()
    assert run_command(load, [str(folder)]) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    message = error[error.index("error: ") :]
    assert len(message) < 1500
    return message


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "index out of the folder": (index_of("../../x.safetensors"), "'../../x.safetensors': allowed are"),
    "index absolute": (index_of("/etc/passwd.safetensors"), "'/etc/passwd.safetensors': allowed are"),
    "index of a pickle": (index_of("evil.bin"), "'evil.bin': allowed are"),
    "index of missing shards": (index_of("a.safetensors", "b.safetensors"), "2 files, and 2 are missing"),
    "index of numbers": (index_of(5), "has no weight_map"),
    "index deep": (lambda f: (drop(WEIGHTS)(f), put(INDEX, DEEP)(f)), "nested too deeply"),
    "no weights": (drop("*.safetensors"), "no .safetensors weights of a known name"),
    "other weights named": (edit("config.json", transformers_weights="../x.safetensors"), "names other weights"),
    "a distributed checkpoint": (put("shard-00001-model-00001-of-00001.safetensors", ""), "distributed checkpoint"),
    "weights cut in the middle": (cut(WEIGHTS, 0.5), "cut short"),
    "weights cut by a byte": (lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 1), "cut short"),
    "weights empty": (put(WEIGHTS, ""), "no safetensors file, or cut short"),
    "header of 2**60 bytes": (put(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), "header does not fit"),
    "header beyond its limit": (
        lambda f: (put(WEIGHTS, struct.pack("<Q", 2**30))(f), sparse(WEIGHTS, 2**31)(f)),
        "header does not fit",
    ),
    "header no JSON": (header(lambda _: b"\xff{"), "header is not JSON"),
    "header deep": (header(lambda _: DEEP.encode()), "header is not JSON"),
    "header a list": (header(lambda _: []), "header is no object"),
    "header of another dtype": (header(entry(dtype="X9")), "of another form"),
    "header of a negative shape": (header(entry(shape=[-2])), "of another form"),
    "header of a long shape": (header(entry(shape=[2**62] * 10_000)), "of another form"),
    "header of a huge shape": (header(entry(shape=[2**62, 2**62])), "does not hold what its header says"),
    "header with one place for all": (
        header(lambda h: h | {str(n): h["bert.pooler.dense.weight"] for n in range(2000)}),
        "same bytes for several",
    ),
    "weights of other shapes": (reshaped, "of another shape"),
    "weights of another model": (
        lambda f: save_file({"x.y": torch.zeros(9)}, f / WEIGHTS, metadata={"format": "pt"}),
        "are missing or of another shape",
    ),
    "config missing": (drop("config.json"), "has no config.json"),
    "config empty": (put("config.json", ""), "is not JSON"),
    "config cut": (cut("config.json", 0.5), "is not JSON"),
    "config deep": (put("config.json", DEEP), "nested too deeply"),
    "config of two GiB": (sparse("config.json", 2**31), "more than 16,777,216"),
    "config of binary": (put("config.json", bytes(range(256))), "is not JSON"),
    "config of a long number": (put("config.json", '{"model_type": "bert", "x": ' + "9" * 9999 + "}"), "is not JSON"),
    "config of an unknown model": (edit("config.json", model_type="evil"), "cannot be read"),
    "config of another family": (edit("config.json", model_type="distilbert"), "holds no trained"),
    "config of another architecture": (
        edit("config.json", model_type="distilbert", architectures=["DistilBertForSequenceClassification"]),
        "do not fit its config.json",
    ),
    "config of a class of no model": (edit("config.json", architectures=["Trainer"]), "holds no trained"),
    "config of odd architectures": (edit("config.json", architectures=[["x"]]), "architectures is no list of names"),
    "config with no heads": (edit("config.json", num_attention_heads=0), "ZeroDivisionError"),
    "config with heads that do not divide": (edit("config.json", num_attention_heads=3), "not a multiple"),
    "config with a negative size": (edit("config.json", hidden_size=-16), "negative dimension"),
    "config with another activation": (edit("config.json", hidden_act="os.system"), "KeyError"),
    "config with a kernel": (edit("config.json", attn_implementation="evil/kernel"), "code of its own"),
    "config with a hidden kernel": (edit("config.json", _attn_implementation={"": "evil/kernel"}), "code of its own"),
    "config with an odd dtype": (edit("config.json", dtype="system"), "has no attribute 'system'"),
    "config of 10**7 by 10**6": (
        edit("config.json", hidden_size=10**7, num_hidden_layers=10**6, intermediate_size=10**7),
        "they do not belong together",
    ),
    "config of 10**6 layers": (edit("config.json", num_hidden_layers=10**6), "tensors, and its weights are 57"),
    "config of 10**12 layers": (edit("config.json", num_hidden_layers=10**12), "is that of no model"),
    "config of 10**9 labels": (edit("config.json", num_labels=10**9, id2label=None), "is that of no model"),
    "config of 10**9 words": (edit("config.json", vocab_size=10**9), "they do not belong together"),
    "config of 10**30 words": (edit("config.json", vocab_size=10**30), "cannot be loaded"),
    "config of 10**12 positions": (edit("config.json", max_position_embeddings=10**12), "do not belong together"),
    "pipe as config": (pipe("config.json"), "config.json is neither a file nor a folder"),
    "pipe as tokenizer": (pipe("tokenizer.json"), "tokenizer.json is neither a file nor a folder"),
    "pipe as generation config": (pipe("generation_config.json"), "neither a file nor a folder"),
    "pipe as exits": (pipe("exits.json"), "neither a file nor a folder"),
    "endless config": (link("config.json", "/dev/zero"), "neither a file nor a folder"),
    "config linked to nowhere": (link("config.json", "/nowhere/x"), "link to nowhere"),
    "config linked to itself": (link("config.json", "config.json"), "link to nowhere"),
    "config a folder": (lambda f: (drop("config.json")(f), (f / "config.json").mkdir()), "config.json is a folder"),
    "no tokenizer": (drop("tokenizer*"), "no tokenizer that transformers can load"),
    "tokenizer cut": (cut("tokenizer.json", 0.7), "no tokenizer that transformers can load"),
    "tokenizer deep": (put("tokenizer.json", DEEP), "no tokenizer that transformers can load"),
    "tokenizer config deep": (put("tokenizer_config.json", DEEP), "no tokenizer that transformers can load"),
    "tokenizer of two GiB": (sparse("tokenizer.json", 2**31), "tokenizer.json has 2,147,483,648 bytes"),
    "tokenizer with code": (
        lambda f: (
            drop("tokenizer.json")(f),
            edit("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["code.Evil", None]})(f),
            put("code.py", "raise SystemExit('it ran')")(f),
        ),
        "no tokenizer that transformers can load",
    ),
    "a model without token types": (table("token_type_embeddings", "type_vocab_size", 0), "cannot be run"),
    "a model without positions": (table("position_embeddings", "max_position_embeddings", 0), "cannot be run"),
    "a model of two positions": (table("position_embeddings", "max_position_embeddings", 2), "cannot be run"),
    "weights of another name": (
        lambda f: (f / WEIGHTS).rename(f / "model.fp16.safetensors"),
        "found: model.fp16.safetensors, which transformers does not look for",
    ),
    "an adapter": (put("adapter_config.json", "{}"), "merge the adapter"),
    "exits broken": (put("exits.json", "{"), "is not JSON"),
    "exits of another form": (put("exits.json", '{"layers": 5}'), "layers"),
    "exits beyond the model": (edit("exits.json", layers=[1, 9]), "and the model has 3"),
    "exits of many layers": (edit("exits.json", layers=list(range(1, 10**5))), "for 99999 heads"),
    "exits of two GiB": (sparse("exits.json", 2**31), "exits.json has 2,147,483,648 bytes"),
    "heads missing": (drop("exit_heads.safetensors"), "the heads of this model: it does not exist"),
    "heads cut": (cut("exit_heads.safetensors", 0.9), "cut short"),
    "heads of another model": (
        lambda f: save_file({"1.steps.0.weight": torch.zeros(3, 3)}, f / "exit_heads.safetensors"),
        "does not hold the heads of this model",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_in_words(case, good, tmp_path, capfd):
    """Whatever it is: exit code 2 and one message that names what is wrong."""
    spoil, words = HOSTILE[case]
    folder = copied(good, tmp_path)
    spoil(folder)
    assert words in refusal(folder, capfd)


def test_a_tokens_id_beyond_the_embeddings_is_refused(good, tmp_path):
    """Of a tokenizer with as many tokens as the model embeds, one of them with a huge id."""
    folder = copied(good, tmp_path)
    value = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 10**6
    (folder / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="the tokenizer's largest token id is 1000000 and the model embeds"):
        Classifier(str(folder), 4, 16)


def test_that_a_model_runs_is_seen_without_a_trace(good):
    """Neither a random number is drawn, nor the model's mode changed."""
    before = torch.get_rng_state()
    load_with_head(good / "bert", CLASSIFIER)
    torch.rand(1)
    drawn = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(1)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", DEEP, '{"max_length": "x"}', '{"temperature": {}}', '{"transformers_version": 5}']
)
def test_a_generation_config_of_junk_is_told_or_not_needed(content, good, tmp_path, capfd):
    """Nothing here generates: it is passed over, or told as a part of the folder."""
    folder = copied(good, tmp_path, "gpt2")
    (folder / "generation_config.json").write_text(content)
    try:
        assert ds_trainer.load_model(folder)
    except ValueError:
        assert "cannot be loaded" in refusal(folder, capfd)


def test_the_hub_caches_links_are_followed(good, tmp_path):
    """A snapshot is a folder of links into another one: it is a good folder, as is one whose shards are links."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in (good / "bert").iterdir():
        (folder / path.name).symlink_to(path)
    assert type(ds_trainer.load_model(folder)).__name__ == "EarlyExitModel"
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    names = dict.fromkeys(load_file(good / "bert" / WEIGHTS), "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert type(ds_trainer.load_model(folder)).__name__ == "EarlyExitModel"


def as_pickle(folder: Path, value: Any = None) -> Path:
    """The folder with its weights in pytorch_model.bin alone."""
    value = load_file(folder / WEIGHTS) if value is None else value
    drop("model.safetensors")(folder)
    torch.save(value, folder / "pytorch_model.bin")
    return folder


def test_pickles_are_read_where_permitted_and_give_the_same_model(good, tmp_path, capfd):
    """Refused by default, the permission named; with it, the weights are those of the safetensors."""
    folder = as_pickle(copied(good, tmp_path))
    assert "pytorch_model.bin, which are pickles: convert them, or give --allow_pickle" in refusal(folder, capfd)
    wanted = ds_trainer.load_model(good / "bert").state_dict()
    found = ds_trainer.load_model(folder, allow_pickle=True).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("form", ["torch", "plain"])
def test_a_pickle_runs_no_code_even_where_permitted(form, good, tmp_path, capfd):
    """It is read as weights only, in torch's archive and as a bare pickle, which would run code when loaded as such."""
    marker = tmp_path / "it_ran"
    folder = as_pickle(copied(good, tmp_path), {"classifier.bias": Evil(marker)})
    if form == "plain":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"classifier.bias": Evil(marker)}))
    assert "the weights of" in refusal(folder, capfd, allow_pickle=True)
    assert not marker.exists()
    with open(folder / "pytorch_model.bin", "rb") as file:  # the test can fail: loaded otherwise, it does run
        pickle.load(file) if form == "plain" else torch.load(file, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize(
    "spoil", [cut("pytorch_model.bin", 0.5), put("pytorch_model.bin", ""), put("pytorch_model.bin", "junk" * 99)]
)
def test_a_broken_pickle_is_told(spoil, good, tmp_path, capfd):
    """Cut, empty or something else."""
    folder = as_pickle(copied(good, tmp_path))
    spoil(folder)
    assert "the weights of" in refusal(folder, capfd, allow_pickle=True)


CODE = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification
Path({marker!r}).touch()
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(good, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A folder whose config names code of its own, and the file that this code writes."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = copied(good, tmp_path), tmp_path / "it_ran"
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "code.OwnConfig", "AutoModelForSequenceClassification": "code.OwnModel"}
    edit("config.json", auto_map=classes, model_type="own", architectures=["OwnModel"])(folder)
    return folder, marker


def test_the_code_of_a_folder_is_run_only_where_trusted(with_code, capfd):
    """By default it is refused, the permission named; with it the model is of the folder's own class, exits and all."""
    folder, marker = with_code
    assert "--trust_remote_code" in refusal(folder, capfd)
    assert not marker.exists()
    model = ds_trainer.load_model(folder, trust_remote_code=True)
    assert marker.exists()
    assert type(model.model).__name__ == "OwnModel"
    assert "--trust_remote_code" in refusal(folder, capfd), "the permission ends with its call"


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"auto_map": odd}
            for odd in (5, [], {"AutoConfig": 5}, {"AutoConfig": "../../x.Y"}, {"AutoModel": "code.X"})
        ),
        *({"quantization_config": odd} for odd in (5, [], {"quant_method": 5}, {"quant_method": "gptq"})),
        *({"per_layer_config": odd} for odd in (5, {"0": {"hidden_size": 10**9}})),
        {"id2label": {"x": 5}},
        {"id2label": {str(n): "" for n in range(10**5)}},
        {"_name_or_path": "../../x", "_commit_hash": 5},
        {"fusion_config": {"x": "y"}},
        {"pruned_heads": {"0": [99]}},
        {"torch_dtype": "float4"},
        {"problem_type": 5},
        {"pad_token_id": 10**9},
        {"is_decoder": True, "add_cross_attention": True},
        {"tie_word_embeddings": "x"},
        {"layer_norm_eps": "x"},
        {"hidden_dropout_prob": -5},
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_an_odd_field_is_told_or_passed_over(fields, good, tmp_path, capfd):
    """Whichever it is, in the way of a refusal or with a model of the weights."""
    folder = copied(good, tmp_path)
    edit("config.json", **fields)(folder)
    try:
        assert ds_trainer.load_model(folder)
    except ValueError:
        refusal(folder, capfd)


@pytest.mark.parametrize("entry_point", ["evaluate", "calibrate", "serve", "train"])
def test_no_entry_point_runs_or_asks_to_run_code(entry_point, with_code, tiny_recipe, write_json, csv_folder):
    """The real processes, with a "y" on their input: exit code 2, one error, and the code was not run."""
    import subprocess
    import sys

    folder, marker = with_code
    task = write_json("task.json", tiny_recipe | {"task": tiny_recipe["task"] | {"held_out": 0.2}})
    words = {
        "evaluate": [str(folder), "--recipe", task],
        "calibrate": [str(folder), "--recipe", task, "--max_drop", "1"],
        "serve": [str(folder), "--port", "0"],
        "train": ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", task, "--model_name_or_path", str(folder)],
    }[entry_point]
    words += ["--output_dir", str(folder.parent / "out")] if entry_point == "train" else []
    if entry_point == "calibrate":
        edit("exits.json", held_out=0.2)(folder)
    command = [sys.executable, f"launch/{entry_point}.py", *words]
    done = subprocess.run(command, cwd=ROOT, input="y\n" * 9, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "--trust_remote_code" in done.stderr
    assert not marker.exists()


def test_a_recipes_config_of_any_size_is_refused_before_it_is_built(good, tmp_path):
    """Without weights to compare with, by what the host can hold and by the time that building takes."""
    tokenizer = load_tokenizer(good / "bert")
    for sizes, words in (
        ({"hidden_size": 10**7, "num_attention_heads": 1}, "GiB in fp32, and this host"),
        ({"num_hidden_layers": 10**6}, "more than 20,000 tensors"),
        ({"num_hidden_layers": 10**12}, "is that of no model"),
        ({"num_attention_heads": 0}, "transformers makes no bert model of it"),
        ({"hidden_size": "x"}, "transformers makes no bert model of it"),
    ):
        with pytest.raises(ValueError, match=words):
            create_folder({"model_type": "bert", **SIZES, **sizes}, tokenizer, tmp_path / "new", 0)
    assert not (tmp_path / "new").exists()
