"""Optimizer, scheduler and ZeRO blocks: what DeepSpeed refuses late is told at once, with the way out."""

import pytest
from support.launching import run_python

from ds_trainer.engine.engine_file import Said, check_engine_file, scheduler_mistakes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: write one of 0, 1, 2, 3"),
        (
            {"zero_optimization": {"stage": "auto"}},
            'zero_optimization.stage is "auto", which nothing can fill',
        ),
        ({"steps_per_print": "auto"}, 'steps_per_print is "auto", which nothing can fill'),
        ({"gradient_clipping": -1}, "gradient_clipping is -1: write a number of at least 0"),
        ({"gradient_clipping": True}, "gradient_clipping is true: write a number"),
        ({"bf16": {"enabled": "yes"}}, 'bf16.enabled is "yes": write true or false'),
        ({"bf16": True}, "bf16 is true: write an object"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf17"}}, "torch_autocast.dtype"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both on"),
        ({"bf16": {}, "bfloat16": {}}, "bf16 and bfloat16 are one section"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window is 0"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "stage 1 or 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "works with stage 3"),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.offload_optimizer is on"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path is missing"),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1}},
            "are one setting",
        ),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "SUM"}, "ZeRO stage 3 cannot do"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is refused"),
        ({"prescale_gradients": True, "zero_optimization": {"stage": 1}}, "needs zero_optimization.reduce_scatter"),
        (
            {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 2}},
            "gradient_predivide_factor needs zero_optimization.reduce_scatter false with stage 2",
        ),
        (
            {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3, "reduce_scatter": False}},
            "does not work with zero_optimization.stage 3",
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2}},
            "needs zero_optimization.offload_optimizer with Adam or AdamW, or bf16.bf16_optimizer_states",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}},
            "data_types.grad_accum_dtype",
        ),
        ({"optimizer": {"type": "AdanW"}}, "did you mean adamw?"),
        ({"optimizer": {"type": "sgd"}}, "did you mean SGD?"),
        ({"optimizer": {"params": {}}}, "optimizer has no type"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, 'optimizer.params.lr is "1e-4"'),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}}, "optimizer.params.betas"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}}, "optimizer.params.momentum"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
        ({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}, "zero_allow_untested_optimizer"),
        ({"scheduler": {"type": "WarmupDcayLR", "params": {}}}, "did you mean WarmupDecayLR?"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler has no params"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps is missing"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "warmup_num_steps is 0"),
        (
            {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}, "zero_optimization": {"stage": 1}},
            "of torch",
        ),
    ],
)
def test_each_mistake_is_told_once(config, words):
    """Each value or combination that DeepSpeed refuses later gives exactly one mistake, which names it."""
    (mistake,) = check_engine_file(config, Said(), 1)
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
        told = scheduler_mistakes({"scheduler": {"type": kind, "params": params}}, [1e-5, 1e-2])
        assert flat == bool(told), (kind, params)


@pytest.fixture
def apex(tmp_path, monkeypatch):
    """A stand-in for apex, found by processes started from here."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "amp.py").write_text("def initialize(*given, **named):\n    return given\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_amp_is_refused_even_with_apex(apex, tiny_recipe, write_json, tmp_path):
    """Exit code 2 and what to use in its place, before torch is loaded: DeepSpeed no longer hands anything to apex."""
    files = (
        "--deepspeed_config",
        write_json("amp.json", {"amp": {"enabled": True, "opt_level": "O1"}}),
        "--recipe",
        write_json("r.json", tiny_recipe),
    )
    code = (
        "import sys, apex.amp; from ds_trainer.cli.command import run_command; "
        "from ds_trainer.cli.train import train_command; "
        "code = run_command(train_command, sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    done = run_python("-c", code, *files, "--output_dir", str(tmp_path / "out"))
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert all(word in done.stderr for word in ("amp is refused", "bf16, fp16 or torch_autocast"))
    assert not (tmp_path / "out").exists()


def test_deepspeed_refuses_amp_even_with_apex(apex):
    """The refusal is DeepSpeed's: its own reader of the file raises for an amp block, apex installed or not."""
    code = (
        "import apex.amp; from deepspeed.runtime.config import DeepSpeedConfig; "
        "DeepSpeedConfig({'train_batch_size': 1, 'amp': {'enabled': True, 'opt_level': 'O1'}})"
    )
    done = run_python("-c", code)
    assert done.returncode == 1
    assert "DeepSpeedConfigError: NVIDIA Apex AMP integration has been removed" in done.stderr
