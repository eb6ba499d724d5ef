"""Translate a `compression_training` block, which DeepSpeed deleted in September 2026, into a recipe of this library.

Pruning and layer reduction become a phase, quantization becomes a command for the exported model, and everything
without a counterpart is named. The result is a text for the message that refuses the block.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

_GENERAL = "the recipe's techniques prune and distil, and launch/export.py --onnx --quantize int8 quantizes"
_ONE_WAY = "a phase has one method, one density and one start, and prunes heads and neurons, or rows, or single weights"
_SNIP_MOMENTUM = (
    "the criterion snip_momentum, schedule_offset_end and excluded_modules: topK learns movement scores, which are "
    "first-order too, final_warmup is the fraction of the phase after the end, and only the encoder is pruned"
)
_QUANTIZED = "{} in training, or to other than 8 bits: ds_trainer quantizes to int8 after it, activations as they come"


def recipe_for(block: Any) -> str:
    """Return what to write in place of the block: part of a recipe, a command, and what has no counterpart."""
    missing: list[str] = []
    try:
        phase = _phase(block, missing)
        quantized = [kind for kind in ("weight_quantization", "activation_quantization") if _is_on(block.get(kind))]
    except (AttributeError, KeyError, TypeError, ValueError):  # the block is not as DeepSpeed's documentation has it
        return _GENERAL
    parts = [f"a phase of the recipe does the same with\n{json.dumps(phase)}"] if phase else []
    missing += map(_QUANTIZED.format, quantized)
    if quantized:
        parts.append("quantize the exported model by\npython launch/export.py OUTPUT_DIR/model --onnx --quantize int8")
    if missing:
        parts.append("ds_trainer has no counterpart of " + "; ".join(missing))
    return "\nand ".join(parts) or _GENERAL


def _phase(block: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    """Return the phase that reduces layers and prunes; adds to `missing` what it cannot do."""
    phase: dict[str, Any] = {}
    techniques: dict[str, Any] = {}
    if _is_on(block.get("layer_reduction")) and (layers := block["layer_reduction"].get("teacher_layer")):
        phase |= {"start_from": "@model", "student": {"layers": layers}}
        techniques["distill"] = {"teacher": "@model", "alpha_ce": 0.5, "alpha_distil": 0.5}
    elif _is_on(block.get("layer_reduction")):
        missing.append("layer_reduction without teacher_layer: student.layers in the recipe names the layers to copy")
    prune, start = _prune(block, missing)
    if prune:
        techniques["prune"] = prune | {"initial_warmup": 1 if start else 0, "final_warmup": 0.3}
        if {"attention", "feed_forward"} & set(prune["granularity"]):  # whole heads and neurons can be cut out
            phase["shrink"] = True
    if start:
        phase["warmup_steps"] = start
        better = f"if you know the phase's steps, write {start} / steps as initial_warmup and no warmup_steps"
        missing.append(f"schedule_offset {start} in steps without warmup_steps, which warms the rate up too: {better}")
    return phase | ({"techniques": techniques} if techniques else {})


def _is_on(section: dict[str, Any] | None) -> bool:
    return bool(section and section.get("shared_parameters", section).get("enabled"))


def _prune(block: dict[str, Any], missing: list[str]) -> tuple[dict[str, Any], int]:
    """Return the settings of `techniques.prune`, and the step at which pruning starts.

    A phase has one method, density and start, and prunes whole heads and neurons, or rows, or single weights: the
    first group decides, and a group that differs from it is named as missing.
    """
    kinds = [kind for kind in ("head_pruning", "row_pruning", "sparse_pruning") if _is_on(block.get(kind))]
    if _is_on(block.get("channel_pruning")):
        missing.append("channel_pruning, which is for convolutions: heads and neurons are what transformers have")
    sparse = block["sparse_pruning"]["shared_parameters"] if "sparse_pruning" in kinds else {}
    if sparse.get("method") == "snip_momentum":
        missing += [f"{kind} beside snip_momentum: a phase prunes in one way" for kind in kinds if "sparse" not in kind]
        missing.append(_SNIP_MOMENTUM)
        return _blocks(sparse), sparse.get("schedule_offset", 0)
    first, granularity = None, {}
    for kind in kinds:
        shared = block[kind]["shared_parameters"]
        method = "topK" if shared.get("method", "topk" if kind == "head_pruning" else "l1") == "topk" else "magnitude"
        for name, group in block[kind]["different_groups"].items():
            grains = _granularity(f"{kind}.{name}", kind, group, missing)
            unit = "whole" if {"head", "neuron"} & set(grains.values()) else kind
            settings = (method, group["params"].get("dense_ratio", 0.5), shared.get("schedule_offset", 0), unit)
            first = first or (f"{kind}.{name}", settings)
            if settings == first[1]:
                granularity |= grains
            else:
                missing.append(f"{kind}.{name} beside {first[0]}: {_ONE_WAY}")
    if first is None:
        return {}, 0
    method, density, start, _ = first[1]
    return {"pruning_method": method, "granularity": granularity, "final_threshold": density}, start


def _blocks(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of block-wise pruning at one density over all layers, or of 2:4."""
    pattern = shared.get("block_pattern", "4x1")
    if pattern == "2:4":
        return {"pruning_method": "topK", "granularity": "2:4"}
    prune = {"pruning_method": "topK", "granularity": "block", "block_shape": [int(n) for n in pattern.split("x")]}
    return prune | {"final_threshold": shared.get("dense_ratio", 0.1), "global_topk": True}


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
