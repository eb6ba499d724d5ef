"""The engine file: read as DeepSpeed reads it, every mistake reported at once, every "auto" filled."""

import json
from itertools import product
from pathlib import Path

import pytest

from ds_trainer.engine.engine_file import (
    MICRO,
    STEPS,
    TRAIN,
    Hyperparameters,
    check_engine_file,
    resolve_engine_file,
    settled_numbers,
    settled_schedule,
)
from ds_trainer.engine.keys import key_table
from ds_trainer.files.reading import read_json
from ds_trainer.recipe.recipe import Phase

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": "auto", "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"last_batch_iteration": -1}
        | dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": NVME | {"pin_memory": True, "buffer_count": 4, "fast_init": False},
        "offload_param": NVME | {"buffer_size": 1e8, "max_in_cpu": 1e9},
        "sub_group_size": 1e9,
        "overlap_comm": "auto",
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
    **dict.fromkeys((TRAIN, MICRO, STEPS, "gradient_clipping"), "auto"),
    "steps_per_print": 2000,
}
"""Hugging Face's file for ZeRO-3 with NVMe."""
DEEPSPEED = {
    TRAIN: 8,
    "communication_data_type": "FP32",
    "zero_optimization": {"stage": 2, "cpu_offload": False, "leaf_module": {"classes": "Block"}},
    "flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "parallel_write": {"pipeline_stage": False}},
    "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"},
    "data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {"anything": 1}}},
    "pipeline": {"stages": "auto"},
    "_comment": "mine",
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}
"""Sections of DeepSpeed's documentation; those that ds_trainer refuses ask for nothing here."""


def zero(stage, **words):
    return {"zero_optimization": {"stage": stage} | words}


def phase_of(**fields):
    return Phase(max_steps=10, **fields)


def test_comments_and_trailing_commas_are_read(tmp_path):
    """A file with all three kinds of comment and trailing commas gives the object that plain JSON would."""
    text = '{\n// a\n# b\n/* c */ "zero_optimization": {"stage": 2,},\n"train_batch_size": 5e1, }'
    (tmp_path / "engine.json").write_text(text)
    assert read_json(tmp_path / "engine.json", "the engine file") == zero(2) | {TRAIN: 50}


@pytest.mark.parametrize("config", [HUGGING_FACE, DEEPSPEED], ids=["hugging_face", "deepspeed"])
def test_files_that_users_have_are_taken_by_deepspeed_too(config):
    """Neither file has a mistake, and DeepSpeed's own parser reads from the resolved one what was filled in."""
    ds_config = pytest.importorskip("deepspeed.runtime.config")
    assert check_engine_file(config, None, 1) == []
    resolved = resolve_engine_file(config, None, 1, hidden_size=64, total_steps=10, warmup_steps=2)
    parsed = ds_config.DeepSpeedConfig(json.loads(json.dumps(resolved)))
    assert parsed.train_batch_size == (32 if config[TRAIN] == "auto" else config[TRAIN])
    assert parsed.zero_optimization_stage == config["zero_optimization"]["stage"]


def test_shipped_files_are_good():
    """Every file in ds_configs/ is without mistakes, and resolves with no "auto" left and nothing lost."""
    for path in SHIPPED:
        config = read_json(path, "the engine file")
        assert check_engine_file(config, None, 2) == []
        resolved = resolve_engine_file(config, None, 2, hidden_size=64, total_steps=100, warmup_steps=10)
        assert '"auto"' not in json.dumps(resolved)
        assert set(resolved) >= set(config)
        assert resolved[TRAIN] == 64


ADAM = {"type": "AdamW"}
MISTAKES = [
    ({"train_bath_size": 8}, "train_bath_size is not a key that DeepSpeed knows: did you mean train_batch_size?"),
    (zero(3, offload_param={"devise": "cpu"}), "offload_param.devise is not a key that DeepSpeed knows: did you mean"),
    *(({MICRO: value}, f"{MICRO} is {json.dumps(value)}: write a whole number") for value in (8.5, "8", True, 0, [8])),
    ({"gradient_clipping": float("nan")}, "gradient_clipping is NaN: write a number"),
    ({"steps_per_print": "auto"}, 'steps_per_print is "auto", which nothing can fill'),
    ({"prescale_gradients": "false"}, 'prescale_gradients is "false": write true or false'),
    ({"bf16": True}, "bf16 is true: write an object"),
    (zero(0, offload_optimizer={"device": "cpu"}), "stage 1, 2 or 3"),
    (zero(2, offload_param={"device": "cpu"}), "works with stage 3"),
    (zero(3, offload_param={"device": "nvme"}), "nvme_path is missing"),
    ({"managed_gradient_accumulation": False}, "leaves the accumulation to DeepSpeed"),
    (zero(1, compute_grad_norm=False), "compute_grad_norm is false"),
    ({"prescale_gradients": True} | zero(1), "does not work with ZeRO, and zero_optimization.stage is 1"),
    ({"gradient_predivide_factor": 2} | zero(3), "gradient_predivide_factor does not work with ZeRO"),
    ({"optimizer": {"params": {}}}, "optimizer has no type"),
    ({"scheduler": {"type": "StepLR"}}, "write one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"),
    (zero(2, zenflow={}), "zero_optimization.zenflow is refused"),
    ({TRAIN: 30, MICRO: 8, STEPS: 2}, f"{TRAIN} is 30, but {MICRO} 8 x {STEPS} 2 x 2 ranks = 32"),
    ({TRAIN: 30, STEPS: 4}, f"{TRAIN} is 30, but {MICRO} 3 x {STEPS} 4 x 2 ranks = 24"),
]


@pytest.mark.parametrize(
    ("config", "words"), MISTAKES, ids=lambda value: None if isinstance(value, str) else str(value)[:60]
)
def test_each_mistake_is_reported_once(config, words):
    """What DeepSpeed ignores, trains wrongly with, or refuses in words that do not help, is exactly one mistake."""
    (mistake,) = check_engine_file(config, None, 2)
    assert words in mistake


def test_what_works_is_no_mistake():
    """Combinations that differ from a mistake in one word, and refused keys that ask for nothing."""
    for config in (
        {"prescale_gradients": True, "gradient_predivide_factor": 1.0} | zero(0),
        zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        {"// mine": 1, "#": 2},
        {"nebula": None, "elasticity": False, "compression_training": {"weight_quantization": {"enabled": False}}},
    ):
        assert check_engine_file(config, None, 2) == [], config


def test_a_refused_key_is_one_mistake_or_is_dropped():
    """One that asks for something has the way out in its message; another one never reaches DeepSpeed."""
    for path, value in product(key_table()["refused"], (True, None)):
        config = value
        for key in reversed(path.split(".")):
            config = {key: config}
        mistakes = check_engine_file(config, None, 1)
        assert [m for m in mistakes if m.startswith(f"{path} is refused, remove it: ")] == mistakes
        assert len(mistakes) == bool(value)
        assert f'"{path.split(".")[-1]}"' not in json.dumps(resolve_engine_file(config, None, 1))


def test_the_table_has_the_keys_of_the_installed_deepspeed():
    """Its sections that are pydantic models are read field by field, and its top level by what DeepSpeed asks for."""
    ds_config = pytest.importorskip("deepspeed.runtime.config")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    models |= {"tensorboard": TensorBoardConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig, "comet": CometConfig}
    keys, refused = key_table()["keys"], key_table()["refused"]
    for section, model in {**models, "comms_logger": CommsLoggerConfig}.items():
        names = {name for key, field in model.model_fields.items() for name in (key, field.alias or key)}
        ours = keys[section].keys() | {key.split(".")[1] for key in refused if key.startswith(f"{section}.")}
        assert names == ours - {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    asked = set()

    class Noted(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            asked.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

    ds_config.DeepSpeedConfig(Noted({TRAIN: 1, MICRO: 1, STEPS: 1}))
    assert asked - {"allgather_size"} <= keys.keys() | refused.keys()


def test_two_batch_numbers_give_the_third():
    """train = micro x accumulation x ranks holds in the resolved file, whichever of the numbers are given."""
    for given, fields, world, triangle in (
        ((None, None, None), {}, 2, (64, 32, 1)),
        (("auto",) * 3, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}, 2, (32, 8, 2)),
        ((64, None, 4), {}, 2, (64, 8, 4)),
        ((None, 8, None), {"train_batch_size": 64}, 1, (64, 8, 8)),
        ((32, 8, 2), {"train_batch_size": 32, "per_device_train_batch_size": 8}, 2, (32, 8, 2)),
    ):
        config = {key: value for key, value in zip((TRAIN, MICRO, STEPS), given, strict=True) if value is not None}
        assert check_engine_file(config, phase_of(**fields), world) == []
        resolved = resolve_engine_file(config, phase_of(**fields), world)
        assert tuple(resolved[key] for key in (TRAIN, MICRO, STEPS)) == triangle


CYCLE = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}}
COSINE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}}


def warmup(**params):
    return {"scheduler": {"type": "WarmupLR", "params": params}}


def test_two_different_values_name_both_places():
    """A value in the file and another in the recipe is one mistake that names both places and both values."""
    lr, betas = ({"optimizer": ADAM | {"params": params}} for params in ({"lr": 1e-4}, {"betas": [0.9, 0.98]}))
    for config, fields, *places in (
        ({MICRO: 8}, {"per_device_train_batch_size": 16}, "8 in my file", "16 in the recipe"),
        (lr, {"learning_rate": 5e-5}, "0.0001", "5e-05"),
        (betas, {"adam_beta2": 0.999}, "betas[1] is 0.98", "adam_beta2 is 0.999"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16.enabled is false", "bf16 is true"),
        ({"fp16": {"enabled": True}}, {"bf16": True}, "fp16 and bf16 are both on"),
        (warmup(warmup_num_steps=2), {"lr_scheduler_type": "cosine"}, 'lr_scheduler_type is "cosine" in the recipe'),
        (warmup(warmup_num_steps=2), {"warmup_steps": 4}, "warmup_num_steps is 2", "warmup_steps is 4 in the recipe"),
        (CYCLE, {"warmup_steps": 2}, 'scheduler.type is "OneCycle" in my file'),
    ):
        (mistake,) = check_engine_file(config, phase_of(**fields), 1, name="my file")
        assert [place for place in places if place not in mistake] == []


def test_the_schedule_has_one_home():
    """Where one of the files is silent, the other's is what DeepSpeed is given, and what prune plans by.

    DeepSpeed's default for an absent number of steps is 1000.
    """
    constant, cosine = {"lr_scheduler_type": "constant_with_warmup"}, {"lr_scheduler_type": "cosine"}
    for config, fields, settled, given in (
        (warmup(warmup_num_steps=4), constant | {"warmup_steps": 4}, constant | {"warmup_steps": 4}, 4),
        (warmup(), {"warmup_steps": 4}, constant | {"warmup_steps": 4}, 4),
        (warmup(warmup_num_steps=4), {}, constant | {"warmup_steps": 4}, 4),
        (COSINE, {}, cosine | {"warmup_steps": 1000}, None),
    ):
        phase = phase_of(**fields)
        assert check_engine_file(config, phase, 1) == []
        assert settled_schedule(config, phase) == settled
        params = resolve_engine_file(config, phase, 1, warmup_steps=4)["scheduler"]["params"]
        assert params.get("warmup_num_steps") == given
    assert check_engine_file(CYCLE, phase_of(warmup_steps=0), 1) == []


def test_hugging_face_autos_are_filled():
    """Every "auto" that the recipe or the model can fill has the value that Hugging Face's Trainer gives it.

    The buckets of a narrow model are larger than Hugging Face's.
    """
    fields = {"per_device_train_batch_size": 4, "learning_rate": 3e-5, "weight_decay": 0.1, "adam_beta2": 0.98}
    phase = phase_of(**fields, bf16=True)
    resolved = resolve_engine_file(HUGGING_FACE, phase, 2, hidden_size=4096, total_steps=500, warmup_steps=0)
    assert resolved["optimizer"]["params"] == {"lr": 3e-5, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1}
    warmed = {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 1, "total_num_steps": 500}
    assert resolved["scheduler"]["params"] == {"last_batch_iteration": -1} | warmed
    assert (resolved["bf16"]["enabled"], resolved["fp16"]["enabled"]) == (True, False)
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    assert [resolved["zero_optimization"][key] for key in sizes] == [16_777_216, 15_099_494, 40_960]
    narrow = resolve_engine_file(HUGGING_FACE, phase, 2, hidden_size=64)
    assert [narrow["zero_optimization"][key] for key in sizes] == [4_000_000, 4_000_000, 640]
    assert narrow["scheduler"]["params"]["total_num_steps"] == "auto"  # not known yet


def test_the_recipes_precision_reaches_the_file():
    """bf16 of the recipe turns the engine's bf16 on, unless the file has an autocast of that type."""
    assert resolve_engine_file({}, phase_of(bf16=True), 1)["bf16"] == {"enabled": True}
    assert "bf16" not in resolve_engine_file({}, phase_of(bf16=False), 1)
    autocast = {"torch_autocast": {"enabled": "auto", "dtype": "bfloat16"}}
    resolved = resolve_engine_file(autocast, phase_of(bf16=True), 1)
    assert (resolved["torch_autocast"]["enabled"], "bf16" in resolved) == (True, False)


def test_offload_gets_an_optimizer_block():
    """CPU offload without an optimizer block gets AdamW with the recipe's numbers; else there is none."""
    offload, phase = zero(2, offload_optimizer={"device": "cpu"}), phase_of(weight_decay=0.1)
    params = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert resolve_engine_file(offload, phase, 1)["optimizer"] == {"type": "AdamW", "params": params}
    for config in (zero(2), offload | {"zero_force_ds_cpu_optimizer": False}):
        assert "optimizer" not in resolve_engine_file(config, phase, 1)


def test_numbers_are_the_files_the_recipes_or_the_defaults():
    """In this order; an absent gradient_clipping is DeepSpeed's 1.0 in writing, and 0.0 is a value."""
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.9]}}}
    phase = phase_of(adam_epsilon=1e-6, max_grad_norm=0.0)
    assert settled_numbers(config, phase, 1).optimizer == Hyperparameters(1e-4, 0.0, (0.8, 0.9), 1e-6)
    resolved = resolve_engine_file(config, phase, 1)
    assert (resolved["optimizer"]["params"]["eps"], resolved["gradient_clipping"]) == (1e-6, 0.0)
    assert resolve_engine_file({}, None, 1)["gradient_clipping"] == 1.0
