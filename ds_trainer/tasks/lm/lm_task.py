"""Language modelling over text: masked (arXiv 1810.04805, as DistilBERT trains, arXiv 1910.01108) or causal.

Documents come from `lm_text.py` and become sequences in `sequences.py`, tokenised once and cached; masks are drawn
anew for each `draw` in `masking.py`; heads run only where there is a loss (`head_positions.py`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.models.pretrained import (
    CAUSAL_LM,
    MASKED_LM,
    check_fits,
    load_config,
    load_with_head,
    pad_token_id,
    tokenizer_state,
)
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Array, Examples, Positions, fingerprint, pack, spread
from ds_trainer.tasks.lm import lm_text
from ds_trainer.tasks.lm.head_positions import take_head_positions
from ds_trainer.tasks.lm.masking import MaskRule, chosen_count, mask_tokens, token_weights
from ds_trainer.tasks.lm.sequences import Tally, cutter_for, tokenised_documents
from ds_trainer.tasks.task import Batch, Task, Unit, check_finite

IGNORED = -100
"""The label of a position that has logits and no loss."""
_CHUNK_VALUES = 1 << 24
"""Logits that are turned to fp32 at once at evaluation: 64 MiB."""
_LARGEST_LOSS = math.log(sys.float_info.max)
"""Whose perplexity is a float."""
_ROUNDING = 1e-5


class Answer(NamedTuple):
    """What a model says of an example: the summed negative log-likelihood of its labels, how many it hits, and what it
    predicts for each."""

    nll: float
    hits: int
    predicted: list[int]


class LmTask(Task):
    """Masked ("mlm") or causal ("clm") language modelling for the model folder `source` (or hub name).

    Every rank must build it and ask for its splits. A tokenizer without a padding token is given the end of text
    for one, in place.
    """

    spec: LmSpec
    logits_of: ClassVar[Literal["example", "token", "position"]] = "position"
    loss_unit: ClassVar[Unit] = "label"
    own_inputs: ClassVar[frozenset[str]] = frozenset({"head_positions"})

    def __init__(self, spec: LmSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(tokenizer, MASKED_LM if spec.name == "mlm" else CAUSAL_LM, cache_dir)
        self.spec = spec
        self.inputs_vary = spec.name == "mlm"
        self.logits_unit = "token" if spec.name == "mlm" and spec.head_positions == "all" else "label"
        load_config(source, self.head)
        if spec.name == "mlm" and tokenizer.mask_token_id is None:
            raise UserError(f'the tokenizer of {source} has no mask token: use the task "clm", or give it a mask_token')
        self._pad_token_id = pad_token_id(tokenizer)
        self._special = _special_ids(tokenizer)
        self._cutter = cutter_for(spec, tokenizer, self._special)
        self._rule: MaskRule | None = None

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load `folder`'s model with its head, in fp32, on the CPU; it takes `head_positions`.

        A forward of four tokens tells whether it can, and for "clm" whether it is causal: ValueError where not.
        """
        model = load_with_head(folder, self.head)
        check_fits(model, self.tokenizer, self.spec.max_seq_length)
        model = take_head_positions(model)
        before, after = _before_the_last(model, self._ordinary())
        if self.spec.name == "clm":
            _check_causal(folder, model.config, before, after)
        return model

    def examples(self, split: str) -> Examples:
        """The tokenised split; for "mlm" the first call also counts the training split's tokens. Collective.

        Where there is nothing to train on, the tokens of the split itself are counted.
        """
        found = super().examples(split)
        if self.spec.name == "mlm" and self._rule is None:
            can_train = bool(self.spec.train_file or self.spec.dataset)
            self._rule = self._mask_rule(super().examples("train") if can_train else found)
        return found

    def counts(self, examples: Examples, positions: Positions) -> dict[Unit, int]:
        labels = examples.lengths[positions] - 1
        if self.spec.name == "mlm":
            labels = chosen_count(examples.fields["ordinary"][positions], self.spec.mlm_mask_prop)
        return super().counts(examples, positions) | {"label": int(labels.sum())}

    def fingerprint(self, split: str) -> str:
        names = ("name", "text_column", "line_by_line", "max_seq_length", "min_seq_length", "max_unknown")
        settings = {name: getattr(self.spec, name) for name in names}
        source = lm_text.fingerprint(self.spec, split)
        return fingerprint("lm", split, source, settings, self.limit(split), tokenizer_state(self.tokenizer))

    def tokenised(self, split: str) -> Examples:
        started = time.monotonic()
        tally = Tally()
        examples = pack(self._sequences(split, tally), {"input_ids": np.int32}, {})
        if not tally.examples:
            raise UserError(f"{self.spec.name} {split}: {_why_empty(tally, self.spec)}")
        examples = _chosen(examples, spread(len(examples), self.limit(split)))
        counts = np.bincount(examples.tokens["input_ids"], minlength=_vocabulary(self.tokenizer))
        distributed.info(
            f"{self.spec.name} {split}: {_told(tally, examples, self.spec)} ({time.monotonic() - started:.1f} s)"
        )
        # of each example, the tokens that can be chosen for a prediction
        is_ordinary = np.isin(np.arange(len(counts)), self._special, invert=True)[examples.tokens["input_ids"]]
        ordinary = np.add.reduceat(is_ordinary, examples.offsets[:-1], dtype=np.int32)
        notes = tally.as_notes() | {"counts": counts.tolist()}
        return Examples(examples.offsets, examples.tokens, {"ordinary": ordinary}, notes)

    def collate(self, examples: Examples, positions: Sequence[int] | Positions, draw: int = 0) -> Batch:
        ids = np.asarray(positions, dtype=np.int64)
        padded = examples.padded(ids, {"input_ids": self._pad_token_id}, self.spec.pad_to_multiple_of)
        tokens, attended = padded.columns["input_ids"], padded.mask
        if self.spec.name == "clm":
            heads, labels = _next_tokens(tokens, attended)
        else:
            tokens, heads, labels = self._masked(tokens, attended, ids, draw)
        inputs = {"input_ids": tokens, "attention_mask": attended, "head_positions": heads}
        return Batch(
            {name: torch.from_numpy(values) for name, values in inputs.items()},
            torch.from_numpy(labels),
            torch.from_numpy(ids),
        )

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Mean cross entropy over the labels of the micro-batch."""
        total = F.cross_entropy(out.logits[0].float(), batch.labels, ignore_index=IGNORED, reduction="sum")
        return total / (batch.labels != IGNORED).sum().clamp(min=1)

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """(n, vocabulary) at `head_positions`."""
        return (out.logits[0],)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """An `Answer` by example."""
        places = (batch.labels != IGNORED).nonzero().squeeze(1)
        labels = batch.labels[places]
        rows = batch.inputs["head_positions"][places] // batch.inputs["input_ids"].shape[1]
        nll, predicted = _read(out.logits[0], places, labels)
        per_row = torch.bincount(rows, minlength=len(batch.ids)).tolist()
        columns = (nll.detach().double(), predicted == labels, predicted)
        by_row = zip(*(column.cpu().split(per_row) for column in columns), strict=True)
        found = [Answer(float(n.sum()), int(hits.sum()), said.tolist()) for n, hits, said in by_row]
        return dict(zip(batch.ids.tolist(), found, strict=True))

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Perplexity, mean negative log-likelihood and accuracy, over all labels of the split.

        A perplexity beyond the largest float is told as that: infinity is no JSON.
        """
        check_finite(split, [math.isfinite(answer.nll) for answer in answers.values()])
        tokens = sum(len(answer.predicted) for answer in answers.values())
        loss = math.fsum(answer.nll for answer in answers.values()) / tokens
        hits = sum(answer.hits for answer in answers.values())
        return {"perplexity": math.exp(min(loss, _LARGEST_LOSS)), "loss": loss, "accuracy": hits / tokens}

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Share of the split's labels for which two models predict the same token."""
        pairs = [(answers[id].predicted, others[id].predicted) for id in answers]
        same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
        return same / sum(len(one) for one, _ in pairs)

    def _sequences(self, split: str, tally: Tally) -> Iterator[Mapping[str, list[list[int]]]]:
        texts = lm_text.documents(self.spec, split)
        for documents in tokenised_documents(texts, self.tokenizer):
            yield {"input_ids": [part for document in documents for part in self._cutter.parts(document, tally)]}

    def _mask_rule(self, counted: Examples) -> MaskRule:
        spec = self.spec
        weights = token_weights(np.array(counted.notes["counts"]), spec.mlm_smoothing, self._special)
        return MaskRule(
            weights, self._ordinary(), self.tokenizer.mask_token_id, spec.mlm_mask_prop, spec.word_mask, spec.word_rand
        )

    def _ordinary(self) -> Array:
        """The ids of tokens that stand for text."""
        return np.setdiff1d(list(self.tokenizer.get_vocab().values()), self._special)

    def _masked(self, tokens: Array, attended: Array, ids: Array, draw: int) -> tuple[Array, Array, Array]:
        """The corrupted tokens, the places of the heads, and their labels."""
        assert self._rule is not None, "the examples come from `examples`"
        seen, chosen = mask_tokens(self._rule, tokens, attended, ids, draw)
        heads = np.flatnonzero(chosen if self.spec.head_positions == "labels" else attended)
        return seen, heads, np.where(chosen, tokens, IGNORED).ravel()[heads]


def _next_tokens(tokens: Array, attended: Array) -> tuple[Array, Array]:
    """Every place that a token follows, and that token."""
    followed = np.zeros_like(attended)
    followed[:, :-1] = attended[:, 1:]
    heads = np.flatnonzero(followed)
    return heads, tokens.ravel()[heads + 1]


def _read(logits: Tensor, places: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (fp32) of the labels, and the likeliest token, at some places; each (places,)."""
    rows = max(1, _CHUNK_VALUES // logits.shape[1])
    nll, predicted = [], []
    for some, gold in zip(places.split(rows), labels.split(rows), strict=True):
        chunk = logits[some].float()
        nll.append(F.cross_entropy(chunk, gold, reduction="none"))
        predicted.append(chunk.argmax(-1))
    return torch.cat(nll), torch.cat(predicted)


def _special_ids(tokenizer: Any) -> Array:
    """The tokens that stand for no text, reserved ones among them."""
    added = (id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return np.unique([*tokenizer.all_special_ids, *added]).astype(np.int64)


def _vocabulary(tokenizer: Any) -> int:
    """One more than the largest id: some vocabularies have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


@torch.no_grad()
def _before_the_last(model: Any, ordinary: Array) -> tuple[Tensor, Tensor]:
    """Logits (3, vocabulary) before the last token of two sequences of four that differ in that token alone."""
    training = model.training
    model.eval()
    found = []
    for last in (ordinary[0], ordinary[-1]):
        ids = torch.tensor([[ordinary[0], ordinary[0], ordinary[0], last]])
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), head_positions=torch.arange(3))
        found.append(out.logits[0].float())
    model.train(training)
    return found[0], found[1]


def _check_causal(source: str | Path, config: Any, before: Tensor, after: Tensor) -> None:
    """Refuse a model whose earlier logits change with the last token: it would read its labels.

    A causal model's may differ by rounding, where what is computed together depends on the tokens (experts).
    """
    if float((before - after).abs().max()) > _ROUNDING * float(before.abs().max()):
        raise UserError(
            f'{source} is a {config.model_type} model whose tokens see those after them: use the task "mlm", a '
            f'decoder such as gpt2, or make it causal in its config.json ("is_decoder": true for BERT and its like, '
            f'"causal": true for XLM, "attn_type": "uni" for XLNet)'
        )


def _chosen(examples: Examples, positions: Sequence[int]) -> Examples:
    """The examples at some positions; not copied where these are all."""
    if len(positions) == len(examples):
        return examples
    flat = np.concatenate([examples.row(position)["input_ids"] for position in positions])
    offsets = np.concatenate([[0], np.cumsum(examples.lengths[positions], dtype=np.int64)])
    return Examples(offsets, {"input_ids": flat})


def _told(tally: Tally, examples: Examples, spec: LmSpec) -> str:
    used = "" if len(examples) == tally.examples else f" of {tally.examples:,}"
    return (
        f"{tally.documents:,} documents ({tally.split:,} split at {spec.max_seq_length} tokens), "
        f"{len(examples):,}{used} examples, {int(examples.offsets[-1]):,} tokens; dropped: "
        f"{tally.short:,} shorter than {spec.min_seq_length} tokens, {tally.unknown:,} mostly unknown"
    )


def _why_empty(tally: Tally, spec: LmSpec) -> str:
    return (
        f"the {tally.documents:,} documents give no example: {tally.short:,} are shorter than min_seq_length "
        f"({spec.min_seq_length}), and {tally.unknown:,} have a share of unknown tokens of max_unknown "
        f"({spec.max_unknown:g}) or more; lower min_seq_length, join short lines by line_by_line: false, or use a "
        f"tokenizer that knows the text"
    )
