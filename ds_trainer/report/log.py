"""What a run tells: `log.jsonl`, TensorBoard, and a progress bar or plain lines, all views of one record per flush.

Loss terms stay on the device until a flush, or until `settle` sums them up for a flush that is far, which costs one
reduction over the ranks and one synchronisation and sees whether all were finite. Rank 0 alone writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ds_trainer.engine.histograms import Histogram
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.report.run_files import OF_ONE_EXIT, encoder_weights
from ds_trainer.tasks.task import Batch


class Report:
    """One phase's record. Close it, or use it as a context."""

    trained_on: Sequence[Mapping[str, Any]] = ()
    """Every session's versions, hosts and devices: of this run, and of those that it goes on from."""

    def __init__(
        self,
        folder: Path,
        phase: str,
        total_steps: int,
        weights: Mapping[str, float],
        tensorboard: bool,
        training_examples: int,
    ) -> None:
        self.phase, self.weights, self._training_examples = phase, dict(weights), training_examples
        self._folder, self._tensorboard = folder, tensorboard
        self._pending: list[_MicroBatch] = []
        self._names: tuple[str, ...] = ()
        self._counts = {"examples": 0, "tokens": 0}
        self._carried: list[list[float]] = []
        self._settled = _Sums()
        self._total_examples, self._loss_sum, self._seconds = 0, 0.0, 0.0
        self._since = time.perf_counter()
        self._log: _Lines | None = None
        self._events = self._bar = None
        if distributed.is_main():
            terminal = sys.stderr.isatty()
            self._bar = tqdm(total=total_steps, desc=phase, unit="step", dynamic_ncols=True) if terminal else None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self._log, self._events, self._bar):
            if sink is not None:
                sink.close()

    def open(self, step: int, evaluated: int, state: Mapping[str, Any] | None = None) -> None:
        """Begin at this step, the last evaluation being of `evaluated`, with what `state` said there.

        What was logged of later steps and evaluations goes: they come again.
        """
        if state is not None:
            self._carried, self._names = [list(row) for row in state["pending"]], tuple(state["names"])
            self._settled = _Sums(**state.get("settled", {}))
            self._counts = dict(state["counts"])
            self._total_examples, self._loss_sum = state["examples"], state["loss_sum"]
            self._seconds, self._since = state["seconds"], time.perf_counter() - state["since"]
            self.trained_on = state.get("trained_on", [])  # a checkpoint of an older version has none
        now = machine.session()
        self.trained_on = [*(before for before in self.trained_on if before != now), now]
        if distributed.is_main():
            drop_later_records(self._folder / "log.jsonl", self.phase, step, evaluated)
            self._log = _Lines(self._folder / "log.jsonl")
            if self._tensorboard:
                self._events = _event_writer(self._folder / "tensorboard" / self.phase, step)
        if self._bar is not None:
            self._bar.update(step)

    def state(self) -> dict[str, Any]:
        """What `open` needs to go on from here as if nothing had happened: JSON values, alike on all ranks."""
        return {
            "names": list(self._names),
            "pending": self._rows().tolist(),
            "settled": asdict(self._settled),
            "counts": self._counts,
            "examples": self._total_examples,
            "loss_sum": self._loss_sum,
            "seconds": self._seconds,
            "since": time.perf_counter() - self._since,
            "trained_on": self.trained_on,
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done inside, evaluation or saving, out of the throughput."""
        start = time.perf_counter()
        try:
            yield
        finally:  # a stop in the midst of an evaluation is followed by a save
            self._since += time.perf_counter() - start

    def add(self, step: int, terms: Mapping[str, Tensor], batch: Batch) -> None:
        """Take one micro-batch's unweighted terms; nothing leaves the device."""
        self._names = tuple(terms)
        self._pending.append(_MicroBatch(step, batch.ids, torch.stack(list(terms.values())).float()))
        world = distributed.world_size()  # equally many examples on every rank; tokens are about as many
        self._counts["examples"] += len(batch.ids) * world
        self._counts["tokens"] += batch.tokens * world

    def flush(self, step: int, readings: Mapping[str, float]) -> dict[str, float]:
        """Write one record: the mean of every term since the last flush over all ranks, weights, rates and readings."""
        means = self._means()
        seconds = time.perf_counter() - self._since  # after .tolist(), which waits for the device
        terms = dict(zip(self._names, means, strict=True))
        record = {"train/loss": sum(self.weights[name] * value for name, value in terms.items())}
        record |= {f"train/term/{name}": value for name, value in terms.items()}
        record |= {f"train/weight/{name}": self.weights[name] for name in terms}
        record |= {f"train/{name}_per_s": count / seconds for name, count in self._counts.items()}
        self._loss_sum += record["train/loss"] * self._counts["examples"]
        self._total_examples += self._counts["examples"]
        self._seconds += seconds
        self._pending, self._carried, self._settled = [], [], _Sums()
        self._counts = dict.fromkeys(self._counts, 0)
        record |= {**readings, **_memory("memory")}
        self.write(step, record)
        self._show(step, record)
        self._since = time.perf_counter()
        return record

    def settle(self) -> None:
        """Sum up the terms since the last time, so that what is kept does not grow until a flush; collective.

        It must be called after the same steps whether or not the run was stopped in between, since the order of the
        additions decides the rounding.
        """
        rows = self._rows()
        self._settled = _Sums(self._settled.micro_batches + len(rows), self._settled.added(rows))
        self._pending, self._carried = [], []

    def check_finite(self, until: int | None = None) -> None:
        """Raise NonFiniteLossError, on every rank, if a term since the last flush is not finite; collective.

        `until` leaves out what came after that step (counted from 1), as it may be its consequence.
        """
        pending = self._pending
        self._pending = [micro for micro in pending if until is None or micro.step < until]
        if self._pending:
            self._means()
        self._pending = pending

    def _means(self) -> list[float]:
        """Each term's mean since the last flush, over all ranks."""
        rows = self._rows()
        means = [total / (self._settled.micro_batches + len(rows)) for total in self._settled.added(rows)]
        if not all(map(math.isfinite, means)):
            found = [place for place in distributed.broadcast(distributed.gather(self._first_non_finite())) if place]
            raise NonFiniteLossError(_told(self.phase, sorted(found)))
        return means

    def _rows(self) -> Tensor:
        """(micro-batches, terms) since the last flush or settling, each the mean over all ranks, in fp64."""
        rows = [torch.tensor(self._carried, dtype=torch.float64).view(len(self._carried), len(self._names))]
        if self._pending:
            own = torch.stack([micro.terms for micro in self._pending]).double()
            rows.append(distributed.mean(own).cpu())
        return torch.cat(rows)

    def _first_non_finite(self) -> tuple[int, int, str, float, list[int]] | None:
        """Step (counted from 1), rank, term, value and example ids, where a term of this rank's is not finite."""
        for micro in self._pending:
            for name, value in zip(self._names, micro.terms.tolist(), strict=True):
                if not math.isfinite(value):
                    return micro.step + 1, distributed.rank(), name, value, micro.ids.tolist()
        return None

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append a record to `log.jsonl` and TensorBoard, with the epoch."""
        record = {"epoch": self._epoch(), **record}
        if self._log is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}  # JSON has no inf
        self._log.append(json.dumps({"phase": self.phase, "step": step, **finite}) + "\n")
        if self._events is not None:
            for name, value in record.items():
                self._events.add_scalar(name, value, step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add histograms to TensorBoard."""
        if self._events is None:
            return
        for tag, found in histograms.items():
            width = (found.high - found.low) / len(found.counts)
            limits = [found.low + width * (place + 1) for place in range(len(found.counts))]
            sums = (sum(found.counts), found.total, found.squares)
            self._events.add_histogram_raw(tag, found.low, found.high, *sums, limits, found.counts, step)

    def write_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Record an evaluation, and say it; collective."""
        self.write(step, {f"eval/{name}": value for name, value in scores.items()} | _memory("eval/memory"))
        self.say(f"{self.phase}: step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items()))

    def say(self, message: str) -> None:
        """A line on rank 0's console, above the progress bar."""
        if self._bar is not None:
            self._bar.write(message, file=sys.stderr)
        else:
            distributed.info(message)

    def totals(self) -> dict[str, float]:
        """Epochs, mean loss over examples, seconds without evaluation and saving, examples/s over all ranks."""
        return {
            "epochs": self._epoch(),
            "train_loss": self._loss_sum / max(self._total_examples, 1),
            "train_seconds": self._seconds,
            "examples_per_s": self._total_examples / max(self._seconds, 1e-9),
        }

    def _epoch(self) -> float:
        """How often the training examples were seen: a whole number once each was seen so often."""
        return (self._total_examples + self._counts["examples"]) / self._training_examples

    def _show(self, step: int, record: Mapping[str, float]) -> None:
        if not distributed.is_main():
            return
        rate = max((value for name, value in record.items() if name.startswith("train/lr/")), default=0.0)
        shown = {"loss": f"{record['train/loss']:.4f}", "lr": f"{rate:.2e}"}
        if "prune/density" in record:
            shown["density"] = f"{record['prune/density']:.3f}"
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        distributed.info(f"{self.phase}: step {step}  {text}  {record['train/examples_per_s']:.1f} examples/s")


@dataclass(frozen=True)
class _MicroBatch:
    """The optimizer step it is of, the ids of its examples (rows,), and its terms (terms,), on the device."""

    step: int
    ids: Tensor
    terms: Tensor


@dataclass(frozen=True)
class _Sums:
    """How many micro-batches were settled since the last flush, and the sum of each term over them."""

    micro_batches: int = 0
    terms: list[float] = field(default_factory=list)

    def added(self, rows: Tensor) -> list[float]:
        """These sums and those of more rows (micro-batches, terms)."""
        sums = rows.sum(0).tolist()
        return [before + own for before, own in zip(self.terms or [0.0] * len(sums), sums, strict=True)]


class _Lines:
    """A file of lines, each there whole or not at all; a disk that is full costs the line, not the run."""

    def __init__(self, path: Path) -> None:
        self._path, self._full = path, False
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            whole = self._file.write(data := line.encode()) == len(data)
        except OSError as error:
            self._tell(error.strerror or str(error))
            whole = False
        if not whole:
            with contextlib.suppress(OSError):
                self._file.truncate(end)

    def close(self) -> None:
        self._file.close()

    def _tell(self, why: str) -> None:
        if not self._full:
            distributed.warn(f"{self._path} cannot be written: {why}. Training goes on, with records missing")
        self._full = True


def drop_later_records(log: Path, phase: str, step: int, evaluated: int) -> None:
    """Drop a phase's records beyond a step, scores beyond `evaluated`, and lines that a killed run has not finished."""
    if not log.is_file():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            last = evaluated if any(name.startswith("eval/") for name in record) else step
            if line.endswith("\n") and not (record["phase"] == phase and record["step"] > last):
                kept.append(line)
    aside = log.with_name(f".{log.name}.{os.getpid()}.tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(log)


def results_table(results: Mapping[str, Any]) -> str:
    """The phases side by side: metrics but those of single exit heads, encoder weights kept, seconds, examples/s."""
    rows: list[dict[str, str]] = []
    for name, found in results.items():
        kept, whole = encoder_weights(found) or (0, 0)
        metrics = {metric: value for metric, value in found["eval"].items() if not OF_ONE_EXIT.search(metric)}
        row = {"phase": name} | {metric: f"{value:.4f}" for metric, value in metrics.items()}
        row |= {"encoder weights": f"{kept:,} ({100 * kept / max(whole, 1):.1f}%)"}
        row |= {"seconds": f"{found['train']['train_seconds']:.0f}"}
        rows.append(row | {"examples/s": f"{found['train']['examples_per_s']:.0f}"})
    return aligned(rows)


def aligned(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as lines under the names of their columns, every column as wide as its widest cell."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def save_json(files: Mapping[str, Any], folder: Path) -> None:
    """Write each value as `folder/NAME`; no folder for no values."""
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _told(phase: str, found: Sequence[tuple[int, int, str, float, list[int]]]) -> str:
    """What a run that stops says of the first step with a term that is not finite."""
    if not found:
        return f"{phase}: a term of the loss is so large that its mean is not finite: lower learning_rate"
    step = found[0][0]
    places = [
        f"the term {name} is {value} on rank {rank}, of the training examples {', '.join(map(str, ids))}"
        for at, rank, name, value, ids in found
        if at == step
    ]
    return (
        f"{phase}: the loss of step {step} is not finite: {'; '.join(places)}. Lower learning_rate, lengthen "
        f"warmup_steps or lower max_grad_norm; with fp16, try bf16. Checkpoints are as they were. If there is "
        f"checkpoint-{step - 1}, it holds the weights that gave it: delete it, and --resume goes on from the one before"
    )


def _memory(prefix: str) -> dict[str, int]:
    """The most bytes that each rank has held since the last record; collective, and waits for no accelerator."""
    peaks = machine.peak_memory()
    ranks = distributed.numbers_of_all(list(peaks.values()))
    return {
        f"{prefix}/{kind}/rank{rank}": held
        for rank, row in enumerate(ranks)
        for kind, held in zip(peaks, row, strict=True)
    }


def _event_writer(folder: Path, step: int) -> Any:
    """TensorBoard's writer; what was written of later steps is no longer shown."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
