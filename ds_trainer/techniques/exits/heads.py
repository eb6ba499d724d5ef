"""Exit heads: classifiers of the same form as the model's own head, applied to the output of an earlier layer.

No model code is copied: `model_head` takes the parts of the model's own head by the names that `transformers` gives
them, and runs the model to check that they are its head.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_trainer.files.writing import write_whole
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.loading import as_user_error
from ds_trainer.models.pretrained import TOKEN_CLASSIFIER
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import EXITS_FILE, Pooling, SavedExits
from ds_trainer.recipe.recipe import saved_exits
from ds_trainer.techniques.layer_states import LayerStates

HEADS_FILE = "exit_heads.safetensors"


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
