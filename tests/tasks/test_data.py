"""Examples, their cache, and how they are dealt out to steps and ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_trainer.tasks.data import (
    BatchPlan,
    Examples,
    cached,
    evaluation_shard,
    fingerprint,
    pack,
    shard,
    spread,
    steps_for,
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=120).map(np.array)


def some_examples(rows: list[list[int]] | None = None) -> Examples:
    rows = rows or [[1, 2, 3], [4], [5, 6]]
    columns = {"input_ids": rows, "token_type_ids": [[1] * len(row) for row in rows]}
    dtypes = {"input_ids": np.int32, "token_type_ids": np.uint8}
    chunks = [{name: column[cut] for name, column in columns.items()} for cut in (slice(0, 2), slice(2, None))]
    return replace(pack(chunks, dtypes), fields={"labels": np.arange(len(rows))}, notes={"origin": "a test"})


def test_padding_fills_each_column_with_its_own_value_up_to_the_multiple() -> None:
    """Rows are padded on the right, to the longest of the chosen rows rounded up, and the mask marks the tokens."""
    assert some_examples().lengths.tolist() == [3, 1, 2]
    padded = some_examples().padded([2, 1], {"input_ids": 9}, 4)
    assert padded["input_ids"].tolist() == [[5, 6, 9, 9], [4, 9, 9, 9]]
    assert padded["token_type_ids"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert padded["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert some_examples().padded([2, 1], {})["attention_mask"].shape == (2, 2)


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    """Neither another epoch nor another seed repeats an order."""
    lengths = np.full(64, 5)
    plan, other = BatchPlan(lengths, 8, 0), BatchPlan(lengths, 8, 1)
    first, second = ({frozenset(plan.indices(epoch * 8 + i).tolist()) for i in range(8)} for epoch in (0, 1))
    assert first.isdisjoint(second)
    assert plan.indices(0).tolist() != other.indices(0).tolist()


def test_a_batch_holds_similar_lengths_and_steps_do_not_follow_length() -> None:
    """Grouping saves most of the padding, without sorting the course of training by length."""
    lengths = np.random.default_rng(0).integers(5, 60, 4000)
    batches = [lengths[BatchPlan(lengths, 16, 0).indices(step)] for step in range(250)]
    padding = 1 - sum(b.sum() for b in batches) / sum(b.max() * len(b) for b in batches)
    assert padding < 0.05
    assert 0.35 < np.mean(np.diff([b.mean() for b in batches]) > 0) < 0.65


def test_a_window_is_no_more_than_a_quarter_of_the_data() -> None:
    """With little data too, the longest examples do not all land in one batch of the epoch."""
    lengths = np.arange(80)
    batches = [BatchPlan(lengths, 10, 0).indices(step) for step in range(8)]
    assert max(len(set(batch) & set(range(70, 80))) for batch in batches) < 10


@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 4), accumulation=st.integers(1, 3), micro=st.integers(1, 5), seed=st.integers(0, 9))
def test_shards_partition_the_global_batch(world: int, accumulation: int, micro: int, seed: int) -> None:
    """Each example is taken once, micro-batches do not overlap in length, and the ranks take turns in each of them."""
    lengths = np.random.default_rng(seed).integers(1, 99, 200)
    batch = np.random.default_rng(seed).permutation(200)[: world * accumulation * micro]
    shards = [shard(batch, lengths, rank, world, accumulation) for rank in range(world)]
    assert all(part.shape == (accumulation, micro) for part in shards)
    assert sorted(np.concatenate([part.ravel() for part in shards])) == sorted(batch)
    in_turns = np.stack(shards, axis=-1).ravel()
    assert (np.diff(lengths[in_turns]) <= 0).all()


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, world=st.integers(1, 5), batch_size=st.integers(1, 9))
def test_evaluation_covers_all_with_equal_batches(lengths: np.ndarray, world: int, batch_size: int) -> None:
    """Every example is evaluated, ranks have batches of the same sizes, and only padding is repeated."""
    shards = [evaluation_shard(lengths, rank, world, batch_size) for rank in range(world)]
    sizes = [[len(batch) for batch in batches] for batches in shards]
    assert all(found == sizes[0] for found in sizes)
    assert max(sizes[0]) <= batch_size
    every = np.concatenate([batch for batches in shards for batch in batches])
    assert set(every) == set(range(len(lengths)))
    assert len(every) - len(lengths) < world
    in_turns = [np.stack(batches, axis=-1).ravel() for batches in zip(*shards, strict=True)]
    assert (np.diff(lengths[np.concatenate(in_turns)]) <= 0).all()


def test_the_cache_builds_once_and_gives_back_what_was_built(tmp_path: Path) -> None:
    """The second caller does not build; arrays, notes and dtypes survive; nothing else stays in the folder."""
    built: list[int] = []

    def build() -> Examples:
        built.append(1)
        return some_examples()

    for _ in range(2):
        found = cached(tmp_path / "deep" / "cache", "key", build)
        assert found.row(0)["input_ids"].tolist() == [1, 2, 3]
        assert found.fields["labels"].tolist() == [0, 1, 2]
        assert found.notes == {"origin": "a test"}
        assert found.tokens["input_ids"].base is not None
    assert len(built) == 1
    assert [path.name for path in (tmp_path / "deep" / "cache").iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("tokens.input_ids.npy", lambda content: content[:-4]),
        ("tokens.input_ids.npy", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("fields.labels.npy", None),
        ("index.json", lambda content: b'{"checksums": {}}'),
    ],
)
def test_a_damaged_cache_is_built_anew(file: str, damage: Any, tmp_path: Path) -> None:
    """Truncated, altered, incomplete or garbled files are noticed, and replaced by whole ones."""
    cached(tmp_path, "key", some_examples)
    path = tmp_path / "key" / file
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    examples = cached(tmp_path, "key", some_examples)
    assert examples.tokens["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert examples.fields["labels"].tolist() == [0, 1, 2]
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_a_cache_that_cannot_be_built_or_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """What `build` raises is passed on; a folder that cannot be written is named."""

    def broken() -> Examples:
        raise ValueError("line 3 is bad")

    with pytest.raises(ValueError, match="line 3 is bad"):
        cached(tmp_path, "key", broken)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cache_dir .*file.* cannot be written"):
        cached(tmp_path / "file", "key", some_examples)


CASES = ("good", "bad", "elsewhere", "elsewhere-bad")


def use_cache(rank: int, folder: Path) -> None:
    """Be one of two ranks, and write what each case gives; with "elsewhere", the ranks are on hosts of their own."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    lines = []
    for case in CASES:
        elsewhere = case.startswith("elsewhere")
        os.environ["LOCAL_RANK"] = "0" if elsewhere else str(rank)

        def build(case: str = case) -> Examples:
            (folder / f"built-{case}-{rank}").touch()
            if case.endswith("bad") and rank == (case != "bad"):
                raise ValueError("line 3 is bad")
            return pack([{"input_ids": [[1, 2], [3]]}], {"input_ids": np.int32})

        try:
            lines.append(f"{case} {len(cached(folder / (f'host{rank}' if elsewhere else 'shared'), case, build))}")
        except ValueError as error:
            lines.append(f"{case} {error}")
    (folder / f"lines-{rank}").write_text("\n".join(lines))
    torch.distributed.destroy_process_group()


def test_two_ranks_share_a_cache_and_fail_together(tmp_path: Path) -> None:
    """Rank 0 alone builds; on a host that does not see its folder the local rank 0 does; an error reaches both."""
    ranks = [get_context("fork").Process(target=use_cache, args=(rank, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        process.join(60)
        expected = ["good 2", "bad line 3 is bad", "elsewhere 2", "elsewhere-bad line 3 is bad"]
        assert (tmp_path / f"lines-{rank}").read_text().splitlines() == expected
    built = sorted(path.name.removeprefix("built-") for path in tmp_path.glob("built-*"))
    assert built == ["bad-0", "elsewhere-0", "elsewhere-1", "elsewhere-bad-0", "elsewhere-bad-1", "good-0"]


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    batch_size=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    seed=st.integers(0, 5),
)
def test_batches_are_a_function_of_the_step_and_visit_each_example_once_an_epoch(lengths, batch_size, sizes, seed):
    """Asked in any order, and however the batch size changes on the way: none is left out or seen twice."""
    plan, n = BatchPlan(lengths, batch_size, seed), len(lengths)
    steps = -(-max(3 * n, sum(sizes)) // batch_size)
    stream = np.concatenate([plan.indices(step) for step in range(steps)])
    assert len(stream) == steps * batch_size
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))
    backwards = BatchPlan(lengths, batch_size, seed)
    for step in reversed(range(steps)):
        assert np.array_equal(backwards.indices(step), stream[step * batch_size : (step + 1) * batch_size])
    ends = np.cumsum([0, *sizes])
    parts = [plan.between(int(start), int(end)) for start, end in pairwise(ends)]
    assert [len(part) for part in parts] == sizes
    assert np.array_equal(np.concatenate(parts), stream[: ends[-1]])


def test_small_numbers() -> None:
    """Epochs round up without float dust, limits are evenly spaced, and hashes follow values but not their order."""
    assert steps_for(0.1, 30, 3) == 1
    assert steps_for(3, 10, 4) == 8
    assert spread(10, 4) == [0, 2, 5, 7]
    for limit in (None, 10, 11):
        assert list(spread(10, limit)) == [*range(10)]
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 2, "b": 2})
