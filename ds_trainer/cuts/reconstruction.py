"""Reconstruct a cut model layer by layer: train each layer to give what the dense model has at its place.

Least squares fits one matrix at a time, to the dense outputs of that matrix alone. Here all matrices, biases and norms
of a layer are trained together by Adam, to the dense model's hidden states after the layer, on the inputs that the
layer gets from those before it, which are reconstructed already. Whole submodules do better than single matrices (arXiv
2510.14444), and no label is needed. Examples that are held out decide: a layer that does not gain by it stays as it is.
"""

import contextlib
import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.cuts.calibration import Calibration, calibration_of
from ds_trainer.cuts.layerwise import Layerwise, hidden_of
from ds_trainer.models.layers import encoder_layers
from ds_trainer.ranks import distributed
from ds_trainer.ranks.stopping import in_step
from ds_trainer.recipe.cut_specs import ReconstructSpec
from ds_trainer.tasks.task import Task

_STEP_TOKENS = 256
_GROUP = 2
"""The batches of a step. Ranks share them, and a sum of two is the same in either order: on one rank and on more."""
_HELD_OUT = 10
"""One of this many batches is held out."""


@dataclass(frozen=True)
class Remaining:
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
    length = float(task.examples("train").lengths.mean())
    batch = max(1, round(_STEP_TOKENS / _GROUP / length))
    return calibration_of(task, max(1, round(spec.tokens / length)), seed, batch)


def reconstruct(
    model: Any, dense: Any, remaining: Remaining, calibration: Calibration, spec: ReconstructSpec
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
    states = enumerate(Layerwise(dense, calibration).hidden_states(), 1)
    followers = [*remaining.layers[1:], len(encoder_layers(dense))]
    walk, records = Layerwise(model, calibration, "reconstructing"), []
    for name, follower, layer in zip(encoder_layers(model), followers, walk, strict=True):
        started = time.perf_counter()
        targets = next(hidden for number, hidden in states if number == follower)
        if remaining.channels is not None:
            targets = [hidden[..., remaining.channels] for hidden in targets]
        state = copy.deepcopy(layer.state_dict())
        before = after = batches.error(walk, targets)
        if before > 0:  # a layer before all that is cut gives the very states of the dense one
            _train(layer, walk, targets, batches, spec)
            after = batches.error(walk, targets)
        if not after < before:
            layer.load_state_dict(state)
            after = before
        records.append(LayerRecord(name, before, after, round(time.perf_counter() - started, 2)))
    return records


class _Batches:
    """The batches of all ranks, by number: rank r has r, r + ranks, and so on. Some train, and others are held out."""

    def __init__(self, calibration: Calibration) -> None:
        self.attended, self.rank, self.ranks = calibration.attended, distributed.rank(), distributed.world_size()
        here = [int(tokens.sum()) for tokens in self.attended]
        most = max(max(distributed.numbers_of_all([len(here)])))
        of_ranks = distributed.numbers_of_all([*here, *[-1] * (most - len(here))])
        self.tokens = [count for counts in zip(*of_ranks, strict=True) for count in counts if count >= 0]
        numbers = range(len(self.tokens))
        self.held_out = numbers[_HELD_OUT - 1 :: _HELD_OUT] or numbers[-1:]
        self.trained = [number for number in numbers if number not in self.held_out]

    def steps(self, count: int) -> list[list[int]]:
        """Draw the batches of each step: neighbours, which different ranks hold. An epoch has all of them."""
        draw, starts = np.random.default_rng(0), range(0, len(self.trained), _GROUP)
        firsts = islice(chain.from_iterable(draw.permutation(starts) for _ in repeat(None)), count)
        return [self.trained[first : first + _GROUP] for first in firsts]

    def here(self, numbers: Iterable[int]) -> list[int]:
        """Return the places in this rank's batches of those that it has."""
        return [number // self.ranks for number in numbers if number % self.ranks == self.rank]

    @torch.no_grad()
    def error(self, walk: Layerwise, targets: Sequence[Tensor]) -> float:
        """Return the squared error of the present layer on what is held out, as a share of the targets' variance."""
        here, device = self.here(self.held_out), walk.calibration.device
        width = max(max(distributed.numbers_of_all([targets[0].shape[-1] if targets else 0])))
        sums = torch.zeros(3, width, dtype=torch.float64, device=device)
        for output, place in zip(in_step(walk.outputs(here), len(here)), here, strict=True):
            tokens = self.attended[place]
            wanted = targets[place][tokens].to(device).double()
            lost = hidden_of(output)[tokens.to(device)] - wanted
            sums += torch.stack((lost.square().sum(0), wanted.square().sum(0), wanted.sum(0)))
        lost, squares, means = distributed.total(sums)
        variance = squares - means.square() / max(1, sum(self.tokens[number] for number in self.held_out))
        return float(lost.sum() / variance.sum().clamp(min=torch.finfo(torch.float32).tiny))


def _train(
    layer: nn.Module, walk: Layerwise, targets: Sequence[Tensor], batches: _Batches, spec: ReconstructSpec
) -> None:
    """Train the present layer by Adam on the squared error of its outputs, at a rate that falls linearly to 0."""
    device, weights = walk.calibration.device, [weight for weight in layer.parameters() if weight.requires_grad]
    present = [(weight != 0 if weight.dim() > 1 else None) for weight in weights]
    optimizer, steps = torch.optim.Adam(weights), batches.steps(spec.steps)
    places = (place for step in steps for place in batches.here(step))
    with contextlib.closing(walk.outputs(places)) as outputs:
        for number, step in enumerate(in_step(steps, len(steps))):
            optimizer.zero_grad()
            tokens = max(1, sum(batches.tokens[each] for each in step))
            for place in batches.here(step):
                attended = batches.attended[place]
                lost = hidden_of(next(outputs))[attended.to(device)] - targets[place][attended].to(device)
                (lost.square().sum() / tokens).backward()
            for weight, kept in zip(weights, present, strict=True):
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradient = distributed.total(gradient) if batches.ranks > 1 else gradient
                weight.grad = gradient if kept is None else gradient * kept
            optimizer.param_groups[0]["lr"] = spec.learning_rate * (1 - number / len(steps))
            optimizer.step()
    optimizer.zero_grad()
