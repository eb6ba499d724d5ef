"""Model folders: no code is run, no pickle read, each fault is one message and code 2; and what new folders hold.

Among the faults are config, tokenizer and weights that do not say the same.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.labelled_files import write_csv
from support.launching import ROOT
from transformers import BertConfig, BertForSequenceClassification, BertModel, CTRLTokenizer

import ds_trainer
from ds_trainer.cli.command import run_command
from ds_trainer.files.reading import folder_hash
from ds_trainer.models.folders import folder_mistakes, save_folder, train_tokenizer
from ds_trainer.models.pretrained import (
    ANSWERER,
    CLASSIFIER,
    MASKED_LM,
    identity_of,
    load_config,
    load_tokenizer,
    load_with_head,
    tokenizer_state,
)
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import ExitPolicy, SavedExits
from ds_trainer.recipe.jobs import Trust
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.early_exit import new_heads, save_heads

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Spoil = Callable[[Path], Any]


def edit(name: str, **fields: Any) -> Spoil:
    """Change fields of a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))


def put(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def drop(pattern: str) -> Spoil:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def cut(name: str, share: float) -> Spoil:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def index_of(*names: str) -> Spoil:
    """Put an index in the place of the weights."""

    def spoil(folder: Path) -> None:
        keys = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        chosen = {key: names[number % len(names)] for number, key in enumerate(keys)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": chosen}))

    return spoil


def with_weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoil:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["it rains", "it is wet", "no"] * 5, 60, True)


@pytest.fixture(scope="module")
def good(tokenizer, tmp_path_factory) -> Path:
    """A small classifier with exit heads."""
    folder = tmp_path_factory.mktemp("good") / "bert"
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = BertForSequenceClassification(BertConfig(**size, **SIZES))
    save_folder(model, tokenizer, folder)
    layers = [1, 2]
    saved = SavedExits(layers=layers, pooling="first", policy=ExitPolicy(criterion="entropy", thresholds=[0.5, 0.5]))
    save_heads(folder, new_heads(model, layers, None), saved)
    return folder


@pytest.fixture
def copied(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bert"))


def refusal(folder: Path, capfd, **permitted: bool) -> str:
    """The message of a command that loads the folder; it must be one of ours, and short. Nothing is asked."""

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


BY_FILES: dict[str, tuple[Spoil, str]] = {
    "no folder": (shutil.rmtree, "bert does not exist"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.touch()), "bert is a file"),
    "no config": (drop("config.json"), "has no config.json"),
    "a config cut short": (cut("config.json", 0.5), "it is not JSON"),
    "a config of another kind": (put("config.json", "[]"), "holds []: it must be an object"),
    "a kernel of the hub": (edit("config.json", text_config={"_attn_implementation": {"": "a/b"}}), "which is code"),
    "no weights": (drop(WEIGHTS), "has no weights: it has no model.safetensors"),
    "weights cut short": (cut(WEIGHTS, 0.5), "model.safetensors is no safetensors file, or it was cut short"),
    "an index that leads out": (index_of("../../x.safetensors"), "no .safetensors files here: '../../x.safetensors'"),
    "an adapter": (put("adapter_config.json", "{}"), "merge the adapter"),
}


@pytest.mark.parametrize("case", BY_FILES)
def test_a_fault_that_the_files_show_is_reported_before_torch_is_loaded(case, copied, capfd):
    """The checks of the commands name it, and so does whoever loads the folder all the same."""
    spoil, words = BY_FILES[case]
    spoil(copied)
    assert [words in mistake for mistake in folder_mistakes(copied, Trust())] == [True]
    assert words in refusal(copied, capfd)


def with_code_of_its_own(folder: Path) -> None:
    """Have the folder's tokenizer be a class of its own."""
    drop("tokenizer.json")(folder)
    edit("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["code.Evil", None]})(folder)
    put("code.py", "raise SystemExit('it ran')")(folder)


BY_LOADING: dict[str, tuple[Spoil, str]] = {
    "no tokenizer": (drop("tokenizer*"), "no tokenizer that transformers can load"),
    "a tokenizer of code": (with_code_of_its_own, "no tokenizer that transformers can load"),
    "an unknown model": (edit("config.json", model_type="evil"), "has a config that cannot be read"),
    "heads that do not divide": (edit("config.json", num_attention_heads=3), "not a multiple"),
    "weights of other shapes": (
        with_weights(lambda weights: {name: torch.cat([w, w]) for name, w in weights.items()}),
        "of the encoder are missing or of another shape",
    ),
    "exit heads cut short": (cut("exit_heads.safetensors", 0.9), "does not hold the heads of this model"),
}


@pytest.mark.parametrize("case", BY_LOADING)
def test_whatever_fails_in_loading_is_one_message(case, copied, capfd):
    """Exit code 2, and a message that names the folder and what is wrong."""
    spoil, words = BY_LOADING[case]
    spoil(copied)
    message = refusal(copied, capfd)
    assert words in message
    assert str(copied) in message


def test_the_hub_caches_links_are_followed(good, tmp_path):
    """A snapshot is a folder of links into another one: it is a good folder, as is one whose shards are links."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).symlink_to(path)
    assert type(ds_trainer.load_model(folder)).__name__ == "EarlyExitModel"
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    names = dict.fromkeys(load_file(good / WEIGHTS), "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert type(ds_trainer.load_model(folder)).__name__ == "EarlyExitModel"


def as_pickle(folder: Path, value: Any = None) -> Path:
    """The folder with its weights in pytorch_model.bin alone."""
    value = load_file(folder / WEIGHTS) if value is None else value
    drop("model.safetensors")(folder)
    torch.save(value, folder / "pytorch_model.bin")
    return folder


def test_pickles_are_read_where_permitted_and_give_the_same_model(good, copied, capfd):
    """Refused by default, the permission named; with it, the weights are those of the safetensors."""
    folder = as_pickle(copied)
    assert "pickles: convert them, or give --allow_pickle" in refusal(folder, capfd)
    wanted = ds_trainer.load_model(good).state_dict()
    loaded = ds_trainer.load_model(folder, allow_pickle=True).state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    cut("pytorch_model.bin", 0.5)(folder)
    assert "the weights of" in refusal(folder, capfd, allow_pickle=True)


class Evil:
    """A pickle of it touches a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("form", ["torch", "plain"])
def test_a_pickle_runs_no_code_even_where_permitted(form, copied, tmp_path, capfd):
    """It is read as weights only, in torch's archive and as a bare pickle, which would run code when loaded as such."""
    marker = tmp_path / "it_ran"
    folder = as_pickle(copied, {"classifier.bias": Evil(marker)})
    if form == "plain":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"classifier.bias": Evil(marker)}))
    assert "the weights of" in refusal(folder, capfd, allow_pickle=True)
    assert not marker.exists()
    with open(folder / "pytorch_model.bin", "rb") as file:  # the test can fail: loaded otherwise, it does run
        pickle.load(file) if form == "plain" else torch.load(file, weights_only=False)
    assert marker.exists()


CODE = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification
Path({marker!r}).touch()
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


def test_the_code_of_a_folder_is_run_only_where_trusted(copied, tmp_path, monkeypatch, capfd):
    """By default it is refused, the permission named; with it the model is of the folder's own class, exits and all."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = copied, tmp_path / "it_ran"
    put("code.py", CODE.format(marker=str(marker)))(folder)
    classes = {"AutoConfig": "code.OwnConfig", "AutoModelForSequenceClassification": "code.OwnModel"}
    edit("config.json", auto_map=classes, model_type="own", architectures=["OwnModel"])(folder)
    assert "--trust_remote_code" in refusal(folder, capfd)
    assert not marker.exists()
    model = ds_trainer.load_model(folder, trust_remote_code=True)
    assert marker.exists()  # the test can fail: the code does run
    assert type(model.model).__name__ == "OwnModel"
    assert "--trust_remote_code" in refusal(folder, capfd), "the permission ends with its call"


TEXTS = ["ships sail the wide salt sea", "wings and winds lift a bird", "seeds grow roots in worm clay"]


def test_the_same_texts_give_the_same_tokenizer():
    """Every training numbers and merges alike: a run with a model of its own is reproduced by its seed."""
    tokenizers = [train_tokenizer(TEXTS, 90, True) for _ in range(8)]
    assert all(one.get_vocab() == tokenizers[0].get_vocab() for one in tokenizers)
    # characters that the trainer was given are ordinary pieces: text that spells one is not cut out
    assert set(tokenizers[0].all_special_tokens) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert tokenizers[0].decode(tokenizers[0]("wide winds").input_ids, skip_special_tokens=True) == "wide winds"


def test_a_saved_tokenizer_is_the_same_whether_it_was_used_or_not(tmp_path):
    """Tokenising leaves truncation and padding in a tokenizer, which a run with cached data has not done."""
    tokenizer = train_tokenizer(["it rains", "it is wet"] * 5, 60, True)
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    save_folder(model, tokenizer, tmp_path / "new")
    tokenizer(["it rains"], truncation=True, max_length=4, padding=True)
    save_folder(model, tokenizer, tmp_path / "used")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (tmp_path / "used" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.txt", "own/layers.py"])
def test_a_hash_stands_for_all_that_a_model_is_loaded_from(name: str, tmp_path: Path) -> None:
    """Weights in any form, the tokenizer, code: another content or another name is another model."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"one")
    one = folder_hash(tmp_path)
    for added in ("README.md", "model.onnx", "model.onnx.data", "export.json", ".lock"):
        (tmp_path / added).write_text("no part of the model")
    assert folder_hash(tmp_path) == one
    file.write_bytes(b"two")
    assert folder_hash(tmp_path) != one
    file.write_bytes(b"one")
    assert folder_hash(tmp_path) == one
    file.rename(file.with_stem("other"))
    assert folder_hash(tmp_path) != one


def test_a_tokenizer_of_plain_python_is_known_by_its_merges(tmp_path: Path) -> None:
    """With the same words and other merges, texts become other tokens: tokenised data must not be used again."""
    words = ["<unk>", *(f"{word}{end}" for word in ("a", "b", "c", "ab", "bc") for end in ("", "@@"))]
    (tmp_path / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))

    def with_merges(*merges: str) -> CTRLTokenizer:
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        return CTRLTokenizer.from_pretrained(tmp_path)

    one, other = with_merges("a b", "b c</w>"), with_merges("b c</w>", "a b")
    assert one.tokenize("abc") != other.tokenize("abc")
    assert tokenizer_state(one) != tokenizer_state(other)
    assert tokenizer_state(one) == tokenizer_state(one)


@pytest.fixture
def folder_of(tokenizer: Any, tmp_path: Path) -> Callable[..., Path]:
    """A folder of a small BERT of a class, some of its weights changed."""

    def make(name: str, change: Callable[[dict[str, Any]], dict[str, Any]] = dict, **fields: Any) -> Path:
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES, **fields)
        save_folder(getattr(transformers, name)(config), tokenizer, tmp_path / "model")
        with_weights(change)(tmp_path / "model")
        return tmp_path / "model"

    return make


def without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


def test_a_head_that_the_config_claims_must_be_in_the_weights(folder_of: Any) -> None:
    """A missing one would be scored at random: its weights are named instead."""
    folder = folder_of("BertForMaskedLM", without("transform.dense.weight"))
    words = r"cls\.predictions\.transform\.dense\.weight of the head are missing or of another shape.*take BertForM"
    with pytest.raises(UserError, match=words):
        load_with_head(folder, MASKED_LM)
    edit("config.json", architectures=["BertModel"])(folder)
    assert load_with_head(folder, MASKED_LM), "as the message says"


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
