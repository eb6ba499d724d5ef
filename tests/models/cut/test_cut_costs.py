"""What a cut will cost, by arithmetic, is what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DistilBertConfig, DistilBertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut import costs
from ds_trainer.models.cut.allocation import MEASURED
from ds_trainer.models.cut.blocks import cut_places, with_grams
from ds_trainer.models.cut.costs import BatchSize, cut_costs, cut_operations
from ds_trainer.models.cut.cut import cut_model
from ds_trainer.models.cut.layerwise import Calibration, Gram
from ds_trainer.models.costs import encoder_flops

CPU = torch.device("cpu")
BATCHES = [BatchSize(4, 6, 20), BatchSize(3, 9, 27)]
UNIFORM, CHOSEN = CutSpec(keep=0.5, uniform=True), CutSpec(keep=0.5)


def model() -> DistilBertForSequenceClassification:
    config = DistilBertConfig(vocab_size=50, dim=32, n_layers=3, n_heads=4, hidden_dim=64, attn_implementation="eager")
    return DistilBertForSequenceClassification(config).eval()


def calibration(answers: Any) -> Calibration:
    """Batches of the sizes above, whose first rows are padded."""
    attended = []
    for batch in BATCHES:
        mask = torch.ones(batch.rows, batch.length, dtype=torch.bool)
        mask[0, batch.length - (mask.numel() - batch.tokens) :] = False
        attended.append(mask)
    inputs = [{"input_ids": torch.randint(50, mask.shape), "attention_mask": mask.long()} for mask in attended]
    return Calibration(inputs, attended, answers, lambda first, second: 1.0, lambda *_: torch.zeros(()))


def test_the_operations_are_those_that_torch_counts() -> None:
    """Of every pass over the layers and of every Gram matrix of a uniform cut."""
    places = cut_places(dense := model(), UNIFORM)
    with FlopCounterMode(display=False) as counter:
        for _ in with_grams(dense, places, calibration(None), CPU):
            pass
    counted = cut_operations(dense, UNIFORM, BATCHES, BATCHES[:1])
    assert counted["passes"] + counted["gram_matrices"] == counter.get_total_flops()


def test_a_cut_that_chooses_runs_the_whole_model_as_often_as_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once dense, and once for each size of each block that is tried. Gram matrices are summed up once for the choice,
    and once more for each block that is cut."""
    runs: list[int] = []
    sums: list[int] = []
    add = Gram.add
    monkeypatch.setattr(Gram, "add", lambda gram, inputs: sums.append(inputs.numel()) or add(gram, inputs))
    places = cut_places(dense := model(), CHOSEN)
    _, records = cut_model(dense, calibration(lambda _: runs.append(1)), CHOSEN, CPU)
    uniform, chosen = (cut_operations(model(), spec, BATCHES, BATCHES[:1]) for spec in (UNIFORM, CHOSEN))
    probed = BATCHES[0].rows * encoder_flops(model(), BATCHES[0].length)
    assert chosen["passes"] == 2 * uniform["passes"] + len(runs) * probed
    assert len(runs) == 1 + len(MEASURED) * len(places)
    assert len(sums) == len(BATCHES) * (len(places) + len(records))
    assert all(chosen[name] == 2 * uniform[name] for name in ("gram_matrices", "surgeon"))


def test_magnitude_removes_without_a_surgeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least squares are what is left of its work, and without new weights nothing."""
    monkeypatch.setattr(costs, "removal_seconds", None)
    specs = [CutSpec(keep=0.5, uniform=True, method="magnitude", update_weights=update) for update in (True, False)]
    counted = [cut_costs(model(), spec, BATCHES, BATCHES[:1], CPU)["operations"]["surgeon"] for spec in specs]
    assert cut_operations(model(), UNIFORM, BATCHES, BATCHES[:1])["surgeon"] > counted[0] > counted[1] == 0


def test_the_costs_of_7b_need_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes on the meta device are enough; the bytes are dominated by the weights in fp32."""
    monkeypatch.setattr(costs, "removal_seconds", lambda *_: 0.0)
    with torch.device("meta"):
        decoder = LlamaForCausalLM(LlamaConfig())
    expected = cut_costs(decoder, CHOSEN, [BatchSize(32, 512, 32 * 512)] * 16, [BatchSize(32, 512, 32 * 512)] * 2, CPU)
    held, attention, matrix = expected["bytes"], 4096 * 4096, 4096 * 11008
    assert held["model"] == 4 * sum(parameter.numel() for parameter in decoder.parameters()) > 26e9
    assert held["largest_layer"] == 4 * (4 * attention + 3 * matrix + 2 * 4096)
    assert held["gram_matrices"] == 6 * 8 * 11008**2
    assert held["hidden_states"] == 2 * 4 * 16 * 32 * 512 * 4096
    assert held["weights_tried"] == 4 * 3 * 32 * (attention + matrix)
    assert expected["operations"]["passes"] > 2 * 3 * 6.4e9 * 2 * 16 * 32 * 512
    assert expected["estimated_seconds"] > 0
