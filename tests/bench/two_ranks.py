"""Two ranks of one thread against one rank of two threads: optimizer steps per second under ZeRO 0, 2 and 3.

MiniLM's shape (BERT of 6 layers x 384, random weights), 64 examples of SST-2 a step (without ../shared: the embedded
docstrings), fp32, the engine files of `ds_configs/`, accumulation 1 and 4. The contestants of a case keep their
processes, forked from this one. They take their steps in turns, the same batches each time and one before that is not
timed, while the others wait to be told. Two processes that train each for itself, on half of the examples, show what
two ranks would reach if they exchanged nothing: `python tests/bench/two_ranks.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
from contextlib import ExitStack
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from figures import ROOT, Figure, is_quick, report
from loop_overhead import planned, record_of

from ds_trainer.engine import engine
from ds_trainer.loop import train_step
from ds_trainer.ranks import distributed
from ds_trainer.ranks.timing import seconds
from ds_trainer.trial import trial_batches

STAGES, ACCUMULATIONS = ((2,), (1,)) if is_quick() else ((0, 2, 3), (1, 4))
BARS = {(0, 1): 0.92, (2, 1): 0.85, (3, 1): 0.80}
"""Of two ranks over one, by ZeRO stage and accumulation."""
BAR = 0.95
"""Of two ranks over one with more accumulation."""
ROWS, STEPS, ROUNDS = (8, 1, 1) if is_quick() else (64, 4, 4)
IDLE = 600
"""Seconds after which a rank that is told nothing ends."""
FORKS = multiprocessing.get_context("fork")


class Contestant:
    """The processes of one engine file, which take steps when they are told to.

    They are so many trainings of so many ranks, which share the examples of a step.
    """

    def __init__(self, folder: Path, stage: int, accumulation: int, trainings: int, ranks: int) -> None:
        self.processes, self.told = list[BaseProcess](), list[Connection]()
        folder.mkdir()
        config = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
        config["gradient_accumulation_steps"] = accumulation
        (folder / "engine.json").write_text(json.dumps(config))
        threads, rows = 1 if is_quick() else 2 // (trainings * ranks), ROWS // trainings
        for training in range(trainings):
            (folder / str(training)).mkdir()
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": distributed.free_port()}
            place |= {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
            for rank in range(ranks):
                of_rank = {name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                told, own = FORKS.Pipe()
                words = (own, of_rank, threads, folder / str(training), rows)
                self.processes.append(FORKS.Process(target=serve_rank, args=words))
                self.processes[-1].start()
                own.close()  # so that the end of the rank is the end of what it says
                self.told.append(told)

    def steps(self) -> list[float]:
        """Take the steps; return the seconds of each, of the slowest process."""
        for rank in self.told:
            rank.send(True)
        return [max(times) for times in zip(*(rank.recv() for rank in self.told), strict=True)]

    def end(self) -> None:
        for rank in self.told:
            rank.send(False)
        for process in self.processes:
            process.join()


def serve_rank(told: Connection, place: dict[str, str], threads: int, folder: Path, rows: int) -> None:
    """Be one rank of a contestant: take the steps whenever it is told to."""
    os.environ.update(place)
    distributed.start()
    torch.set_num_threads(threads)  # after the start, which would give a process without others all cores
    plan = planned(folder.parent / "engine.json", folder, rows=rows)
    with record_of(plan) as record:
        record.open(0, 0)
        model, groups, objective = plan.prepare()
        ds_engine = engine.start_engine(model, groups, plan.engine_config, plan.base, plan.lr_factor)
        ds_engine.train()
        batches = trial_batches(plan.task.examples("train").lengths, rows, STEPS)[1:]

        def take(index: int) -> float:
            return seconds(lambda: train_step(objective, ds_engine, batches[index], record, 0), ds_engine.device)

        while told.poll(IDLE) and told.recv():
            take(0)  # what was idle has left the caches
            told.send([take(index) for index in range(STEPS)])
    distributed.stop()
    distributed.leave(0)


def speeds_of(stage: int, accumulation: int) -> list[float]:
    """Examples per second in turns: of one rank without ZeRO, of one rank, of two, and of two that exchange nothing."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        contestants = []
        for index, (own_stage, trainings, ranks) in enumerate(((0, 1, 1), (stage, 1, 1), (stage, 1, 2), (stage, 2, 1))):
            contestants.append(Contestant(Path(name) / str(index), own_stage, accumulation, trainings, ranks))
            ends.callback(contestants[-1].end)
            contestants[-1].steps()  # so that they start one after the other
        rounds = [[contestant.steps() for contestant in contestants] for _ in range(ROUNDS)]
    times = [map(statistics.median, zip(*own, strict=True)) for own in zip(*rounds, strict=True)]
    return [ROWS * STEPS / sum(steps) for steps in times]


def main() -> None:
    figures = []
    for stage, accumulation in product(STAGES, ACCUMULATIONS):
        plain, one, two, apart = speeds_of(stage, accumulation)
        case = f"zero{stage}_accumulation{accumulation}"
        print(f"{case}: {two:.1f} examples/s on 2 ranks, {one:.1f} on 1, {plain:.1f} on 1 without ZeRO, ", end="")
        print(f"{apart:.1f} on 2 that exchange nothing", flush=True)
        bar = BARS.get((stage, accumulation), BAR)
        figures.append(Figure(f"two_ranks/{case}", two / one, bar, at_least=True))
        figures.append(Figure(f"two_ranks/{case}/without_exchange", apart / one))
        if stage:
            figures.append(Figure(f"two_ranks/{case}/over_zero0", one / plain))
    report(*figures)


if __name__ == "__main__":
    main()
