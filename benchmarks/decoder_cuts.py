"""What decoders lose by cuts to half of their operations, and how much faster they read a prompt.

`python benchmarks/decoder_cuts.py [OUTPUT_DIR] [DATA_DIR]`: a small Llama is trained from scratch on wikitext-2 (the
docstrings of torch, where there is no DATA_DIR), then cut to half of its operations by layers, width
and neurons. A table has the perplexity of each, at once and after the same
short training with the dense model as the teacher, and that of the dense model after this training. A second call with
the same folder goes on where the first one stopped. The bars: a prompt of random tokens is read faster by at least 0.85
of what the operations say, by decoders of half the layers, and of half the width, of random weights; two threads,
interleaved, without the head.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import SHARED, Figure, is_quick, ratio, report, use_threads

from ds_trainer import train
from ds_trainer.cuts.sizes import outline_of_sizes
from ds_trainer.models.costs import encoder_flops
from ds_trainer.recipe.cut_specs import CutSpec

SHAPE = {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 3}
SHAPE |= {"head_dim": 32, "intermediate_size": 768}
if is_quick():
    SHAPE |= {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64}
CUTS: dict[str, dict[str, Any]] = {
    "layers": {"layers": 0.5},
    "width": {"width": 0.5},
    "neurons": {"neurons": 0.38},
    "none": {},
}
"""Each keeps about half of the operations at 128 tokens; the last is the dense model, trained as long as the others."""
STEPS, FURTHER = (1, 1) if is_quick() else (500, 100)
WIDE = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4}
WIDE |= {"head_dim": 64, "intermediate_size": 4096, "vocab_size": 256}
if is_quick():
    WIDE |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
PROMPT = 256


def main(output: str = f"runs{'/quick' * is_quick()}/decoder_cuts", data_dir: str = "") -> None:
    use_threads(2)
    folder = Path(output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    texts = wikitext(Path(data_dir or SHARED / "data" / "wikitext-2"), folder)
    results = train(recipe(texts), folder / "run", resume=True)
    dense = results["dense"]["eval"]["perplexity"]
    print(f"{'dense':18} {'':44} perplexity {dense:9.1f}")
    figures = []
    for name in CUTS:
        of_phase = results[name.replace(" ", "_")]
        trained, sizes, untrained = of_phase["eval"]["perplexity"], "", dense
        if cut := of_phase.get("cut"):
            sizes = ", ".join(f"{size} {noun}" for noun, size in cut["sizes"]["after"].items())
            untrained = cut["scores"]["perplexity"]
        print(f"{name:18} {sizes:44} perplexity {untrained:9.1f} -> {trained:7.1f}")
        figures.append(Figure(f"decoder_cuts/{name.replace(' ', '_')}/perplexity_over_dense", trained / dense))
    report(*figures, *map(speed, ("layers", "width")))


def wikitext(data: Path, folder: Path) -> dict[str, str]:
    """Return the files of a task: wikitext-2's, or docstrings of torch in two files of the folder."""
    if (data / "test.txt").is_file() and not is_quick():
        return {"train_file": str(data / "test.txt"), "validation_file": str(data / "valid.txt")}
    sources = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))
    trees = (ast.parse(path.read_text()) for path in sources)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    lines = [" ".join(text.split()) for node in nodes if (text := ast.get_docstring(node))]
    files = {"train_file": folder / "train.txt", "validation_file": folder / "valid.txt"}
    for path, some in zip(
        files.values(), (lines[::2], lines[1:40:2]) if is_quick() else (lines[40:], lines[:40]), strict=True
    ):
        path.write_text("\n".join(some[:60] if is_quick() else some) + "\n")
    return {name: str(path) for name, path in files.items()}


def recipe(texts: dict[str, str]) -> dict[str, Any]:
    """The dense model from scratch, then each cut of it, trained with it as the teacher."""
    common = {"train_batch_size": 4 if is_quick() else 8, "warmup_steps": 0.1, "logging_steps": 50}
    taught = {"distill": {"teacher": "@dense", "alpha_ce": 0.1, "alpha_distil": 0.9}}
    given: dict[str, Any] = {"calibration_examples": 8 if is_quick() else 256}
    if is_quick():
        given["reconstruct"] = {"tokens": 256, "steps": 1}
    cuts = [
        common
        | {"name": name.replace(" ", "_"), "start_from": "@dense", "max_steps": FURTHER, "learning_rate": 5e-4}
        | ({"cut": cut | given} if cut else {})
        | {"techniques": taught}
        for name, cut in CUTS.items()
    ]
    return {
        "model": {"config": {"model_type": "llama"} | SHAPE, "tokenizer": {"vocab_size": 300 if is_quick() else 4096}},
        "task": {"name": "clm", "max_seq_length": 128, "max_eval_samples": 400, **texts},
        "report": False,
        "tensorboard": False,
        "phases": [common | {"name": "dense", "max_steps": STEPS, "learning_rate": 1e-3}, *cuts],
    }


@torch.inference_mode()
def speed(size: str) -> Figure:
    """Compare the measured speed-up of half the layers, or half the width, with what the operations say."""
    dense: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).eval()
    small = outline_of_sizes(dense, CutSpec(**{size: 0.5})).eval()
    ids = torch.randint(0, 256, (1, PROMPT))
    measured, *_ = ratio(lambda: dense.model(ids), lambda: small.model(ids), rounds=15)
    counted = encoder_flops(dense, PROMPT) / encoder_flops(small, PROMPT)
    print(f"{size}: {measured:.2f} times as fast, {counted:.2f} times fewer operations")
    return Figure(f"decoder_cuts/{size}/speed_up_over_operations", measured / counted, 0.85, at_least=True)


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if argument != "--quick"))
