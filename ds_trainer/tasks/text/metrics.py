"""GLUE's metrics, by `torchmetrics`, over all examples of a split at once."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

_CORRELATIONS = ("matthews", "pearson", "spearman")


def score(metrics: Sequence[str], predictions: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Compute metrics by their names. Predictions and labels (n,) are class indices or, with 0 classes, finite scores.

    With two classes, F1 is that of class 1; with more, the mean over the classes. A correlation (Matthews, Pearson,
    Spearman) with a constant is 0/0 and counts as 0, as in scikit-learn's Matthews: a constant explains nothing.
    """
    from torchmetrics.functional import classification, regression  # loads matplotlib, where that is installed

    constant = any(bool((values == values[0]).all()) for values in (predictions, labels))
    macro_f1 = partial(classification.multiclass_f1_score, num_classes=classes, average="macro")
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "accuracy": partial(classification.multiclass_accuracy, num_classes=classes, average="micro"),
        "f1": classification.binary_f1_score if classes == 2 else macro_f1,
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
