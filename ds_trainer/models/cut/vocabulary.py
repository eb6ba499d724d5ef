"""Cut tokens out of a model and its tokenizer: rows of the embeddings and of the language-model head go with them.

The model's outputs for texts of the tokens that stay do not change.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_trainer.models.cut.tokens import Vocabulary
from ds_trainer.models.layers import build_like
from ds_trainer.models.pretrained import check_fits
from ds_trainer.ranks.failures import UserError

_FIELDS = re.compile(r".*_token_ids?|(begin_)?suppress_tokens|bad_words_ids")
"""The fields of configs that hold ids of tokens, alone or in lists."""
_PROBE = 8
"""How many tokens the check of the smaller model reads."""


def cut_vocabulary(model: Any, tokenizer: Any, wanted: Iterable[str], most: int | None = None) -> tuple[Any, Any]:
    """Return a model, on the CPU as the given one is, and a tokenizer with the wanted tokens and those that must stay.

    Special and added tokens must stay, those that the configs name, the characters that spell other words, and the
    tokens that a kept one is merged from. With `most`, so many stay in all: those that must, then the first of
    `wanted`. Tokens keep their order. Both models are in evaluation mode afterwards. UserError where nothing would go,
    or more than can.
    """
    check_fits(model, tokenizer, max_seq_length=1)
    vocabulary = Vocabulary(tokenizer)
    configs = (model.config, getattr(model, "generation_config", None))
    named = {id for config in configs if config is not None for id in _named(config)}
    kept = vocabulary.select(wanted, [token for token, id in vocabulary.ids.items() if id in named], most)
    return _cut_model(model, [vocabulary.ids[token] for token in kept]), vocabulary.tokenizer_of(kept)


def _cut_model(model: Any, ids: Sequence[int]) -> Any:
    """Return the model with the rows of these ids alone, whichever weights the size of the vocabulary decides about."""
    rows = range(model.get_input_embeddings().num_embeddings)
    renumbered = dict.fromkeys(rows) | {id: number for number, id in enumerate(ids)}
    config = _with_ids(model.config, renumbered)
    config.vocab_size = len(ids)
    smaller = build_like(model, config)
    kept, state = torch.tensor(ids), smaller.state_dict()
    smaller.load_state_dict(
        {name: kept_alone(weight, state[name].shape, kept) for name, weight in model.state_dict().items()}
    )
    if model.can_generate():
        smaller.generation_config = _with_ids(model.generation_config, renumbered)
    _check(model.eval(), smaller.eval(), kept)
    return smaller


def kept_alone(weight: Tensor, shape: torch.Size, kept: Tensor) -> Tensor:
    """Return the weight with the kept entries alone along each dimension that is smaller in `shape`."""
    for dimension, size in enumerate(shape):
        if weight.shape[dimension] != size:
            weight = weight.index_select(dimension, kept)
    return weight


@torch.no_grad()
def _check(model: Any, smaller: Any, kept: Tensor) -> None:
    """Refuse a model that depends on the ids of tokens otherwise than by the rows of its embeddings."""
    numbers = torch.arange(len(kept))[:: -(-len(kept) // _PROBE)]
    before, after = (
        probed(input_ids=ids[None], output_hidden_states=True).hidden_states[-1]
        for probed, ids in ((model, kept[numbers]), (smaller, numbers))
    )
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"a {type(model).__name__} computes something else once its tokens are renumbered: its vocabulary cannot "
            f"be cut, leave vocabulary out"
        )


def _with_ids(config: Any, renumbered: Mapping[int, int | None]) -> Any:
    """Return the config with the new ids. Ids of padding rows become None; ids beyond the embeddings stay."""
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if _FIELDS.fullmatch(name):
            setattr(config, name, _renumbered(value, renumbered))
    return config


def _renumbered(value: Any, renumbered: Mapping[int, int | None]) -> Any:
    if isinstance(value, list):
        return [new for entry in value if (new := _renumbered(entry, renumbered)) is not None]
    return renumbered.get(value, value)


def _named(config: Any) -> Iterator[int]:
    """Yield the ids of tokens that a config names."""
    pending = [value for name, value in vars(config).items() if _FIELDS.fullmatch(name)]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif value is not None:
            yield value
