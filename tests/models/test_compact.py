"""Compact files: what is read is what was written, to fp16 or within the stated error; broken files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support import exported_models
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from ds_trainer.models import compact
from ds_trainer.models.compact import read_compact, unpack_compact, write_compact, write_compact_folder
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import sizes_of
from ds_trainer.models.model_folder import COMPACT_FILE
from ds_trainer.models.pretrained import load_trained
from ds_trainer.ranks.failures import UserError

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
MODELS = {
    "bert classifier": (AutoModelForSequenceClassification, "bert", TINY),
    "bert, tied": (AutoModelForMaskedLM, "bert", TINY),
    "gpt2, tied": (AutoModelForCausalLM, "gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}),
}


def sparse(shape: tuple[int, ...], density: float, seed: int = 0) -> torch.Tensor:
    """Random weights, of which this share is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)


@pytest.fixture(params=MODELS)
def folder(request, tmp_path) -> Path:
    auto, family, sizes = MODELS[request.param]
    tokens = exported_models.tokenizer()
    ids = {"vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id}
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(family, **sizes, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= torch.rand_like(parameter) < 0.15
    save_folder(model, tokens, tmp_path / "model")
    return tmp_path / "model"


@settings(max_examples=40, deadline=None)
@given(
    shape=st.one_of(st.just(()), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.95, 1.0]),
    scale=st.sampled_from([1e-42, 1e-6, 1.0, 1e3]),
    seed=st.integers(0, 9),
)
def test_round_trips(tmp_path_factory, shape, density, scale, seed):
    """Of any shape and density: fp16 is exact, int8 within half of its row's scale, zeros stay zeros, shapes stay."""
    tensor = sparse(shape, density, seed) * scale
    path = tmp_path_factory.mktemp("compact") / COMPACT_FILE
    write_compact({"w": tensor}, path, "fp16")
    read = read_compact(path)["w"]
    assert read.shape == tensor.shape
    assert torch.equal(read, tensor.half().float())
    write_compact({"w": tensor}, path, "int8")
    read = read_compact(path)["w"]
    if tensor.dim() < 2:
        assert torch.equal(read, tensor.half().float())
        return
    with safe_open(path, framework="pt") as file:
        scales = file.get_tensor("w#scale").double()
    for row, found, scale in zip(tensor.double(), read.double(), scales, strict=True):
        if row.numel():
            assert float(scale) <= max(float(row.abs().max()) / 127 * 1.0001, float(np.finfo(np.float32).tiny))
        assert bool(((row - found).abs() <= scale / 2).all())
    assert bool((read[tensor == 0] == 0).all())


def test_the_smallest_form_is_taken(tmp_path):
    """Many zeros: a mask and what is left. Few: the tensor itself. What is no float stays as it is."""
    state = {"sparse": sparse((64, 64), 0.15), "full": torch.randn(64, 64), "ids": torch.arange(5)}
    report = write_compact(state, tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"sparse#mask", "sparse#values", "full", "ids"}
        assert file.metadata()["values"] == "fp16"
        assert file.get_tensor("sparse#mask").numel() == 64 * 64 // 8
    assert torch.equal(read_compact(tmp_path / "c.safetensors")["ids"], torch.arange(5))
    assert report["kept"] == sum(int(value.count_nonzero()) for value in state.values())


def test_bits_are_in_order(tmp_path):
    """Row by row, the first weight in the highest bit."""
    weight = torch.zeros(2, 8)
    weight[0, 0], weight[1, 6], weight[1, 7] = 1.0, 2.0, 3.0
    write_compact({"w": weight}, tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        assert file.get_tensor("w#mask").tolist() == [0b10000000, 0b00000011]
        assert file.get_tensor("w#values").tolist() == [1.0, 2.0, 3.0]


def test_negative_zeros_are_not_kept(tmp_path):
    """A mask leaves -0.0 of negative weights: these are zeros."""
    weight = torch.full((16, 16), -1.0) * (torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) < 0.1)
    report = write_compact({"w": weight}, tmp_path / "c.safetensors")
    assert report["bytes"]["compact"] < 600
    assert report["kept"] == int(weight.count_nonzero())


def test_the_report_says_what_holds(tmp_path):
    """The stated errors are those that are there; sizes are of files; int8 is below fp16, and both below dense."""
    state = {"w": sparse((256, 256), 0.15), "bias": torch.randn(256)}
    found = {values: write_compact(state, tmp_path / f"{values}.safetensors", values) for values in ("fp16", "int8")}
    for values, report in found.items():
        read = read_compact(tmp_path / f"{values}.safetensors")
        assert report["max_error"] == pytest.approx(max(float((read[n] - state[n]).abs().max()) for n in state))
        assert report["bytes"]["compact"] == (tmp_path / f"{values}.safetensors").stat().st_size
        assert report["bytes"]["dense"] == 4 * (256 * 256 + 256)
    half_a_step = max(float(state["w"].abs().max()) / 127 / 2, found["fp16"]["max_error"])
    assert found["int8"]["max_error"] <= 1.01 * half_a_step
    assert found["int8"]["bytes"]["compact"] < found["fp16"]["bytes"]["compact"] < found["fp16"]["bytes"]["dense"]


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_a_folder_loads_again(folder, tmp_path, values):
    """A compact folder loads as the model that it was made of, tied weights too; unpacked, transformers loads it."""
    model = load_trained(folder)
    target, unpacked = tmp_path / "compact", tmp_path / "unpacked"
    target.mkdir()
    unpacked.mkdir()
    report = write_compact_folder(folder, model, target, values)
    assert not (target / "model.safetensors").exists()
    loaded = load_trained(target)
    for name, weight in model.state_dict().items():
        difference = loaded.state_dict()[name].double() - weight.double()
        assert float(difference.abs().max()) <= report["max_error"]
        if values == "fp16":
            assert torch.equal(loaded.state_dict()[name], weight.half().float())
    unpack_compact(target, unpacked)
    again = type(model).from_pretrained(unpacked)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in loaded.state_dict().items())


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_what_a_bf16_model_unpacks_to_is_not_rounded_again(folder, tmp_path, values):
    """Its config says float32: transformers goes by that, and bf16 would hold neither fp16 nor a scale's multiples."""
    for name in ("source", "compact", "unpacked"):
        (tmp_path / name).mkdir()
    load_trained(folder).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    assert json.loads((tmp_path / "source" / "config.json").read_text())["dtype"] == "bfloat16"
    write_compact_folder(tmp_path / "source", load_trained(tmp_path / "source"), tmp_path / "compact", values)
    unpack_compact(tmp_path / "compact", tmp_path / "unpacked")
    loaded = load_trained(tmp_path / "compact")
    again = type(loaded).from_pretrained(tmp_path / "unpacked")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_a_shrunk_folder_loads_again(tmp_path):
    """Sizes of layers and emptied blocks come through."""
    source = exported_models.save("qa", tmp_path / "shrunk", cut=True)
    model = load_trained(source).eval()
    (tmp_path / "compact").mkdir()
    write_compact_folder(source, model, tmp_path / "compact", "fp16")
    loaded = load_trained(tmp_path / "compact").eval()
    assert sizes_of(loaded) == sizes_of(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float())
    asked = exported_models.inputs(2, 6)
    torch.testing.assert_close(loaded(**asked).start_logits, model.half().float()(**asked).start_logits)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.tensor([[70_000.0]]), "65,504"),
        (torch.tensor([[float("nan")]]), "not finite"),
        (torch.tensor([float("inf")]), "not finite"),
    ],
)
def test_what_fp16_does_not_hold_is_refused(tmp_path, weight, words):
    """Nothing is cut off in silence."""
    with pytest.raises(UserError, match=words):
        write_compact({"w": weight}, tmp_path / "c.safetensors")
    assert not any(tmp_path.iterdir())


def test_int8_holds_what_fp16_does_not(tmp_path):
    """A matrix's scale is fp32."""
    write_compact({"w": torch.tensor([[70_000.0, -1.0]])}, tmp_path / "c.safetensors", "int8")
    assert float(read_compact(tmp_path / "c.safetensors")["w"][0, 0]) == pytest.approx(70_000, rel=1e-4)


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_what_becomes_zero_is_counted(tmp_path, values):
    """`kept` is of what is read: numbers below the half of the smallest one, or of a scale, are none of it."""
    weight = torch.tensor([[1e-9, 1.0, 0.0], [0.0, -1e-9, 2.0]])
    report = write_compact({"w": weight}, tmp_path / "c.safetensors", values)
    assert (report["kept"], report["became_zero"]) == (2, 2)


def test_rows_of_all_halves_keep_the_bound(tmp_path):
    """Half-way between two numbers the error is as large as it can be: still no more than half of the scale."""
    largest = torch.linspace(0.7, 1.3, 61)
    rows = (torch.arange(-126.5, 127) / 127)[None] * largest[:, None]
    write_compact({"w": torch.cat([largest[:, None], rows], 1)}, tmp_path / "c.safetensors", "int8")
    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        scale = file.get_tensor("w#scale").double()
    found = read_compact(tmp_path / "c.safetensors")["w"][:, 1:].double()
    assert bool(((found - rows.double()).abs() <= scale[:, None] / 2).all())


def test_the_files_of_a_model_come_along(folder, tmp_path):
    """What belongs to a model, exits too; what else lies in its folder stays there."""
    (folder / "notes.txt").write_text("mine")
    (folder / "exits.json").write_text("{}")
    (tmp_path / "compact").mkdir()
    write_compact_folder(folder, load_trained(folder), tmp_path / "compact", "fp16")
    assert "exits.json" in {path.name for path in (tmp_path / "compact").iterdir()}
    assert not (tmp_path / "compact" / "notes.txt").exists()


def test_generation_settings_come_along(tmp_path):
    """A decoder that is loaded from a compact folder generates as its source does."""
    tokens = exported_models.tokenizer()
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": len(tokens)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    model.generation_config.max_new_tokens = 7
    save_folder(model, tokens, tmp_path / "model")
    (tmp_path / "compact").mkdir()
    write_compact_folder(tmp_path / "model", model, tmp_path / "compact", "fp16")
    assert load_trained(tmp_path / "compact").generation_config.max_new_tokens == 7


def spoilt(path: Path, change) -> Path:
    """A sound file of a masked matrix of 8 x 8, changed: `change(tensors, metadata, entries)`."""
    write_compact({"w": sparse((8, 8), 0.2)}, path, "int8")
    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    entries = json.loads(header["tensors"])
    assert entries["w"]["form"] == "mask_int8"
    change(tensors, header, entries)
    if "tensors" in header and not header["tensors"].startswith("!"):
        header["tensors"] = json.dumps(entries)
    save_file(tensors, path, header)
    return path


def entry(**values):
    return lambda tensors, header, entries: entries["w"].update(values)


def tensor(name, value):
    return lambda tensors, header, entries: tensors.update({f"w#{name}": value})


BROKEN = {
    "format": (lambda t, header, e: header.pop("format"), "does not name the format"),
    "version": (lambda t, header, e: header.update(version="2"), "version is '2'"),
    "no list": (lambda t, header, e: header.pop("tensors"), "'tensors'"),
    "list of another kind": (lambda t, header, e: header.update(tensors="![]"), "Expecting value"),
    "form": (entry(form="other"), "'other'"),
    "no shape": (entry(shape=None), "TypeError"),
    "other shape": (entry(shape=[8, 9]), "reshape"),
    "scale of other rows": (tensor("scale", torch.ones(7)), "reshape"),
    "all bits": (tensor("mask", torch.full((8,), 255, dtype=torch.uint8)), "boolean array indexing"),
    "a tensor less": (lambda tensors, header, e: tensors.pop("w#scale"), "w#scale"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_broken_files_are_refused(tmp_path, change):
    """A UserError that names the file and what is wrong."""
    spoil, words = BROKEN[change]
    path = spoilt(tmp_path / "c.safetensors", spoil)
    with pytest.raises(UserError, match=rf"(?s)c\.safetensors is no sound compact file: .*{words}"):
        read_compact(path)


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path, part):
    """Bytes that the header promises must be there."""
    path = tmp_path / "c.safetensors"
    write_compact({"w": sparse((64, 64), 0.2)}, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(UserError, match="no sound compact file"):
        read_compact(path)


def test_more_than_memory_is_refused_before_it_is_taken(tmp_path, monkeypatch):
    """What a file unpacks to is counted first."""
    write_compact({"w": torch.zeros(512, 512)}, tmp_path / "c.safetensors")
    monkeypatch.setattr(compact, "memory_limit", lambda: 1 << 20)
    monkeypatch.setattr(compact, "_unpacked", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(UserError, match="more than this host's memory"):
        read_compact(tmp_path / "c.safetensors")


def test_weights_of_another_model_name_the_compact_folder(folder, tmp_path):
    """The message has the folder that was given."""
    target = tmp_path / "compact"
    target.mkdir()
    write_compact_folder(folder, load_trained(folder), target, "fp16")
    config = json.loads((target / "config.json").read_text())
    config |= {"hidden_size": 64, "n_embd": 64}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        load_trained(target)
    assert str(target) in str(caught.value)
