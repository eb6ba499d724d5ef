"""What happens to runs of days, provoked for real: nothing that was saved is lost, and what ended a run is told."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.killing import (
    ENDLESS,
    alike,
    finish,
    kill_often,
    records_of,
    resumed_at,
    states,
    status_of,
    trained,
    without_rates,
    write,
)
from support.launching import chosen, exhaustive

from ds_trainer.engine.checkpoint import Checkpoints, step_of
from ds_trainer.files.checkpoint_files import MARKER, Writes, checked_sums

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def output(tmp_path, whole) -> Path:
    """A run after its first phase, from which every fault starts."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoint-*", "model", "eval", "log.jsonl"))
    shutil.copytree(whole / "finetune", folder / "finetune", dirs_exist_ok=True)
    for name in ("all_results.json", "train_results.json", "eval_results.json"):
        results = json.loads((whole / name).read_text())
        (folder / name).write_text(json.dumps({"finetune": results["finetune"]}))
    lines = (whole / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join(line for line in lines if json.loads(line)["phase"] == "finetune"))
    return folder


def test_killed_at_any_moment_it_goes_on_from_the_last_save(server, words, whole, tmp_path):
    """SIGKILL to all ranks at random moments, and while saving: each time the next run works and resumes at the newest
    checkpoint, and what comes out is what comes out of a run that nobody killed, bit by bit."""
    rng, kills, number, enough = random.Random(5), [], 0, 7 if exhaustive() else 2
    while len(kills) < enough or not any(kills):
        number += 1
        assert number < 20, kills
        folder = tmp_path / str(number)
        kills += kill_often(server, folder, words, max(1, enough - len(kills)), rng)
        finish(server, folder, words)
        assert alike(folder, whole)


@pytest.mark.parametrize("number", chosen(STOPPING, lambda number: number == signal.SIGTERM))
def test_a_signal_to_one_rank_stops_all_after_the_step_and_saves(server, words, whole, output, number):
    """Exit code 5 on both, the step is saved though no save was due, it is said; --resume ends as if uninterrupted."""
    run = server.run(2, output, *words, "--resume", "--set", "phases.prune.save_steps=0")
    run.wait_until(lambda: trained(output) >= 6)
    os.kill(run.pids[number == signal.SIGTERM], number)
    assert run.codes() == [5, 5]
    status = status_of(output)
    assert (status["state"], status["exit_code"]) == ("stopped", 5)
    assert number.name in status["message"]
    newest = Checkpoints(output).all()[-1]
    assert f"\nstopped: {newest} is saved; --resume goes on from it, in phase prune\n" in run.text
    again = finish(server, output, words)
    assert resumed_at(again) == step_of(newest)
    assert alike(output, whole)


def test_a_second_signal_ends_at_once(server, words, output):
    """Where the step does not end, since another rank stands still: 128 + the signal's number."""
    run = server.run(2, output, *words, "--resume", *ENDLESS)
    run.wait_until(lambda: trained(output) >= 3)
    os.kill(run.pids[1], signal.SIGSTOP)
    os.kill(run.pids[0], signal.SIGTERM)
    run.wait_until(lambda: "rank 0: SIGTERM: stopping" in run.text)
    at = time.monotonic()
    run.wait_until(lambda: time.monotonic() > at + 2.5)  # sooner it is the same request, sent on by a launcher
    os.kill(run.pids[0], signal.SIGTERM)
    os.kill(run.pids[1], signal.SIGKILL)
    assert run.codes() == [128 + signal.SIGTERM, -signal.SIGKILL]


RAISES = """
from ds_trainer.tasks.text.text_task import TextTask
collate, calls = TextTask.collate, []
def failing(*args, **kwargs):
    calls.append(0)
    if len(calls) == 5:
        {what}
    return collate(*args, **kwargs)
TextTask.collate = failing
"""


LOSES_STEP_7 = """
from ds_trainer.run import loop
from ds_trainer.tasks.text.text_task import TextTask
loop.SETTLE_EVERY = 10
taken, loss, train_step = [], TextTask.loss, loop.train_step
def watched(*args):
    taken.append(train_step(*args))
    print(f"took step {taken[-1]}", flush=True)
    return taken[-1]
def spoilt(self, out, batch):
    return loss(self, out, batch) * (float("nan") if taken and taken[-1] == 6 else 1.0)
loop.train_step, TextTask.loss = watched, spoilt
"""


@pytest.mark.parametrize(
    ("stage", "more", "last"),
    [
        (0, ["techniques.prune=null"], 10),
        *((stage, [], 7) for stage in chosen((0, 2, 3), lambda stage: stage == 2)),
    ],
)
def test_a_loss_that_is_not_finite_is_told_without_a_record(server, words, output, stage, more, last):
    """Within the step where the engine skips it, or before the next where scores show it; else within a bounded number
    of steps: exit code 3, and its step."""
    silent = [
        word for field in ("logging_steps=0", "save_steps=0", *more) for word in ("--set", f"phases.prune.{field}")
    ]
    sabotage = {1: LOSES_STEP_7, 0: LOSES_STEP_7.replace("nan", "1")}
    engine = f"ds_configs/zero{stage}.json"
    run = server.run(2, output, *words, *silent, "--resume", engine=engine, sabotage=sabotage)
    assert run.codes() == [3, 3], run.text[-3000:]
    assert "error: prune: the loss of step 7 is not finite: the term task is nan on rank 1" in run.text
    assert run.text.count("took step ") == 2 * last


@pytest.mark.parametrize(("lost", "raises"), [(0, False), (0, True), (1, True)])
def test_a_lost_rank_is_named_by_the_other(server, words, output, lost, raises):
    """The other ends with 4 and names the rank, whether it was killed or raised; so does the status file.

    A rank that raises ends with 1 and its traceback, and rank 0 tells the cause, its own or the other's.
    """
    fails = RAISES.format(what="raise KeyError('of the test')")
    run = server.run(2, output, *words, "--resume", *ENDLESS, sabotage={lost: fails} if raises else None)
    if not raises:
        run.wait_until(lambda: trained(output) >= 5)
        os.kill(run.pids[lost], signal.SIGKILL)
    codes = run.codes()
    assert (codes[lost], codes[1 - lost]) == (1 if raises else -signal.SIGKILL, 4)
    assert ("Traceback" in run.text) == raises
    named = f"error: rank {lost} (host " in run.text
    assert named == (not raises or lost == 1)
    said = "failed: KeyError: 'of the test'" if raises else f"process {run.pids[lost]}) is gone: it was killed"
    assert (said in run.text) == named
    assert "\nfailed: " in run.text
    assert "--resume goes on from it" in run.text
    code = 1 if raises and lost == 0 else 4
    assert (status_of(output)["state"], status_of(output)["exit_code"]) == ("failed", code)


ASKS_FOR_TOO_MUCH = {
    "training": """
import torch
from transformers import BertModel
forward, calls = BertModel.forward, []
def hungry(self, *args, **kwargs):
    calls.extend([0] * self.training)  # a teacher never is
    if len(calls) == 5:
        torch.empty(10**15)
    return forward(self, *args, **kwargs)
BertModel.forward = hungry
""",
    "an evaluation": """
import torch
from ds_trainer.tasks.text.text_task import TextTask
TextTask.answers = lambda *_: torch.empty(10**15)
""",
}
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes"


SOON = "\nfrom ds_trainer.ranks import watching; watching._HUNG = 1.0"
"""A rank that the others have given up ends itself sooner."""
HANGS = RAISES.format(what="import time; time.sleep(10_000)") + SOON


@pytest.mark.parametrize(
    ("where", "ranks", "others"), [("training", [0, 1], ""), ("training", [0], HANGS), ("an evaluation", [1], "")]
)
def test_out_of_memory_is_one_message_of_one_rank(server, words, output, where, ranks, others):
    """The allocator's own error on both ranks at once, or on one: all end with 6, and the only message says which rank,
    where, and what to change; status.json has it.

    A rank that waits for one without memory ends without a word, also where no error wakes it, as with NCCL.
    """
    sabotage = {rank: ASKS_FOR_TOO_MUCH[where] if rank in ranks else others for rank in (0, 1)}
    run = server.run(2, output, *words, "--resume", sabotage=sabotage)
    assert run.codes() == [6, 6], run.text[-3000:]
    assert "Traceback" not in run.text
    assert "hangs" not in run.text
    (message,) = [line for line in run.text.splitlines() if line.startswith("error:") or "ran out of memory" in line]
    who = rf"error: rank [{min(ranks)}-{max(ranks)}] \(host .+, process \d+\)"
    assert re.match(rf"{who} ran out of memory in {where}: ", message)
    assert OUT_OF_MEMORY in message
    step, field = (4, "train_batch_size") if where == "training" else (10, "eval_batch_size")
    assert f"That was after step {step} of phase prune. Lower per_device_{field} " in message
    assert re.search(r"\nfailed: .*checkpoint-\d+ is saved; --resume goes on from it, in phase prune\n", run.text)
    status = status_of(output)
    assert (status["state"], status["exit_code"], OUT_OF_MEMORY in status["message"]) == ("failed", 6, True)


def test_a_rank_that_hangs_is_found_out(server, words, output):
    """After --timeout seconds the waiting rank names the hanging one and where it is; that one ends too, by itself."""
    run = server.run(2, output, *words, "--resume", "--timeout", "4", sabotage={1: HANGS})
    assert run.codes() == [4, 4]
    assert "error: rank 1 (host " in run.text
    assert "hangs, in " in run.text
    assert "failing (<string>, line " in run.text


def test_a_rank_that_stands_still_is_found_out(server, words, output):
    """Stopped by the system, it says nothing and is named all the same; continued, it finds nobody and ends."""
    run = server.run(2, output, *words, "--resume", "--timeout", "4", *ENDLESS)
    run.wait_until(lambda: trained(output) >= 2)
    os.kill(run.pids[1], signal.SIGSTOP)
    run.wait_until(lambda: "does not answer: it is stopped" in run.text)
    os.kill(run.pids[1], signal.SIGCONT)
    assert run.codes() == [4, 4]


def test_ranks_that_do_not_come_are_told(server, words, output):
    """One of two ranks alone waits for --timeout seconds, and says for whom."""
    missing = "import os; os.environ.update(RANK='0', WORLD_SIZE='2')"
    run = server.run(1, output, *words, "--resume", "--timeout", "1", sabotage={0: missing})
    assert run.codes() == [4]
    assert "the 2 ranks have not met at 127.0.0.1:" in run.text


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no right to mount: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_no_more(server, words, whole, output, small_disk):
    """A save that does not fit is told and given up; the one before stays whole; training goes on, and saves again once
    there is room."""
    place = small_disk / "out"
    shutil.copytree(output, place)
    size = sum(file.stat().st_size for file in Checkpoints(whole).all()[-1].rglob("*"))
    ballast = place.parent / "ballast"
    ballast.write_bytes(b"0" * (shutil.disk_usage(place).free - int(1.6 * size)))  # room for one, and not for two
    run = server.run(2, place, *words, "--resume", "--set", "phases.prune.save_total_limit=1")
    assert run.wait_until(lambda: "could not be written" in run.text)
    assert Checkpoints(place).newest() is not None
    ballast.unlink()
    assert run.codes() == [0, 0], run.text[-3000:]
    assert "No space left on device" in run.text
    assert alike(place, whole)


DAMAGES = {
    "cut": lambda place: os.truncate(states(place), states(place).stat().st_size // 2),
    "changed": lambda place: states(place).write_bytes(b"x" + states(place).read_bytes()[1:]),
    "gone": lambda place: states(place).unlink(),
    "no list": lambda place: (place / MARKER).write_text('{"files": [1]}'),
    "another step in the list": lambda place: (place / MARKER).write_text(
        (place / MARKER).read_text().replace('"examples": ', '"examples": 1')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path, damage, caplog):
    """Cut, changed in one bit, or without one of its files: the one before is used, and it is said which and why."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    before, newest = Checkpoints(folder).all()[-2:]
    DAMAGES[damage](newest)
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    found = Checkpoints(folder, keep=1).newest()
    assert found is not None
    assert found.path == before
    Checkpoints(folder, keep=1).drop_oldest()
    assert Checkpoints(folder).all() == [before], "the last whole one stays, whatever is damaged"
    assert (folder / f"damaged-{step_of(newest)}").is_dir()
    with pytest.raises(ValueError, match=r"is damaged .* the run is left as it was"):
        Checkpoints(again).named(again / newest.name)
    assert newest.name in {path.name for path in again.iterdir()}


def test_two_runs_do_not_share_a_folder(server, words, output):
    """A second run waits for the first to end its save, and then takes over: both write whole files only."""
    first = server.run(2, output, *words, "--resume", *ENDLESS)
    first.wait_until(lambda: trained(output) >= 2)
    second = server.run(2, output, *words, "--resume", *ENDLESS)
    second.wait_until(lambda: "is writing to" in second.text)
    os.kill(first.pids[0], signal.SIGTERM)
    assert first.codes() == [5, 5]
    second.wait_until(lambda: resumed_at(second) > 0)
    os.kill(second.pids[0], signal.SIGTERM)
    assert second.codes() == [5, 5], second.text[-3000:]


CHAIN = {(2, "zero2"): 4, (1, "zero3"): 8, (2, "zero3"): 12, (2, "zero0"): 16}
"""Ranks and ZeRO stage, and the step at which they are stopped."""


def test_other_ranks_and_another_stage_go_on_with_the_same_examples(server, words, tmp_path):
    """2 ranks, 1, 2, 2, and ZeRO 2, 3, 3, 0 in one run: its losses are those of 2 ranks under ZeRO 2 to 1e-5."""
    *_, end = CHAIN.values()
    calm = (f"phases.prune.max_steps={end}", "phases.prune.save_steps=0", "phases.prune.eval_steps=null")
    calm += tuple(f"model.config.{name}_dropout_prob=0" for name in ("hidden", "attention_probs"))
    words = [*words, *(word for setting in calm for word in ("--set", setting))]
    folder, straight = tmp_path / "chain", tmp_path / "straight"
    finish(server, straight, words)
    for (ranks, stage), until in CHAIN.items():
        run = server.run(ranks, folder, *words, "--resume", engine=f"ds_configs/{stage}.json")
        if until < end:
            run.wait_until(lambda wanted=until: trained(folder) >= wanted)
            os.kill(run.pids[-1], signal.SIGUSR1)
        assert run.codes() == [0 if until == end else 5] * ranks, run.text[-3000:]
        assert ("it is converted" in run.text) == (stage != "zero2")
    losses = [
        {r["step"]: r["train/loss"] for r in records_of(out / "log.jsonl") if "train/loss" in r}
        for out in (folder, straight)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_patience_ends_a_phase_where_it_ends_a_run_that_is_stopped_on_the_way(server, words, tmp_path):
    """At a rate of 0 no evaluation is better than the first: the third after it ends the phase, which log and results
    say, and the report's totals are those of all steps until then. The best checkpoint is exported."""
    asked = {"max_steps": 300, "eval_steps": 5, "save_steps": 5, "logging_steps": 3, "learning_rate": 0.0}
    asked |= {"metric_for_best_model": "accuracy", "early_stopping_patience": 3, "load_best_model_at_end": True}
    sets = [word for name, value in asked.items() for word in ("--set", f"phases.0.{name}={json.dumps(value)}")]
    recipe = json.loads(Path(words[1]).read_text())
    file = write(tmp_path, recipe | {"phases": [recipe["phases"][0] | {"name": "prune"}]})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run = server.run(2, whole, "--recipe", str(file), *sets)
    assert run.codes() == [0, 0], run.text[-3000:]
    assert "prune: ends early at step 20 of 300: accuracy was best 3 evaluations before" in run.text
    run = server.run(2, stopped, "--recipe", str(file), *sets, "--resume")
    run.wait_until(lambda: trained(stopped) >= 7)
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.codes() == [5, 5], run.text[-3000:]
    run = server.run(2, stopped, "--recipe", str(file), *sets, "--resume")
    assert run.codes() == [0, 0], run.text[-3000:]
    records = [[without_rates(record) for record in records_of(folder / "log.jsonl")] for folder in (whole, stopped)]
    assert records[0] == records[1]
    (end,) = [record["step"] for record in records[0] if "train/stopped_early" in record]
    assert end == 20
    for results in (json.loads((folder / "all_results.json").read_text())["prune"] for folder in (whole, stopped)):
        assert (results["train"]["steps"], results["train"]["stopped_early_at"]) == (5, 20)
        assert results["train"]["epochs"] == pytest.approx(20 * 16 / 240)


def test_another_batch_size_takes_up_the_examples_where_they_were_left(server, words, output):
    """An epoch of 240 examples in batches of 16, then of 48, resumed twice: the steps are those that are left."""
    epoch = ("phases.prune.max_steps=null", "phases.prune.num_train_epochs=1")
    larger = ("phases.prune.train_batch_size=48", "phases.prune.weight_decay=0.05")
    stops, texts = [], []
    for settings, until in ((epoch, 2), ((*epoch, *larger), 4), ((*epoch, *larger), None)):
        run = server.run(2, output, *words, *(word for each in settings for word in ("--set", each)), "--resume")
        if until:
            run.wait_until(lambda step=until: trained(output) >= step)
            os.kill(run.pids[0], signal.SIGTERM)
        assert run.codes() == [5 if until else 0] * 2, run.text[-3000:]
        stops.append(step_of(Checkpoints(output).all()[-1]))
        texts.append(run.text)
    steps = json.loads((output / "all_results.json").read_text())["prune"]["train"]["steps"]
    assert steps == stops[0] + (240 - 16 * stops[0]) // 48
    assert "train_batch_size was 16 up to step" in texts[1]
    changed = "weight_decay: null before, 0.05 now"
    assert [changed in text for text in texts] == [False, True, False]
    assert "prune: the recipe differs from the checkpoint's, and wins: " in texts[1]


def test_a_file_that_not_all_hosts_see_is_no_part_of_a_checkpoint(tmp_path):
    """What a rank has written and another does not find is told, with what to do."""
    writes = Writes()
    writes.paths.append(tmp_path / "of_another_host.pt")
    with pytest.raises(OSError, match="all hosts must share the output folder"):
        checked_sums(tmp_path, writes)
