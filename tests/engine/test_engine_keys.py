"""The table of DeepSpeed's keys: files that users have pass, and every other key is named."""

import copy
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_files import DEEPSPEED, HUGGING_FACE

from ds_trainer.engine.engine_file import check_engine_file, resolve_engine_file
from ds_trainer.engine.keys import all_paths, key_table

ROOT = Path(__file__).parents[2]
NOTHING = None


@pytest.mark.parametrize("config", [HUGGING_FACE, DEEPSPEED], ids=["hugging_face", "deepspeed"])
def test_files_that_users_have_are_not_refused(config):
    """The files of Hugging Face's and DeepSpeed's documentation have no mistake; checking changes nothing."""
    before = copy.deepcopy(config)
    assert check_engine_file(config, NOTHING, 2) == []
    resolve_engine_file(config, NOTHING, 2, hidden_size=8, total_steps=None, warmup_steps=None)
    assert config == before


def test_every_known_key_is_accepted():
    """No key of the table is refused as unknown, at any level, and defaults are within their own types."""

    def filled(keys):
        return {key: filled(entry["keys"]) if "keys" in entry else entry.get("default") for key, entry in keys.items()}

    mistakes = check_engine_file(filled(key_table()["keys"]), NOTHING, 1)
    assert not [mistake for mistake in mistakes if "not a key" in mistake]
    assert (
        check_engine_file(
            {
                "zero_optimization": {
                    key: entry["default"]
                    for key, entry in key_table()["keys"]["zero_optimization"]["keys"].items()
                    if "default" in entry and "alias_of" not in entry and "deprecated" not in entry
                }
            },
            NOTHING,
            1,
        )
        == []
    )


@pytest.mark.parametrize(
    ("config", "path", "nearest"),
    [
        ({"train_bath_size": 8}, "train_bath_size", "train_batch_size"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_sise": 1}},
            "zero_optimization.reduce_bucket_sise",
            "reduce_bucket_size",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}},
            "zero_optimization.offload_param.devise",
            "device",
        ),
        (
            {"stage3_max_reuse_distance": 1},
            "stage3_max_reuse_distance",
            "zero_optimization.stage3_max_reuse_distance",
        ),
        ({"timers": {"throughput": {"enable": True}}}, "timers.throughput.enable", "enabled"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}},
            "optimizer.params.weigth_decay",
            "weight_decay",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
            "scheduler.params.warmup_steps",
            "warmup_num_steps",
        ),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(config, path, nearest):
    """An unknown key at any level is reported with its dotted path and the key that was meant."""
    (mistake,) = check_engine_file(config, NOTHING, 1)
    assert mistake.startswith(f"{path} is not a key")
    assert nearest in mistake


def test_items_of_lists_are_checked():
    """A list of module names with a number in it is reported with the place of the number."""
    (mistake,) = check_engine_file({"torch_autocast": {"lower_precision_safe_modules": ["a", 1]}}, NOTHING, 1)
    assert mistake.startswith("torch_autocast.lower_precision_safe_modules[1] is 1: write text")


def test_junk_never_raises():
    """Any JSON value at any known key is reported or resolved, and never raises."""
    junk = [None, True, 0, 1, -1, 2.5, 1e9, "auto", "x", [], [1, "x"], {}, {"a": 1}, {"enabled": "auto"}]
    for path in all_paths(key_table()["keys"]):
        for value in junk:
            *parents, last = path.split(".")
            config = inner = {}
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
            mistakes = check_engine_file(config, NOTHING, 1)
            assert all(isinstance(mistake, str) for mistake in mistakes)
            if not mistakes:
                resolve_engine_file(config, NOTHING, 1, hidden_size=8, total_steps=1, warmup_steps=0)


def test_the_table_is_what_deepspeed_says():
    """Regenerating keys.json from the installed DeepSpeed and torch gives the committed file."""
    for package in ("deepspeed", "torch"):
        if importlib.metadata.version(package).split("+")[0] != key_table()[package]:
            pytest.skip(f"another {package} than the table's is installed")
    script = ROOT / "tests" / "tools" / "dump_engine_keys.py"
    made = subprocess.run([sys.executable, script, "--print"], capture_output=True, text=True, check=True).stdout
    text = made[made.index("\n{") + 1 :] if not made.startswith("{") else made
    assert json.loads(text) == key_table()


@pytest.mark.parametrize("number", [10**400, -(10**400), float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["train_batch_size", "gradient_clipping", "steps_per_print"])
def test_numbers_beyond_every_float_are_mistakes(key, number):
    """A number beyond every float is a mistake that names its key: whole numbers in JSON have no limit."""
    mistakes = check_engine_file({key: number}, NOTHING, 1)
    assert [mistake for mistake in mistakes if key in mistake]
