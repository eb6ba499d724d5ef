"""What a recipe may say of a task: labelled text, extractive question answering, language modelling.

The name tells the family: "squad" is question answering, "mlm" and "clm" language modelling, all others labelled text.
Whether the files are there is checked in `readers.py`, `squad_file.py` and `lm_text.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ds_trainer.config.fields import Count, Fraction, Positive, Share, Strict
from ds_trainer.ranks.failures import UserError

Length = Annotated[int, Field(strict=True, ge=4)]
"""Tokens, special ones included."""


class TaskBase(Strict):
    """What every family has."""

    data_dir: str | None = Field(None, description="folder of the task's files; without it the hub is asked")
    dataset: str | None = Field(None, description="hub data set: name, owner/name or owner/name/config")
    train_file: str | None = Field(None, description="relative to data_dir")
    validation_file: str | None = Field(None, description="relative to data_dir")
    pad_to_multiple_of: Positive = Field(1, description="8 suits tensor cores")
    max_train_samples: Positive | None = None
    max_eval_samples: Positive | None = None


class TextSpec(TaskBase):
    """A labelled-text task: a GLUE name, "docstrings" (embedded), or "text" with files or a hub data set.

    The files of "text" are .csv, .tsv, .jsonl or .parquet.
    """

    name: str = "docstrings"
    text_columns: list[str] | None = Field(None, min_length=1, max_length=2)
    label_column: str | None = None
    regression: bool = False
    metrics: list[Literal["accuracy", "f1", "matthews", "pearson", "spearman"]] | None = None
    max_seq_length: Length = 128
    held_out: Share = Field(0.0, description="share of the training set that no phase trains on, for calibrating exits")


class SquadSpec(TaskBase):
    """Extractive question answering: SQuAD v1.1 (arXiv 1606.05250) or v2 (arXiv 1806.03822), in the official JSON."""

    name: Literal["squad"] = "squad"
    version_2_with_negative: bool = Field(False, description="some questions have no answer (SQuAD v2)")
    null_score_diff_threshold: float = Field(
        0.0, description="answer nothing where its score is above the best answer's by more than this"
    )
    max_seq_length: Length = 384
    doc_stride: Positive = Field(128, description="tokens by which windows of a long context are apart")
    max_query_length: Positive = Field(64, description="longer questions are cut to this many tokens")
    n_best_size: Positive = 20
    max_answer_length: Positive = Field(30, description="tokens")

    @model_validator(mode="after")
    def _windows_can_overlap(self) -> SquadSpec:
        """Refuse what leaves gaps beside the shortest question; what longer ones leave, only the data can tell."""
        mistake = self.gap_beside(question=1, special=1)
        if mistake:
            raise UserError(mistake)
        return self

    def gap_beside(self, question: int, special: int) -> str | None:
        """Say why no window covers some tokens of a long context; None if all are covered.

        Both are numbers of tokens. A window holds what they leave of `max_seq_length`; windows are `doc_stride` apart.
        """
        room = self.max_seq_length - special - question
        if self.doc_stride <= room:
            return None
        longest = self.max_seq_length - special - self.doc_stride
        ways_out = [
            f"lower doc_stride to {room} or less" if room > 0 else "",
            f"lower max_query_length to {longest} or less, which cuts longer questions" if longest > 0 else "",
            f"raise max_seq_length to {self.doc_stride + special + question} or more",
        ]
        return (
            f"doc_stride is {self.doc_stride}, and max_seq_length {self.max_seq_length} leaves {max(0, room)} tokens "
            f"to the context beside {special} special ones and {question} of a question: parts of the context would "
            f"be in no window; {', or '.join(filter(None, ways_out))}"
        )


class LmSpec(TaskBase):
    """Language modelling over text: "mlm" (arXiv 1810.04805, as DistilBERT trains, arXiv 1910.01108) or "clm".

    Files are .txt, or .jsonl with `text_column`; a file name may be a pattern such as "part-*.txt".
    """

    name: Literal["mlm", "clm"]
    text_column: str = "text"
    line_by_line: bool = Field(True, description="an example a line of a .txt file; false: the file is one document")
    max_seq_length: Length = Field(128, description="longer examples are split, each part with its special tokens")
    min_seq_length: Count = Field(12, description="shorter ones are dropped; tokens, special ones included")
    max_unknown: Fraction = Field(0.5, description="examples of which this share or more is unknown are dropped")
    mlm_mask_prop: Fraction = Field(0.15, gt=0, description="share of the tokens to predict")
    word_mask: Fraction = Field(0.8, description="share of those that the mask token replaces")
    word_keep: Fraction = Field(0.1, description="share that stays as it is")
    word_rand: Fraction = Field(0.1, description="share that a random token replaces")
    mlm_smoothing: float = Field(
        0.7, ge=0, description="a token is chosen with weight count ** -mlm_smoothing: rare ones more often"
    )
    head_positions: Literal["labels", "all"] = Field(
        "labels", description='where mlm logits are computed; "all" follows from restrict_ce_to_mask: false'
    )

    @model_validator(mode="after")
    def _settings_agree(self) -> LmSpec:
        mistakes = []
        total = self.word_mask + self.word_keep + self.word_rand
        if abs(total - 1) > 1e-6:
            mistakes.append(f"word_mask + word_keep + word_rand is {total:g}: make it 1")
        if self.min_seq_length > self.max_seq_length:
            mistakes.append(
                f"min_seq_length is {self.min_seq_length} and max_seq_length is {self.max_seq_length}: every example "
                f"would be dropped; lower min_seq_length"
            )
        if mistakes:
            raise UserError("\n".join(mistakes))
        return self


TaskSpec = TextSpec | SquadSpec | LmSpec

FAMILIES: dict[str, type[TextSpec] | type[SquadSpec] | type[LmSpec]] = {
    "text": TextSpec,
    "squad": SquadSpec,
    "lm": LmSpec,
}


def family(value: Any) -> str:
    """The family of a task, by the name in its JSON or of its spec."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    by_name = {"squad": "squad", "mlm": "lm", "clm": "lm"}
    return by_name.get(name, "text") if isinstance(name, str) else "text"


AnyTask = Annotated[
    Annotated[TextSpec, Tag("text")] | Annotated[SquadSpec, Tag("squad")] | Annotated[LmSpec, Tag("lm")],
    Discriminator(family),
]
"""A recipe's field that holds any task."""
