"""The steps of the loop on a GPU: what the host waits for, and the memory that they take."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from loop_overhead import LOG_EVERY, plan_of, started
from support.host_waits import host_waits, of
from support.launching import WORDS

from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.run.phase import PhasePlan
from ds_trainer.run.rehearsal import LiveMemory, begun, measure_memory
from ds_trainer.techniques.prune.selection import select_largest

pytestmark = pytest.mark.usefixtures("world")
SOON = {"initial_warmup": 0, "final_warmup": 0.3, "mask_init": "uniform", "mask_scale": 0.01}
TECHNIQUES = {
    "plain": {},
    "topK": {"prune": SOON | {"final_threshold": 0.3}},
    "heads and neurons": {"prune": SOON | {"final_threshold": 0.5, "granularity": "hybrid"}},
    "l0": {"prune": {"pruning_method": "l0", "regularization": "l0", "final_lambda": 5, **SOON}},
    "distilled": {"distill": {"alpha_ce": 0.5, "alpha_distil": 0.5, "cache_teacher": False}},
    "cached teacher": {"distill": {"alpha_ce": 0.5, "alpha_distil": 0.5, "cache_teacher": True}},
    "exits": {"exits": {"training": "joint"}},
}
BERT = {"model_type": "bert", "vocab_size": 30522, "num_attention_heads": 4, "attn_implementation": "eager"}
TINY = BERT | {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
SMALL = BERT | {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}


@pytest.fixture
def planned(tiny_recipe, tmp_path):
    """Plans a phase of a new BERT on the CSV task: by its config, the engine file's words, and the techniques."""

    def plan(config: dict, words: dict, techniques: dict | None = None) -> PhasePlan:
        model, engine_file = tmp_path / "model", tmp_path / "engine.json"
        tokenizer = train_tokenizer([" ".join(WORDS.values())], 128, lowercase=True)
        create_folder(config, tokenizer, model, seed=0)
        engine_file.write_text(json.dumps(words))
        techniques = dict(techniques or {})
        if "distill" in techniques:
            techniques["distill"] = techniques["distill"] | {"teacher": str(model)}
        phase = {"max_steps": 60, "train_batch_size": 8, "logging_steps": LOG_EVERY, "techniques": techniques}
        recipe = {"task": tiny_recipe["task"], "phases": [phase]}
        plan = plan_of(recipe, engine_file, tmp_path, str(model))
        save_folder(plan.task.build_model(model), tokenizer, model)  # with a head, as a teacher must have one
        return plan

    return plan


def engine_words(stage: int, precision: str) -> dict:
    sizes = {"reduce_bucket_size": 10_000_000, "stage3_prefetch_bucket_size": 10_000_000}
    return {"zero_optimization": {"stage": stage} | sizes, "bf16": {"enabled": precision == "bf16"}}


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16")])
def test_nothing_of_this_library_waits_between_records(name, stage, precision, planned, device):
    """DeepSpeed and transformers wait where they do; what they ask for is in the message of a failure."""
    if name == "topK" and device.type == "cpu":
        pytest.skip("on a CPU a cutoff is found otherwise, with values on the host")
    plan = planned(TINY, engine_words(stage, precision), TECHNIQUES[name])
    with started(plan) as loop:
        loop.steps()
        waits = host_waits(loop.between_records, device)
    assert of("ds_trainer", waits) == 0, waits


def test_a_wait_is_counted_and_placed(device):
    """Those of this library's search on a CPU, and one of this test; arithmetic on the device waits for nothing."""
    values = torch.randn(100, device=device)
    assert host_waits(lambda: values.sum() + 1, device).total() == 0
    waits = host_waits(lambda: (select_largest(lambda: [values], [100], 10), values.sum().item()), device)
    assert of("ds_trainer", waits) >= 3
    assert waits["another program"] == 1


@pytest.mark.parametrize(("stage", "precision"), product(range(4), ("fp32", "bf16")))
def test_a_dry_run_foretells_the_peak_of_the_gpu(stage, precision, planned, device):
    """Within 15%: of all that the allocator gives at once, for a model of 13M weights and its activations."""
    if device.type == "cpu" and (stage, precision) == (0, "fp32"):
        pytest.skip("on a CPU the weights stay where they were loaded, and are not counted")
    plan = planned(SMALL, engine_words(stage, precision))
    process, prepared = distributed.resident_memory(), plan.prepare()
    with begun(plan, prepared) as sizes:
        memory = measure_memory(plan, prepared, sizes, process)
    described = replace(memory, on_gpu=True).describe(plan.engine_config)
    gc.collect()
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if on_gpu else LiveMemory() as live, started(plan) as loop:
        loop.between_records()
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else live.peak
    assert described["peak_of_the_gpu"] == pytest.approx(peak, rel=0.15)
