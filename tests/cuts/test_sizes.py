"""Layers, channels, heads and neurons cut to sizes that a plain config says: what remains computes as it did."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.calibrated import calibration
from support.zeroed import ENCODERS, KIN, VOCABULARY, bare_of, inputs_of, logits_of, randomised

from ds_trainer.cuts.cut import cut_model
from ds_trainer.cuts.layerwise import observe
from ds_trainer.cuts.sizes import cut_sizes, outline_of_sizes
from ds_trainer.models.layers import blocks_of, layers_of, rows_of, whole_totals
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec

GIVEN = calibration(16)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2")


def decoder(family: str, **fields: Any) -> Any:
    """A tiny decoder with its head; weights and biases large enough that each matters."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": VOCABULARY} | KIN[family] | fields)
    return randomised(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_decoder_is_a_plain_folder_that_generates_alike_with_and_without_a_cache(
    family: str, tmp_path: Path
) -> None:
    """All sizes at once; the rehearsal has the same shapes, and transformers loads the folder without our code."""
    heads = {} if family == "gpt2" else {"heads": 1}
    spec = CutSpec(layers=2, width=0.5, neurons=0.5, **heads)
    small, records, report, _ = cut_sizes(decoder(family), GIVEN, spec)
    assert report["sizes"]["after"].items() >= {"layers": 2, "width": 16}.items()
    assert {record.kept / record.count for record in records} == {0.5}
    shapes = [
        {name: weight.shape for name, weight in model.state_dict().items()}
        for model in (small, outline_of_sizes(decoder(family), spec))
    ]
    assert shapes[0] == shapes[1]
    small.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(decoder(family))
    torch.testing.assert_close(logits_of(loaded), logits_of(small))
    ids = inputs_of()["input_ids"]
    cached, uncached = (
        loaded.generate(ids, max_new_tokens=8, do_sample=False, use_cache=cache, eos_token_id=None)
        for cache in (True, False)
    )
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert"])
def test_a_cut_encoder_is_a_plain_folder_whose_answers_depend_on_its_tokens(family: str, tmp_path: Path) -> None:
    """With the norms of its head, which no calibration example runs through."""
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": VOCABULARY} | KIN[family])
    model = randomised(transformers.AutoModelForMaskedLM.from_config(config))
    small, _, report, _ = cut_sizes(model, GIVEN, CutSpec(layers=2, width=16))
    assert report["sizes"]["after"].items() >= {"layers": 2, "width": 16}.items()
    small.save_pretrained(tmp_path)
    logits = logits_of(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval())
    torch.testing.assert_close(logits, logits_of(small))
    assert (logits.std(0) > 1e-2).all()


def test_an_encoder_without_a_pooling_layer_is_cut_to_one_without() -> None:
    """As sentence encoders are kept: heads and neurons, even or not, layers, width, and the rehearsals of both."""
    config = transformers.BertConfig(**{"vocab_size": VOCABULARY} | KIN["bert"])
    model = randomised(transformers.BertModel(config, add_pooling_layer=False))
    sizes, even, uneven = CutSpec(layers=2, width=16), CutSpec(keep=0.5, uniform=True), CutSpec(keep=0.5)
    for small in (
        outline_of_sizes(model, sizes),
        cut_sizes(copy.deepcopy(model), GIVEN, sizes)[0],
        *(cut_model(copy.deepcopy(model), GIVEN, spec)[0] for spec in (even, uneven)),
    ):
        assert small.pooler is None
        assert whole_totals(small)["model"] <= whole_totals(model)["model"]


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama"])
def test_layers_that_change_nothing_are_dropped_wherever_they_are(family: str) -> None:
    """Two of five, one after the other: the model then computes as with these layers skipped."""
    config = {"n_layer" if family == "gpt2" else "num_hidden_layers": 5}
    model = decoder(family, **config)
    for idle in [*layers_of(model).values()][1:4:2]:
        for block in blocks_of(idle):
            for parameter in idle.get_submodule(block.outer).parameters():
                parameter.mul_(1e-3)
        if family == "gemma2":  # the norms after its blocks undo small weights
            for norm in (idle.post_attention_layernorm, idle.post_feedforward_layernorm):
                norm.weight.fill_(-1 + 1e-3)
    small, _, report, _ = cut_sizes(copy.deepcopy(model), GIVEN, CutSpec(layers=3))
    assert report["sizes"]["layers"] == [0, 2, 4]
    for idle in [*layers_of(model).values()][1:4:2]:
        idle.register_forward_hook(lambda _, given, out: given[0])
    torch.testing.assert_close(logits_of(small), logits_of(model))


def test_documents_of_a_packed_row_are_observed_as_if_alone() -> None:
    """The norm before the last layer gives what it gives for each document of its own."""
    model, seen = decoder("llama"), list[torch.Tensor]()
    ids = torch.randint(3, VOCABULARY, (1, 9))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = {"input_ids": ids, "position_ids": places}
    alone = [{"input_ids": part} for part in ids.split([4, 5], 1)]
    norms = {"norm": model.get_submodule("model.layers.2.input_layernorm")}
    for inputs in ([packed], alone):
        attended = [torch.ones_like(batch["input_ids"]).bool() for batch in inputs]
        given = replace(GIVEN, inputs=inputs, attended=attended)
        found = list[torch.Tensor]()
        observe(model, norms, given, lambda _, __, out, found=found: found.append(out))
        seen.append(torch.cat(found))
    torch.testing.assert_close(*seen)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gemma", "gemma3_text", "cohere", "cohere2"])
def test_channels_that_hold_nothing_are_cut_without_a_change(family: str) -> None:
    """Norms, and the scale of Gemma's embeddings, make up for the width that they divide or multiply by.

    OLMo's norms of queries and keys are as wide as the stream, and are none of its norms. Cohere's norms subtract the
    mean, though they are no `nn.LayerNorm`: a channel that always has the mean of the others holds nothing for them.
    """
    model = decoder(family)
    silent, others = torch.randperm(32).split(16)

    def silence(rows: torch.Tensor) -> None:
        rows[silent] = (rows[others] + 1).mean(0) if "cohere" in family else 0
        if "cohere" in family:
            rows[others] += 1

    silence(model.get_input_embeddings().weight.t())
    for layer in layers_of(model).values():
        for block in blocks_of(layer):
            outer = layer.get_submodule(block.outer)
            silence(rows_of(outer.weight, type(outer)))
        if family == "olmo2":  # whose attention no cut knows
            layer.self_attn.o_proj.weight[silent] = 0
    before = logits_of(model)
    small, records, *_ = cut_sizes(copy.deepcopy(model), GIVEN, CutSpec(width=16))
    assert records == []
    torch.testing.assert_close(logits_of(small), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "spec", "message"),
    [
        ("gpt2", {"heads": 0.5}, "cannot say fewer heads of the same width"),
        ("llama", {"layers": 4}, "layers is 4, and the model has 3"),
        ("llama", {"width": 18}, "refuses a width of 18 with 4 heads"),
        ("gpt2", {"width": 27}, "each head of a gpt2 is 8 wide: write a multiple of 8"),
        ("llama", {"layers": 0.9}, "rounds to all that the model has"),
        ("deberta-v2", {"width": 0.5}, "cannot say fewer heads of the same width"),
    ],
)
def test_what_cannot_be_cut_is_refused(family: str, spec: dict[str, Any], message: str) -> None:
    """Before any calibration example is run, and by the rehearsal."""
    model = bare_of(family) if family in ENCODERS else decoder(family)
    with pytest.raises(UserError, match=message):
        outline_of_sizes(model, CutSpec(**spec))


def test_a_width_at_which_a_class_has_other_weights_is_refused() -> None:
    """An ELECTRA has a projection where its embeddings are not as wide as the stream."""
    with pytest.raises(UserError, match=r"a width of 16 the class ElectraModel has other weights .* leave width out"):
        cut_sizes(bare_of("electra"), GIVEN, CutSpec(width=16))


@torch.no_grad()
def test_a_layer_whose_place_no_other_can_take_stays() -> None:
    """ModernBERT's first layer has no norm before its attention; here it is the one that changes least."""
    model = bare_of("modernbert")
    for block in blocks_of(model.layers[0]):
        model.layers[0].get_submodule(block.outer).weight.mul_(1e-3)
    _, _, report, _ = cut_sizes(model, GIVEN, CutSpec(layers=1))
    assert report["sizes"]["layers"] == [0]
