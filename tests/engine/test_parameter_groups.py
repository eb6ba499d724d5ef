"""Parameter groups and the objective: rules decide, mistakes are reported."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from ds_trainer.engine.engine import as_torch, parameter_groups
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.recipe.recipe import GroupRule
from ds_trainer.run.objective import Objective
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.technique import Technique

BASE = Hyperparameters(1e-3, weight_decay=0.1)


def make_model() -> nn.Module:
    return nn.ModuleDict({"emb": nn.Embedding(4, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 2)})


def test_the_first_matching_rule_decides_and_the_users_come_first():
    """A user's rule for the head wins over a technique's for everything; without a rule vectors do not decay."""
    groups = {group.name: group for group in parameter_groups(make_model(), [], [], BASE)}
    assert set(groups["vectors"].parameters) == {"body.bias", "head.bias"}
    assert (groups["vectors"].weight_decay, groups["weights"].weight_decay) == (0.0, 0.1)
    assert groups["weights"].size == 12 + 9 + 6
    model = make_model()
    user = [GroupRule(params="head.*", learning_rate=0.5)]
    technique = [GroupRule(params="*", frozen=True)]
    groups = parameter_groups(model, user, technique, BASE)
    assert [set(group.parameters) for group in groups] == [{"head.weight"}, {"head.bias"}]
    assert {group.learning_rate for group in groups} == {0.5}
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


def test_a_rule_that_matches_nothing_is_refused():
    """A rule without a parameter is refused, and so is a phase that would train nothing."""
    with pytest.raises(ValueError, match=r'"embed\*" matches no parameter of the model; some are: emb.weight'):
        parameter_groups(make_model(), [GroupRule(params="embed*", frozen=True)], [], BASE)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        parameter_groups(make_model(), [GroupRule(params="*", frozen=True)], [], BASE)


def test_only_rates_of_their_own_are_written_into_the_optimizers_groups():
    """A group at the base rate does not name it, since DeepSpeed's Muon fills it differently."""
    groups = parameter_groups(make_model(), [GroupRule(params="head.weight", learning_rate=1)], [], BASE)
    rates = {group["name"]: group.get("lr") for group in as_torch(groups, BASE)}
    assert rates == {"weights": None, "vectors": None, "head.weight": 1}


def with_additions() -> tuple[nn.Module, list[GroupRule]]:
    """A model with what techniques add: scores in its body, an exit head with a pooler, a projection; their rules."""
    model = make_model()
    model["body"].mask_scores = nn.Parameter(torch.ones(3, 3))
    model["exit_heads"] = nn.ModuleDict({"1": nn.ModuleDict({"pooler": nn.Linear(3, 3)})})
    model["distill_projection"] = nn.Linear(3, 5)
    rules = [GroupRule(params="*.mask_scores", learning_rate=1e-2, weight_decay=0.0)]
    return model, [*rules, GroupRule(params="exit_heads.*"), GroupRule(params="distill_projection.*")]


def test_what_techniques_add_is_reached_by_its_name_alone():
    """Scores, heads and projection keep rate and decay, and are trained, whatever rule the model around them has."""
    for rule, reached in (
        ({"params": "*body*", "weight_decay": 0.01}, {"body.weight"}),
        ({"params": "*", "frozen": True}, {"body.weight", "emb.weight"}),
        ({"params": "*.weight", "weight_decay": 0.7}, {"body.weight", "emb.weight"}),
    ):
        model, rules = with_additions()
        groups = parameter_groups(model, [GroupRule(**rule)], rules, BASE)
        settings = {name: (group.learning_rate, group.weight_decay) for group in groups for name in group.parameters}
        assert settings["body.mask_scores"] == (1e-2, 0.0)
        for name in ("exit_heads.1.pooler", "distill_projection"):
            assert (settings[f"{name}.weight"], settings[f"{name}.bias"]) == ((1e-3, 0.1), (1e-3, 0.0))
        assert {name for name in ("body.weight", "emb.weight") if settings.get(name) != (1e-3, 0.1)} == reached


def test_a_rule_that_names_what_a_technique_adds_decides_on_it():
    """Such a rule freezes it or sets its rate; a rule that matches it by chance is refused with the way to name it."""
    model, rules = with_additions()
    named = [GroupRule(params="*mask_scores", learning_rate=0.3), GroupRule(params="exit_heads.*", frozen=True)]
    groups = parameter_groups(model, named, rules, BASE)
    settings = {name: group.learning_rate for group in groups for name in group.parameters}
    assert settings["body.mask_scores"] == 0.3
    assert not any(name.startswith("exit_heads") for name in settings)
    with pytest.raises(ValueError, match=r'"\*pooler\*" matches no .* with its name: .*exit_heads, mask_scores$'):
        parameter_groups(model, [GroupRule(params="*pooler*")], rules, BASE)


class Toy(Technique):
    name = "toy"
    term_units: ClassVar = {"toy.a": "example", "toy.b": "label"}

    def __init__(self) -> None:
        """It needs no entry in a recipe."""

    def terms(self, forward):
        return {"toy.a": forward.out * 2, "toy.b": forward.out * 3}


class ToyTask:
    loss_unit = "label"

    def loss(self, out, batch):
        return out


def test_the_objective_is_the_weighted_sum():
    """The terms that it returns are unweighted and detached. A term is weighed by the share of the units that it is a
    mean over; terms whose unit has no share are not."""
    value = torch.tensor(1.5, requires_grad=True)
    objective = Objective(ToyTask(), [Toy()], {"task": 1.0, "toy.a": 0.5, "toy.b": 10})
    loss, terms = objective(Forward(None, value, 0))
    assert float(loss.detach()) == 1.5 + 0.5 * 3 + 10 * 4.5
    assert {name: float(term) for name, term in terms.items()} == {"task": 1.5, "toy.a": 3.0, "toy.b": 4.5}
    assert not any(term.requires_grad for term in terms.values())
    loss.backward()
    assert float(value.grad) == 1 + 1 + 30
    loss, terms = objective(Forward(None, torch.tensor(1.5), 0, {"label": 0.5, "token": 7.0}))
    assert {name: float(term) for name, term in terms.items()} == {"task": 0.75, "toy.a": 3.0, "toy.b": 2.25}
    assert float(loss) == 0.75 + 0.5 * 3 + 10 * 2.25


def test_weights_and_terms_must_agree():
    """A weight for no term and a term without weight are reported together."""
    with pytest.raises(ValueError) as caught:
        Objective(ToyTask(), [Toy()], {"task": 1.0, "toy.a": 1.0, "tyo.b": 1.0})
    assert '"tyo.b" is no term of this phase; on offer: task, toy.a, toy.b' in str(caught.value)
    assert '"toy.b" has no weight' in str(caught.value)
