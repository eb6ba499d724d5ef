"""Train exit heads: a classifier after every layer, in a second stage or together with the model.

With L_j the loss of the head after layer j, and n the last layer, which has the model's own head:

    DeeBERT (arXiv 2004.12993) freezes the trained model, and trains the heads on sum_{j<n} L_j
    PABEE (arXiv 2006.04152) trains all together, on sum_{j<=n} j * L_j / sum_{j<=n} j

`early_exit.py` decides where a sample leaves, and has the model that runs so; `exit_evaluation.py` scores it and picks
its thresholds.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.models.layers import LayerStates, encoder_layers
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.exit_specs import ExitsSpec, SavedExits, aim_mistakes, policy_of
from ds_trainer.recipe.recipe import GroupRule
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.exits.early_exit import has_exits, load_heads, new_heads, read_exits, save_heads
from ds_trainer.techniques.exits.exit_evaluation import calibrate_folder, evaluate_exits
from ds_trainer.techniques.technique import Measured, PhaseLength, Technique

_HEADS = "exit_heads"


class Exits(Technique):
    name: ClassVar[str] = "exits"
    Spec = ExitsSpec
    cheap_views = True

    def __init__(self, spec: ExitsSpec, length: PhaseLength, task: Task) -> None:
        self.spec, self.task = spec, task
        self.term_units = {"exits.heads": task.loss_unit}
        if task.multi_label:
            raise UserError("exits: a text with several labels has no point at which all are sure: drop exits")
        self.layers: list[int] = []
        self.depth = 0
        self.heads = nn.ModuleDict()
        """The heads by the number of their layer."""
        self._source = self._news = ""  # the folder of the model, and where its heads come from

    def attach(self, model: nn.Module) -> nn.Module:
        """Add the heads: those of the folder that the model comes from, or copies of the model's own head."""
        self.depth = len(encoder_layers(model))
        requested = self.spec.layers or range(1, self.depth + 1)
        self.layers = [layer for layer in requested if layer < self.depth]  # the last has the model's own head
        if requested[-1] > self.depth or not self.layers:
            raise UserError(
                f"exits: layers are {list(requested)}, and the model has {self.depth}, the last with the model's own "
                f"head: name layers before the last"
            )
        policy = policy_of(self.spec, len(self.layers), self.task.regression)
        mistakes = aim_mistakes(self.spec, policy.criterion, self.layers, self.depth, self.task.regression)
        raise_mistakes(f"exits: {mistake}" for mistake in mistakes)
        self._source = str(getattr(model, "name_or_path", ""))
        self.heads = self._heads_for(model)
        model.add_module(_HEADS, self.heads)
        self._states = LayerStates(model, self.layers)
        return model

    def start(self, device: torch.device) -> None:
        """Log where the heads come from; refuse to train them beside a model head that is untrained and frozen."""
        if self._news:
            distributed.info(self._news)
        if self.spec.training == "joint":
            return
        try:
            self.task.check_trained(self._source)
        except ValueError as error:
            raise UserError(
                f'exits: training is "heads", and {error}: fine-tune first, or set training to "joint"'
            ) from error

    def rehearse(self, device: torch.device) -> None:
        pass

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        heads = GroupRule(params=f"{_HEADS}.*")
        return (heads, GroupRule(params="*", frozen=True)) if self.spec.training == "heads" else (heads,)

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """Return the sum of the heads' losses, or jointly their mean, and the own head's, weighted by layer."""
        losses = [self.task.loss(out, forward.batch) for out in self._outs(forward).values()]
        if self.spec.training == "heads":
            return {"exits.heads": torch.stack(losses).sum()}
        losses.append(self.task.loss(forward.out, forward.batch))
        layers = [*self.layers, self.depth]
        # weighed by plain numbers: making a tensor of them would wait for the device
        total = torch.stack([layer * loss for layer, loss in zip(layers, losses, strict=True)]).sum()
        return {"exits.heads": total / sum(layers)}

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        return {f"exit_{layer}": out for layer, out in self._outs(forward).items()}

    def fold(self, model: nn.Module) -> nn.Module:
        self._states.remove()
        delattr(model, _HEADS)
        return model

    def save(self, folder: Path) -> None:
        (pooling,) = {head.pooling for head in self.heads.values()}
        tokenizer = self.task.tokenizer  # its token for unknown words stands for a part of the text
        special = [] if pooling else sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id})
        saved = SavedExits(
            layers=self.layers,
            pooling=pooling,
            policy=policy_of(self.spec, len(self.layers), self.task.regression),
            special_tokens=special,
            held_out=self.task.spec.held_out,
            held_out_key=self.task.held_out_key(),
        )
        save_heads(folder, self.heads, saved)

    def after_export(self, folder: Path, batch_size: int) -> None:
        if self.spec.calibrated:
            calibrate_folder(folder, self.task, batch_size, self.spec)

    def measure(self, folder: Path, batch_size: int) -> Measured:
        """Score every head, every threshold and the chosen policy."""
        scores, results = evaluate_exits(folder, self.task, batch_size)
        splits = {split: values.copy() for split, values in results["splits"].items()}
        for values in splits.values():
            del values["curves"]  # the bulk of the results
        return Measured(scores, results | {"splits": splits}, results)

    def _outs(self, forward: Forward) -> dict[int, SimpleNamespace]:
        """Run each head on the states of its layer; return the outputs by layer, with `logits` as the model's has."""
        dtype = next(self.heads.parameters()).dtype
        states = {layer: forward.out.layer_states[layer].to(dtype) for layer in self.layers}
        heads = {layer: self.heads[str(layer)] for layer in self.layers}
        return {n: SimpleNamespace(logits=head(states[n], forward.batch.mask)) for n, head in heads.items()}

    def _heads_for(self, model: Any) -> nn.ModuleDict:
        """Return the heads of the model's folder where they suit this phase, else new ones."""
        folder = Path(model.name_or_path)
        if has_exits(folder):
            saved = read_exits(folder)
            fits = saved.layers == self.layers and self.spec.pooling in (None, saved.pooling)
            try:
                self.task.check_trained(folder)
            except ValueError:  # the model's own head is for other classes, and so are the exit heads
                fits = False
            if fits:
                self._news = f"{folder}: its exit heads are trained further"
                return load_heads(model, folder)[0]
            self._news = f"{folder}: new exit heads, since its own are for other layers or classes, or pool otherwise"
        return new_heads(model, self.layers, self.spec.pooling)
