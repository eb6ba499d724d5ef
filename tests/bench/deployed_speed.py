"""What is deployed against the dense model: a small model's int8 file in onnxruntime, the dense one in torch, in fp32.

`python tests/bench/deployed_speed.py DENSE SMALL [DATA_DIR]`, two folders of SST-2 models; SMALL holds the file that
`launch/export.py --onnx --quantize int8` writes. Both answer the same texts of the validation set as each tokenises
them, interleaved, with two threads. Bars: five times as fast at batch 1 and 32, a fifth of the bytes of the dense
weights in fp32, 1.0 point lost.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import SHARED, Figure, is_quick, ratio, report, use_threads

from ds_trainer.config.recipe import TextSpec
from ds_trainer.deploy import onnx_file
from ds_trainer.deploy.export_files import INT8_FILE
from ds_trainer.ranks import distributed
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Batch

EXAMPLES = {1: 8, 32: 32} if is_quick() else {1: 64, 32: 512}
"""How many texts each side answers in a round, by batch size."""


def main(dense: str, small: str, data_dir: str = str(SHARED / "data" / "glue" / "SST-2")) -> None:
    use_threads(2)
    distributed.keep_freed_memory()
    int8 = Path(small) / INT8_FILE
    with tempfile.TemporaryDirectory() as cache:
        tasks = [build_task(TextSpec(name="sst2", data_dir=data_dir), folder, cache) for folder in (dense, small)]
        model: Any = tasks[0].build_model(dense).eval()
        predict = onnx_file.predictor(onnx_file.session(int8, torch.get_num_threads()))
        sides = [lambda batch: model(**batch.inputs), predict]
        scores = [evaluate(side, task, 32).scores["accuracy"] for side, task in zip(sides, tasks, strict=True)]
        weights = sum(weight.nbytes for weight in model.parameters())
        figures = [
            Figure("deployed_speed/bytes", int8.stat().st_size / weights, 0.2),
            Figure("deployed_speed/points_lost", 100 * (scores[0] - scores[1]), 1.0),
        ]
        for size in EXAMPLES:
            first, second = (run(side, task, size) for side, task in zip(sides, tasks, strict=True))
            value, dense_s, small_s = ratio(first, second, rounds=7, warmup=1)
            texts = EXAMPLES[size]
            print(f"batch {size}: {1e3 * dense_s / texts:.2f} ms a text dense, {1e3 * small_s / texts:.2f} ms deployed")
            figures.append(Figure(f"deployed_speed/batch_{size}", value, 5.0, at_least=True))
    report(*figures)


def run(side: Callable[[Batch], Any], task: Any, size: int) -> Callable[[], None]:
    """Return a function that answers some of the validation set in batches."""
    examples = task.examples("validation")
    chosen = spread(len(examples), min(len(examples), EXAMPLES[size]))
    batches = [task.collate(examples, chosen[start : start + size]) for start in range(0, len(chosen), size)]

    def answer() -> None:
        with torch.inference_mode():
            for batch in batches:
                side(batch)

    return answer


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
