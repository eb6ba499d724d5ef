"""Early exits while training: a head after every layer, in a second stage or with the model.

DeeBERT (arXiv 2004.12993) trains the heads alone, all else frozen, by the sum of their losses; PABEE (arXiv 2006.04152)
all together, by a mean weighted by the number of the layer. `exits.distill` has the model's own head teach the others.
Who leaves where is decided in `exit_policy.py`, and the model that does it is in `early_exit.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.config.exit_specs import SavedExits, aim_mistakes, policy_of
from ds_trainer.config.recipe import ExitsSpec, GroupRule
from ds_trainer.models.layers import encoder_layers
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks import losses
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.exits.heads import LayerStates, has_exits, load_heads, new_heads, read_exits, save_heads
from ds_trainer.techniques.technique import Clock, Technique

_HEADS = "exit_heads"
_MOST_PENDING = 1000
"""Micro-batches whose losses wait on the device at most, before they are summed up."""


class Exits(Technique):
    name: ClassVar[str] = "exits"
    cheap_views = True

    def __init__(self, spec: ExitsSpec, clock: Clock, task: Task) -> None:
        self.spec, self.task = spec, task
        units = {"heads": task.loss_unit, "distill": task.logits_unit}
        self.term_units = {f"exits.{term}": units[term] for term in spec.terms}
        self.layers: list[int] = []
        self.heads: dict[int, nn.Module] = {}
        self._module = nn.ModuleDict()
        self._source = self._told = ""
        self._states: LayerStates | None = None
        self._losses: list[Tensor] = []
        self._sums, self._summed = torch.zeros(()), 0

    def attach(self, model: nn.Module) -> nn.Module:
        """Add the heads: those of the folder the model comes from, where it has them, or copies of its own."""
        self.layers = self._asked_layers(len(encoder_layers(model)))
        self._check_policy()
        self._check_weights()
        self._source = str(getattr(model, "name_or_path", ""))
        self._module = self._heads_for(model)
        model.add_module(_HEADS, self._module)
        self.heads = {int(layer): head for layer, head in self._module.items()}
        self._states = LayerStates(model, self.layers)
        return model

    def start(self, device: torch.device) -> None:
        """Tell of the heads, and refuse to train them alone on what an untrained head of the model's own would say."""
        if self._told:
            distributed.info(self._told)
        if self.spec.training == "joint":
            return
        try:
            self.task.check_trained(self._source)
        except ValueError as error:
            raise UserError(
                f'exits: training is "heads", and {error}: fine-tune the model first, or set training to "joint"'
            ) from error

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        heads = GroupRule(params=f"{_HEADS}.*")
        return (heads, GroupRule(params="*", frozen=True)) if self.spec.training == "heads" else (heads,)

    def on_step(self, step: int) -> None:
        """Sum up the heads' losses once they are many, as the next readings may be far; collective."""
        if len(self._losses) >= _MOST_PENDING:
            self._sums, self._summed = self._totals()
            self._losses = []

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        logits = self._logits(forward)
        found = {}
        if "heads" in self.spec.terms:
            found["exits.heads"] = self._labels_term(forward, logits)
        if "distill" in self.spec.terms:
            (own,) = self.task.logits(forward.out, forward.batch)
            found["exits.distill"] = self._weighted([self._taught(one, own) for one in logits.values()])
        return found

    def readings(self) -> dict[str, float]:
        """Each head's loss on the labels, mean since the last time over all ranks; collective."""
        sums, summed = self._totals()
        if not summed:
            return {}
        self._losses, self._sums, self._summed = [], torch.zeros(()), 0
        means = (sums / summed).tolist()
        return {f"exits/loss/{layer}": value for layer, value in zip(self.layers, means, strict=True)}

    def state(self) -> dict[str, Any]:
        """The heads' losses since the last readings; collective."""
        return {"losses": self._mean_losses().tolist(), "sums": self._sums.tolist(), "summed": self._summed}

    def resume(self, state: Mapping[str, Any]) -> None:
        device = distributed.device()
        self._losses = [torch.tensor(row, device=device, dtype=torch.float64) for row in state["losses"]]
        self._sums = torch.tensor(state.get("sums", 0.0), device=device, dtype=torch.float64)
        self._summed = state.get("summed", 0)  # both are missing in checkpoints of version 0.1.0

    def _mean_losses(self) -> Tensor:
        """(micro-batches, heads), each the mean over all ranks, in fp64."""
        if not self._losses:
            return torch.zeros(0, len(self.layers), dtype=torch.float64, device=distributed.device())
        return distributed.mean(torch.stack([row.double() for row in self._losses]))

    def _totals(self) -> tuple[Tensor, int]:
        """(heads,) sums of the losses since the last readings, and the number of micro-batches; collective."""
        rows = self._mean_losses()
        return self._sums + rows.sum(0), self._summed + len(rows)

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        return {f"exit_{layer}": SimpleNamespace(logits=one) for layer, one in self._logits(forward).items()}

    def fold(self, model: nn.Module) -> nn.Module:
        assert self._states is not None, "attach() comes first"
        self._states.remove()
        delattr(model, _HEADS)
        return model

    def save(self, folder: Path) -> None:
        policy = policy_of(self.spec, len(self.layers), self.task.regression)
        (pooling,) = {head.pooling for head in self._module.values()}
        saved = SavedExits(
            layers=self.layers,
            pooling=pooling,
            policy=policy,
            held_out=getattr(self.task.spec, "held_out", 0.0),
            held_out_key=self.task.held_out_key(),
        )
        save_heads(folder, self._module, saved)
        found, _ = load_heads(self.task.build_model(folder), folder)
        if not _same(self._module, found):
            raise RuntimeError(f"the exit heads written to {folder} are not those that were trained")

    def _logits(self, forward: Forward) -> dict[int, Tensor]:
        """What each head says of the states of the model's latest forward, which was of this batch."""
        assert self._states is not None, "attach() comes first"
        states, mask = self._states.take(), forward.batch.mask
        return {
            layer: head(states[layer].to(next(head.parameters()).dtype), mask) for layer, head in self.heads.items()
        }

    def _labels_term(self, forward: Forward, logits: dict[int, Tensor]) -> Tensor:
        found = [self.task.loss(SimpleNamespace(logits=one), forward.batch) for one in logits.values()]
        self._losses.append(torch.stack(found).detach())
        if self.spec.training == "joint":
            found.append(self.task.loss(forward.out, forward.batch))
        return self._weighted(found)

    def _weighted(self, found: Sequence[Tensor]) -> Tensor:
        """Their sum, or with joint training their mean; weights beyond the heads at hand are the own head's."""
        weights = self._weights()[: len(found)]  # plain numbers: a tensor of them would wait for the device
        total = torch.stack([weight * value for weight, value in zip(weights, found, strict=True)]).sum()
        return total / sum(weights) if self.spec.training == "joint" else total

    def _weights(self) -> list[float]:
        """One a head, and with joint training one for the model's own."""
        if self.spec.head_weights is not None:
            return self.spec.head_weights
        if self.spec.training == "heads":
            return [1.0] * len(self.layers)
        return [*map(float, self.layers), float(self._depth)]

    def _taught(self, logits: Tensor, own: Tensor) -> Tensor:
        """The own head's lesson to another."""
        teacher = own.detach()
        if self.task.regression:
            return losses.logit_mse(logits, teacher)
        return losses.distillation_kl(logits, teacher.clone(), self.spec.temperature)  # which overwrites the teacher's

    def _asked_layers(self, depth: int) -> list[int]:
        self._depth = depth
        if depth < 2:
            raise UserError(f"exits: the model has {depth} layer, and no layer before the last to exit after")
        asked = self.spec.layers or range(1, depth + 1)
        if asked[-1] > depth:
            raise UserError(f"exits: layers names layer {asked[-1]}, and the model has {depth}: write 1 to {depth}")
        inner = [layer for layer in asked if layer < depth]  # after the last is the model's own head
        if not inner:
            raise UserError(f"exits: layers names only the last layer, {depth}, where the model's own head is")
        return inner

    def _check_policy(self) -> None:
        policy = policy_of(self.spec, len(self.layers), self.task.regression)
        mistakes = aim_mistakes(self.spec, policy.criterion, self.layers, self._depth, self.task.regression)
        if mistakes:
            raise UserError("\n".join(f"exits: {mistake}" for mistake in mistakes))

    def _check_weights(self) -> None:
        wanted = len(self.layers) + (self.spec.training == "joint")
        given = self.spec.head_weights
        if given is not None and (len(given) != wanted or not any(given)):
            heads = f"the heads after layers {', '.join(map(str, self.layers))}"
            own = " and the model's own" if self.spec.training == "joint" else ""
            raise UserError(f"exits: head_weights are {given}: give {wanted}, for {heads}{own}, not all of them 0")
        if given is not None and "distill" in self.spec.terms and not any(given[: len(self.layers)]):
            raise UserError(f"exits: head_weights are {given}: exits.distill teaches no head, drop the term")

    def _heads_for(self, model: Any) -> nn.ModuleDict:
        folder = Path(model.name_or_path)
        if not has_exits(folder):
            return new_heads(model, self.layers, self.spec.pooling)
        why_new = self._why_new(folder)
        heads = new_heads(model, self.layers, self.spec.pooling) if why_new else load_heads(model, folder)[0]
        what = f"new exit heads, since {why_new}" if why_new else "its exit heads are trained further"
        self._told = f"{folder}: {what}"
        return heads

    def _why_new(self, folder: Path) -> str | None:
        """Why the heads of a folder are none to go on with."""
        saved = read_exits(folder)
        if saved.layers != self.layers:
            return f"its own are after layers {', '.join(map(str, saved.layers))}"
        if self.spec.pooling not in (None, saved.pooling):
            return f"the pooling of its own is {saved.pooling}"
        try:
            self.task.check_trained(folder)
        except ValueError as error:  # the model's own head was of other classes, and so are they
            return str(error)
        return None


def _same(trained: nn.Module, found: nn.Module) -> bool:
    """Whether the one, in the precision it was trained in, has bit for bit the values of the other, in fp32."""
    values = found.state_dict()
    return trained.state_dict().keys() == values.keys() and all(
        torch.equal(value.to(values[name].dtype), values[name]) for name, value in trained.state_dict().items()
    )
