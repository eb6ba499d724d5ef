"""Zeros of a pruned model stay while it is trained further."""

import pytest
import torch
from support.prune_phases import make_model, run

from ds_trainer.models.layers import encoder_linears
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.techniques.prune.keep_zeros import KeepZeros
from ds_trainer.techniques.technique import PhaseLength

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize(("family", "optimizer"), [("bert", "adamw"), ("modernbert", "sgd"), ("gpt2", "adamw")])
def test_zeros_stay_and_all_else_is_trained(family, optimizer):
    """After three steps the zeros are where they were, every layer's other weights have moved, and no more is saved."""
    model = make_model(family)
    for linear in encoder_linears(model).values():
        linear.weight.data.mul_(torch.rand_like(linear.weight) < 0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    technique = KeepZeros(True, PhaseLength(10, 0, 0), task=None)
    model = technique.attach(model)
    technique.start(torch.device("cpu"))
    steps = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        run(model).square().sum().backward()
        steps.step()
        steps.zero_grad()
    model = technique.fold(model)
    assert model.state_dict().keys() == before.keys()
    kept = total = 0
    for name, linear in encoder_linears(model).items():
        zeros = before[f"{name}.weight"] == 0
        assert torch.equal(linear.weight == 0, zeros)
        assert not torch.equal(linear.weight, before[f"{name}.weight"])
        kept, total = kept + int((~zeros).sum()), total + zeros.numel()
    assert technique.readings() == {"keep_zeros/density": kept / total}


def test_where_it_changes_nothing_or_cannot_hold_it_is_refused():
    """Without zeros; beside prune, which makes others; and by Muon, which turns a matrix as a whole."""
    technique = KeepZeros(True, PhaseLength(10, 0, 0), task=None)
    technique.attach(make_model())
    technique.rehearse(torch.device("cpu"))  # of a stand-in for a model that is pruned later
    with pytest.raises(ValueError, match="have no zeros to keep: start from a pruned model"):
        technique.start(torch.device("cpu"))
    phase = {"max_steps": 1, "techniques": {"prune": {}, "keep_zeros": True}}
    with pytest.raises(ValueError, match="keep_zeros keeps the zeros that are there, and prune makes others"):
        parse_recipe({"model": {"name_or_path": "x"}, "phases": [phase]})
    with pytest.raises(ValueError, match=r"optimizer.type is Muon, whose steps are not made weight by weight"):
        technique.check("Muon", 1.0)
    assert technique.check("AdamW", 1.0) is None
