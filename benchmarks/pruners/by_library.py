"""This library's cut, by the spec of the request; it draws the same calibration examples by the seed.

By itself a reconstruction reads other training texts than the cut, and more. With "same examples" it reads those of
the cut alone.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from ds_trainer.cuts import cut as cutting
from ds_trainer.cuts.reconstruction import reconstruction_set
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.tasks.registry import build_task


def cut(request: dict[str, Any]) -> Any:
    task, seed = build_task(parse_task(request["task"]), request["dense"]), request["seed"]
    fields, draw = request["spec"] | {"keep": request["share"]}, reconstruction_set
    if fields.get("reconstruct") == "same examples":
        tokens = fields["calibration_examples"] * float(task.examples("train").lengths.mean())
        fields["reconstruct"] = {"tokens": round(tokens)}
        draw = lambda task, spec, seed: reconstruction_set(task, spec, seed=request["seed"])  # noqa: E731
    with mock.patch.object(cutting, "reconstruction_set", draw):
        return cutting.cut_of(task, request["dense"], CutSpec(**fields), seed).model.state_dict()
