"""The tasks of GLUE (arXiv 1804.07461) as a table, and what follows from the name of a labelled-text task.

The module loads neither torch nor numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.text.docstrings import PACKAGES

REGRESSION_METRICS: tuple[str, ...] = ("pearson", "spearman")
CLASS_METRICS: tuple[str, ...] = ("accuracy", "f1", "macro_f1", "matthews")
SEVERAL_LABELS_METRICS: tuple[str, ...] = ("micro_f1", "macro_f1")


@dataclass(frozen=True)
class GlueTask:
    """The files of one task of GLUE.

    `labels` maps each label in the files to its name, in the order of the hub; it is empty if the labels are scores.
    `header` names the columns of files without a header line. `hub_columns` are set if the hub names its columns
    differently.
    """

    folder: str
    columns: tuple[str, ...]
    label: str
    labels: Mapping[str, str]
    metrics: tuple[str, ...] = ("accuracy",)
    header: tuple[str, ...] | None = None
    evaluation: Mapping[str, str] = field(default_factory=lambda: {"validation": "dev.tsv"})
    hub_columns: tuple[str, ...] | None = None
    skip_malformed: bool = False
    score_range: tuple[float, float] | None = None


_PAIR = ("sentence1", "sentence2")
_BOTH = ("accuracy", "f1")
_COLA = ("source", "label", "mark", "sentence")
_NLI = {name: name for name in ("entailment", "neutral", "contradiction")}
_MNLI_FILES = {"validation": "dev_matched.tsv", "validation_mismatched": "dev_mismatched.tsv"}
_RTE = {"entailment": "entailment", "not_entailment": "not_entailment"}
_QQP = {"0": "not_duplicate", "1": "duplicate"}
_MRPC = {"0": "not_equivalent", "1": "equivalent"}
GLUE = {
    "cola": GlueTask(
        "CoLA", ("sentence",), "label", {"0": "unacceptable", "1": "acceptable"}, ("matthews",), header=_COLA
    ),
    "sst2": GlueTask("SST-2", ("sentence",), "label", {"0": "negative", "1": "positive"}),
    "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", _MRPC, _BOTH, hub_columns=_PAIR),
    "stsb": GlueTask("STS-B", _PAIR, "score", {}, REGRESSION_METRICS, score_range=(0.0, 5.0)),
    "qqp": GlueTask("QQP", ("question1", "question2"), "is_duplicate", _QQP, _BOTH, skip_malformed=True),
    "mnli": GlueTask("MNLI", _PAIR, "gold_label", _NLI, evaluation=_MNLI_FILES, hub_columns=("premise", "hypothesis")),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _RTE),
    "rte": GlueTask("RTE", _PAIR, "label", _RTE),
    "wnli": GlueTask("WNLI", _PAIR, "label", {"0": "not_entailment", "1": "entailment"}),
}
TASK_NAMES = (*GLUE, "docstrings", "text")


def is_regression(spec: TextSpec) -> bool:
    """Return whether the labels are scores."""
    return not GLUE[spec.name].labels if spec.name in GLUE else spec.regression


def known_labels(spec: TextSpec) -> tuple[str, ...]:
    """Return the classes in order; none for regression, and none for "text", whose rows decide."""
    if spec.name == "docstrings":
        return PACKAGES
    return tuple(GLUE[spec.name].labels.values()) if spec.name in GLUE else ()


def metrics_of(spec: TextSpec, multi_label: bool | None = None) -> tuple[str, ...]:
    """Return the configured metrics, by default the task's official ones.

    `multi_label` says whether an example has several labels, where the spec leaves that to the files.
    """
    if spec.metrics:
        return tuple(spec.metrics)
    if spec.name in GLUE:
        return GLUE[spec.name].metrics
    if spec.multi_label if multi_label is None else multi_label:
        return SEVERAL_LABELS_METRICS
    return REGRESSION_METRICS if spec.regression else ("accuracy", "f1") if spec.positive_class else ("accuracy",)


def positive_class(spec: TextSpec) -> str | None:
    """Return the class that `f1` is of: of a GLUE task of two classes the one whose label is 1."""
    if spec.name not in GLUE:
        return spec.positive_class
    return spec.positive_class or GLUE[spec.name].labels.get("1")


def label_mistakes(spec: TextSpec, multi_label: bool | None) -> list[str]:
    """Return what does not suit the labels of the task; None: the files decide whether an example has several."""
    regression = is_regression(spec)
    allowed = REGRESSION_METRICS if regression else SEVERAL_LABELS_METRICS if multi_label else CLASS_METRICS
    if multi_label is None and spec.name == "text" and not regression:
        allowed += ("micro_f1",)
    mistakes = [
        f"metrics: {metric!r} does not suit {spec.name}: use {', '.join(allowed)}"
        for metric in spec.metrics or ()
        if metric not in allowed
    ]
    if multi_label and (spec.name != "text" or regression):
        kind = "a regression" if regression else spec.name
        mistakes.append(f"multi_label: {kind} has no classes to give several of")
    if spec.positive_class and (regression or multi_label):
        mistakes.append("positive_class: it goes with one class for each example: drop it")
    if spec.class_weights and regression:
        mistakes.append("class_weights: a regression has no classes: drop it")
    return mistakes
