"""Two ranks of one thread against one rank of two threads: optimizer steps per second under ZeRO 0, 2 and 3.

MiniLM's shape (BERT of 6 layers x 384, random weights), 64 examples of SST-2 a step (without ../shared: the embedded
docstrings), fp32, the engine files of `ds_configs/`, accumulation 1 and 4. Every contestant keeps its processes. They
take their steps in turns, the same `STEPS` batches each time, while the others wait for a line on their standard
input: `python tests/bench/two_ranks.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from figures import Figure, is_quick, report
from loop_overhead import ROOT, planned, record_of

from ds_trainer.engine import engine
from ds_trainer.loop import train_step
from ds_trainer.ranks import distributed
from ds_trainer.ranks.timing import seconds
from ds_trainer.trial import trial_batches

STAGES, ACCUMULATIONS = ((2,), (1,)) if is_quick() else ((0, 2, 3), (1, 4))
BARS = {(0, 1): 0.92, (2, 1): 0.85, (3, 1): 0.80}
"""Of two ranks over one, by ZeRO stage and accumulation."""
BAR = 0.95
"""Of two ranks over one with more accumulation, and of ZeRO 2 over ZeRO 0 on one rank."""
WORD = "seconds"
ROWS, STEPS, ROUNDS = (8, 1, 1) if is_quick() else (64, 4, 4)


class Contestant:
    """The processes of one engine file on so many ranks, which take steps when they are told to."""

    def __init__(self, folder: Path, stage: int, accumulation: int, ranks: int) -> None:
        self.folder = folder
        folder.mkdir()
        config = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
        config["gradient_accumulation_steps"] = accumulation
        (folder / "engine.json").write_text(json.dumps(config))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port()), "WORLD_SIZE": str(ranks)}
        place |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": str(1 if is_quick() else 2 // ranks)}
        command = [sys.executable, __file__, "--rank", str(folder), *(["--quick"] if is_quick() else [])]
        self.processes = [
            subprocess.Popen(
                command,
                env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=PIPE,
                stdout=PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=(folder / f"{rank}.log").open("w"),
                text=True,
            )
            for rank in range(ranks)
        ]

    def steps(self) -> list[float]:
        """Take the steps; return the seconds of each."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        first = self.processes[0].stdout or ()  # DeepSpeed writes there as well
        answer = next((line for line in first if line.startswith(WORD)), None)
        if answer is None:
            raise RuntimeError((self.folder / "0.log").read_text())
        return [float(value) for value in answer.removeprefix(WORD).split()]

    def end(self) -> None:
        for process in self.processes:
            process.communicate()


def serve_rank(folder: Path) -> None:
    """Be one rank of a contestant: take the steps at every line of standard input, until it is closed."""
    distributed.start()
    plan = planned(folder / "engine.json", folder, rows=ROWS)
    with record_of(plan) as record:
        record.open(0, 0)
        model, groups, objective = plan.prepare()
        ds_engine = engine.start_engine(model, groups, plan.engine_config, plan.base, plan.lr_factor)
        ds_engine.train()
        batches = trial_batches(plan.task.examples("train").lengths, ROWS, STEPS)[1:]

        def take(index: int) -> float:
            return seconds(lambda: train_step(objective, ds_engine, batches[index], record, 0), ds_engine.device)

        for _ in sys.stdin:
            print(WORD, *(take(index) for index in range(STEPS)), flush=True)
    distributed.leave(0)


def main() -> None:
    figures = []
    times: dict[tuple[int, int, int], list[list[float]]] = {}
    for accumulation in ACCUMULATIONS:
        with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
            group = {}
            for stage in STAGES:
                for ranks in (1, 2):
                    key = (stage, accumulation, ranks)
                    group[key] = Contestant(Path(name) / f"{stage}-{accumulation}-{ranks}", stage, accumulation, ranks)
                    ends.callback(group[key].end)
                    group[key].steps()  # which start one after the other
            for _ in range(ROUNDS):
                for key, contestant in group.items():
                    times.setdefault(key, []).append(contestant.steps())
    speeds = {
        key: ROWS * STEPS / sum(map(statistics.median, zip(*rounds, strict=True))) for key, rounds in times.items()
    }
    for (stage, accumulation, ranks), speed in speeds.items():
        print(f"ZeRO {stage}, accumulation {accumulation}, {ranks} rank(s): {speed:.1f} examples/s")
    for (stage, accumulation, ranks), speed in speeds.items():
        if ranks == 2:
            bar = BARS.get((stage, accumulation), BAR)
            value = speed / speeds[stage, accumulation, 1]
            figures.append(Figure(f"two_ranks_zero{stage}_accumulation{accumulation}", value, bar, at_least=True))
        elif stage and (0, accumulation, 1) in speeds:
            value = speed / speeds[0, accumulation, 1]
            figures.append(Figure(f"zero{stage}_over_zero0_accumulation{accumulation}", value, BAR, at_least=True))
    report(*figures)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        serve_rank(Path(sys.argv[sys.argv.index("--rank") + 1]))
    main()
