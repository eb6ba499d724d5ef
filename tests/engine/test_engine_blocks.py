"""Optimizer, scheduler and ZeRO blocks: the mistakes that the check of the text reports, before DeepSpeed is loaded."""

import pytest

from ds_trainer.config.recipe import Phase
from ds_trainer.engine.engine_file import check_engine_file, resolve_engine_file, scheduler_mistakes, settled_schedule


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: write one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage is "auto", which nothing can fill'),
        ({"steps_per_print": "auto"}, 'steps_per_print is "auto", which nothing can fill'),
        ({"gradient_clipping": -1}, "gradient_clipping is -1: write a number of at least 0"),
        ({"gradient_clipping": True}, "gradient_clipping is true: write a number"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled is "yes": write true or false'),
        ({"bf16": True}, "bf16 is true: write an object"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf17"}}, "torch_autocast.dtype"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both on"),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16 and bf16 are one setting"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "works with stage 3"),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.offload_optimizer is on"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path is missing"),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1}},
            "are one setting",
        ),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is refused"),
        ({"prescale_gradients": True, "zero_optimization": {"stage": 1}}, "needs zero_optimization.reduce_scatter"),
        (
            {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3, "reduce_scatter": False}},
            "does not work with zero_optimization.stage 3",
        ),
        ({"optimizer": {"type": "AdanW"}}, "did you mean adamw?"),
        ({"optimizer": {"type": "sgd"}}, "did you mean SGD?"),
        ({"optimizer": {"params": {}}}, "optimizer has no type"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, 'optimizer.params.lr is "1e-4"'),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}}, "optimizer.params.betas[1] is 1"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "a list of 2 values, each a number of at"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}}, "optimizer.params.momentum"),
        ({"scheduler": {"type": "WarmupDcayLR", "params": {}}}, "did you mean WarmupDecayLR?"),
        ({"scheduler": {"params": {}}}, "scheduler has no type"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "warmup_num_steps is 0"),
        (
            {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}, "zero_optimization": {"stage": 1}},
            "of torch",
        ),
    ],
)
def test_each_mistake_is_reported_once(config, words):
    """A value outside the table, and a combination that DeepSpeed does not refuse clearly, is exactly one mistake."""
    (mistake,) = check_engine_file(config, None, 1)
    assert words in mistake


@pytest.mark.parametrize(
    ("kind", "params", "count"),
    [
        ("WarmupLR", {}, 0),
        ("WarmupLR", {"warmup_max_lr": "auto"}, 1),
        ("WarmupLR", {"warmup_max_lr": [1e-5, 1e-2]}, 0),
        ("WarmupLR", {"warmup_max_lr": [1e-5]}, 1),
        ("WarmupDecayLR", {"total_num_steps": 10}, 1),
        ("WarmupDecayLR", {"total_num_steps": 10, "warmup_max_lr": None}, 0),
        ("WarmupCosineLR", {"total_num_steps": 10}, 0),
        ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}, 2),
        ("LRRangeTest", {}, 1),
    ],
)
def test_schedulers_that_flatten_the_groups_are_refused(kind, params, count):
    """A schedule that sets one rate on two groups is refused with the way out, unless the rates are equal."""
    config = {"scheduler": {"type": kind, "params": params}}
    mistakes = scheduler_mistakes(config, [1e-5, 1e-2])
    assert len(mistakes) == count
    assert all("lr_scheduler_type" in mistake or "parameter groups" in mistake for mistake in mistakes)
    if not any(isinstance(value, list) for value in params.values()):
        assert scheduler_mistakes(config, [1e-5, 1e-5]) == []
    assert scheduler_mistakes({}, [1e-5, 1e-2]) == []


def test_restarts_of_the_rate_are_refused_beside_a_schedule_that_would_undo_them():
    """The scheduler block of the engine file wins over the recipe's schedule, so that it would have none."""
    config = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}}
    (mistake,) = check_engine_file(config, Phase(max_steps=10, lr_restarts=1), 1)
    assert mistake.startswith("lr_restarts of the recipe has no effect beside the scheduler block, WarmupCosineLR")
    assert check_engine_file(config, Phase(max_steps=10), 1) == check_engine_file({}, Phase(max_steps=10), 1) == []


@pytest.mark.parametrize(
    ("params", "fields", "mistake"),
    [
        ({"warmup_num_steps": 2}, {"lr_scheduler_type": "cosine"}, 'but lr_scheduler_type is "cosine" in the recipe'),
        (
            {"warmup_num_steps": 2},
            {"warmup_steps": 4},
            "warmup_num_steps is 2 in the engine file, but warmup_steps is 4",
        ),
        ({"warmup_num_steps": 2}, {"warmup_steps": 0.4}, "but warmup_steps is 4 in the recipe"),
        ({"warmup_num_steps": 4}, {"warmup_steps": 0.4, "lr_scheduler_type": "constant_with_warmup"}, None),
        ({"warmup_num_steps": "auto"}, {"warmup_steps": 4}, None),
        ({}, {"warmup_steps": 4}, None),
        ({"warmup_num_steps": 4}, {}, None),
    ],
)
def test_the_schedule_has_one_home(params, fields, mistake):
    """The engine file's wins in DeepSpeed, and prune plans by the recipe's: two that differ are refused, both named.

    Where one is silent, the other is what DeepSpeed is given and what prune plans by.
    """
    config, phase = {"scheduler": {"type": "WarmupLR", "params": params}}, Phase(max_steps=10, **fields)
    mistakes = check_engine_file(config, phase, 1)
    if mistake:
        assert len(mistakes) == 1
        assert mistake in mistakes[0]
        return
    assert mistakes == []
    assert settled_schedule(config, phase) == {
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": fields.get("warmup_steps", 4),
    }
    assert resolve_engine_file(config, phase, 1, warmup_steps=4)["scheduler"]["params"]["warmup_num_steps"] == 4


def test_a_schedule_that_the_recipe_has_no_name_for_stands_alone():
    """Without a warm-up that it has not, and without another shape; an absent number of steps is DeepSpeed's 1000."""
    config = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}}
    assert len(check_engine_file(config, Phase(max_steps=10, lr_scheduler_type="linear", warmup_steps=2), 1)) == 2
    assert check_engine_file(config, Phase(max_steps=10, warmup_steps=0), 1) == []
    silent = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}}
    assert settled_schedule(silent, Phase(max_steps=10)) == {"lr_scheduler_type": "cosine", "warmup_steps": 1000}


def test_what_flattens_and_what_does_not_is_deepspeeds_behaviour():
    """DeepSpeed's schedulers leave one rate on every group exactly where scheduler_mistakes says so."""
    torch = pytest.importorskip("torch")
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    for kind, params in [
        ("WarmupLR", {}),
        ("WarmupLR", {"warmup_max_lr": 1e-3}),
        ("WarmupDecayLR", {"total_num_steps": 100}),
        ("WarmupDecayLR", {"total_num_steps": 100, "warmup_max_lr": None}),
        ("WarmupDecayLR", {"total_num_steps": 100, "warmup_max_lr": [1e-5, 1e-2]}),
        ("WarmupCosineLR", {"total_num_steps": 100}),
        ("OneCycle", {"cycle_min_lr": [1e-6, 1e-3], "cycle_max_lr": [1e-5, 1e-2]}),
        ("OneCycle", {"cycle_min_lr": 1e-6, "cycle_max_lr": 1e-2}),
        ("LRRangeTest", {"lr_range_test_min_lr": [1e-5, 1e-2]}),
        ("LRRangeTest", {}),
    ]:
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (1e-5, 1e-2)]
        optimizer = torch.optim.AdamW(groups)
        schedule = getattr(schedules, kind)(optimizer, **params)
        for _ in range(5):
            schedule.step()
        flat = len({group["lr"] for group in optimizer.param_groups}) == 1
        mistakes = scheduler_mistakes({"scheduler": {"type": kind, "params": params}}, [1e-5, 1e-2])
        assert flat == bool(mistakes), (kind, params)
