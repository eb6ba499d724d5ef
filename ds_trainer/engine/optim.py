"""Parameter groups from rules. The optimizer is torch's AdamW, or that of the engine file's `optimizer` block."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import GroupRule

if TYPE_CHECKING:  # the engine file is checked before torch is loaded
    import torch
    from torch import nn


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of AdamW under torch's names, as resolved from the engine file and the recipe."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


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
        """A text that changes with the parameters of the group and their order, but not with its rate and decay."""
        names = "\n".join(self.parameters)
        return f"{self.name} ({len(self.parameters)} parameters, {zlib.crc32(names.encode()):08x})"


def parameter_groups(
    model: nn.Module, user_rules: Sequence[GroupRule], other_rules: Iterable[GroupRule], base: Hyperparameters
) -> list[Group]:
    """Freeze and group the model's parameters by the first rule that matches each name.

    The parameters that a technique adds and trains by its own rule (mask scores, exit heads, a projection) are only
    reached by those of the user's rules whose pattern contains their name: "*encoder*" is about the model. Without a
    rule, vectors (biases, norms) get no weight decay. The patterns alone decide which parameters share a group, so that
    a phase can be resumed with other rates and decays. Raises UserError for a user's rule that matches nothing, and for
    a phase in which everything is frozen. Changes `requires_grad` of the model's parameters.
    """
    named = dict(model.named_parameters())
    other_rules = list(other_rules)
    rules_of = {name: _rules_of(name, user_rules, other_rules) for name in named}
    for rule in user_rules:
        if not any(rule in rules for rules in rules_of.values()):
            words = sorted({other.params.strip("*.") for other in other_rules if not other.frozen} - {""})
            added = f"; what techniques add is reached by patterns with its name: {', '.join(words)}" if words else ""
            some = ", ".join([*named][:4])
            raise UserError(f'groups: "{rule.params}" matches no parameter of the model; some are: {some}, ...{added}')
    groups: dict[tuple[str, bool], Group] = {}
    for name, parameter in named.items():
        rule = next(iter(rules_of[name]), GroupRule(params="*"))
        parameter.requires_grad_(not rule.frozen)
        if rule.frozen:
            continue
        rate = base.lr if rule.learning_rate is None else rule.learning_rate
        exempt = rule.weight_decay is None and parameter.ndim <= 1
        decay = 0.0 if exempt else base.weight_decay if rule.weight_decay is None else rule.weight_decay
        label = rule.params if rule.params != "*" else "weights" if parameter.ndim > 1 else "vectors"
        groups.setdefault((label, exempt), Group(label, rate, decay)).parameters[name] = parameter
    if not groups:
        raise UserError("groups: every parameter is frozen: nothing would be trained")
    return list(groups.values())


def _rules_of(name: str, user_rules: Sequence[GroupRule], other_rules: Sequence[GroupRule]) -> list[GroupRule]:
    """Return the rules that reach a parameter, the deciding one first."""
    others = [rule for rule in other_rules if fnmatchcase(name, rule.params)]
    words = {rule.params.strip("*.") for rule in others if not rule.frozen}  # of a parameter that a technique trains
    users = [rule for rule in user_rules if fnmatchcase(name, rule.params)]
    return [rule for rule in users if all(word in rule.params for word in words)] + others


def as_torch(groups: Sequence[Group], base: Hyperparameters) -> list[dict[str, Any]]:
    """Return the groups as torch and DeepSpeed optimizers take them.

    A rate equal to the base is not written, for the optimizer to fill it, so that DeepSpeed's Muon keeps its `muon_lr`.
    """
    return [
        {"name": group.name, "params": list(group.parameters.values()), "weight_decay": group.weight_decay}
        | ({} if group.learning_rate == base.lr else {"lr": group.learning_rate})
        for group in groups
    ]


def build_optimizer(groups: Sequence[Group], base: Hyperparameters) -> torch.optim.Optimizer:
    """Build torch AdamW, fused: one pass over memory, on the CPU too."""
    import torch

    return torch.optim.AdamW(as_torch(groups, base), **asdict(base), fused=True)
