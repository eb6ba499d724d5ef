"""Surgery on one linear layer: what is removed, at which error, and what the kept weights and the moments become."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_trainer.cuts import surgeon
from ds_trainer.cuts.surgeon import (
    Fitting,
    Gram,
    Pattern,
    admm_mask,
    masked_least_squares,
    output_error,
    removal,
)

OUTPUTS = 5
WEIGHTS, FOUR, BLOCKS = Pattern(), Pattern(group=4), Pattern(block=(4, 3))


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


def every_step(data: Tensor, weight: Tensor, width: int) -> tuple[list[int], list[float]]:
    """The greedy removal, with the error of every remaining group fitted anew at every step."""
    remaining, order, errors = list(range(data.shape[1] // width)), [], [0.0]
    while remaining:
        trials = {group: smallest_error(data, weight, [*order, group], width) for group in remaining}
        order.append(min(trials, key=trials.__getitem__))
        remaining.remove(order[-1])
        errors.append(trials[order[-1]])
    return order, np.diff(errors).tolist()


@pytest.mark.parametrize("pending", [1, 6, 96])
@pytest.mark.parametrize(("features", "width"), [(12, 1), (12, 2), (12, 4), (15, 5), (6, 6), (1, 1)])
def test_the_order_and_the_costs_are_those_of_trying_every_group(features, width, pending, monkeypatch):
    """However many removals wait for the update of the matrices, and to the last group."""
    monkeypatch.setattr(surgeon, "_PENDING", pending)
    data, moments, weight = layer(features)
    greedy, brute = removal(weight, moments, width), every_step(data, weight, width)
    assert greedy[0] == brute[0]
    assert greedy[1] == pytest.approx(brute[1], rel=1e-8, abs=1e-10)


@pytest.fixture
def sparse():
    """A weight (16, 24), and the covariance of its inputs: of unlike variances, some nearly dependent on others."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    inputs = (draw(400, 10) @ draw(10, 24) + 0.3 * draw(400, 24)) * torch.linspace(0.3, 3, 24)
    return draw(16, 24), inputs.T @ inputs / len(inputs)


def solved(weight, covariance, share, pattern):
    mask, values = admm_mask(weight, covariance, share, pattern)
    return masked_least_squares(weight, covariance, mask, values)


@pytest.mark.parametrize("share", [0.001, 0.15, 0.5, 1.0])
def test_exactly_the_share_is_kept(sparse, share):
    """A mask keeps the rounded share of all weights, and at least one; the values are zero elsewhere."""
    mask, values = admm_mask(*sparse, share, WEIGHTS)
    assert int(mask.count_nonzero()) == max(1, round(share * mask.numel()))
    assert values[~mask].abs().max() == 0 if share < 1 else torch.allclose(values, sparse[0])
    each = Pattern(group=24).mask(sparse[0].square(), share).sum(1)
    assert (each == max(1, round(share * 24))).all()


def test_blocks_are_kept_whole_and_those_at_an_edge_are_smaller():
    """A block is kept or removed as one, by its mean score; blocks of (4, 3) divide (6, 7) into 2 by 3."""
    scores = torch.rand(6, 7, dtype=torch.float64)
    means = torch.stack([torch.stack([p.mean() for p in row.split(3, 1)]) for row in scores.split(4)])
    mask = BLOCKS.mask(scores, 0.5)
    kept = [[part.unique().tolist() for part in row.split(3, 1)] for row in mask.split(4)]
    assert kept == [[[bool(mean >= means.flatten().sort().values[3])] for mean in row] for row in means]


@pytest.mark.parametrize("pattern", [WEIGHTS, FOUR, BLOCKS], ids=["weight", "2:4", "block"])
def test_the_error_of_a_pattern_is_below_that_of_the_largest_weights_refitted(sparse, pattern):
    """The choice of weights, of blocks, or of two in four is better than that of the largest, with the best values."""
    weight = sparse[0]
    by_size = masked_least_squares(*sparse, pattern.mask(weight.square(), 0.5), weight)
    assert output_error(*sparse, solved(*sparse, 0.5, pattern)) < output_error(*sparse, by_size)


def test_the_values_on_a_mask_are_those_of_least_squares(sparse):
    """Each row's values on its mask are the solution of the normal equations, within the tolerance of the iteration."""
    weight, covariance = sparse
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    fitted = masked_least_squares(weight, covariance, mask, weight)
    best = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(covariance[kept][:, kept], covariance[kept] @ weight[row])
    assert output_error(weight, covariance, fitted) <= (1 + 1e-4) * output_error(weight, covariance, best)
    assert torch.allclose(fitted, best, atol=0.02)


def fitting(*batches: Tensor, bias: bool, damping: float = 0.0) -> Fitting:
    gram = Gram(batches[0].shape[1], torch.device("cpu"))
    for batch in batches:
        gram.add(batch)
    return Fitting(torch.nn.Linear(batches[0].shape[1], 2, bias), gram, damping)


def test_moments_are_those_of_all_tokens() -> None:
    """Second moments, or the covariance where a bias is fitted too, over batches of different sizes, one of them empty.

    Damping comes on top, as a share of the mean diagonal; the mean squares are those without it.
    """
    batches = [torch.randn(rows, 6) + torch.arange(6) for rows in (5, 1, 0, 30)]
    inputs = torch.cat(batches).double()
    moments, covariance = inputs.T @ inputs / 36, inputs.T.cov(correction=0)
    for bias, expected in ((False, moments), (True, covariance)):
        torch.testing.assert_close(fitting(*batches, bias=bias).damped, expected, rtol=1e-5, atol=1e-5)
        damped = fitting(*batches, bias=bias, damping=0.1)
        damping = 0.1 * expected.diagonal().mean() * torch.eye(6)
        torch.testing.assert_close(damped.damped, expected + damping, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(damped.squares, moments.diagonal(), rtol=1e-5, atol=1e-5)


def test_a_small_variance_beside_a_large_mean_is_not_rounded_away() -> None:
    """Inputs of 1,000 +- 0.01, whose squares differ by less than fp32 can tell, and constants: the latter vary by 0."""
    inputs = 1000 + 0.01 * torch.randn(4000, 3)
    inputs[:, 2] = 1000.1
    damped = fitting(*inputs.split(500), bias=True).damped
    expected = inputs.double().T.cov(correction=0)
    torch.testing.assert_close(damped, expected, rtol=1e-3, atol=2e-6)
    for value in (0.0, 3.5):  # and the moments of nothing but constants have an inverse
        constant = fitting(torch.full((9, 4), value), bias=True, damping=0.01)
        assert torch.linalg.inv(constant.damped).isfinite().all()
