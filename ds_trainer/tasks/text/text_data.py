"""Where the rows of a labelled-text task come from: GLUE's official files, a user's files, the hub, or docstrings.

The tasks of GLUE (arXiv 1804.07461) are a table. The module loads neither torch nor numpy before rows are read, and
does not tokenise.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ds_trainer.files.messages import kind_of, listed, quoted, shown
from ds_trainer.recipe.fields import did_you_mean
from ds_trainer.recipe.task_specs import FAMILIES, TextSpec
from ds_trainer.tasks.records import FileRecords, HubRecords, Record, Records, find_file, text_in
from ds_trainer.tasks.text import docstrings

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
_WRITTEN_LIST = re.compile(r"\[\s*(['\"\d].*)?\]", re.DOTALL)
"""A list of labels as JSON or pandas writes it into a cell of a table."""


class TextRow(NamedTuple):
    """One labelled example: one or two texts, and the name of a class, those of several, or a score."""

    texts: tuple[str, ...]
    label: str | float | tuple[str, ...]


def setting_mistakes(spec: TextSpec) -> list[str]:
    """Return every mistake in the spec that shows without reading its files."""
    if spec.name not in TASK_NAMES and type(spec) is TextSpec:  # a plugin's spec has a name of its own
        names = (*TASK_NAMES, *(name for entry in FAMILIES.values() for name in entry.names))
        return [f"task name {quoted(spec.name)} is unknown: {did_you_mean(spec.name.lower(), names)}"]
    mistakes = _label_mistakes(spec)
    if spec.name != "text":
        return mistakes
    kind = "column name" if spec.header else "column number"
    if not spec.text_columns:
        mistakes.append(f'the task "text" needs text_columns: one or two {kind}s')
    if spec.label_column in (None, ""):
        mistakes.append(f'the task "text" needs label_column: a {kind}')
    columns = (*(spec.text_columns or ()), spec.label_column)
    wrong = [column for column in columns if isinstance(column, int if spec.header else str)]
    if wrong:
        allowed = "names" if spec.header else "numbers, from 0"
        mistakes.append(f"column {listed(wrong)}: header is {shown(spec.header)}, so that columns have {allowed}")
    return mistakes + spec.source_mistakes()


def _label_mistakes(spec: TextSpec) -> list[str]:
    """Return what does not suit the labels of the task."""
    regression = is_regression(spec)
    allowed = REGRESSION_METRICS if regression else SEVERAL_LABELS_METRICS if spec.multi_label else CLASS_METRICS
    mistakes = [
        f"metrics: {metric!r} does not suit {spec.name}: use {', '.join(allowed)}"
        for metric in spec.metrics or ()
        if metric not in allowed
    ]
    if spec.multi_label and (spec.name != "text" or regression):
        kind = "a regression" if regression else spec.name
        mistakes.append(f"multi_label: {kind} has no classes to give several of")
    if spec.positive_class and (regression or spec.multi_label):
        mistakes.append("positive_class: it goes with one class for each example: drop it")
    if spec.class_weights and regression:
        mistakes.append("class_weights: a regression has no classes: drop it")
    return mistakes


def records(spec: TextSpec, split: str, classes: Sequence[str] = ()) -> Records[TextRow]:
    """Return the source of a split; without `classes` any labels are allowed.

    The folder of a GLUE task is tried before data_dir itself, which may hold the files of another task.
    """
    parse = partial(_row, spec, classes)
    if spec.name == "docstrings":
        return _Docstrings(split, parse)
    glue = GLUE.get(spec.name)
    if glue and spec.data_dir is None:
        matched = spec.name == "mnli" and split == "validation"
        columns = (*(glue.hub_columns or glue.columns), "label")
        return HubRecords(f"nyu-mll/glue/{spec.name}", "validation_matched" if matched else split, columns, parse)
    if glue:
        official = glue.evaluation.get(split, "train.tsv")
        path = find_file(spec, split, [f"{glue.folder}/{official}", f"glue/{glue.folder}/{official}", official])
        columns = (*glue.columns, glue.label)
        return FileRecords(path, columns, parse, glue.header, glue.skip_malformed, quoting=False)
    columns = tuple(map(str, (*(spec.text_columns or ()), spec.label_column)))
    if spec.dataset:
        return HubRecords(spec.dataset, split, columns, parse, spec.missing)
    header = None if spec.header else ()
    return FileRecords(find_file(spec, split), columns, parse, header, missing=spec.missing, quoting=spec.quoting)


def training_texts(spec: TextSpec) -> list[str]:
    """Return every text of the training split, including held-out ones."""
    return [text for row in records(spec, "train").rows() for text in row.value.texts]


def is_regression(spec: TextSpec) -> bool:
    """Return whether the labels are scores."""
    return not GLUE[spec.name].labels if spec.name in GLUE else spec.regression


def known_labels(spec: TextSpec) -> tuple[str, ...]:
    """Return the classes in order; none for regression, and none for "text", whose rows decide."""
    if spec.name == "docstrings":
        return docstrings.PACKAGES
    return tuple(GLUE[spec.name].labels.values()) if spec.name in GLUE else ()


def metrics_of(spec: TextSpec) -> tuple[str, ...]:
    """Return the configured metrics, by default the task's official ones."""
    if spec.metrics:
        return tuple(spec.metrics)
    if spec.name in GLUE:
        return GLUE[spec.name].metrics
    if spec.multi_label:
        return SEVERAL_LABELS_METRICS
    return REGRESSION_METRICS if spec.regression else ("accuracy", "f1") if spec.positive_class else ("accuracy",)


def score_names(spec: TextSpec) -> list[str]:
    """Return the names of the scores, without those of single classes."""
    return [*metrics_of(spec), *([] if is_regression(spec) else ["macro_f1"])]


def positive_class(spec: TextSpec) -> str | None:
    """Return the class that `f1` is of: of a GLUE task of two classes the one whose label is 1."""
    if spec.name not in GLUE:
        return spec.positive_class
    return spec.positive_class or GLUE[spec.name].labels.get("1")


class _Docstrings(Records[TextRow]):
    """The embedded docstrings, which have neither a file nor lines."""

    origin, entry, columns = "docstrings of the installed packages", "example", ("text", "package")

    def __init__(self, split: str, parse: Callable[[Record], TextRow]) -> None:
        self.split, self.parse = split, parse

    def check(self) -> None:
        """Extract nothing, which takes seconds."""

    def _source_hash(self) -> str:
        return docstrings.fingerprint(self.split)

    def _read(self) -> Iterator[tuple[int, Record]]:
        for number, pair in enumerate(docstrings.extracted()[self.split], 1):
            yield number, dict(zip(self.columns, pair, strict=True))


def _row(spec: TextSpec, classes: Sequence[str], record: Record) -> TextRow:
    *columns, column = record
    texts, cell = tuple(text_in(record, name) for name in columns), record[column]
    if is_regression(spec):
        return TextRow(texts, _score(spec, column, cell))
    cells = _list_in(column, cell) if spec.multi_label else [cell]
    labels = tuple(dict.fromkeys(_class_name(spec, column, each) for each in cells))
    if unknown := [label for label in labels if classes and label not in classes]:
        raise ValueError(f"unknown label {unknown[0]!r}: allowed are {', '.join(map(repr, classes))}")
    return TextRow(texts, labels if spec.multi_label else labels[0])


def _list_in(column: str, cell: Any) -> list[Any]:
    """Return the list in a cell, also as JSON or pandas writes lists of text into a table."""
    for text in (cell.replace("'", '"'), cell) if isinstance(cell, str) else ():
        with contextlib.suppress(ValueError):
            cell = json.loads(text)
    if not isinstance(cell, list):
        raise ValueError(f'{quoted(column)} is {quoted(cell)}, where a list of labels is expected, as ["a", "b"]')
    return cell


def _score(spec: TextSpec, column: str, value: Any) -> float:
    glue = GLUE.get(spec.name)
    low, high = (glue and glue.score_range) or (-math.inf, math.inf)
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if math.isfinite(score) and low <= score <= high:
        return score
    allowed = "a finite number" if math.isinf(low) else f"a number from {low:g} to {high:g}"
    raise ValueError(f"{quoted(column)} is {quoted(value)}, and must be {allowed}")


def _class_name(spec: TextSpec, column: str, value: Any) -> str:
    if isinstance(value, list | dict) or (isinstance(value, str) and _WRITTEN_LIST.fullmatch(value.strip())):
        present = f"{quoted(column)} has {kind_of(value)}, {quoted(value)}"
        raise ValueError(f"{present}, where one label is expected: set multi_label to true if an example has several")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes a column of integers with gaps as floats
    name = "" if value is None or isinstance(value, float) else str(value).strip()
    known = GLUE[spec.name].labels if spec.name in GLUE else None
    if known is None and name:
        return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", name)  # as above, in a table
    if known and name in (*known, *known.values()):  # the hub has the names
        return known.get(name, name)
    allowed = f"one of {', '.join(map(repr, known))}" if known else "a label"
    raise ValueError(f"unknown label {quoted(value)} in {quoted(column)}: it must be {allowed}")
