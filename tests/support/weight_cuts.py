"""Tiny models of each kind and calibration batches, for cuts of single weights.

As a script, `weight_cuts.py OUT` cuts one on all ranks, and rank 0 writes its weights.
"""

import copy
import sys

import torch
import transformers
from support.zeroed import randomised

from ds_trainer.cuts.calibration import Calibration
from ds_trainer.cuts.reconstruction import Kept, reconstruct
from ds_trainer.cuts.weights import cut_weights
from ds_trainer.ranks import distributed
from ds_trainer.recipe.cut_specs import CutSpec, ReconstructSpec

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
FAMILIES = {
    "bert": SMALL,
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40},
    "deberta": SMALL | DEBERTA,
    "deberta-v2": SMALL | DEBERTA | {"share_att_key": True},
    "deberta-v2, keys apart": SMALL | DEBERTA,
    "modernbert": SMALL | ENDS,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "pad_token_id": 0},
    "llama": SMALL | {"num_key_value_heads": 1, "pad_token_id": 0},
    "opt": SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 0},
}


def model_of(family):
    """A classifier of three classes; weights and biases large enough that each matters."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.partition(",")[0], num_labels=3, **FAMILIES[family])
    return randomised(transformers.AutoModelForSequenceClassification.from_config(config))


def dealt_calibration(rank=0, world=1, batches=6):
    """A rank's part of batches of four examples, a third of whose positions are padding."""
    generator = torch.Generator().manual_seed(1)
    attended = torch.arange(9).expand(4, 9) < torch.tensor([[9], [6], [5], [4]])
    drawn = (torch.randint(3, 40, (4, 9), generator=generator) for _ in range(batches))
    ids = [torch.where(attended, tokens, 0) for tokens in drawn][rank::world]

    def logits(model, index):
        return model(input_ids=ids[index], attention_mask=attended.long()).logits

    def divergence(dense, cut):
        return float(distributed.mean((torch.cat(dense) - torch.cat(cut)).double().square().mean()))

    return Calibration(
        inputs=[{"input_ids": batch, "attention_mask": attended.long()} for batch in ids],
        attended=[attended] * len(ids),
        answers=lambda model: [logits(model, index).detach() for index in range(len(ids))],
        divergence=divergence,
        loss=lambda model, index: torch.nn.functional.cross_entropy(
            logits(model, index), ids[index][:, 0] % 3, reduction="sum"
        ),
    )


def spec_of(**fields):
    return CutSpec(**({"granularity": "weight", "keep": 0.3, "uniform": True} | fields))


def cut_by_ranks(method):
    model = model_of("bert")
    calibration = dealt_calibration(distributed.rank(), distributed.world_size(), batches=7)
    dense = copy.deepcopy(model)
    cut_weights(model, calibration, spec_of(method=method, uniform=False))
    if method == "obs":
        records = reconstruct(model, dense, Kept(range(2)), calibration, ReconstructSpec(steps=20))
        assert all(record.after < record.before for record in records)
    return model.state_dict()


if __name__ == "__main__":
    distributed.start()
    weights = {method: cut_by_ranks(method) for method in ("obs", "fisher")}
    if distributed.is_main():
        torch.save(weights, sys.argv[-1])
    distributed.stop()
    distributed.leave(0)
