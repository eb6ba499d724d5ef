"""What the top-64 cache of a teacher costs, on disk and in a step, and how far its loss is from the full one.

A decoder (Llama, 4 layers x 256, vocabulary 32,000) is trained on a part of WikiText-2's validation file (without
../shared: of this repository's documents) until it knows this text well, so that its probabilities are as peaked as a
good teacher's. A student of 12 layers x 768 and random weights then takes steps of the project's own loop, by its cache
(half CLM loss, half KL at temperature 1) and plain, in turn: 4 x 128 tokens, fp32, 2 threads, one rank, ZeRO 0.

Errors are those for the student at the end of these steps, over 256 positions, against the KL over the whole
vocabulary: the share of the value that is missing, which is never negative, and the norm of the difference of the
gradients by the student's logits over the norm of the full one. `python benchmarks/top_k_cache.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import ROOT, SHARED, Figure, bert_shape, is_quick, ratio, report, use_threads
from loop_overhead import LOG_EVERY, plan_of, started

from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.run.phase import PhasePlan
from ds_trainer.tasks.losses import TopK, divergence
from ds_trainer.tasks.task import Batch

VOCABULARY, ROWS, K = (1000, 2, 64) if is_quick() else (32_000, 4, 64)
TEACHER_STEPS = LOG_EVERY if is_quick() else 500
KEPT = (16, 64, 256)
LLAMA = {"model_type": "llama", "vocab_size": VOCABULARY}
POSITIONS = 256


def make_text(folder: Path) -> list[str]:
    files = [SHARED / "data/wikitext-2/valid.txt"]
    if not SHARED.is_dir() or is_quick():
        files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text() for file in files)
    (folder / "text.txt").write_text(text)
    return text.splitlines()


def plan(folder: Path, source: str, rate: float, distill: dict[str, Any] | None = None) -> PhasePlan:
    """CLM on the first 20,000 tokens of the text, from the model folder `source`."""
    files = {"train_file": "text.txt", "validation_file": "text.txt", "data_dir": str(folder), "line_by_line": False}
    phase: dict[str, Any] = {"max_steps": 10_000, "warmup_steps": 20, "train_batch_size": ROWS, "learning_rate": rate}
    phase |= {"logging_steps": LOG_EVERY, "techniques": {"distill": distill} if distill else {}}
    words = {"task": {"name": "clm", "max_train_samples": 16 if is_quick() else 160} | files, "phases": [phase]}
    out = folder / ("taught" if distill else Path(source).name)
    out.mkdir(exist_ok=True)
    return plan_of(words, ROOT / "ds_configs/zero0.json", out, source)


def make_teacher(folder: Path, tokenizer: Any) -> Any:
    """Train a decoder and save it; return it with its task."""
    shape = bert_shape(256, layers=4, heads=4) | {"intermediate_size": 1024}
    distributed.on_main(partial(create_folder, LLAMA | shape, tokenizer, folder / "untrained", seed=1))
    with started(plan(folder, str(folder / "untrained"), 2e-3)) as loop:
        for _ in range(TEACHER_STEPS // LOG_EVERY):
            loop.steps()
        save_folder(loop.engine.module, tokenizer, folder / "teacher")


def errors(student: Any, teacher: Any, batch: Batch) -> Iterator[Figure]:
    """The error of the loss for each k, and on the screen what the teacher is sure of."""
    with torch.no_grad():
        ours, theirs = (model(**batch.inputs).logits[0][:POSITIONS].float() for model in (student, teacher))
    probabilities = theirs.softmax(-1)
    print(f"likeliest token {probabilities.amax(-1).mean():.2f}, entropy {entropy(probabilities):.2f} nats", flush=True)

    def loss(target: torch.Tensor | TopK) -> tuple[float, torch.Tensor]:
        student = ours.clone().requires_grad_()
        value = divergence(student, target, 1.0)
        (gradient,) = torch.autograd.grad(value, student)
        return float(value.detach()), gradient

    full, expected = loss(theirs.clone())
    print(f"KL of the student {full:.3f}")
    for k in KEPT:
        kept = TopK.of(theirs, k, 1.0)
        value, gradient = loss(kept)
        print(f"{k} tokens have a probability of {1 - kept.log_probs[:, -1].exp().mean():.4f}")
        yield Figure(f"top_k_cache/missing_value/{k}", 1 - value / full)
        yield Figure(f"top_k_cache/gradient_error/{k}", float((gradient - expected).norm() / expected.norm()))


def entropy(probabilities: torch.Tensor) -> float:
    return float(torch.special.entr(probabilities).sum(-1).mean())


def main() -> None:
    distributed.start_logging()
    distributed.start()
    use_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train_tokenizer(make_text(folder), VOCABULARY, lowercase=False)
        make_teacher(folder, tokenizer)
        shape = bert_shape(768, layers=12, heads=12) | {"intermediate_size": 2048}
        distributed.on_main(partial(create_folder, LLAMA | shape, tokenizer, folder / "student", seed=2))
        distill = {"teacher": str(folder / "teacher"), "cache_teacher": {"top_k": K}, "temperature": 1.0}
        by_cache = plan(folder, str(folder / "student"), 5e-4, distill | {"alpha_ce": 0.5, "alpha_distil": 0.5})
        with started(by_cache) as taught, started(plan(folder, str(folder / "student"), 5e-4)) as plain:
            sides = [partial(loop.between_records, 1) for loop in (taught, plain)]
            value, seconds, other = ratio(*sides, rounds=40)
            task = by_cache.task
            batch = task.collate(task.examples("train"), range(2))
            found = list(errors(taught.engine.module, task.build_model(folder / "teacher").eval(), batch))
        (file,) = (folder / "taught/cache").glob("teacher-*/logits.0.npy")
        size = file.stat().st_size / int(task.examples("train").lengths.sum() - len(task.examples("train")))
    print(f"by the cache {seconds:.4f} s, plain {other:.4f} s a step")
    report(Figure("top_k_cache/bytes_a_token", size, 400), Figure("top_k_cache/step", value, 1.05), *found)


if __name__ == "__main__":
    main()
