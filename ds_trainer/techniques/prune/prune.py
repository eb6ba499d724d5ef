"""Pruning while training: masked linear layers whose scores are learned by movement, threshold, magnitude or L0.

Movement pruning (arXiv 2005.07683): topK, threshold, sigmoied_threshold (SMvP); static model pruning, where only the
scores are trained (arXiv 2210.06210); magnitude pruning (arXiv 1710.01878); hard-concrete L0 (arXiv 1712.01312).
A score is of a weight or, as in block pruning (arXiv 2109.04838), of a larger decision: a row, column, block, head or
neuron. Pruning leaves zeros; the export cuts them out of the matrices.

The concepts, from the inside out: a `Grain` says which weights a decision is about (`grains.py`), a `Mask` how scores
mask weights (`masks.py`), a rule which scores are kept (`rules.py`), a `Site` where in the model this happens
(`sites.py`), a `Budget` what decisions may cost together (`costs.py`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.config.recipe import GroupRule, PruneSpec
from ds_trainer.config.schedules import Schedule, steps_of
from ds_trainer.models.layers import in_features, rows_of, swap
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.prune import advice
from ds_trainer.techniques.prune.costs import Budget
from ds_trainer.techniques.prune.masked import MaskedLinear, StepMask
from ds_trainer.techniques.prune.masks import DecisionMask, HardMask
from ds_trainer.techniques.prune.rules import choose_decisions, choose_weights, set_rules
from ds_trainer.techniques.prune.selection import Cutoff
from ds_trainer.techniques.prune.sites import Site, sites_of
from ds_trainer.techniques.technique import PhaseLength, Technique


class Prune(Technique):
    name: ClassVar[str] = "prune"
    Spec = PruneSpec

    budget: Budget

    def __init__(self, spec: PruneSpec, length: PhaseLength, task: Task) -> None:
        self.spec = spec
        self.seed = length.seed
        self.last_step = length.total
        self.schedule = threshold_schedule(spec, length)
        self.together = spec.global_topk or spec.target is not None
        """Whether one choice over all layers decides what is kept."""
        self.term_units = {"prune.penalty": "example"} if spec.regularization else {}
        self.cheap_views = spec.evaluate_at_final_threshold
        self.sites: dict[str, Site] = {}
        self.layers: dict[str, MaskedLinear] = {}
        self.weights: dict[str, int] = {}
        """How many weights the decisions of each site are about."""
        self.step, self.threshold = 0, self.schedule(0)
        self.at_final: list[StepMask] = []
        """The layers' masks at the final threshold, once a view has made them in this step."""
        self.warned: set[str] = set()
        self.cut_shares: dict[str, float] = {}
        """The share of the decisions of each site that a cut has kept, with `mask_init` "cut"."""

    def attach(self, model: nn.Module) -> nn.Module:
        self.sites = sites_of(model, self.spec)
        self.budget = Budget(model, self.sites, self.spec)
        if self.spec.mask_init == "cut":
            self._start_from_zeros()
        for index, (name, site) in enumerate(self.sites.items()):
            scores = self._initial_scores(site, index)
            self.layers[name] = MaskedLinear(site.linear, scores, self.spec.regularization, site.grain)
            self.weights[name] = site.weights  # counted now, since ZeRO-3 leaves empty weights
        swap(model, self.layers)
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        if self.spec.pruning_method == "magnitude":
            return ()
        rate = self.spec.mask_scores_learning_rate
        scores = GroupRule(params="*.mask_scores", learning_rate=rate, weight_decay=0.0)
        return (scores,) if self.spec.train_weights else (scores, GroupRule(params="*", frozen=True))

    def check(self, optimizer: str, travel: float) -> str | None:
        return advice.of_length(self.spec, self.last_step, travel)

    def start(self, device: torch.device) -> None:
        if self.spec.mask_init == "cut":  # `attach` cannot check it: it also runs on stand-ins for later models
            check_cut(self.cut_shares, self.together)
        self.rehearse(device)

    def rehearse(self, device: torch.device) -> None:
        self.budget.measure(device)

    def on_step(self, step: int) -> None:
        # Read before the masks change. An evaluation may have set this step's masks already: hence `step > self.step`.
        density = self.readings().get("prune/density") if step in (1, 2) and step > self.step else None
        if density is not None:
            self._warn_once("start", advice.of_start(self.spec, self.step, density))
        self.step, self.threshold, self.at_final = step, self.schedule(step), []
        if self._is_due():
            self._find_masks(self.threshold)

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """Run the model at the final threshold too, as the original's evaluations do, where the recipe asks for it."""
        if not self.spec.evaluate_at_final_threshold:
            return {}
        if self.threshold == self.spec.final_threshold and self._is_due():
            return {"final_threshold": forward.out}
        of_training = [layer.step_mask for layer in self.layers.values()]
        try:
            if self.at_final:
                self._set_step_masks(self.at_final)
            else:
                self._find_masks(self.spec.final_threshold)
            return {"final_threshold": predict(forward.batch)}
        finally:  # also where the run is stopped here: a checkpoint holds the masks of training
            self.at_final = [layer.step_mask for layer in self.layers.values()]
            self._set_step_masks(of_training)

    def state(self) -> dict[str, Any]:
        """Return the masks chosen over all layers, which the scores no longer give, and the measured seconds."""
        masks = [layer.mask for layer in self.layers.values()] if self.together else []
        gates = [mask.open.flatten().int().tolist() for mask in masks if isinstance(mask, DecisionMask)]
        return {
            "cuts": [asdict(mask.cutoff) for mask in masks if isinstance(mask, HardMask)],
            "gates": ["".join(map(str, of_layer)) for of_layer in gates],
            "seconds": self.budget.state(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        layers, cutoffs, gates = self.layers.values(), state["cuts"], state["gates"]
        for layer, cutoff in zip(layers, cutoffs, strict=bool(cutoffs)):
            layer.hold(HardMask(Cutoff(**cutoff)))
        for layer, written in zip(layers, gates, strict=bool(gates)):
            layer.hold_gates(torch.tensor([gate == "1" for gate in written]))
        self.budget.resume(state["seconds"])

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """Return the mean over layers of their penalty, scaled by threshold / final_threshold (arXiv 2005.07683)."""
        if not self.term_units:
            return {}
        penalties = [layer.penalty for layer in self.layers.values() if layer.penalty is not None]
        ramp = self.threshold / self.spec.final_threshold
        return {"prune.penalty": torch.stack(penalties).mean() * ramp}

    def readings(self) -> dict[str, float]:
        """Return the threshold and, once a forward has made the masks, densities, kept decisions, and FLOPs."""
        readings = {"prune/threshold": self.threshold}
        masks = {name: layer.mask for name, layer in self.layers.items() if layer.mask is not None}
        if not masks:
            return readings
        shares = {name: Fraction(mask.kept, self.layers[name].weight_size) for name, mask in masks.items()}
        kept = sum(share * self.weights[name] for name, share in shares.items())
        readings["prune/density"] = float(kept / sum(self.weights[name] for name in masks))
        gates = {name: mask.open for name, mask in masks.items() if isinstance(mask, DecisionMask)}
        kept_of_kind = Counter[str]()
        for name, share in shares.items():
            site = self.sites[name]
            readings |= {f"prune/density/{matrix}": float(share) for matrix in (*site.inner, name)}
            if site.block:
                decisions = int(gates[name].count_nonzero())
                readings[f"prune/kept/{site.block_name}"] = decisions
                kept_of_kind[site.granularity] += decisions
        for kind in [kind for kind, count in kept_of_kind.items() if not count]:
            self._warn_once(kind, advice.of_none_left(self.spec, kind))
        if self.budget.flops and len(gates) == len(self.layers):
            readings["prune/flops"] = self.budget.flops.share(gates)
        return readings

    def fold(self, model: nn.Module) -> nn.Module:
        swap(model, {name: layer.folded() for name, layer in self.layers.items()})
        for name, layer in self.layers.items():
            if isinstance(layer.mask, DecisionMask):
                self.sites[name].clear(model, ~layer.mask.open)
        if self._is_last():
            self._warn_once("end", advice.of_end(self.spec, self.readings()["prune/density"]))
        return model

    def _warn_once(self, about: str, message: str | None) -> None:
        if message and about not in self.warned:
            self.warned.add(about)
            distributed.warn(message)

    def _is_last(self) -> bool:
        """Whether training has ended; a run may be resumed with fewer steps than its checkpoint has taken."""
        return self.step >= self.last_step

    def _is_due(self) -> bool:
        """Whether this step makes new masks: a choice over all layers is held for a number of steps."""
        if not self.together or self._is_last():
            return True
        refreshed = self.step % self.spec.global_topk_frequency_compute == 0
        return refreshed or any(layer.mask is None for layer in self.layers.values())

    def _find_masks(self, threshold: float) -> None:
        """Set the rules by which the next forward makes its masks or, over all layers, make them now; collective."""
        for name, site in self.sites.items():
            layer = self.layers[name]
            if site.inner and layer.mask_scores is None:
                layer.magnitudes = site.magnitudes(layer.weight)
        costs = self.budget.costs
        if not self.together:
            set_rules(self.layers, self.sites, self.spec, threshold, (self.seed, self.step))
        elif all(site.grain is None for site in self.sites.values()):
            choose_weights(self.layers, threshold)
        else:
            assert costs is not None, "start(), or resume() from a run that has measured, comes first"
            choose_decisions(self.layers, self.sites, costs.each, threshold * costs.total - costs.fixed)

    def _start_from_zeros(self) -> None:
        """Start the threshold at the share of decisions that are not zero, unless the recipe sets where it starts."""
        kept = {name: int(site.nonzero().count_nonzero()) for name, site in self.sites.items()}
        self.cut_shares = {name: count / self.sites[name].count for name, count in kept.items()}
        if self.spec.initial_threshold is None:
            density = sum(kept.values()) / sum(site.count for site in self.sites.values())
            self.spec = self.spec.model_copy(update={"initial_threshold": density})
            self.schedule = replace(self.schedule, initial=density)
            self.threshold = self.schedule(0)

    def _set_step_masks(self, step_masks: Sequence[StepMask]) -> None:
        for layer, step_mask in zip(self.layers.values(), step_masks, strict=True):
            layer.step_mask = step_mask

    def _initial_scores(self, site: Site, index: int) -> Tensor | None:
        """Return the scores of a site at the start, the same on every rank; None where magnitude needs none."""
        if self.spec.pruning_method == "magnitude":
            return None
        scores = site.linear.weight.detach().new_full(site.shape, self.spec.mask_scale)
        generator = torch.Generator(scores.device).manual_seed(self.seed + index)
        if self.spec.mask_init == "uniform":
            scores.uniform_(-self.spec.mask_scale, self.spec.mask_scale, generator=generator)
        elif self.spec.mask_init == "cut":
            scores[~site.nonzero()] = -self.spec.mask_scale
        elif self.spec.mask_init == "kaiming" and site.grain is not None:
            bound = in_features(site.linear) ** -0.5  # the range that kaiming gives the matrix's weights
            scores.uniform_(-bound, bound, generator=generator)
        elif self.spec.mask_init == "kaiming":
            out_first = rows_of(scores, type(site.linear))
            nn.init.kaiming_uniform_(out_first, a=math.sqrt(5), generator=generator)
        return scores


def check_cut(shares: Mapping[str, float], together: bool) -> None:
    """Raise UserError where one threshold cannot give back the zeros of a cut, by the share that each site keeps."""
    least, most = min(shares.values()), max(shares.values())
    if least == 1:
        raise UserError("prune: mask_init is cut, and the model has no zeros: start from a cut, or drop mask_init")
    if not together and most - least > 0.01 * most:
        raise UserError(
            f"prune: mask_init is cut, and the model keeps {least:.1%} of one matrix and {most:.1%} of another: set "
            "global_topk, or uniform in the cut"
        )


def threshold_schedule(spec: PruneSpec, length: PhaseLength) -> Schedule:
    """Return step -> threshold. An int warm-up counts multiples of the learning rate's, as in the original scripts."""
    start, tail = (
        warmup * length.warmup if isinstance(warmup, int) else steps_of(warmup, length.total)
        for warmup in (spec.initial_warmup, spec.final_warmup)
    )
    if start + tail > length.total:
        raise UserError(
            f"prune: initial_warmup and final_warmup hold the threshold for {start} + {tail} steps, more than the "
            f"phase's {length.total}: write fractions, or lower warmup_steps"
        )
    initial = 1.0 if spec.initial_threshold is None else spec.initial_threshold  # else `attach` reads it from the model
    return Schedule(initial, spec.final_threshold, start, length.total - tail, spec.schedule)
