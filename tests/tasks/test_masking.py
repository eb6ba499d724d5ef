"""The law of masks: how many, which, what becomes of them, and what they depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import Array
from ds_trainer.tasks.lm.masking import TokenMasking, choose, mask_tokens, token_weights

MASK, VOCABULARY, SPECIAL = 2, 50, np.array([0, 1, 2])


def rule_of(counts: Array | None = None, smoothing: float = 0.0, **fields: Any) -> TokenMasking:
    counts = np.ones(VOCABULARY, np.int64) if counts is None else counts
    shares = {"word_mask": 0.8, "word_rand": 0.1} | fields
    spec = LmSpec(name="mlm", word_keep=max(0.0, 1 - shares["word_mask"] - shares["word_rand"]), **shares)
    ordinary = np.setdiff1d(np.arange(VOCABULARY), SPECIAL)
    return TokenMasking(spec, token_weights(counts, smoothing, SPECIAL), ordinary, MASK)


def rows_of(rows: int, width: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Rows of ordinary tokens within special ones at both ends."""
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, (rows, width))
    tokens[:, 0], tokens[:, -1] = 0, 1
    return tokens, np.ones_like(tokens), np.arange(rows)


def within(count: int, trials: int, chance: float) -> bool:
    """Whether a binomial count is within five standard deviations."""
    return abs(count - trials * chance) <= 5 * math.sqrt(trials * chance * (1 - chance))


@pytest.mark.parametrize(("width", "share", "chosen"), [(102, 0.15, 15), (22, 0.15, 3), (5, 0.15, 1), (12, 1.0, 10)])
def test_exactly_the_share_of_each_row_is_chosen(width: int, share: float, chosen: int) -> None:
    """The number is not random: max(1, round(share * n)) of n tokens that are not special."""
    _, found = mask_tokens(rule_of(mlm_mask_prop=share), *rows_of(20, width), draw=1)
    assert found.sum(axis=1).tolist() == [chosen] * 20
    assert not found[:, [0, -1]].any()


def test_chosen_tokens_are_masked_kept_and_replaced_in_their_shares() -> None:
    """80, 10 and 10% of 30,000 choices; random tokens are ordinary and all turn up; the rest is as it was."""
    tokens, attended, ids = rows_of(2000, 102)
    seen, chosen = mask_tokens(rule_of(), tokens, attended, ids, 3)
    assert (seen == tokens)[~chosen].all()
    trials = int(chosen.sum())
    assert trials == 30_000
    masked = chosen & (seen == MASK)
    changed = chosen & (seen != tokens) & ~masked
    assert within(int(masked.sum()), trials, 0.8)
    assert within(int(changed.sum()), trials, 0.1 * (1 - 1 / 47))  # one in 47 random tokens is the token itself
    assert set(seen[changed].tolist()) == set(range(3, VOCABULARY)), "no special ones"


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
def test_rare_tokens_are_chosen_by_the_law(smoothing: float) -> None:
    """One of four tokens of counts 1 to 1,000 is drawn in proportion to count ** -smoothing; unseen counts as once."""
    counts = np.zeros(VOCABULARY, np.int64)
    counts[3:7] = [0, 10, 100, 1000]
    rows = 20_000
    tokens = np.tile([0, 3, 4, 5, 6, 1], (rows, 1))
    _, chosen = mask_tokens(rule_of(counts, smoothing), tokens, np.ones_like(tokens), np.arange(rows), 0)
    weights = np.array([1.0, 10.0, 100.0, 1000.0]) ** -smoothing
    for found, chance in zip(chosen.sum(axis=0)[1:5], weights / weights.sum(), strict=True):
        assert within(int(found), rows, chance)


def test_two_are_drawn_one_after_the_other() -> None:
    """Without replacement: a pair's chance is that of either order, each draw in proportion to what is left."""
    weights, rows = np.array([1.0, 2.0, 5.0]), 20_000
    uniform = np.random.default_rng(0).random((rows, 3))
    chosen = choose(np.tile(weights, (rows, 1)), 2 / 3, uniform)
    shares = weights / 8
    pairs = {(0, 1): 0.0, (0, 2): 0.0, (1, 2): 0.0}
    for a, b in pairs:
        chance = shares[a] * shares[b] / (1 - shares[a]) + shares[b] * shares[a] / (1 - shares[b])
        assert within(int((chosen[:, a] & chosen[:, b]).sum()), rows, chance)
    assert (chosen.sum(axis=1) == 2).all()


def test_a_mask_does_not_depend_on_the_batch() -> None:
    """An example is masked the same alone, in another order, and padded to any width."""
    tokens, attended, ids = rows_of(6, 40)
    tokens[3, 20:], attended[3, 20:] = 0, 0
    seen, _ = mask_tokens(rule_of(), tokens, attended, ids, 7)
    order = np.array([5, 3, 0])
    assert (mask_tokens(rule_of(), tokens[order], attended[order], ids[order], 7)[0] == seen[order]).all()
    alone, _ = mask_tokens(rule_of(), tokens[3:4, :20], attended[3:4, :20], ids[3:4], 7)
    assert (alone == seen[3:4, :20]).all()


def test_each_draw_and_each_example_has_a_mask_of_its_own() -> None:
    """The same draw gives the same masks; the next gives others; equal texts are masked differently."""
    tokens, attended, ids = rows_of(50, 40)
    tokens[:] = tokens[0]
    drawn = [mask_tokens(rule_of(), tokens, attended, ids, draw)[1] for draw in (0, 0, 1, 2**64 - 1, -3)]
    assert (drawn[0] == drawn[1]).all()
    for first, second in ((0, 2), (2, 3), (3, 4)):
        assert (drawn[first] != drawn[second]).any(axis=1).mean() > 0.9
    assert len({row.tobytes() for row in drawn[0]}) > 45
