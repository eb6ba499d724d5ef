"""Translate a `compression_training` block, which DeepSpeed deleted in September 2026, into this library's recipe.

What pruning, layer reduction and quantization of that block have as a counterpart becomes part of a phase, and a
command for the exported model; what has none is named. Reads only; never fails on a block that is itself wrong.
"""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ds_trainer.files.messages import shown

_EXPORT = "python launch/export.py OUTPUT_DIR/model --onnx --quantize int8"
_PRUNERS = ("head_pruning", "row_pruning", "sparse_pruning")
_BLOCKS = {
    "attention": ["self.query", "self.key", "self.value", "output.dense", "q_lin", "k_lin", "v_lin", "out_lin"],
    "feed_forward": ["intermediate.dense", "output.dense", "ffn.lin1", "ffn.lin2"],
}
_MATRICES = {
    f"{encoder}.layer.{number}.{'attention.' if kind == 'attention' else ''}{name}": kind
    for encoder in ("bert.encoder", "roberta.encoder", "electra.encoder", "deberta.encoder", "distilbert.transformer")
    for number in range(12)
    for kind, names in _BLOCKS.items()
    for name in names
}
"""The kind of block by a linear layer's name, of the families whose blocks are known: to try patterns on."""


class _Group(NamedTuple):
    """What one group of a pruning block asks for, in this library's words."""

    path: str
    granularity: dict[str, str]
    method: str
    density: float
    start: int


def recipe_for(block: Any) -> str:
    """What to write in a recipe in the place of the block, and what of it cannot be written."""
    missing: list[str] = []
    phase = {**_reduced(block, missing), **_pruned(block, missing)}
    if techniques := {**phase.pop("distilled", {}), **phase.pop("pruned", {})}:
        phase["techniques"] = techniques
    commands = [*_quantized(block, missing)]
    told = []
    if phase:
        told.append(f"a phase of the recipe does the same with\n{json.dumps(phase)}")
    if commands:
        told.append(f"the exported model is quantized by\n{commands[0]}")
    if missing:
        told.append("ds_trainer has no counterpart of " + "; ".join(missing))
    return "\nand ".join(told) or "the recipe's techniques prune and distil, and launch/export.py quantizes"


def _reduced(block: Any, missing: list[str]) -> dict[str, Any]:
    """The student of `layer_reduction`, distilled from the model that it is made of."""
    reduction = _at(block, "layer_reduction")
    if not _is_on(reduction):
        return {}
    layers = _whole(reduction.get("teacher_layer")) or _whole(
        [name.rsplit(".", 1)[-1] for name in _texts(reduction.get("other_module_name"))]
    )
    if not layers:
        missing.append("layer_reduction without teacher_layer: student.layers in the recipe names the layers to copy")
        return {}
    distilled = {"distill": {"teacher": "@model", "alpha_ce": 0.5, "alpha_distil": 0.5}}
    return {"start_from": "@model", "student": {"layers": layers}, "distilled": distilled}


def _pruned(block: Any, missing: list[str]) -> dict[str, Any]:
    """The pruning groups in one `prune`: those that agree with the first on method, density and start."""
    snip = _snip(_at(block, "sparse_pruning"), missing)
    kinds = [kind for kind in _PRUNERS if _is_on(_at(block, kind, "shared_parameters"))]
    if snip:
        missing += [f"{kind} beside snip_momentum: a phase prunes in one way" for kind in kinds if "sparse" not in kind]
    groups = [] if snip else [group for kind in kinds for group in _groups(_at(block, kind), kind, missing)]
    if _is_on(_at(block, "channel_pruning", "shared_parameters")):
        missing.append("channel_pruning, which is for convolutions: heads and neurons are what transformers have")
    if snip:
        return snip
    if not groups:
        return {}
    first = groups[0]
    granularity: dict[str, str] = {}
    for group in groups:
        if group[2:] == first[2:]:
            _add(granularity, group, missing)
        else:
            missing.append(
                f"{group.path} beside {first.path}: a phase has one pruning_method, one final_threshold and one start"
            )
    prune = {"pruning_method": first.method, "granularity": granularity, "final_threshold": first.density}
    whole = {"head", "neuron"} & set(granularity.values())
    return {**({"shrink": True} if whole else {}), **_started(prune, first.start, missing)}


def _add(granularity: dict[str, str], group: _Group, missing: list[str]) -> None:
    """Add a group's keys, but those that would decide nothing or split a block, which a run refuses at its start."""
    for key, grain in group.granularity.items():
        names = [name for name in _MATRICES if _decides(key, name)] or [key]
        taken = {name: other for other in reversed(granularity) for name in names if _decides(other, name)}
        if rivals := [other for other in granularity if other in taken.values() and granularity[other] != grain]:
            missing.append(f"{group.path} on {key} beside {rivals[0]}: of a matrix the first of these decides")
        if not taken or (len(taken) < len(names) and key not in _BLOCKS):
            granularity[key] = grain


def _decides(key: str, name: str) -> bool:
    return _MATRICES.get(name) == key if key in _BLOCKS else fnmatchcase(name, key)


def _snip(sparse: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    """The block-wise `snip_momentum`, whose one density is over all layers; its criterion becomes movement's."""
    shared = _at(sparse, "shared_parameters")
    if not _is_on(shared) or shared.get("method") != "snip_momentum":
        return {}
    missing.append("the criterion snip_momentum: topK learns movement scores, which are first-order too")
    if shared.get("schedule_offset_end"):
        missing.append(
            f"schedule_offset_end {shared['schedule_offset_end']}: final_warmup is the fraction of the phase after it"
        )
    if shared.get("excluded_modules"):
        missing.append("excluded_modules: only linear layers of the encoder are pruned, or those that modules names")
    pattern = re.fullmatch(r"([1-9]\d*)([x:])([1-9]\d*)", str(shared.get("block_pattern", "4x1")))
    prune: dict[str, Any] = {"pruning_method": "topK"}
    if pattern and pattern[2] == "x":
        density = _share(shared.get("dense_ratio"), 0.1)
        prune |= {"granularity": "block", "block_shape": [int(pattern[1]), int(pattern[3])]}
        prune |= {"final_threshold": density, "global_topk": True}
    elif pattern and pattern[0] == "2:4":
        prune |= {"granularity": "2:4"}
    else:
        missing.append(f"block_pattern {shared.get('block_pattern')}: known are NxM and 2:4")
        return {}
    return _started(prune, _offset(shared), missing)


def _groups(pruning: dict[str, Any], kind: str, missing: list[str]) -> Iterator[_Group]:
    """The groups of a pruning block."""
    shared = _at(pruning, "shared_parameters")
    method = "topK" if shared.get("method", "topk" if kind == "head_pruning" else "l1") == "topk" else "magnitude"
    named = {name: group for name, group in _at(pruning, "different_groups").items() if isinstance(group, dict)}
    for name, group in named.items():
        path, modules = f"{kind}.{name}", group.get("modules")
        patterns = _patterns(path, modules, missing)
        if kind == "head_pruning":
            granularity = {"attention": "head"}
        elif kind == "row_pruning" and group.get("related_modules"):
            granularity = {"feed_forward": "neuron"}
        else:
            granularity = dict.fromkeys(patterns, "row" if kind == "row_pruning" else "weight")
        # a number between dots is a layer's
        if granularity.keys() & _BLOCKS and any(re.search(r"\b\d", pattern) for pattern in patterns):
            missing.append(f"{path} on {shown(modules)} alone: heads and neurons are pruned in every layer")
        density = _share(_at(group, "params").get("dense_ratio"), 0.5)
        if granularity:
            yield _Group(path, granularity, method, density, _offset(shared))
    if not named:
        missing.append(f"{kind} without different_groups")


def _quantized(block: Any, missing: list[str]) -> Iterator[str]:
    """The command for a block that quantizes; other than 8 bits, and training with quantized values, are named."""
    for kind, bits in (("weight_quantization", "target_bits"), ("activation_quantization", "bits")):
        quantization = _at(block, kind)
        if not _is_on(_at(quantization, "shared_parameters")):
            continue
        yield _EXPORT
        for name in _at(quantization, "different_groups"):
            asked = _at(quantization, "different_groups", name, "params").get(bits, 8)
            if asked != 8:
                missing.append(f"{kind}.{name} with {asked} bits: int8 is what there is")
        missing.append(f"{kind} in training: it is done after it, weights once and activations as they come")


def _started(prune: dict[str, Any], start: int, missing: list[str]) -> dict[str, Any]:
    """The parts of a phase whose pruning begins after so many steps; the recipe counts in warm-ups."""
    prune |= {"initial_warmup": 1 if start else 0, "final_warmup": 0.3}
    if start:
        missing.append(
            f"schedule_offset {start} in steps without warmup_steps, which warms the learning rate up, too: leave that "
            f"out where the phase's steps are known, and write {start} / steps, a fraction, as initial_warmup"
        )
    return {**({"warmup_steps": start} if start else {}), "pruned": {"prune": prune}}


def _patterns(path: str, modules: Any, missing: list[str]) -> list[str]:
    """Patterns with `*` of the regular expressions that DeepSpeed looked for anywhere in a name."""
    patterns = []
    for text in _texts(modules):
        parts = re.sub(r"^\(([^()]*)\)$", r"\1", text).replace("[0-9]", r"\d").split("|")
        # what else a regular expression may have, a pattern cannot say; "*" alone was DeepSpeed's word for all
        if text != "*" and not all(re.fullmatch(r"\^?((\\[wd]|\.)[+*]?|\\\.|[\w-])*\$?", part) for part in parts):
            missing.append(f"{path} on {shown(text)}: write name patterns with * for this regular expression")
            continue
        for part in parts:
            start, end = "*" * (not part.startswith("^")), "*" * (not part.endswith("$"))
            body = re.sub(r"(\\[wd]|(?<!\\)\.)[+*]", "*", part.removeprefix("^").removesuffix("$"))
            # a dot inside is the dot of a name; at an edge, or one of many, it is any character
            body = re.sub(r"\\w|(?<!\\)(^\.|\.$|\.(?=\.)|(?<=\.)\.)", "?", body).replace(r"\d", "[0-9]")
            patterns.append(re.sub(r"\*+", "*", start + body.replace("\\", "") + end))
    return patterns if _texts(modules) else ["*"]


def _at(block: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        block = block.get(key) if isinstance(block, dict) else None
    return block if isinstance(block, dict) else {}


def _is_on(shared: dict[str, Any]) -> bool:
    return shared.get("enabled") is True or shared.get("enabled") == 1


def _offset(shared: dict[str, Any]) -> int:
    return next(iter(_whole([shared.get("schedule_offset")])), 0)


def _share(value: Any, default: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return float(value) if good else default


def _whole(values: Any) -> list[int]:
    items = values if isinstance(values, list) else []
    return [int(item) for item in items if re.fullmatch(r"\d{1,9}", str(item))]


def _texts(values: Any) -> list[str]:
    items = values if isinstance(values, list) else [values]
    return [item for item in items if isinstance(item, str)]
