"""The task section of a recipe: labelled text, tags of words, question answering, language modelling, embeddings.

The name selects the family: "squad" is extractive question answering, "mlm" and "clm" are language modelling, "ner" and
"token" are tags of words, "embedding" is vectors of texts, "rerank" is documents ranked for queries, all others are
labelled text. Whether the files exist is checked in `tasks/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ds_trainer.files.messages import listed
from ds_trainer.recipe.fields import Column, Fraction, Positive, Share, Strict, Whole

Length = Annotated[int, Field(strict=True, ge=4)]
"""Tokens, special ones included."""
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Metric = Literal["accuracy", "f1", "macro_f1", "micro_f1", "matthews", "pearson", "spearman"]
Header = Annotated[bool, Field(description="false: .csv and .tsv files name no columns, which are numbers from 0")]
Quoting = Annotated[
    bool | None, Field(description="cells are in quotes; by default in .csv; a .tsv with quotes needs it")
]
ClassName = Annotated[str, Field(coerce_numbers_to_str=True, min_length=1)]


class TaskBase(Strict):
    """The fields of every family."""

    greater_is_better: ClassVar[Mapping[str, bool]] = {"agreement": True}
    """Whether more of a score is better, by the score's name or a pattern. A family names those of its own; for
    any other score that chooses a checkpoint, ends a phase or directs a tuning, the recipe must say it."""

    name: str = Field(description="selects the family")
    data_dir: str | None = Field(None, description="folder of the task's files; without it the hub's data set is used")
    dataset: str | None = Field(None, description="hub data set: name, owner/name or owner/name/config")
    train_file: str | None = Field(None, description="relative to data_dir")
    validation_file: str | None = Field(None, description="relative to data_dir")
    pad_to_multiple_of: Positive = Field(1, description="8 suits tensor cores")
    max_train_samples: Positive | None = Field(None, description="how many training examples to take, spaced evenly")
    max_eval_samples: Positive | None = Field(None, description="the same of the evaluation set")

    @property
    def scored_splits(self) -> tuple[str, ...]:
        """The splits to evaluate on, the main one first."""
        return ("validation",)

    @property
    def held_out_share(self) -> float:
        """The share of the training set that no phase trains on; 0 in a family without such a part."""
        return 0.0

    def source_mistakes(self) -> list[str]:
        """Return the mistakes of a task that reads the user's own files or a hub data set, one or the other."""
        files = self.train_file or self.validation_file
        if self.dataset and files:
            return [f"dataset ({self.dataset}) and files ({files}) are both set: keep one"]
        if not self.dataset and not self.validation_file:
            return [f'the task "{self.name}" needs train_file and validation_file, or dataset for one on the hub']
        return []


class LabelledSpec(TaskBase):
    """A task some of whose training examples can be held out."""

    held_out: Share = Field(0.0, description="share of the training set that no phase trains on, for calibrating exits")
    score_held_out: bool = Field(False, description="score on these examples, in place of the evaluation set")

    @property
    def scored_splits(self) -> tuple[str, ...]:
        official = ("validation", "validation_mismatched") if self.name == "mnli" else ("validation",)
        return ("held_out",) if self.score_held_out else official

    @property
    def held_out_share(self) -> float:
        return self.held_out


class TextSpec(LabelledSpec):
    """A labelled-text task: a GLUE name, "docstrings" (embedded), or "text" with files or a hub data set.

    The files of "text" are .csv, .tsv, .jsonl or .parquet.
    """

    greater_is_better = dict.fromkeys((*get_args(Metric), "f1/*"), True)

    name: str = Field("docstrings", description='a name of GLUE, such as "sst2"; "docstrings"; or "text"')
    text_columns: list[Column] | None = Field(None, min_length=1, max_length=2, description="a text, or a pair of them")
    label_column: Column | None = Field(None, description="a class, or with regression a number")
    header: Header = True
    quoting: Quoting = None
    missing: list[str] = Field(["nan", "NaN", "NA"], description="cells that mean no value, as empty ones do")
    regression: bool = Field(False, description="labels are numbers, and the loss is their mean squared error")
    multi_label: bool = Field(False, description="an example has any number of labels: cells are lists of them")
    positive_class: ClassName | None = Field(None, description="class whose F1 is `f1`; GLUE's tasks have their own")
    class_weights: Literal["balanced"] | list[Weight] | None = Field(
        None, description='of each class in the loss, in the order of the logged counts; "balanced": by rarity'
    )
    metrics: list[Metric] | None = Field(
        None, description="by default GLUE's; accuracy, with positive_class f1; of several labels micro_f1, macro_f1"
    )
    max_seq_length: Length = Field(128, description="tokens at which texts are cut, special ones included")

    def mistakes(self) -> Iterator[str]:
        if self.label_column is not None and self.label_column in (self.text_columns or ()):
            yield f"label_column is {self.label_column}, which is among text_columns: name the column of the labels"


class TokenSpec(LabelledSpec):
    """Tags of words, such as named entities: "ner" reads CoNLL files, "token" .jsonl or .parquet files.

    Both read a hub data set where `dataset` names one.
    """

    greater_is_better = dict.fromkeys(("f1", "precision", "recall", "accuracy", "f1/*"), True)

    name: Literal["ner", "token"] = Field(description="CoNLL files, or .jsonl and .parquet")
    tokens_column: str = Field("tokens", description="words of a sentence; CoNLL files have no columns by name")
    tags_column: str = Field("tags", description="a tag for each word")
    word_column: int = Field(0, strict=True, description="of CoNLL files, from 0; -1 is the last")
    tag_column: int = Field(-1, strict=True, description="column of the tags in CoNLL files, from 0; -1 is the last")
    label_all_tokens: bool = Field(False, description="a loss on all pieces of a word, and not on the first alone")
    max_seq_length: Length = Field(128, description="the words beyond it go into further windows")

    def mistakes(self) -> Iterator[str]:
        if self.tokens_column == self.tags_column:
            yield f"tokens_column and tags_column are both {self.tags_column}: name the column of the tags"


class SquadSpec(TaskBase):
    """Extractive question answering: SQuAD v1.1 (arXiv 1606.05250) or v2 (arXiv 1806.03822), in the official JSON."""

    greater_is_better = dict.fromkeys(("exact_match", "f1", "*Ans_exact", "*Ans_f1", "best_exact", "best_f1"), True)

    name: Literal["squad"] = Field("squad", description="selects the family")
    version_2_with_negative: bool = Field(False, description="some questions have no answer (SQuAD v2)")
    null_score_diff_threshold: float = Field(0.0, description='lead of "no answer" from which on it is the answer')
    max_seq_length: Length = Field(384, description="tokens of a window: question, context and special ones")
    doc_stride: Positive = Field(128, description="tokens by which windows of a long context are apart")
    max_query_length: Positive = Field(64, description="longer questions are cut to this many tokens")
    n_best_size: Positive = Field(20, description="best spans of a window, and answers of a question, that are kept")
    max_answer_length: Positive = Field(30, description="tokens")


class LmSpec(TaskBase):
    """Language modelling over text: "mlm" (arXiv 1810.04805, as DistilBERT trains, arXiv 1910.01108) or "clm".

    Files are plain text, or tables (as of "text") with `text_column` or `messages_column`; a file name may be a pattern
    such as "part-*.txt". `mlm_smoothing` above 0 chooses rare tokens more often.
    """

    greater_is_better = dict.fromkeys(("perplexity", "loss"), False) | {"accuracy": True}

    name: Literal["mlm", "clm"] = Field(description="masked, of an encoder, or causal, of a decoder")
    text_column: str = Field("text", description="column of the texts in tables and hub data sets")
    messages_column: str | None = Field(None, description="column of conversations, read in place of texts; clm only")
    packing: bool = Field(False, description="rows of max_seq_length hold several documents, kept apart; clm only")
    line_by_line: bool = Field(True, description="an example a line of a text file; false: the file is one document")
    max_seq_length: Length = Field(128, description="longer examples are split, each part with its special tokens")
    min_seq_length: Whole = Field(12, description="shorter ones are dropped; tokens, special ones included")
    max_unknown: Fraction = Field(0.5, description="examples of which this share or more is unknown are dropped")
    mlm_mask_prop: Fraction = Field(0.15, gt=0, description="share of the tokens to predict")
    word_mask: Fraction = Field(0.8, description="share of those that the mask token replaces")
    word_keep: Fraction = Field(0.1, description="share that stays as it is")
    word_rand: Fraction = Field(0.1, description="share that a random token replaces")
    mlm_smoothing: float = Field(0.7, ge=0, le=10, description="tokens are chosen with weight count ** -mlm_smoothing")
    head_positions: Literal["labels", "all"] = Field(
        "labels", description="where mlm logits are computed; a phase with distill sets it by restrict_ce_to_mask"
    )

    def mistakes(self) -> Iterator[str]:
        total, least, most = self.word_mask + self.word_keep + self.word_rand, self.min_seq_length, self.max_seq_length
        if abs(total - 1) > 1e-6:
            yield f"word_mask + word_keep + word_rand is {total:g}: make it 1"
        if least > most:
            yield f"min_seq_length is {least} and max_seq_length is {most}, so that every example is dropped: lower it"
        if self.name == "mlm" and self.packing:
            yield "packing: an encoder lets all tokens of a row see each other: drop it, or use clm"
        if self.name == "mlm" and self.messages_column:
            yield "messages_column: only clm has labels on the assistant's turns: drop it, or use clm"

    @property
    def column(self) -> str:
        """The column of tables and of hub data sets that is read."""
        return self.messages_column or self.text_column


class TextSource(Strict):
    """Texts to embed or to rank: a file, a folder in the layout of BEIR (arXiv 2104.08663), or a data set of the hub.

    A table has a text in each column: a text alone; or an anchor and a positive, and then negatives; or, with
    `score_column`, two texts and how alike they are. A cell of a column of negatives may be a list of them. "lines" has
    a text in each line. "stsb" is the STS benchmark as it is published. "squad" and "beir" are queries and the
    documents that answer them: pairs to train on, or a search to be scored. For a rerank task a table has a query, the
    documents that answer it and those that do not, and any cell but the query's may be a list.
    """

    file: str | None = Field(None, description="relative to data_dir; of beir the folder")
    dataset: str | None = Field(None, description="hub data set instead; of beir that of corpus and queries")
    split: str | None = Field(None, description="of the hub data set, or of the judgements of beir, qrels/SPLIT.tsv")
    format: Literal["table", "lines", "stsb", "squad", "beir"] | None = Field(
        None, description="by default lines of a .txt file, else a table"
    )
    name: str | None = Field(None, description="begins the names of its scores; by default that of the file")
    text_columns: list[Column] | None = Field(None, min_length=1, description="of a table, one for each text")
    score_column: Column | None = Field(None, description="of a table: how alike the two texts are")
    header: Header = True
    quoting: Quoting = None
    prompts: list[str | None] | None = Field(
        None, description="for each text the name of a prompt of the model; of a search query and document by default"
    )
    max_examples: Positive | None = Field(None, description="how many of its rows to take, spaced evenly")

    @property
    def form(self) -> str:
        """How the source is read."""
        return self.format or ("lines" if (self.file or "").endswith(".txt") else "table")

    @property
    def is_search(self) -> bool:
        """Whether it has queries and documents."""
        return self.form in ("squad", "beir")

    @property
    def is_scored(self) -> bool:
        """Whether it says how alike two texts are."""
        return self.form == "stsb" or self.score_column is not None

    @property
    def texts(self) -> int:
        """How many texts a row has at least."""
        return {"lines": 1, "table": len(self.text_columns or [])}.get(self.form, 2)

    @property
    def label(self) -> str:
        """The name of its scores."""
        return self.name or Path(self.file or self.dataset or "").stem

    def mistakes(self) -> Iterator[str]:
        if (self.file is None) == (self.dataset is None):
            yield "set file, or dataset for one of the hub: one of the two"
        is_table = self.form == "table"
        if is_table != bool(self.text_columns):
            one = "name the columns of the texts in text_columns" if is_table else "drop text_columns"
            yield f"{self.file or self.dataset} is read as {self.form}: {one}"
        if self.score_column is not None and len(self.text_columns or []) != 2:
            yield "score_column says how alike two texts are: name two text_columns"
        if self.prompts and len(self.prompts) != self.texts:
            yield f"prompts has {len(self.prompts)} names for {self.texts} texts: write one each, or null"


class SourcesSpec(TaskBase):
    """A task that reads several sources of texts."""

    greater_is_better = dict.fromkeys(("spearman*", "pearson*", "ndcg@*", "mrr@*", "recall@*"), True)

    train: list[TextSource] = Field([], description="the texts to train on, one source after another")
    validation: list[TextSource] = Field(min_length=1, description="what is scored; the first source is the main one")

    @property
    def scored_splits(self) -> tuple[str, ...]:
        return tuple(source.label for source in self.validation)

    @property
    def rows_read(self) -> list[Any]:
        """JSON values that decide on the rows that are read."""
        return [[each.model_dump(mode="json") for each in (*self.train, *self.validation)], self.max_eval_samples]

    def source_mistakes(self) -> list[str]:
        given = [name for name in ("dataset", "train_file", "validation_file") if getattr(self, name)]
        return [f"{', '.join(given)}: the task {self.name} has its sources in train and validation"] if given else []

    def mistakes(self) -> Iterator[str]:
        labels = self.scored_splits
        if repeated := {label for label in labels if labels.count(label) > 1 or label == "train"}:
            yield f"validation: the name {listed(repeated)} is taken: give each source a name of its own"


class EmbeddingSpec(SourcesSpec):
    """Vectors of texts: train them by pairs, scored pairs, or a teacher alone; score them by similarity and by search.

    What is null is as the folder of the model says, in the files that sentence-transformers writes.
    """

    name: Literal["embedding"] = Field(description="selects the family")
    loss: Literal["contrastive", "cosent", "none"] = Field(
        "contrastive", description="of pairs; cosent of scored pairs; none: the texts are for a teacher or a cut alone"
    )
    scale: float = Field(20.0, gt=0, description="factor of the cosines in the loss, the inverse of a temperature")
    matryoshka_dims: list[Positive] = Field([], description="the loss is also of the first dimensions of the vectors")
    pooling: Literal["mean", "cls", "lasttoken"] | None = Field(None, description="how tokens become one vector")
    normalize: bool | None = Field(None, description="scale the vectors to length 1; without such files true")
    prompts: dict[str, str] = Field({}, description="further prompts, by name, that begin texts")
    max_seq_length: Length | None = Field(None, description="tokens at which texts are cut, special ones included")

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        for source in self.validation:
            if not (source.is_scored or source.is_search):
                yield f"validation: {source.label} has no scores: name its score_column, or a search (squad, beir)"
        needs = {"contrastive": "two texts or more, an anchor and its positive", "cosent": "a score of two texts"}
        for source in self.train:
            fits = {"contrastive": source.texts > 1 and not source.is_scored, "cosent": source.is_scored, "none": True}
            if not fits[self.loss]:
                yield (
                    f"train: the loss is {self.loss}, and a row of {source.label} lacks what it needs, "
                    f'{needs[self.loss]}: name other columns, or set loss to "none" for a teacher or a cut alone'
                )


class RerankSpec(SourcesSpec):
    """Documents ranked for a query by a cross-encoder, which reads the query and a document as a pair of texts."""

    name: Literal["rerank"] = Field(description="selects the family")
    loss: Literal["bce", "softmax"] = Field(
        "bce", description="binary cross entropy of each pair, or cross entropy over the documents of a query"
    )
    max_seq_length: Length | None = Field(None, description="tokens of a pair; by default the model's, 512 at most")

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        for source in (*self.train, *self.validation):
            if source.form != "table" or source.is_scored or source.texts < 2 or source.prompts:
                columns = "text_columns of a table name a query, the documents that answer it, and those that do not"
                yield f"{source.label}: {columns}. Scores, prompts and other formats are not read here"


TaskSpec = TextSpec | SquadSpec | LmSpec | TokenSpec | EmbeddingSpec | RerankSpec


class Family(NamedTuple):
    """One family of tasks: the class that its JSON is parsed into, and the code that handles it.

    `task` is the subclass of `ds_trainer.tasks.task.Task`. `data` is a module that loads no torch, with the functions
    `records(spec, split)`, `training_texts(spec)`, for more than `spec.source_mistakes()` also
    `setting_mistakes(spec)`, and `score_names(spec)` where these follow from the spec; None: `task` reads its data
    itself.
    Either may be written "module:name", as in packaging's entry points, and is then imported when it is first used: the
    settings are checked before torch is loaded. `names` are the task names that select the family.
    """

    spec: type[TaskBase]
    task: Any
    data: Any = None
    names: tuple[str, ...] = ()


def _own(name: str, spec: type[TaskBase], data: str, *names: str) -> Family:
    """Return a family of this library, whose code lies in the package of its name."""
    home = f"ds_trainer.tasks.{name}"
    return Family(spec, f"{home}.{name}_task:{name.capitalize()}Task", f"ds_trainer.tasks.{data}", names)


FAMILIES: dict[str, Family] = {
    "text": _own("text", TextSpec, "text.text_data"),
    "squad": _own("squad", SquadSpec, "squad_file", "squad"),
    "lm": _own("lm", LmSpec, "lm.lm_text", "mlm", "clm"),
    "token": _own("token", TokenSpec, "token.token_data", "ner", "token"),
    "embedding": _own("embedding", EmbeddingSpec, "embedding.embedding_data", "embedding"),
    "rerank": _own("rerank", RerankSpec, "rerank.rerank_data", "rerank"),
}
"""Every family of tasks, by its name: the only table to extend. Entries added after `recipe.py` has been imported take
effect once its models are rebuilt (`model_rebuild(force=True)`)."""


def family(value: Any) -> str:
    """Return the family of a task, given its JSON or its spec; a name that no family claims is labelled text."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return next((key for key, entry in FAMILIES.items() if name in entry.names), "text")


def greater_is_better(metric: str, *givers: Any) -> bool | None:
    """Return whether more of a score is better, as the first of these specs says that knows it; None where none does.

    Without specs all families are asked. The name may have prefixes: that of a split, of an exit, of the teacher.
    """
    parts = metric.split("/")
    for giver in givers or [entry.spec for entry in FAMILIES.values()]:
        known = {**getattr(giver, "greater_is_better", {}), **TaskBase.greater_is_better}
        for name in ("/".join(parts[first:]) for first in range(len(parts))):  # a class of f1/CLASS may be named "loss"
            for pattern, greater in known.items():
                if fnmatchcase(name, pattern):
                    return greater
    return None


class _OneOfTheFamilies:
    """Let pydantic parse a task by the spec of its family, whatever families are registered at that moment."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        specs = {key: handler.generate_schema(entry.spec) for key, entry in FAMILIES.items()}
        return core_schema.tagged_union_schema(specs, discriminator=family)


AnyTask = Annotated[TaskSpec, _OneOfTheFamilies()]
"""A recipe's field that holds any task."""
