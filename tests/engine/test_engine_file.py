"""The engine file: read as DeepSpeed reads it, every mistake reported at once, every "auto" filled."""

import base64
import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_files import HUGGING_FACE

from ds_trainer.config.recipe import Phase
from ds_trainer.engine.engine_file import (
    check_engine_file,
    read_engine_file,
    resolve_engine_file,
    settled_numbers,
)
from ds_trainer.engine.optim import Hyperparameters
from ds_trainer.ranks.failures import UserError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))


def write(folder, text):
    path = folder / "engine.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def resolve(config, phase=None, world_size=1, hidden_size=None, total_steps=None, warmup_steps=None):
    return resolve_engine_file(
        config, phase, world_size, hidden_size=hidden_size, total_steps=total_steps, warmup_steps=warmup_steps
    )


def the_mistake(config, phase=None, world_size=1):
    mistakes = check_engine_file(config, phase, world_size)
    assert len(mistakes) == 1, mistakes
    return mistakes[0]


def test_comments_and_trailing_commas_are_read(tmp_path):
    """A file with all three kinds of comment and trailing commas gives the object that plain JSON would."""
    text = '{\n// a\n# b\n/* c */ "zero_optimization": {"stage": 2,},\n"train_batch_size": 5e1, }'
    assert read_engine_file(write(tmp_path, text)) == {
        "zero_optimization": {"stage": 2},
        "train_batch_size": 50,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n "a": 1,\n "b": [1, 2\n', ["line 4", "column"]),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', ["'c' twice"]),
        ("[1, 2]", ["must be an object"]),
        ("{\n\n\xff".encode("latin-1"), ["not UTF-8", "line 3"]),
        (b'{\n"a\0": 1}', ["control character", "line 2"]),
        ('{"a": 1e999}', ["too large"]),
        ('{"a": 1} /* never ends', ["ends inside a comment"]),
        (" \n", ["is empty"]),
        ('{"a":' * 2000, ["nested too deeply"]),
    ],
)
def test_bad_files_are_reported_with_their_place(tmp_path, text, words):
    """Each kind of bad file is one ValueError that names the file and the place, never another exception."""
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="engine file") as caught:
        read_engine_file(path)
    for word in [*words, str(path)]:
        assert word in str(caught.value)


def test_deepspeeds_autotuner_is_refused_in_one_sentence():
    """It starts its trials with the file itself in base64 in place of a path, and logs what a trial prints."""
    file = base64.b64encode(json.dumps({"zero_optimization": {"stage": 3}, "autotuning": {}}).encode()).decode()
    with pytest.raises(UserError, match=r"use ds-tune with the same --deepspeed_config and --recipe"):
        read_engine_file(file)


def test_missing_file_and_folder_are_reported(tmp_path):
    """A path that does not exist and a path of a folder have different messages."""
    with pytest.raises(ValueError, match="does not exist"):
        read_engine_file(tmp_path / "none.json")
    with pytest.raises(ValueError, match="is a folder"):
        read_engine_file(tmp_path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_good(path):
    """Every file in ds_configs/ is without mistakes and resolves with no "auto" left and nothing lost."""
    config = read_engine_file(path)
    resolved = resolve(config, hidden_size=64, total_steps=100, warmup_steps=10, world_size=2)
    assert '"auto"' not in json.dumps(resolved)
    assert set(resolved) >= set(config)
    assert resolved["train_batch_size"] == 64


@pytest.mark.parametrize("value", [8.5, "8", True, 0, -8, [8]])
@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_batch_numbers_are_whole_and_positive(key, value):
    """Nothing but a whole number above 0 or "auto" passes as a batch size, and it is one mistake only."""
    assert the_mistake({key: value}).startswith(f"{key} is {json.dumps(value)}: write a whole number")


def test_every_mistake_comes_at_once():
    """Four mistakes in four places are four lines of one list, and `resolve` raises them all."""
    config = {"train_batch_size": "8", "zero": 1, "bf16": {"enabled": 3}, "optimizer": {"type": "Adamm"}}
    mistakes = check_engine_file(config, None, 1)
    assert len(mistakes) == 4
    with pytest.raises(ValueError, match="zero is not a key") as caught:
        resolve(config)
    assert str(caught.value).splitlines() == mistakes


@pytest.mark.parametrize(
    ("given", "phase", "world", "triangle"),
    [
        ((None, None, None), None, 2, (64, 32, 1)),
        (
            ("auto", "auto", "auto"),
            Phase(max_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=2),
            2,
            (32, 8, 2),
        ),
        ((64, None, None), None, 2, (64, 32, 1)),
        ((64, 8, None), None, 2, (64, 8, 4)),
        ((64, None, 4), None, 2, (64, 8, 4)),
        ((None, 8, None), Phase(max_steps=1, train_batch_size=64), 1, (64, 8, 8)),
        ((None, None, 4), None, 1, (128, 32, 4)),
        ((32, 8, 2), Phase(max_steps=1, train_batch_size=32, per_device_train_batch_size=8), 2, (32, 8, 2)),
    ],
)
def test_two_batch_numbers_give_the_third(given, phase, world, triangle):
    """train = micro x accumulation x ranks holds in the resolved file, whichever of the numbers are given."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    resolved = resolve(config, phase, world)
    assert tuple(resolved[key] for key in keys) == triangle


def test_batch_contradictions_show_the_arithmetic():
    """A triangle that does not close is one mistake with its product; one that does not divide says so."""
    config = {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    assert the_mistake(config, world_size=2) == (
        "train_batch_size is 30, but train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 2 "
        "x 2 ranks = 32: "
        'change one of them or write "auto"'
    )
    assert "gradient_accumulation_steps 4 x 2 ranks does not divide" in the_mistake(
        {"train_batch_size": 30, "gradient_accumulation_steps": 4}, world_size=2
    )
    assert "3 ranks does not divide" in the_mistake({"train_batch_size": 32}, world_size=3)


@pytest.mark.parametrize(
    ("config", "phase", "places"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, Phase(max_steps=1, per_device_train_batch_size=16), ("8", "16")),
        (
            {"gradient_clipping": 0.5},
            Phase(max_steps=1, max_grad_norm=1.0),
            ("gradient_clipping is 0.5", "max_grad_norm is 1.0"),
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            Phase(max_steps=1, learning_rate=5e-5),
            ("0.0001", "5e-05"),
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.98]}}},
            Phase(max_steps=1, adam_beta2=0.999),
            ("betas[1] is 0.98", "adam_beta2 is 0.999"),
        ),
        ({"bf16": {"enabled": False}}, Phase(max_steps=1, bf16=True), ("bf16.enabled is false", "bf16 is true")),
    ],
)
def test_two_different_numbers_name_both_places(config, phase, places):
    """A value in the file and another in the recipe is one mistake that names both places and both values."""
    mistake = the_mistake(config, phase)
    assert "in my file" in check_engine_file(config, phase, 1, name="my file")[0]
    for place in (*places, "in the engine file", "in the recipe"):
        assert place in mistake


def test_absent_clipping_is_deepspeeds_default_in_writing():
    """An absent gradient_clipping resolves to 1.0; the recipe's value, also 0.0, is used where it has one."""
    assert resolve({})["gradient_clipping"] == 1.0
    assert resolve({}, Phase(max_steps=1, max_grad_norm=0.0))["gradient_clipping"] == 0.0
    assert resolve({"gradient_clipping": 0})["gradient_clipping"] == 0


def test_hugging_face_autos_are_filled():
    """Every "auto" of the Hugging Face file has the value that Hugging Face's Trainer gives it."""
    phase = Phase(
        max_steps=1, per_device_train_batch_size=4, learning_rate=3e-5, weight_decay=0.1, adam_beta2=0.98, bf16=True
    )
    resolved = resolve(HUGGING_FACE, phase, world_size=2, hidden_size=64, total_steps=500, warmup_steps=0)
    assert resolved["optimizer"]["params"] == {
        "lr": 3e-5,
        "betas": [0.9, 0.98],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert resolved["scheduler"]["params"] == {
        "last_batch_iteration": -1,
        "total_num_steps": 500,
        "warmup_min_lr": 0,
        "warmup_max_lr": 3e-5,
        "warmup_num_steps": 1,
    }
    assert (resolved["bf16"]["enabled"], resolved["fp16"]["enabled"]) == (True, False)
    assert '"auto"' not in json.dumps(resolved)


@pytest.mark.parametrize(
    ("hidden", "bucket", "prefetched", "kept"),
    [(64, 4_000_000, 4_000_000, 640), (4096, 16_777_216, 15_099_494, 40_960)],
)
def test_sizes_follow_the_width_of_the_model(hidden, bucket, prefetched, kept):
    """A wide model has Hugging Face's buckets, and a narrow one larger ones."""
    zero = resolve(HUGGING_FACE, hidden_size=hidden)["zero_optimization"]
    assert zero["reduce_bucket_size"] == bucket
    assert zero["stage3_prefetch_bucket_size"] == prefetched
    assert zero["stage3_param_persistence_threshold"] == kept


def test_what_is_not_known_yet_stays_auto_until_it_is():
    """Without hidden size and steps only those values stay "auto", and resolving again fills them."""
    early = resolve(HUGGING_FACE)
    assert early["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert early["scheduler"]["params"]["total_num_steps"] == "auto"
    late = resolve(early, hidden_size=8, total_steps=10, warmup_steps=2)
    assert late == resolve(HUGGING_FACE, hidden_size=8, total_steps=10, warmup_steps=2)
    assert '"auto"' not in json.dumps(late)


def test_autos_that_deepspeed_drops_become_its_default():
    """An "auto" that DeepSpeed drops becomes DeepSpeed's default in writing; its own "auto" stays."""
    zero = {
        "stage": 3,
        "sub_group_size": "auto",
        "overlap_comm": "auto",
        "offload_param": {"device": "cpu", "buffer_size": "auto"},
    }
    resolved = resolve({"zero_optimization": zero, "data_types": {"keep_in_fp32_modules": "auto"}})
    assert resolved["zero_optimization"] == {
        "stage": 3,
        "sub_group_size": 10**9,
        "offload_param": {"device": "cpu", "buffer_size": 10**8},
    }
    assert resolved["data_types"] == {"keep_in_fp32_modules": "auto"}


def test_the_recipes_precision_reaches_the_file():
    """bf16 of the recipe turns the engine's bf16 on, unless the file has an autocast of that type."""
    assert resolve({}, Phase(max_steps=1, bf16=True))["bf16"] == {"enabled": True}
    assert "bf16" not in resolve({}, Phase(max_steps=1, bf16=False))
    assert resolve({"bfloat16": {}}, Phase(max_steps=1, bf16=True))["bfloat16"] == {"enabled": True}
    autocast = resolve({"torch_autocast": {"enabled": "auto", "dtype": "bfloat16"}}, Phase(max_steps=1, bf16=True))
    assert autocast["torch_autocast"]["enabled"] is True
    assert "bf16" not in autocast
    assert "both on" in the_mistake({"fp16": {"enabled": True}}, Phase(max_steps=1, bf16=True))


def test_offload_gets_an_optimizer_block():
    """CPU offload without an optimizer block gets AdamW with the recipe's numbers; else there is none."""
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert resolve(offload, Phase(max_steps=1, weight_decay=0.1))["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1},
    }
    assert "optimizer" not in resolve({"zero_optimization": {"stage": 2}})
    assert "optimizer" not in resolve({**offload, "zero_force_ds_cpu_optimizer": False})


def test_the_files_numbers_win_where_the_recipe_is_silent():
    """settled_numbers gives the file's learning rate and betas, and a value for every field."""
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.9]}}}
    numbers = settled_numbers(config, Phase(max_steps=1, adam_epsilon=1e-6), 1)
    assert numbers.optimizer == Hyperparameters(1e-4, 0.0, (0.8, 0.9), 1e-6)
    assert None not in vars(numbers).values()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_deepspeed_parses_the_resolved_files(path):
    """DeepSpeed's own parser takes every resolved file of ours and reads the same numbers from it."""
    config = pytest.importorskip("deepspeed.runtime.config")
    resolved = resolve(read_engine_file(path), hidden_size=64)
    parsed = config.DeepSpeedConfig(copy.deepcopy(resolved))
    assert parsed.train_batch_size == resolved["train_batch_size"] == 32
    assert parsed.gradient_clipping == 1.0
    assert parsed.zero_optimization_stage == resolved.get("zero_optimization", {}).get("stage", 0)


def test_mistakes_are_found_without_torch_and_fast():
    """Importing the module and checking a file loads no torch or DeepSpeed, and takes under a second of CPU."""
    code = (
        "import sys, time\n"
        "from ds_trainer.engine.engine_file import check_engine_file\n"
        "check_engine_file({'train_bath_size': 8}, None, 1)\n"
        "heavy = {'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "print(time.process_time(), *heavy)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    seconds, *heavy = out.split()
    assert not heavy
    assert float(seconds) < 1
