"""Translate a `compression_training` block, which DeepSpeed deleted in September 2026, into a recipe of this library.

Pruning and layer reduction become a phase, quantization becomes a command for the exported model, and everything
without a counterpart is named. The result is a text for the message that refuses the block.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

_PRUNERS = ("head_pruning", "row_pruning", "sparse_pruning")
_EXPORT = "python launch/export.py OUTPUT_DIR/model --onnx --quantize int8"
_DISTILL = {"teacher": "@model", "alpha_ce": 0.5, "alpha_distil": 0.5}


def recipe_for(block: Any) -> str:
    """Return what to write in place of the block: part of a recipe, a command, and what has no counterpart."""
    try:
        text = _translation(block)
    except (AttributeError, KeyError, TypeError, ValueError):
        text = ""  # the block is not as DeepSpeed's documentation has it
    return text or "the recipe's techniques prune and distil, and launch/export.py --onnx --quantize int8 quantizes"


def _translation(block: dict[str, Any]) -> str:
    missing: list[str] = []
    phase: dict[str, Any] = {}
    techniques: dict[str, Any] = {}
    if layers := _teacher_layers(block.get("layer_reduction") or {}, missing):
        phase |= {"start_from": "@model", "student": {"layers": layers}}
        techniques["distill"] = _DISTILL
    prune, start = _prune(block, missing)
    if prune:
        techniques["prune"] = prune | {"initial_warmup": 1 if start else 0, "final_warmup": 0.3}
        if {"attention", "feed_forward"} & set(prune["granularity"]):
            phase["shrink"] = True
    if start:
        phase["warmup_steps"] = start
        missing.append(
            f"schedule_offset {start} in steps without warmup_steps, which also warms the learning rate up: where the "
            f"phase's steps are known, leave warmup_steps out and write {start} / steps as initial_warmup"
        )
    if techniques:
        phase["techniques"] = techniques
    parts = [f"a phase of the recipe does the same with\n{json.dumps(phase)}"] if phase else []
    if _is_quantized(block, missing):
        parts.append(f"the exported model is quantized by\n{_EXPORT}")
    if missing:
        parts.append("ds_trainer has no counterpart of " + "; ".join(missing))
    return "\nand ".join(parts)


def _is_on(section: dict[str, Any] | None) -> bool:
    return bool(section and section.get("shared_parameters", section).get("enabled"))


def _teacher_layers(reduction: dict[str, Any], missing: list[str]) -> list[int]:
    """Return the layers that `layer_reduction` copies, by its numbers or by the names of the modules."""
    if not _is_on(reduction):
        return []
    ends = [name.rpartition(".")[2] for name in reduction.get("other_module_name", [])]
    layers = reduction.get("teacher_layer") or [int(end) for end in ends if end.isdigit()]
    if not layers:
        missing.append("layer_reduction without teacher_layer: student.layers in the recipe names the layers to copy")
    return layers


def _prune(block: dict[str, Any], missing: list[str]) -> tuple[dict[str, Any], int]:
    """Return the settings of `techniques.prune`, and the step at which pruning starts.

    A phase has one method, density and start, and prunes whole heads and neurons, or rows, or single weights: the
    first group decides, and a group that differs from it is named as missing.
    """
    kinds = [kind for kind in _PRUNERS if _is_on(block.get(kind))]
    if _is_on(block.get("channel_pruning")):
        missing.append("channel_pruning, which is for convolutions: heads and neurons are what transformers have")
    sparse = block["sparse_pruning"]["shared_parameters"] if "sparse_pruning" in kinds else {}
    if sparse.get("method") == "snip_momentum":
        missing += [f"{kind} beside snip_momentum: a phase prunes in one way" for kind in kinds if "sparse" not in kind]
        return _snip_momentum(sparse, missing), sparse.get("schedule_offset", 0)
    decided: list[Any] = []
    granularity: dict[str, str] = {}
    for kind in kinds:
        shared = block[kind]["shared_parameters"]
        method = shared.get("method", "topk" if kind == "head_pruning" else "l1")
        for name, group in block[kind]["different_groups"].items():
            grains = _granularity(f"{kind}.{name}", kind, group, missing)
            density, start = group["params"].get("dense_ratio", 0.5), shared.get("schedule_offset", 0)
            unit = "whole" if {"head", "neuron"} & set(grains.values()) else kind
            decided = decided or [f"{kind}.{name}", method, density, start, unit]
            if decided[1:] == [method, density, start, unit]:
                granularity |= grains
            else:
                missing.append(
                    f"{kind}.{name} beside {decided[0]}: a phase has one pruning_method, one final_threshold and one "
                    f"start, and prunes whole heads and neurons, or rows, or single weights"
                )
    if not granularity:
        return {}, 0
    method = "topK" if decided[1] == "topk" else "magnitude"
    return {"pruning_method": method, "granularity": granularity, "final_threshold": decided[2]}, decided[3]


def _granularity(path: str, kind: str, group: dict[str, Any], missing: list[str]) -> dict[str, str]:
    """Return the pruning granularity by block, or by name pattern, for one group."""
    modules = group.get("modules", ["*"])
    if kind == "head_pruning" or group.get("related_modules"):
        if any(re.search(r"\d|\\d", module) for module in modules):
            missing.append(f"{path} on {json.dumps(modules)} alone: heads and neurons are pruned in every layer")
        return {"attention": "head"} if kind == "head_pruning" else {"feed_forward": "neuron"}
    return dict.fromkeys(_patterns(path, modules, missing), "row" if kind == "row_pruning" else "weight")


def _patterns(path: str, modules: list[str], missing: list[str]) -> Iterator[str]:
    """Yield a name pattern with `*` for each regular expression, which DeepSpeed searched anywhere in a name."""
    for module in modules:
        body = re.sub(r"(\\[wd]|\[0-9\]|\.)[+*]|\\[wd]|\[0-9\]", "*", module).replace("\\.", ".")
        if re.search(r"[^\w.*-]|\.\.", body):
            missing.append(f"{path} on {json.dumps(module)}: write name patterns with * for this regular expression")
        else:
            yield re.sub(r"\*+", "*", f"*{body}*")


def _snip_momentum(shared: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    """Translate block-wise pruning at one density over all layers."""
    missing.append("the criterion snip_momentum: topK learns movement scores, which are first-order too")
    if end := shared.get("schedule_offset_end"):
        missing.append(f"schedule_offset_end {end}: final_warmup is the fraction of the phase after it")
    if shared.get("excluded_modules"):
        missing.append("excluded_modules: only linear layers of the encoder are pruned, or those that modules names")
    pattern = shared.get("block_pattern", "4x1")
    if pattern == "2:4":
        return {"pruning_method": "topK", "granularity": "2:4"}
    blocks = {"granularity": "block", "block_shape": [int(size) for size in pattern.split("x")]}
    density = {"final_threshold": shared.get("dense_ratio", 0.1), "global_topk": True}
    return {"pruning_method": "topK", **blocks, **density}


def _is_quantized(block: dict[str, Any], missing: list[str]) -> bool:
    """Whether the block quantizes; names what int8 after the training does not do."""
    kinds = [kind for kind in ("weight_quantization", "activation_quantization") if _is_on(block.get(kind))]
    for kind in kinds:
        for name, group in block[kind].get("different_groups", {}).items():
            bits = group["params"].get("target_bits", group["params"].get("bits", 8))
            if bits != 8:
                missing.append(f"{kind}.{name} with {bits} bits: only int8 is supported")
        missing.append(f"{kind} in training: ds_trainer quantizes after it, weights once and activations as they come")
    return bool(kinds)
