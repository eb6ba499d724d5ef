"""Parameter groups from rules. The optimizer itself is torch's AdamW, or the engine file's own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ds_trainer.config.recipe import GroupRule
from ds_trainer.ranks.failures import UserError


@dataclass(frozen=True)
class Hyperparameters:
    """AdamW's, as resolved from the engine file and the recipe; rates per optimizer step."""

    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8


@dataclass
class Group:
    """Parameters that share a rate and a weight decay."""

    name: str
    learning_rate: float
    weight_decay: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def identity(self) -> str:
        """Tells which parameters are in the group, in which order, and nothing of its rate and decay."""
        names = "\n".join(self.parameters)
        return f"{self.name} ({len(self.parameters)} parameters, {zlib.crc32(names.encode()):08x})"


def parameter_groups(
    model: nn.Module, user_rules: Sequence[GroupRule], other_rules: Iterable[GroupRule], base: Hyperparameters
) -> list[Group]:
    """Freeze and group the model's parameters by the first rule that matches each name.

    What a technique adds to the model and trains by a rule of its own (mask scores, exit heads, a projection) is
    reached by those of the user's rules alone whose pattern contains its name: "*encoder*" is about the model.
    Without a rule's word, vectors (biases, norms) get no weight decay. Who shares a group follows from the patterns
    alone, so that a phase can be resumed with other rates and decays. A rule of the user's that matches nothing, or a
    phase in which everything is frozen, is a ValueError. Changes `requires_grad` of the model's parameters.
    """
    named = dict(model.named_parameters())
    other_rules = list(other_rules)
    rules_of = {name: _rules_of(name, user_rules, other_rules) for name in named}
    for rule in user_rules:
        if not any(rule in rules for rules in rules_of.values()):
            raise UserError(_idle(rule, named, other_rules))
    groups: dict[tuple[str, bool], Group] = {}
    for name, parameter in named.items():
        rule = next(iter(rules_of[name]), GroupRule(params="*"))
        parameter.requires_grad_(not rule.frozen)
        if rule.frozen:
            continue
        rate = base.learning_rate if rule.learning_rate is None else rule.learning_rate
        exempt = rule.weight_decay is None and parameter.ndim <= 1
        decay = 0.0 if exempt else base.weight_decay if rule.weight_decay is None else rule.weight_decay
        label = rule.params if rule.params != "*" else "weights" if parameter.ndim > 1 else "vectors"
        groups.setdefault((label, exempt), Group(label, rate, decay)).parameters[name] = parameter
    if not groups:
        raise UserError("groups: every parameter is frozen: nothing would be trained")
    return list(groups.values())


def _rules_of(name: str, user_rules: Sequence[GroupRule], other_rules: Sequence[GroupRule]) -> list[GroupRule]:
    """The rules that reach a parameter, the first of which decides."""
    users = [rule for rule in user_rules if fnmatchcase(name, rule.params)]
    others = [rule for rule in other_rules if fnmatchcase(name, rule.params)]
    return [rule for rule in users if not _missing(name, rule, other_rules)] + others


def _missing(name: str, rule: GroupRule, other_rules: Sequence[GroupRule]) -> set[str]:
    """What techniques call a parameter that they have added and train, where the rule's pattern does not contain it."""
    trained = [other.params for other in other_rules if not other.frozen and fnmatchcase(name, other.params)]
    return {word for pattern in trained if (word := pattern.strip("*.")) not in rule.params}


def _idle(rule: GroupRule, named: Iterable[str], other_rules: Sequence[GroupRule]) -> str:
    matching = [name for name in named if fnmatchcase(name, rule.params)]
    if not matching:
        return f'groups: "{rule.params}" matches no parameter; some are: {", ".join(list(named)[:4])}, ...'
    missing = set().union(*(_missing(name, rule, other_rules) for name in matching))
    return (
        f'groups: "{rule.params}" matches only what a technique has added, such as {matching[0]}, and that is reached '
        f"by patterns that contain its name: {' or '.join(sorted(missing))}"
    )


def as_torch(groups: Sequence[Group], base: Hyperparameters) -> list[dict[str, Any]]:
    """The groups as torch and DeepSpeed optimizers take them.

    A rate equal to the base is left for the optimizer to fill, so that DeepSpeed's Muon keeps its `muon_lr`.
    """
    return [
        {"name": group.name, "params": list(group.parameters.values()), "weight_decay": group.weight_decay}
        | ({} if group.learning_rate == base.learning_rate else {"lr": group.learning_rate})
        for group in groups
    ]


def build_optimizer(groups: Sequence[Group], base: Hyperparameters) -> torch.optim.Optimizer:
    """torch AdamW, fused: one pass over memory, on the CPU too."""
    rates = {
        "lr": base.learning_rate,
        "betas": base.betas,
        "eps": base.epsilon,
        "weight_decay": base.weight_decay,
    }
    return torch.optim.AdamW(as_torch(groups, base), fused=True, **rates)  # type: ignore[arg-type]
