"""What a cut will cost: its bytes by arithmetic, and seconds that follow from its operations."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_trainer.cuts import cut
from ds_trainer.cuts.cut import cut_costs
from ds_trainer.recipe.cut_specs import CutSpec

CPU = torch.device("cpu")
BATCHES = [(32, 512)] * 16


def test_the_costs_of_7b_need_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes on the meta device are enough; the bytes are dominated by the weights in fp32."""
    monkeypatch.setattr(cut, "seconds", lambda *_: 1.0)
    with torch.device("meta"):
        decoder = LlamaForCausalLM(LlamaConfig())
    expected = cut_costs(decoder, CutSpec(keep=0.5), BATCHES, BATCHES[:2], CPU)
    held, attention, matrix = expected["bytes"], 4096 * 4096, 4096 * 11008
    assert held["model"] == 4 * sum(parameter.numel() for parameter in decoder.parameters()) > 26e9
    assert held["largest_layer"] == 4 * (4 * attention + 3 * matrix + 2 * 4096)
    assert held["gram_matrices"] == 6 * 8 * 11008**2
    assert held["hidden_states"] == 2 * 4 * 16 * 32 * 512 * 4096
    assert held["weights_tried"] == 4 * 3 * 32 * (attention + matrix)
    assert held["total"] == sum(size for name, size in held.items() if name != "total")


def test_what_a_cut_does_more_costs_more() -> None:
    """A choice over all layers is more than the same share everywhere, magnitude less, and layers alone the least."""
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4}
    with torch.device("meta"):
        decoder = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=100))
    specs: list[dict] = [{"keep": 0.5}, {"keep": 0.5, "uniform": True}, {"layers": 2}]
    seconds = [cut_costs(decoder, CutSpec(**s), BATCHES, BATCHES[:2], CPU)["estimated_seconds"] for s in specs]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > 0
