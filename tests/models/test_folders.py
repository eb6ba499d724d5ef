"""Model folders: no code is run, no pickle read, each fault is one message and code 2; and what new folders hold."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, BertModel, CTRLTokenizer

import ds_trainer
from ds_trainer.cli.command import run_command
from ds_trainer.files.reading import folder_hash
from ds_trainer.models.folders import folder_mistakes, save_folder, train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer, tokenizer_state
from ds_trainer.recipe.exit_specs import ExitPolicy, SavedExits
from ds_trainer.recipe.jobs import Trust
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
def good(tmp_path_factory) -> Path:
    """A small classifier with exit heads."""
    folder = tmp_path_factory.mktemp("good") / "bert"
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["it rains", "it is wet", "no"] * 5, 60, True)
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
    "an index of a pickle": (lambda f: (index_of("x.bin")(f), put("x.bin", "")(f)), "files here: 'x.bin'"),
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
    "a tokenizer cut short": (cut("tokenizer.json", 0.7), "no tokenizer that transformers can load"),
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


@pytest.fixture
def with_code(copied, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A folder whose config names code of its own, and the file that this code writes."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = copied, tmp_path / "it_ran"
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


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "vocab.txt", "own/layers.py"],
)
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
    assert one.get_vocab() == other.get_vocab()
    assert tokenizer_state(one) != tokenizer_state(other)
    one.save_pretrained(tmp_path / "copy")
    assert tokenizer_state(CTRLTokenizer.from_pretrained(tmp_path / "copy")) == tokenizer_state(one)
