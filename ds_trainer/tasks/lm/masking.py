"""Masks of masked language modelling (arXiv 1810.04805) that choose rare tokens more often (arXiv 1910.01108).

Pure functions of numpy arrays. The mask of an example depends on the example, the draw and the settings alone, and
neither on the other examples of its batch nor on the batch's width: so ranks, batch sizes and resumed runs agree.
"""

from dataclasses import dataclass

import numpy as np

from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import Array


@dataclass(frozen=True)
class TokenMasking:
    """The rule by which tokens are chosen for prediction and replaced.

    `spec.mlm_mask_prop` is the share of an example's tokens to choose, with probabilities in proportion to `weights`
    (vocabulary,); a token of weight 0 is never chosen. A share `spec.word_mask` of the chosen tokens becomes the mask
    token, a share `spec.word_rand` becomes a random one of the ids in `ordinary`, and the rest stays.
    """

    spec: LmSpec
    weights: Array
    ordinary: Array
    mask_token_id: int


def token_weights(counts: Array, smoothing: float, special: Array) -> Array:
    """Return count ** -smoothing for each token id, and 0 for the ids in `special`.

    A token that never occurs is treated as if it occurred once.
    """
    weights = np.maximum(counts, 1).astype(np.float64) ** -smoothing
    weights[special] = 0
    return weights


def mask_tokens(masking: TokenMasking, tokens: Array, attended: Array, ids: Array, draw: int) -> tuple[Array, Array]:
    """Return the tokens with some of them replaced, and where the model must predict the original; both (rows, width).

    `attended` is 1 where there is a token; padding is on the right. Of a row's n tokens with a weight above 0,
    max(1, round(mlm_mask_prop * n)) are chosen. The random numbers are a function of `ids` (rows,) and `draw`.
    """
    spec, noise = masking.spec, _noise(ids, draw, attended.sum(axis=1), tokens.shape[1])
    chosen = choose(np.where(attended, masking.weights[tokens], 0), spec.mlm_mask_prop, noise[0])
    becomes_mask = chosen & (noise[1] < spec.word_mask)
    becomes_random = chosen & ~becomes_mask & (noise[1] < spec.word_mask + spec.word_rand)
    random_tokens = masking.ordinary[(noise[2] * len(masking.ordinary)).astype(np.int64)]
    seen = np.where(becomes_random, random_tokens, tokens)
    return np.where(becomes_mask, masking.mask_token_id, seen), chosen


def choose(weights: Array, share: float, uniform: Array) -> Array:
    """Draw max(1, round(share * n)) of each row's n positions with a weight above 0; bool (rows, width).

    Positions are drawn one after another without replacement, each with a probability in proportion to its weight
    among the remaining ones. `uniform` in [0, 1) has the shape of the weights.
    """
    possible = weights > 0
    wanted = chosen_count(possible.sum(axis=1), share)
    # exponential arrival times with the weights as rates are ordered like such draws (Efraimidis and Spirakis, 2006)
    arrivals = np.full(weights.shape, np.inf)
    np.divide(-np.log1p(-uniform), weights, out=arrivals, where=possible)
    order = np.argsort(arrivals, axis=1, kind="stable")
    chosen = np.zeros(weights.shape, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(weights.shape[1]) < wanted[:, None], axis=1)
    return chosen


def chosen_count(possible: Array, share: float) -> Array:
    """Return max(1, round(share * n)), at most n, for each n in `possible`; int64."""
    return np.minimum(possible, np.maximum(1, np.rint(share * possible))).astype(np.int64)


def _noise(ids: Array, draw: int, lengths: Array, width: int) -> Array:
    """Return (3, rows, width) numbers, uniform in [0, 1); each row's generator depends on its id and the draw alone.

    A row's numbers are drawn for its `lengths` tokens, so that padding does not change them.
    """
    noise = np.zeros((3, len(ids), width))
    for row, (id, length) in enumerate(zip(ids.tolist(), lengths.tolist(), strict=True)):
        key = np.array([id, draw % 2**64], dtype=np.uint64)
        noise[:, row, :length] = np.random.Generator(np.random.Philox(key=key)).random((3, length))
    return noise
