"""What distilling from a cached teacher costs: an optimizer step of it over one of plain fine-tuning.

BERT of 6 layers x 384, batch 32, fp32, 2 threads, one rank, ZeRO 0, both through the project's own loop, on SST-2
(where it is there, else the embedded docstrings): `python benchmarks/teacher_cache.py`. Filling the cache, one forward
of the teacher an example, is not in the ratio: it is paid once, not every epoch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from figures import ROOT, Figure, ratio, report, use_threads
from loop_overhead import BERT, LOG_EVERY, planned, started
from transformers import AutoModelForSequenceClassification, BertConfig

from ds_trainer.ranks import distributed


def make_teacher(plan, folder: Path) -> str:
    """A classifier of the task's classes with random weights: what it says does not matter to the clock."""
    names = dict(enumerate(plan.task.label_names))
    fields = {name: value for name, value in BERT.items() if name != "model_type"}
    config = BertConfig(vocab_size=len(plan.task.tokenizer), id2label=names, **fields)
    config.label2id = {name: index for index, name in names.items()}
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    plan.task.tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    distributed.start_logging()
    distributed.start()
    use_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder, engine_file = Path(name), ROOT / "ds_configs/zero0.json"
        (folder / "plain").mkdir()
        (folder / "taught").mkdir()
        plain = planned(engine_file, folder / "plain")
        distill = {"teacher": make_teacher(plain, folder / "teacher"), "cache_teacher": True}
        taught = planned(engine_file, folder / "taught", distill | {"alpha_ce": 0.5, "alpha_distil": 0.5})
        with started(taught) as one, started(plain) as two:
            value, seconds, other = ratio(one.steps, two.steps, rounds=16, warmup=2)
    print(f"taught {seconds / LOG_EVERY:.4f} s, plain {other / LOG_EVERY:.4f} s a step")
    report(Figure("teacher_cache/step", value, 1.05))


if __name__ == "__main__":
    main()
