"""Write zeros in the linear layers of a trained model, and let the weights that are kept make up for them.

Single weights, blocks, or two of every four: a model of the same shape with fewer weights, for compact files, for
kernels that skip blocks, or to be trained further (`keep_zeros`, or `prune` from these masks). Matrices are cut in the
order in which the model computes them, each on the inputs that it gets from those that are cut already.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.fisher import fisher_diagonals
from ds_trainer.models.cut.fitting import CutRecord, Fitting, Replacement
from ds_trainer.models.cut.layerwise import Calibration, Gram, Layerwise
from ds_trainer.models.cut.sparse import Pattern, admm_mask, masked_least_squares
from ds_trainer.models.layers import AnyLinear, encoder_linears, in_features, out_features, rows_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError


@torch.no_grad()
def cut_weights(model: Any, calibration: Calibration, spec: CutSpec, device: torch.device) -> list[CutRecord]:
    """Write the zeros of a spec in the linear layers of the encoder, in place; collective.

    The model is on the CPU and in evaluation mode. Layers that it never computes stay whole, and have no record.
    UserError where the spec's pattern does not fit a layer, or keeps all weights.
    """
    cut = _WeightCut(model, calibration, spec, device)
    shares, records = cut.shares(), []
    for name, gram in cut.with_grams():
        replacement = cut.solved(name, gram, shares[name])
        replacement.write(cut.linears[name])
        kept = int(replacement.weight.count_nonzero())
        records.append(CutRecord(name, "weights", replacement.weight.numel(), kept, replacement.error))
    if all(record.kept == record.count for record in records):
        raise UserError(f"cut: a share of {spec.share} rounds to all weights: lower it")
    return records


def cut_linears(model: Any, spec: CutSpec) -> dict[str, AnyLinear]:
    """Return the linear layers that a spec writes zeros in. UserError where its pattern does not fit one."""
    linears = encoder_linears(model)
    rows, columns = spec.block_shape
    for name, linear in linears.items() if spec.granularity == "block" else ():
        if out_features(linear) <= rows and in_features(linear) <= columns:
            raise UserError(
                f"cut: {name} is ({out_features(linear)}, {in_features(linear)}), one block of ({rows}, {columns}), "
                "which would stay: set block_shape to smaller blocks"
            )
    for name, linear in linears.items() if spec.granularity == "2:4" else ():
        if in_features(linear) % 4:
            raise UserError(
                f"cut: {name} has {in_features(linear)} inputs, which are no multiple of 4, as 2:4 needs: set "
                "granularity to weight or block"
            )
    return linears


class _WeightCut:
    """The linear layers of a model that is cut, and how a spec cuts each of them. All methods are collective."""

    def __init__(self, model: Any, calibration: Calibration, spec: CutSpec, device: torch.device) -> None:
        self.model, self.calibration, self.spec, self.device = model, calibration, spec, device
        self.linears = cut_linears(model, spec)
        self.fisher: dict[str, Tensor] = {}
        if spec.judges_answers:
            self.fisher = fisher_diagonals(model, self.linears, calibration, device)

    def with_grams(self) -> Iterator[tuple[str, Gram]]:
        """Yield the linear layers that the model computes, in order and on the device, with the sums of their inputs.

        A layer that is changed before the next one is taken changes the inputs of those that follow.
        """
        layerwise = Layerwise(self.model, self.calibration, self.device)
        for layer in layerwise:
            inside = {*layer.modules()}
            linears = {name: linear for name, linear in self.linears.items() if linear in inside}
            for group in layerwise.input_groups(linears):
                gram = layerwise.grams({group[0]: linears[group[0]]})[group[0]]
                for name in group:
                    yield name, gram

    def shares(self) -> dict[str, float]:
        """Return the share that each matrix keeps.

        The same share for all or, if not uniform, the share of its weights that are among the largest scores of the
        model. Scores are squared weights (magnitude), times the Fisher diagonal for all other methods: errors are not
        comparable between two matrices, and neither are Wanda's scores.
        """
        keep = self.spec.share
        if self.spec.uniform or self.spec.granularity == "2:4":
            return dict.fromkeys(self.linears, keep)
        scores = {name: self._means_of_scores(name) for name in self.linears}
        return dict(zip(scores, shares_of_largest([*scores.values()], keep), strict=True))

    def solved(self, name: str, gram: Gram, share: float) -> Replacement:
        """Return what becomes of a linear layer that keeps a share of its weights."""
        return distributed.on_main(partial(_solved, self.linears[name], gram, share, self.spec, self.fisher.get(name)))

    def _means_of_scores(self, name: str) -> Tensor:
        weight = rows_of(self.linears[name].weight, type(self.linears[name]))
        return _pattern(self.spec, weight.shape[1]).means(_scores(weight.float(), self.fisher.get(name)))


def shares_of_largest(scores: Sequence[Tensor], keep: float) -> list[float]:
    """Return the share of each tensor's scores that are among the largest `keep` of all; scores are fp32, none below 0.

    The smallest score to keep is bisected by its bits, which are in the order of such numbers, so that no score is
    copied. Scores equal to it are kept by the same share in every tensor.
    """
    wanted = round(keep * sum(score.numel() for score in scores))
    low, high = 0, 0x7F800000  # the bits of 0 and infinity
    while high - low > 1:
        middle = (low + high) // 2
        if sum(int((score >= _of_bits(middle)).count_nonzero()) for score in scores) >= wanted:
            low = middle
        else:
            high = middle
    above = [int((score > _of_bits(low)).count_nonzero()) for score in scores]
    equal = [int((score == _of_bits(low)).count_nonzero()) for score in scores]
    rest = (wanted - sum(above)) / max(1, sum(equal))
    return [(a + rest * e) / score.numel() for a, e, score in zip(above, equal, scores, strict=True)]


def _of_bits(bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def _pattern(spec: CutSpec, features: int) -> Pattern:
    """Return the pattern for a matrix of so many inputs. Wanda compares the weights of one output with each other."""
    if spec.granularity == "block":
        return Pattern(block=(spec.block_shape[0], spec.block_shape[1]))
    if spec.granularity == "2:4":
        return Pattern(group=4)
    return Pattern(group=features if spec.method == "wanda" else None)


def _solved(linear: AnyLinear, gram: Gram, share: float, spec: CutSpec, fisher: Tensor | None) -> Replacement:
    """Return what becomes of a linear layer that keeps a share of its weights. Those that are zero stay zero."""
    fitting = Fitting(linear, gram, spec.damping)
    dense, pattern = fitting.weight, _pattern(spec, fitting.weight.shape[1])
    if spec.method == "obs":
        mask, values = admm_mask(dense, fitting.damped, share, pattern)
    elif spec.method == "wanda":
        mask, values = pattern.mask(_scores(dense, fitting.squares), share), dense
    else:
        mask, values = pattern.mask(_scores(dense, fisher), share), dense
    mask &= dense != 0
    if not spec.update_weights:
        return fitting.replacement(dense * mask)
    return fitting.replacement(masked_least_squares(dense, fitting.damped, mask, values))


def _scores(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return the squares of the weights, times an importance that broadcasts to them."""
    return weight.square() if importance is None else weight.square() * importance.to(weight)
