"""What contributes nothing is cut out of a model, and what it computes stays."""

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.exit_folders import CLASSES, make_folder, plan_for, spec_of
from support.launching import chosen
from support.zeroed import (
    DECODERS,
    FAMILIES,
    KIN,
    VOCABULARY,
    bare_of,
    empty,
    inputs_of,
    logits_of,
    model_of,
    randomised,
    states_of,
    uneven,
)
from torch import nn

from ds_trainer.cuts.cut import outline
from ds_trainer.deploy.export import save_folded
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.models.layers import blocks_of, layers_of, sizes_of
from ds_trainer.models.shrink import check_known, shrink
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
PLAIN = {"bert": 4, "distilbert": 4, "gpt2": 4, "llama": 1, "qwen2": 1, "qwen3": 1}
"""How many heads can be left of a family where its config can still say it."""


REPRESENTED = (*FAMILIES, "roformer", "cohere", "gemma", "luke", "nystromformer", "gpt_bigcode", "seed_oss")
"""Families whose layers differ most from each other; `--exhaustive` takes all."""


@pytest.mark.parametrize("family", chosen([*KIN], REPRESENTED.__contains__))
def test_the_cut_model_computes_what_the_masked_one_does(family: str) -> None:
    """With whole blocks empty, a single head, biases that are not zero and a padded row; and it is a smaller model.

    The zeros are on either side of a block's matrices, or on both.
    """
    whole = bare_of(family)
    for where in ("outer", "inner", "both"):
        masked = empty(copy.deepcopy(whole), uneven(whole), where)
        shrunk = shrink(masked)
        assert not torch.allclose(states_of(masked), states_of(whole), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(states_of(shrunk), states_of(masked), **TOLERANCE)
        # the bias of its values has no place to go where the outer layer has none
        stays = where == "inner" and family in ("qwen2", "seed_oss")
        wanted = uneven(whole) | ({"heads": sizes_of(whole)["heads"]} if stays else {})
        assert sizes_of(shrunk) == shrunk.config.shrunk == wanted
        assert shrunk.num_parameters() < masked.num_parameters()


@pytest.mark.parametrize("family", ["diffllama", "big_bird", "openai-gpt", "albert", "opt", "mixtral", "vit"])
def test_an_unknown_family_is_refused(family: str) -> None:
    """Heads in pairs, blocks of the sequence, and whatever else the classes of layers do not list.

    Each way to cut gives a mistake of the user, whose exit code is 2: the file of a folder has another error.
    """
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    fields = {"n_embd": 16, "n_layer": 2, "n_head": 2} if family == "openai-gpt" else small
    config = transformers.AutoConfig.for_model(family, **fields, vocab_size=40, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    for cut in (check_known, shrink, lambda model: outline(model, CutSpec(keep=0.5))):
        with pytest.raises(UserError, match=r"cannot be cut: .*and export with --compact|no list of equal"):
            cut(model)


@pytest.mark.parametrize(("family", "field"), [("roformer", "rotary_value"), ("cohere", "use_qk_norm")])
def test_heads_that_are_not_apart_stay(family: str, field: str) -> None:
    """Values that are turned by their positions, and a norm with weights for every head; neurons are cut as ever."""
    masked = bare_of(family, **{field: True})
    first, *_ = layers_of(masked).values()
    assert [block.kind for block in blocks_of(first)] == ["feed_forward"]
    empty(masked, sizes_of(masked) | {"neurons": [3, 0, 5]})
    torch.testing.assert_close(states_of(shrink(masked)), states_of(masked), **TOLERANCE)


@pytest.mark.parametrize("family", DECODERS)
def test_a_cache_is_gone_on_from(family: str) -> None:
    """With no attention in the first layer, by which transformers counts: tokens as without a cache, and as masked.

    So are the states of text after text, positions left to the model, the first row padded to the left.
    """
    masked = model_of(family)
    shrunk = shrink(empty(masked, uneven(masked)))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens, mask = inputs_of()["input_ids"], torch.ones(2, 9, dtype=torch.long)
    wanted = masked.generate(tokens[:, :5], attention_mask=mask[:, :5], **options)
    assert wanted.shape == (2, 13)
    for cache in (True, False):
        results = shrunk.generate(tokens[:, :5], attention_mask=mask[:, :5], use_cache=cache, **options)
        assert torch.equal(results, wanted)
    mask[0, :2] = 0
    with torch.no_grad():
        wanted = masked(tokens, attention_mask=mask).logits[:, 5:]
        begun = shrunk(tokens[:, :5], attention_mask=mask[:, :5], use_cache=True)
        results = shrunk(tokens[:, 5:], attention_mask=mask, past_key_values=begun.past_key_values).logits
    assert begun.past_key_values.get_seq_length() == 9
    torch.testing.assert_close(results, wanted, **TOLERANCE)


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_whose_config_can_say_it_gets_a_plain_model(family: str, tmp_path: Path) -> None:
    """Of the same sizes in every layer; its folder is any other of transformers: no sizes, no map, no code."""
    masked = empty(model_of(family), {"heads": [PLAIN[family]] * 3, "neurons": [8] * 3})
    shrunk = shrink(masked)
    assert type(shrunk) is type(masked)
    assert not hasattr(shrunk.config, "shrunk")
    save_folder(shrunk, train_tokenizer(["it rains"] * 3, 40, True), tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.py")]
    text = (tmp_path / "out" / "config.json").read_text()
    assert "shrunk" not in text
    assert "auto_map" not in text
    reloaded = type(masked).from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits_of(reloaded), logits_of(masked), **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "heads"), [("bert", 2), ("gpt2", 2), ("modernbert", 2), ("distilbert", 1), ("llama", 3)]
)
def test_sizes_that_no_plain_config_says_are_listed(family: str, heads: int) -> None:
    """BERT's config gives each head its share of the width: fewer heads would be wider ones.

    Three heads of Llama do not divide a width of 32, whatever their own width is.
    """
    masked = model_of(family, **{"num_key_value_heads": 4} if family == "llama" else {})
    empty(masked, {"heads": [heads] * 3, "neurons": [8] * 3})
    shrunk = shrink(masked)
    assert shrunk.config.shrunk == {"heads": [heads] * 3, "neurons": [8] * 3}
    torch.testing.assert_close(logits_of(shrunk), logits_of(masked), **TOLERANCE)


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_a_constant_is_what_the_activation_makes_of_it(activation: str) -> None:
    """A sigmoid gives a half for nothing: neurons without weights and biases still add to the outer layer's bias."""
    masked = empty(model_of("bert", hidden_act=activation), {"heads": [4] * 3, "neurons": [3, 0, 24]}, "inner")
    for layer in layers_of(masked).values():
        layer.intermediate.dense.bias.data.zero_()
    shrunk = shrink(masked)
    assert shrunk.config.shrunk["neurons"] == [3, 0, 24]
    torch.testing.assert_close(logits_of(shrunk), logits_of(masked), **TOLERANCE)


def test_a_gate_alone_makes_no_neuron_constant() -> None:
    """Where one of the two has weights, the product is constant only if the other is zero."""
    masked = model_of("llama", mlp_bias=True)
    mlp = masked.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[:4] = 0
        mlp.gate_proj.bias[:2] = 0
        mlp.up_proj.weight[6:8] = 0
        mlp.up_proj.bias[7] = 0
    shrunk, numbers = shrink(masked), [2, 3, 4, 5, 6, *range(8, 24)]
    assert torch.equal(shrunk.model.layers[0].mlp.down_proj.weight, mlp.down_proj.weight[:, numbers])
    torch.testing.assert_close(logits_of(shrunk), logits_of(masked), **TOLERANCE)


def test_the_rest_of_the_model_comes_along() -> None:
    """Precision, tied weights, mode and generation settings; the given model keeps its own weights."""
    masked = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY)
    )
    masked = empty(masked.to(torch.bfloat16), {"heads": [1, 2, 3], "neurons": [8] * 3}).train()
    masked.generation_config.max_new_tokens = 3
    before = {name: value.clone() for name, value in masked.state_dict().items()}
    shrunk = shrink(masked)
    assert {p.dtype for p in shrunk.parameters()} == {torch.bfloat16}
    assert shrunk.lm_head.weight is shrunk.transformer.wte.weight
    assert shrunk.training
    assert shrunk.generation_config.max_new_tokens == 3
    nn.init.zeros_(shrunk.transformer.wte.weight)
    assert all(torch.equal(value, before[name]) for name, value in masked.state_dict().items())
    assert not any(value.is_meta for value in (*shrunk.parameters(), *shrunk.buffers()))


UNEVEN = {"heads": [0, 1, 2, 2], "neurons": [7, 0, 16, 3]}


def test_an_export_cuts_what_computes_the_same_and_nothing_else(
    csv_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is compared with the masked model, before anything is written; its sizes are in the results.

    With nothing to cut no run is lost: the model is exported as it is, with a warning.
    """

    def export(name: str, sizes: dict[str, list[int]]) -> dict[str, Any]:
        folder = make_folder(tmp_path / f"source_{name}", CLASSES, None)
        whole = transformers.BertForSequenceClassification.from_pretrained(folder)
        empty(whole, sizes).save_pretrained(folder)
        phase = plan_for(spec_of(csv_folder), folder, tmp_path / "cache")
        model, _ = phase.build()
        batch = phase.task.collate(phase.task.examples("train"), range(8))
        return save_folded(model.eval(), [], phase.task, batch, tmp_path / name, shrinks=True)

    with monkeypatch.context() as patched:
        patched.setattr("ds_trainer.deploy.export.shrink", lambda model: randomised(copy.deepcopy(model)))
        with pytest.raises(RuntimeError, match="the exported model's logits differ by"):
            export("out", UNEVEN)
    assert not (tmp_path / "out").exists()
    results = export("out", UNEVEN)
    assert results["max_logit_difference"] < 1e-5
    assert results["weights"]["sizes"] == UNEVEN
    assert results["weights"]["before"]["encoder"] > results["weights"]["encoder"]["total"]
    with caplog.at_level(logging.WARNING):
        weights = export("whole", {"heads": [2] * 4, "neurons": [16] * 4})["weights"]
    assert re.search(r"no head and no neuron is wholly zero\. Prune with .*--compact", caplog.text)
    assert weights.keys() == {"layers", "encoder", "model"}
    assert not [*(tmp_path / "whole").glob("*.py")]
