"""Put documents together into rows of full length: best-fit packing (arXiv 2404.10830), which splits none that fits.

A row's `position_ids` begin at 0 with each document, by which a model keeps the documents of a row apart.
"""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from ds_trainer.tasks.data import Array, Examples

_SEED = 0


def packed(documents: Examples, room: int) -> Examples:
    """Return rows of at most `room` tokens, each made of whole documents.

    Beside the columns of the documents they have `position_ids`, and `labelled`, which is 0 at each document's first
    token, as none of its tokens precedes that one. Without such a column all others are labelled.
    """
    rows = best_fit(documents.lengths, room)
    order = np.concatenate(rows)
    lengths, starts = documents.lengths[order], np.cumsum(documents.lengths[order])
    positions = np.arange(starts[-1]) - np.repeat(starts - lengths, lengths)
    index = np.repeat(documents.offsets[order], lengths) + positions
    tokens = {name: flat[index] for name, flat in documents.tokens.items()}
    labelled = tokens.get("labelled", np.uint8(1)) * (positions > 0)
    tokens |= {"position_ids": positions.astype(np.int32), "labelled": labelled.astype(np.uint8)}
    return Examples(np.concatenate([[0], starts[np.cumsum([len(row) for row in rows]) - 1]]), tokens)


def best_fit(lengths: Array, room: int) -> list[list[int]]:
    """Deal out lengths of at most `room`, from the longest to the shortest, each to the row that it fills best.

    Which of the equally long ones are in a row is left to chance, so that a row does not follow the order of the files.
    """
    shuffled = np.random.default_rng(_SEED).permutation(len(lengths))
    rows: list[list[int]] = []
    with_space = defaultdict[int, list[int]](list)
    spaces: list[int] = []  # the keys of `with_space` that have rows, in rising order
    for index in shuffled[np.argsort(-lengths[shuffled], kind="stable")].tolist():
        length = int(lengths[index])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space, row = room, len(rows)
            rows.append([])
        else:
            space = spaces[place]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        rows[row].append(index)
        if space > length:
            if not with_space[space - length]:
                insort(spaces, space - length)
            with_space[space - length].append(row)
    return rows
