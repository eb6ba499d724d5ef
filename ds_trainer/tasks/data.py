"""Tokenised examples: cached once, memory-mapped, and dealt out to steps and ranks by length.

The content of a batch is a pure function of the optimizer step, so that a run can resume from the number of its step
alone. Files are read in `records.py`; the families of tasks tokenise and collate.

The split "held_out" is a share of the training examples that the split "train" lacks, so that no phase trains on them.
With `score_held_out` it is the split to evaluate on, and the evaluation set is not read.
"""

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_trainer.files.writing import folder_aside
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import TaskBase

CACHE_VERSION = 4
"""Part of every fingerprint: raise it when the tokenised data of the same sources would come out differently."""

HELD_OUT = "held_out"
_INDEX = "index.json"
T = TypeVar("T")
Array = NDArray[Any]
ExampleIds = NDArray[np.int64]
"""Indices of examples in their split."""
COLUMN = "column"
"""The column of tokens that tells the sequences of an example apart: their number in it, from 0."""
Chunk = Mapping[str, Any]
"""Examples by columns: of tokens, whose lists have the same length for all columns of an example, and of fields."""


@dataclass(frozen=True)
class Examples:
    """A tokenised split of n examples.

    Each array of `tokens` holds one column of all examples, concatenated; example i is the slice from `offsets[i]` to
    `offsets[i + 1]`, int64. Each array of `fields` has one entry for each example (labels, for instance). `notes` are
    any JSON values.
    """

    offsets: Array
    tokens: Mapping[str, Array]
    fields: Mapping[str, Array] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> Array:
        """(n,) tokens of each example."""
        return np.diff(self.offsets)

    @cached_property
    def sequences(self) -> "Sequences":
        """The sequences of all examples, where the tokens have a `COLUMN`."""
        column, offsets = np.asarray(self.tokens[COLUMN]), np.asarray(self.offsets)
        starts = np.union1d(offsets[:-1], np.flatnonzero(np.diff(column)) + 1)
        tokens = {name: values for name, values in self.tokens.items() if name != COLUMN}
        rows = Examples(np.append(starts, offsets[-1]), tokens)
        return Sequences(rows, np.searchsorted(starts, offsets), column[starts])

    def batch_rows(self, ids: ExampleIds) -> tuple["Examples", ExampleIds]:
        """Return what the rows of a batch of these examples are, in order: their sequences, or the examples."""
        return (self.sequences.rows, self.sequences.of_examples(ids)) if COLUMN in self.tokens else (self, ids)

    def row(self, index: int) -> dict[str, Array]:
        """Return the token columns of one example, without copying."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return {name: flat[start:end] for name, flat in self.tokens.items()}

    def padded(self, ids: Sequence[int] | ExampleIds, fill: Mapping[str, int], multiple: int = 1) -> dict[str, Array]:
        """Lay examples side by side, padded on the right to the longest one, rounded up to a multiple.

        Returns the token columns and "attention_mask" (1 where there is a token), each (rows, width) int64. `fill` has
        the padding of each column, by default 0.
        """
        chosen = np.asarray(ids, dtype=np.int64)
        starts = self.offsets[chosen]
        lengths = self.offsets[chosen + 1] - starts
        width = -(-int(lengths.max()) // multiple) * multiple
        columns = np.arange(width)
        mask = columns < lengths[:, None]
        index = np.where(mask, starts[:, None] + columns, 0)
        padded = {
            name: np.where(mask, flat[index], fill.get(name, 0)).astype(np.int64) for name, flat in self.tokens.items()
        }
        return padded | {"attention_mask": mask.astype(np.int64)}


@dataclass(frozen=True)
class Sequences:
    """Examples that have several sequences each: those of example i are the `rows` from `first[i]` to `first[i + 1]`.

    `column` is the number of each sequence in its example.
    """

    rows: Examples
    first: Array
    column: Array

    def of_examples(self, ids: ExampleIds) -> ExampleIds:
        """Return the rows of some examples, in their order."""
        return np.concatenate([np.arange(self.first[id], self.first[id + 1]) for id in ids])


def joined(encoded: Chunk, counts: Iterable[int]) -> dict[str, Any]:
    """Return examples of sequences, as many as `counts` has for each: the token columns joined, and `COLUMN`."""
    columns: dict[str, Any] = {name: [] for name in (*encoded, COLUMN)}
    start = 0
    for count in counts:
        places = range(start, start := start + count)
        for name, values in encoded.items():
            columns[name].append([token for place in places for token in values[place]])
        lengths = [len(encoded["input_ids"][place]) for place in places]
        columns[COLUMN].append(list(chain.from_iterable(map(repeat, range(count), lengths))))
    return columns


def pack(chunks: Iterable[Chunk], dtypes: Mapping[str, Any]) -> Examples:
    """Concatenate examples that come in chunks of columns; `dtypes` names the columns of tokens, all others are fields.

    The values of a chunk are lists of lists of tokens, or for a field an array with an entry for each example.
    """
    flat: dict[str, list[Array]] = {name: [np.empty(0, dtype)] for name, dtype in dtypes.items()}
    fields: dict[str, list[Array]] = {}
    lengths: list[int] = [0]
    for chunk in chunks:
        lengths += map(len, chunk[next(iter(dtypes))])
        for name, values in chunk.items():
            if name in dtypes:
                flat[name].append(np.fromiter(chain.from_iterable(values), dtypes[name]))
            else:
                fields.setdefault(name, []).append(values)
    tokens, by_example = ({name: np.concatenate(parts) for name, parts in each.items()} for each in (flat, fields))
    return Examples(np.cumsum(lengths, dtype=np.int64), tokens, by_example)


def spread(count: int, limit: int | None) -> Sequence[int]:
    """Choose at most `limit` of `count` indices, evenly spaced; without a limit all of them.

    The first examples of a file may all have one label, or come from a few articles.
    """
    if limit is None or limit >= count:
        return range(count)
    return [index * count // limit for index in range(limit)]


def fingerprint(*parts: Any) -> str:
    """Hash JSON values and `CACHE_VERSION`, for the name of a folder."""
    return hash_of([CACHE_VERSION, *parts])


def hash_of(value: Any) -> str:
    """Hash a JSON value, whatever the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def cached(cache_dir: Path, key: str, build: Callable[[], Examples]) -> Examples:
    """Return the examples in `cache_dir/key`, memory-mapped; rank 0 builds them if the folder is missing or damaged.

    Every rank must call this function with the same key. If a host does not see rank 0's folder, its first local rank
    builds the examples, too. If any `build` raises a ValueError, every rank raises it.
    """
    folder = cache_dir.expanduser() / key
    distributed.on_each_host(lambda: _ensure(folder, build))
    examples = _open(folder)
    assert examples is not None, f"{folder} was whole a moment ago"
    return examples


def _ensure(folder: Path, build: Callable[[], Examples]) -> None:
    if _open(folder) is not None:
        return
    examples = build()
    arrays = {"offsets": examples.offsets}
    arrays |= {f"tokens.{name}": flat for name, flat in examples.tokens.items()}
    arrays |= {f"fields.{name}": values for name, values in examples.fields.items()}

    def write(aside: Path) -> None:
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array, allow_pickle=False)
        write_index(aside, arrays, examples.notes)

    save_aside(folder, write)


def _open(folder: Path) -> Examples | None:
    arrays, notes = open_arrays(folder) or ({}, {})
    if "offsets" not in arrays:
        return None
    tokens, fields = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in ("tokens.", "fields.")
    )
    return Examples(arrays["offsets"], tokens, fields, notes)


def save_aside(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` put arrays and their index into a temporary folder, and rename that to `folder` once it is whole.

    A damaged folder is removed first, and not just before the renaming: another run that is replacing the same folder
    is then still writing, and does not lose its result.
    """
    if open_arrays(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with folder_aside(folder) as aside:
            write(aside)
    except OSError as error:
        if open_arrays(folder) is None:  # otherwise another run was faster, and wrote the same
            raise UserError(f"cache_dir {folder.parent} cannot be written: {error}") from error


def write_index(folder: Path, arrays: Mapping[str, Array], notes: Mapping[str, Any]) -> None:
    """Write the names and checksums of a folder's arrays, each of which is stored as NAME.npy."""
    index = {"checksums": {name: _checksum(array) for name, array in arrays.items()}, "notes": dict(notes)}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def open_arrays(folder: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Return the memory-mapped arrays of a folder and its notes; None where it is missing or damaged."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        # np.asarray: indexing a np.memmap costs several times more than indexing a plain array
        arrays = {
            name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            for name in index["checksums"]
        }
        whole = all(_checksum(array) == index["checksums"][name] for name, array in arrays.items())
        return (arrays, index["notes"]) if whole else None
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None


def _checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"")


class BatchPlan:
    """Choose the examples of each optimizer step's global batch: a pure function of the step.

    Every epoch shuffles the n examples anew. The epochs follow one another in one stream, which is cut into batches of
    `batch_size`: no batch is partial, and a batch may begin in one epoch and end in the next.

    The batches that lie inside one epoch are grouped by length. Consecutive batches form a window; the examples of a
    window are sorted by length and cut into batches again, which are visited in random order. A window has at most
    `WINDOW` batches and at most a quarter of the data (but at least one batch), so that an example still meets others
    in every epoch.
    """

    WINDOW = 50

    def __init__(self, lengths: Array, batch_size: int, seed: int) -> None:
        assert len(lengths) > 0
        assert batch_size > 0
        self._lengths, self.batch_size, self._seed = np.asarray(lengths), batch_size, seed
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)
        self._window = lru_cache(maxsize=2)(self._make_window)

    def indices(self, step: int) -> ExampleIds:
        """Return the (batch_size,) example ids of a step; steps count from 0."""
        n, size = len(self._lengths), self.batch_size
        epoch = step * size // n
        if ((step + 1) * size - 1) // n != epoch:
            return self._stream(step * size, (step + 1) * size)
        # the steps whose batches lie wholly in this epoch, cut into windows of nearly equal length
        first, last = -(-epoch * n // size), (epoch + 1) * n // size
        windows = -(-(last - first) // max(1, min(self.WINDOW, n // (4 * size))))
        # inverts the even cut below: the window that holds this step
        window = ((step - first + 1) * windows - 1) // (last - first)
        start, end = (first + (last - first) * i // windows for i in (window, window + 1))
        return self._window(start, end)[step - start]

    def between(self, start: int, end: int) -> ExampleIds:
        """Return the ids of the examples number `start` to `end` in the order in which training visits them.

        The batch of a step begins at number step * batch_size. A run that is resumed with another batch size visits the
        same examples in the same order.
        """
        first, last = start // self.batch_size, -(-end // self.batch_size)
        visited = np.concatenate([self.indices(step) for step in range(first, last)])
        return visited[start - first * self.batch_size : end - first * self.batch_size]

    def _stream(self, start: int, end: int) -> ExampleIds:
        n = len(self._lengths)
        epochs = range(start // n, (end - 1) // n + 1)
        parts = [self._permutation(e)[max(0, start - e * n) : min(n, end - e * n)] for e in epochs]
        return np.concatenate(parts)

    def _make_permutation(self, epoch: int) -> ExampleIds:
        return np.random.default_rng((self._seed, 0, epoch)).permutation(len(self._lengths))

    def _make_window(self, start: int, end: int) -> ExampleIds:
        """Return the batches of a window of steps in the order of the steps, (end - start, batch_size)."""
        chosen = self._stream(start * self.batch_size, end * self.batch_size)
        by_length = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        order = np.random.default_rng((self._seed, 1, start)).permutation(end - start)
        return by_length.reshape(end - start, self.batch_size)[order]


def steps_for(epochs: float, examples: int, batch_size: int, seen: int = 0) -> int:
    """Return how many optimizer steps `epochs` epochs take, rounded up, after `seen` examples have been visited."""
    return math.ceil(round((epochs * examples - seen) / batch_size, 9))


def shard(ids: ExampleIds, lengths: Array, rank: int, world: int, accumulation: int) -> ExampleIds:
    """Return one rank's part of a global batch, cut into micro-batches: (accumulation, examples a micro-batch).

    The examples are sorted by length. All ranks take micro-batch m from the same stretch of lengths, each rank every
    world-th example of it, so that they have equal work and little padding. The longest examples come first: a batch
    that does not fit into memory fails at once.
    """
    assert len(ids) % (world * accumulation) == 0, f"{len(ids)} over {world} x {accumulation}"
    longest_first = ids[np.argsort(-lengths[ids], kind="stable")]
    return longest_first.reshape(accumulation, -1, world)[:, :, rank]


def evaluation_shard(lengths: Array, rank: int, world: int, batch_size: int) -> list[ExampleIds]:
    """Return one rank's batches of a split, the longest examples first; all ranks have equally many, of equal sizes.

    If the number of examples is not a multiple of the ranks, the last example is repeated; its answers have one id.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    order = np.concatenate([order, np.repeat(order[-1:], -len(order) % world)])
    size = world * batch_size
    return [order[start : start + size][rank::world] for start in range(0, len(order), size)]


def source_split(spec: TaskBase, split: str) -> str:
    """Return the split of the data source from which this split's rows are taken."""
    if split == HELD_OUT and not spec.held_out_share:
        raise UserError("no training examples are held out: set task.held_out to their share, such as 0.02")
    return "train" if split == HELD_OUT else split


def part_of(spec: TaskBase, split: str, rows: list[T], origin: str) -> list[T]:
    """Return the rows of "train" or of "held_out", given all training rows; those of other splits unchanged.

    The held-out ones are always the same, and both parts keep the order. `origin` says where the rows come from.
    """
    share, count = spec.held_out_share, len(rows)
    if not share or source_split(spec, split) != "train":
        return rows
    # drawn at random: evenly spaced rows would all be of one class in a file whose classes alternate
    order, size = np.random.default_rng(0).permutation(count), round(share * count)
    if not 0 < size < count:
        use, way_out = ("used for training", "lower") if size else ("held out", f"to {1 / count:.2g} or more")
        raise UserError(
            f"task.held_out is {share:g}, and of the {count:,} examples of {origin} none would be {use}: "
            f"set task.held_out {way_out}, or to 0 to hold none out"
        )
    chosen = order[:size] if split == HELD_OUT else order[size:]
    return [rows[index] for index in np.sort(chosen).tolist()]
