"""How much faster a student is than its teacher: both score SST-2's validation set, interleaved, 2 threads, fp32.

`python benchmarks/student_speed.py TEACHER STUDENT [DATA_DIR]`, two model folders of one run; the bar is 1.5 for half
the layers.
"""

from __future__ import annotations

import sys
import tempfile

from figures import SHARED, Figure, ratio, report, use_threads

from ds_trainer.ranks import distributed
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.registry import build_task


def main(teacher: str, student: str, data_dir: str = str(SHARED / "data")) -> None:
    use_threads(2)
    distributed.keep_freed_memory()
    scores, runs = {}, []
    with tempfile.TemporaryDirectory() as cache:
        for folder in (teacher, student):
            task = build_task(TextSpec(name="sst2", data_dir=data_dir), folder, cache)
            model = task.build_model(folder).eval()

            def run(folder=folder, task=task, model=model) -> None:
                scores[folder] = evaluate(lambda batch: model(**batch.inputs), task, batch_size=32).scores

            runs.append(run)
        value, teacher_s, student_s = ratio(*runs, rounds=7, warmup=1)
    examples = len(task.examples("validation"))
    print(f"teacher {scores[teacher]} {examples / teacher_s:,.0f} examples/s, ", end="")
    print(f"student {scores[student]} {examples / student_s:,.0f} examples/s")
    report(Figure("student_speed/sst2", value, 1.5, at_least=True))


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
