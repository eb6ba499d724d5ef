"""How tests start the product's commands, which cases they run, and the words that most of them train on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
Done = subprocess.CompletedProcess[str]
T = TypeVar("T")

WORDS = {"fruit": "apple pear plum fig", "tool": "hammer saw drill file", "bird": "wren crow finch owl"}
"""The words of the labelled CSV task, by their label."""
EXHAUSTIVE = "DS_TRAINER_EXHAUSTIVE_TESTS"
"""The environment variable that `pytest --exhaustive` sets, for the drivers that tests start as well."""


def tag_of(word: str) -> str:
    """The word of a label is an entity of that kind."""
    return next((f"B-{kind}" for kind, words in WORDS.items() if word in words.split()), "O")


def exhaustive() -> bool:
    return EXHAUSTIVE in os.environ


def chosen(cases: Iterable[T], represents: Callable[[T], bool]) -> list[T]:
    """All cases with `--exhaustive`; otherwise those that represent the others."""
    return [case for case in cases if exhaustive() or represents(case)]


def run_deepspeed(ranks: int, script: str, *arguments: str, timeout: float = 420) -> Done:
    """Run a script on ranks that are started as DeepSpeed's launcher starts them, but forked; stderr is of all ranks.

    A rank that fails ends the others, as under the launcher.
    """
    from support.forked_ranks import warm_server

    return warm_server().run_to_its_end(ranks, [script, *arguments], timeout)


def run_script(script: str, *arguments: str, timeout: float = 300) -> Done:
    """`python SCRIPT ARGUMENTS` from the root, forked."""
    from support.forked_ranks import warm_server

    return warm_server().run_to_its_end(0, [script, *arguments], timeout)


def run_python(*arguments: str, timeout: float = 300) -> Done:
    """`python ARGUMENTS` from the root, in a process that has loaded nothing yet."""
    command, env = [sys.executable, *arguments], environment()
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def run_without_library(code: str, *arguments: str) -> Done:
    """Run Python code in a forked process that has forgotten this library and cannot import it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "alone.py")
        script.write_text(f"{_FORGET}\n{code}")
        return run_script(str(script), *arguments)


_FORGET = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "ds_trainer"]:
    del sys.modules[name]
sys.modules["ds_trainer"] = None
"""


def train(ranks: int, recipe: dict | Path, output: Path, *more: str, engine: str = "ds_configs/zero2.json") -> Done:
    """Run a recipe by the command; one that is a dict is written beside the output. On 0 ranks: without a launcher."""
    if isinstance(recipe, dict):
        file = output.with_name("recipe.json")
        file.write_text(json.dumps(recipe))
        recipe = file
    files = ["--deepspeed_config", engine, "--recipe", str(recipe), "--output_dir", str(output)]
    done = run_deepspeed(ranks, "launch/train.py", *files, *more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def read(path: Path):
    return json.loads(path.read_text())


def log_of(output: Path, phase: str, key: str = "train/loss") -> list[dict]:
    """The records of a phase that have this key."""
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["phase"] == phase and key in record]


def becomes_model(checkpoint: Path, expected: Path, target: Path) -> bool:
    """Whether a checkpoint is exported, by the command, as the files of a model folder, byte by byte, but its card."""
    from ds_trainer.cli.export import export_command

    export_command([str(checkpoint), "--output_dir", str(target)])
    found, wanted = ({path.name: path.read_bytes() for path in place.iterdir()} for place in (target, expected))
    report = json.loads(found.pop("export.json"))
    assert (report["folder"], report["checkpoint"]["step"]) == (str(checkpoint), int(checkpoint.name.split("-")[1]))
    assert found.pop("README.md") != wanted.pop("README.md")
    return found == wanted


def free_port() -> int:
    """A port that nobody uses now; what runs beside the tests mostly has DeepSpeed's default."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """The environment variables of a test's processes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the launcher looks for ninja there
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    inherited["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"  # for the drivers in tests/support
    # one thread: tiny models gain nothing from two, and two processes of two threads on 2 cores wait for each other
    return inherited | {"OMP_NUM_THREADS": "1", "PATH": path}
