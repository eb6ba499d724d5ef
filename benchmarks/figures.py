"""Ratios measured interleaved, A B A B ..., in one process, and the line that says whether they hold.

Every script takes `--quick`: one round of small models shows that it works, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
sys.path[:0] = [str(ROOT / name) for name in (".", "tools", "tests")]  # for the tools and for the support of the tests


@dataclass(frozen=True)
class Figure:
    """A measured value and its bar, if it has one; `at_least` says on which side of it the value must be."""

    name: str
    value: float
    bar: float | None = None
    at_least: bool = False

    @property
    def holds(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def is_quick() -> bool:
    return "--quick" in sys.argv


def run_flags(folder: str, names: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the flags of a script that trains; `names` are what it runs by default, `folder` where."""
    parser = argparse.ArgumentParser()
    if names:
        parser.add_argument("names", nargs="*", default=list(names))
    # what a quick run has trained is not to be taken for the real thing later
    parser.add_argument("--output", type=Path, default=Path("runs/quick" if is_quick() else "runs", folder))
    parser.add_argument("--seeds", type=int, default=1 if is_quick() else 3, help="at most so many")
    parser.add_argument("--data_dir", default="", help="by default that of ../shared")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the table into its page")
    flags = parser.parse_args()
    if flags.quick and flags.write:
        parser.error("--quick and --write: the figures of a quick run say nothing: drop one of them")
    return flags


def use_threads(number: int) -> None:
    """Have torch compute on so many; on one where the run is quick, for threads wait for what runs beside it."""
    torch.set_num_threads(1 if is_quick() else number)


def bert_shape(hidden: int, layers: int, heads: int) -> dict[str, int]:
    """The sizes of a BERT, as fields of its config; of a tiny one where the run is quick."""
    if is_quick():
        hidden, layers, heads = 32, 2, 2
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }


def ratio(
    first: Callable[[], object], second: Callable[[], object], *, rounds: int, warmup: int = 2
) -> tuple[float, float, float]:
    """Median over rounds of seconds(first) / seconds(second), with the median seconds of each. The order alternates."""
    rounds, warmup = (1, 0) if is_quick() else (rounds, warmup)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(warmup + rounds):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        taken = [0.0, 0.0]
        for which in order:
            start = time.perf_counter()
            (first, second)[which]()
            taken[which] = time.perf_counter() - start
        if index >= warmup:
            for which in (0, 1):
                times[which].append(taken[which])
    medians = [statistics.median(series) for series in times]
    return statistics.median(a / b for a, b in zip(*times, strict=True)), medians[0], medians[1]


def with_spread(values: list[float], digits: int | None = None) -> str:
    """Return the mean, and with several values their standard deviation."""
    if digits is None:
        digits = 3 if abs(statistics.mean(values)) < 2 else 1
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def milliseconds(value: float) -> str:
    """Return three digits, and all of those before the point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def report(*figures: Figure) -> None:
    """Print one JSON line a figure and leave with 0 if all hold, or the run was quick, else 1."""
    for figure in figures:
        print(json.dumps(asdict(figure) | {"value": float(f"{figure.value:.4g}"), "holds": figure.holds}))
    sys.exit(0 if is_quick() or all(figure.holds for figure in figures) else 1)
