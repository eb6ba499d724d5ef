"""Which of DeepSpeed's keys have an effect in ds_trainer: refused, honoured beside another key, or honoured.

A key of `REFUSED` can have no effect here, whatever else the file says, so it is an error with what to do instead. A
key of `NEEDS` has none in this file; people share files among stages and machines, so it is named in a warning. Every
other key of `engine_keys.json` is honoured. `docs/engine_files.md` is written from these tables.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ds_trainer.engine.blocks import offloads, zero_stage
from ds_trainer.engine.compression_block import recipe_for
from ds_trainer.engine.keys import flag_at, is_auto, key_table, value_at

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
    "inference": "it is for deepspeed.init_inference; launch/export.py --onnx and examples/serve.py serve a model",
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
    """What must stand in the file beside some keys for these to have an effect."""

    words: str
    holds: Callable[[dict[str, Any]], bool]
    keys: tuple[str, ...]


def _is_16bit(config: dict[str, Any]) -> bool:
    return any(flag_at(config, f"{kind}.enabled") for kind in ("bf16", "bfloat16", "fp16"))


def _is_on_nvme(config: dict[str, Any], what: str) -> bool:
    return value_at(config, f"zero_optimization.offload_{what}.device") == "nvme"


def _under(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


_ZERO = "zero_optimization"
_OPTIMIZER, _PARAM = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
# of one key, the first need that does not hold is told
NEEDS: tuple[Need, ...] = (
    Need(
        f"{_ZERO}.stage 1, 2 or 3",
        lambda config: zero_stage(config) > 0,
        _under(_ZERO, "contiguous_gradients load_from_fp32_weights overlap_comm reduce_bucket_size reduce_scatter"),
    ),
    Need(
        f"{_ZERO}.stage 1 or 2",
        lambda config: zero_stage(config) in (1, 2),
        (
            *("bf16.check_grad_overflow", "bfloat16.check_grad_overflow"),
            *_under(_ZERO, "allgather_bucket_size parameter_alignment round_robin_gradients"),
            *_under(_ZERO, "use_multi_rank_bucket_allreduce"),
        ),
    ),
    Need(f"{_ZERO}.stage 2", lambda config: zero_stage(config) == 2, _under(_ZERO, "ignore_unused_parameters")),
    Need(
        f"{_ZERO}.stage 3",
        lambda config: zero_stage(config) == 3,
        _under(
            _ZERO,
            "enable_sanity_checks leaf_module log_trace_cache_warnings memory_efficient_linear "
            "offload_optimizer.super_offload pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory "
            "stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
            "stage3_model_persistence_threshold stage3_module_granularity_threshold "
            "stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params "
            "sub_group_size zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights "
            "zero_quantized_weights",
        ),
    ),
    Need(
        f"{_ZERO}.stage 1 with bf16, data_types.grad_accum_dtype fp32 and no offload_optimizer",
        lambda config: (
            zero_stage(config) == 1
            and not offloads(config, "optimizer")
            and value_at(config, "data_types.grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")
        ),
        ("bf16.immediate_grad_update", "bfloat16.immediate_grad_update"),
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
    Need(
        f"{_ZERO}.stage 1, 2 or 3",
        lambda config: zero_stage(config) > 0,
        _under("fp16", "consecutive_hysteresis hysteresis"),
    ),
    Need(
        "no torch_autocast beside ZeRO, which sends gradients in the type of autocast",
        lambda config: not (zero_stage(config) and flag_at(config, "torch_autocast.enabled")),
        ("communication_data_type",),
    ),
    Need(
        'gradient_allreduce_op "mean", and reduce_scatter false in zero_optimization.stage 1 and 2; not with 3',
        lambda config: str(value_at(config, "gradient_allreduce_op")).lower() != "sum",
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
        lambda config: _is_on_nvme(config, "optimizer"),
        _under(_OPTIMIZER, "buffer_count fast_init nvme_path pipeline_read pipeline_write"),
    ),
    Need(f"{_PARAM}.device cpu or nvme", lambda config: offloads(config, "param"), (f"{_PARAM}.pin_memory",)),
    Need(
        f"{_PARAM}.device nvme",
        lambda config: _is_on_nvme(config, "param"),
        _under(_PARAM, "buffer_count buffer_size max_in_cpu nvme_path"),
    ),
    Need(
        "an offload with device nvme",
        lambda config: _is_on_nvme(config, "optimizer") or _is_on_nvme(config, "param"),
        ("aio",),
    ),
    Need(
        f"fp16, {_ZERO}.stage 0 and an optimizer block of type Adam or AdamW",
        lambda config: (
            bool(flag_at(config, "fp16.enabled"))
            and zero_stage(config) == 0
            and str(value_at(config, "optimizer.type")).lower() in ("adam", "adamw")
        ),
        ("optimizer.legacy_fusion",),
    ),
    Need(
        '"log_level": "info"; DeepSpeed prints warnings only by default',
        lambda config: str(value_at(config, "log_level")).lower() in ("info", "debug"),
        ("comms_logger.verbose", "dump_state", "steps_per_print", "timers.throughput.synchronized"),
    ),
    Need(f"{_ZERO} true", lambda config: config.get(_ZERO) is True, ("allgather_size",)),
)


def refusals(config: dict[str, Any]) -> Iterator[str]:
    """A mistake for each key of the file, as it was read, that asks for what ds_trainer does not do."""
    for path, name, value in _asked(config, key_table()["keys"]):
        if name == "compression_training":
            yield f"{path} is refused, remove it: {_DELETED}; {recipe_for(value)}"
        elif name in REFUSED:
            yield f"{path} is refused, remove it: {REFUSED[name]}"


def idle_keys(config: dict[str, Any]) -> list[str]:
    """The keys of a resolved config that have no effect in it, each with what it needs."""
    known, idle = key_table()["keys"], {}
    for path, name, value in _asked(config, known):
        lacking = (need.words for need in NEEDS if name in need.keys and not need.holds(config))
        if (words := next(lacking, None)) is not None:
            idle[path] = words
        elif isinstance(value, dict) and "enabled" not in value and name in _switched_on():
            idle[path] = f"{path}.enabled true"
    covered = tuple(f"{path}." for path in idle)
    return [f"{path} (needs {words})" for path, words in idle.items() if not path.startswith(covered)]


def without_refused(block: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The config without refused keys that ask for nothing; DeepSpeed refuses some of them all the same, or acts."""
    return {
        key: without_refused(value, f"{path}{key}.") if isinstance(value, dict) else value
        for key, value in block.items()
        if f"{path}{key}" not in REFUSED
    }


def _switched_on() -> set[str]:
    """The blocks that are off unless they say that they are on."""
    keys = {name: entry.get("keys", {}) for name, entry in key_table()["keys"].items()}
    return {name for name, inner in keys.items() if inner.get("enabled", {}).get("default") is False}


def _asked(
    block: dict[str, Any], known: dict[str, Any], path: str = "", parent: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """The path, the name without aliases, and the value of each key that asks for something, parents first."""
    for key, value in block.items():
        entry = known.get(key, {})
        if _asks(value, entry):
            here, name = f"{path}{key}", f"{parent}{entry.get('alias_of', key)}"
            yield here, name, value
            if isinstance(value, dict):
                yield from _asked(value, entry.get("keys", {}), f"{here}.", f"{name}.")


def _asks(value: Any, entry: dict[str, Any]) -> bool:
    """Whether a value is other than what holds without it: "auto", the default, and a block that says it is off."""
    if is_auto(value) and not entry.get("own_auto"):
        return False
    if isinstance(value, dict):
        if "enabled" in value and not is_auto(value["enabled"]):
            return bool(value["enabled"])
        if entry.get("on_by_presence"):
            return True
        asking = (_asks(inner, entry.get("keys", {}).get(key, {})) for key, inner in value.items())
        return value.get("device") != "none" and any(asking)
    return value is not None and value != entry.get("default", False) and value != []
