"""The layers of the models of `transformers`: find them and their blocks, swap modules, count weights.

No model code is copied: techniques change the modules that `transformers` has built. The blocks of each family are
listed in `shrunk_model.py`, since that file is copied into model folders; this library imports them from here.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.shrunk_model import (  # noqa: F401 - for the whole library
    FIELD,
    SIZES_OF,
    Block,
    blocks_of,
    decisions_of,
    in_features,
    is_emptied,
    layers_of,
    out_features,
    sizes_of,
    whole_class,
    whole_heads,
)
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

AnyLinear: TypeAlias = nn.Linear | Conv1D
"""GPT-2 writes its linear layers as `Conv1D`: the same product, with a weight of (in, out)."""
_MOST_ELSEWHERE = 0.1
"""The share of a model's matrices that may lie outside of its linear layers, as the kernels of ConvBERT do."""


def rows_of(weight: Tensor, kind: type[nn.Module]) -> Tensor:
    """Return the weight of a linear layer of class `kind` as (out, in), a view."""
    return weight.t() if issubclass(kind, Conv1D) else weight


def encoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's layers by name, first to last: the longest `nn.ModuleList` of one class. UserError without."""
    layers = layers_of(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no list of equal layers: it is not a transformer that this library knows"
        )
    return layers


def encoder_linears(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, AnyLinear]:
    """Return the linear layers inside the model's layers, by name, or those that match one of the patterns.

    Embeddings, pooler and heads are never among them. A pattern that matches none is a UserError, and so are layers
    most of whose matrices are elsewhere, unless patterns choose.
    """
    layers = encoder_layers(model)
    linears = _linears(layers)
    if not linears:
        raise UserError(f"the layers of {type(model).__name__} hold no linear layer: there is nothing to mask")
    if patterns is None:
        _check_elsewhere(model, layers, linears)
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in linears):
            first = next(filter(None, (_linears({name: layer}) for name, layer in layers.items())))
            raise UserError(
                f'modules: "{pattern}" matches no linear layer of the encoder. The first layer has: ' + ", ".join(first)
            )
    return {
        name: linear
        for name, linear in linears.items()
        if patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def without_pooler_of(model: Any, made: Any) -> Any:
    """Return `made` without the pooling layer that `model` lacks: a config does not say `add_pooling_layer=False`."""
    if getattr(model, "pooler", model) is None:
        made.pooler = None
    return made


def swap(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put each module in the place of the one with its name."""
    for name, module in modules.items():
        model.set_submodule(name, module)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the dropout of a model of `transformers`: every `nn.Dropout`, and the numbers that its attention keeps."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, probability)


@contextlib.contextmanager
def gathered(parameter: Tensor) -> Iterator[Tensor]:
    """Yield the whole parameter, read only, also where ZeRO-3 has partitioned it. Every rank must take part."""
    if not hasattr(parameter, "ds_id"):
        yield parameter.detach()
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()


def whole_state_dict(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer, whole, on the CPU; an empty dict on ranks that do not `keep` them.

    Parameters are gathered one at a time, so that no device holds the whole model under ZeRO-3. Tied ones appear under
    each of their names. Every rank must take part.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with gathered(parameter) as values:
            if keep:
                state[name] = values.cpu().clone()
    if keep:
        persistent = model.state_dict(keep_vars=True).keys()
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in persistent}
    return state


def count_weights(model: nn.Module) -> dict[str, Any]:
    """Count remaining (non-zero) and total weights of each matrix of the encoder, of the encoder, of the model.

    The encoder counts the matrices of its layers, as papers on pruning do; the model counts every parameter.
    A model whose config has `shrunk` also gets the `sizes` of its layers, and its totals `before` it was cut.
    """
    layers = {name: _nonzero(weight) for name, weight in _weights(encoder_layers(model)).items()}
    counts: dict[str, Any] = {
        "layers": layers,
        "encoder": _sums([*layers.values()]),
        "model": _sums([*map(_nonzero, model.parameters())]),
    }
    if getattr(getattr(model, "config", None), FIELD, None):
        counts |= {"sizes": sizes_of(model), "before": whole_totals(model)}
    return counts


def total_weights(model: nn.Module) -> dict[str, Any]:
    """Return `count_weights` without the count of each matrix, which would fill the report of a folder."""
    weights = count_weights(model)
    for counts in (weights, weights.get("before", {})):
        counts.pop("layers", None)
    return weights


def whole_totals(model: Any) -> dict[str, Any]:
    """Count all weights, zeros too, as they were before any cut: of each matrix, of the encoder, of the model."""
    if getattr(model.config, FIELD, None):
        config = copy.deepcopy(model.config)
        delattr(config, FIELD)
        with torch.device("meta"):
            model = without_pooler_of(model, whole_class(model)(config))
    layers = {name: weight.numel() for name, weight in _weights(encoder_layers(model)).items()}
    everything = sum(parameter.numel() for parameter in model.parameters())
    return {"layers": layers, "encoder": sum(layers.values()), "model": everything}


def _check_elsewhere(model: nn.Module, layers: Mapping[str, nn.Module], linears: Mapping[str, AnyLinear]) -> None:
    """Raise UserError where more than a few of the matrices are outside of the linear layers, and warn of a few."""
    elsewhere = {name: weight.numel() for name, weight in _elsewhere(layers).items()}
    if not elsewhere:
        return
    others = sum(elsewhere.values())
    share = others / (others + sum(linear.weight.numel() for linear in linears.values()))
    message = (
        f"{share:.1%} of the weights in the matrices of {type(model).__name__}'s layers are in no linear layer, such "
        f"as {max(elsewhere, key=lambda name: elsewhere[name])}, and would stay whole, since only linear layers get "
        "zeros"
    )
    if share > _MOST_ELSEWHERE:
        raise UserError(
            f"{message}: take a model without them (experts, for example), or mask by prune and name linear layers in "
            "its modules"
        )
    distributed.warn(message)


def _elsewhere(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the matrices of the layers, by name, that are neither a linear layer's nor embeddings.

    transformers keeps the experts of a mixture in one parameter of three dimensions, for example.
    """
    return {
        f"{prefix}.{name}.{kind}": weight
        for prefix, layer in layers.items()
        for name, module in layer.named_modules()
        if not isinstance(module, AnyLinear | nn.Embedding)
        for kind, weight in module.named_parameters(recurse=False)
        if sum(size > 1 for size in weight.shape) > 1
    }


def _weights(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all matrices of the layers but embeddings; those of linear layers have the names of these."""
    return {name: linear.weight for name, linear in _linears(layers).items()} | _elsewhere(layers)


def _linears(layers: Mapping[str, nn.Module]) -> dict[str, AnyLinear]:
    return {
        f"{prefix}.{name}": module
        for prefix, layer in layers.items()
        for name, module in layer.named_modules()
        if isinstance(module, AnyLinear)
    }


def _nonzero(weight: Tensor) -> dict[str, int]:
    return {"kept": int(weight.count_nonzero()), "total": weight.numel()}


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {key: sum(count[key] for count in counts) for key in ("kept", "total")}
