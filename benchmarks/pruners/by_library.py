"""This library's cut, by the spec of the request; it draws the same calibration examples by the seed."""

from __future__ import annotations

from typing import Any

from ds_trainer.cuts.cut import cut_of
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.tasks.registry import build_task


def cut(request: dict[str, Any]) -> Any:
    task = build_task(parse_task(request["task"]), request["dense"])
    spec = CutSpec(keep=request["share"], **request["spec"])
    return cut_of(task, request["dense"], spec, request["seed"]).model.state_dict()
