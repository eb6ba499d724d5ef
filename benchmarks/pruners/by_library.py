"""This library's cut, by the spec of the request; it draws the same calibration examples by the seed.

By itself a reconstruction reads more training texts than the cut. With "same examples" it reads those of the cut alone.
"""

from __future__ import annotations

from typing import Any

from ds_trainer.cuts.cut import cut_of
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.tasks.registry import build_task


def cut(request: dict[str, Any]) -> Any:
    task = build_task(parse_task(request["task"]), request["dense"])
    fields = request["spec"] | {"keep": request["share"]}
    if fields.get("reconstruct") == "same examples":
        tokens = fields["calibration_examples"] * float(task.examples("train").lengths.mean())
        fields["reconstruct"] = {"tokens": round(tokens)}
    return cut_of(task, request["dense"], CutSpec(**fields), request["seed"]).model.state_dict()
