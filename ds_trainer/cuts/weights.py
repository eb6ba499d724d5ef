"""Write zeros in the linear layers of a trained model, and refit the weights that are kept.

Single weights, blocks, or two of every four: a model of the same shape with fewer weights, for compact files, for
kernels that skip blocks, or to be trained further (`keep_zeros`). Matrices are cut in the order in which the model
computes them, each on the inputs that it gets from those that are cut already.

How much each matrix keeps is decided by the diagonal of the empirical Fisher matrix: if a weight w of a trained model
is removed, the loss grows by about w^2 F / 2, where F is the mean over examples of the squared derivative of an
example's loss (Kwon et al., arXiv 2204.09656). These costs are comparable over all layers. They also join the two ways
to judge a weight, the error of the layer and the gradient of the loss, as in MOONSHOT (arXiv 2604.13287): the error of
each output of a matrix counts by the sum of its weights' F, which says how much the loss depends on that output.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.cuts.calibration import Calibration, finite
from ds_trainer.cuts.layerwise import by_example, with_grams
from ds_trainer.cuts.surgeon import CutRecord, Fitting, Gram, Pattern, Replacement, admm_mask, masked_least_squares
from ds_trainer.models.layers import AnyLinear, encoder_linears, in_features, out_features, rows_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.ranks.stopping import in_step
from ds_trainer.recipe.cut_specs import CutSpec


@torch.no_grad()
def cut_weights(model: Any, calibration: Calibration, spec: CutSpec) -> list[CutRecord]:
    """Write the zeros of a spec in the linear layers of the encoder, in place; collective.

    The model is on the CPU and in evaluation mode. Layers that it never computes stay whole, and have no record.
    UserError where the spec's pattern does not fit a layer, or keeps all weights.
    """
    linears, records = cut_linears(model, spec), list[CutRecord]()
    fisher = fisher_diagonals(model, linears, calibration) if spec.judges_answers else {}
    shares = _shares(linears, fisher, spec)
    for name, gram in with_grams(model, linears, calibration, "cutting weights"):
        solve = partial(_replacement, linears[name], gram, shares[name], spec, fisher.get(name))
        replacement = distributed.on_main(solve)
        replacement.write(linears[name])
        kept = int(replacement.weight.count_nonzero())
        records.append(CutRecord(name, "weights", replacement.weight.numel(), kept, replacement.error))
    if all(record.kept == record.count for record in records):
        raise UserError(f"cut: a share of {spec.share} rounds to all weights: lower it, or set a smaller block_shape")
    return records


def cut_linears(model: Any, spec: CutSpec) -> dict[str, AnyLinear]:
    """Return the linear layers that a spec writes zeros in. UserError where its pattern does not fit one."""
    linears = encoder_linears(model)
    for name, linear in linears.items():
        if spec.granularity == "2:4" and in_features(linear) % 4:
            raise UserError(
                f"cut: {name} has {in_features(linear)} inputs, which are no multiple of 4, as 2:4 needs: set "
                "granularity to weight or block"
            )
    return linears


def _shares(linears: Mapping[str, AnyLinear], fisher: Mapping[str, Tensor], spec: CutSpec) -> dict[str, float]:
    """Return the share that each matrix keeps.

    All keep the same share or, if not uniform, each keeps its weights that are among the model's largest scores. Scores
    are squared weights (magnitude), times the Fisher diagonal for all other methods: errors are not comparable between
    two matrices, and neither are Wanda's scores.
    """
    if spec.uniform or spec.granularity == "2:4":
        return dict.fromkeys(linears, spec.share)
    # one matrix in fp32 at a time
    weights = ((name, rows_of(linear.weight, type(linear)).float()) for name, linear in linears.items())
    scores = [_pattern(spec, one.shape[1]).means(_scores(one, fisher.get(name))) for name, one in weights]
    return dict(zip(linears, shares_of_largest(scores, spec.share), strict=True))


@torch.enable_grad()
def fisher_diagonals(model: Any, linears: Mapping[str, AnyLinear], calibration: Calibration) -> dict[str, Tensor]:
    """Return, for the weight of each linear layer, (out, in), the sums over all examples of its squared derivatives.

    Where the examples of a batch share an input, as DeBERTa's do its relative positions, the derivative of the batch is
    squared: the same in expectation. The whole model is on the device meanwhile. The sums are in fp32 on the CPU;
    collective.
    """
    model.to(calibration.device)
    squares = {
        name: torch.zeros(out_features(linear), in_features(linear), device=calibration.device)
        for name, linear in linears.items()
    }
    # a zero that is added to the outputs of all layers: its derivative needs theirs, and none of a weight
    zero = torch.zeros((), device=calibration.device, requires_grad=True)
    batches = in_step(enumerate(calibration.attended), len(calibration.attended))
    for index, attended in progress(batches, "squaring derivatives", "batch", len(calibration.attended)):
        with contextlib.ExitStack() as hooks:
            for name, linear in linears.items():
                hooks.enter_context(linear.register_forward_hook(_adding_to(squares[name], zero, attended.shape)))
            torch.autograd.grad(calibration.loss(model, index), zero)
    model.cpu()
    return {name: finite(distributed.total(sums), f"the derivatives of {name}").cpu() for name, sums in squares.items()}


def _adding_to(squares: Tensor, zero: Tensor, tokens: torch.Size) -> Any:
    """Return a hook of a linear layer that adds the squared derivatives of its weight, of each example by itself."""

    def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs, output = given[0].detach(), output + zero
        output.register_hook(lambda gradient: add(inputs, gradient))
        return output

    @torch.no_grad()
    def add(inputs: Tensor, gradient: Tensor) -> None:
        for x, slope in zip(by_example(inputs, tokens), by_example(gradient, tokens), strict=True):
            squares.add_((slope.flatten(0, -2).T @ x.flatten(0, -2)).square())

    return hook


def shares_of_largest(scores: Sequence[Tensor], keep: float) -> list[float]:
    """Return the share of each tensor's scores that are among the largest `keep` of all; scores are fp32, none below 0.

    The smallest score to keep is bisected by its bits, which are in the order of such numbers, so that no score is
    copied. Scores equal to it are kept by the same share in every tensor.
    """
    wanted = round(keep * sum(score.numel() for score in scores))
    low, high = 0, 0x7F800000  # the bits of 0 and infinity
    while high - low > 1:
        middle = (low + high) // 2
        least = torch.tensor(middle, dtype=torch.int32).view(torch.float32)
        if sum(int((score >= least).count_nonzero()) for score in scores) >= wanted:
            low = middle
        else:
            high = middle
    least = torch.tensor(low, dtype=torch.int32).view(torch.float32)
    above = [int((score > least).count_nonzero()) for score in scores]
    equal = [int((score == least).count_nonzero()) for score in scores]
    rest = (wanted - sum(above)) / max(1, sum(equal))
    return [(a + rest * e) / score.numel() for a, e, score in zip(above, equal, scores, strict=True)]


def _pattern(spec: CutSpec, features: int) -> Pattern:
    """Return the pattern for a matrix with this many inputs. Wanda compares the weights of one output."""
    if spec.granularity == "block":
        return Pattern(block=(spec.block_shape[0], spec.block_shape[1]))
    if spec.granularity == "2:4":
        return Pattern(group=4)
    return Pattern(group=features if spec.method == "wanda" else None)


def _replacement(linear: AnyLinear, gram: Gram, share: float, spec: CutSpec, fisher: Tensor | None) -> Replacement:
    """Return what becomes of a linear layer that keeps a share of its weights. Those that are zero stay zero."""
    fitting = Fitting(linear, gram, spec.damping)
    dense, pattern = fitting.weight, _pattern(spec, fitting.weight.shape[1])
    if spec.method == "obs":
        by_output = torch.ones_like(dense[:, :1]) if fisher is None else _importance_of_outputs(fisher).to(dense)
        mask, values = admm_mask(dense * by_output, fitting.damped, share, pattern)
        values = values / by_output
    else:
        importance = fitting.squares if spec.method == "wanda" else fisher
        mask, values = pattern.mask(_scores(dense, importance), share), dense
    mask &= dense != 0
    if not spec.update_weights:
        return fitting.replacement(dense * mask)
    return fitting.replacement(masked_least_squares(dense, fitting.damped, mask, values))


def _importance_of_outputs(fisher: Tensor) -> Tensor:
    """Return the root of how much the loss depends on each output of a matrix, (out, 1); no output is left out."""
    sums = fisher.sum(1, keepdim=True)
    return sums.clamp(min=max(1e-3 * float(sums.mean()), torch.finfo(sums.dtype).tiny)).sqrt()


def _scores(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return the squares of the weights, times an importance that broadcasts to them."""
    return weight.square() if importance is None else weight.square() * importance.to(weight)
