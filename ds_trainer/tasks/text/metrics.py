"""GLUE's metrics, by `torchmetrics`, over all examples of a split at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torchmetrics.functional.classification import (
    binary_f1_score,
    binary_matthews_corrcoef,
    multiclass_accuracy,
    multiclass_f1_score,
    multiclass_matthews_corrcoef,
)
from torchmetrics.functional.regression import pearson_corrcoef, spearman_corrcoef

_CORRELATIONS = ("matthews", "pearson", "spearman")


def score(metrics: Sequence[str], predictions: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Compute metrics by their names; predictions and labels (n,) are class indices or, with 0 classes, finite scores.

    F1 is of class 1 where there are two classes, the macro mean over more. A correlation (Matthews, Pearson, Spearman)
    with a constant is 0/0 and counts as 0, as scikit-learn has it for Matthews: a constant explains nothing.
    """
    constant = any(bool((values == values[0]).all()) for values in (predictions, labels))
    binary = classes == 2
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "accuracy": partial(multiclass_accuracy, num_classes=classes, average="micro"),
        "f1": binary_f1_score if binary else partial(multiclass_f1_score, num_classes=classes, average="macro"),
        "matthews": binary_matthews_corrcoef if binary else partial(multiclass_matthews_corrcoef, num_classes=classes),
        "pearson": pearson_corrcoef,
        "spearman": spearman_corrcoef,
    }
    if not classes:
        predictions, labels = predictions.double(), labels.double()
    return {
        name: 0.0 if constant and name in _CORRELATIONS else float(functions[name](predictions, labels))
        for name in metrics
    }
