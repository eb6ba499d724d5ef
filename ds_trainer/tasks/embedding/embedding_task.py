"""Embeddings: a model turns each text into a vector, and texts that mean the same get similar vectors.

An example is some texts that belong together (`EmbeddingRow`), and each of its texts is a row of a batch. A vector is
pooled from the last hidden states of a model without a head, as the folder of the model says in the files of
sentence-transformers (`models/sentence_files.py`).

| loss | what it asks for | source |
|---|---|---|
| contrastive | of all positives and negatives of a step, an anchor is nearest to its positive | arXiv 1705.00652 |
| cosent | of two scored pairs, the one with the higher score has the higher cosine | CoSENT |
| none | nothing: a teacher decides | arXiv 2004.09813 |

The first two compare the examples of a step with each other, on all ranks (GradCache, arXiv 2101.06983). With
`matryoshka_dims` each is the mean over vectors that are cut to these dimensions and whole ones (arXiv 2205.13147).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.models import pretrained
from ds_trainer.models.pretrained import HEADLESS
from ds_trainer.models.sentence_files import SentenceFiles, has_sentence_files, read_sentence_files
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import EmbeddingSpec
from ds_trainer.tasks.data import COLUMN, Array, joined
from ds_trainer.tasks.embedding import embedding_data
from ds_trainer.tasks.embedding.embedding_data import DOCUMENT, EmbeddingRow
from ds_trainer.tasks.records import Row
from ds_trainer.tasks.scores import CUTOFF, ranking_scores, regression_scores
from ds_trainer.tasks.task import Batch, Predict, Task, Unit
from ds_trainer.tasks.text_sources import source_of

_LONGEST = 512
"""The most tokens of a text, where neither the task nor a folder of sentence-transformers says how many."""
_QUERIES = 256
"""How many queries are compared with all documents at a time."""


class EmbeddingTask(Task):
    """Vectors of texts. The rows of the inputs and the logits of a batch are texts; `labels` (examples,) are scores."""

    spec: EmbeddingSpec
    head = HEADLESS
    family = "embedding"
    data: ClassVar[Any] = embedding_data
    token_columns: ClassVar[Mapping[str, Any]] = {**Task.token_columns, COLUMN: np.uint16}
    hashed_fields = ("name", "loss", "max_seq_length")
    regression, vectors = True, True
    logits_of = "position"
    logits_unit: Unit = "label"

    def __init__(self, spec: EmbeddingSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        files = _files(spec, source)
        length = files.max_seq_length or pretrained.default_length(
            tokenizer, pretrained.load_config(source, HEADLESS), None if has_sentence_files(source) else _LONGEST
        )
        super().__init__(spec.model_copy(update={"max_seq_length": length}), tokenizer, source, cache_dir)
        self.files = replace(files, max_seq_length=length)
        self.compares_examples = spec.loss != "none"
        for of in (*spec.train, *spec.validation):
            for name in filter(None, of.prompts or ()):
                if name not in self.files.prompts:
                    known = ", ".join(self.files.prompts) or "none"
                    raise UserError(f"{of.label}: there is no prompt {name!r}: the model has {known}; see task.prompts")
        if widest := max((dim for dim in spec.matryoshka_dims if dim > self.hidden_size), default=0):
            raise UserError(f"matryoshka_dims has {widest}, and the vectors have {self.hidden_size} dimensions")

    def hashed_values(self) -> list[Any]:
        # pooling does not decide on the tokens, but on what is kept of a teacher, and made of a cut, by the same key
        return [*self.spec.rows_read, asdict(replace(self.files, similarity=""))]

    def limit(self, split: str) -> int | None:
        searched = split != "train" and source_of(self.spec, split).is_search
        return None if searched else super().limit(split)  # of a search the queries are limited, where they are read

    def encode(self, rows: Sequence[Row[EmbeddingRow]]) -> dict[str, Any]:
        texts = [self._prompt(name) + text.strip() for row in rows for text, name in zip(*row.value[:2], strict=True)]
        encoded = self.tokens(texts)
        if not all(encoded["input_ids"]):
            raise UserError(f"the tokenizer makes no token of the text {texts[encoded['input_ids'].index([])]!r}")
        columns = joined(encoded, (len(row.value.texts) for row in rows))
        return columns | {"labels": np.array([row.value.score for row in rows], np.float32)}

    def check_trained(self, folder: str | Path) -> None:
        if not (has_sentence_files(folder) or HEADLESS.trained_in(pretrained.load_config(folder, HEADLESS))):
            raise UserError(
                f"{folder} is no embedding model: it has no modules.json, and its head is for another task: train it "
                "as one first"
            )

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return the vectors of the texts of a batch, (texts, width) fp32, of length 1 where the folder says so."""
        states, mask = out.last_hidden_state.float(), batch.mask
        if self.files.pooling == "mean":
            vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        else:  # padding is on the right
            places = mask.sum(1) - 1 if self.files.pooling == "lasttoken" else torch.zeros_like(mask[:, 0])
            vectors = states[torch.arange(len(states), device=states.device), places]
        return (F.normalize(vectors) if self.files.normalize else vectors,)

    def reads_otherwise(self, folder: str | Path) -> str:
        manners = []
        for files in (_files(self.reader_spec(folder), folder), self.files):
            prompts = {pair for pair in files.prompts.items() if pair[1]}
            manners.append((files.pooling, files.normalize, prompts, files.default_prompt_name))
        return "" if manners[0] == manners[1] else "another pooling or other prompts"

    def reader_spec(self, folder: str | Path) -> EmbeddingSpec:
        """Return a spec of which the fields do not replace what the files of the folder say, if it has some."""
        if not has_sentence_files(folder):
            return self.spec
        prompts = {**self.spec.prompts, **read_sentence_files(folder).prompts}
        return self.spec.model_copy(update={"pooling": None, "normalize": None, "prompts": prompts})

    def output_of(self, reader: Task, predict: Predict, batch: Batch) -> Any:
        """Give every token of a text the vector that the other model has for it, which any pooling gives again."""

        def pooled(theirs: Batch) -> Any:
            out = predict(theirs)
            (vectors,) = reader.logits(out, theirs)
            out.last_hidden_state = vectors[:, None].expand(-1, batch.mask.shape[1], -1)
            return out

        return super().output_of(reader, pooled, batch)

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the loss over the examples of the whole step where the batch has them, else over its own."""
        (vectors,), ids = self.logits(out, batch), batch.ids.numpy()
        if not self.compares_examples:
            return vectors.sum() * 0
        if batch.step is not None:
            vectors, ids = batch.step.with_own(vectors), batch.step.ids
        examples = self.examples("train")
        texts = examples.sequences
        rows = texts.of_examples(ids)
        column = texts.column[rows]  # the host has it: to ask the device for it would wait
        places = [np.flatnonzero(of) for of in (column == 0, column == 1, column > 1)]
        device = vectors.device
        parts = [torch.from_numpy(each).to(device) for each in places]
        if self.spec.loss == "contrastive":
            contents = [hash(texts.rows.row(row)["input_ids"].tobytes()) for row in rows[np.concatenate(places[1:])]]
            # the twins of a positive are no negatives of its anchor
            twins = np.equal.outer(contents[: len(places[1])], contents)
            np.fill_diagonal(twins, False)
            left_out = torch.from_numpy(twins).to(device)
        labels = torch.from_numpy(np.asarray(examples.fields["labels"][ids])).to(device, non_blocking=True)
        losses = []
        for width in sorted({*self.spec.matryoshka_dims, vectors.shape[1]}):
            anchors, positives, negatives = (F.normalize(vectors[part, :width]) for part in parts)
            if self.spec.loss == "contrastive":
                losses.append(contrastive_loss(anchors, torch.cat([positives, negatives]), self.spec.scale, left_out))
            else:
                losses.append(cosent_loss((anchors * positives).sum(1), labels, self.spec.scale))
        return torch.stack(losses).mean()

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the vectors of each example's texts, (texts, width) fp32 in numpy."""
        vectors, ids = self.logits(out, batch)[0].detach().cpu().numpy(), batch.ids.tolist()
        # a split that is scored has equally many texts in all examples
        return dict(zip(ids, vectors.reshape(len(ids), -1, vectors.shape[1]), strict=True))

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        return self._scores(split, self.stacked(split, answers))

    def further_scores(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return the scores of vectors that are cut to `matryoshka_dims`, such as `spearman/64`."""
        vectors = self.stacked(split, answers)
        return {
            f"{name}/{width}": value
            for width in self.spec.matryoshka_dims
            for name, value in self._scores(split, vectors[..., :width]).items()
        }

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Return the mean cosine of the two models' vectors of the same texts; 0 where they have other dimensions."""
        ours, theirs = self.stacked(split, answers), self.stacked(split, others)
        return float((_unit(ours) * _unit(theirs)).sum(-1).mean()) if ours.shape == theirs.shape else 0.0

    def save(self, folder: Path) -> None:
        self.files.write(folder, pretrained.load_config(folder, HEADLESS).get_text_config().hidden_size)

    def _scores(self, split: str, vectors: Array) -> dict[str, float]:
        vectors = vectors if self.files.similarity == "dot" else _unit(vectors)
        if source_of(self.spec, split).is_search:
            return search_scores(vectors[:, 0], [row.value for row in self.read(split)[1]])
        return regression_scores((vectors[:, 0] * vectors[:, 1]).sum(-1), self.examples(split).fields["labels"])

    def _prompt(self, name: str | None) -> str:
        """Return what begins a text whose prompt has this name; a document's has one of three names."""
        prompts = self.files.prompts
        names = ("document", "passage", "corpus") if name == DOCUMENT else (name,)
        return next((prompts[each] for each in (*names, self.files.default_prompt_name) if each in prompts), "")


def _files(spec: EmbeddingSpec, source: str | Path) -> SentenceFiles:
    """Return what the files of a folder or hub name say, with the fields of the spec in their place."""
    files = read_sentence_files(source)
    given = {name: getattr(spec, name) for name in ("pooling", "normalize", "max_seq_length")}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(files, prompts={**files.prompts, **spec.prompts}, **given)


def contrastive_loss(anchors: Tensor, candidates: Tensor, scale: float, left_out: Tensor) -> Tensor:
    """Return the cross entropy of each anchor's cosines with all candidates, mean over the anchors.

    Both are (texts, width), of length 1. The first candidates are the positives of the anchors, in their order;
    `left_out` (anchors, candidates) is true where a candidate is none for an anchor.
    """
    logits = (scale * anchors @ candidates.T).masked_fill(left_out, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(anchors), device=anchors.device))


def cosent_loss(cosines: Tensor, scores: Tensor, scale: float) -> Tensor:
    """Return log(1 + sum of exp(scale * (cosine i - cosine j)) over all i, j where score i is below score j)."""
    differences = scale * (cosines[:, None] - cosines[None, :])
    wrong = differences.masked_fill(scores[:, None] >= scores[None, :], -torch.inf)
    return torch.cat([wrong.new_zeros(1), wrong.flatten()]).logsumexp(0)


def search_scores(vectors: Array, rows: Sequence[EmbeddingRow]) -> dict[str, float]:
    """Return the `ranking_scores` of a search, whose queries come before its documents.

    `vectors` are (rows, width). Documents of equal similarity are in their order.
    """
    queries = [row for row in rows if row.relevant is not None]
    places = {row.id: place for place, row in enumerate(rows[len(queries) :])}

    def rankings() -> Iterator[tuple[list[float], list[float]]]:
        for start in range(0, len(queries), _QUERIES):
            similar = vectors[start : min(start + _QUERIES, len(queries))] @ vectors[len(queries) :].T
            for place, query in enumerate(queries[start : start + _QUERIES]):
                if query.id in places:  # a query is no result of itself, as in BEIR
                    similar[place, places[query.id]] = -np.inf
            order = np.argsort(-similar, axis=1, kind="stable")[:, :CUTOFF].tolist()
            for query, results in zip(queries[start : start + _QUERIES], order, strict=True):
                grades = {places[id]: grade for id, grade in (query.relevant or {}).items()}
                yield [grades.get(place, 0.0) for place in results], [*grades.values()]

    return ranking_scores(rankings())


def _unit(vectors: Array) -> Array:
    """Scale vectors to length 1; one of length 0 stays."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
