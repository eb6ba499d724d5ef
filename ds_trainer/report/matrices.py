"""The matrices of an encoder by layer and role, and how much of each a pruned model has kept."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ds_trainer.ranks.failures import UserError

KeptCounts: TypeAlias = Mapping[str, Mapping[str, int]]
"""The numbers of `kept` and `total` weights of each linear layer of the encoder, by name."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_QKV = ("query", "key", "value")
_ROLES = {
    **{f"attention.self.{name}": name for name in _QKV},
    **{f"attention.self.{name}_proj": name for name in _QKV},
    **{f"attention.{name[0]}_lin": name for name in _QKV},
    "attention.output.dense": "output",
    "attention.out_lin": "output",
    "intermediate.dense": "ff in",
    "ffn.lin1": "ff in",
    "output.dense": "ff out",
    "ffn.lin2": "ff out",
}
"""Roles of the matrices of BERT, RoBERTa, ELECTRA, DeBERTa-v2 and DistilBERT, by their names inside a layer."""

_HEADS = {"query": 0, "key": 0, "value": 0, "output": 1}
"""The dimension of a weight, (out, in), along which the heads lie, by role."""


def kept_shares(counts: KeptCounts, model: Path, before: Mapping[str, int] | None) -> dict[str, dict[int, Array]]:
    """Return the kept share of each matrix, by role and layer: (heads,) if the heads are known, otherwise (1,).

    If heads and neurons were cut out, `before` has the number of weights that each matrix had. The shares are then
    shares of these numbers, one for each matrix, since the remaining weights do not show which heads they belonged to.
    """
    shares: dict[str, dict[int, Array]] = {}
    heads, size = (0, 0) if before or not any(role_of(name) in _HEADS for name in counts) else _heads_of(model)
    for name in before or counts:
        role, count = role_of(name), counts.get(name, {"kept": 0, "total": 0})
        whole = before[name] if before else count["total"]
        share = np.array([count["kept"] / max(whole, 1)])
        if heads and role in _HEADS:
            kept = np.moveaxis(_nonzero(model, f"{name}.weight"), _HEADS[role], 0)
            if len(kept) % size == 0:
                share = kept.reshape(len(kept) // size, -1).mean(1)
        shares.setdefault(role, {})[int(layer_of(name) or 0)] = share
    roles = dict.fromkeys([*_ROLES.values(), *shares])  # in the order in which a layer uses them
    return {role: shares[role] for role in roles if role in shares}


def layer_of(name: str) -> str:
    """Return the layer's number in a linear layer's name, from 0: the first part that is a number."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def role_of(name: str) -> str:
    """Return the role of a matrix, such as "query", if its model family is known; otherwise its name in its layer."""
    inside = re.split(r"(?:^|\.)\d+\.", name, maxsplit=1)[-1]
    return _ROLES.get(inside, inside)


def cut_by_layer(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of a cut for every layer, by what they are about: heads, neurons, or a role of matrices.

    What has no record in a layer was left whole there.
    """
    by_layer: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        part = role_of(record["name"]) if record["unit"] == "weights" else record["unit"]
        by_layer.setdefault(part, {})[int(layer_of(record["name"]) or 0)] = record
    layers = range(1 + max((layer for of_part in by_layer.values() for layer in of_part), default=0))
    whole = {"kept": 1, "count": 1, "error": 0.0}
    return {part: [of_part.get(layer, whole) for layer in layers] for part, of_part in by_layer.items()}


def _heads_of(model: Path) -> tuple[int, int]:
    """Return the number of heads of a layer and the size of a head, or zeros if the model's config has neither."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_attention_heads") or config.get("n_heads") or 0
    hidden = config.get("hidden_size") or config.get("dim") or 0
    return (heads, hidden // heads) if heads and hidden >= heads else (0, 0)


def _nonzero(model: Path, name: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return where a weight of a model folder is not zero, (out, in); UserError if the folder lacks the weight."""
    from safetensors import safe_open

    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:  # NumPy has no bfloat16
            if name in tensors.keys():  # noqa: SIM118  (no mapping)
                return (tensors.get_tensor(name) != 0).numpy()
    raise UserError(f"{model} has no weight {name}")
