"""The peak memory that `--dry_run` foretells over the peak of the run: 6 models, ZeRO 0 to 3, fp32 and bf16.

Every case is a dry run and a run of 3 steps through `launch/train.py`, on the embedded docstrings (language models: on
their text). The peak is the resident memory of rank 0 up to its last step, by its log. `python benchmarks/
memory_model.py [RANKS]` prints the table of `docs/tuning.md`, and the error of the worst case. A second figure is the
activations of BERT-base at 128 tokens with gradient checkpointing over those without.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from figures import ROOT, Figure, is_quick, report

from ds_trainer.cli.command import run_command
from ds_trainer.cli.train import train_command
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.registry import training_texts
from ds_trainer.tasks.text import docstrings

_HEAD = 64
TEXT: dict[str, Any] = {"name": "docstrings", "max_eval_samples": 16}


def shape(width: int, layers: int, vocab: int = 30522) -> dict[str, int]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // _HEAD}
    return sizes | {"intermediate_size": 4 * width, "vocab_size": vocab}


MODELS: dict[str, dict[str, Any]] = {
    "BERT 6 x 384": {"model_type": "bert"} | shape(384, 6),
    "BERT 12 x 768": {"model_type": "bert"} | shape(768, 12),
    "RoBERTa 6 x 768": {"model_type": "roberta"} | shape(768, 6, 50265) | {"max_position_embeddings": 514},
    "ModernBERT 8 x 512": {"model_type": "modernbert"} | shape(512, 8, 50368),
    "GPT-2 6 x 768": {"model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12, "vocab_size": 50257},
    "Llama 8 x 512": {"model_type": "llama", "num_key_value_heads": 4} | shape(512, 8, 32000),
}
STAGES, PRECISIONS = ((2,), ("fp32",)) if is_quick() else ((0, 1, 2, 3), ("fp32", "bf16"))
MICRO = 8
if is_quick():
    MODELS = {"BERT 2 x 64": {"model_type": "bert"} | shape(64, 2, 9000)}
    docstrings.CLASS_CAP = 100


def recipe_of(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    decoder = model["model_type"] in ("gpt2", "llama")
    files = {"train_file": "text.txt", "validation_file": "text.txt", "data_dir": str(folder)}
    lm = {"name": "clm", "max_eval_samples": 16} | files
    phase = {"max_steps": 3, "learning_rate": 1e-5, "per_device_train_batch_size": MICRO, "logging_steps": 1}
    return {
        "model": {"config": model, "tokenizer": {"vocab_size": 8192}},
        "task": (lm if decoder else TEXT) | {"max_seq_length": 128},
        "phases": [phase],
        "report": False,
    }


def commands(folder: Path, ranks: int) -> Iterator[tuple[tuple[str, str, int], list[str]]]:
    """The training command of every case, without its output folder."""
    launcher = [sys.executable] if ranks == 1 else ["deepspeed", "--num_gpus", str(ranks)]
    for (name, model), precision, stage in product(MODELS.items(), PRECISIONS, STAGES):
        recipe, engine = folder / f"{name}.json", folder / f"{precision}-{stage}.json"
        recipe.write_text(json.dumps(recipe_of(model, folder)))
        sizes = {"reduce_bucket_size": "auto"} | ({"stage3_prefetch_bucket_size": "auto"} if stage == 3 else {})
        config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage} | sizes}
        engine.write_text(json.dumps(config | ({"bf16": {"enabled": True}} if precision == "bf16" else {})))
        files = ["--deepspeed_config", str(engine), "--recipe", str(recipe)]
        files += ["--cache_dir", str(folder / "cache")]
        yield (name, precision, stage), [*launcher, str(ROOT / "launch/train.py"), *files]


def done_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has held nothing yet; where the run is quick, in this process."""
    if not is_quick():
        return subprocess.run(command, capture_output=True, text=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_command(train_command, command[2:])
    return subprocess.CompletedProcess(command, code, printed.getvalue(), "")


def foretold(command: list[str], out: Path, *words: str) -> dict[str, Any]:
    """What the dry run says of memory."""
    dry = done_of([*command, "--output_dir", str(out), "--dry_run", "json", *words])
    assert dry.returncode == 0, dry.stderr[-3000:]
    (described,) = json.loads(dry.stdout)["phases"]
    return described["memory_per_rank"]


def measured(command: list[str], out: Path) -> tuple[dict[str, Any], int]:
    """What the dry run says of memory, and the peak of the run."""
    memory = foretold(command, out)
    done = done_of([*command, "--output_dir", str(out)])
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return memory, max(record["memory/resident/rank0"] for record in records if "memory/resident/rank0" in record)


def main() -> None:
    ranks = int(next((word for word in sys.argv[1:] if word.isdigit()), 1))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2 if ranks == 1 else 1) as pool:
        folder = Path(name)
        (folder / "text.txt").write_text("\n".join(" ".join(text.split()) for text in training_texts(TextSpec())))
        cases = dict(commands(folder, ranks))
        outs = [folder / f"out{index}" for index in range(len(cases))]
        mapped = map if is_quick() else pool.map  # a command handles signals, so it needs the main thread
        results = dict(zip(cases, mapped(measured, cases.values(), outs), strict=True))
        case = next(iter(cases)) if is_quick() else ("BERT 12 x 768", "fp32", 0)
        again = foretold(cases[case], folder / "again", "--set", "phases.*.gradient_checkpointing=true")
    print(f"| model | precision | {' | '.join(f'ZeRO {stage}' for stage in STAGES)} |\n|---|---|{'---|' * len(STAGES)}")
    for model, precision in product(MODELS, PRECISIONS):
        pairs = [results[model, precision, stage] for stage in STAGES]
        cells = [f"{m['peak'] / 2**20:,.0f} / {peak / 2**20:,.0f} ({m['peak'] / peak:.2f})" for m, peak in pairs]
        print(f"| {model} | {precision} | {' | '.join(cells)} |")
    worst = max(abs(memory["peak"] / peak - 1) for memory, peak in results.values())
    report(
        Figure("memory_error", worst, 0.15),
        Figure("checkpointed_activations", again["activations"] / results[case][0]["activations"], 0.5),
    )


if __name__ == "__main__":
    main()
