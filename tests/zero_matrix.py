"""A tiny BERT pruned for a few optimizer steps: under the real engine, and by a plain torch loop.

`deepspeed --num_gpus N tests/zero_matrix.py OUT` runs every case of CASES under the engine and writes the losses; the
test compares them with `reference(case)`.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from ds_trainer import distributed, engine
from ds_trainer.optim import Hyperparameters, as_torch, parameter_groups
from ds_trainer.recipe import GroupRule, Phase, parse_recipe
from ds_trainer.schedules import lr_multiplier
from ds_trainer.techniques import Clock, Forward, build_techniques

ACCUMULATION, MICRO, RANKS, STEPS = 2, 4, 2, 6
CLIP = 0.5
BASE = Hyperparameters(1e-3, 0.01)
METHODS = {
    "topK": {"pruning_method": "topK", "final_threshold": 0.3, "mask_init": "uniform", "mask_scale": 0.01},
    "global": {
        "pruning_method": "topK",
        "global_topk": True,
        "global_topk_frequency_compute": 2,
        "mask_init": "kaiming",
    },
    "threshold": {"pruning_method": "threshold", "final_threshold": 0.01},
    "sigmoied": {
        "pruning_method": "sigmoied_threshold",
        "final_threshold": 0.51,
        "regularization": "l1",
        "final_lambda": 20,
    },
    "magnitude": {"pruning_method": "magnitude", "final_threshold": 0.4},
    "l0": {"pruning_method": "l0", "mask_scale": 1.0, "regularization": "l0", "final_lambda": 5},
    "static": {"pruning_method": "topK", "final_threshold": 0.3, "train_weights": False},
}


@dataclass(frozen=True)
class Case:
    method: str
    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{self.method}-zero{self.stage}-{self.precision}"


CASES = [Case(method, stage, "fp32") for method, stage in product(METHODS, range(4))] + [
    Case(method, stage, precision)
    for method, stage, precision in product(("topK", "sigmoied", "l0"), range(4), ("bf16", "autocast"))
]


class ToyTask:
    """Cross entropy over logits: the one method of a task that the objective uses."""

    def loss(self, out, batch):
        return F.cross_entropy(out.logits.float(), batch.labels)


def phase_of(method: str) -> Phase:
    prune = METHODS[method] | {"initial_warmup": 0, "final_warmup": 2, "mask_scores_learning_rate": 1e-2}
    frozen = [{"params": "*embeddings*", "frozen": True}]
    data = {"max_steps": STEPS, "warmup_steps": 1, "groups": frozen, "techniques": {"prune": prune}}
    return parse_recipe({"phases": [data]}).phases[0]


def build(method: str):
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    phase = phase_of(method)
    techniques = build_techniques(phase.techniques, Clock(STEPS, 1, seed=5))
    model = techniques[0].attach(AutoModelForSequenceClassification.from_config(config))
    rules: list[GroupRule] = [rule for technique in techniques for rule in technique.parameter_rules(model)]
    return phase, techniques, model, parameter_groups(model, phase.groups, rules, BASE)


def batch_of(step: int, micro: int, rank: int):
    from ds_trainer.tasks.task import Batch

    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, 64, (MICRO, 8), generator=generator)
    labels = torch.randint(0, 3, (MICRO,), generator=generator)
    return Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels, torch.arange(MICRO))


def objective_of(phase: Phase, techniques):
    from ds_trainer.objective import Objective

    return Objective(ToyTask(), techniques, phase.loss)


def engine_config(case: Case, world: int) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": MICRO * RANKS // world,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if case.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def rank_batch(step: int, micro: int, rank: int, world: int):
    """This rank's share of the RANKS batches of one micro-step."""
    from ds_trainer.tasks.task import Batch

    parts = [batch_of(step, micro, r) for r in range(rank, RANKS, world)]
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Batch(inputs, torch.cat([p.labels for p in parts]), torch.cat([p.ids for p in parts]))


def under_engine(case: Case) -> dict[str, list[float]]:
    phase, techniques, model, groups = build(case.method)
    world = distributed.world_size()
    ds_engine = engine.start_engine(model, groups, engine_config(case, world), BASE, lr_multiplier("linear", 1, STEPS))
    objective = objective_of(phase, techniques)
    losses, densities = [], []
    for step in range(STEPS):
        total = torch.zeros(())
        for technique in techniques:
            technique.on_step(step)
        for micro in range(ACCUMULATION):
            batch = rank_batch(step, micro, distributed.rank(), world)
            loss, _ = objective(Forward(batch, ds_engine(**batch.inputs), step))
            ds_engine.backward(loss)
            ds_engine.step()
            total += loss.detach().float() / ACCUMULATION
        assert ds_engine.global_steps == step + 1
        losses.append(float(distributed.mean_(total)))
        densities.append(techniques[0].readings()["prune/density"])
    engine.stop_engine(ds_engine)
    return {"losses": losses, "densities": densities}


def reference(case: Case) -> dict[str, list[float]]:
    """The same run in one process: fp32 master weights, a plain AdamW, clipping by global norm."""
    phase, techniques, master, groups = build(case.method)
    optimizer = torch.optim.AdamW(as_torch(groups, BASE), lr=BASE.learning_rate, weight_decay=BASE.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_multiplier("linear", 1, STEPS))
    objective = objective_of(phase, techniques)
    losses, densities = [], []
    for step in range(STEPS):
        model = master
        if case.precision == "bf16":
            layers = techniques[0].layers
            model = copy.deepcopy(master).bfloat16()
            techniques[0].layers = {name: model.get_submodule(name) for name in layers}
        for technique in techniques:
            technique.on_step(step)
        optimizer.zero_grad()
        total = 0.0
        for micro in range(ACCUMULATION):
            batch = rank_batch(step, micro, 0, 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
                out = model(**batch.inputs)
            loss, _ = objective(Forward(batch, out, step))
            (loss / ACCUMULATION).backward()
            total += float(loss.detach()) / ACCUMULATION
        densities.append(techniques[0].readings()["prune/density"])
        if model is not master:
            for own, other in zip(master.parameters(), model.parameters(), strict=True):
                own.grad = None if other.grad is None else other.grad.float()
            techniques[0].layers = layers
        torch.nn.utils.clip_grad_norm_([p for p in master.parameters() if p.grad is not None], CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return {"losses": losses, "densities": densities}


def main(out: str) -> None:
    distributed.start()
    results = {str(case): under_engine(case) for case in CASES}
    if distributed.is_main():
        Path(out).write_text(json.dumps(results))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-1])
