"""What a notebook does with the public API, in one process: `notebook.py RECIPE OUT` trains twice, scores and cuts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ds_trainer import evaluate, load_model, shrink, train


def main(recipe: str, out: Path) -> None:
    results = train(recipe, out / "first")
    content = json.loads(Path(recipe).read_text())
    again = train(content, out / "second", "--set", "phases.prune.shrink=false")
    scores = evaluate(out / "second/model", "--recipe", str(out / "second/recipe.json"))
    by_step = evaluate(out / "second", "--all_checkpoints")
    report = shrink(out / "second/checkpoint-8", out / "cut")
    seen = {"results": results, "again": again, "scores": scores, "by_step": by_step, "report": report}
    seen["dry"] = train(recipe, out / "dry", "--dry_run")
    for name, folder in (("weights", "cut"), ("of_checkpoint", "second/checkpoint-8")):
        seen[name] = sum(parameter.numel() for parameter in load_model(out / folder).parameters())
    (out / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
