"""When a sample leaves, and a model that exits early on batches: samples that are sure leave, the rest go on.

With p the probabilities of head j, t_j its threshold and y_j its answer, a sample leaves at the first head where

    entropy      -sum_c p_c ln p_c < t_j (DeeBERT, arXiv 2004.12993)
    confidence   max_c p_c > t_j
    patience     y_j = y_{j-1} = ... = y_{j-patience} (PABEE, arXiv 2006.04152); for a regression each
                 |y_i - y_{i-1}| < t_i

so that its exit depends on its own logits alone. A head of tokens has p and y for each token: a sequence leaves once
its least certain token would (arXiv 2105.13878), and by patience once all their y agree.

DeeBERT exits one sample at a time. Here a hook before each layer runs the exit head of the layer before, selects the
rows of the samples that go on from the layer's arguments, and ends the forward once all have left. The model inside is
the library's own, and its folder is an ordinary one: `exit_heads.safetensors` and `exits.json` lie beside the weights.

An exit head is a classifier of the same form as the model's own head, applied to the output of an earlier layer. No
model code is copied: `model_head` takes the parts of the model's own head by the names that `transformers` gives them,
and runs the model to check that they are its head.
"""

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_trainer.files.writing import write_whole
from ds_trainer.models.folders import as_user_error
from ds_trainer.models.layers import LayerStates, after_layer, encoder_layers
from ds_trainer.models.pretrained import TOKEN_CLASSIFIER, load_trained
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.exit_specs import EXITS_FILE, Criterion, ExitPolicy, Pooling, SavedExits
from ds_trainer.recipe.recipe import saved_exits

HEADS_FILE = "exit_heads.safetensors"
_NOT_BY_SAMPLE = frozenset({"rel_embeddings"})
"""Arguments of a layer with a row for each relative position (DeBERTa): there may be as many as samples."""


def doubt(criterion: Criterion, logits: Tensor, before: Tensor | None, counted: Tensor | None) -> Tensor:
    """Return the doubt of a head about each sample: (batch, classes) or (batch, length, classes) -> (batch,), fp64.

    A sample is sure where its doubt is below a limit. The doubt is the entropy in nats, the negative confidence, or by
    patience the distance from the answer of the head before, whose logits are `before`; classes are 0 or 1 apart, and
    at the first head it is infinite. `counted` (batch, length) has the tokens whose doubts count; None where logits are
    of whole samples.
    """
    # in fp32 the entropies of all confident samples would be equal
    if criterion == "entropy":
        values = torch.special.entr(torch.softmax(logits.double(), -1)).sum(-1)
    elif criterion == "confidence":
        values = -torch.softmax(logits.double(), -1).amax(-1).clamp(max=1.0)  # which rounding may exceed
    elif before is None:
        values = logits.new_full(logits.shape[:-1], math.inf, dtype=torch.float64)
    elif logits.shape[-1] == 1:
        values = (logits.double() - before.double()).squeeze(-1).abs()
    else:
        values = (logits.argmax(-1) != before.argmax(-1)).double()
    return values if counted is None else values.where(counted, -math.inf).amax(-1)


def doubts_of_all(criterion: Criterion, logits: Tensor, counted: Tensor | None) -> Tensor:
    """Return the doubts of all exit heads, (heads - 1, batch), by the logits of all heads, the model's own last.

    NaN, by which no sample leaves, becomes infinity.
    """
    pairs = zip(logits[:-1], [None, *logits], strict=False)
    doubts = torch.stack([doubt(criterion, one, before, counted) for one, before in pairs])
    return torch.where(doubts.isnan(), math.inf, doubts)


class RunningPolicy:
    """A policy applied to one batch, head after head. It remembers for how long the heads agree, as patience needs.

    The running model applies it to the samples that are still in its batch, calibration to all samples at all heads:
    so the running model has the scores that calibration promises. It is called once for each exit head, in order; at
    the model's own head all others leave.
    """

    def __init__(self, policy: ExitPolicy) -> None:
        self.policy = policy
        self._limits = iter(policy.thresholds or repeat(1.0))  # classes that differ are 1 apart
        self._before: Any = None  # the logits of the head before
        self._streak: Any = 0  # (batch,) heads in a row that were sure: but for patience one is enough

    def sure(self, logits: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return (batch,) booleans: which samples leave at the next head, by its logits and its `counted` tokens."""
        doubts = doubt(self.policy.criterion, logits, self._before, counted)
        self._before = logits
        return self.leave(doubts)

    def leave(self, doubts: Tensor) -> Tensor:
        """Return which samples leave at the next head, (batch,), by how much it doubts each of them."""
        limit = next(self._limits)
        sure = doubts < (-limit if self.policy.criterion == "confidence" else limit)
        self._streak = (self._streak + 1) * sure
        return self._streak >= (self.policy.patience or 1)

    def keep(self, staying: Tensor) -> None:
        """Go on with these samples of the last call, by their indices, and forget the others."""
        self._before, self._streak = self._before[staying], self._streak[staying]


def exit_at(policy: ExitPolicy, doubts: Tensor) -> Tensor:
    """Return (samples,) the index of the head at which each sample leaves, by the doubts (exit heads, samples)."""
    running, last = RunningPolicy(policy), len(doubts)
    exits = torch.full(doubts.shape[1:], last, device=doubts.device)
    for head, one in enumerate(doubts):
        exits = torch.where(running.leave(one) & (exits == last), head, exits)
    return exits


class ExitHead(nn.Module):
    """Map states (batch, length, width) and their mask (batch, length), or None, to logits (batch, classes).

    `steps` are applied to the pooled state (batch, width). With `takes_tokens` they get it as a sequence of one token,
    because the pooler or head of some models picks the first token itself. A head without pooling classifies each
    token: its logits are (batch, length, classes).
    """

    def __init__(
        self, steps: Sequence[nn.Module], pooling: Pooling | None, norm: nn.Module | None, takes_tokens: bool
    ) -> None:
        super().__init__()
        self.pooling, self.takes_tokens = pooling, takes_tokens
        self.norm = norm
        self.steps = nn.ModuleList(steps)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if self.pooling == "first":
            hidden = hidden[:, 0]
        value = hidden if self.norm is None else self.norm(hidden)
        if self.pooling == "mean":
            value = _mean(value, mask)
        if self.takes_tokens:
            value = value[:, None]
        for step in self.steps:
            if self.training or not isinstance(step, nn.Dropout):  # in evaluation dropout would only cost a call
                value = step(value)
        return value


def _mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """Average states over the tokens. In 16 bits their sum would overflow and their count be inexact: so in fp32."""
    if mask is None:
        return states.mean(1)
    total = (states * mask.to(states.dtype).unsqueeze(-1)).sum(1, dtype=torch.float32)
    return (total / mask.sum(1, dtype=torch.float32, keepdim=True)).to(states.dtype)


def model_head(model: Any) -> ExitHead:
    """Return the model's own head, sharing its modules; ValueError where it has a form that is not known."""
    base = model.base_model
    pooler = getattr(base, "pooler", None) or getattr(model, "pooler", None)
    dropout = getattr(model, "dropout", None) or getattr(model, "drop", None) or nn.Identity()
    classifier = getattr(model, "classifier", None)
    of_tokens = isinstance(model, TOKEN_CLASSIFIER.classes(model.config))
    if classifier is None:
        raise UserError(f"exits: {type(model).__name__} has no classifier of a form that this library knows")
    if hasattr(model, "pre_classifier"):  # DistilBERT
        steps = [model.pre_classifier, nn.ReLU(), dropout, classifier]
    elif hasattr(model, "head"):  # ModernBERT
        steps = [model.head, dropout, classifier]
    elif of_tokens:
        steps = [dropout, classifier]
    elif pooler is not None and hasattr(pooler, "dense") and hasattr(pooler, "activation"):  # BERT
        steps = [pooler.dense, pooler.activation, dropout, classifier]
    else:  # DeBERTa; RoBERTa and ELECTRA, whose classifier picks the first token
        steps = [classifier] if pooler is None else [pooler, dropout, classifier]
    pooling: Pooling = "mean" if getattr(model.config, "classifier_pooling", "cls") == "mean" else "first"
    # a whole pooler, or a classifier alone, picks the first token itself
    takes_tokens = steps[0] in (pooler, classifier) and not of_tokens
    head = ExitHead(steps, None if of_tokens else pooling, getattr(base, "final_norm", None), takes_tokens)
    _check_same(model, head)
    return head


def new_heads(model: Any, layers: Sequence[int], pooling: Pooling | None) -> nn.ModuleDict:
    """Return a head for each of these layers, keyed by its number: copies of the model's own head."""
    head = model_head(model)
    head.pooling = pooling or head.pooling
    return nn.ModuleDict({str(layer): copy.deepcopy(head) for layer in layers})


@dataclass
class EarlyExitOutput(ModelOutput):
    """`logits` as the model gives them, and `exit_layers` (batch,): how many layers each sample went through."""

    logits: Tensor | None = None
    exit_layers: Tensor | None = None


class EarlyExitModel(nn.Module):
    """A classifier of sequences or of tokens with exit heads, for inference.

    `layers` has the layer of each head in ascending order; the last is the depth of the model, where its own head is.
    A sequence leaves with all its tokens; the `special_tokens` do not count in how sure a head is of it.
    """

    special_tokens: Tensor

    def __init__(
        self, model: Any, heads: nn.ModuleDict, policy: ExitPolicy, special_tokens: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.model, self.exit_heads, self.policy, self.config = model, heads, policy, model.config
        self.regression = model.config.num_labels == 1
        last = len(encoder_layers(model))
        self.layers = [*map(int, heads), last]
        self.register_buffer("special_tokens", torch.tensor(special_tokens, dtype=torch.int64), persistent=False)
        self._model_head = (model_head(model),)  # in a tuple: its modules are registered as the model's already
        # by thread, since the hooks of one model serve all threads; a plain dict, so that the model can be copied
        self._running: dict[int, _RunningBatch] = {}
        for layer in range(1, last + 1):
            after_layer(model, layer, partial(self._after_layer, layer))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def heads(self) -> list[ExitHead]:
        """The heads in the order of `layers`, the model's own last."""
        return [*self.exit_heads.values(), *self._model_head]  # type: ignore[list-item]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> EarlyExitOutput:
        """Run each sample as far as the policy requires; results are in the order of the batch, without gradient.

        Labels are refused, since no loss is computed, and so are requests for hidden states and attentions, since the
        samples that leave early have none of the later layers.
        """
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None  # without padding the library's models take a faster way if there is no mask
        named = {"token_type_ids": token_type_ids, "position_ids": position_ids}
        inputs = {name: value for name, value in named.items() if value is not None}  # not every model takes them
        with torch.inference_mode():
            running = self._running[threading.get_ident()] = _RunningBatch(self, input_ids, attention_mask)
            try:
                self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
            except _AllLeft:
                pass
            finally:
                del self._running[threading.get_ident()]
        assert running.logits is not None, "all have left"
        # tensors made in inference mode cannot be used in autograd later; copies made outside of it can
        return EarlyExitOutput(logits=running.logits.clone(), exit_layers=running.exit_layers.clone())

    @torch.no_grad()
    def all_logits(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the logits of all heads, the model's own last, from one forward: (heads, batch, ...)."""
        states = LayerStates(self.model, self.layers)
        try:
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        finally:
            states.remove()
        pairs = zip(self.heads, self.layers, strict=True)
        return torch.stack([head(out.layer_states[layer], attention_mask) for head, layer in pairs])

    def counted(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor | None:
        """Return which tokens count in how sure a head is of a sequence, (batch, length): those of the text.

        All that are attended count where none is of the text. None where the heads classify whole sequences.
        """
        if self._model_head[0].pooling:
            return None
        attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        of_text = attended.bool() & ~torch.isin(input_ids, self.special_tokens)
        return torch.where(of_text.any(-1, keepdim=True), of_text, attended.bool())

    def _after_layer(self, layer: int, args: Any, kwargs: Any) -> Any:
        running = self._running.get(threading.get_ident())
        return None if running is None else running.after(layer, args, kwargs)


def load_for_inference(folder: str | Path) -> nn.Module:
    """Load the model of a folder in fp32, in evaluation mode; it exits early where the folder has exit heads.

    A hub name gives the plain model: exit heads are read from folders only. ValueError where the folder holds no
    trained model, or exit heads of another one.
    """
    model = load_trained(folder).eval()
    return with_exits(model, Path(folder)) if has_exits(folder) else model


def with_exits(model: Any, folder: Path, policy: ExitPolicy | None = None) -> EarlyExitModel:
    """Give the model the heads of the folder, and the policy given or else the folder's; in evaluation mode.

    ValueError where heads or policy do not fit the model.
    """
    heads, saved = load_heads(model, folder)
    early = EarlyExitModel(model, heads, policy or saved.policy, saved.special_tokens).eval()
    raise_mistakes(f"exits: {mistake}" for mistake in early.policy.mistakes_for(len(heads), early.regression))
    return early


class _AllLeft(Exception):  # noqa: N818
    """Ends the forward of a model whose samples have all left."""


class _RunningBatch:
    """A batch in one forward: which of its samples are still in it, and the results of those that left."""

    def __init__(self, model: EarlyExitModel, input_ids: Tensor, mask: Tensor | None) -> None:
        self.size, self.mask = len(input_ids), mask
        self.heads = dict(zip(model.layers, model.heads, strict=True))
        self.last = model.layers[-1]
        self.policy, self.counted = RunningPolicy(model.policy), model.counted(input_ids, mask)
        self.exit_layers = torch.full((self.size,), self.last, device=input_ids.device)
        self.logits: Tensor | None = None
        self._samples = torch.arange(self.size, device=input_ids.device)  # indices of those still in the batch
        self._selected: dict[int, tuple[Tensor, Tensor]] = {}

    def after(self, layer: int, args: Any, kwargs: Any) -> Any:
        """Run the head of the layer, if it has one; return the next layer's arguments, for the samples that stay."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if layer in self.heads:
            hidden = self._staying(layer, hidden)
        if len(self._samples) == self.size:
            return None  # the arguments stay as they are
        named = {name: value if name in _NOT_BY_SAMPLE else self._select(value) for name, value in kwargs.items()}
        if args:
            return (hidden, *map(self._select, args[1:])), named
        return args, named | {"hidden_states": hidden}

    def _staying(self, layer: int, hidden: Tensor) -> Tensor:
        """Record the logits of the samples that leave here; return the states of those that stay."""
        logits = self.heads[layer](hidden, self._select(self.mask))
        if layer == self.last:
            sure = torch.ones_like(self._samples, dtype=torch.bool)
        else:
            sure = self.policy.sure(logits, self._select(self.counted))
        staying = (~sure).nonzero().squeeze(1)
        if len(staying) == len(logits):
            return hidden
        if self.logits is None:
            self.logits = logits.new_empty(self.size, *logits.shape[1:])
        self.logits[self._samples[sure]] = logits[sure]
        self.exit_layers[self._samples[sure]] = layer
        if len(staying) == 0:
            raise _AllLeft
        self._samples = self._samples[staying]
        self.policy.keep(staying)
        self._selected.clear()
        return hidden[staying]

    def _select(self, value: Any) -> Any:
        """Select the rows of the samples still in the batch, from a tensor with a row for each, or a tuple of such.

        All else is returned as it is.
        """
        if isinstance(value, tuple):
            return tuple(map(self._select, value))
        is_whole = isinstance(value, Tensor) and value.dim() > 1 and len(value) == self.size
        if not is_whole or len(self._samples) == self.size:
            return value
        # all layers get the same tensors, which are reduced once; keeping the tensor keeps its id from being reused
        if id(value) not in self._selected:
            self._selected[id(value)] = (value, value.index_select(0, self._samples))
        return self._selected[id(value)][1]


def has_exits(folder: str | Path) -> bool:
    return (Path(folder) / EXITS_FILE).is_file()


def save_heads(folder: Path, heads: nn.ModuleDict, saved: SavedExits) -> None:
    """Write the heads beside a model, and last `exits.json`: a folder with that file has exits."""
    save_file({name: value.contiguous() for name, value in heads.state_dict().items()}, folder / HEADS_FILE)
    write_exits(folder, saved)


def write_exits(folder: Path, saved: SavedExits) -> None:
    write_whole(folder / EXITS_FILE, saved.model_dump_json(indent=2) + "\n")


def read_exits(folder: Path) -> SavedExits:
    """Read the `exits.json` of a folder; UserError where there is none, or it is not valid."""
    if saved := saved_exits(folder):
        return saved
    raise UserError(f"the model folder {folder} has no {EXITS_FILE}: it has no exit heads")


def load_heads(model: Any, folder: Path) -> tuple[nn.ModuleDict, SavedExits]:
    """Load the heads of a folder for its model; ValueError where they do not belong to it."""
    saved = read_exits(folder)
    last = len(encoder_layers(model))
    if saved.layers[-1] >= last:
        raise UserError(f"{folder / EXITS_FILE}: a head after layer {saved.layers[-1]}, and the model has {last}")
    heads = new_heads(model, saved.layers, saved.pooling)
    with as_user_error(f"{folder / HEADS_FILE} does not hold the heads of this model, or was cut short"):
        heads.load_state_dict(load_file(folder / HEADS_FILE))
    return heads, saved


@torch.no_grad()
def _check_same(model: Any, head: ExitHead) -> None:
    """Raise UserError unless the head turns the last layer's output into the model's logits, on two made-up texts."""
    last, was_training = len(encoder_layers(model)), model.training
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 3, 3]], device=model.device) % getattr(model.config, "vocab_size", 10)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=model.device)
    states = LayerStates(model, [last])
    with as_user_error(f"exits: {type(model).__name__} cannot be run with its config"):
        out = model.eval()(input_ids=ids, attention_mask=mask)
    states.remove()
    hidden = out.layer_states.get(last)  # None where the list that looks like the model's layers is not run
    same = hidden is not None and torch.allclose(head(hidden, mask), out.logits, atol=1e-5, rtol=1e-4)
    model.train(was_training)
    if not same:
        raise UserError(f"exits: the head of {type(model).__name__} has a form that this library does not know")
