"""Masks and values of one matrix: patterns, their counts, and errors below those of the published sweeps."""

import pytest
import torch

from ds_trainer.cuts.surgeon import Pattern, admm_mask, masked_least_squares, output_error

WEIGHTS, FOUR, BLOCKS = Pattern(), Pattern(group=4), Pattern(block=(4, 3))


@pytest.fixture
def layer():
    """A weight (16, 24), and the covariance of its inputs: of unlike variances, some nearly dependent on others."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    inputs = (draw(400, 10) @ draw(10, 24) + 0.3 * draw(400, 24)) * torch.linspace(0.3, 3, 24)
    return draw(16, 24), inputs.T @ inputs / len(inputs)


def solved(weight, covariance, share, pattern):
    mask, values = admm_mask(weight, covariance, share, pattern)
    return masked_least_squares(weight, covariance, mask, values)


def swept(weight, covariance, share):
    """SparseGPT as its paper writes it (arXiv 2301.00774, algorithm 1), one block of columns over the whole matrix."""
    weight, upper = weight.clone(), torch.linalg.cholesky(torch.linalg.inv(covariance), upper=True)
    mask = Pattern().mask(weight.square() / upper.diagonal().square(), share)
    for column in range(weight.shape[1]):
        lost = torch.where(mask[:, column], 0, weight[:, column]) / upper[column, column]
        weight[:, column:] -= torch.outer(lost, upper[column, column:])
    return weight * mask


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 1.0])
def test_exactly_the_share_is_kept(layer, share):
    """A mask keeps the rounded share of all weights, and the values are zero elsewhere."""
    mask, values = admm_mask(*layer, share, WEIGHTS)
    assert int(mask.count_nonzero()) == round(share * mask.numel())
    assert values[~mask].abs().max() == 0 if share < 1 else torch.allclose(values, layer[0])


def test_a_share_that_rounds_to_nothing_keeps_one(layer):
    """Of the matrix or, where outputs compare their own weights, of each output."""
    assert int(solved(*layer, 0.001, WEIGHTS).count_nonzero()) == 1
    assert (Pattern(group=24).mask(layer[0].square(), 0.001).sum(1) == 1).all()


def test_blocks_are_kept_whole_and_those_at_an_edge_are_smaller():
    """A block is kept or removed as one, by its mean score; blocks of (4, 3) divide (6, 7) into 2 by 3."""
    scores = torch.rand(6, 7, dtype=torch.float64)
    means = torch.stack([torch.stack([p.mean() for p in row.split(3, 1)]) for row in scores.split(4)])
    mask = BLOCKS.mask(scores, 0.5)
    kept = [[part.unique().tolist() for part in row.split(3, 1)] for row in mask.split(4)]
    assert kept == [[[bool(mean >= means.flatten().sort().values[3])] for mean in row] for row in means]


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_the_error_is_below_the_sweeps_below_wandas_below_magnitudes(layer, share):
    """At the same number of weights the error is below that of SparseGPT, of Wanda, and of the largest weights."""
    weight, covariance = layer
    by_input = WEIGHTS.mask(weight.square() * covariance.diagonal(), share)
    by_size = WEIGHTS.mask(weight.square(), share)
    cuts = [solved(*layer, share, WEIGHTS), swept(*layer, share), weight * by_input, weight * by_size]
    errors = [output_error(weight, covariance, cut) for cut in cuts]
    assert errors == sorted(errors)
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("pattern", [FOUR, BLOCKS], ids=["2:4", "block"])
def test_the_error_of_a_pattern_is_below_that_of_the_largest_weights_refitted(layer, pattern):
    """The surgeon's choice of blocks, or of two in four, is better than that of the largest, with the best values."""
    weight = layer[0]
    by_size = masked_least_squares(*layer, pattern.mask(weight.square(), 0.5), weight)
    assert output_error(*layer, solved(*layer, 0.5, pattern)) < output_error(*layer, by_size)


def test_the_values_on_a_mask_are_those_of_least_squares(layer):
    """Each row's values on its mask are the solution of the normal equations, within the tolerance of the iteration."""
    weight, covariance = layer
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    fitted = masked_least_squares(weight, covariance, mask, weight)
    best = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(covariance[kept][:, kept], covariance[kept] @ weight[row])
    assert output_error(weight, covariance, fitted) <= (1 + 1e-4) * output_error(weight, covariance, best)
    assert torch.allclose(fitted, best, atol=0.02)
