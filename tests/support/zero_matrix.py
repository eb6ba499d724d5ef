"""A tiny BERT pruned, distilled and with exits for a few steps: under the real engine, and by a plain torch loop.

`deepspeed --num_gpus N tests/support/zero_matrix.py OUT` runs the cases of N ranks under the engine and writes
the losses; the test compares them with `reference(case)`. To OUT.pt it writes the gradient of one global batch of
labels of tokens, distilled, for many ways to cut it in micro-batches.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.host_waits import host_waits
from support.launching import chosen
from support.zeroed import empty
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
)

from ds_trainer.engine import engine
from ds_trainer.engine.engine import as_torch, parameter_groups
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.layers import LayerStates, set_recomputing, whole_state_dict
from ds_trainer.models.pretrained import CLASSIFIER
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks import distributed
from ds_trainer.recipe.recipe import GroupRule, Phase, parse_recipe, task_of
from ds_trainer.recipe.schedules import lr_multiplier
from ds_trainer.report.log import RunLog
from ds_trainer.run.loop import train_step
from ds_trainer.run.objective import Objective
from ds_trainer.run.phase import PhasePlan
from ds_trainer.tasks.data import BatchPlan
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Batch, Forward
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import PhaseLength

ACCUMULATION, MICRO, RANKS, STEPS = 2, 4, 2, 3
CLIP = 0.5
BASE = Hyperparameters(1e-3, 0.01)
_SPREAD = {"mask_init": "uniform", "mask_scale": 0.01}
_HYBRID = {"granularity": "hybrid"} | _SPREAD
_L0 = {"pruning_method": "l0", "regularization": "l0", "final_lambda": 5}
_SIGMOIED = {"pruning_method": "sigmoied_threshold", "regularization": "l1"}
_GLOBAL = {"global_topk": True, "global_topk_frequency_compute": 2, "mask_init": "kaiming"}
_MIXED = {"attention": "column", "*.intermediate.dense": "row", "*.output.dense": "block"}
METHODS = {
    "topK": _SPREAD | {"pruning_method": "topK", "final_threshold": 0.3},
    "global": _GLOBAL | {"pruning_method": "topK"},
    "threshold": {"pruning_method": "threshold", "final_threshold": 0.01, "mask_scale": 0.005},
    "sigmoied": _SIGMOIED | {"final_threshold": 0.51, "final_lambda": 20},
    "magnitude": {"pruning_method": "magnitude", "final_threshold": 0.4},
    "l0": _L0 | {"mask_scale": 1.0},
    "static": {"pruning_method": "topK", "final_threshold": 0.3, "train_weights": False},
    "hybrid": _HYBRID | {"final_threshold": 0.4},
    "hybrid-magnitude": {"granularity": "hybrid", "pruning_method": "magnitude", "final_threshold": 0.5},
    "hybrid-l0": _HYBRID | _L0 | {"mask_scale": 3.0},
    "hybrid-sigmoied": _HYBRID | _SIGMOIED | {"final_threshold": 0.5, "mask_scale": 0.1, "final_lambda": 5},
    "hybrid-global": {"granularity": "hybrid", "final_threshold": 0.5} | _GLOBAL,
    "mixed": _SPREAD | {"granularity": _MIXED, "block_shape": [8, 12], "final_threshold": 0.5},
    "hybrid-threshold": _HYBRID | {"pruning_method": "threshold", "final_threshold": 0.005, "mask_scale": 0.02},
    "block": {"granularity": "block", "block_shape": [8, 12], "final_threshold": 0.4, "mask_init": "kaiming"},
}
_LAYERS = {"cos": 0.5, "hidden": 0.3}
DISTILLED = {
    "distill": {"distill": {"alpha_ce": 0.5, "alpha_distil": 0.5, "alpha_mse": 0.1}},
    "layers": {"distill": {"terms": [*_LAYERS], "layer_pairs": [[1, 1], [-1, 3]]}},
    "partitioned": {"distill": {"alpha_ce": 0.5, "alpha_distil": 0.5, "alpha_cos": 1.0, "teacher_zero_stage": 3}},
    "whole": {"distill": {"alpha_ce": 0.5, "alpha_distil": 0.5, "alpha_cos": 1.0}},
    "both": {"prune": METHODS["topK"], "distill": {"alpha_ce": 0.1, "alpha_distil": 0.9, "alpha_cos": 1.0}},
    "filled": {"distill": {"alpha_ce": 1.0, "alpha_distil": 0.9}},
}
LEFT = {"filled": {"heads": [0, 1], "neurons": [16, 0]}}
"""Heads and neurons of a model that was cut before, in which blocks are skipped."""
_JOINT = {"training": "joint"}
EXITS = {
    "exits-heads": {"exits": {"training": "heads"}},
    "exits-joint": {"exits": _JOINT},
    "exits-tokens": {"exits": _JOINT},
    "all": {
        "prune": METHODS["topK"],
        "distill": {"alpha_ce": 0.1, "alpha_distil": 0.9, "alpha_cos": 1.0},
        "exits": _JOINT,
    },
}
LOSS = {
    "layers": {"task": 1.0} | {f"distill.{term}": weight for term, weight in _LAYERS.items()},
    "exits-joint": {"task": 0.0, "exits.heads": 1.0},
    "exits-tokens": {"task": 0.5, "exits.heads": 1.0},
}
"""Where the weights are not those that the techniques name, or their defaults."""
RECOMPUTED = "recomputed-"
"""Before a method: with gradient checkpointing."""


@dataclass(frozen=True)
class Case:
    method: str
    stage: int
    precision: str

    @property
    def plain_method(self) -> str:
        return self.method.removeprefix(RECOMPUTED)

    def __str__(self) -> str:
        return f"{self.method}-zero{self.stage}-{self.precision}"


_LOW = ("bf16", "autocast")
_SOME = [("hybrid", _LOW), ("exits-joint", _LOW), ("both", ("autocast",)), ("filled", ("bf16",))]
_SOME += [(method, _LOW) for method in ("topK", "sigmoied", "l0")]
_SOME += [(RECOMPUTED + method, ("fp32",)) for method in ("all", "l0", "layers")]
_SOME += [(method, ("fp32",)) for method in (*METHODS, *DISTILLED, *EXITS)]
ALL = [Case(method, stage, precision) for method, precisions in _SOME for stage in range(4) for precision in precisions]
_ALONE = "partitioned-zero3-fp32 whole-zero3-fp32 all-zero2-fp32 l0-zero0-bf16 recomputed-l0-zero0-fp32"
_WITHOUT_ZERO_3 = """threshold sigmoied magnitude static hybrid-magnitude hybrid-l0 hybrid-sigmoied hybrid-threshold
    mixed block recomputed-l0 recomputed-layers filled exits-heads both"""
"""Methods whose weights and scores are gathered as those of others are: under ZeRO 1, which is much faster."""
_ON_TWO = """l0-zero0-autocast sigmoied-zero1-bf16 hybrid-zero2-bf16 filled-zero0-bf16 exits-joint-zero3-autocast
    both-zero3-autocast topK-zero3-bf16 partitioned-zero1-fp32 whole-zero1-fp32 exits-tokens-zero0-fp32
    exits-tokens-zero1-fp32 exits-tokens-zero2-fp32 all-zero0-fp32 all-zero1-fp32 all-zero2-fp32"""


def cases(ranks: int) -> list[Case]:
    """Every method on 2 ranks, most of them under ZeRO 3; of stages, precisions and one rank, what represents them."""
    if ranks == 1:
        return chosen(ALL, lambda case: str(case) in _ALONE.split())
    return chosen(
        ALL,
        lambda case: (
            (case.stage, case.precision) == (1 if case.method in _WITHOUT_ZERO_3.split() else 3, "fp32")
            or str(case) in _ON_TWO.split()
        ),
    )


class ToyTask:
    """What of a task the objective and the techniques use: cross entropy over logits, a teacher of a folder.

    Where a model tags tokens, the tag of each follows from its id.
    """

    head, regression, inputs_vary, logits_of = CLASSIFIER, False, False, "example"
    loss_unit = logits_unit = "example"
    over_vocabulary = multi_label = vectors = by_query = False
    tokenizer = train_tokenizer(["the tokens that a teacher reads"], 40, True)

    def loss(self, out, batch):
        labels = batch.inputs["input_ids"].flatten() % 3 if out.logits.dim() == 3 else batch.labels
        return F.cross_entropy(out.logits.float().flatten(0, -2), labels)

    def logits(self, out, batch):
        return (out.logits.flatten(0, -2),)

    def reads_otherwise(self, folder):
        return ""

    def inputs_for(self, model, batch):
        return batch.inputs

    def build_model(self, folder):
        return AutoModelForSequenceClassification.from_pretrained(folder)

    def check_trained(self, folder):
        assert not folder or (Path(folder) / "config.json").is_file()  # the model that is trained is of no folder


@cache
def teacher_folder() -> str:
    """A wider and deeper BERT, the same in every run."""

    def save() -> str:
        folder = tempfile.mkdtemp()
        torch.manual_seed(7)
        model = AutoModelForSequenceClassification.from_config(bert(hidden_size=48, num_hidden_layers=3))
        model.save_pretrained(folder)
        ToyTask.tokenizer.save_pretrained(folder)
        return folder

    return distributed.on_main(save)


def bert(**fields) -> BertConfig:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = small | no_dropout | {"vocab_size": 64, "max_position_embeddings": 16, "num_labels": 3} | fields
    return BertConfig(attn_implementation="eager", **settings)


def phase_of(method: str) -> Phase:
    asked = (DISTILLED | EXITS).get(method, {"prune": METHODS.get(method)})
    techniques = {"exits": asked["exits"]} if "exits" in asked else {}
    if "prune" in asked:
        fixed = {"initial_warmup": 0, "final_warmup": 2, "mask_scores_learning_rate": 1e-2}
        techniques["prune"] = asked["prune"] | fixed
    if "distill" in asked:
        techniques["distill"] = asked["distill"] | {"teacher": teacher_folder()}
    frozen = [{"params": "*embeddings*", "frozen": True}]
    data = {"loss": LOSS[method]} if method in LOSS else {}
    data |= {"max_steps": STEPS, "warmup_steps": 1, "groups": frozen, "techniques": techniques}
    return parse_recipe({"phases": [data]}).phases[0]


def build(case: Case):
    method = case.plain_method
    phase = phase_of(method)
    torch.manual_seed(0)
    techniques = build_techniques(phase.techniques, PhaseLength(STEPS, 1, seed=5), ToyTask())
    kind = AutoModelForTokenClassification if method == "exits-tokens" else AutoModelForSequenceClassification
    model = kind.from_config(bert(num_hidden_layers=3 if method in EXITS else 2))
    if method in LEFT:
        model = shrink(empty(model, LEFT[method]))
    set_recomputing(model, method != case.method)
    for technique in techniques:
        model = technique.attach(model)
    rules: list[GroupRule] = [rule for technique in techniques for rule in technique.parameter_rules(model)]
    return phase, techniques, model, parameter_groups(model, phase.groups, rules, BASE)


def batch_of(step: int, micro: int, rank: int):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, 64, (MICRO, 8), generator=generator)
    labels = torch.randint(0, 3, (MICRO,), generator=generator)
    return Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels, torch.arange(MICRO))


PRECISIONS: dict[str, dict] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def engine_config(case: Case, world: int) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": MICRO * RANKS // world,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    return config | PRECISIONS[case.precision]


def rank_batch(step: int, micro: int, rank: int, world: int):
    """This rank's share of the RANKS batches of one micro-step."""
    parts = [batch_of(step, micro, r) for r in range(rank, RANKS, world)]
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Batch(inputs, torch.cat([p.labels for p in parts]), torch.cat([p.ids for p in parts]))


def under_engine(case: Case) -> dict[str, list]:
    phase, techniques, model, groups = build(case)
    world = distributed.world_size()
    ds_engine = engine.start_engine(model, groups, engine_config(case, world), BASE, lr_multiplier("linear", 1, STEPS))
    objective = Objective(ToyTask(), techniques, phase.loss)
    for technique in techniques:
        technique.start(ds_engine.device)
    losses, readings = [], []

    def take(step: int, total: torch.Tensor) -> None:
        for technique in techniques:
            technique.on_step(step)
        for micro in range(ACCUMULATION):
            batch = rank_batch(step, micro, distributed.rank(), world).to(ds_engine.device)
            loss, _ = objective(Forward(batch, ds_engine(**batch.inputs), step))
            ds_engine.backward(loss)
            ds_engine.step()
            total += loss.detach().float() / ACCUMULATION

    for step in range(STEPS):
        total = torch.zeros((), device=ds_engine.device)
        if step < STEPS - 1:
            take(step, total)
        else:  # the other steps do some things for the first time
            waits = host_waits(partial(take, step, total), ds_engine.device)
        assert ds_engine.global_steps == step + 1
        losses.append(float(distributed.mean(total)))
        readings.append(densities(techniques))
    held = [values_held(technique._teacher._model) for technique in techniques if technique.name == "distill"]
    for technique in techniques:
        technique.stop()
    engine.stop_engine(ds_engine)
    places = sorted(place.split(":")[0] for place in waits if place.startswith("ds_trainer/techniques/"))
    return {"losses": losses, "readings": readings, "teacher_values": held, "waits": places}


def densities(techniques) -> dict[str, float]:
    """The density of the model and of each matrix."""
    readings = {name: value for technique in techniques for name, value in technique.readings().items()}
    return {name: value for name, value in readings.items() if name.startswith("prune/density")}


def point_at(model, techniques) -> None:
    """Have techniques that were attached to a model work on a copy of it."""
    for technique in techniques:
        if technique.name == "prune":
            technique.layers = {name: model.get_submodule(name) for name in technique.layers}
        if technique.name == "exits":
            technique.heads = model.exit_heads
            technique._states.remove()
            technique._states = LayerStates(model, technique.layers)


def values_held(model) -> int:
    """How many of a model's values this rank keeps between forwards."""
    return sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in model.parameters())


def reference(case: Case) -> dict[str, list]:
    """The same run in one process: fp32 master weights, a plain AdamW, clipping by global norm."""
    # a process without a group cannot partition a teacher, whose answers are the same
    phase, techniques, master, groups = build(
        Case("whole", 0, case.precision) if case.method == "partitioned" else case
    )
    optimizer = torch.optim.AdamW(as_torch(groups, BASE), lr=BASE.lr, weight_decay=BASE.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_multiplier("linear", 1, STEPS))
    objective = Objective(ToyTask(), techniques, phase.loss)
    for technique in techniques:
        technique.start(torch.device("cpu"))
    losses, readings = [], []
    for step in range(STEPS):
        model = master
        if case.precision == "bf16":
            model = copy.deepcopy(master).bfloat16()
            point_at(model, techniques)
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
        readings.append(densities(techniques))
        if model is not master:
            for own, other in zip(master.parameters(), model.parameters(), strict=True):
                own.grad = None if other.grad is None else other.grad.float()
            point_at(master, techniques)
        torch.nn.utils.clip_grad_norm_([p for p in master.parameters() if p.grad is not None], CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return {"losses": losses, "readings": readings}


EXAMPLES = 8
_LINES = [" ".join(["the old dog"] * count) for count in (1, 1, 2, 3, 4, 6, 8, 10)]
"""Documents of 3 to 30 words: a micro-batch of the longest has many times the tokens of one of the shortest."""
_TAGS = {"the": "O", "old": "B-age", "dog": "B-animal"}
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "attn_implementation": "eager"}
_WEIGHTS = {"logits": 0.7, "mse": 0.1, "cos": 1.0, "hidden": 0.3}
_CHAT_TEMPLATE = (
    "{% for m in messages %}[CLS]{{ m.content }}[SEP]{% endfor %}{% if add_generation_prompt %}[CLS]{% endif %}"
)
TOP_K = "clm-top_k"
_LM = {"train_file": "text.txt", "min_seq_length": 2}
_GROUPS = {"file": "groups.jsonl"}
_SCORED = _GROUPS | {"text_columns": ["a", "p"], "score_column": "s"}
_LISTS = _GROUPS | {"text_columns": ["a", "n2", "n"]}
_PACKED = {"packing": True, "min_seq_length": 2}
VARIANTS = {
    **dict.fromkeys(("mlm", "mlm-everywhere", "clm", TOP_K), _LM),
    "clm-packed": _PACKED | {"max_seq_length": 32, "train_file": "more.txt"},
    "clm-chat": _PACKED | {"max_seq_length": 64, "messages_column": "messages", "train_file": "chat.jsonl"},
    "ner": {"train_file": "tags.conll"},
    "embedding": {
        "train": [_GROUPS | {"text_columns": ["a", "p", "n"]}],
        "validation": [_SCORED],
        "matryoshka_dims": [8],
    },
    "embedding-cosent": {"train": [_SCORED], "validation": [_SCORED], "loss": "cosent"},
    "rerank": {"train": [_LISTS], "validation": [_LISTS]},
    "rerank-softmax": {"train": [_LISTS], "validation": [_LISTS], "loss": "softmax"},
}
"""What a task has beyond its name. Rows of packed documents have many labels or few, anchors and queries many negatives
or none."""
CUTS = {1: (1, 8), 2: (1, 4)}
"""The numbers of micro-batches a rank, by the number of ranks."""


@dataclass(frozen=True)
class Cut:
    task: str
    stage: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.task}-zero{self.stage}-accumulation{self.accumulation}"


def cuts(world: int) -> list[Cut]:
    every = [Cut(*each) for each in product(VARIANTS, range(4), CUTS[world])]
    return chosen(
        every,
        lambda cut: (
            (cut.stage == (0 if world == 1 else 3) and (world == 1 or cut.accumulation > 1 or cut.task == "ner"))
            or (cut.task == "clm-chat" and cut.accumulation > 1)
        ),
    )


def gradients() -> dict[str, dict[str, Tensor]]:
    """By cut, the gradient of every parameter, on rank 0: what a step of plain SGD at rate 1 takes off it."""
    folder = Path(distributed.on_main(_folders))
    return {str(cut): _gradient(_plan(cut, folder)) for cut in cuts(distributed.world_size())}


def _gradient(plan: PhasePlan) -> dict[str, Tensor]:
    model, groups, objective = plan.prepare()
    ds_engine = engine.start_engine(model, groups, plan.engine_config, plan.base, lambda step: 1.0)
    for technique in objective.techniques:
        technique.start(ds_engine.device)
    batch = BatchPlan(plan.task.examples("train").lengths, EXAMPLES, seed=0).between(0, EXAMPLES)
    report = RunLog(plan.folder, "train", 1, plan.phase.loss, tensorboard=False, training_examples=EXAMPLES)
    before = whole_state_dict(ds_engine.module, keep=distributed.is_main())
    train_step(objective, ds_engine, batch, report, seed=0)
    after = whole_state_dict(ds_engine.module, keep=distributed.is_main())
    for technique in objective.techniques:
        technique.stop()
    engine.stop_engine(ds_engine)
    return {name: before[name] - value for name, value in after.items()}


def _plan(cut: Cut, folder: Path) -> PhasePlan:
    task, _, variant = cut.task.partition("-")
    own = VARIANTS[cut.task]
    # a cache of a top k keeps no logits
    # a cache of a top k keeps no logits, and similarities are to the other texts of a micro-batch
    kept = {TOP_K: ("logits", "cos", "hidden"), "embedding": ("mse", "cos", "hidden")}
    weights = {name: _WEIGHTS[name] for name in kept.get(cut.task, kept.get(task, _WEIGHTS))}
    distill = {"teacher": str(folder / task / "teacher"), "terms": [*weights], "layer_pairs": [[1, 1], [-1, -1]]}
    if task == "mlm":
        distill["restrict_ce_to_mask"] = variant != "everywhere"
    if cut.task == TOP_K:
        distill |= {"cache_teacher": {"top_k": 4}, "divergence": "js"}
    loss = {"task": 1.0} | {f"distill.{term}": weight for term, weight in weights.items()}
    data = {"name": task, "data_dir": str(folder), **own}
    data |= {"validation_file": own["train_file"]} if "train_file" in own else {}
    phases = [{"max_steps": 1, "techniques": {"distill": distill}, "loss": loss}]
    recipe = parse_recipe({"task": data, "phases": phases, "cache_dir": str(folder / "cache")})
    (phase,) = recipe.phases
    student = folder / task / "student"
    config = {
        "train_micro_batch_size_per_gpu": EXAMPLES // cut.accumulation // distributed.world_size(),
        "gradient_accumulation_steps": cut.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": cut.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "steps_per_print": 10**9,
    }
    lm = build_task(task_of(phase, recipe), str(student), recipe.cache_dir)
    return PhasePlan(
        phase, phase.techniques, lm, str(student), PhaseLength(1, 0, 0), config, Hyperparameters(1.0), folder
    )


def _folders() -> str:
    """The text, and of each task a student and a wider teacher, without dropout."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(_LINES) + "\n")
    tagged = ["\n".join(f"{word}\t{_TAGS[word]}" for word in line.split()) for line in _LINES]
    (folder / "tags.conll").write_text("\n\n".join(tagged) + "\n")
    (folder / "more.txt").write_text("\n".join(_LINES * 3) + "\n")
    groups = [{"a": line, "p": "dog " + line, "n": _LINES[:place], "s": place % 3} for place, line in enumerate(_LINES)]
    groups = [each | {"n2": ["old " + text for text in each["n"][::3]] or [each["p"]]} for each in groups]
    (folder / "groups.jsonl").write_text("\n".join(map(json.dumps, groups)))
    asked = [{"role": "user", "content": "the dog"}]
    chats = [{"messages": [*asked, {"role": "assistant", "content": line}] * 2} for line in _LINES * 2]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    tokenizer = train_tokenizer(_LINES * 5, 60, True)
    tokenizer.chat_template = _CHAT_TEMPLATE
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(3)
    for name, width in (("student", 16), ("teacher", 24)):
        bert = BertConfig(hidden_size=width, intermediate_size=32, **_SMALL, **vocabulary)
        bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt2 = GPT2Config(n_embd=width, n_positions=128, **_SMALL, **vocabulary, **no_dropout)
        # the head of each is trained, as far as its folder says
        tags = BertConfig(**bert.to_dict() | {"id2label": dict(enumerate(_TAGS.values()))})
        kinds: dict[str, Any] = {"mlm": (AutoModelForMaskedLM, bert), "clm": (AutoModelForCausalLM, gpt2)}
        kinds["embedding"] = AutoModel, bert
        score = BertConfig(**bert.to_dict() | {"num_labels": 1})
        kinds["rerank"] = AutoModelForSequenceClassification, score
        for task, (auto, config) in (kinds | {"ner": (AutoModelForTokenClassification, tags)}).items():
            auto.from_config(config).save_pretrained(folder / task / name)
            tokenizer.save_pretrained(folder / task / name)
    return str(folder)


def main(out: str) -> None:
    distributed.start()
    results = {str(case): under_engine(case) for case in cases(distributed.world_size())}
    steps = gradients()
    if distributed.is_main():
        torch.save(steps, f"{out}.pt")
        Path(out).write_text(json.dumps(results))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-1])
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end
