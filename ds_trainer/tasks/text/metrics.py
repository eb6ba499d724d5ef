"""GLUE's metrics, by `torchmetrics`, over all examples of a split at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torchmetrics.functional.classification import (
    binary_f1_score,
    binary_matthews_corrcoef,
    multiclass_accuracy,
    multiclass_f1_score,
    multiclass_matthews_corrcoef,
)
from torchmetrics.functional.regression import pearson_corrcoef, spearman_corrcoef


def score(metrics: Sequence[str], predictions: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Each metric by its name; predictions and labels (n,), class indices or, with 0 classes, finite scores.

    F1 is of class 1 where there are two, the macro mean over more. A correlation (Matthews, Pearson, Spearman)
    with a constant is 0/0; it is counted as 0, as scikit-learn does for Matthews: a constant explains nothing.
    """
    if classes:
        return {name: _of_classes(name, predictions, labels, classes) for name in metrics}
    correlations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "pearson": pearson_corrcoef,
        "spearman": spearman_corrcoef,
    }
    if _constant(predictions) or _constant(labels):
        return dict.fromkeys(metrics, 0.0)
    return {name: float(correlations[name](predictions.double(), labels.double())) for name in metrics}


def _of_classes(name: str, predictions: Tensor, labels: Tensor, classes: int) -> float:
    if name == "accuracy":
        return float(multiclass_accuracy(predictions, labels, classes, average="micro"))
    if name == "f1":
        if classes == 2:
            return float(binary_f1_score(predictions, labels))
        return float(multiclass_f1_score(predictions, labels, classes, average="macro"))
    assert name == "matthews", name
    if _constant(predictions) or _constant(labels):
        return 0.0
    if classes == 2:
        return float(binary_matthews_corrcoef(predictions, labels))
    return float(multiclass_matthews_corrcoef(predictions, labels, classes))


def _constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())
