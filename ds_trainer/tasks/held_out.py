"""The split "held_out": a share of the training examples that the split "train" lacks, so that no phase trains on them.

With `score_held_out` it is the split to evaluate on, and the evaluation set is not read.
"""

from typing import Any, TypeVar

import numpy as np

from ds_trainer.ranks.failures import UserError

HELD_OUT = "held_out"
T = TypeVar("T")


def source_split(spec: Any, split: str) -> str:
    """Return the split of the data source from which this split's rows are taken."""
    if split == HELD_OUT and not getattr(spec, "held_out", 0):
        raise UserError("no training examples are held out: set task.held_out to their share, such as 0.02")
    return "train" if split == HELD_OUT else split


def part_of(spec: Any, split: str, rows: list[T], origin: str) -> list[T]:
    """Return the rows of "train" or of "held_out", given all training rows; those of other splits unchanged.

    `origin` says in an error where the rows come from.
    """
    share, count = getattr(spec, "held_out", 0), len(rows)
    if not share or source_split(spec, split) != "train":
        return rows
    held_out, rest = held_out_and_rest(count, share)
    if not held_out or not rest:
        use, way_out = ("held out", f"to {1 / count:.2g} or more") if rest else ("used for training", "lower")
        raise UserError(
            f"task.held_out is {share:g}, and of the {count:,} examples of {origin} none would be {use}: "
            f"set task.held_out {way_out}, or to 0 to hold none out"
        )
    return [rows[index] for index in (held_out if split == HELD_OUT else rest)]


def held_out_and_rest(count: int, share: float) -> tuple[list[int], list[int]]:
    """Split `count` indices into two ascending lists: round(share * count) of them, and all others.

    The first list is drawn at random, but always the same: evenly spaced indices would all be of one class in a file
    whose classes alternate.
    """
    order = np.random.default_rng(0).permutation(count)
    cut = round(share * count)
    return sorted(order[:cut].tolist()), sorted(order[cut:].tolist())
