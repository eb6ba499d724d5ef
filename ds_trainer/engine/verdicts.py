"""Which of DeepSpeed's keys have an effect in ds_trainer: refused, honoured with another key beside it, or honoured.

A key of `REFUSED` cannot have an effect in ds_trainer, or would break a run: it is an error that says what to do
instead. A key of `NEEDS` has no effect in some files: since one file often serves several stages and machines, it is
named in a warning. Every other key of `keys.json` is honoured. `tests/tools/write_engine_docs.py` writes the table of
`docs/engine_files.md` from both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ds_trainer.engine.compression_block import recipe_for
from ds_trainer.engine.keys import flag_at, is_auto, key_table, offloads, value_at, zero_stage

_DELETED = "DeepSpeed has deleted it"
_ONE_RANK = "every rank of ds_trainer holds the whole model, or its ZeRO share, and has its own data"
_NO_CONTEXT = "it acts on models built inside deepspeed.zero.Init, and ds_trainer builds none there"
_NO_LOADER = "ds_trainer orders and batches the data itself"

REFUSED: dict[str, str] = {
    "activation_checkpointing": "it sets up deepspeed.checkpointing, which no model of transformers calls; to save "
    "memory, write a smaller train_micro_batch_size_per_gpu and more gradient_accumulation_steps",
    "aio.thread_count": "DeepSpeed has not read it since 0.16; write aio.intra_op_parallelism",
    "amp": f"{_DELETED}; write bf16, fp16 or torch_autocast",
    "autotuning": "a run trains one configuration, and this block would have DeepSpeed end it after a few steps; "
    "start one run per value, e.g. with --set train_micro_batch_size_per_gpu=8",
    "checkpoint.load_universal": "--resume finds out by itself whether a checkpoint must be converted",
    "checkpoint.parallel_write": "it is for pipeline parallelism, which ds_trainer does not do",
    "checkpoint.use_node_local_storage": "a checkpoint of ds_trainer is one folder, which all hosts share",
    "checkpoint.writer": "ds_trainer writes checkpoints with torch.save, and reads each back before it counts",
    "compile": "it takes effect in engine.compile(), which ds_trainer does not call",
    "compression_training": f"{_DELETED}; a recipe says the same, and the refusal prints it",
    "curriculum_learning": f"{_DELETED}, and {_NO_LOADER}",
    "data_efficiency": f"it acts through DeepSpeed's data loader and layer wrappers, and {_NO_LOADER}",
    "data_parallel_size": "it is the number of ranks, which the launcher says, e.g. deepspeed --num_gpus",
    "dataloader_drop_last": f"it is for DeepSpeed's data loader, and {_NO_LOADER}",
    "datastates_ckpt": "DeepSpeed falls back to torch.save where its engine is missing, and ds_trainer reads a "
    "checkpoint back before it counts",
    "disable_allgather": "DeepSpeed reads it and does nothing with it",
    "eigenvalue": f"{_DELETED}, with the quantization that it served; launch/export.py --onnx --quantize int8 is left",
    "elasticity": f"{_DELETED}; write the batch sizes; --resume goes on with another number of ranks",
    "expert_parallel": f"{_ONE_RANK}, experts included",
    "fp16.auto_cast": "it casts positional inputs, and ds_trainer passes them by keyword; fp16.enabled casts the model",
    "graph_harvesting": _DELETED,
    "hybrid_engine": "it is for generation in the midst of training, which ds_trainer does not do",
    "inference": "it is for deepspeed.init_inference; launch/export.py --onnx and launch/serve.py serve a model",
    "managed_gradient_accumulation": "ds_trainer leaves the accumulation to DeepSpeed",
    "nebula": f"{_DELETED}; the recipe's save_steps writes checkpoints",
    "pipeline": "it is for a PipelineModule, and ds_trainer trains models of transformers; ZeRO stage 3 splits those",
    "progressive_layer_drop": f"{_DELETED}; student.layers in the recipe starts from fewer layers",
    "quantize_training": f"{_DELETED}; train, then quantize with launch/export.py --onnx --quantize int8",
    "seq_parallel_communication_data_type": "it is for sequence parallelism; write communication_data_type",
    "sequence_parallel_size": _ONE_RANK,
    "sparse_attention": f"{_DELETED}; take a model with sparse attention of its own, e.g. ModernBERT",
    "sparse_gradients": f"{_DELETED}; the gradients of embeddings are reduced dense",
    "tensor_parallel": f"{_ONE_RANK}; ZeRO stage 3 splits models",
    "use_data_before_expert_parallelism": f"{_ONE_RANK}, experts included",
    "weight_quantization": "it is for deepspeed.init_inference and zero.Init; quantize with launch/export.py --onnx "
    "--quantize int8",
    "zero_optimization.allgather_partitions": "DeepSpeed reads it and does nothing with it",
    "zero_optimization.cpu_offload_use_pin_memory": "DeepSpeed reads it and does nothing with it; write pin_memory in "
    "offload_optimizer or offload_param",
    "zero_optimization.elastic_checkpoint": "--resume goes on with another number of ranks without it",
    "zero_optimization.legacy_stage1": "it is no longer in DeepSpeed",
    "zero_optimization.mics_hierarchical_params_gather": f"{_DELETED}; write zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": f"{_DELETED}; write zero_hpz_partition_size",
    "zero_optimization.override_module_apply": _NO_CONTEXT,
    "zero_optimization.zenflow": "it takes several steps for one that the engine counts, by which ds_trainer schedules "
    "and saves, and a resumed run is another one",
    "zero_optimization.zeropp_loco_param": f"{_DELETED}; zero_quantized_gradients works without it",
}


class Need(NamedTuple):
    """A condition that a file must meet for some keys to have an effect."""

    words: str
    holds: Callable[[Mapping[str, Any]], bool]
    keys: tuple[str, ...]


_ZERO = "zero_optimization"
_OPTIMIZER, _PARAM = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"


def _under(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _is_16bit(config: Mapping[str, Any]) -> bool:
    return any(flag_at(config, f"{kind}.enabled") for kind in ("bf16", "bfloat16", "fp16"))


def _is(path: str, *values: str) -> Callable[[Mapping[str, Any]], bool]:
    """Test that the text at a path is one of these, in any case."""
    return lambda config: str(value_at(config, path)).lower() in values


def _updates_at_once(config: Mapping[str, Any]) -> bool:
    """Whether stage 1 keeps gradients in fp32 on the device, by DeepSpeed's BF16_Optimizer."""
    in_fp32 = _is("data_types.grad_accum_dtype", "fp32", "float32", "float", "torch.float32")
    return zero_stage(config) == 1 and not offloads(config, "optimizer") and in_fp32(config)


def _is_fused_fp16_adam(config: Mapping[str, Any]) -> bool:
    is_adam = _is("optimizer.type", "adam", "adamw")
    return bool(flag_at(config, "fp16.enabled")) and zero_stage(config) == 0 and is_adam(config)


_STAGES_1_TO_3 = (f"{_ZERO}.stage 1, 2 or 3", lambda config: zero_stage(config) > 0)
_STAGES_1_AND_2_KEYS = """
    allgather_bucket_size parameter_alignment round_robin_gradients use_multi_rank_bucket_allreduce
"""
_STAGE_3_KEYS = """
    enable_sanity_checks leaf_module log_trace_cache_warnings memory_efficient_linear offload_optimizer.super_offload
    pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
    sub_group_size zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights
    zero_quantized_weights
"""
# where two conditions for one key do not hold, the warning names the first
NEEDS: tuple[Need, ...] = (
    Need(
        *_STAGES_1_TO_3,
        _under(_ZERO, "contiguous_gradients load_from_fp32_weights overlap_comm reduce_bucket_size reduce_scatter"),
    ),
    Need(
        f"{_ZERO}.stage 1 or 2",
        lambda config: zero_stage(config) in (1, 2),
        ("bf16.check_grad_overflow", *_under(_ZERO, _STAGES_1_AND_2_KEYS)),
    ),
    Need(f"{_ZERO}.stage 2", lambda config: zero_stage(config) == 2, _under(_ZERO, "ignore_unused_parameters")),
    Need(f"{_ZERO}.stage 3", lambda config: zero_stage(config) == 3, _under(_ZERO, _STAGE_3_KEYS)),
    Need(
        f"{_ZERO}.stage 1 with bf16, data_types.grad_accum_dtype fp32 and no offload_optimizer",
        _updates_at_once,
        ("bf16.immediate_grad_update",),
    ),
    Need(
        f"bf16 or fp16 in {_ZERO}.stage 2 (other stages need nothing)",
        lambda config: zero_stage(config) != 2 or _is_16bit(config),
        ("data_types.grad_accum_dtype",),
    ),
    Need("bf16 or fp16", _is_16bit, _under("data_types", "buffer_dtype keep_in_fp32_modules")),
    Need(
        "a dynamic loss scale, fp16.loss_scale 0",
        lambda config: not value_at(config, "fp16.loss_scale"),
        _under("fp16", "consecutive_hysteresis hysteresis initial_scale_power loss_scale_window min_loss_scale"),
    ),
    Need(*_STAGES_1_TO_3, _under("fp16", "consecutive_hysteresis hysteresis")),
    Need(
        "no torch_autocast beside ZeRO, which sends gradients in the type of autocast",
        lambda config: not (zero_stage(config) and flag_at(config, "torch_autocast.enabled")),
        ("communication_data_type",),
    ),
    Need(
        f'gradient_allreduce_op "mean", and reduce_scatter false in {_ZERO}.stage 1 and 2; not with 3',
        lambda config: not _is("gradient_allreduce_op", "sum")(config),
        ("gradient_predivide_factor", "prescale_gradients"),
    ),
    Need(
        f"{_OPTIMIZER}.device cpu or nvme",
        lambda config: offloads(config, "optimizer"),
        ("optimizer.params.fp32_optimizer_states", "zero_force_ds_cpu_optimizer", f"{_OPTIMIZER}.pin_memory"),
    ),
    Need(
        f"{_OPTIMIZER}.super_offload",
        lambda config: bool(flag_at(config, f"{_OPTIMIZER}.super_offload")),
        (f"{_OPTIMIZER}.cpuadam_cores_perc",),
    ),
    Need(
        f"{_OPTIMIZER}.device nvme",
        _is(f"{_OPTIMIZER}.device", "nvme"),
        _under(_OPTIMIZER, "buffer_count fast_init nvme_path pipeline_read pipeline_write"),
    ),
    Need(f"{_PARAM}.device cpu or nvme", lambda config: offloads(config, "param"), (f"{_PARAM}.pin_memory",)),
    Need(
        f"{_PARAM}.device nvme",
        _is(f"{_PARAM}.device", "nvme"),
        _under(_PARAM, "buffer_count buffer_size max_in_cpu nvme_path"),
    ),
    Need(
        "an offload with device nvme",
        lambda config: any(_is(f"{part}.device", "nvme")(config) for part in (_OPTIMIZER, _PARAM)),
        ("aio",),
    ),
    Need(
        f"fp16, {_ZERO}.stage 0 and an optimizer block of type Adam or AdamW",
        _is_fused_fp16_adam,
        ("optimizer.legacy_fusion",),
    ),
    Need(
        '"log_level": "info"; DeepSpeed prints warnings only by default',
        _is("log_level", "info", "debug"),
        ("comms_logger.verbose", "dump_state", "steps_per_print", "timers.throughput.synchronized"),
    ),
    Need(f"{_ZERO} true", lambda config: config.get(_ZERO) is True, ("allgather_size",)),
)


def refusals(config: dict[str, Any]) -> Iterator[str]:
    """Report each refused key that requests something, in a file as it was read."""
    for path, name, value in _requests(config, key_table()["keys"]):
        if name in REFUSED:
            instead = f"{_DELETED}; {recipe_for(value)}" if name == "compression_training" else REFUSED[name]
            yield f"{path} is refused, remove it: {instead}"


def idle_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys of a resolved config that have no effect in it, each with what it needs."""
    known, idle = key_table()["keys"], {}
    for path, name, value in _requests(config, known):
        missing = (need.words for need in NEEDS if name in need.keys and not need.holds(config))
        if (words := next(missing, None)) is not None:
            idle[path] = words
        elif isinstance(value, dict) and "enabled" not in value and _is_off_by_default(known.get(name, {})):
            idle[path] = f"{path}.enabled true"
    sections = tuple(f"{path}." for path in idle)
    return [f"{path} (needs {words})" for path, words in idle.items() if not path.startswith(sections)]


def without_refused(section: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the config without refused keys that request nothing: DeepSpeed refuses some of them, or acts on them."""
    return {
        key: without_refused(value, f"{path}{key}.") if isinstance(value, dict) else value
        for key, value in section.items()
        if f"{path}{key}" not in REFUSED
    }


def _is_off_by_default(entry: dict[str, Any]) -> bool:
    return entry.get("keys", {}).get("enabled", {}).get("default") is False


def _requests(
    section: dict[str, Any], known: dict[str, Any], path: str = "", parent: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name without aliases, and value of each key that requests something, sections before their keys."""
    for key, value in section.items():
        entry = known.get(key, {})
        if _requests_something(value, entry):
            here, name = f"{path}{key}", f"{parent}{entry.get('alias_of', key)}"
            yield here, name, value
            if isinstance(value, dict):
                yield from _requests(value, entry.get("keys", {}), f"{here}.", f"{name}.")


def _requests_something(value: Any, entry: dict[str, Any]) -> bool:
    """Whether a value differs from what holds without the key: not for "auto", the default, or a section turned off."""
    if is_auto(value) and not entry.get("own_auto"):
        return False
    if isinstance(value, dict):
        if "enabled" in value and not is_auto(value["enabled"]):
            return bool(value["enabled"])
        if entry.get("on_by_presence"):
            return True
        inner = (_requests_something(item, entry.get("keys", {}).get(key, {})) for key, item in value.items())
        return value.get("device") != "none" and any(inner)
    return value is not None and value != entry.get("default", False) and value != []
