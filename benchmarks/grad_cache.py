"""A contrastive step in micro-batches, whose values are cached (GradCache), beside the same step in one batch.

BERT of 6 layers x 384 (random weights, dropout on), 64 pairs of 32 tokens a step, fp32, 2 threads, one rank: 8
micro-batches of 8 pairs over one batch of 64, in turns in one process. All micro-batches but the first have a second
forward. The memory is what a forward keeps for its backward, over that of a step of 8 pairs alone:
`python benchmarks/grad_cache.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from figures import ROOT, Figure, is_quick, ratio, report, use_threads
from loop_overhead import BERT, Loop, plan_of
from torch import Tensor

from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import create_folder, train_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.report.log import RunLog
from ds_trainer.tasks.registry import training_texts

PAIRS, PARTS = (8, 2) if is_quick() else (64, 8)
ROUNDS = 1 if is_quick() else 12


def main() -> None:
    use_threads(2)
    distributed.start()
    distributed.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name, StopRequests() as stop:
        folder = Path(name)
        write_pairs(folder)
        whole, parts, small = (
            loop(folder, stop, *sizes) for sizes in ((PAIRS, 1), (PAIRS, PARTS), (PAIRS // PARTS, 1))
        )
        slower, seconds, of_whole = ratio(
            lambda: parts.between_records(1), lambda: whole.between_records(1), rounds=ROUNDS
        )
        print(f"{PAIRS} pairs: {of_whole:.3f} s in one batch, {seconds:.3f} s in {PARTS}")
        kept = [kept_by(each) for each in (parts, small)]
    distributed.stop()
    report(Figure("grad_cache/time", slower, 1.25), Figure("grad_cache/memory", kept[0] / kept[1], 1.1))


def write_pairs(folder: Path) -> None:
    """Write parts of docstrings as pairs, which are all cut to one length, and a model with a tokenizer of them."""
    words = [text.split() for text in training_texts(TextSpec())]
    halves = [(" ".join(each[:20]), " ".join(each[20:40])) for each in words if len(each) >= 40]
    rows = [{"one": one, "two": two, "score": 1.0} for one, two in halves]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = train_tokenizer([text for both in halves for text in both], vocab_size=256, lowercase=True)
    create_folder(BERT, tokenizer, folder / "model", seed=0)


def loop(folder: Path, stop: StopRequests, pairs: int, parts: int) -> Loop:
    """Start the training of a contrastive phase whose steps of so many pairs are cut into so many micro-batches."""
    output, engine_file = folder / f"{pairs}_{parts}", folder / f"{pairs}_{parts}.json"
    source = {"file": "pairs.jsonl", "text_columns": ["one", "two"]}
    task: dict[str, Any] = {"name": "embedding", "data_dir": str(folder), "max_seq_length": 32}
    task |= {"train": [source], "validation": [source | {"score_column": "score"}]}
    config = json.loads((ROOT / "ds_configs/zero0.json").read_text())
    write_json(engine_file, config | {"train_batch_size": pairs, "gradient_accumulation_steps": parts})
    phase = {"max_steps": 1000, "learning_rate": 5e-5, "logging_steps": 1000}
    plan = plan_of({"task": task, "phases": [phase]}, engine_file, output, str(folder / "model"))
    log = RunLog(output, "train", 1000, {"task": 1.0}, tensorboard=False, training_examples=PAIRS)
    return Loop(plan, log, stop)


def kept_by(training: Loop) -> int:
    """Return the most bytes that a micro-batch of a step keeps for its backward, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in training.engine.module.parameters()}
    most = 0

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal most
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        most = max(most, sum(kept.values()))

    forward = training.engine.module.forward

    def counting(*words: Any, **inputs: Any) -> Any:
        with counted():
            return forward(*words, **inputs)

    training.engine.module.forward = counting
    training.between_records(1)
    training.engine.module.forward = forward
    return most


if __name__ == "__main__":
    main()
