"""What a run writes as it goes: records of its phases in `log.jsonl`, TensorBoard and on the console; `status.json`.

The state "finished" in `status.json` proves that a run is done. An exit code of 0 from DeepSpeed's launcher does not,
since a run that was killed by a signal may give 0, too. The state of a killed run remains "running", with the id of a
process that is gone.

Every flush writes one JSON object to the log; TensorBoard and the console show the same object. Loss terms stay on the
device until a flush, or until a check for values that are not finite. Each of these costs one reduction over the ranks
and one synchronisation. Only rank 0 writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ds_trainer.engine.checkpoint import Checkpoints
from ds_trainer.files.run_folder import LOG, STATUS, RunFolder
from ds_trainer.files.writing import write_whole
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import NonFiniteLossError, StoppedError, exit_code
from ds_trainer.tasks.task import Batch


class RunLog:
    """The record of one phase. Close it, or use it as a context."""

    trained_on: Sequence[Mapping[str, Any]] = ()
    """The versions, hosts and devices of this session and of the sessions that it resumes."""

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
        self._total_steps = total_steps
        self._folder, self._tensorboard = folder, tensorboard
        # of each micro-batch its optimizer step, the ids of its examples (rows,), and its terms (terms,), on the device
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._names: tuple[str, ...] = ()
        self._micro_batches, self._sums = 0, list[float]()  # since the last flush, and the sum of each term over them
        self._counts = {"examples": 0, "tokens": 0}
        self._total_examples, self._loss_sum, self._seconds = 0, 0.0, 0.0
        self._since = time.perf_counter()
        self._log: FileIO | None = None
        self._log_is_complete = True
        self._events: Any = None
        self._opened = 0, time.monotonic()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self._log, self._events):
            if sink is not None:
                sink.close()

    def open(self, step: int, evaluated: int, state: Mapping[str, Any] | None = None) -> None:
        """Begin at `step`, after an evaluation at step `evaluated`, with the `state` of a checkpoint.

        Records of later steps and evaluations are dropped from the log, since they will be written again.
        """
        if state is not None:
            self._names, settled = tuple(state["names"]), state["settled"]
            self._micro_batches, self._sums = settled["micro_batches"], list(settled["terms"])
            self._counts = dict(state["counts"])
            self._total_examples, self._loss_sum = state["examples"], state["loss_sum"]
            self._seconds, self._since = state["seconds"], time.perf_counter() - state["since"]
            self.trained_on = state["trained_on"]
        now = machine.session()
        self.trained_on = [*(before for before in self.trained_on if before != now), now]
        if distributed.is_main():
            drop_later_records(self._folder / LOG, self.phase, step, evaluated)
            self._log = (self._folder / LOG).open("ab", buffering=0)
            if self._tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                folder = self._folder / "tensorboard" / self.phase
                self._events = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        self._opened = step, time.monotonic()

    def state(self) -> dict[str, Any]:
        """Return JSON values, equal on all ranks, with which `open` continues as if the run had not been stopped."""
        self._sum_up()
        return {
            "names": list(self._names),
            "settled": {"micro_batches": self._micro_batches, "terms": self._sums},
            "counts": self._counts,
            "examples": self._total_examples,
            "loss_sum": self._loss_sum,
            "seconds": self._seconds,
            "since": time.perf_counter() - self._since,
            "trained_on": self.trained_on,
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time that is spent inside, for an evaluation or a save, from the throughput."""
        start = time.perf_counter()
        try:
            yield
        finally:  # also if a run is stopped during an evaluation: it then saves its state
            self._since += time.perf_counter() - start

    def add(self, step: int, terms: Mapping[str, Tensor], batch: Batch) -> None:
        """Keep one micro-batch's unweighted terms, on the device."""
        self._names = tuple(terms)
        self._pending.append((step, batch.ids, torch.stack(list(terms.values())).float()))
        world = distributed.world_size()  # all ranks have equally many examples, and about equally many tokens
        self._counts["examples"] += len(batch.ids) * world
        self._counts["tokens"] += batch.tokens * world

    def flush(self, step: int, readings: Mapping[str, float]) -> dict[str, float]:
        """Write one record: the mean of every term since the last flush over all ranks, weights, rates and readings."""
        self.check_finite()  # waits for the device, so that the clock is read after the work
        seconds = time.perf_counter() - self._since
        terms = {name: total / self._micro_batches for name, total in zip(self._names, self._sums, strict=True)}
        record = {"train/loss": sum(self.weights[name] * value for name, value in terms.items())}
        record |= {f"train/term/{name}": value for name, value in terms.items()}
        record |= {f"train/weight/{name}": self.weights[name] for name in terms}
        record |= {f"train/{name}_per_s": count / seconds for name, count in self._counts.items()}
        self._loss_sum += record["train/loss"] * self._counts["examples"]
        self._total_examples += self._counts["examples"]
        self._seconds += seconds
        self._micro_batches, self._sums, self._counts = 0, [], dict.fromkeys(self._counts, 0)
        record |= {**readings, **_memory("memory")}
        self.write(step, record)
        self._show(step, record)
        self._since = time.perf_counter()
        return record

    def check_finite(self, until: int | None = None) -> None:
        """Raise NonFiniteLossError, on every rank, if a term since the last check is not finite; collective.

        The terms are then kept as sums, so that memory does not grow until the next flush. With `until`, only the steps
        up to that one (counted from 1) are blamed, since later terms may be a consequence.
        """
        pending = [each for each in self._pending if until is None or each[0] < until]
        if self._sum_up():
            return
        first = distributed.broadcast(distributed.gather(self._first_non_finite(pending)))
        places = sorted(place for place in first if place)
        if places:
            raise NonFiniteLossError(_non_finite_message(self.phase, places))

    def _sum_up(self) -> bool:
        """Add the pending terms, averaged over the ranks, to the sums; return whether all sums are finite."""
        if self._pending:
            terms = distributed.mean(torch.stack([terms for _, _, terms in self._pending]).double())
            # one after another: the rounding must not depend on how rows are split into calls, which a stop changes
            for row in terms.tolist():
                self._sums = [total + value for total, value in zip(self._sums or [0.0] * len(row), row, strict=True)]
            self._micro_batches += len(self._pending)
            self._pending = []
        return all(map(math.isfinite, self._sums))

    def _first_non_finite(
        self, pending: Sequence[tuple[int, Tensor, Tensor]]
    ) -> tuple[int, int, str, float, list[int]] | None:
        """Return the first term of this rank that is not finite: step (from 1), rank, term, value and example ids."""
        for step, ids, terms in pending:
            for name, value in zip(self._names, terms.tolist(), strict=True):
                if not math.isfinite(value):
                    return step + 1, distributed.rank(), name, value, ids.tolist()
        return None

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append a record, with the epoch, to `log.jsonl` and TensorBoard.

        On a full disk the record is lost, and the training continues.
        """
        if self._log is None:
            return
        record = {"epoch": self._epoch(), **record}
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}  # JSON has no inf
        line = json.dumps({"phase": self.phase, "step": step, **finite}).encode() + b"\n"
        end = self._log.seek(0, os.SEEK_END)
        try:
            if self._log.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._log.truncate(end)  # the next record must not continue a line that was cut short
            if self._log_is_complete:
                distributed.warn(f"the record of step {step} cannot be written: {error}. Training continues")
            self._log_is_complete = False
        if self._events is not None:
            for name, value in record.items():
                self._events.add_scalar(name, value, step)

    def write_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the scores of an evaluation and print them; collective."""
        self.write(step, {f"eval/{name}": value for name, value in scores.items()} | _memory("eval/memory"))
        line = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        distributed.info(f"{self.phase}: step {step}  {line}")

    def totals(self) -> dict[str, float]:
        """Return epochs, mean loss over examples, seconds except evaluations and saves, and examples/s of all ranks."""
        return {
            "epochs": self._epoch(),
            "train_loss": self._loss_sum / max(self._total_examples, 1),
            "train_seconds": self._seconds,
            "examples_per_s": self._total_examples / max(self._seconds, 1e-9),
        }

    def _epoch(self) -> float:
        """Return how many epochs are done, with a fraction for the current one."""
        return (self._total_examples + self._counts["examples"]) / self._training_examples

    def _show(self, step: int, record: Mapping[str, float]) -> None:
        """Show a record on the console, with the time left by the clock.

        It includes evaluations and saves, which the steps that are left come with, too.
        """
        rate = max((value for name, value in record.items() if name.startswith("train/lr/")), default=0.0)
        shown = {"epoch": f"{self._epoch():.2f}", "loss": f"{record['train/loss']:.4f}", "lr": f"{rate:.2e}"}
        for density in [value for name, value in record.items() if re.fullmatch(r"\w+/density", name)]:
            shown["density"] = f"{density:.3f}"
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        begun, seconds = self._opened[0], time.monotonic() - self._opened[1]
        left = tqdm.format_interval(seconds / max(1, step - begun) * (self._total_steps - step))
        speed = f"{record['train/examples_per_s']:.1f} examples/s"
        distributed.info(f"{self.phase}: step {step} of {self._total_steps}  {text}  {speed}  {left} left")


def drop_later_records(log: Path, phase: str, step: int, evaluated: int) -> None:
    """Drop a phase's records after `step`, its scores after `evaluated`, and lines that a killed run cut short."""
    if not log.is_file():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            last = evaluated if any(name.startswith("eval/") for name in record) else step
            if line.endswith("\n") and not (record["phase"] == phase and record["step"] > last):
                kept.append(line)
    write_whole(log, "".join(kept))


def _non_finite_message(phase: str, places: Sequence[tuple[int, int, str, float, list[int]]]) -> str:
    """Return a message with the first step whose loss is not finite, the terms, ranks and examples, and the way out."""
    step = places[0][0]
    terms = [
        f"the term {name} is {value} on rank {rank}, for the training examples {', '.join(map(str, ids))}"
        for at, rank, name, value, ids in places
        if at == step
    ]
    return (
        f"{phase}: the loss of step {step} is not finite: {'; '.join(terms)}. Lower learning_rate, lengthen "
        f"warmup_steps or lower max_grad_norm; with fp16, try bf16. No checkpoint was changed. If there is a "
        f"checkpoint-{step - 1}, it holds the weights that gave this loss: delete it, and --resume continues from the "
        f"checkpoint before it"
    )


def _memory(prefix: str) -> dict[str, int]:
    """Return the most bytes that each rank has held since the last record; collective, without a synchronisation."""
    peaks = machine.peak_memory()
    ranks = distributed.numbers_of_all(list(peaks.values()))
    return {
        f"{prefix}/{kind}/rank{rank}": held
        for rank, row in enumerate(ranks)
        for kind, held in zip(peaks, row, strict=True)
    }


class RunStatus:
    """The state of this run. Every rank has this object; rank 0 writes the file, or the rank that reports its loss."""

    def __init__(self, output: Path) -> None:
        self._output, self._phase, self._checkpoints = output, "", Path()

    def phase(self, name: str, folder: Path) -> None:
        """Record that a phase begins, with its checkpoints in `folder`: an error before it leaves the file as it is."""
        self._phase, self._checkpoints = name, folder
        if distributed.is_main():
            self._write("running")

    def finished(self, model: Path) -> None:
        """Record that the run is done, and that its model is in `model`."""
        if distributed.is_main():
            self._write("finished", exit_code=0, model=str(model))
        distributed.info(f"finished: {model}")

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error that ends the run, and add to its message from where a resumed run starts."""
        try:
            yield
        except Exception as error:
            if self._phase and distributed.rank() == getattr(error, "reporter", 0):
                start = self._next_start()
                state = "stopped" if isinstance(error, StoppedError) else "failed"
                with contextlib.suppress(OSError):
                    self._write(state, exit_code=exit_code(error), message=str(error), left=start)
                # the same as `add_note`, which Python 3.10 does not have
                error.__notes__ = [*getattr(error, "__notes__", []), f"{state}: {start}"]
            raise

    def _next_start(self) -> str:
        """Return a sentence about where the next `--resume` starts."""
        saved = Checkpoints(self._checkpoints).all()
        if saved:
            return f"{saved[-1]} is saved; --resume goes on from it, in phase {self._phase}"
        return f"phase {self._phase} has no checkpoint; --resume starts it"

    def _write(self, state: str, **more: Any) -> None:
        process = {"phase": self._phase, "host": socket.gethostname(), "process": os.getpid()}
        value = {"state": state, **process, "world_size": distributed.world_size(), **more}
        RunFolder(self._output).write_json(STATUS, value)
