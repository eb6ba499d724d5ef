"""Folders of models with layer sizes of their own: loaded with and without this library, trained on, spoilt."""

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.launching import run_without_library
from support.zeroed import (
    ENCODERS,
    FAMILIES,
    VOCABULARY,
    empty,
    inputs_of,
    logits_of,
    model_of,
    randomised,
    uneven,
)

import ds_trainer
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.models.layers import count_weights, encoder_linears, is_emptied, sizes_of
from ds_trainer.models.pretrained import ANSWERER, CLASSIFIER, load_tokenizer, load_with_head
from ds_trainer.models.shrink import shrink
from ds_trainer.models.shrunk_model import Emptied, auto_map
from ds_trainer.models.student import create_student
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.technique_specs import StudentSpec

ALONE = """
import sys
import torch
from transformers import (
    AutoModel, AutoModelForCausalLM, AutoModelForQuestionAnswering, AutoModelForSequenceClassification, pipeline
)

root = sys.argv[1]
inputs = torch.load(f"{root}/inputs.pt")

def load(auto, name):
    return auto.from_pretrained(f"{root}/{name}", trust_remote_code=True)

bare = load(AutoModel, "bert")
assert type(bare).__name__ == "BertModel", type(bare)
found = {"states": bare(**inputs).last_hidden_state}
answerer = load(AutoModelForQuestionAnswering, "squad")
found["answers"] = answerer(**inputs).start_logits
found["gpt2"] = load(AutoModelForCausalLM, "gpt2")(**inputs).logits
model = load(AutoModelForSequenceClassification, "bert")
found["before"] = model(**inputs).logits
model.train()
model(**inputs, labels=torch.tensor([0, 1])).loss.backward()
assert all(weight.grad is not None for weight in model.bert.encoder.layer[2].parameters())
torch.optim.SGD(model.parameters(), 0.1).step()
model.eval().save_pretrained(f"{root}/trained")
found["after"] = model(**inputs).logits
again = load(AutoModelForSequenceClassification, "trained")
assert torch.equal(again(**inputs).logits, found["after"])
found["said"] = pipeline("text-classification", model=f"{root}/bert", trust_remote_code=True, top_k=None)("it rains")
found["filled"] = pipeline("text-generation", model=f"{root}/gpt2", trust_remote_code=True)(
    "it rains", max_new_tokens=3, do_sample=False
)
torch.save(found, f"{root}/found.pt")
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["it rains", "it is wet", "no"] * 5, VOCABULARY, True)


@pytest.fixture(scope="module")
def folders(tokenizer: Any, tmp_path_factory: Any) -> Path:
    """Shrunk models of uneven sizes: a classifier, one that answers and one that writes."""
    root = tmp_path_factory.mktemp("shrunk")
    models = {"bert": model_of("bert"), "gpt2": model_of("gpt2", pad_token_id=0)}
    config = transformers.BertConfig(**ENCODERS["bert"], vocab_size=VOCABULARY)
    models["squad"] = randomised(transformers.BertForQuestionAnswering(config))
    for name, model in models.items():
        save_folder(shrink(empty(model, uneven(model))), tokenizer, root / name)
    return root


def test_a_folder_says_in_its_config_what_can_be_made_of_it(folders: Path, tmp_path: Path) -> None:
    """No class of transformers, and every head that the family has is one of the file beside the config.

    A folder of 0.2, which names the class of the whole model, is loaded.
    """
    config = json.loads((folders / "bert" / "config.json").read_text())
    assert config["architectures"] == ["ShrunkBertForSequenceClassification"]
    assert config["shrunk"] == {"heads": [0, 1, 4], "neurons": [7, 0, 24]}
    assert config["auto_map"]["AutoModel"] == "shrunk_model.ShrunkBertModel"
    assert config["auto_map"]["AutoModelForQuestionAnswering"] == "shrunk_model.ShrunkBertForQuestionAnswering"
    assert (config["num_attention_heads"], config["intermediate_size"]) == (4, 24)
    code = (folders / "bert" / "shrunk_model.py").read_text()
    assert "ds_trainer" not in code.split('"""', 2)[2], "it stands alone"
    assert "AutoModelForCausalLM" not in auto_map(transformers.DistilBertConfig())
    older = spoilt(folders / "bert", tmp_path, architectures=["BertForSequenceClassification"])
    torch.testing.assert_close(
        logits_of(ds_trainer.load_model(older)), logits_of(ds_trainer.load_model(folders / "bert"))
    )


def test_a_folder_is_loaded_without_this_library(folders: Path) -> None:
    """By the auto classes and in pipelines, in a process that cannot import it; trained on there, it comes back."""
    torch.save(inputs_of(), folders / "inputs.pt")
    done = run_without_library(ALONE, str(folders))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is not supported" not in done.stderr
    found = torch.load(folders / "found.pt")
    ours = {name: ds_trainer.load_model(folders / name) for name in ("bert", "gpt2", "squad", "trained")}
    with torch.no_grad():
        states = ours["bert"].bert(**inputs_of()).last_hidden_state
        answers = ours["squad"](**inputs_of()).start_logits
        written = ours["gpt2"](**inputs_of()).logits
    torch.testing.assert_close(found["states"], states)
    torch.testing.assert_close(found["answers"], answers)
    torch.testing.assert_close(found["gpt2"], written)
    torch.testing.assert_close(found["before"], logits_of(ours["bert"]))
    torch.testing.assert_close(found["after"], logits_of(ours["trained"]))
    assert not torch.allclose(found["after"], found["before"])
    assert {entry["label"] for entry in found["said"][0]} == {"LABEL_0", "LABEL_1"}
    assert found["filled"][0]["generated_text"].startswith("it rains")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_from_its_folder(family: str, tokenizer: Any, tmp_path: Path) -> None:
    """Its code is not run even where it is trusted, since the class is ours: the same logits, and the same sizes."""
    model = model_of(family)
    shrunk = shrink(empty(model, uneven(model)))
    save_folder(shrunk, tokenizer, tmp_path / "model")
    (tmp_path / "model" / "shrunk_model.py").write_text("raise SystemExit('it ran')")
    loaded = ds_trainer.load_model(tmp_path / "model", trust_remote_code=True)
    assert type(loaded) is type(shrunk)
    assert type(loaded).__module__ == "ds_trainer.models.shrunk_model"
    torch.testing.assert_close(logits_of(loaded), logits_of(shrunk))
    counts = count_weights(loaded)
    assert counts["sizes"] == sizes_of(shrunk) == shrunk.config.shrunk
    layers = {name: linear.weight.numel() for name, linear in encoder_linears(model).items()}
    assert counts["before"] == {
        "layers": layers,
        "encoder": sum(layers.values()),
        "model": model.num_parameters(),
    }


def test_a_model_of_the_folders_own_code_can_be_cut_further(folders: Path) -> None:
    """Its classes are not ours, only alike: an empty block is seen as one."""
    auto = transformers.AutoModelForSequenceClassification
    theirs = auto.from_pretrained(folders / "bert", trust_remote_code=True).eval()
    core = theirs.bert.encoder.layer[0].attention.self
    assert is_emptied(core)
    assert encoder_flops(theirs, 9) == encoder_flops(load_with_head(folders / "bert", CLASSIFIER), 9)
    assert not isinstance(core, Emptied)
    masked = empty(theirs, {"heads": [0, 0, 2], "neurons": [3, 0, 24]})
    again = shrink(masked)
    assert again.config.shrunk == {"heads": [0, 0, 2], "neurons": [3, 0, 24]}
    torch.testing.assert_close(logits_of(again), logits_of(masked))


def test_a_trained_one_is_saved_as_it_was_loaded(folders: Path, tokenizer: Any, tmp_path: Path) -> None:
    """A step of training changes what is left, biases of empty blocks too; copies and pickles are of the same class.

    Of several ranks one writes.
    """
    model = load_with_head(folders / "bert", CLASSIFIER).train()
    before = copy.deepcopy(model.state_dict())
    model(**inputs_of(), labels=torch.tensor([0, 1])).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    after = model.eval().state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {"bert.encoder.layer.0.attention.output.dense.bias", "bert.encoder.layer.1.output.dense.bias"} <= changed
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not [*(tmp_path / "other").glob("*")]
    save_folder(model, tokenizer, tmp_path / "again")
    assert (tmp_path / "again" / "shrunk_model.py").read_bytes() == (folders / "bert" / "shrunk_model.py").read_bytes()
    torch.testing.assert_close(logits_of(ds_trainer.load_model(tmp_path / "again")), logits_of(model))
    assert type(pickle.loads(pickle.dumps(model))) is type(copy.deepcopy(model)) is type(model)


def test_a_students_layers_keep_their_sizes(folders: Path, tmp_path: Path) -> None:
    """Layers 0 and 2 bring theirs, and weights are copied to the bit.

    Where they have as many heads and neurons, which layer 1 has not, a plain config says the student's sizes.
    """
    model = empty(model_of("bert"), {"heads": [4] * 3, "neurons": [8, 24, 8]})
    save_folder(shrink(model), load_tokenizer(folders / "bert"), tmp_path / "cut")
    for source, name in ((folders / "bert", "student"), (tmp_path / "cut", "plain")):
        create_student(StudentSpec(layers=[0, 2]), source, tmp_path / name, seed=0)
        before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / name))
        assert all(torch.equal(value, before[key.replace("layer.1.", "layer.2.")]) for key, value in after.items())
    student = load_with_head(tmp_path / "student", CLASSIFIER)
    assert student.config.shrunk == {"heads": [0, 4], "neurons": [7, 24]}
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (config["architectures"], config["intermediate_size"]) == (["BertForSequenceClassification"], 8)
    assert not {"shrunk", "auto_map"} & config.keys()
    spec = StudentSpec(layers=[0, 2], model_type="distilbert")
    with pytest.raises(UserError, match="that was shrunk"):
        create_student(spec, folders / "bert", tmp_path / "other", seed=0)


GOOD = [7, 0, 24]
HOSTILE: dict[str, tuple[Any, str]] = {
    "a number": (5, r"heads must list a size for each of 3 layers, from 0 to 4, and is None"),
    "negative": ({"heads": [0, 1, 4], "neurons": [7, -1, 24]}, r"neurons must list .* from 0 to 24"),
    "emptier than the weights": ({"heads": [0, 0, 4], "neurons": GOOD}, r"1 of the encoder .*of another shape, bert"),
    "fewer layers than the weights": ({"heads": [0, 1], "neurons": [7, 0]}, "16 of the encoder have no place in it"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_sizes_of_another_form_are_told(case: str, folders: Path, tmp_path: Path) -> None:
    """One ValueError in words, whichever way it is loaded."""
    value, words = HOSTILE[case]
    fewer = {"num_hidden_layers": 2} if case == "fewer layers than the weights" else {}
    folder = spoilt(folders / "bert", tmp_path, shrunk=value, **fewer)
    with pytest.raises(UserError, match=words):
        ds_trainer.load_model(folder)
    with pytest.raises(UserError, match=words):
        load_with_head(folder, ANSWERER)


def test_a_folder_whose_code_is_not_run_is_not_loaded_as_another_model(tokenizer: Any, tmp_path: Path) -> None:
    """With whole blocks and nothing else gone, transformers would fill them at random: it says that sizes differ."""
    model, auto = model_of("llama"), transformers.AutoModel
    whole = sizes_of(model)
    sizes = {"heads": [0, *whole["heads"][1:]], "neurons": [*whole["neurons"][:2], 0]}
    shrunk = shrink(empty(model, sizes))
    assert shrunk.config.shrunk == sizes
    save_folder(shrunk, tokenizer, tmp_path / "model")
    with pytest.raises((ValueError, RuntimeError), match="ignore_mismatched_sizes"):
        auto.from_pretrained(tmp_path / "model")
    states = auto.from_pretrained(tmp_path / "model", trust_remote_code=True)(**inputs_of()).last_hidden_state
    torch.testing.assert_close(states, shrunk.base_model(**inputs_of()).last_hidden_state)


def spoilt(source: Path, tmp_path: Path, **fields: Any) -> Path:
    folder = Path(shutil.copytree(source, tmp_path / "spoilt"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder
