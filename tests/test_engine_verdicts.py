"""Every key of DeepSpeed's is honoured or refused, and one that has no effect in a file is named."""

import json
import sys
from pathlib import Path

import pytest
from launching import run_python

from ds_trainer.engine_file import Said, check_engine_file, idle_warnings, read_engine_file, resolve_engine_file
from ds_trainer.engine_keys import _all_paths, key_table
from ds_trainer.engine_verdicts import NEEDS, REFUSED, idle_keys

ROOT = Path(__file__).parents[1]
KNOWN = key_table()["keys"]
sys.path.insert(0, str(ROOT / "tests" / "tools"))


def nested(path, value):
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def entry_of(path):
    *parents, last = path.split(".")
    keys = KNOWN
    for parent in parents:
        keys = keys[parent]["keys"]
    return keys[last]


def other_than_default(entry):
    """A value within the entry's limits that is not the default; for a section, one of its keys with such a value."""
    if "keys" in entry:
        key = "enabled" if "enabled" in entry["keys"] else next(iter(entry["keys"]))
        inner = entry["keys"][key]
        return {key: True if key == "enabled" else other_than_default(inner)}
    by_type = {"bool": not entry.get("default", False), "int": 7, "number": 0.5, "str": "x", "list": ["x"]}
    by_type |= {"dict": {"x": 1}, "null": 3}
    enum = [value for value in entry.get("enum", []) if value != entry.get("default")]
    return enum[0] if enum else by_type[entry.get("types", ["str"])[0]]


@pytest.mark.parametrize("path", REFUSED)
def test_a_refused_key_is_one_mistake_with_the_way_out(path):
    """Whatever it asks for is told by its path, with more than "remove it"; DeepSpeed's deleted keys are all here."""
    value = {"x": 1} if path in key_table()["removed"] else other_than_default(entry_of(path))
    mistakes = [m for m in check_engine_file(nested(path, value), Said(), 1) if f"{path} is refused" in m]
    assert len(mistakes) == 1
    assert mistakes[0].startswith(f"{path} is refused, remove it: ")
    assert len(mistakes[0]) > len(path) + 40


def test_no_key_is_forgotten():
    """What DeepSpeed has deleted is refused, and both tables name only keys that DeepSpeed has, or had, once each."""
    removed = set(key_table()["removed"])
    assert removed <= set(REFUSED)
    needed = [key for need in NEEDS for key in need.keys]
    named = {*REFUSED, *needed} - removed
    assert named <= {*_all_paths(KNOWN), "optimizer.params.fp32_optimizer_states"}
    assert not set(REFUSED) & set(needed)


@pytest.mark.parametrize("path", REFUSED)
def test_what_asks_for_nothing_is_dropped(path):
    """A refused key with null, false or a block that is off is no mistake, and DeepSpeed never gets it."""
    values = [None, {"enabled": False, "x": 1}]
    default = None if path in key_table()["removed"] else entry_of(path).get("default")
    for value in [*values, *([] if default is None else [default])]:
        config = nested(path, value)
        mistakes = check_engine_file(config, Said(), 1)
        assert not [mistake for mistake in mistakes if "refused" in mistake]
        if not mistakes:
            resolved = resolve_engine_file(config, Said(), 1, hidden_size=8, total_steps=1, warmup_steps=0)
            for key in path.split("."):
                resolved = resolved.get(key) if isinstance(resolved, dict) else None
            assert resolved is None


@pytest.mark.parametrize("path", ["zero_optimization.zenflow", "checkpoint.writer", "datastates_ckpt"])
def test_a_section_that_is_on_wherever_it_stands_asks(path):
    """DeepSpeed turns these on for an empty object, so that it is refused, too."""
    (mistake,) = check_engine_file(nested(path, {}), Said(), 1)
    assert mistake.startswith(f"{path} is refused")


def test_a_file_for_another_stage_is_named_in_one_line():
    """Stage 3's keys in a file of stage 2, aliases too, an offload's without it, and a block that nobody turned on."""
    zero = {"stage": 2, "stage3_max_live_parameters": 5, "max_reuse_distance": 3, "sub_group_size": 10**9}
    config = {
        "zero_optimization": zero | {"offload_optimizer": {"device": "cpu", "nvme_path": "/disk"}},
        "steps_per_print": 10,
        "flops_profiler": {"profile_step": 3},
        "tensorboard": {"enabled": False, "output_path": "x"},
        "fp16": {"loss_scale_window": 5},
    }
    (line,) = idle_warnings(config, [Said(), Said(fp16=True)], 1, name="my.json")
    assert line == (
        "without effect in my.json: "
        "zero_optimization.stage3_max_live_parameters (needs zero_optimization.stage 3), "
        "zero_optimization.max_reuse_distance (needs zero_optimization.stage 3), "
        "zero_optimization.offload_optimizer.nvme_path (needs zero_optimization.offload_optimizer.device nvme), "
        'steps_per_print (needs "log_level": "info"; DeepSpeed prints warnings only by default), '
        "flops_profiler (needs flops_profiler.enabled true)"
    )
    assert idle_warnings({"zero_optimization": {"stage": 3, "sub_group_size": 5}}, [Said()], 1, name="") == []


@pytest.mark.parametrize("path", sorted({key for need in NEEDS for key in need.keys} - {"zero_optimization"}))
def test_each_condition_can_hold_and_can_fail(path):
    """In an empty file, or one that lacks only this, the key is named; beside what it needs it is not."""
    full = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "super_offload": True}},
        "log_level": "info",
        "bf16": {"enabled": True},
    }
    full["zero_optimization"]["offload_param"] = {"device": "nvme"}
    stage2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    stage1 = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    plain = {"fp16": {"enabled": True}, "optimizer": {"type": "Adam"}}
    spoilt = {"torch_autocast": {"enabled": True}, "gradient_allreduce_op": "sum", "fp16": {"loss_scale": 8}}
    spoilt |= {"zero_optimization": {"stage": 2}}
    value = True if path.startswith("optimizer.params") else other_than_default(entry_of(path))
    told = []
    for config in (full, stage2, stage1, plain, {"zero_optimization": True}, spoilt, {}):
        config = json.loads(json.dumps(config))
        *parents, last = path.split(".")
        block = config
        for parent in parents:
            block = block.setdefault(parent, {}) if isinstance(block, dict) else {}
        if isinstance(block, dict):
            switched = bool(parents) and "enabled" in KNOWN[parents[0]].get("keys", {})
            block |= {last: value} | ({"enabled": True} if switched else {})
            told.append(any(key.startswith(f"{path} (needs") for key in idle_keys(config)))
    assert True in told
    assert False in told


def test_the_docs_say_what_the_code_does():
    """docs/engine_files.md has a row for every key at the top and every verdict below, as the tables have it."""
    from write_engine_docs import paths, table

    text = (ROOT / "docs/engine_files.md").read_text(encoding="utf-8")
    assert text.endswith(f"\n\n{table()}"), "run tests/tools/write_engine_docs.py"
    rows = set(paths())
    assert rows >= {*KNOWN, *REFUSED} | {key for need in NEEDS for key in need.keys}
    assert f"DeepSpeed {key_table()['deepspeed']}." in text


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_have_nothing_without_effect(path):
    """No file of ds_configs/ is warned of."""
    assert idle_warnings(read_engine_file(path), [Said()], 2, name="") == []


def test_the_command_ends_or_warns_before_torch(tiny_recipe, write_json, tmp_path):
    """autotuning ended in a FileNotFoundError in the midst of training; now it is one line, exit code 2, no output."""
    code = (
        "import sys; from ds_trainer.command import run_command, train_command; "
        "code = run_command(train_command, sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    engine = write_json("engine.json", {"autotuning": {"enabled": True}, "aio": {"queue_depth": 32}})
    files = ("--deepspeed_config", engine, "--recipe", write_json("r.json", tiny_recipe))
    done = run_python("-c", code, *files, "--output_dir", str(tmp_path / "out"))
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: autotuning is refused, remove it: a run trains one configuration")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
