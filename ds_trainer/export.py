"""From a trained engine to an ordinary model folder: gather, fold the masks, save, reload and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer import distributed
from ds_trainer.models import count_weights, save_folder, whole_state_dict
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques import Technique

Rebuild = Callable[[], tuple[nn.Module, Sequence[Technique]]]
"""Builds the phase's model with its techniques attached, as it was before the engine took it."""

TOLERANCE = 1e-5


def export(engine: Any, rebuild: Rebuild, task: Task, step: int, folder: Path) -> dict[str, Any]:
    """Write the folded model as a `transformers` folder, and say what was kept; on every rank.

    The weights are gathered to rank 0, one at a time, and put in a model built anew: what a technique folds is then
    whole under every ZeRO stage. They are saved in the precision they were trained in.
    """
    state = whole_state_dict(engine.module, keep=distributed.is_main())
    examples = task.examples(task.splits[0])
    batch = task.collate(examples, range(min(8, len(examples))))

    def write() -> dict[str, Any]:
        model, techniques = rebuild()
        dtype = next(value.dtype for value in state.values() if value.is_floating_point())
        model.to(dtype).load_state_dict(state)
        for technique in techniques:
            technique.on_step(step)
        return save_folded(model.eval(), techniques, task, batch, folder)

    return distributed.on_main(write)


@torch.no_grad()
def save_folded(model: Any, techniques: Sequence[Technique], task: Task, batch: Batch, folder: Path) -> dict[str, Any]:
    """Fold and save, once the reloaded folder's logits on a real batch are those of the masked model."""
    before = task.logits(model(**batch.inputs), batch)
    # a technique may need another than the default, and they do not round alike
    attention = model.config._attn_implementation
    for technique in techniques:
        model = technique.fold(model)
    results: dict[str, Any] = {}

    def finish(aside: Path) -> None:
        for technique in techniques:
            technique.save(aside)
        reloaded: Any = task.build_model(aside).to(next(model.parameters()).dtype).eval()
        reloaded.set_attn_implementation(attention)
        after = task.logits(reloaded(**batch.inputs), batch)
        difference = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
        scale = max(1.0, *(float(logits.abs().max()) for logits in before))
        if not difference <= TOLERANCE * scale:
            raise RuntimeError(f"the exported model's logits differ by {difference}: {folder} is left as it was")
        results.update(weights=count_weights(reloaded), max_logit_difference=difference)

    save_folder(model, task.tokenizer, folder, finish)
    return results
