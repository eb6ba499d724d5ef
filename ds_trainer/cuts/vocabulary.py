"""Cut tokens out of a model and its tokenizer: rows of the embeddings and of the language-model head go with them.

A text whose tokens all stay is tokenised as before, and the model's outputs for it do not change. WordPiece takes the
longest token at each place, and Unigram the tokens with the highest sum of scores: removing a token that was not chosen
changes neither's choice. BPE's does not change either, as long as each token stays together with all tokens that it is
merged from. A text that used a removed token is split into smaller ones. Kept are every character of ASCII, of Western
Europe and of each kept token; a word with another character becomes unknown, or bytes.
"""

import copy
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import as_user_error
from ds_trainer.models.layers import build_like
from ds_trainer.models.pretrained import check_fits
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import VocabularySpec
from ds_trainer.recipe.task_specs import TaskBase
from ds_trainer.tasks.lm.sequences import tokenised_documents
from ds_trainer.tasks.records import lines
from ds_trainer.tasks.registry import training_texts

_FIELDS = re.compile(r".*_token_ids?|(begin_)?suppress_tokens|bad_words_ids")
"""The fields of configs that hold ids of tokens, alone or in lists."""
_KINDS = ("WordPiece", "BPE", "Unigram")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PROBE = 8
"""How many tokens the check of the smaller model reads."""


def cut_vocabulary(model: Any, tokenizer: Any, wanted: Iterable[str], most: int | None = None) -> tuple[Any, Any]:
    """Return a model, on the CPU as the given one is, and a tokenizer with the wanted tokens and those that must stay.

    Special and added tokens must stay, those that the configs name, the characters that spell other words, and the
    tokens that a kept one is merged from. With `most`, that many stay in all: those that must, then the first of
    `wanted`. Tokens keep their order. Both models are in evaluation mode afterwards. UserError where nothing would go,
    or more than can.
    """
    check_fits(model, tokenizer, max_seq_length=1)
    vocabulary = Vocabulary(tokenizer)
    configs = (model.config, getattr(model, "generation_config", None))
    fields = [value for config in configs if config for name, value in vars(config).items() if _FIELDS.fullmatch(name)]
    named = {int(id) for id in re.findall(r"-?\d+", json.dumps(fields))}  # alone, or in lists of lists
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


class Vocabulary:
    """The tokens of a fast tokenizer: `ids` by token, those that must stay, and those that a token needs beside it.

    UserError for a tokenizer that is not fast, or is neither WordPiece nor BPE nor Unigram.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._state = json.loads(backend.to_str()) | {"truncation": None, "padding": None} if backend else {}
        if not backend or self._state["model"]["type"] not in _KINDS:
            raise UserError(
                f"the vocabulary of a {type(tokenizer).__name__} cannot be cut, only that of a fast one "
                f"(tokenizer.json) of the kinds {listed(_KINDS)}: leave vocabulary out"
            )
        self.tokenizer, self._model = tokenizer, self._state["model"]
        self.ids: dict[str, int] = tokenizer.get_vocab()
        self._prefix = self._model.get("continuing_subword_prefix") or ""
        self._suffix = self._model.get("end_of_word_suffix") or ""
        self._forms = defaultdict[str, set[str]](set)  # of a character: at the start of a word, inside, at its end
        for token in self.ids:
            if len(bare := self._bare(token)) == 1:
                self._forms[bare].add(token)
        self._merged_from = defaultdict[str, set[str]](set)
        for left, right in self._model.get("merges", ()):
            self._merged_from[self._merged(left, right)] |= {left, right}

    def select(self, wanted: Iterable[str], always: Iterable[str], most: int | None = None) -> list[str]:
        """Return the tokens that stay, in the order of their ids: those that must, those in `always`, the wanted ones.

        Of the wanted ones, and the tokens that they need, the first ones stay that fit into `most` tokens. UserError
        where all tokens would stay, or where more than `most` must.
        """
        kept = set[str]()
        for token in (*self._essential(), *always):
            kept |= self._with_parts(token, kept)
        if most is not None and most < len(kept):
            raise UserError(
                f"vocabulary.keep is {most:,}, and {len(kept):,} tokens must stay: the special ones, and those that "
                f"spell any text: raise it"
            )
        limit = len(self.ids) if most is None else most
        for token in wanted:
            more = self._with_parts(token, kept)
            if len(kept) + len(more) <= limit:
                kept |= more
        if len(kept) == len(self.ids):
            raise UserError(
                f"vocabulary: all {len(kept):,} tokens of the tokenizer would stay: set vocabulary.keep to a smaller "
                f"number, or leave vocabulary out"
            )
        return sorted(kept, key=self.ids.__getitem__)

    def tokenizer_of(self, kept: list[str]) -> Any:
        """Return the tokenizer with the selected tokens alone, numbered in their order."""
        ids = {token: number for number, token in enumerate(kept)}
        state = copy.deepcopy(self._state) | {"model": self._model_of(ids)}
        for token in state["added_tokens"]:
            token["id"] = ids[token["content"]]
        for name, numbers, place in _framing(state["post_processor"] or {}):
            numbers[place] = ids[name]
        with tempfile.TemporaryDirectory() as aside:
            folder = Path(aside)
            self.tokenizer.save_pretrained(folder)
            write_json(folder / "tokenizer.json", state)
            with as_user_error("the tokenizer cannot be loaded with fewer tokens"):
                tokenizer = type(self.tokenizer).from_pretrained(folder)
        # some classes take only the tokens from the file, and number the special ones themselves
        loaded = json.loads(tokenizer.backend_tokenizer.to_str())
        if tokenizer.get_vocab() != ids or any(loaded[part] != state[part] for part in ("model", "post_processor")):
            raise UserError(
                f"a {type(tokenizer).__name__} loads its tokens differently once they are renumbered: its vocabulary "
                f"cannot be cut, leave vocabulary out"
            )
        return tokenizer

    def _essential(self) -> set[str]:
        """The special and added tokens, those that frame a text, and those that spell any text."""
        tokenizer, model = self.tokenizer, self._model
        tokens = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())}
        tokens |= {token for token, _, _ in _framing(self._state["post_processor"] or {})}
        tokens |= {token for token in self.ids if _BYTE.fullmatch(token)}
        # the characters of ASCII and of Western Europe are also the names of the bytes in a byte-level BPE
        tokens = tokens.union(*(self._forms.get(character, ()) for character in pre_tokenizers.ByteLevel.alphabet()))
        if model["type"] == "Unigram":
            # the score of an unknown character is that of the worst token, less a constant
            tokens.add(min(model["vocab"], key=lambda entry: entry[1])[0])
            tokens |= {model["vocab"][model["unk_id"]][0]} if model["unk_id"] is not None else set()
        return (tokens | {model.get("unk_token")}) & self.ids.keys()

    def _with_parts(self, token: str, kept: set[str]) -> set[str]:
        """The token with all tokens that must stay where it does, except for those in `kept`."""
        more, pending = set[str](), [token]
        while pending:
            part = pending.pop()
            if part not in kept and part not in more:
                more.add(part)
                pending += self._merged_from.get(part, ())
                pending += [form for character in self._bare(part) for form in self._forms.get(character, ())]
        return more

    def _bare(self, token: str) -> str:
        return token.removeprefix(self._prefix).removesuffix(self._suffix)

    def _merged(self, left: str, right: str) -> str:
        return left + right.removeprefix(self._prefix)

    def _model_of(self, ids: Mapping[str, int]) -> dict[str, Any]:
        model = dict(self._model)
        if model["type"] == "Unigram":
            model["vocab"] = [[token, score] for token, score in model["vocab"] if token in ids]
            if model["unk_id"] is not None:
                model["unk_id"] = ids[self._model["vocab"][model["unk_id"]][0]]
            return model
        # in the order of their ids, as the library writes them
        model["vocab"] = {token: number for token, number in ids.items() if token in model["vocab"]}
        if model["type"] == "BPE":
            model["merges"] = [pair for pair in model["merges"] if {*pair, self._merged(*pair)} <= ids.keys()]
        return model


def _framing(processor: Any) -> Iterator[tuple[str, list[Any], int]]:
    """Yield each token that a post-processor puts around a text, the list that holds its id, and the id's place."""
    for part in processor.get("processors", ()):
        yield from _framing(part)
    for special in processor.get("special_tokens", {}).values():
        yield from ((token, special["ids"], place) for place, token in enumerate(special["tokens"]))
    yield from ((processor[name][0], processor[name], 1) for name in ("sep", "cls") if name in processor)


def cut_vocabulary_for(spec: VocabularySpec, task: TaskBase, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model and the tokenizer with the tokens that `spec` keeps; the texts of `task` are read on this rank.

    UserError for a file without tokens or with unknown ones, and wherever `cut_vocabulary` raises one.
    """
    if spec.file:
        return cut_vocabulary(model, tokenizer, _listed_tokens(spec.file, tokenizer))
    documents = chain.from_iterable(tokenised_documents(training_texts(task), tokenizer))
    counts_by_id = Counter(chain.from_iterable(documents))
    counts = Counter({tokenizer.convert_ids_to_tokens(id): count for id, count in counts_by_id.items()})
    ids = tokenizer.get_vocab()
    if isinstance(spec.keep, str):
        return cut_vocabulary(model, tokenizer, counts)
    # among equally frequent tokens, and those that never occur, the first ones of the tokenizer
    return cut_vocabulary(model, tokenizer, sorted(ids, key=lambda token: (-counts[token], ids[token])), spec.keep)


def _listed_tokens(path: Path, tokenizer: Any) -> list[str]:
    """Read the tokens of a file, one in each line, which is blank or one that the tokenizer has."""
    tokens = [token for line in lines(path) if (token := line.rstrip("\r\n"))]
    if not tokens:
        raise UserError(f'vocabulary.keep: {path} has no tokens: write one in each line, or keep "seen"')
    unknown = sorted(set(tokens) - tokenizer.get_vocab().keys())
    if unknown:
        raise UserError(
            f"vocabulary.keep: {path} lists {len(unknown):,} tokens that the tokenizer does not have, such as "
            f"{listed(unknown, 3)}: write them as the tokenizer does (##ing, Ġthe, ▁the)"
        )
    return tokens
