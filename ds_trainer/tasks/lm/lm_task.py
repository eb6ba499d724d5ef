"""Language modelling over text: masked (arXiv 1810.04805, as DistilBERT trains, arXiv 1910.01108) or causal.

`lm_text.py` reads documents, `sequences.py` makes the sequences or packed rows that are cached, `masking.py` draws new
masks for every `draw`, and `head_positions.py` computes logits only where there is a loss.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.models.pretrained import CAUSAL_LM, MASKED_LM, input_names
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import ExampleIds, Examples, pack, spread
from ds_trainer.tasks.lm import lm_text
from ds_trainer.tasks.lm.head_positions import take_head_positions
from ds_trainer.tasks.lm.masking import TokenMasking, chosen_count, mask_tokens, token_weights
from ds_trainer.tasks.lm.sequences import Conversations, Cutter, Tally, packed, summary
from ds_trainer.tasks.records import Records
from ds_trainer.tasks.scores import check_logits
from ds_trainer.tasks.task import Batch, Task, Unit

IGNORED = -100
"""The label of a position that has logits but no loss."""
_CHUNK_VALUES = 1 << 24
"""How many logits evaluation converts to fp32 at a time: 64 MiB."""
_LARGEST_LOSS = math.log(sys.float_info.max)
"""The largest loss whose perplexity is finite, since JSON has no infinity."""
_ROUNDING = 1e-5
"""By how much logits may differ, as a share of the largest one, where they should be equal."""


class LmAnswer(NamedTuple):
    """The answer to one example: the sum of its labels' negative log-likelihoods, the number of correct predictions,
    and the predicted tokens."""

    nll: float
    hits: int
    predicted: list[int]


class LmTask(Task):
    """Masked ("mlm") or causal ("clm") language modelling.

    Labels are the tokens at `inputs["head_positions"]`, (n,), `IGNORED` where there is no loss. With `packing` an
    example is a row of several documents. The model gets `position_ids` that begin anew with each of them, and no mask:
    from these the models of transformers infer that a document sees only itself.
    """

    spec: LmSpec
    logits_of: ClassVar[Literal["example", "token", "position"]] = "position"
    loss_unit: Unit = "label"
    over_vocabulary: ClassVar[bool] = True
    own_inputs: ClassVar[frozenset[str]] = frozenset({"head_positions"})
    family = "lm"
    hashed_fields = ("name", "text_column", "line_by_line", "max_seq_length", "min_seq_length", "max_unknown")
    hashed_if_set = ("messages_column", "packing")
    data: ClassVar[Any] = lm_text

    def __init__(self, spec: LmSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        self.head = MASKED_LM if spec.name == "mlm" else CAUSAL_LM
        super().__init__(spec, tokenizer, source, cache_dir)
        self.inputs_vary = spec.name == "mlm"
        self.logits_unit = "token" if spec.name == "mlm" and spec.head_positions == "all" else "label"
        if spec.name == "mlm" and tokenizer.mask_token_id is None:
            raise UserError(f'the tokenizer of {source} has no mask token: use the task "clm", or give it a mask_token')
        # some reserved tokens are marked as special only among the added ones
        added = (id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special = np.unique([*tokenizer.all_special_ids, *added]).astype(np.int64)
        self._ordinary = np.setdiff1d(list(tokenizer.get_vocab().values()), self._special)
        self._sequencer: Cutter | Conversations = (
            Conversations(spec, tokenizer, source) if spec.messages_column else Cutter(spec, tokenizer, self._special)
        )
        self._masking: TokenMasking | None = None

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load a model whose forward takes `head_positions`; for "clm" it must be causal, and keep documents apart.

        A forward over two sequences of four tokens, which differ in the last one, shows whether it is causal; another
        one over a row of two documents whether the second gets the logits that it gets alone.
        """
        model = take_head_positions(super().build_model(folder))
        same, other = self._ordinary[0], self._ordinary[-1]

        def logits(ids: list[list[int]], heads: list[int], **inputs: Tensor) -> Tensor:
            with torch.no_grad():
                out = model(input_ids=torch.tensor(ids), head_positions=torch.tensor(heads), **inputs)
            return out.logits[0].float()

        # all but the last token of each sequence
        both = logits([[same] * 4, [same] * 3 + [other]], [0, 1, 2, 4, 5, 6], attention_mask=torch.ones(2, 4).long())
        alone, followed = both.chunk(2)
        if self.spec.name == "clm" and _differ(alone, followed):
            raise UserError(
                f"{folder} is a {model.config.model_type} model whose tokens see those after them, which are its "
                f'labels: use the task "mlm", a decoder such as gpt2, or make it causal in its config.json '
                f'("is_decoder": true for BERT and models like it, "causal": true for XLM)'
            )
        if self.spec.packing and (
            "position_ids" not in input_names(model.config, self.head)
            or _differ(
                alone[:2], logits([[other, other, same, same]], [2, 3], position_ids=torch.tensor([[0, 1, 0, 1]]))
            )
        ):
            raise UserError(
                f"packing: {folder} is a {model.config.model_type} model, which gives a document other logits in a row "
                f"with others than alone: set packing to false, or use a decoder such as gpt2, llama or qwen3"
            )
        return model

    def adapt(self, model: nn.Module) -> nn.Module:
        return take_head_positions(model)

    def examples(self, split: str) -> Examples:
        """Return the tokenised split; collective.

        For "mlm" the first call also reads how often each token occurs in the training split, or in this split if there
        is no training split: rare tokens are masked more often.
        """
        examples = super().examples(split)
        if self.spec.name == "mlm" and self._masking is None:
            can_train = bool(self.spec.train_file or self.spec.dataset)
            counted = super().examples("train") if can_train else examples
            weights = token_weights(np.array(counted.notes["counts"]), self.spec.mlm_smoothing, self._special)
            self._masking = TokenMasking(self.spec, weights, self._ordinary, self.tokenizer.mask_token_id)
        return examples

    def counts(self, examples: Examples, ids: ExampleIds) -> dict[Unit, float]:
        if self.spec.name == "mlm":
            labels = chosen_count(examples.fields["ordinary"][ids], self.spec.mlm_mask_prop)
        elif "labels" in examples.fields:
            labels = examples.fields["labels"][ids]
        else:
            labels = examples.lengths[ids] - 1
        return super().counts(examples, ids) | {"label": int(labels.sum())}

    def source(self, split: str) -> Records[Any]:
        read = self._sequencer.tokens if isinstance(self._sequencer, Conversations) else lm_text.as_text
        return lm_text.records(self.spec, split, read)

    def hashed_values(self) -> list[Any]:
        return [self.tokenizer.get_chat_template()] if self.spec.messages_column else []

    def tokenised(self, split: str) -> Examples:
        """Read a split, in one pass over files that may be larger than the memory."""
        spec, tally, records = self.spec, Tally(), self.source(split)
        columns = {"input_ids": np.int32} | ({"labelled": np.uint8} if spec.messages_column else {})
        documents = progress((row.value for row in records.rows()), "tokenising", records.unit or records.entry)
        whole = pack(self._sequencer.sequences(documents, tally), columns)
        # a limit chooses examples before they are packed, so that packing changes none of the texts that are used
        kept = np.zeros(len(whole), bool)
        kept[spread(len(whole), self.limit(split))] = True
        is_kept = np.repeat(kept, whole.lengths)
        tokens = {name: flat[is_kept] for name, flat in whole.tokens.items()}
        examples = Examples(np.concatenate([[0], np.cumsum(whole.lengths[kept])]), tokens)
        counted = summary(tally, spec, len(is_kept))
        if not tally["examples"]:
            way_out = "lower min_seq_length, set line_by_line to false, or use a tokenizer that knows the text"
            if spec.messages_column:
                way_out = "lower min_seq_length, raise max_seq_length, or see whether a role is called assistant"
            raise UserError(f"{spec.name} {split} has no example: {counted}: {way_out}")
        if spec.packing:
            examples = packed(examples, spec.max_seq_length)
            counted += f"; the {kept.sum():,} that are used are packed into {len(examples):,} rows"
        starts, ids = examples.offsets[:-1], examples.tokens["input_ids"]
        counts = np.bincount(ids, minlength=max(self.tokenizer.get_vocab().values()) + 1)
        is_ordinary = np.isin(np.arange(len(counts)), self._special, invert=True)[ids]
        # how many tokens of each example can be chosen for a prediction
        fields = {"ordinary": np.add.reduceat(is_ordinary, starts, dtype=np.int32)}
        if "labelled" in examples.tokens:
            fields["labels"] = np.add.reduceat(examples.tokens["labelled"], starts, dtype=np.int32)
        return replace(
            examples, fields=fields, notes={"counts": counts.tolist(), "read": f"{records.summary()}; {counted}"}
        )

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        ids = np.asarray(ids, dtype=np.int64)
        columns = examples.padded(ids, {"input_ids": self.pad_token_id}, self.spec.pad_to_multiple_of)
        tokens, attended = columns["input_ids"], columns["attention_mask"]
        if self.spec.name == "clm":
            # each labelled token is the label of the one before it; the first token of a document is never one
            labelled = columns.get("labelled", attended).copy()
            labelled[:, 0] = 0
            heads = np.flatnonzero(labelled) - 1
            labels = tokens.ravel()[heads + 1]
        else:
            assert self._masking is not None, "the examples come from `examples`"
            seen, chosen = mask_tokens(self._masking, tokens, attended, ids, draw)
            heads = np.flatnonzero(chosen if self.spec.head_positions == "labels" else attended)
            labels = np.where(chosen, tokens, IGNORED).ravel()[heads]
            tokens = seen
        inputs = {"input_ids": tokens, "attention_mask": attended, "head_positions": heads}
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        others = {}
        if self.spec.packing:  # a model that gets a mask no longer infers from the positions where documents begin
            others["attention_mask"] = tensors.pop("attention_mask")
            tensors["position_ids"] = torch.from_numpy(columns["position_ids"])
        return Batch(tensors, torch.from_numpy(labels), torch.from_numpy(ids), others)

    def inputs_for(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        inputs = super().inputs_for(model, batch)
        if self.spec.packing:
            inputs.pop("attention_mask", None)
        return inputs

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Mean cross entropy over the labels of the micro-batch."""
        total = F.cross_entropy(out.logits[0].float(), batch.labels, ignore_index=IGNORED, reduction="sum")
        return total / (batch.labels != IGNORED).sum().clamp(min=1)

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return (n, vocabulary) at `head_positions`."""
        return (out.logits[0],)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return an `LmAnswer` for each example."""
        labelled = (batch.labels != IGNORED).nonzero().squeeze(1)
        labels = batch.labels[labelled]
        rows = batch.inputs["head_positions"][labelled] // batch.inputs["input_ids"].shape[1]
        logits = out.logits[0]
        # converted to fp32 in chunks, since a vocabulary makes rows long
        chunks = (each.split(max(1, _CHUNK_VALUES // logits.shape[1])) for each in (labelled, labels))
        nll = [F.cross_entropy(logits[i].float(), gold, reduction="none") for i, gold in zip(*chunks, strict=True)]
        predicted = logits.argmax(-1)[labelled]
        per_row = torch.bincount(rows, minlength=len(batch.ids)).tolist()
        columns = (torch.cat(nll).detach().double(), predicted == labels, predicted)
        by_row = zip(batch.ids.tolist(), *(column.cpu().split(per_row) for column in columns), strict=True)
        return {id: LmAnswer(float(n.sum()), int(hits.sum()), tokens.tolist()) for id, n, hits, tokens in by_row}

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return perplexity, mean negative log-likelihood and accuracy, over all labels of the split."""
        check_logits(split, [math.isfinite(answer.nll) for answer in answers.values()])
        tokens = sum(len(answer.predicted) for answer in answers.values())
        loss = math.fsum(answer.nll for answer in answers.values()) / tokens
        hits = sum(answer.hits for answer in answers.values())
        return {"perplexity": math.exp(min(loss, _LARGEST_LOSS)), "loss": loss, "accuracy": hits / tokens}

    def decisions(self, answer: Any) -> Sequence[Any]:
        return answer.predicted


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether logits differ by more than rounding, which in mixtures of experts depends on the other tokens."""
    return bool((one - other).abs().max() > _ROUNDING * one.abs().max())
