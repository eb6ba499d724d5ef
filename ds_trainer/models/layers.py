"""The layers of the models of `transformers`: find and swap them and their blocks, count and gather weights, hook in.

No model code is copied: techniques change the modules that `transformers` has built. The blocks of each family are
listed in `shrunk_model.py`, since that file is copied into model folders; this library imports them from here.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
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
    shrunk_class,
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
_RECOMPUTING = ContextVar("recomputing", default=False)


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
    with more than a few matrices elsewhere, unless patterns choose.
    """
    linears, elsewhere = _matrices(model)
    if not linears:
        raise UserError(f"the layers of {type(model).__name__} hold no linear layer: there is nothing to mask")
    if patterns is None:
        _check_elsewhere(model, linears, elsewhere)
        return linears
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linears):
            layer = next(prefix for prefix in encoder_layers(model) if any(n.startswith(f"{prefix}.") for n in linears))
            first = ", ".join(name for name in linears if name.startswith(f"{layer}."))
            raise UserError(
                f'modules: "{pattern}" matches no linear layer of the encoder. The first layer has: {first}'
            )
    return {name: linear for name, linear in linears.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def build_like(model: Any, config: Any) -> Any:
    """Build a model of another config, as `model` is: of its class and precision, without a pooler where it has none.

    Its weights are not initialised: they must all be loaded. Under `torch.device("meta")` it has shapes alone.
    """
    base = whole_class(model)
    with no_init_weights():
        made = (shrunk_class(base) if getattr(config, FIELD, None) else base)(config)
    made.tie_weights()
    if getattr(model, "pooler", model) is None:  # no config says `add_pooling_layer=False`
        made.pooler = None
    return made.to(model.dtype)


def shapes_like(model: Any, config: Any) -> dict[str, torch.Size]:
    """Return the shapes of the weights, by name, of a model of another config that `build_like` builds."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in build_like(model, config).state_dict().items()}


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states (batch, length, width) of what a layer returns."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


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


def is_recomputing() -> bool:
    """Return whether this forward of a layer is the second one, in a backward.

    What a technique draws or remembers in a layer's forward must be the same when that forward runs again.
    """
    return _RECOMPUTING.get()


def can_recompute(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def set_recomputing(model: Any, recomputes: bool) -> None:
    """Have a model of `transformers` keep its layers' activations in training, or compute them again.

    Gradient checkpointing (arXiv 1604.06174) keeps each layer's input alone, and computes the rest again in the
    backward, here in torch's non-reentrant form. UserError where the model cannot do it.
    """
    if recomputes and not can_recompute(model):
        raise UserError(f"gradient_checkpointing: {type(model).__name__} of transformers does not have it: drop it")
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if recomputes:  # transformers 5.23 has renamed the methods
        forwards = lambda: (contextlib.nullcontext(), _recomputing())  # noqa: E731 - the first and the second one
        how = {"use_reentrant": False, "context_fn": forwards}
        getattr(model, f"{name}_enable")(how)
        model.disable_input_require_grads()  # else gradients would run through frozen embeddings and layers
    elif can_recompute(model):
        getattr(model, f"{name}_disable")()


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

    def counted(*weights: Tensor) -> dict[str, int]:
        return {"kept": sum(int(w.count_nonzero()) for w in weights), "total": sum(w.numel() for w in weights)}

    weights = _encoder_weights(model)
    counts: dict[str, Any] = {
        "layers": {name: counted(weight) for name, weight in weights.items()},
        "encoder": counted(*weights.values()),
        "model": counted(*model.parameters()),
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
            model = build_like(model, config)
    layers = {name: weight.numel() for name, weight in _encoder_weights(model).items()}
    everything = sum(parameter.numel() for parameter in model.parameters())
    return {"layers": layers, "encoder": sum(layers.values()), "model": everything}


def _check_elsewhere(model: nn.Module, linears: Mapping[str, AnyLinear], elsewhere: Mapping[str, Tensor]) -> None:
    """Raise UserError where more than a few of the weights are outside of the linear layers, and warn of a few."""
    if not elsewhere:
        return
    others = sum(weight.numel() for weight in elsewhere.values())
    share = others / (others + sum(linear.weight.numel() for linear in linears.values()))
    message = (
        f"{share:.1%} of the weights in the matrices of {type(model).__name__}'s layers are in no linear layer, such "
        f"as {max(elsewhere, key=lambda name: elsewhere[name].numel())}, and would stay whole, since only linear "
        "layers get zeros"
    )
    if share > _MOST_ELSEWHERE:
        raise UserError(
            f"{message}: take a model without them (experts, for example), or mask by prune and name linear layers in "
            "its modules"
        )
    distributed.warn(message)


def _encoder_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all matrices of the layers but embeddings; those of linear layers have the names of these."""
    linears, elsewhere = _matrices(model)
    return {name: linear.weight for name, linear in linears.items()} | elsewhere


def _matrices(model: nn.Module) -> tuple[dict[str, AnyLinear], dict[str, Tensor]]:
    """Return the linear layers inside the model's layers, and all other matrices there but embeddings, by name.

    transformers keeps the experts of a mixture in one parameter of three dimensions, for example.
    """
    linears: dict[str, AnyLinear] = {}
    elsewhere: dict[str, Tensor] = {}
    for prefix, layer in encoder_layers(model).items():
        for name, module in layer.named_modules(prefix=prefix):
            if isinstance(module, AnyLinear):
                linears[name] = module
            elif not isinstance(module, nn.Embedding):
                for kind, weight in module.named_parameters(recurse=False):
                    if sum(size > 1 for size in weight.shape) > 1:
                        elsewhere[f"{name}.{kind}"] = weight
    return linears, elsewhere


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)


class LayerStates:
    """Adds to each output of a model its `layer_states`: the outputs (batch, length, width) of chosen layers, by layer.

    The states travel with the output that was computed from them, so another forward of the model, such as one that
    another technique makes for its view, does not replace them. The input of the next layer counts as the output of a
    layer, also where something lies between the two (the convolution of DeBERTa).
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self._states: dict[int, Tensor] = {}
        self._hooks = [after_layer(model, layer, partial(self._keep, layer)) for layer in layers]
        self._hooks.append(model.register_forward_hook(self._hand_over))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: int, args: Any, kwargs: Any) -> None:
        if not is_recomputing():  # that would keep the states of a batch whose backward is under way
            self._states[layer] = args[0] if args else kwargs["hidden_states"]

    def _hand_over(self, model: nn.Module, args: Any, output: Any) -> None:
        output.layer_states, self._states = self._states, {}


def after_layer(model: nn.Module, layer: int, call: Callable[[Any, Any], Any]) -> Any:
    """Register a hook that runs `call` with the arguments that the model passes on after a layer; return its handle.

    For all layers but the last these are the arguments (positional, by name) of the next layer, and `call` may return
    others in their place. For the last layer they are its output alone.
    """
    modules = list(encoder_layers(model).values())
    if layer < len(modules):
        return modules[layer].register_forward_pre_hook(partial(_before_next, call), with_kwargs=True)
    return modules[-1].register_forward_hook(partial(_after_last, call))


# Hooks are partials of functions, not closures: a copy of a model then has hooks that call the copy.
def _before_next(call: Callable[[Any, Any], Any], _: Any, args: Any, kwargs: Any) -> Any:
    return call(args, kwargs)


def _after_last(call: Callable[[Any, Any], Any], _: Any, args: Any, output: Any) -> None:
    call((hidden_of(output),), {})
