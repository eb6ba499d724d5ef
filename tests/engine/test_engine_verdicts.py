"""Every key of DeepSpeed's is honoured or refused, and one that has no effect in a file is named."""

import copy
import json
import sys
from pathlib import Path

import pytest
from support.launching import run_python

from ds_trainer.config.recipe import Phase, parse_recipe
from ds_trainer.engine.engine_file import (
    check_engine_file,
    idle_warnings,
    read_engine_file,
    resolve_engine_file,
)
from ds_trainer.engine.keys import all_paths, key_table
from ds_trainer.engine.verdicts import idle_keys, verdict_table

ROOT = Path(__file__).parents[2]
KNOWN = key_table()["keys"]
REFUSED, NEEDS = verdict_table()["refused"], verdict_table()["needs"]
sys.path.insert(0, str(ROOT / "tests" / "tools"))


def nested(path, value):
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def is_removed(path):
    """Whether DeepSpeed has deleted the key, or the block that it lies in."""
    return not {path, path.partition(".")[0]}.isdisjoint(key_table()["removed"])


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
    """A value other than the default is one mistake, with the path of the key and more than "remove it"."""
    value = {"x": 1} if is_removed(path) else other_than_default(entry_of(path))
    mistakes = [m for m in check_engine_file(nested(path, value), None, 1) if f"{path} is refused" in m]
    assert len(mistakes) == 1
    assert mistakes[0].startswith(f"{path} is refused, remove it: ")
    assert len(mistakes[0]) > len(path) + 40


def test_no_key_is_forgotten():
    """Keys that DeepSpeed has deleted are refused; both tables name only keys that DeepSpeed has, or had, once each."""
    removed = set(key_table()["removed"])
    assert removed <= set(REFUSED)
    needed = [key for need in NEEDS for key in need["keys"]]
    named = {path for path in (*REFUSED, *needed) if not is_removed(path)}
    assert named <= {*all_paths(KNOWN)}
    assert not set(REFUSED) & set(needed)


PRUNED = {"shared_parameters": {"enabled": True, "method": "topk"}, "different_groups": {"g": {"modules": ["key"]}}}
COUNTERPARTS = {
    "head_pruning": ({"attention": "head"}, "topK"),
    "row_pruning": ({"*NAME*": "row"}, "magnitude"),
    "sparse_pruning": ({"*NAME*": "weight"}, "magnitude"),
    "layer_reduction": None,
}


def test_a_compression_block_is_refused_with_its_counterparts():
    """Each part is named with what does the same here, in words that the recipe knows; a part that is off is not."""
    parts = dict.fromkeys(COUNTERPARTS, PRUNED) | {"weight_quantization": {"shared_parameters": {"enabled": False}}}
    general, *mistakes = check_engine_file({"compression_training": parts}, None, 1)
    assert general.startswith("compression_training is refused, remove it: DeepSpeed has deleted it; ")
    for mistake, (part, counterpart) in zip(mistakes, COUNTERPARTS.items(), strict=True):
        assert mistake.startswith(f"compression_training.{part} is refused")
        phase = {"max_steps": 1, "warmup_steps": 1}
        if counterpart is None:
            distill = {"teacher": "@model", "alpha_ce": 0.5, "alpha_distil": 0.5}
            phase |= {"start_from": "@model", "student": {"layers": [0]}, "techniques": {"distill": distill}}
            names = 'start_from "@model"', "student.layers", "techniques.distill", 'teacher "@model"'
        else:
            granularity, method = counterpart
            prune = {"granularity": granularity, "pruning_method": method}
            phase["techniques"] = {"prune": prune | {"final_threshold": 0.5, "initial_warmup": 1}}
            names = json.dumps(granularity), "final_threshold", "initial_warmup 1", "warmup_steps"
        parse_recipe({"phases": [phase]})
        assert [name for name in names if name not in mistake] == []


@pytest.mark.parametrize("path", REFUSED)
def test_a_key_that_requests_nothing_is_dropped(path):
    """A refused key with null, false or a block that is off is no mistake, and DeepSpeed never gets it."""
    values = [None, {"enabled": False, "x": 1}]
    default = None if is_removed(path) else entry_of(path).get("default")
    for value in [*values, *([] if default is None else [default])]:
        config = nested(path, value)
        mistakes = check_engine_file(config, None, 1)
        assert not [mistake for mistake in mistakes if "refused" in mistake]
        if not mistakes:
            resolved = resolve_engine_file(config, None, 1, hidden_size=8, total_steps=1, warmup_steps=0)
            for key in path.split("."):
                resolved = resolved.get(key) if isinstance(resolved, dict) else None
            assert resolved is None


@pytest.mark.parametrize("path", ["zero_optimization.zenflow", "checkpoint.writer", "datastates_ckpt"])
def test_a_section_that_is_on_wherever_it_stands_asks(path):
    """DeepSpeed turns these sections on for an empty object, so that an empty object is refused, too."""
    (mistake,) = check_engine_file(nested(path, {}), None, 1)
    assert mistake.startswith(f"{path} is refused")


def test_a_file_for_another_stage_is_named_in_one_line():
    """Keys of stage 3 in a file of stage 2, also by an alias; keys of an absent offload; a block that is off."""
    zero = {"stage": 2, "stage3_max_live_parameters": 5, "max_reuse_distance": 3, "sub_group_size": 10**9}
    config = {
        "zero_optimization": zero | {"offload_optimizer": {"device": "cpu", "nvme_path": "/disk"}},
        "steps_per_print": 10,
        "flops_profiler": {"profile_step": 3},
        "tensorboard": {"enabled": False, "output_path": "x"},
        "fp16": {"loss_scale_window": 5},
    }
    (line,) = idle_warnings(config, [None, Phase(max_steps=1, fp16=True)], 1, name="my.json")
    assert line == (
        "without effect in my.json: "
        "zero_optimization.stage3_max_live_parameters (needs zero_optimization.stage 3), "
        "zero_optimization.max_reuse_distance (needs zero_optimization.stage 3), "
        "zero_optimization.offload_optimizer.nvme_path (needs zero_optimization.offload_optimizer.device nvme), "
        'steps_per_print (needs "log_level": "info"; DeepSpeed prints warnings only by default), '
        "flops_profiler (needs flops_profiler.enabled true)"
    )
    assert idle_warnings({"zero_optimization": {"stage": 3, "sub_group_size": 5}}, [None], 1, name="") == []


FILES = {
    "empty": {},
    "fp16": {"fp16": {"enabled": True}, "optimizer": {"type": "Adam"}},
    "flag": {"zero_optimization": True},
    "1": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "float32"}, "bf16": {"enabled": True}},
    "1 sums": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}},
    "1 cpu": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "2": {"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": True}, "fp16": {"loss_scale": 8}}
    | {"gradient_allreduce_op": "sum"},
    "2 bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "3 cpu": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "3": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "super_offload": True},
            "offload_param": {"device": "nvme"},
        },
        "log_level": "info",
        "bf16": {"enabled": True},
    },
}
# the files of FILES in which each key, added to them, has no effect: by section
IDLE_KEYS = (
    (
        "empty, fp16, flag, 1, 1 sums, 1 cpu, 2, 2 bf16, 3 cpu",
        "",
        "aio comms_logger.verbose dump_state steps_per_print timers.throughput.synchronized",
    ),
    (
        "empty, fp16, 1, 1 sums, 1 cpu, 2, 2 bf16, 3 cpu, 3",
        "",
        "allgather_size",
    ),
    (
        "empty, fp16, 3 cpu, 3",
        "",
        "bf16.check_grad_overflow bfloat16.check_grad_overflow",
    ),
    (
        "empty, fp16, 3 cpu, 3",
        "zero_optimization.",
        "allgather_bucket_size parameter_alignment round_robin_gradients use_multi_rank_bucket_allreduce",
    ),
    (
        "empty, fp16, flag, 1 sums, 1 cpu, 2, 2 bf16, 3 cpu, 3",
        "",
        "bf16.immediate_grad_update bfloat16.immediate_grad_update",
    ),
    (
        "2",
        "",
        "communication_data_type data_types.grad_accum_dtype fp16.initial_scale_power fp16.loss_scale_window "
        "fp16.min_loss_scale gradient_predivide_factor prescale_gradients",
    ),
    (
        "empty, flag, 1 sums, 1 cpu, 2, 3 cpu",
        "",
        "data_types.buffer_dtype data_types.keep_in_fp32_modules",
    ),
    (
        "empty, fp16, 2",
        "",
        "fp16.consecutive_hysteresis fp16.hysteresis",
    ),
    (
        "empty, flag, 1, 1 sums, 1 cpu, 2, 2 bf16, 3 cpu, 3",
        "",
        "optimizer.legacy_fusion",
    ),
    (
        "empty, fp16, flag, 1, 1 sums, 2, 2 bf16, 3 cpu",
        "",
        "optimizer.params.fp32_optimizer_states zero_force_ds_cpu_optimizer",
    ),
    (
        "empty, fp16",
        "zero_optimization.",
        "contiguous_gradients load_from_fp32_weights overlap_comm reduce_bucket_size reduce_scatter",
    ),
    (
        "empty, fp16, 1, 1 sums, 1 cpu, 2, 2 bf16",
        "zero_optimization.",
        "enable_sanity_checks leaf_module log_trace_cache_warnings memory_efficient_linear "
        "offload_optimizer.super_offload offload_param.pin_memory pipeline_loading_checkpoint "
        "save_muon_momentum_buffer_in_memory stage3_allgather_sequential "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size "
        "stage3_use_all_reduce_for_fetch_params sub_group_size zero_hpz_partition_size "
        "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights",
    ),
    (
        "empty, fp16, 1, 1 sums, 1 cpu, 3 cpu, 3",
        "zero_optimization.",
        "ignore_unused_parameters",
    ),
    (
        "empty, fp16, 1, 1 sums, 1 cpu, 2, 2 bf16, 3 cpu",
        "zero_optimization.",
        "offload_optimizer.buffer_count offload_optimizer.cpuadam_cores_perc offload_optimizer.fast_init "
        "offload_optimizer.nvme_path offload_optimizer.pipeline_read offload_optimizer.pipeline_write "
        "offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu "
        "offload_param.nvme_path",
    ),
    (
        "empty, fp16, 1, 1 sums, 2, 2 bf16, 3 cpu",
        "zero_optimization.",
        "offload_optimizer.pin_memory",
    ),
)
IDLE_IN_FILES = {f"{section}{name}": files for files, section, names in IDLE_KEYS for name in names.split()}


@pytest.mark.parametrize("path", sorted({*IDLE_IN_FILES, *(key for need in NEEDS for key in need["keys"])}))
def test_each_key_is_named_in_the_files_that_lack_its_condition(path):
    """Added to FILES with another value than the default, a key is named in those of IDLE_KEYS and in no other."""
    *parents, last = path.split(".")
    idle_in = []
    for name, config in copy.deepcopy(FILES).items():
        block = config
        for parent in parents:
            block = block.setdefault(parent, {}) if isinstance(block, dict) else None
        if isinstance(block, dict):
            switched = bool(parents) and "enabled" in KNOWN[parents[0]].get("keys", {})
            block |= {last: other_than_default(entry_of(path))} | ({"enabled": True} if switched else {})
            idle_in += [name] * any(key.startswith(f"{path} (needs") for key in idle_keys(config))
    assert ", ".join(idle_in) == IDLE_IN_FILES[path]


def test_the_default_of_the_offloaded_moments_is_not_idle():
    """DeepSpeed keeps Adam's moments in fp32 unless it is asked not to."""
    assert idle_keys({"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": True}}}) == []


def test_the_docs_say_what_the_code_does():
    """docs/engine_files.md has a row for every key at the top and every verdict below, as the tables have it."""
    from write_engine_docs import paths, table

    text = (ROOT / "docs/engine_files.md").read_text(encoding="utf-8")
    assert text.endswith(f"\n\n{table()}"), "run tests/tools/write_engine_docs.py"
    rows = set(paths())
    assert rows >= {*KNOWN, *REFUSED} | {key for need in NEEDS for key in need["keys"]}
    assert f"DeepSpeed {key_table()['deepspeed']}." in text


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_have_nothing_without_effect(path):
    """No file of ds_configs/ causes a warning."""
    assert idle_warnings(read_engine_file(path), [None], 2, name="") == []


def test_the_command_ends_or_warns_before_torch(tiny_recipe, write_json, tmp_path):
    """An autotuning block, with which DeepSpeed ends a training midway, is one line and exit code 2, without output."""
    code = (
        "import sys; from ds_trainer.cli.command import run_command; from ds_trainer.cli.train import train_command; "
        "code = run_command(train_command, sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    engine = write_json("engine.json", {"autotuning": {"enabled": True}, "aio": {"queue_depth": 32}})
    files = ("--deepspeed_config", engine, "--recipe", write_json("r.json", tiny_recipe))
    done = run_python("-c", code, *files, "--output_dir", str(tmp_path / "out"))
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: autotuning is refused, remove it: a run trains one configuration")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [{"deepcompile": True}, {"disable": False, "backend": "inductor"}])
def test_a_request_to_compile_is_refused_with_what_it_would_gain(value):
    """In the forms that public files have; a section that requests nothing is let pass."""
    (told, *_) = check_engine_file({"compile": value}, None, 1)
    assert told.startswith("compile is refused, remove it: ")
    assert "took minutes for a gain of 1% a step" in told
    assert check_engine_file({"compile": {"deepcompile": False}}, None, 1) == []
