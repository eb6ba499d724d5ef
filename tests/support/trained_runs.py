"""Whole runs by the command, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

from support.launching import run_deepspeed

from ds_trainer.cli.export import export_command


def train(ranks: int, recipe: Path | str, output: Path, *more: str, engine: str = "ds_configs/zero2.json"):
    arguments = ["launch/train.py", "--deepspeed_config", engine, "--recipe", str(recipe), "--output_dir", str(output)]
    done = run_deepspeed(ranks, *arguments, *more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def read(path: Path):
    return json.loads(path.read_text())


def becomes_model(checkpoint: Path, expected: Path, target: Path) -> bool:
    """Whether a checkpoint is exported, by the command, as the files of a model folder, byte by byte, but its card."""
    export_command([str(checkpoint), "--output_dir", str(target)])
    found, wanted = ({path.name: path.read_bytes() for path in place.iterdir()} for place in (target, expected))
    report = json.loads(found.pop("export.json"))
    assert (report["folder"], report["checkpoint"]["step"]) == (str(checkpoint), int(checkpoint.name.split("-")[1]))
    assert found.pop("README.md") != wanted.pop("README.md")
    return found == wanted
