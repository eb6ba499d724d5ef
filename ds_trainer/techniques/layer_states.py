"""The outputs of chosen layers, taken from a model's forward by hooks.

The input of the next layer counts as the output of a layer, also where something lies between the two (the convolution
of DeBERTa).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ds_trainer.models.layers import encoder_layers, is_recomputing


class LayerStates:
    """Adds to each output of a model its `layer_states`: the outputs (batch, length, width) of chosen layers, by layer.

    The states travel with the output that was computed from them, so another forward of the model, such as one that
    another technique makes for its view, does not replace them.
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
    call((output[0] if isinstance(output, tuple) else output,), {})
