"""A `compression_training` block is refused with the recipe that does the same."""

import json

import pytest
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.config.recipe import parse_recipe
from ds_trainer.engine.engine_file import check_engine_file
from ds_trainer.techniques.prune.sites import sites_of


def shared(**more):
    return {"enabled": True, **more}


def group(name, ratio, modules, related=None):
    found = {"params": {"dense_ratio": ratio}, "modules": modules}
    return {name: found | ({"related_modules": related} if related else {})}


LAYERS = {
    "enabled": True,
    "keep_number_layer": 5,
    "module_name_prefix": "bert.encoder.layer",
    "teacher_layer": [2, 4, 6, 8, 10],
    "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
}
SPARSE = {
    "shared_parameters": shared(schedule_offset=30, method="l1"),
    "different_groups": group("sp1", 0.5, ["attention.self"]),
}
SNIP = {
    "shared_parameters": shared(
        schedule_offset=30,
        schedule_offset_end=90,
        schedule_offset_stride=15,
        method="snip_momentum",
        block_pattern="4x1",
        dense_ratio=0.4,
        excluded_modules=["classifier", "pooler"],
    ),
    "different_groups": {},
}
ROW = {
    "shared_parameters": shared(schedule_offset=20, method="topk"),
    "different_groups": group("rp1", 0.5, ["intermediate.dense"], [["layer.\\w+.output.dense"]]),
}
HEAD = {
    "shared_parameters": shared(schedule_offset=20, method="topk", num_heads=12),
    "different_groups": group("hp1", 0.5, ["attention.output.dense"], [["self.query", "self.key", "self.value"]]),
}
CHANNEL = {
    "shared_parameters": shared(schedule_offset=0, method="topk"),
    "different_groups": group("cp1", 0.5, ["layer....conv1"], [["layer....conv2", "layer....bn1"]]),
}
WEIGHTS = {
    "shared_parameters": shared(quantizer_kernel=False, quantize_groups=1, quantization_type="symmetric"),
    "different_groups": {
        "wq1": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 50}, "modules": ["intermediate"]},
        "wq2": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["attention.output"]},
    },
}
ACTIVATIONS = {
    "shared_parameters": shared(quantization_type="asymmetric", range_calibration="dynamic", schedule_offset=50),
    "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attention.output"]}},
}


def refusal(**block):
    """The one mistake of a file with this block."""
    (mistake,) = check_engine_file({"compression_training": block}, None, 1)
    assert mistake.startswith("compression_training is refused, remove it: DeepSpeed has deleted it; ")
    return mistake


def printed_phase(text, model=None):
    """The phase that a refusal prints, as written and as the strict recipe parses it; a model takes its patterns."""
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    written = json.loads(line)
    phase = parse_recipe({"phases": [{"max_steps": 100} | written]}).phases[0]
    if model and phase.techniques.prune:
        assert sites_of(model, phase.techniques.prune)
    return written, phase


@pytest.fixture(scope="module")
def bert():
    """Twelve layers, as the documentation's patterns know them."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 12}
    return BertForSequenceClassification(BertConfig(vocab_size=8, max_position_embeddings=8, **sizes))


def pruning(method="topk", **groups):
    return {"shared_parameters": shared(method=method), "different_groups": groups}


def of(*modules, related=None):
    return group("g", 0.5, list(modules), related)["g"]


WHOLE = {"head_pruning": pruning(hp=of("attention.output.dense", related=[["self.query"]]))}
NEURONS = of("intermediate.dense", related=[["output.dense"]])
LAYER_0 = pruning(hp=of("layer.0.attention.output.dense"))


@pytest.mark.parametrize(
    ("block", "granularity", "missing"),
    [
        ({"row_pruning": ROW}, {"feed_forward": "neuron"}, ["schedule_offset 20 in steps"]),
        ({"head_pruning": HEAD}, {"attention": "head"}, ["schedule_offset 20 in steps"]),
        ({"sparse_pruning": SPARSE}, {"*attention.self*": "weight"}, ["schedule_offset 30 in steps"]),
        ({"sparse_pruning": SNIP}, "block", ["schedule_offset 30 in steps"]),
        ({"head_pruning": LAYER_0}, {"attention": "head"}, ['hp on ["layer.0.attention.output.dense"] alone']),
        (
            {"row_pruning": pruning(rp=of(r"layer.\d.intermediate", related=[["output"]]))},
            {"feed_forward": "neuron"},
            ["rp on "],
        ),
        (
            {"row_pruning": pruning(rp=of("attention")), "sparse_pruning": pruning(sp=of("attention"))},
            {"*attention*": "row"},
            ["sparse_pruning.sp beside row_pruning.rp"],
        ),
        (
            WHOLE | {"sparse_pruning": pruning(sp=of("intermediate"))},
            {"attention": "head"},
            ["sparse_pruning.sp beside head_pruning.hp"],
        ),
        (
            {"row_pruning": pruning(rp=of("intermediate"), np=NEURONS)},
            {"*intermediate*": "row"},
            ["row_pruning.np beside row_pruning.rp"],
        ),
        ({"sparse_pruning": pruning(sp=of("*"))}, {"*": "weight"}, []),
        ({"sparse_pruning": pruning(sp=of("query", "key"))}, {"*query*": "weight", "*key*": "weight"}, []),
        ({"sparse_pruning": pruning(sp=of(r"layer.\d+.output"))}, {"*layer.*.output*": "weight"}, []),
        ({"sparse_pruning": pruning(sp=of("key", "layer.(0|1)."))}, {"*key*": "weight"}, ['sp on "layer.(0|1)."']),
    ],
)
def test_a_printed_phase_starts_and_names_what_it_is_not(bert, block, granularity, missing):
    """A run accepts every key of it at its start, and exactly the differences are named."""
    text = refusal(**block)
    assert printed_phase(text, bert)[1].techniques.prune.granularity == granularity
    assert all(words in text for words in missing)
    assert ("no counterpart" in text) == bool(missing)


def test_sparse_pruning_becomes_magnitude_of_the_named_matrices():
    """l1 is magnitude, dense_ratio the final threshold, and the step from which it prunes is the same."""
    written, phase = printed_phase(refusal(sparse_pruning=SPARSE))
    prune = phase.techniques.prune
    assert (prune.pruning_method, prune.final_threshold) == ("magnitude", 0.5)
    assert prune.granularity == {"*attention.self*": "weight"}
    assert phase.warmup_steps * prune.initial_warmup == 30
    assert set(written) == {"warmup_steps", "techniques"}


def test_rows_and_heads_become_neurons_and_heads_that_are_cut_out():
    """Groups that agree are one prune with a granularity each, and the exported model is smaller."""
    phase = printed_phase(text := refusal(row_pruning=ROW, head_pruning=HEAD))[1]
    prune = phase.techniques.prune
    assert (prune.pruning_method, prune.final_threshold) == ("topK", 0.5)
    assert prune.granularity == {"attention": "head", "feed_forward": "neuron"}
    assert phase.warmup_steps * prune.initial_warmup == 20
    assert phase.shrink
    (missing,) = text.split("no counterpart of ")[1:]
    assert missing.startswith("schedule_offset 20 in steps without warmup_steps")
    assert ";" not in missing


def test_rows_without_related_modules_stay_rows():
    """The columns of the next layer are not named, so only rows go; regular expressions become patterns."""
    row = {"shared_parameters": shared(), "different_groups": group("rp1", 0.3, ["layer.\\d+.output.dense"])}
    written, phase = printed_phase(refusal(row_pruning=row))
    assert phase.techniques.prune.granularity == {"*layer.*.output.dense*": "row"}
    assert phase.techniques.prune.initial_warmup == 0
    assert "shrink" not in written


@pytest.mark.parametrize(("pattern", "granularity"), [("4x1", "block"), ("2:4", "2:4")])
def test_snip_momentum_becomes_blocks_chosen_over_all_layers(pattern, granularity):
    """The blocks and the global density are the same; criterion, end and exclusions are named."""
    snip = SNIP | {"shared_parameters": SNIP["shared_parameters"] | {"block_pattern": pattern}}
    text = refusal(sparse_pruning=snip)
    prune = printed_phase(text)[1].techniques.prune
    assert prune.granularity == granularity
    if pattern == "4x1":
        assert (prune.block_shape, prune.final_threshold, prune.global_topk) == ([4, 1], 0.4, True)
    assert "head_pruning beside snip_momentum" in refusal(sparse_pruning=snip, head_pruning=HEAD)
    assert all(word in text for word in ("criterion snip_momentum", "schedule_offset_end", "excluded_modules"))


def test_layer_reduction_becomes_a_student_and_its_teacher():
    """The teacher's layers are those that are copied, counted from 0 there and here."""
    phase = printed_phase(refusal(layer_reduction=LAYERS))[1]
    assert phase.student.layers == [2, 4, 6, 8, 10]
    assert (phase.start_from, phase.techniques.distill.teacher) == ("@model", "@model")
    assert "layer_reduction without teacher_layer" in refusal(layer_reduction={"enabled": True})


def test_quantization_becomes_an_export():
    """Eight bits are int8 of the exported model; four bits, and training with them, have no counterpart."""
    for name, block in (("weight_quantization", WEIGHTS), ("activation_quantization", ACTIVATIONS)):
        text = refusal(**{name: block})
        assert "python launch/export.py OUTPUT_DIR/model --onnx --quantize int8" in text
        assert f"{name} in training" in text
        assert "other than 8 bits" in text


def test_a_whole_block_of_the_documentation(bert):
    """All seven together: one phase, one command, and each thing without a counterpart by its name, once."""
    text = refusal(
        layer_reduction=LAYERS,
        weight_quantization=WEIGHTS,
        activation_quantization=ACTIVATIONS,
        sparse_pruning=SPARSE,
        row_pruning=ROW,
        head_pruning=HEAD,
        channel_pruning=CHANNEL,
    )
    phase = printed_phase(text, bert)[1]
    assert phase.student.layers == [2, 4, 6, 8, 10]
    assert phase.techniques.prune.granularity == {"attention": "head", "feed_forward": "neuron"}
    assert phase.techniques.distill is not None
    assert text.count("launch/export.py") == 1
    assert text.count("channel_pruning") == text.count("sparse_pruning.sp1 beside head_pruning.hp1") == 1
    assert max(map(len, text.splitlines())) < 1000, "the command would cut the line"


@pytest.mark.parametrize("block", [None, False, {}, {"sparse_pruning": {"shared_parameters": {"enabled": False}}}])
def test_a_block_that_is_off_is_none(block):
    """A block that requests nothing is not refused."""
    assert check_engine_file({"compression_training": block}, None, 1) == []


@pytest.mark.parametrize("part", ["layer_reduction", "sparse_pruning", "row_pruning", "weight_quantization"])
@pytest.mark.parametrize("junk", [1, "x", ["("], {"enabled": True}, {"shared_parameters": {"enabled": True}}])
def test_a_block_that_is_itself_wrong_is_refused_all_the_same(part, junk):
    """The refusal then names the ways to prune, distil and quantize, and never raises."""
    mistakes = check_engine_file({"compression_training": {part: junk}}, None, 1)
    assert len(mistakes) == 1
    assert mistakes[0].startswith("compression_training is refused")
