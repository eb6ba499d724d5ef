"""The metrics of labelled text, over all examples of a split at once: GLUE's by `torchmetrics`, and F1 by counting."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from ds_trainer.tasks.data import Array

_CORRELATIONS = ("matthews", "pearson", "spearman")


def score(
    metrics: Sequence[str], predictions: Tensor, labels: Tensor, classes: int, positive: int | None = None
) -> dict[str, float]:
    """Compute metrics by their names. Predictions and labels (n,) are class indices or, with 0 classes, finite scores.

    "f1" is that of the class `positive`; where that is None, it is the mean over the classes. A correlation (Matthews,
    Pearson, Spearman) with a constant is 0/0 and counts as 0, as in scikit-learn's Matthews: a constant explains
    nothing.
    """
    from torchmetrics.functional import classification, regression  # loads matplotlib, where that is installed

    def f1(predictions: Tensor, labels: Tensor, of: int | None = positive) -> float:
        one_hot = np.eye(classes, dtype=bool)
        scores = f1_scores(one_hot[predictions.numpy()], one_hot[labels.numpy()])
        return scores["macro_f1"] if of is None else scores[f"f1/{of}"]

    constant = any(bool((values == values[0]).all()) for values in (predictions, labels))
    functions: dict[str, Callable[[Tensor, Tensor], Tensor | float]] = {
        "accuracy": partial(classification.multiclass_accuracy, num_classes=classes, average="micro"),
        "f1": f1,
        "macro_f1": partial(f1, of=None),
        "matthews": partial(classification.multiclass_matthews_corrcoef, num_classes=classes),
        "pearson": regression.pearson_corrcoef,
        "spearman": regression.spearman_corrcoef,
    }
    if not classes:
        predictions, labels = predictions.double(), labels.double()
    return {
        name: 0.0 if constant and name in _CORRELATIONS else float(functions[name](predictions, labels))
        for name in metrics
    }


def f1_scores(predicted: Array, gold: Array, names: Sequence[str] = ()) -> dict[str, float]:
    """Return `micro_f1`, `macro_f1`, and `f1/NAME` of every class; both arrays are (n, classes) bool.

    A class that is neither a label nor an answer of any example has F1 0, and no part in the mean, as in scikit-learn.
    """
    hits, counts = 2 * (predicted & gold).sum(0), predicted.sum(0) + gold.sum(0)
    by_class, occurs = hits / np.maximum(counts, 1), counts > 0
    named = zip(names or range(len(by_class)), by_class.tolist(), strict=True)
    return {
        "micro_f1": float(hits.sum() / max(1, counts.sum())),
        "macro_f1": float(by_class[occurs].mean()) if occurs.any() else 0.0,
        **{f"f1/{name}": value for name, value in named},
    }


def best_threshold(probabilities: Array, gold: Array) -> float:
    """Return the probability above which a label is given for the best micro F1; both arrays are (n, classes).

    It lies in the middle between two probabilities, so that rounding in another run does not cross it.
    """
    order = np.argsort(-probabilities, axis=None, kind="stable")
    sorted_down, hits = probabilities.ravel()[order].astype(np.float64), np.cumsum(gold.ravel()[order])
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + max(1, gold.sum()))
    below = np.append(sorted_down[1:], 0.0)
    best = int(np.argmax(np.where(below < sorted_down, f1, -1)))  # equal probabilities are above it, or none is
    return float((sorted_down[best] + below[best]) / 2)
