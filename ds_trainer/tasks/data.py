"""Tokenised examples: cached once, memory-mapped, and dealt out to steps and ranks by length.

What makes up a batch is a pure function of the optimizer step: a run resumes at its step, and nothing else
needs saving. Does not read files (`tabular.py`, `readers.py`), tokenise or collate (`tasks/`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

CACHE_VERSION = 4
"""Part of every fingerprint: raise it when tokenised data of the same sources would come out otherwise."""

_INDEX = "index.json"
Array = NDArray[Any]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """A tokenised split.

    Rows are ragged in `tokens`, flat arrays that `offsets` (n + 1,) int64 cuts. `fields` hold one value, or
    one row of a fixed shape, for each example (labels, say). `notes` are any JSON values.
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

    def row(self, position: int) -> dict[str, Array]:
        """The token columns of one example, without copying."""
        start, end = self.offsets[position], self.offsets[position + 1]
        return {name: flat[start:end] for name, flat in self.tokens.items()}

    def padded(self, positions: Sequence[int] | Positions, fill: Mapping[str, int], multiple: int = 1) -> PaddedRows:
        """Rows side by side, padded on the right to the longest, rounded up to a multiple; int64."""
        chosen = np.asarray(positions, dtype=np.int64)
        starts = self.offsets[chosen]
        lengths = self.offsets[chosen + 1] - starts
        width = -(-int(lengths.max()) // multiple) * multiple
        places = np.arange(width)
        mask = places < lengths[:, None]
        index = np.where(mask, starts[:, None] + places, 0)
        columns = {
            name: np.where(mask, flat[index], fill.get(name, 0)).astype(np.int64) for name, flat in self.tokens.items()
        }
        return PaddedRows(columns, mask.astype(np.int64))


@dataclass(frozen=True)
class PaddedRows:
    """`columns` and `mask` (1 where there is a token), each (rows, width) int64."""

    columns: dict[str, Array]
    mask: Array


def pack(
    chunks: Iterable[Mapping[str, Sequence[Sequence[int]]]],
    dtypes: Mapping[str, Any],
    fields: Mapping[str, Array],
    notes: Mapping[str, Any] | None = None,
) -> Examples:
    """Flatten ragged columns that come in chunks of rows; a row is equally long in all its columns."""
    flat: dict[str, list[Array]] = {name: [] for name in dtypes}
    lengths: list[int] = [0]
    for chunk in chunks:
        rows = chunk[next(iter(dtypes))]
        lengths += map(len, rows)
        for name, parts in flat.items():
            parts.append(np.fromiter(chain.from_iterable(chunk[name]), dtypes[name]))
    tokens = {name: np.concatenate(parts) for name, parts in flat.items()}
    return Examples(np.cumsum(lengths, dtype=np.int64), tokens, fields, notes or {})


def spread(count: int, limit: int | None) -> Sequence[int]:
    """Positions of at most `limit` of `count` examples, evenly spaced; of all where there is no limit.

    The first ones of a file would be of one class where it is sorted by label, or of a few articles.
    """
    if limit is None or limit >= count:
        return range(count)
    return [index * count // limit for index in range(limit)]


def fingerprint(*parts: Any) -> str:
    """Hash of JSON values and `CACHE_VERSION`, as a folder name."""
    text = json.dumps([CACHE_VERSION, *parts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached(cache_dir: Path, key: str, build: Callable[[], Examples]) -> Examples:
    """The examples under `cache_dir/key`, memory-mapped; built by rank 0 where there are none.

    Every rank must call it with the same key. On a host that does not see rank 0's folder, its first local
    rank builds too. What is broken on disk (sizes and checksums tell) is built anew. If any `build`
    raises a ValueError, every rank raises it.
    """
    folder = cache_dir.expanduser() / key
    distributed.on_each_host(lambda: _ensure(folder, build))
    found = _open(folder)
    assert found is not None, f"{folder} was whole a moment ago"
    return found


def _ensure(folder: Path, build: Callable[[], Examples]) -> None:
    if _open(folder) is None:
        _save(build(), folder)


def _save(examples: Examples, folder: Path) -> None:
    arrays = {"offsets": examples.offsets}
    arrays |= {f"tokens.{name}": flat for name, flat in examples.tokens.items()}
    arrays |= {f"fields.{name}": values for name, values in examples.fields.items()}

    def write(aside: Path) -> None:
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array, allow_pickle=False)
        write_index(aside, arrays, examples.notes)

    save_aside(folder, write)


def save_aside(folder: Path, write: Callable[[Path], None]) -> None:
    """Have arrays and their index written into a folder beside, then rename it: under its name it is always whole."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            write(aside)
            _make_current(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cache_dir {folder.parent} cannot be written: {error}") from error


def write_index(folder: Path, arrays: Mapping[str, Array], notes: Mapping[str, Any]) -> None:
    """Say which arrays the folder holds, each in NAME.npy, with their checksums."""
    index = {"checksums": {name: _checksum(array) for name, array in arrays.items()}, "notes": dict(notes)}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _make_current(aside: Path, folder: Path) -> None:
    """Rename into place. What is there already is either broken, or whole by another run that was faster."""
    aside.chmod(0o755)  # mkdtemp's folder is for its owner alone
    for _ in range(10):
        with contextlib.suppress(OSError):
            aside.rename(folder)
            return
        if open_arrays(folder) is not None:
            return
        with contextlib.suppress(FileNotFoundError):
            trash = Path(tempfile.mkdtemp(prefix=".broken-", dir=folder.parent))
            folder.rename(trash / "examples")
            shutil.rmtree(trash, ignore_errors=True)
    raise OSError(f"{folder} cannot be replaced")


def open_arrays(folder: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """The memory-mapped arrays of a folder and its notes; None where it is missing, incomplete or broken."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        # as a plain array: indexing a np.memmap costs several times more
        arrays = {
            name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            for name in index["checksums"]
        }
        whole = all(_checksum(array) == index["checksums"][name] for name, array in arrays.items())
        return (arrays, index["notes"]) if whole else None
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError):
        return None


def _open(folder: Path) -> Examples | None:
    found = open_arrays(folder)
    return _assembled(*found) if found and "offsets" in found[0] else None


def _assembled(arrays: Mapping[str, Array], notes: Mapping[str, Any]) -> Examples:
    groups: dict[str, dict[str, Array]] = {"tokens": {}, "fields": {}}
    for name, array in arrays.items():
        group, _, column = name.partition(".")
        if column:
            groups[group][column] = array
    return Examples(arrays["offsets"], groups["tokens"], groups["fields"], notes)


def _checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"")


class BatchPlan:
    """Which examples make up the global batch of each optimizer step: a pure function of the step.

    The data are one stream over all epochs, each epoch a permutation of its own, cut in batches of
    `batch_size`: no batch is partial, and the places from a multiple of n to the next hold each example once.
    The whole batches of an epoch are gathered in windows, sorted by length within each, and visited in random
    order. A window holds at most `WINDOW` batches and a quarter of the data (but one batch at least), so that
    what is in a batch still varies. A batch that straddles two epochs stays as it is.
    """

    WINDOW = 50

    def __init__(self, lengths: Array, batch_size: int, seed: int) -> None:
        assert len(lengths) > 0, "there is an example"
        assert batch_size > 0, "there is a place for it"
        self._lengths, self._batch_size, self._seed = np.asarray(lengths), batch_size, seed
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)
        self._window = lru_cache(maxsize=2)(self._make_window)

    def indices(self, step: int) -> Positions:
        """(batch_size,) positions of the examples of a step, from 0."""
        n, size = len(self._lengths), self._batch_size
        epoch = step * size // n
        if ((step + 1) * size - 1) // n != epoch:
            return self._stream(step * size, (step + 1) * size)
        first, last = -(-epoch * n // size), (epoch + 1) * n // size
        windows = -(-(last - first) // max(1, min(self.WINDOW, n // (4 * size))))
        window = ((step - first + 1) * windows - 1) // (last - first)  # inverse of the even cut below
        start, end = (first + (last - first) * i // windows for i in (window, window + 1))
        return self._window(start, end)[step - start]

    def between(self, start: int, end: int) -> Positions:
        """(end - start,) positions of the examples at these places of the order in which they are visited.

        From step * batch_size on this is the batch of a step; a run that goes on with batches of another size takes
        the same examples in the same order.
        """
        first, last = start // self._batch_size, -(-end // self._batch_size)
        visited = np.concatenate([self.indices(step) for step in range(first, last)])
        return visited[start - first * self._batch_size : end - first * self._batch_size]

    def _stream(self, start: int, end: int) -> Positions:
        n = len(self._lengths)
        epochs = range(start // n, (end - 1) // n + 1)
        parts = [self._permutation(e)[max(0, start - e * n) : min(n, end - e * n)] for e in epochs]
        return np.concatenate(parts)

    def _make_permutation(self, epoch: int) -> Positions:
        return np.random.default_rng((self._seed, 0, epoch)).permutation(len(self._lengths))

    def _make_window(self, start: int, end: int) -> Positions:
        """(end - start, batch_size): the batches of a window of steps, in the order of their steps."""
        chosen = self._stream(start * self._batch_size, end * self._batch_size)
        by_length = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        order = np.random.default_rng((self._seed, 1, start)).permutation(end - start)
        return by_length.reshape(end - start, self._batch_size)[order]


def steps_for(epochs: float, examples: int, batch_size: int, seen: int = 0) -> int:
    """Optimizer steps until every example was seen `epochs` times, rounded up; `seen` is how many were already."""
    return math.ceil(round((epochs * examples - seen) / batch_size, 9))


def shard(positions: Positions, lengths: Array, rank: int, world: int, accumulation: int) -> Positions:
    """(accumulation, micro) positions of one rank: its part of the global batch, cut in micro-batches.

    Micro-batch m takes examples of adjacent lengths on all ranks, rank r every world-th of them, so ranks
    have equal work and padding is least. The longest go first: what does not fit in memory shows at once.
    """
    assert len(positions) % (world * accumulation) == 0, f"{len(positions)} over {world} x {accumulation}"
    longest_first = positions[np.argsort(-lengths[positions], kind="stable")]
    return longest_first.reshape(accumulation, -1, world)[:, :, rank]


def evaluation_shard(lengths: Array, rank: int, world: int, batch_size: int) -> list[Positions]:
    """One rank's batches of a split, longest first; every rank has equally many, of equal sizes.

    Where the examples do not divide by the ranks, the last is repeated: one more answer to the same id.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    order = np.concatenate([order, np.repeat(order[-1:], -len(order) % world)])
    size = world * batch_size
    return [order[start : start + size][rank::world] for start in range(0, len(order), size)]
