"""Run a model layer by layer over calibration examples, so that only one layer at a time is on the device.

A pass calls the model's encoder on every batch with one layer at work. The layers before it return the stored output
of an earlier pass, and the layers after it return their input. The model's code around the layers (embeddings, masks,
rotary positions, convolutions between layers) so runs as always, for every architecture.
"""

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.cuts.calibration import Calibration, finite
from ds_trainer.cuts.surgeon import Gram
from ds_trainer.models.layers import AnyLinear, encoder_layers, hidden_of, in_features, out_features
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.ranks.stopping import in_step

_CPU = torch.device("cpu")


def encoder_inputs(base: Any, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what an encoder takes of a batch. With a cache, transformers would not keep packed documents apart."""
    accepted = inspect.signature(base.forward).parameters
    options = {"use_cache": False} if "use_cache" in accepted else {}
    return {name: values for name, values in batch.items() if name in accepted} | options


class Layerwise:
    """The layers of a model, first to last, over a calibration set. The model stays on the CPU, but for one layer.

    `doing` says what is done to a layer where the progress is shown. UserError where the model does not run one list
    of layers.
    """

    def __init__(self, model: Any, calibration: Calibration, doing: str = "cutting") -> None:
        self.calibration, self._doing = calibration, doing
        self._base = getattr(model, "base_model", model)
        if model.config.is_encoder_decoder:
            raise self._no_row()
        self._layers = list(encoder_layers(model).values())
        self._inputs = [encoder_inputs(self._base, batch) for batch in calibration.inputs]
        self._outputs: list[Any] = [None] * len(self._inputs)  # of the layer before, by batch, on the CPU

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield each layer, on the device. It may be changed until the next one is taken."""
        for index, layer in enumerate(progress(self._layers, self._doing, "layer")):
            self._at, self._passed = index, False  # whether the outputs are those of this layer already
            layer.to(self.calibration.device)
            yield layer
            if index < len(self._layers) - 1 and not self._passed:
                self.grams({})
            layer.cpu()

    @torch.no_grad()
    def hidden_states(self, after: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield what the layers of these numbers, rising, give, by batch, on the CPU; the model stays. Collective."""
        for self._at in range(after[-1] + 1):
            self._layers[self._at].to(self.calibration.device)
            self.grams({})
            self._layers[self._at].cpu()
            if self._at in after:
                yield list(map(hidden_of, self._outputs))

    def outputs(self, batches: Iterable[int]) -> Generator[Any, None, None]:
        """Yield what the present layer gives for these batches, on the device, with gradients of its weights alone.

        The model's code calls all layers, since it makes their masks and positions, but only this layer computes.
        """
        layer, computed, before = self._layers[self._at], list[Any](), list[Any]()
        device, with_gradient = self.calibration.device, torch.is_grad_enabled()

        def compute(*args: Any, **kwargs: Any) -> Any:
            on_device = _moved((args, kwargs), device)
            with torch.set_grad_enabled(with_gradient):
                computed[:] = [type(layer).forward(layer, *on_device[0], **on_device[1])]
            return skip(*args, **kwargs)  # what the model makes of it is not used

        def skip(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            # some layers return a tuple, of which only the hidden states are used: the rest may be another layer's
            like = (computed or before)[0]
            return (hidden, *like[1:]) if isinstance(like, tuple) else hidden

        with contextlib.ExitStack() as standing_aside:
            for index, other in enumerate(self._layers):
                forward = compute if index == self._at else skip
                if index == self._at - 1:
                    forward = lambda *_, **__: before[0]  # noqa: E731
                standing_aside.enter_context(_forward_replaced(other, forward))
            for batch in batches:
                before[:] = [self._outputs[batch]]
                computed.clear()
                with torch.no_grad():
                    self._base(**self._inputs[batch])
                if not computed:
                    raise self._no_row()
                yield computed[0]

    @torch.no_grad()
    def grams(self, linears: Mapping[str, AnyLinear], unused: Sequence[AnyLinear] = ()) -> dict[str, Gram]:
        """Run the present layer, and return the sums of the inputs of these linear layers in it; collective.

        `unused` are linear layers on which these inputs do not depend: their products are not computed. Where there are
        none, the layer has given what the next one gets, and may not be changed any more.
        """
        grams = {name: Gram(in_features(linear), self.calibration.device) for name, linear in linears.items()}
        with _inputs_recorded(linears) as inputs, contextlib.ExitStack() as replaced:
            for other in unused:
                replaced.enter_context(_forward_replaced(other, partial(_zeros, out_features(other))))
            count = len(self._inputs)
            for batch, output in enumerate(in_step(self.outputs(range(count)), count)):
                tokens = self.calibration.attended[batch].to(self.calibration.device)
                for name, gram in grams.items():
                    for call in inputs.pop(name, ()):
                        values = by_example(call, tokens.shape)
                        # relative positions, for example, are no tokens: all of them count
                        gram.add(values[tokens] if values.shape[:2] == tokens.shape else values.flatten(0, -2))
                if not unused:
                    self._outputs[batch] = _moved(output, _CPU)
        self._passed = not unused
        for name, gram in grams.items():
            gram.add_ranks()
            finite(gram.products, f"the inputs of {name}")
        return grams

    @torch.no_grad()
    def input_groups(self) -> list[list[str]]:
        """Group the linear layers that the present layer computes by their inputs, in order; collective.

        Their names begin inside the layer. Those of a group, such as query, key and value, get the very same inputs.
        """

        def groups_of_first_batch() -> list[list[str]]:
            modules = self._layers[self._at].named_modules()
            groups: dict[tuple[int, ...], list[str]] = {}
            with (
                _inputs_recorded({name: module for name, module in modules if isinstance(module, AnyLinear)}) as inputs,
                contextlib.closing(self.outputs([0])) as batches,
            ):
                next(batches)
                for name, calls in inputs.items():
                    groups.setdefault(tuple(map(id, calls)), []).append(name)
            return list(groups.values())

        return distributed.on_main(groups_of_first_batch)

    def _no_row(self) -> UserError:
        return UserError(
            f"cut: {type(self._base).__name__} does not run one list of layers, one after another, as a cut needs: "
            "take another model"
        )


def with_grams(
    model: Any, linears: Mapping[str, AnyLinear], calibration: Calibration, doing: str
) -> Iterator[tuple[str, Gram]]:
    """Yield those of these linear layers that the model computes, in order and on the device, with their inputs' sums.

    A layer that is changed before the next one is taken changes the inputs of those that follow. `doing` says what is
    done to a layer where the progress is shown. Collective.
    """
    layerwise, names = Layerwise(model, calibration, doing), {linear: name for name, linear in linears.items()}
    for layer in layerwise:
        groups: list[list[Any]] = [[layer.get_submodule(name) for name in group] for group in layerwise.input_groups()]
        for index, group in enumerate(groups):
            wanted = [names[linear] for linear in group if linear in names]
            if wanted:
                # what is called after a linear layer has no part in its inputs
                later = [*chain.from_iterable(groups[index:])]
                (gram,) = layerwise.grams({wanted[0]: linears[wanted[0]]}, later).values()
                yield from ((name, gram) for name in wanted)


def grams_of_whole(
    model: Any, linears: Mapping[str, AnyLinear], calibration: Calibration, doing: str
) -> Iterator[tuple[str, Gram]]:
    """Yield what `with_grams` does, for a model that does not change meanwhile: each layer runs once. Collective."""
    layerwise = Layerwise(model, calibration, doing)
    for layer in layerwise:
        inside = {*layer.modules()}
        grams = layerwise.grams({name: linear for name, linear in linears.items() if linear in inside})
        yield from ((name, gram) for name, gram in grams.items() if gram.tokens)


@torch.no_grad()
def resumed(model: Any, run: Callable[[], object]) -> Iterator[nn.Module]:
    """Yield each layer of a model. Until the next one is taken, no layer before it computes when the model is run.

    `run` calls the model on some batches; all calls meanwhile are on the same ones, in their order. A layer that was
    changed must be as before when the next one is taken.
    """
    layers, outputs = [*encoder_layers(model).values()], list[Any]()
    for index, layer in enumerate(layers):
        with contextlib.ExitStack() as replaced:
            for other in layers[:index]:
                given = cycle(outputs)
                replaced.enter_context(_forward_replaced(other, lambda *_, given=given, **__: next(given)))
            yield layer
            outputs = []
            replaced.enter_context(layer.register_forward_hook(lambda *call: outputs.append(call[-1])))  # noqa: B023
            for other in layers[index + 1 :]:
                replaced.enter_context(_forward_replaced(other, lambda *_, **__: outputs[-1]))  # noqa: B023
            run()


def attended_of(output: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states (tokens, width) of what a layer returns, where `tokens` (rows, length) are attended.

    Some models, such as Longformer, pad the rows on the right to a multiple of a length.
    """
    return hidden_of(output)[:, : tokens.shape[1]][tokens]


def by_example(values: Tensor, tokens: torch.Size) -> Tensor:
    """Return the inputs or outputs of a linear layer as (rows, length, width), if its model has flattened the tokens.

    `tokens` is (rows, length). OPT flattens them, for example. Vectors of something else become one row.
    """
    if values.dim() > 2:
        return values
    return values.unflatten(0, tokens) if len(values) == tokens.numel() else values[None]


@torch.no_grad()
def observe(
    model: Any, modules: Mapping[str, nn.Module], calibration: Calibration, see: Callable[[str, Tensor, Tensor], object]
) -> None:
    """Run the model without its head on the device, and show what each call of these modules is given and gives.

    `see` gets the module's name, then both (tokens, width), of the tokens that are attended.
    """
    base, attended = model.to(calibration.device).base_model, list[Tensor]()

    def hook(name: str) -> Any:
        def show(_: nn.Module, given: tuple[Tensor, ...], out: Any) -> None:
            see(name, given[0][attended[-1]], hidden_of(out)[attended[-1]])

        return show

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    count, pairs = len(calibration.inputs), zip(calibration.inputs, calibration.attended, strict=True)
    for inputs, tokens in progress(in_step(pairs, count), "observing the model", "batch", count):
        attended.append(tokens.to(calibration.device))
        base(**encoder_inputs(base, {name: values.to(calibration.device) for name, values in inputs.items()}))
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def _inputs_recorded(linears: Mapping[str, AnyLinear]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield a dict that gets the inputs of each call of these linear layers, in the order of their first calls."""
    inputs: dict[str, list[Tensor]] = {}
    handles = [
        linear.register_forward_pre_hook(lambda _, given, name=name: inputs.setdefault(name, []).append(given[0]))
        for name, linear in linears.items()
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _forward_replaced(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of this module, not of its class: the model's code may read attributes of its layers."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _zeros(features: int, inputs: Tensor) -> Tensor:
    return inputs.new_zeros(*inputs.shape[:-1], features)


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value on a device, without gradient: a tensor, or all tensors in tuples and dicts."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, tuple):
        return tuple(_moved(one, device) for one in value)
    return {name: _moved(one, device) for name, one in value.items()} if isinstance(value, dict) else value
