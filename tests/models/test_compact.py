"""Compact files: what is read is what was written, in fp16; those of version 0.2 are read; broken files are refused."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support import exported_models
from transformers import GPT2Config, GPT2LMHeadModel

from ds_trainer.models import compact
from ds_trainer.models.compact import read_compact, unpack_compact, write_compact, write_compact_folder
from ds_trainer.models.folders import COMPACT_FILE, save_folder
from ds_trainer.models.pretrained import load_trained
from ds_trainer.ranks.failures import UserError


def sparse(shape: tuple[int, ...], density: float, seed: int = 0) -> torch.Tensor:
    """Random weights, of which this share is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.one_of(st.just(()), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.95, 1.0]),
    scale=st.sampled_from([1e-42, 1e-6, 1.0, 1e3]),
    seed=st.integers(0, 9),
)
def test_round_trips(tmp_path_factory, shape, density, scale, seed):
    """A weight of any shape and density is read as fp16 rounds it, and the report has the bytes."""
    tensor = sparse(shape, density, seed) * scale
    path = tmp_path_factory.mktemp("compact") / COMPACT_FILE
    report = write_compact({"w": tensor, "ids": torch.arange(5)}, path)
    read = read_compact(path)
    assert read["w"].shape == tensor.shape
    assert torch.equal(read["w"], tensor.half().float())
    assert torch.equal(read["ids"], torch.arange(5))
    assert report["bytes"] == {"compact": path.stat().st_size, "dense": 4 * tensor.numel() + 40}


def test_the_smaller_form_is_taken_bit_by_bit(tmp_path):
    """A mask goes row by row with the first weight in the highest bit; few zeros are left in; -0.0 is a zero."""
    weight = torch.zeros(2, 8)
    weight[0, 0], weight[1, 6], weight[1, 7], weight[1, 0] = 1.0, 2.0, 3.0, -0.0
    write_compact({"w": weight, "full": torch.randn(64, 64)}, tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"w#mask", "w#values", "full"}
        assert file.get_tensor("w#mask").tolist() == [0b10000000, 0b00000011]
        assert file.get_tensor("w#values").tolist() == [1.0, 2.0, 3.0]


def int8_file(path: Path) -> None:
    """What version 0.2 wrote with int8 values: a masked matrix and a whole one, with a scale for each row."""
    tensors = {"w#mask": torch.tensor([0b10000000, 0b01000001], dtype=torch.uint8)}
    tensors |= {"w#values": torch.tensor([2, -4, 127], dtype=torch.int8), "w#scale": torch.tensor([0.5, 0.25])}
    tensors |= {"v#int8": torch.tensor([[1, -2]], dtype=torch.int8), "v#scale": torch.tensor([3.0])}
    entries = {"w": {"form": "mask_int8", "shape": [2, 8]}, "v": {"form": "int8", "shape": [1, 2]}}
    save_file(tensors, path, {"format": "ds_trainer.compact", "version": "1", "tensors": json.dumps(entries)})


def test_int8_values_of_version_0_2_are_read(tmp_path):
    """Each number is multiplied by the scale of its row."""
    int8_file(tmp_path / "c.safetensors")
    read = read_compact(tmp_path / "c.safetensors")
    assert read["v"].tolist() == [[3.0, -6.0]]
    assert read["w"].tolist() == [[1.0, *[0.0] * 7], [0.0, -1.0, *[0.0] * 5, 31.75]]


def test_a_folder_loads_again(tmp_path):
    """A compact folder loads as the model that it was made of, tied weights and settings of generation too.

    Unpacked, transformers loads it, and does not round it to the bf16 that the source was in. What belongs to a model
    comes along, exits too, and what else lies in its folder does not.
    """
    tokens, source = exported_models.tokenizer(), tmp_path / "model"
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32, vocab_size=len(tokens)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= torch.rand_like(parameter) < 0.15
    model.generation_config.max_new_tokens = 7
    save_folder(model.to(torch.bfloat16), tokens, source)
    (source / "notes.txt").write_text("mine")
    (source / "exits.json").write_text("{}")
    target, unpacked = tmp_path / "compact", tmp_path / "unpacked"
    target.mkdir()
    unpacked.mkdir()
    model = load_trained(source)
    write_compact_folder(source, model, target)
    names = {path.name for path in target.iterdir()}
    assert "exits.json" in names
    assert not {"model.safetensors", "notes.txt"} & names
    (target / "exits.json").unlink()
    loaded = load_trained(target)
    assert loaded.generation_config.max_new_tokens == 7
    unpack_compact(target, unpacked)
    again = type(model).from_pretrained(unpacked)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float())
        assert torch.equal(again.state_dict()[name], loaded.state_dict()[name])
    config = json.loads((target / "config.json").read_text()) | {"vocab_size": 7}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=str(target)):
        load_trained(target)


@pytest.mark.parametrize(
    ("weight", "words"), [([[70_000.0]], "65,504"), ([[float("nan")]], "not finite"), ([float("inf")], "not finite")]
)
def test_what_fp16_does_not_hold_is_refused(tmp_path, weight, words):
    """Nothing is cut off in silence."""
    with pytest.raises(UserError, match=words):
        write_compact({"w": torch.tensor(weight)}, tmp_path / "c.safetensors")
    assert not any(tmp_path.iterdir())


BROKEN = {
    "format": (lambda t, header, e: header.pop("format"), "does not name the format"),
    "version": (lambda t, header, e: header.update(version="2"), "version is '2'"),
    "form": (lambda t, h, entry: entry.update(form="other"), "'other'"),
    "other shape": (lambda t, h, entry: entry.update(shape=[8, 9]), "reshape"),
    "scale of other rows": (lambda tensors, h, e: tensors.update({"w#scale": torch.ones(7)}), "reshape"),
    "a tensor less": (lambda tensors, header, e: tensors.pop("w#scale"), "w#scale"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_broken_files_are_refused(tmp_path, change):
    """A UserError names the file and what is wrong."""
    (spoil, words), path = BROKEN[change], tmp_path / "c.safetensors"
    int8_file(path)
    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    entries = json.loads(header["tensors"])
    spoil(tensors, header, entries["w"])
    header["tensors"] = json.dumps(entries)
    save_file(tensors, path, header)
    with pytest.raises(UserError, match=rf"(?s)c\.safetensors is no sound compact file: .*{words}"):
        read_compact(path)


def test_a_file_that_is_cut_short_or_too_large_is_refused(tmp_path, monkeypatch):
    """Bytes that the header promises must be there, and what a file unpacks to is counted before it is taken."""
    path = tmp_path / "c.safetensors"
    write_compact({"w": torch.zeros(512, 512)}, path)
    monkeypatch.setattr(compact, "free_memory", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"no sound compact file: .*more than is free in memory"):
        read_compact(path)
    whole = path.read_bytes()
    for part in (0, 0.5, 0.99):
        path.write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(UserError, match="no sound compact file"):
            read_compact(path)
