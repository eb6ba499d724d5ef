"""TextPruner (ACL 2022): heads and neurons by the first-order change of the loss, over all layers, in rounds."""

from __future__ import annotations

from typing import Any

from textpruner import GeneralConfig, TransformerPruner, TransformerPruningConfig
from worker import batches_of, dense_model

ROUNDS = 4


def cut(request: dict[str, Any]) -> Any:
    model, share = dense_model(request), request["share"]
    settings = TransformerPruningConfig(
        target_ffn_size=round(share * model.config.intermediate_size),
        target_num_of_heads=round(share * model.config.num_attention_heads),
        pruning_method="iterative",
        ffn_even_masking=False,  # as its authors do: layers may differ
        head_even_masking=False,
        n_iters=ROUNDS,
    )
    pruner = TransformerPruner(model, settings, GeneralConfig(use_device="cpu", output_dir=request["out"]))
    pruner.prune(dataloader=batches_of(request), save_model=False)
    return model.state_dict()
