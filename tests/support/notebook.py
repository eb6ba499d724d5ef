"""What a notebook does with the public API, in one process: `notebook.py RECIPE OUT` trains twice, scores and cuts.

Then it runs the cells of the notebook in `examples/`, with the recipe's model and task.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ds_trainer import evaluate, load_model, shrink, train


def main(recipe: str, out: Path) -> None:
    results = train(recipe, out / "first")
    content = json.loads(Path(recipe).read_text())
    again = train(content, out / "second", "--set", "phases.prune.shrink=false")
    scores = evaluate(out / "second/model", recipe=out / "second/recipe.json")
    by_step = evaluate(out / "second", "--all_checkpoints")
    report = shrink(out / "second/checkpoint-8", out / "cut")
    seen = {"results": results, "again": again, "scores": scores, "by_step": by_step, "report": report}
    seen["dry"] = train(recipe, out / "dry", "--dry_run")
    for name, folder in (("weights", "cut"), ("of_checkpoint", "second/checkpoint-8")):
        seen[name] = sum(parameter.numel() for parameter in load_model(out / folder).parameters())
    settings = {"OUT": str(out / "served"), "TASK": content["task"], "MODEL": content["model"], "EPOCHS": 1}
    served = run_cells(Path(__file__).parents[2] / "examples/from_model_to_served.ipynb", settings)
    seen["served"] = {name: served[name] for name in ("scores", "speed_ups", "answer")}
    (out / "seen.json").write_text(json.dumps(seen))


def run_cells(notebook: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the code of a notebook, with these settings in place of its first cell's; return what it has defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(notebook.read_text())["cells"]
    first, *others = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(first, names)
    assert settings.keys() < names.keys()
    names |= settings
    for source in others:
        exec(source, names)
    return names


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
