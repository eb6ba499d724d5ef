"""Zeros of a pruned model stay while it is trained further."""

import pytest
import torch
from support.prune_phases import make_model

from ds_trainer.config.recipe import parse_recipe
from ds_trainer.models.layers import encoder_linears
from ds_trainer.phase import _check_is_elementwise
from ds_trainer.techniques.prune.keep_zeros import KeepZeros
from ds_trainer.techniques.technique import PhaseLength

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}


def pruned(family: str, density: float = 0.3):
    model = make_model(family)
    with torch.no_grad():
        for linear in encoder_linears(model).values():
            linear.weight.mul_(torch.rand_like(linear.weight) < density)
    return model


def zeros_of(model) -> dict[str, torch.Tensor]:
    return {name: linear.weight.detach() == 0 for name, linear in encoder_linears(model).items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_zeros_stay_and_all_else_is_trained(family, optimizer):
    """After three steps the zeros are where they were, and every layer's other weights have moved."""
    model = pruned(family)
    before, zeros = {n: v.detach().clone() for n, v in model.state_dict().items()}, zeros_of(model)
    technique = KeepZeros(True, PhaseLength(10, 0, 0), task=None)
    model = technique.attach(model)
    steps = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        model(input_ids=torch.randint(3, 60, (4, 9))).logits.square().sum().backward()
        steps.step()
        steps.zero_grad()
    model = technique.fold(model)
    for name, linear in encoder_linears(model).items():
        assert torch.equal(linear.weight == 0, zeros[name])
        assert not torch.equal(linear.weight, before[f"{name}.weight"])
    share = sum(int(z.numel() - z.sum()) for z in zeros.values()) / sum(z.numel() for z in zeros.values())
    assert technique.readings() == {"keep_zeros/density": pytest.approx(share)}


def test_without_zeros_it_is_refused():
    """It would change nothing."""
    technique = KeepZeros(True, PhaseLength(10, 0, 0), task=None)
    technique.attach(make_model("bert"))
    with pytest.raises(ValueError, match="have no zeros to keep: start from a pruned model"):
        technique.start(torch.device("cpu"))


def test_prune_and_keep_zeros_do_not_go_together():
    """One of them decides which weights are zero."""
    phase = {"max_steps": 1, "techniques": {"prune": {}, "keep_zeros": True}}
    with pytest.raises(ValueError, match="keep_zeros keeps the zeros that are there, and prune makes others"):
        parse_recipe({"model": {"name_or_path": "x"}, "phases": [phase]})


def test_optimizers_that_mix_weights_are_refused():
    """Muon turns a matrix as a whole: weights without a gradient move too."""
    with pytest.raises(ValueError, match=r"optimizer.type is Muon, whose steps are not made weight by weight"):
        _check_is_elementwise("Muon")
    _check_is_elementwise("AdamW")
