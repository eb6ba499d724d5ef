"""Provoke faults many times and count what became of the runs: the table of docs/faults.md.

    python benchmarks/faults.py [--kills 50]

Every run is 2 ranks of the training command under the real engine, pruned and distilled; "as if nothing had
happened" means the same records and, bit by bit, the same weights as those of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures import is_quick
from support.forked_ranks import ForkServer, warm_server
from support.killing import alike, arguments, finish, kill_often, trained, write
from support.launching import WORDS

EVERY, STEPS = 4, 8 if is_quick() else 60
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def recipe_in(folder: Path) -> Path:
    """Labelled sentences and a recipe for them."""
    rng = random.Random(0)
    for name, rows in (("train.csv", 240), ("validation.csv", 61)):
        kinds = rng.choices(list(WORDS), k=rows)
        texts = [
            " ".join(rng.choices(WORDS[kind].split(), k=2) + ["old", "new"][: rng.randint(0, 2)]) for kind in kinds
        ]
        lines = [f"{text},{kind}" for text, kind in zip(texts, kinds, strict=True)]
        (folder / name).write_text("\n".join(["text,kind", *lines]) + "\n")
    task: dict[str, Any] = {"name": "text", "data_dir": str(folder), "text_columns": ["text"], "label_column": "kind"}
    task |= {"train_file": "train.csv", "validation_file": "validation.csv", "max_seq_length": 24}
    phase = {"train_batch_size": 16, "learning_rate": 4e-3, "logging_steps": 1, "per_device_eval_batch_size": 8}
    techniques: dict[str, Any] = {"prune": {"final_threshold": 0.25, "initial_warmup": 0, "final_warmup": 0.3}}
    techniques["distill"] = {"teacher": "@finetune", "alpha_ce": 0.5, "alpha_distil": 0.5}
    phases = [
        {"name": "finetune", "max_steps": 4, **phase},
        {
            "name": "prune",
            "max_steps": STEPS,
            "save_total_limit": 3,
            "eval_steps": 20,
            **phase,
            "techniques": techniques,
        },
    ]
    model = {"config": BERT, "tokenizer": {"vocab_size": 128}}
    return write(folder, {"model": model, "task": task, "phases": phases, "report": False})


def killed(server: ForkServer, words: list[str], folder: Path, whole: Path, count: int) -> tuple[list[bool], int, int]:
    """The kills, the runs that were finished in spite of them, and how many of these as if nothing had happened."""
    rng, found, same, runs = random.Random(), list[bool](), 0, 0
    while len(found) < count:
        runs += 1
        output = folder / f"killed-{runs}"
        found += kill_often(server, output, words, count - len(found), rng)
        finish(server, output, words)
        same += alike(output, whole)
    return found, runs, same


def hit(
    server: ForkServer, words: list[str], output: Path, count: int, act: Callable[[list[int]], None]
) -> Iterator[list[int]]:
    """Start or resume the run and hit it at a random step, so many times: the ranks' exit codes each time."""
    rng = random.Random()
    for _ in range(count):
        run = server.run(2, output, *words, "--resume", "--timeout", "8")
        wanted = trained(output) + rng.randint(1, 4)
        if run.wait_until(lambda step=wanted: trained(output) >= step):
            act(run.pids)
        yield run.codes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Provoke faults and count what became of the runs.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--others", type=int, default=5, help="how often each of the other faults")
    parser.add_argument("--quick", action="store_true", help="one fault, once: shows that it works")
    flags = parser.parse_args()
    if flags.quick:
        flags.kills, flags.others = 0, 1
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder, begun, server = Path(place), time.monotonic(), warm_server()
        words = arguments(recipe_in(folder), EVERY, STEPS)
        whole = folder / "whole"
        finish(server, whole, words)
        kills, runs, same = killed(server, words, folder, whole, flags.kills)
        saving = sum(kills)
        rows.append(
            (
                "SIGKILL of all ranks at a random moment",
                len(kills),
                f"{saving} during a save; {same} of {runs} "
                "runs ended as if nothing had happened; none lost more than the steps since its last save",
            )
        )
        faults: dict[str, tuple[Callable[[list[int]], None], Callable[[list[int]], bool]]] = {
            "SIGKILL of one rank": (
                lambda pids: os.kill(random.choice(pids), signal.SIGKILL),
                lambda c: sorted(c) == [-9, 4],
            ),
            "SIGTERM, SIGINT or SIGUSR1 to one rank": (
                lambda pids: os.kill(
                    random.choice(pids), random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
                ),
                lambda c: c == [5, 5],
            ),
        }
        for name, (act, sound) in [*faults.items()][: 1 if flags.quick else None]:
            output = folder / name.replace(" ", "-")
            codes = list(hit(server, words, output, flags.others, act))
            finish(server, output, words)
            as_asked = sum(map(sound, codes))
            end = "as if nothing had happened" if alike(output, whole) else "OTHERWISE"
            rows.append((name, len(codes), f"{as_asked} ended with the documented codes; then the run ended {end}"))
        seconds = time.monotonic() - begun
    for row in rows:
        print(json.dumps(dict(zip(("fault", "times", "outcome"), row, strict=True))))
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
