"""Steps that do no good: skipped ones are counted and reported, spoilt weights and a minimal loss scale end the run."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from support.launching import run_deepspeed
from support.numerics_matrix import DECAY, EFFECTIVE, IDLE, RANKS, SKIPPING, SOUND, SPOILT, STOPPED, config_of

from ds_trainer.engine.numerics import StepWatch
from ds_trainer.engine.verdicts import idle_keys


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The outcome of every case on each of two ranks: name -> [rank 0's, rank 1's]."""
    out = tmp_path_factory.mktemp("numerics") / "seen.json"
    done = run_deepspeed(RANKS, "tests/support/numerics_matrix.py", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), done.stderr


def of_all_ranks(seen, name):
    """A case's outcome, the same on every rank but for the losses, which are of a rank's own data."""
    ranks = [{key: value for key, value in outcome.items() if key != "losses"} for outcome in seen[0][name]]
    assert len(ranks) == RANKS
    # text, since NaN differs from itself
    assert {json.dumps(outcome) for outcome in ranks} == {json.dumps(ranks[0])}
    return ranks[0]


@pytest.mark.parametrize("name", SKIPPING)
def test_a_skipped_step_is_counted_and_reported(seen, name):
    """Infinite gradients on one rank cost both the step: counted, reported, weights finite, the schedule unchanged."""
    outcome = of_all_ranks(seen, name)
    assert (outcome["global_steps"], outcome["skipped_steps"], outcome["error"]) == (4, 1, None)
    assert outcome["finite"]
    rates = outcome["rates"]
    assert rates[2] == rates[1]
    assert rates[3] != rates[2]
    log = seen[1].split(f"case {name}\n")[1].split("\ncase ")[0]
    assert "tiny: optimizer step 3 was skipped" in log
    assert ("the loss scale is now" in log) == ("fp16" in SKIPPING[name].precision)


def test_the_norm_is_the_same_whatever_the_precision(seen):
    """The logged norm is that of the unscaled loss, also without ZeRO."""
    first = {name: of_all_ranks(seen, name)["norms"][0] for name in SKIPPING if SKIPPING[name].precision != "autocast"}
    first |= {name: of_all_ranks(seen, name)["norms"][0] for name in ("fp32-0", "fp32-0, unclipped", "autocast-0")}
    assert first == {name: pytest.approx(first["fp32-1"], rel=5e-3) for name in first}


@pytest.mark.parametrize("name", [*SKIPPING, "fp32-0", "fp32-0, unclipped", "autocast-0"])
def test_histograms_are_of_whole_parameters(seen, name):
    """However ZeRO cuts weights and gradients: every value is counted once, in its bucket, and the gradients are those
    that the optimizer gets, with the norm that is logged or, where that is more, the one they are clipped to."""
    case, outcome = (SKIPPING | SPOILT)[name], of_all_ranks(seen, name)
    sizes = {"first.weight": 128, "first.bias": 16, "second.weight": 64, "second.bias": 4}
    histograms = outcome["histograms"]
    assert histograms.keys() == {f"{kind}/{name}" for kind in ("weights", "gradients") for name in sizes}
    for tag, histogram in histograms.items():
        assert sum(histogram["counts"]) == pytest.approx(sizes[tag.partition("/")[2]])
    for parameter, values in outcome["weights"].items():
        if values:  # None without ZeRO, where they are not cut
            whole, histogram = torch.tensor(values), histograms[f"weights/{parameter}"]
            assert histogram["counts"] == pytest.approx(whole.histc(64).tolist())
            assert (histogram["low"], histogram["high"]) == (float(whole.min()), float(whole.max()))
            assert histogram["total"] == pytest.approx(float(whole.double().sum()))
            assert histogram["squares"] == pytest.approx(float(whole.double().square().sum()))
    norm = math.sqrt(sum(histogram["squares"] for tag, histogram in histograms.items() if "gradients/" in tag))
    assert norm == pytest.approx(min(outcome["norms"][1], case.clip or math.inf), rel=1e-3)


@pytest.mark.parametrize("name", SPOILT)
def test_a_step_that_spoils_the_weights_ends_the_run(seen, name):
    """Where DeepSpeed takes such a step, both ranks stop at the next check, with one message: step and precision."""
    outcome = of_all_ranks(seen, name)
    assert not outcome["finite"], "DeepSpeed did not take the step: the case shows nothing"
    assert outcome["global_steps"] == 4
    if name == "fp32-1, no norm":
        assert "at step 4 the weights are not finite in fp32" in outcome["error"]
    else:
        assert "the gradients of step 3 are not finite" in outcome["error"]
    assert "Lower learning_rate" in outcome["error"]
    assert ("check_grad_overflow true" in outcome["error"]) == ("unchecked" in name)
    assert ("stage 1" in outcome["error"]) == (SPOILT[name].stage == 0)


@pytest.mark.parametrize("name", STOPPED)
def test_skipping_without_end_ends_the_run(seen, name):
    """After max_skipped steps in a row, or below the smallest scale, both ranks stop: steps, scale, what to change."""
    outcome, case = of_all_ranks(seen, name), STOPPED[name]
    assert outcome["finite"]
    skipped = {"floor-0": 4, "floor, no hysteresis": 4}.get(name, 5 if "floor" in name else case.max_skipped)
    assert outcome["skipped_steps"] == skipped
    first = case.infinite[0] + 1 if case.infinite else 1
    assert f"optimizer steps {first}-{first + skipped - 1} were skipped" in outcome["error"]
    assert f"The weights are those of step {first - 1}" in outcome["error"]
    limit = "it is fp16.min_loss_scale and cannot fall" if "floor" in name else f"max_skipped_steps is {skipped}"
    assert limit in outcome["error"]
    scales = {"floor": 1, "fixed scale": 128, "dynamic scale": 2, "autocast-fp16": 65536}
    scale = next((scale for kind, scale in scales.items() if name.startswith(kind)), None)
    assert ("at a loss scale of" in outcome["error"]) == (scale is not None)
    assert scale is None or f"at a loss scale of {scale};" in outcome["error"]


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("floor-2", "Lower learning_rate or lengthen warmup_steps, or use bf16. The weights"),
        ("dynamic scale", "lower fp16.initial_scale_power or raise max_skipped_steps"),
        ("fixed scale-2", "fp16.loss_scale is fixed at 128: write 0"),
        ("bf16", "look at the data of that step"),
        ("autocast-fp16", 'write torch_autocast.dtype "bfloat16"'),
    ],
)
def test_the_message_names_the_cure(seen, name, cure):
    """Each kind of endless skipping has its own cure."""
    assert cure in of_all_ranks(seen, name)["error"]


def test_a_run_that_goes_on_is_left_alone(seen):
    """Neither skips with steps between them nor those of a scale that starts too high end a run."""
    gap = of_all_ranks(seen, "with a gap")
    assert (gap["error"], gap["skipped_steps"], gap["global_steps"]) == (None, 4, 9)
    start = of_all_ranks(seen, "high start")
    assert start["error"] is None
    assert 8 < start["skipped_steps"] < SOUND["high start"].max_skipped
    taken = start["global_steps"] - start["skipped_steps"]
    assert start["rates"][-1] == pytest.approx(start["rates"][0] * DECAY**taken)


def test_fp16_without_zero_scales_its_loss(seen):
    """Plain gradient descent shows the size of the gradients: fp16 takes the steps of fp32, at ZeRO 0 and 1."""
    losses = {name: outcome[0]["losses"] for name, outcome in seen[0].items() if name.startswith("sgd-")}
    expected = losses.pop("sgd-fp32-1")
    assert abs(expected[-1] / expected[0] - 1) > 0.1
    assert losses == {name: pytest.approx(expected, rel=5e-3) for name in losses}


@pytest.mark.parametrize("name", [*EFFECTIVE, *IDLE])
def test_a_key_changes_the_numbers_where_it_has_an_effect(seen, name):
    """A key without a warning changes the engine's losses; one with a warning leaves them the same to the bit."""
    key, plain = name.split(", ")
    warned = [idle for idle in idle_keys(config_of((EFFECTIVE | IDLE)[name])) if key in idle]
    assert bool(warned) == (name in IDLE)
    same = [rank["losses"] for rank in seen[0][name]] == [rank["losses"] for rank in seen[0][plain]]
    assert same == (name in IDLE)


class Engine(SimpleNamespace):
    """The part of an engine that a StepWatch uses, in fp32; its norms are on a device that cannot be read."""

    def __init__(self, applied: bool) -> None:
        super().__init__(global_steps=1, optimizer=object(), device=torch.device("meta"))
        self.was_step_applied = lambda: applied
        self.get_global_grad_norm = lambda: torch.zeros((), device="meta")


def test_nothing_leaves_the_device_after_a_step():
    """A gradient norm is kept as it is until a check, which does read it."""
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        float(Engine(True).get_global_grad_norm())
    watch = StepWatch(Engine(True), "tiny", 3)
    watch.after_step()
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        watch.check()


FP16_ON_CPU = """
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch computes it
from ds_trainer.cli.command import run_command
from ds_trainer.cli.train import train_command
from ds_trainer.ranks.distributed import leave
leave(run_command(train_command, [word for word in sys.argv[1:] if not word.startswith("--local_rank")]))
"""


@pytest.fixture(scope="module")
def overflowing(tiny_recipe, tmp_path_factory):
    """A run in fp16 whose loss scale doubles at every step, and that is slow to halve it again."""
    folder = tmp_path_factory.mktemp("overflowing")
    phase = tiny_recipe["phases"][0] | {
        "save_steps": 4,
        "save_total_limit": 9,
        "max_skipped_steps": 4,
        "eval_steps": None,
    }
    (folder / "recipe.json").write_text(json.dumps(tiny_recipe | {"phases": [phase]}))
    (folder / "train.py").write_text(FP16_ON_CPU)
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 1, "hysteresis": 20}
    files = ("--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(folder / "recipe.json"))
    flags = ("--set", f"fp16={json.dumps(fp16)}", "--output_dir", str(folder / "out"))
    return run_deepspeed(1, str(folder / "train.py"), *files, *flags), folder / "out"


def test_a_run_whose_steps_are_all_skipped_stops(overflowing):
    """Exit code 3 and one message, with steps and what to change; what was saved before stays, nothing is exported."""
    done, output = overflowing
    assert done.returncode == 3, done.stderr[-4000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: finetune: optimizer steps")]
    assert len(errors) == 1
    first, last = map(int, re.findall(r"optimizer steps (\d+)-(\d+) were skipped", errors[0])[0])
    assert last == first + 3
    assert "max_skipped_steps is 4" in errors[0]
    saved = [f"checkpoint-{step}" for step in range(4, last, 4)]
    assert saved
    assert sorted(path.name for path in output.glob("checkpoint-*")) == sorted(saved)
    assert not (output / "model").exists()


def test_skipped_steps_are_in_the_log(overflowing):
    """The record after the first overflow counts it, the loss scale has doubled until there, every loss is finite."""
    records = [json.loads(line) for line in (overflowing[1] / "log.jsonl").read_text().splitlines()]
    assert [record["train/skipped_steps"] for record in records if record["train/skipped_steps"]] != []
    scales = [record["train/loss_scale"] for record in records]
    assert scales == sorted(scales)
    assert scales[-1] > scales[0]
    assert all(math.isfinite(record["train/loss"]) for record in records)
