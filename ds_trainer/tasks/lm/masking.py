"""Masks of masked language modelling (arXiv 1810.04805), rare tokens chosen more often (arXiv 1910.01108).

Pure functions of numpy arrays. A mask depends on the example, the draw and the rule alone: neither on the other rows of
a batch nor on its width, so that ranks, batch sizes and resumed runs agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LEAST_WEIGHT = 1e-300
"""The times in `choose` are up to 37 over a weight, and infinite for what is never chosen alone."""


@dataclass(frozen=True)
class MaskRule:
    """Which tokens are chosen, and what becomes of them.

    `weights` (vocabulary,) is 0 for a token that is never chosen; `ordinary` are the ids that a random token is drawn
    from. Of the chosen tokens a share of `word_mask` becomes the mask token, `word_rand` a random one, the rest stays.
    """

    weights: Array
    ordinary: Array
    mask_token_id: int
    mask_prop: float
    word_mask: float
    word_rand: float


def token_weights(counts: Array, smoothing: float, special: Array) -> Array:
    """count ** -smoothing by token id, 0 for the ids in `special`. A token that was never seen counts as seen once.

    No other weight is 0, however large the smoothing.
    """
    weights = np.maximum(np.maximum(counts, 1).astype(np.float64) ** -smoothing, _LEAST_WEIGHT)
    weights[special] = 0
    return weights


def mask_tokens(rule: MaskRule, tokens: Array, attended: Array, ids: Array, draw: int) -> tuple[Array, Array]:
    """The tokens as the model is to see them, and which are to be predicted; both (rows, width).

    `attended` is 1 where there is a token, on the left of each row. Of a row's tokens of weight above 0,
    max(1, round(mask_prop * n)) are chosen. `ids` (rows,) and `draw` decide what is random.
    """
    noise = _noise(ids, draw, attended.sum(axis=1), tokens.shape[1])
    chosen = choose(np.where(attended, rule.weights[tokens], 0), rule.mask_prop, noise[0])
    becomes_mask = chosen & (noise[1] < rule.word_mask)
    becomes_random = chosen & ~becomes_mask & (noise[1] < rule.word_mask + rule.word_rand)
    random_tokens = rule.ordinary[(noise[2] * len(rule.ordinary)).astype(np.int64)]
    seen = np.where(becomes_random, random_tokens, tokens)
    return np.where(becomes_mask, rule.mask_token_id, seen), chosen


def choose(weights: Array, share: float, uniform: Array) -> Array:
    """Draw max(1, round(share * n)) of each row's n places of weight above 0, without replacement; bool (rows, width).

    The next place is always drawn with a chance in proportion to its weight among those left: the smallest of
    exponential variables of those rates come first. `uniform` in [0, 1), as the weights.
    """
    possible = weights > 0
    wanted = chosen_count(possible.sum(axis=1), share)
    arrivals = np.full(weights.shape, np.inf)
    np.divide(-np.log1p(-uniform), weights, out=arrivals, where=possible)
    order = np.argsort(arrivals, axis=1, kind="stable")
    chosen = np.zeros(weights.shape, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(weights.shape[1]) < wanted[:, None], axis=1)
    return chosen


def chosen_count(possible: Array, share: float) -> Array:
    """max(1, round(share * n)) of n places, at most n; of the shape of `possible`, int64."""
    return np.minimum(possible, np.maximum(1, np.rint(share * possible))).astype(np.int64)


def _noise(ids: Array, draw: int, lengths: Array, width: int) -> Array:
    """(3, rows, width) uniform in [0, 1), each row from a generator of its own that knows no width."""
    noise = np.zeros((3, len(ids), width))
    for row, (id, length) in enumerate(zip(ids.tolist(), lengths.tolist(), strict=True)):
        key = np.array([id, draw % 2**64], dtype=np.uint64)
        noise[:, row, :length] = np.random.Generator(np.random.Philox(key=key)).random((3, length))
    return noise
