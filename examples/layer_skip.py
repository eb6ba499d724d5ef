"""LayerSkip (arXiv 2404.16710), a plugin: train a decoder whose first layers answer almost as well as all of them.

    deepspeed launch/train.py --plugin examples/layer_skip.py --recipe examples/layer_skip.json \
        --deepspeed_config ds_configs/bf16.json --data_dir DIR --output_dir OUT

The trained model can generate with itself as the draft model: the first layers and the model's own norm and head draft
tokens, and all layers verify them. `model.generate(**inputs, assistant_early_exit=4, do_sample=False)` of
`transformers` does that, and its text is that of all layers. Training differs in two ways. Layers l count from 1 to L,
as in the argument:

    layer dropout: a sample skips layer l with the probability p_max * S(t) * D(l), D(l) = 2^((l-1)/(L-1)) - 1;
        S(t) is 1, or grows from 0 to 1 over the phase
    early exits: `layer_skip.exits` is the mean of the task's losses of the norm and head on the outputs of layers

The layers of the mean are those of the step, by the curriculum, and their weights are e(l) = 0 + 1 + ... + (l-1). So
the first layer, which weighs 0, has no exit; nor has the last, whose loss is the task's. The weight of the term in the
loss table takes the place of the paper's e_scale. A skipped sample is computed and then dropped, since under ZeRO-3
every rank must take part in every layer: dropout saves no time here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ds_trainer import Technique, UserError
from ds_trainer.models.layers import LayerStates, encoder_layers
from ds_trainer.recipe.fields import Positive, Share, Strict
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.technique import PhaseLength


class LayerSkipSpec(Strict):
    """Layer dropout and early-exit losses of a decoder, for the task "clm"."""

    layer_dropout: Share = Field(0.1, description="chance that a sample skips the last layer; 0 at the first layer")
    dropout_schedule: Literal["constant", "exponential"] = Field("constant", description="exponential grows from 0")
    curriculum: Literal["rotational", "gradual"] = Field(
        "rotational", description="which exits a step trains: by turns, or more and more, from the last one down"
    )
    rotation: Positive | None = Field(None, description="N: a step trains one exit in N; by default one exit in all")

    def mistakes(self) -> Iterator[str]:
        if self.rotation is not None and self.curriculum != "rotational":
            yield "rotation is how many turns the curriculum rotational has: drop it beside gradual"


class LayerSkip(Technique):
    """Drops layers out while training, and adds the losses of the exits of the step."""

    name = "layer_skip"
    Spec = LayerSkipSpec

    def __init__(self, spec: LayerSkipSpec, length: PhaseLength, task: Task) -> None:
        super().__init__(spec, length, task)
        if task.spec.name != "clm":
            raise UserError(f'layer_skip: the task is {task.spec.name}, and only "clm" trains what can draft: drop it')
        self.length = length
        self.term_units = {"layer_skip.exits": task.loss_unit}
        self._exits: list[int] = []  # the layers with an exit, and those among them that the step trains
        self._trained: list[int] = []
        self._dropout: list[float] = []  # of each layer in this step
        self._head: list[nn.Module] = []
        self._hooks: list[Any] = []

    def attach(self, model: nn.Module) -> nn.Module:
        """Hook into every layer. UserError for a model of too few layers, or one that cannot draft with the first."""
        layers = list(encoder_layers(model).values())
        self._exits = list(range(2, len(layers)))
        if (self.spec.rotation or 1) > len(self._exits):
            raise UserError(
                f"layer_skip: rotation is {self.spec.rotation or 1}, and the model of {len(layers)} layers has "
                f"{len(self._exits)} exits (after its second layer to its last but one): write at most that, or use a "
                f"deeper model"
            )
        self._head = _output_head(model, layers)
        self._hooks = [
            layer.register_forward_hook(partial(self._drop, index), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]
        self._states = LayerStates(model, self._exits)
        return model

    def on_step(self, step: int) -> None:
        total, depth = self.length.total, len(self._hooks)
        if self.spec.curriculum == "rotational":
            rotation = self.spec.rotation or len(self._exits)
            self._trained = self._exits[step % rotation :: rotation]
        else:  # one more, from the last one down, every total / (2 * depth) steps
            self._trained = self._exits[-1 - 2 * depth * step // total :]
        grown = 1.0 if self.spec.dropout_schedule == "constant" else 2 ** min(1.0, step / max(1, total - 1)) - 1
        self._dropout = [self.spec.layer_dropout * grown * (2 ** (n / (depth - 1)) - 1) for n in range(depth)]

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        weights = [layer * (layer - 1) / 2 for layer in self._trained]
        losses = [self.task.loss(self._exit(layer, forward), forward.batch) for layer in self._trained]
        total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()
        return {"layer_skip.exits": total / sum(weights)}

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """Return every exit's output, by the number of its layer."""
        return {f"exit_{layer}": self._exit(layer, forward) for layer in self._exits}

    def fold(self, model: nn.Module) -> nn.Module:
        self._states.remove()
        for hook in self._hooks:
            hook.remove()
        return model

    def _exit(self, layer: int, forward: Forward) -> _Exit:
        rows = forward.out.layer_states[layer].flatten(0, 1).index_select(0, forward.batch.inputs["head_positions"])
        return _Exit(rows.unsqueeze(0), self._head)

    def _drop(self, index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the layer's output, with its input in place of it for those samples that skip the layer."""
        if not layer.training or not self._dropout[index]:
            return None
        before, after = args[0] if args else kwargs["hidden_states"], output[0] if isinstance(output, tuple) else output
        # drawn here, and so the same again where gradient checkpointing restores the layer's random state
        skips = torch.rand(len(after), 1, 1, device=after.device) < self._dropout[index]
        hidden = torch.where(skips, before, after)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@dataclass
class _Exit:
    """The output of an exit: logits (1, n, vocabulary) of states (1, n, width).

    They are computed when they are asked for, because those of all exits at once would be many times the model's own.
    """

    states: Tensor
    head: list[nn.Module]

    @property
    def logits(self) -> Tensor:
        value = self.states.to(next(self.head[-1].parameters()).dtype)
        for module in self.head:
            value = module(value)
        return value


@torch.no_grad()
def _output_head(model: Any, layers: list[nn.Module]) -> list[nn.Module]:
    """Return what turns the output of a layer into logits, such as a norm and a linear layer, in its order.

    The model is run on its first two layers alone, as `transformers` does to draft. UserError where it runs others too,
    or where these modules do not give its logits.
    """
    head: list[nn.Module] = []
    states: list[Tensor] = []

    def begin(layer: nn.Module, args: Any, output: Any) -> None:
        head.clear()
        states.append(output[0] if isinstance(output, tuple) else output)

    leaves = [module for module in model.modules() if not any(module.children())]
    hooks = [leaf.register_forward_hook(lambda module, *_: head.append(module)) for leaf in leaves]
    hooks += [layer.register_forward_hook(begin) for layer in layers]
    config, was_training = model.base_model.config, model.training
    depth, config.num_hidden_layers = config.num_hidden_layers, 2
    logits = model.eval()(input_ids=torch.tensor([[0, 1, 2, 3]], device=model.device), use_cache=False).logits
    config.num_hidden_layers = depth
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    if len(states) != 2 or not torch.allclose(_Exit(states[1], head).logits, logits, atol=1e-5, rtol=1e-4):
        raise UserError(
            f"layer_skip: {type(model).__name__} of transformers cannot draft with its first layers alone, or changes "
            f"the logits of its head: use a model like Llama, Mistral or Qwen"
        )
    return head


TECHNIQUES = {"layer_skip": LayerSkip}
