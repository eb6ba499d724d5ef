"""Where the rows of a labelled-text task come from: GLUE's official files, a user's files, or a hub data set.

The tasks of GLUE (arXiv 1804.07461) are a table here: files, columns, labels and metrics. Imports neither
torch nor numpy, so that missing folders, files and columns are told before anything heavy is loaded. Does not
tokenise; the embedded docstrings are in `tasks/docstrings.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ds_trainer.config.recipe import TextSpec
from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.sources import data_folder, fault_of, fetch, first_file, user_path
from ds_trainer.tasks.tabular import FileForm, check_columns, read_table

REGRESSION_METRICS = ("pearson", "spearman")
CLASS_METRICS = ("accuracy", "f1", "matthews")


class TextRow(NamedTuple):
    """One labelled example: one or two texts, a label name or a score, and its line in the file."""

    texts: tuple[str, ...]
    label: str | float
    line: int


@dataclass(frozen=True)
class TextRows:
    """The rows of a split, where they are from, and how many malformed ones were passed over."""

    rows: list[TextRow]
    origin: str
    skipped: int = 0
    unit: str = "line"

    def place(self, row: TextRow) -> str:
        """Where a row stands, for a message."""
        return f"{self.origin}, {self.unit} {row.line}"


class RowSource(Protocol):
    """Rows of every split of a task, without a tokenizer."""

    def rows(self, split: str) -> TextRows: ...

    def fingerprint(self, split: str) -> str:
        """Changes whenever the rows may have changed; the same on every host."""


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE as it ships: `labels` maps what a file says to a label's name, in the hub's order."""

    folder: str
    columns: tuple[str, ...]
    label: str
    labels: Mapping[str, str]
    metrics: tuple[str, ...] = ("accuracy",)
    header: tuple[str, ...] | None = None
    evaluation: Mapping[str, str] = field(default_factory=lambda: {"validation": "dev.tsv"})
    hub_columns: tuple[str, ...] = ("sentence1", "sentence2")
    skip_malformed: bool = False
    score_range: tuple[float, float] | None = None


def _named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        "label",
        {"0": "unacceptable", "1": "acceptable"},
        metrics=("matthews",),
        header=("source", "label", "mark", "sentence"),
        hub_columns=("sentence",),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), "label", {"0": "negative", "1": "positive"}, hub_columns=("sentence",)),
    "mrpc": GlueTask(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        {"0": "not_equivalent", "1": "equivalent"},
        metrics=("accuracy", "f1"),
    ),
    "stsb": GlueTask(
        "STS-B", ("sentence1", "sentence2"), "score", {}, metrics=REGRESSION_METRICS, score_range=(0.0, 5.0)
    ),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        {"0": "not_duplicate", "1": "duplicate"},
        metrics=("accuracy", "f1"),
        hub_columns=("question1", "question2"),
        skip_malformed=True,
    ),
    "mnli": GlueTask(
        "MNLI",
        ("sentence1", "sentence2"),
        "gold_label",
        _named("entailment", "neutral", "contradiction"),
        evaluation={"validation": "dev_matched.tsv", "validation_mismatched": "dev_mismatched.tsv"},
        hub_columns=("premise", "hypothesis"),
    ),
    "qnli": GlueTask(
        "QNLI",
        ("question", "sentence"),
        "label",
        _named("entailment", "not_entailment"),
        hub_columns=("question", "sentence"),
    ),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), "label", _named("entailment", "not_entailment")),
    "wnli": GlueTask("WNLI", ("sentence1", "sentence2"), "label", {"0": "not_entailment", "1": "entailment"}),
}
TASK_NAMES = (*GLUE, "docstrings", "text")
DOCSTRING_PACKAGES = ("deepspeed", "numpy", "python", "torch", "transformers")


def unknown_task(name: str) -> str:
    """What to say of a task name that is none."""
    names = (*TASK_NAMES, "squad", "mlm", "clm")
    near = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(names)}"
    return f"task name {quoted(name)} is unknown: {hint}"


def check_data_files(spec: TextSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Every mistake in a task's settings, and every missing folder, file or column; loads nothing heavy.

    `splits` defaults to training and all evaluation splits. Rows beyond the first are not looked at, nor
    is a hub data set.
    """
    mistakes = _setting_mistakes(spec)
    if mistakes or spec.name == "docstrings" or _from_hub(spec):
        return mistakes
    source = FileSource(spec)
    found = (_file_mistake(source, split) for split in splits or ("train", *evaluation_splits(spec)))
    return [mistake for mistake in found if mistake]


def row_source(spec: TextSpec) -> RowSource:
    """The files or the hub data set of a GLUE task or of "text"; ValueError for mistakes in its settings."""
    mistakes = _setting_mistakes(spec)
    if mistakes:
        raise UserError("\n".join(mistakes))
    return HubSource(spec) if _from_hub(spec) else FileSource(spec)


def is_regression(spec: TextSpec) -> bool:
    return not GLUE[spec.name].labels if spec.name in GLUE else spec.regression


def evaluation_splits(spec: TextSpec) -> tuple[str, ...]:
    return tuple(GLUE[spec.name].evaluation) if spec.name in GLUE else ("validation",)


def known_labels(spec: TextSpec) -> tuple[str, ...]:
    """The classes in order; empty for regression, and for "text", where only the rows tell."""
    if spec.name == "docstrings":
        return DOCSTRING_PACKAGES
    return tuple(GLUE[spec.name].labels.values()) if spec.name in GLUE else ()


def metrics_of(spec: TextSpec) -> tuple[str, ...]:
    """The metrics asked for, or else the task's official ones."""
    if spec.metrics:
        return tuple(spec.metrics)
    if spec.name in GLUE:
        return GLUE[spec.name].metrics
    return REGRESSION_METRICS if spec.regression else ("accuracy",)


@dataclass(frozen=True)
class FileSource:
    """GLUE's official files, or the files a user names."""

    spec: TextSpec

    @property
    def form(self) -> FileForm:
        glue = GLUE.get(self.spec.name)
        if glue:
            return FileForm((*glue.columns, glue.label), glue.header, glue.skip_malformed)
        return FileForm((*_required(self.spec.text_columns), _required(self.spec.label_column)))

    def path(self, split: str) -> Path:
        """The file of a split; ValueError says which names were looked for."""
        return first_file(self.spec, split, _candidates(self.spec, split))

    def rows(self, split: str) -> TextRows:
        path, form = self.path(split), self.form
        table = read_table(path, form)
        unit = "row" if path.suffix.lower() == ".parquet" else "line"
        reader = _LabelReader(self.spec, f"{path}, {unit}")
        rows = [reader.row(fields, form.wanted, line) for line, fields in table.records]
        return TextRows(rows, str(path), table.skipped, unit)

    def fingerprint(self, split: str) -> str:
        return content_hash(self.path(split)).hex()


@dataclass(frozen=True)
class HubSource:
    """A hub data set: GLUE's, or the one that "text" names. `fetch` gives a `datasets.Dataset` by name and split."""

    spec: TextSpec
    fetch: Callable[[str, str], Any] = fetch

    @property
    def name(self) -> str:
        return f"nyu-mll/glue/{self.spec.name}" if self.spec.name in GLUE else _required(self.spec.dataset)

    def rows(self, split: str) -> TextRows:
        dataset, origin = self._dataset(split), f"{self.name} ({split})"
        wanted = self._columns()
        missing = [name for name in wanted if name not in dataset.column_names]
        if missing:
            raise UserError(f"{origin}: no column {missing}; columns found: {dataset.column_names}")
        class_names = getattr(dataset.features[wanted[-1]], "names", None)
        reader = _LabelReader(self.spec, f"{origin}, row", class_names)
        records = enumerate(dataset.select_columns(wanted), 1)
        rows = [reader.row(fields, wanted, number) for number, fields in records]
        if not rows:
            raise UserError(f"{origin} has no examples")
        return TextRows(rows, origin, unit="row")

    def fingerprint(self, split: str) -> str:
        return str(self._dataset(split)._fingerprint)

    def _dataset(self, split: str) -> Any:
        matched = self.spec.name == "mnli" and split == "validation"
        return self.fetch(self.name, "validation_matched" if matched else split)

    def _columns(self) -> list[str]:
        if self.spec.name in GLUE:
            return [*GLUE[self.spec.name].hub_columns, "label"]
        return [*_required(self.spec.text_columns), _required(self.spec.label_column)]


@dataclass(frozen=True)
class _LabelReader:
    """Turns fields into rows; tells a bad text or label by its place. `class_names` are for hub integers."""

    spec: TextSpec
    place: str
    class_names: Sequence[str] | None = None

    def row(self, fields: Mapping[str, Any], wanted: Sequence[str], line: int) -> TextRow:
        texts = tuple(fields[name] for name in wanted[:-1])
        for name, text in zip(wanted, texts, strict=False):
            fault = fault_of(text, str)
            if fault:
                raise UserError(f"{self.place} {line}: {quoted(name)} {fault}")
        label = fields[wanted[-1]]
        read = self._score if is_regression(self.spec) else self._name
        return TextRow(texts, read(label, wanted[-1], line), line)

    def _score(self, value: Any, column: str, line: int) -> float:
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):  # JSON's integers have no largest
            score = math.nan
        glue = GLUE.get(self.spec.name)
        low, high = (glue and glue.score_range) or (-math.inf, math.inf)
        if math.isfinite(score) and low <= score <= high:
            return score
        allowed = "a finite number" if math.isinf(low) else f"a number from {low:g} to {high:g}"
        raise UserError(f"{self.place} {line}: {quoted(column)} is {quoted(value)}, and must be {allowed}")

    def _name(self, value: Any, column: str, line: int) -> str:
        if self.class_names is not None:
            known = isinstance(value, int) and 0 <= value < len(self.class_names)
            value = self.class_names[value] if known else None
        elif isinstance(value, float) and value.is_integer():
            value = int(value)  # a parquet column of integers that pandas wrote with gaps
        name = "" if value is None or isinstance(value, float) else str(value).strip()
        labels = GLUE[self.spec.name].labels if self.spec.name in GLUE else None
        if labels is None and name:
            return name
        if labels and name in labels:
            return labels[name]
        if labels and self.class_names and name in labels.values():
            return name
        allowed = f"one of {', '.join(map(repr, labels))}" if labels else "a label"
        raise UserError(f"{self.place} {line}: unknown label {quoted(value)} in {quoted(column)}: it must be {allowed}")


def _file_mistake(source: FileSource, split: str) -> str | None:
    try:
        check_columns(source.path(split), source.form)
    except ValueError as error:
        return str(error)
    return None


def _setting_mistakes(spec: TextSpec) -> list[str]:
    if spec.name not in TASK_NAMES:
        return [unknown_task(spec.name)]
    allowed = REGRESSION_METRICS if is_regression(spec) else CLASS_METRICS
    mistakes = [
        f"metrics: {metric!r} does not suit {spec.name}: use {', '.join(allowed)}"
        for metric in spec.metrics or ()
        if metric not in allowed
    ]
    if spec.name != "text":
        return mistakes
    if not spec.text_columns:
        mistakes.append('the task "text" needs text_columns: one or two column names')
    if not spec.label_column:
        mistakes.append('the task "text" needs label_column: a column name')
    files = spec.train_file or spec.validation_file
    if spec.dataset and files:
        mistakes.append(f"dataset ({spec.dataset}) and files ({files}) are both set: keep one")
    if not spec.dataset and not spec.validation_file:
        mistakes.append('the task "text" needs train_file and validation_file, or dataset for one on the hub')
    return mistakes


def _candidates(spec: TextSpec, split: str) -> list[Path]:
    """Where a split's file may lie; the task's own folder first, since data_dir may hold another's files."""
    folder = data_folder(spec)
    if spec.name in GLUE:
        glue = GLUE[spec.name]
        official = glue.evaluation.get(split, "train.tsv")
        return [base / official for base in (folder / glue.folder, folder / "glue" / glue.folder, folder)]
    name = spec.train_file if split == "train" else spec.validation_file
    if not name:
        raise UserError(f'the task "text" has no file for the {split} split: set {split}_file')
    return [folder / user_path(name, "train_file" if split == "train" else "validation_file")]


def _from_hub(spec: TextSpec) -> bool:
    return bool(spec.dataset) if spec.name == "text" else spec.data_dir is None


def _required(value: Any) -> Any:
    assert value, "_setting_mistakes saw to it"
    return value
