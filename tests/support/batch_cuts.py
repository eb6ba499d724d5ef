"""The gradient of one global batch of labels of tokens, distilled or with exits of LayerSkip, for many ways to cut it
in micro-batches.

Beside it the weights after some steps in bf16 by the top k of a cached teacher, stopped once and resumed, or not.
`zero_matrix.py` runs both under the engine, on one rank and on two.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from support.launching import ROOT, chosen
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

from ds_trainer.cli.plugins import load_plugin
from ds_trainer.engine import engine
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.layers import whole_state_dict
from ds_trainer.ranks import distributed
from ds_trainer.recipe.recipe import parse_recipe, task_of
from ds_trainer.report.log import RunLog
from ds_trainer.run.loop import train_step
from ds_trainer.run.phase import PhasePlan
from ds_trainer.tasks.data import BatchPlan
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.technique import PhaseLength

EXAMPLES = 8
LINES = [" ".join(["the old dog"] * count) for count in (1, 1, 2, 3, 4, 6, 8, 10)]
"""Documents of 3 to 30 words: a micro-batch of the longest has many times the tokens of one of the shortest."""
TAGS = {"the": "O", "old": "B-age", "dog": "B-animal"}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "attn_implementation": "eager"}
WEIGHTS = {"logits": 0.7, "mse": 0.1, "cos": 1.0, "hidden": 0.3}
CHAT_TEMPLATE = (
    "{% for m in messages %}[CLS]{{ m.content }}[SEP]{% endfor %}{% if add_generation_prompt %}[CLS]{% endif %}"
)
TOP_K = "clm-top_k"
_LM = {"train_file": "text.txt", "min_seq_length": 2}
_PACKED = {"packing": True, "min_seq_length": 2}
VARIANTS = {
    **dict.fromkeys(("mlm", "mlm-everywhere", "clm", "clm-skip", TOP_K), _LM),
    "clm-packed": _PACKED | {"max_seq_length": 32, "train_file": "more.txt"},
    "clm-chat": _PACKED | {"max_seq_length": 64, "messages_column": "messages", "train_file": "chat.jsonl"},
    "ner": {"train_file": "tags.conll"},
}
"""What a task has beyond its name. Rows of packed documents have many labels or few, too."""
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
        lambda cut: cut.stage == (0 if world == 1 else 3) or (cut.task == "clm-chat" and cut.accumulation > 1),
    )


def stages(world: int) -> list[int]:
    return chosen(range(4), lambda stage: world == 2 or stage == 1)


def gradients() -> dict[str, dict[str, Tensor]]:
    """By cut, the gradient of every parameter, on rank 0: what a step of plain SGD at rate 1 takes off it.

    And by "whole" and "resumed" with the stage, the weights after four steps in bf16.
    """
    folder = Path(distributed.on_main(_folders))
    found = {str(cut): _gradient(_plan(cut, folder)) for cut in cuts(distributed.world_size())}
    for stage in stages(distributed.world_size()):
        plan = _plan(Cut(TOP_K, stage, 1), folder, {"bf16": {"enabled": True}})
        found |= {f"whole-{stage}": _weights(plan, [4]), f"resumed-{stage}": _weights(plan, [2, 4])}
    return found


def _gradient(plan: PhasePlan) -> dict[str, Tensor]:
    with _training(plan) as (ds_engine, steps):
        before = whole_state_dict(ds_engine.module, keep=distributed.is_main())
        steps(0, 1)
        after = whole_state_dict(ds_engine.module, keep=distributed.is_main())
    return {name: before[name] - value for name, value in after.items()}


def _weights(plan: PhasePlan, stops: list[int]) -> dict[str, Tensor]:
    """The weights on rank 0 after the last of these steps; at every stop a new engine goes on from a checkpoint."""
    start, weights = 0, {}
    for stop in stops:
        with _training(plan) as (ds_engine, steps):
            if start:
                ds_engine.load_checkpoint(plan.folder / "checkpoint")
            steps(start, stop)
            ds_engine.save_checkpoint(plan.folder / "checkpoint")
            weights = whole_state_dict(ds_engine.module, keep=distributed.is_main())
        start = stop
    return weights


@contextmanager
def _training(plan: PhasePlan) -> Iterator[tuple[Any, Any]]:
    """An engine, and a function that takes its steps from one to another."""
    model, groups, objective = plan.prepare()
    ds_engine = engine.start_engine(model, groups, plan.engine_config, plan.base, lambda step: 1.0)
    for technique in objective.techniques:
        technique.start(ds_engine.device)
    order = BatchPlan(plan.task.examples("train").lengths, EXAMPLES, seed=0)
    report = RunLog(plan.folder, "train", 1, plan.phase.loss, tensorboard=False, training_examples=EXAMPLES)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            batch = order.between(step * EXAMPLES, (step + 1) * EXAMPLES)
            train_step(objective, ds_engine, batch, report, seed=0)

    yield ds_engine, steps
    for technique in objective.techniques:
        technique.stop()
    engine.stop_engine(ds_engine)


def _plan(cut: Cut, folder: Path, precision: dict[str, Any] | None = None) -> PhasePlan:
    task, _, variant = cut.task.partition("-")
    own = VARIANTS[cut.task]
    # a cache of a top k keeps no logits
    weights = {name: WEIGHTS[name] for name in (("logits", "cos", "hidden") if cut.task == TOP_K else WEIGHTS)}
    distill = {"teacher": str(folder / task / "teacher"), "terms": [*weights], "layer_pairs": [[1, 1], [-1, -1]]}
    if task == "mlm":
        distill["restrict_ce_to_mask"] = variant != "everywhere"
    if cut.task == TOP_K:
        distill |= {"cache_teacher": {"top_k": 4}, "divergence": "js"}
    techniques: dict = {"distill": distill}
    loss = {f"distill.{term}": weight for term, weight in weights.items()}
    if variant == "skip":
        load_plugin(str(ROOT / "examples/layer_skip.py"))
        techniques, loss = {"layer_skip": {"layer_dropout": 0.0, "rotation": 1}}, {"layer_skip.exits": 0.7}
    recipe = parse_recipe(
        {
            "task": {"name": task, "data_dir": str(folder), "validation_file": own["train_file"], **own},
            "phases": [
                {
                    "max_steps": 1,
                    "techniques": techniques,
                    "loss": {"task": 1.0} | loss,
                }
            ],
            "cache_dir": str(folder / "cache"),
        }
    )
    (phase,) = recipe.phases
    student = folder / task / ("llama" if variant == "skip" else "student")
    config = {
        "train_micro_batch_size_per_gpu": EXAMPLES // cut.accumulation // distributed.world_size(),
        "gradient_accumulation_steps": cut.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": cut.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "steps_per_print": 10**9,
        **(precision or {}),
    }
    lm = build_task(task_of(phase, recipe), str(student), recipe.cache_dir)
    return PhasePlan(
        phase, phase.techniques, lm, str(student), PhaseLength(1, 0, 0), config, Hyperparameters(1.0), folder
    )


def _folders() -> str:
    """The text, and of each task a student and a wider teacher, without dropout."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(LINES) + "\n")
    tagged = ["\n".join(f"{word}\t{TAGS[word]}" for word in line.split()) for line in LINES]
    (folder / "tags.conll").write_text("\n\n".join(tagged) + "\n")
    (folder / "more.txt").write_text("\n".join(LINES * 3) + "\n")
    asked = [{"role": "user", "content": "the dog"}]
    chats = [{"messages": [*asked, {"role": "assistant", "content": line}] * 2} for line in LINES * 2]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    tokenizer = train_tokenizer(LINES * 5, 60, True)
    tokenizer.chat_template = CHAT_TEMPLATE
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(3)
    for name, width in (("student", 16), ("teacher", 24)):
        bert = BertConfig(hidden_size=width, intermediate_size=32, **SMALL, **vocabulary)
        bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt2 = GPT2Config(n_embd=width, n_positions=128, **SMALL, **vocabulary, **no_dropout)
        # the head of each is trained, as far as its folder says
        tags = BertConfig(**bert.to_dict() | {"id2label": dict(enumerate(TAGS.values()))})
        kinds = {"mlm": (AutoModelForMaskedLM, bert), "clm": (AutoModelForCausalLM, gpt2)}
        for task, (auto, config) in (kinds | {"ner": (AutoModelForTokenClassification, tags)}).items():
            auto.from_config(config).save_pretrained(folder / task / name)
            tokenizer.save_pretrained(folder / task / name)
    shape = SMALL | {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 32}
    llama = LlamaConfig(**shape, **vocabulary, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(llama).save_pretrained(folder / "clm" / "llama")
    tokenizer.save_pretrained(folder / "clm" / "llama")
    return str(folder)
