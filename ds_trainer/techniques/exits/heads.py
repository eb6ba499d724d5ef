"""Exit heads: classifiers in the form of a model's own, on the states that a layer leaves.

A model's own head is found by the names that `transformers` gives its parts, and checked by running it: no model code
is copied. What a layer leaves is what the next one is given, which holds also where something lies between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_trainer.config.exit_specs import EXITS_FILE, Pooling, SavedExits
from ds_trainer.config.recipe import parse_exits
from ds_trainer.files.json_file import read_json
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.loading import as_user_error
from ds_trainer.models.model_folder import tensor_shapes
from ds_trainer.ranks.failures import UserError

HEADS_FILE = "exit_heads.safetensors"


class ExitHead(nn.Module):
    """States (rows, length, width) and their mask (rows, length), None for no padding -> logits (rows, classes)."""

    def __init__(self, steps: Sequence[nn.Module], pooling: Pooling, norm: nn.Module | None, of_tokens: bool) -> None:
        super().__init__()
        self.pooling, self._of_tokens = pooling, of_tokens
        self.norm = norm
        self.steps = nn.ModuleList(steps)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        value = self._pooled(hidden, mask)
        if self._of_tokens:  # a pooler or head that takes the first of the tokens itself
            value = value[:, None]
        for step in self.steps:
            if self.training or not isinstance(step, nn.Dropout):  # which would cost a call at each head
                value = step(value)
        return value

    def _pooled(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if self.pooling == "first":
            first = hidden[:, 0]
            return first if self.norm is None else self.norm(first)
        states = hidden if self.norm is None else self.norm(hidden)
        if mask is None:
            return states.mean(1)
        # in 16 bits, a sum over the tokens overflows, and a count of them is not exact
        total = (states * mask.to(states.dtype).unsqueeze(-1)).sum(1, dtype=torch.float32)
        return (total / mask.sum(1, dtype=torch.float32, keepdim=True)).to(states.dtype)


def own_head(model: Any) -> ExitHead:
    """The model's own head, its modules shared; ValueError where it is of a form that is not known."""
    base = model.base_model
    pooler = getattr(base, "pooler", None) or getattr(model, "pooler", None)
    dropout = getattr(model, "dropout", None) or getattr(model, "drop", None) or nn.Identity()
    classifier = getattr(model, "classifier", None)
    if classifier is None:
        raise UserError(f"exits: {type(model).__name__} has no classifier of a form that this library knows")
    norm, pooling = getattr(base, "final_norm", None), getattr(model.config, "classifier_pooling", "cls")
    of_tokens = False
    if hasattr(model, "pre_classifier"):
        steps = [model.pre_classifier, nn.ReLU(), dropout, classifier]
    elif hasattr(model, "head"):
        steps = [model.head, dropout, classifier]
    elif pooler is not None and hasattr(pooler, "dense") and hasattr(pooler, "activation"):
        steps = [pooler.dense, pooler.activation, dropout, classifier]  # of the token that was pooled, as BERT's does
    elif pooler is not None:
        steps, of_tokens = [pooler, dropout, classifier], True
    else:
        steps, of_tokens = [classifier], True
    head = ExitHead(steps, "mean" if pooling == "mean" else "first", norm, of_tokens)
    _check_same(model, head)
    return head


def new_heads(model: Any, layers: Sequence[int], pooling: Pooling | None) -> nn.ModuleDict:
    """A head for each of these layers, by its number; they start as copies of the model's own."""
    own = own_head(model)
    heads = {}
    for layer in layers:
        head = copy.deepcopy(own)
        head.pooling = pooling or own.pooling
        heads[str(layer)] = head
    return nn.ModuleDict(heads)


class LayerStates:
    """What the layers of a model leave, each (rows, length, width), of its latest forward."""

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self.found: dict[int, Tensor] = {}
        self._hooks = [after_layer(model, layer, self._keeper(layer)) for layer in layers]

    def take(self) -> dict[int, Tensor]:
        """Hand them over, by layer, and forget them."""
        found, self.found = self.found, {}
        return found

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, layer: int) -> Callable[[Any, Any], None]:
        def keep(args: Any, kwargs: Any) -> None:
            self.found[layer] = args[0] if args else kwargs["hidden_states"]

        return keep


def after_layer(model: nn.Module, layer: int, call: Callable[[Any, Any], Any]) -> Any:
    """Have `call` see the arguments, positional and by name, with which a model goes on after a layer; gives the hook.

    For all layers but the last they are those of the next one, and `call` may give others. For the last they are its
    output.
    """
    modules = list(encoder_layers(model).values())
    if layer < len(modules):
        return modules[layer].register_forward_pre_hook(lambda _, args, kwargs: call(args, kwargs), with_kwargs=True)

    def of_last(_: Any, args: Any, output: Any) -> None:
        call((output[0] if isinstance(output, tuple) else output,), {})

    return modules[-1].register_forward_hook(of_last)


def has_exits(folder: str | Path) -> bool:
    return (Path(folder) / EXITS_FILE).is_file()


def save_heads(folder: Path, heads: nn.ModuleDict, saved: SavedExits) -> None:
    """Write the heads beside a model; `exits.json`, which says that there are any, last."""
    save_file({name: value.contiguous() for name, value in heads.state_dict().items()}, folder / HEADS_FILE)
    write_exits(folder, saved)


def write_exits(folder: Path, saved: SavedExits) -> None:
    """Replace `exits.json`, whole or not at all."""
    aside = folder / f".{EXITS_FILE}"
    aside.write_text(saved.model_dump_json(indent=2) + "\n", encoding="utf-8")
    aside.replace(folder / EXITS_FILE)


def read_exits(folder: Path) -> SavedExits:
    """What a folder says of its exit heads; ValueError where it says nothing, or nonsense."""
    if not has_exits(folder):
        raise UserError(f"the model folder {folder} has no {EXITS_FILE}: it has no exit heads")
    return parse_exits(read_json(folder / EXITS_FILE, "the exits of a model,"), str(folder / EXITS_FILE))


def load_heads(model: Any, folder: Path) -> tuple[nn.ModuleDict, SavedExits]:
    """The heads of a folder, for its model; ValueError where they are not of it."""
    saved = read_exits(folder)
    last = len(encoder_layers(model))
    if saved.layers[-1] >= last:
        raise UserError(f"{folder / EXITS_FILE}: a head after layer {saved.layers[-1]}, and the model has {last}")
    heads = new_heads(model, saved.layers, saved.pooling)
    _check_shapes(folder / HEADS_FILE, heads)
    try:
        heads.load_state_dict(load_file(folder / HEADS_FILE))
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{folder / HEADS_FILE} does not hold the heads of this model: {cause}") from error
    return heads, saved


def _check_shapes(path: Path, heads: nn.ModuleDict) -> None:
    """Refuse, before it is read, a file that holds other tensors than the heads: it may be of any size."""
    what = f"{path} does not hold the heads of this model"
    if not path.is_file():
        raise UserError(f"{what}: it does not exist, or is no file")
    try:
        found = tensor_shapes(path)
    except ValueError as error:
        raise UserError(f"{what}: {error}") from None
    wanted = {name: tuple(value.shape) for name, value in heads.state_dict().items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{what}: size mismatch at {name[:80]}, which is {found.get(name, 'not there')} and must be "
            f"{wanted.get(name, 'left out')}"
        )


@torch.no_grad()
def _check_same(model: Any, head: ExitHead) -> None:
    """Two made-up texts: the head found must say of the last layer's states what the model says."""
    last = len(encoder_layers(model))
    states = LayerStates(model, [last])
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 3, 3]], device=device) % getattr(model.config, "vocab_size", 10)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=device)
    with as_user_error(f"exits: {type(model).__name__} cannot be run with its config"):
        logits = model(input_ids=ids, attention_mask=mask).logits
    hidden = states.take().get(last)  # None where what looks like layers is not run as such
    states.remove()
    same = hidden is not None and torch.allclose(head(hidden, mask), logits, atol=1e-5, rtol=1e-4)
    model.train(was_training)
    if not same:
        raise UserError(f"exits: the head of {type(model).__name__} is of a form that this library does not know")
