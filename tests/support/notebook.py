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
    report = shrink(out / "second/model", out / "cut")
    weights = sum(parameter.numel() for parameter in load_model(out / "cut").parameters())
    seen = {"results": results, "again": again, "scores": scores, "report": report, "weights": weights}
    (out / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
