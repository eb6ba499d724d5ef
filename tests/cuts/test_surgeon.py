"""The order in which optimal brain surgeon removes inputs, what that costs, and what the kept weights become."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_trainer.cuts import surgeon
from ds_trainer.cuts.surgeon import Removal, least_squares, magnitude_removal, output_error, removal

OUTPUTS = 5


def layer(features: int, seed: int = 0, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor, Tensor]:
    """Data (rows, features) whose features depend on each other, their second moments, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(features, features, generator=generator, dtype=torch.float64)
    data = torch.randn(4 * features, features, generator=generator, dtype=torch.float64) @ mixed
    weight = torch.randn(outputs, features, generator=generator, dtype=torch.float64)
    return data, data.T @ data / len(data), weight


def columns_of(groups: list[int], width: int, features: int) -> Tensor:
    """Which inputs remain if these groups are removed."""
    remain = torch.ones(features // width, dtype=torch.bool)
    remain[groups] = False
    return remain.repeat_interleave(width)


def smallest_error(data: Tensor, weight: Tensor, groups: list[int], width: int) -> float:
    """The mean squared error without these groups, the other weights fitted to the data by numpy."""
    remain = columns_of(groups, width, data.shape[1])
    wanted, inputs = (data @ weight.T).numpy(), data[:, remain].numpy()
    solution = np.linalg.lstsq(inputs, wanted, rcond=None)[0]
    return float(np.square(wanted - inputs @ solution).sum() / len(data))


def every_step(data: Tensor, weight: Tensor, width: int) -> Removal:
    """The greedy removal, with the error of every remaining group fitted anew at every step."""
    remaining, order, errors = list(range(data.shape[1] // width)), [], [0.0]
    while remaining:
        trials = {group: smallest_error(data, weight, [*order, group], width) for group in remaining}
        order.append(min(trials, key=trials.__getitem__))
        remaining.remove(order[-1])
        errors.append(trials[order[-1]])
    return Removal(order, np.diff(errors).tolist())


@pytest.mark.parametrize("pending", [1, 6, 96])
@pytest.mark.parametrize(("features", "width"), [(12, 1), (12, 2), (12, 4), (15, 5), (6, 6), (1, 1)])
def test_the_order_and_the_costs_are_those_of_trying_every_group(features, width, pending, monkeypatch):
    """However many removals wait for the update of the matrices, and to the last group."""
    monkeypatch.setattr(surgeon, "_PENDING", pending)
    data, moments, weight = layer(features)
    greedy, brute = removal(weight, moments, width), every_step(data, weight, width)
    assert greedy.order == brute.order
    assert greedy.errors == pytest.approx(brute.errors, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("width", [1, 4])
def test_the_surgeon_is_better_than_magnitude(width):
    """On 100 layers, against the smallest weights removed and the others as they are: less lost at every count.

    It is no theorem: greedy removal is not the best of all choices, and is worse on one layer in hundreds.
    """
    lost = torch.zeros(2, 100, 8)
    for seed in range(100):
        _, moments, weight = layer(8 * width, seed)
        squares = weight.square().sum(0).view(8, width).sum(1)
        orders = removal(weight, moments, width), magnitude_removal(squares)
        for count in range(1, 9):
            kept, large = (columns_of(each.order[:count], width, 8 * width) for each in orders)
            fitted = torch.zeros_like(weight)
            fitted[:, kept] = least_squares(weight, moments, kept)
            for row, cut in enumerate((fitted, weight * large)):
                lost[row, seed, count - 1] = output_error(weight, moments, cut)
    surgeon_lost, magnitude_lost = lost[:, :, :-1]
    assert (surgeon_lost.mean(0) < 0.8 * magnitude_lost.mean(0)).all()
    assert (surgeon_lost > magnitude_lost).double().mean() < 0.01


@pytest.mark.parametrize("biased", [False, True])
def test_least_squares_is_that_of_the_data(biased):
    """As torch.linalg.lstsq fits the outputs: by moments or, where a bias is fitted with it, by the covariance."""
    data, moments, weight = layer(12)
    kept = columns_of([1, 4, 7], 1, 12)
    inputs = data + torch.arange(12) * 0.3 if biased else data
    wanted = inputs @ weight.T
    if biased:
        centred = inputs - inputs.mean(0)
        moments = centred.T @ centred / len(data)
        ones = inputs.new_ones(len(inputs), 1)
        solution = torch.linalg.lstsq(torch.cat((inputs[:, kept], ones), 1), wanted).solution[:-1]
    else:
        solution = torch.linalg.lstsq(inputs[:, kept], wanted).solution
    torch.testing.assert_close(least_squares(weight, moments, kept), solution.T)


def test_an_input_that_says_nothing_goes_first():
    """One that is always zero, then one that is a sum of others; both at no cost."""
    data, _, weight = layer(8)
    data[:, 3], data[:, 6] = 0, data[:, 0] + data[:, 1]
    damped = data.T @ data / len(data) + 1e-9 * torch.eye(8)
    order = removal(weight, damped, 1)
    assert order.order[0] == 3
    assert order.order[1] in (0, 1, 6)
    assert sum(order.errors[:2]) < 1e-6 < order.errors[2]
