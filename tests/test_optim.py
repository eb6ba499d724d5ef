"""Parameter groups and the objective: rules decide, mistakes are told."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from ds_trainer.objective import Objective
from ds_trainer.optim import Hyperparameters, as_torch, parameter_groups
from ds_trainer.recipe import GroupRule
from ds_trainer.techniques import Forward, Technique

BASE = Hyperparameters(1e-3, weight_decay=0.1)


def make_model() -> nn.Module:
    return nn.ModuleDict({"emb": nn.Embedding(4, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 2)})


def test_vectors_get_no_weight_decay():
    """Biases are in a group of their own, with the same rate."""
    groups = {group.name: group for group in parameter_groups(make_model(), [], [], BASE)}
    assert set(groups["vectors"].parameters) == {"body.bias", "head.bias"}
    assert (groups["vectors"].weight_decay, groups["weights"].weight_decay) == (0.0, 0.1)
    assert groups["weights"].size == 12 + 9 + 6


def test_the_first_matching_rule_decides_and_the_users_come_first():
    """A user's rule for the head wins over a technique's for everything."""
    model = make_model()
    user = [GroupRule(params="head.*", learning_rate=0.5)]
    technique = [GroupRule(params="*", frozen=True)]
    groups = parameter_groups(model, user, technique, BASE)
    assert [set(group.parameters) for group in groups] == [{"head.weight"}, {"head.bias"}]
    assert {group.learning_rate for group in groups} == {0.5}
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


def test_frozen_groups_are_no_groups():
    """Frozen embeddings are in no group and ask for no gradient."""
    model = make_model()
    groups = parameter_groups(model, [GroupRule(params="emb*", frozen=True)], [], BASE)
    assert not model["emb"].weight.requires_grad
    assert all("emb.weight" not in group.parameters for group in groups)


def test_a_rule_that_matches_nothing_is_refused():
    """And so is a phase that would train nothing."""
    with pytest.raises(ValueError, match=r'"embed\*" matches no parameter; some are: emb.weight'):
        parameter_groups(make_model(), [GroupRule(params="embed*", frozen=True)], [], BASE)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        parameter_groups(make_model(), [GroupRule(params="*", frozen=True)], [], BASE)


def test_only_rates_of_their_own_are_written_into_the_optimizers_groups():
    """A group at the base rate leaves it to the optimizer, as DeepSpeed's Muon needs."""
    groups = as_torch(
        parameter_groups(make_model(), [GroupRule(params="head.weight", learning_rate=1)], [], BASE), BASE
    )
    assert {group["name"]: group.get("lr") for group in groups} == {"weights": None, "vectors": None, "head.weight": 1}


class Toy(Technique):
    name = "toy"
    term_units: ClassVar = {"toy.a": "example", "toy.b": "label"}

    def terms(self, forward):
        return {"toy.a": forward.out * 2, "toy.b": forward.out * 3}


class ToyTask:
    loss_unit = "label"

    def loss(self, out, batch):
        return out


def test_the_objective_is_the_weighted_sum():
    """And the terms it gives are unweighted and detached."""
    value = torch.tensor(1.5, requires_grad=True)
    loss, terms = Objective(ToyTask(), [Toy()], {"task": 1.0, "toy.a": 0.5, "toy.b": 10})(Forward(None, value, 0))
    assert float(loss.detach()) == 1.5 + 0.5 * 3 + 10 * 4.5
    assert {name: float(term) for name, term in terms.items()} == {"task": 1.5, "toy.a": 3.0, "toy.b": 4.5}
    assert not any(term.requires_grad for term in terms.values())
    loss.backward()
    assert float(value.grad) == 1 + 1 + 30


def test_a_term_is_weighed_by_its_share_of_the_units_that_it_is_a_mean_over():
    """Terms over what every micro-batch has in equal parts are as they are."""
    forward = Forward(None, torch.tensor(1.5), 0, {"label": 0.5, "token": 7.0})
    loss, terms = Objective(ToyTask(), [Toy()], {"task": 1.0, "toy.a": 0.5, "toy.b": 10})(forward)
    assert {name: float(term) for name, term in terms.items()} == {"task": 0.75, "toy.a": 3.0, "toy.b": 2.25}
    assert float(loss) == 0.75 + 0.5 * 3 + 10 * 2.25


def test_weights_and_terms_must_agree():
    """A weight for no term and a term without weight are told together."""
    with pytest.raises(ValueError) as caught:
        Objective(ToyTask(), [Toy()], {"task": 1.0, "toy.a": 1.0, "tyo.b": 1.0})
    assert '"tyo.b" is no term of this phase; on offer: task, toy.a, toy.b' in str(caught.value)
    assert '"toy.b" has no weight' in str(caught.value)
