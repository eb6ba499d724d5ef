"""Reconstruct a cut model layer by layer: train each layer to give what the dense model has at its place.

Least squares fits one matrix at a time, to the dense outputs of that matrix alone. Here all matrices, biases and norms
of a layer are trained together by Adam, to the dense model's hidden states after the layer, on the inputs that the
layer gets from those before it, which are reconstructed already. Whole submodules do better than single matrices (arXiv
2510.14444), and no label is needed. A layer keeps what it has learnt only if its error on held-out examples falls.
"""

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.cuts.calibration import Calibration, calibration_of, finite
from ds_trainer.cuts.layerwise import Layerwise, attended_of
from ds_trainer.models.layers import encoder_layers
from ds_trainer.ranks import distributed
from ds_trainer.ranks.stopping import in_step
from ds_trainer.recipe.cut_specs import ReconstructSpec
from ds_trainer.tasks.task import Task

_STEP_TOKENS = 256
_STEP_BATCHES = 2
"""Ranks share the batches of a step. There are two, since a sum of two does not depend on their order."""
_HELD_OUT = 10
"""One of this many batches is held out."""


@dataclass(frozen=True)
class Kept:
    """What a cut model has of the dense one: the numbers of its layers, and channels of the stream, if not all."""

    layers: Sequence[int]
    channels: Tensor | None = None


@dataclass(frozen=True)
class LayerRecord:
    """The squared error of a layer's outputs on held-out examples, as a share of the dense outputs' variance."""

    name: str
    before: float
    after: float
    seconds: float


def reconstruction_set(task: Task, spec: ReconstructSpec, seed: int) -> Calibration:
    """Draw training examples of about the spec's tokens, in batches that are dealt out to the ranks."""
    lengths = task.examples("train").lengths
    count = min(len(lengths), max(1, round(spec.tokens / lengths.mean())))
    batch = round(_STEP_TOKENS / _STEP_BATCHES / lengths.mean())
    return calibration_of(task, count, seed, max(1, min(batch, count // _HELD_OUT)))


def reconstruct(
    model: Any, dense: Any, kept: Kept, calibration: Calibration, spec: ReconstructSpec
) -> list[LayerRecord]:
    """Train the layers of a cut model, in place and first to last, to give the states of the dense one; collective.

    Both are on the CPU and in evaluation mode; one layer of each at a time is on the device. A layer learns the states
    that come before the next layer that the cut has kept. Zeros of matrices stay zeros. Nothing happens, with a
    warning, where there are too few examples to hold any out.
    """
    batches = _Batches(calibration)
    if not batches.trained:
        distributed.warn("cut: there are too few training examples to reconstruct layers and to hold any out")
        return []
    # a layer learns what the dense model has before the next layer that is kept
    goals = [layer - 1 for layer in (*kept.layers[1:], len(encoder_layers(dense)))]
    states = Layerwise(dense, calibration).hidden_states(goals)
    layerwise, records = Layerwise(model, calibration, "reconstructing"), list[LayerRecord]()
    # the layers are the last of the three, so that the check of their number brings the last one back to the CPU
    for name, targets, layer in zip(encoder_layers(model), states, layerwise, strict=True):
        started = time.perf_counter()
        if kept.channels is not None:
            targets = [hidden[..., kept.channels] for hidden in targets]
        state = {key: value.cpu().clone() for key, value in layer.state_dict().items()}
        before = after = _error(layerwise, targets, batches)
        finite(torch.tensor(before), f"the states after {name}")
        if before > 0:  # a layer before all that is cut gives the very states of the dense one
            _train(layer, layerwise, targets, batches, spec)
            after = _error(layerwise, targets, batches)
        if not after < before:
            layer.load_state_dict(state)
            after = before
        records.append(LayerRecord(name, before, after, round(time.perf_counter() - started, 2)))
    return records


class _Batches:
    """The batches of all ranks, by number: rank r has r, r + ranks, and so on. Some train, and others are held out."""

    def __init__(self, calibration: Calibration) -> None:
        self.attended, self.rank, self.ranks = calibration.attended, distributed.rank(), distributed.world_size()
        counts = [int(tokens.sum()) for tokens in self.attended]
        most = max(max(distributed.numbers_of_all([len(counts)])))
        of_ranks = distributed.numbers_of_all([*counts, *[-1] * (most - len(counts))])
        self.tokens = [count for counts in zip(*of_ranks, strict=True) for count in counts if count >= 0]
        numbers = range(len(self.tokens))
        self.held_out = numbers[_HELD_OUT - 1 :: _HELD_OUT] or numbers[-1:]
        self.trained = [number for number in numbers if number not in self.held_out]

    def steps(self, count: int) -> list[list[int]]:
        """Draw the batches of each step: neighbours, most of which different ranks hold. An epoch has all of them."""
        draw, starts = np.random.default_rng(0), range(0, len(self.trained), _STEP_BATCHES)
        firsts = islice(chain.from_iterable(draw.permutation(starts) for _ in repeat(None)), count)
        return [self.trained[first : first + _STEP_BATCHES] for first in firsts]

    def places(self, numbers: Iterable[int]) -> list[int]:
        """Return the places, among this rank's batches, of those of these numbers that it has."""
        return [number // self.ranks for number in numbers if number % self.ranks == self.rank]


@torch.no_grad()
def _error(layerwise: Layerwise, targets: Sequence[Tensor], batches: _Batches) -> float:
    """Return the squared error of the present layer on what is held out, as a share of the targets' variance."""
    places, device = batches.places(batches.held_out), layerwise.calibration.device
    width = max(max(distributed.numbers_of_all([targets[0].shape[-1] if targets else 0])))
    sums = torch.zeros(3, width, dtype=torch.float64, device=device)
    for output, place in zip(in_step(layerwise.outputs(places), len(places)), places, strict=True):
        tokens = batches.attended[place]
        wanted = attended_of(targets[place], tokens).to(device).double()
        lost = attended_of(output, tokens.to(device)) - wanted
        sums += torch.stack((lost.square().sum(0), wanted.square().sum(0), wanted.sum(0)))
    squared_errors, squares, totals = distributed.total(sums)
    variance = squares - totals.square() / max(1, sum(batches.tokens[number] for number in batches.held_out))
    return float(squared_errors.sum() / variance.sum().clamp(min=torch.finfo(torch.float32).tiny))


def _train(
    layer: nn.Module, layerwise: Layerwise, targets: Sequence[Tensor], batches: _Batches, spec: ReconstructSpec
) -> None:
    """Train the present layer by Adam on the squared error of its outputs, at a rate that falls linearly to 0."""
    device, weights = layerwise.calibration.device, [weight for weight in layer.parameters() if weight.requires_grad]
    present = [weight != 0 if weight.dim() > 1 else torch.ones((), device=device) for weight in weights]
    optimizer, steps = torch.optim.Adam(weights), batches.steps(spec.steps)
    places = (place for step in steps for place in batches.places(step))
    with contextlib.closing(layerwise.outputs(places)) as outputs:
        for number, step in enumerate(in_step(steps, len(steps))):
            optimizer.zero_grad()
            count = max(1, sum(batches.tokens[each] for each in step))
            for place in batches.places(step):
                tokens = batches.attended[place]
                wanted = attended_of(targets[place], tokens).to(device)
                lost = attended_of(next(outputs), tokens.to(device)) - wanted
                (lost.square().sum() / count).backward()
            gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
            if batches.ranks > 1:
                flat = distributed.total(torch.cat([gradient.flatten() for gradient in gradients]))
                gradients = list(flat.split([weight.numel() for weight in weights]))
            for weight, gradient, kept in zip(weights, gradients, present, strict=True):
                weight.grad = gradient.view_as(weight) * kept
            optimizer.param_groups[0]["lr"] = spec.learning_rate * (1 - number / len(steps))
            optimizer.step()
    optimizer.zero_grad()
