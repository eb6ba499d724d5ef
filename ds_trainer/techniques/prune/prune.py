"""Pruning while training: masked linear layers whose scores are learned by movement, threshold, magnitude or L0.

Movement pruning (arXiv 2005.07683): topK, threshold, sigmoied_threshold (SMvP); static model pruning, where only the
scores are trained (arXiv 2210.06210); magnitude pruning (arXiv 1710.01878); hard-concrete L0 (arXiv 1712.01312).
Scores are of weights, or of what is kept or dropped as one, as in block pruning (arXiv 2109.04838): rows, columns,
blocks, heads, neurons. Leaves zeros: what is cut out of the matrices is the export's concern.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.config.prune_specs import BY_SHARE
from ds_trainer.config.recipe import GroupRule, PruneSpec
from ds_trainer.config.schedules import Schedule, steps_of
from ds_trainer.models.layers import in_features, swap, whole_class
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.losses import hard_concrete
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.prune.costs import (
    Costs,
    alike_costs,
    counted,
    flops_costs,
    layer_seconds,
    seconds_costs,
    weight_costs,
)
from ds_trainer.techniques.prune.decisions import Site, sites_of
from ds_trainer.techniques.prune.masked import MaskedLinear, Planned
from ds_trainer.techniques.prune.masks import DecisionMask, HardMask, KeepCut, KeepGates
from ds_trainer.techniques.prune.plans import plan_decisions_together, plan_each, plan_weights_together, sizes_of
from ds_trainer.techniques.prune.selection import Cut
from ds_trainer.techniques.technique import Clock, Technique

_LEAVE_STEPS = "lower initial_warmup or final_warmup, which leave the threshold no step to move in"
_START_DENSE = {
    "topK": _LEAVE_STEPS,
    "magnitude": _LEAVE_STEPS,
    "threshold": 'set mask_init to "constant", and mask_scale above initial_threshold by many steps of '
    "mask_scores_learning_rate",
    "sigmoied_threshold": "lower initial_threshold, or raise mask_scale",
    "l0": 'set mask_init to "constant" and mask_scale to 2.197',
}
"""What to change, by method, where training does not start dense."""


class Prune(Technique):
    name: ClassVar[str] = "prune"

    def __init__(self, spec: PruneSpec, clock: Clock, task: Task) -> None:
        self.spec = spec
        self.seed = clock.seed
        self.last_step = clock.total
        self.schedule = threshold_schedule(spec, clock)
        self.together = spec.global_topk or spec.target is not None
        self.term_units = {"prune.penalty": "example"} if spec.regularization else {}
        self.sites: dict[str, Site] = {}
        self.layers: dict[str, MaskedLinear] = {}
        self.flops: Costs | None = None
        self.costs: Costs | None = None
        """Of what a choice over all layers counts: weights, operations, or seconds once they are measured."""
        self.model_class: Any = None
        self.config: Any = None
        self.counted = Counter[str]()
        self.cheap_views = spec.evaluate_at_final_threshold
        self.step, self.threshold = 0, self.schedule(0)
        self.at_final: list[Planned] = []
        """The plans of the layers at the final threshold, once they are made for a view of this step."""
        self.told: set[str] = set()
        """What is told once and was: a start that is not dense, and granularities of which nothing is left."""

    def attach(self, model: nn.Module) -> nn.Module:
        self.sites = sites_of(model, self.spec)
        if all(site.block for site in self.sites.values()):
            self.flops = flops_costs(model, self.sites, self.spec.cost_tokens)
        if self.spec.target_flops is not None and self.flops is not None:
            self.flops.check(self.spec.target_flops, "target_flops", self._lowest())
            self.costs = self.flops
        elif self.spec.target is None and self.together and all(site.grain for site in self.sites.values()):
            self.costs = weight_costs(self.sites)
        base: Any = getattr(model, "base_model", model)
        self.model_class, self.config = whole_class(base), getattr(base, "config", None)
        self.counted = counted(model) if self.spec.target_latency is not None else Counter[str]()
        self.layers = {name: self._masked(site, index) for index, (name, site) in enumerate(self.sites.items())}
        swap(model, self.layers)
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        if self.spec.pruning_method == "magnitude":
            return ()
        rate = self.spec.mask_scores_learning_rate
        scores = GroupRule(params="*.mask_scores", learning_rate=rate, weight_decay=0.0)
        return (scores,) if self.spec.train_weights else (scores, GroupRule(params="*", frozen=True))

    def start(self, device: torch.device) -> None:
        """Measure what is counted in seconds, on one rank for all, unless the run that it goes on with has."""
        if self.spec.target_latency is None or self.costs is not None:
            return
        found = distributed.on_main(lambda: layer_seconds(self.model_class, self.config, self.spec.cost_tokens, device))
        self.costs = seconds_costs(found, self.counted, self.sites)
        self.costs.check(self.spec.target_latency, "target_latency", self._lowest())

    def on_step(self, step: int) -> None:
        if step in (1, 2) and step > self.step:  # an evaluation may have made this step's masks before
            self._warn_of_jump()
        self.step, self.threshold, self.at_final = step, self.schedule(step), []
        if self._due():
            self._plan(self.threshold)

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """The model at the final threshold, as the original's evaluations have it, where the recipe asks for that."""
        if not self.spec.evaluate_at_final_threshold:
            return {}
        if self.threshold == self.spec.final_threshold and self._due():
            return {"final_threshold": forward.out}
        now = self._planned()
        try:
            if self.at_final:
                self._set_planned(self.at_final)
            else:
                self._plan(self.spec.final_threshold)
            return {"final_threshold": predict(forward.batch)}
        finally:  # also where the run is stopped: a checkpoint holds what was chosen for training
            self.at_final = self._planned()
            self._set_planned(now)

    def state(self) -> dict[str, Any]:
        """What was chosen over all layers, as the scores of today would choose otherwise, and what was measured."""
        layers = list(self.layers.values())
        masks = [layer.mask for layer in layers] if self.spec.global_topk else []
        return {
            "cuts": [asdict(mask.cut) for mask in masks if isinstance(mask, HardMask)],
            "gates": [_written(layer.rule.gates) for layer in layers if isinstance(layer.rule, KeepGates)],
            "seconds": self._seconds(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        for layer, kept in zip(self.layers.values(), state["cuts"], strict=bool(state["cuts"])):
            cut = Cut(**kept)
            layer.plan(KeepCut(cut))
            layer.mask = HardMask(cut)  # with what it kept when it was found, not what it would keep today
        chosen = state.get("gates", ())
        for (name, layer), gates in zip(self.layers.items(), chosen, strict=bool(chosen)):
            layer.plan(KeepGates(_read(gates).view(self.sites[name].shape)))
        seconds = state.get("seconds")
        if seconds:
            shapes = {name: site.shape for name, site in self.sites.items()}
            self.costs = alike_costs(shapes, seconds["each"], seconds["fixed"])

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """The mean over layers of their penalty, scaled by threshold / final_threshold (arXiv 2005.07683)."""
        if not self.term_units:
            return {}
        penalties = [layer.penalty for layer in self.layers.values() if layer.penalty is not None]
        ramp = self.threshold / self.spec.final_threshold
        return {"prune.penalty": torch.stack(penalties).mean() * ramp}

    def readings(self) -> dict[str, float]:
        readings = {"prune/threshold": self.threshold}
        masks = {name: layer.mask for name, layer in self.layers.items() if layer.mask is not None}
        if not masks:
            return readings
        kept = {name: mask.kept for name, mask in masks.items()}
        sizes = {name: self.layers[name].covered for name in kept}
        readings["prune/density"] = sum(kept.values()) / sum(sizes.values())
        for name, count in kept.items():
            readings |= dict.fromkeys(
                [f"prune/density/{matrix}" for matrix in (*self.sites[name].inner, name)], count / sizes[name]
            )
        decided = {name: mask for name, mask in masks.items() if isinstance(mask, DecisionMask)}
        kept_of_kind: Counter[str] = Counter()
        for name, mask in decided.items():
            if self.sites[name].block:
                readings[f"prune/kept/{self.sites[name].block_name}"] = mask.decisions
                kept_of_kind[self.sites[name].granularity] += mask.decisions
        self._warn_of_none(kind for kind, count in kept_of_kind.items() if not count)
        if self.flops and len(decided) == len(self.layers):
            readings["prune/flops"] = self.flops.share({name: mask.open for name, mask in decided.items()})
        return readings

    def fold(self, model: nn.Module) -> nn.Module:
        swap(model, {name: layer.folded() for name, layer in self.layers.items()})
        for name, layer in self.layers.items():
            if isinstance(layer.mask, DecisionMask):
                self.sites[name].clear(model, ~layer.mask.open)
        if self.step == self.last_step:
            self._warn_of_end()
        return model

    def _warn_of_none(self, gone: Iterable[str]) -> None:
        """One empty block is what was asked for; none left in any layer is a model that reads no text any more."""
        for kind in {*gone} - self.told:
            self.told.add(kind)
            distributed.warn(
                f"prune: no {kind} is left in any layer: lower "
                + ("" if self.spec.pruning_method == "l0" else "final_threshold, or ")
                + "the weight of the penalty (final_lambda), or raise mask_scale"
                + (", or set min_heads" if kind == "head" else "")
            )

    def _warn_of_jump(self) -> None:
        """Tell, after one of the first two steps, of a start that is not as dense as the recipe says."""
        spec = self.spec
        by_share = spec.pruning_method in BY_SHARE
        density, expected = self._density(), spec.initial_threshold if by_share else 1.0
        if density is None or spec.target is not None or "start" in self.told:
            return
        if by_share and self.step > 0:  # the share has moved by then
            return
        what = "the density is"
        if spec.pruning_method == "l0":  # its density counts a gate that is half open, too
            constant, what = spec.mask_init == "constant", "the gates are open by"
            density = float(hard_concrete(torch.tensor(spec.mask_scale), None)) if constant else 0.5
        if density < expected - 0.1:
            self.told.add("start")
            distributed.warn(
                f"prune: at step {self.step} {what} {density:.1%}, and training should start with {expected:.0%}: "
                f"{_START_DENSE[spec.pruning_method]}"
            )

    def _warn_of_end(self) -> None:
        """Tell of an end that is far from the share that the recipe asks for or, without one, far from any pruning."""
        spec, density = self.spec, self._density()
        if density is None or spec.target is not None:
            return
        if spec.pruning_method in BY_SHARE:
            if not math.isclose(density, spec.final_threshold, rel_tol=0.2):
                distributed.warn(
                    f"prune: the run ends at a density of {density:.1%}, and final_threshold asks for "
                    f"{spec.final_threshold:.1%}: min_heads, multiple_of or the size of a decision allow nothing "
                    "nearer; lower them, or choose a finer granularity"
                )
        elif density > 0.99:
            kind = "l0" if spec.pruning_method == "l0" else "l1"
            way = "raise final_lambda" if spec.regularization else f'set regularization to "{kind}", and final_lambda'
            distributed.warn(f"prune: the run ends at a density of {density:.1%}, next to no pruning: {way}")
        elif density < 0.01:
            other = "mask_scores_learning_rate" if spec.pruning_method == "l0" else "final_threshold"
            way = "lower final_lambda" if spec.regularization else f"raise mask_scale or lower {other}"
            distributed.warn(f"prune: the run ends at a density of {density:.1%}, next to nothing: {way}")

    def _density(self) -> float | None:
        """The share of the weights that the masks keep; None before the first forward, which finds them."""
        masks = {name: layer.mask for name, layer in self.layers.items() if layer.mask is not None}
        whole = sum(self.layers[name].covered for name in masks)
        return sum(mask.kept for mask in masks.values()) / whole if masks else None

    def _due(self) -> bool:
        """Whether this step has masks of its own: what is chosen over all layers is held for so many steps."""
        if not self.together:
            return True
        due = self.step % self.spec.global_topk_frequency_compute == 0 or self.step == self.last_step
        return due or any(layer.rule is None for layer in self.layers.values())

    def _plan(self, threshold: float) -> None:
        """Say how the next forward finds its masks, or, over all layers, choose them now; collective."""
        for name, site in self.sites.items():
            if site.inner and self.layers[name].mask_scores is None:
                self.layers[name].worth = site.magnitudes(self.layers[name].weight)
        if not self.together:
            plan_each(self.layers, self.sites, self.spec, threshold, (self.seed, self.step))
        elif all(site.grain is None for site in self.sites.values()):
            plan_weights_together(self.layers, threshold)
        else:
            assert self.costs is not None, "start(), or resume() from a run that has measured, comes first"
            plan_decisions_together(self.layers, self.sites, self.spec, self.costs, threshold)

    def _planned(self) -> list[Planned]:
        return [layer.planned for layer in self.layers.values()]

    def _set_planned(self, planned: Iterable[Planned]) -> None:
        for layer, its in zip(self.layers.values(), planned, strict=True):
            layer.planned = its

    def _lowest(self) -> dict[str, int]:
        """How many decisions of each site are kept whatever they cost."""
        return {name: sizes_of(self.spec, site).lowest(math.prod(site.shape)) for name, site in self.sites.items()}

    def _seconds(self) -> dict[str, Any] | None:
        """What was measured, as JSON values: of a decision of each site, and of all else."""
        if self.spec.target_latency is None or self.costs is None:
            return None
        each = {name: float(cost.flatten()[0]) for name, cost in self.costs.each.items()}
        return {"each": each, "fixed": self.costs.fixed}

    def _masked(self, site: Site, index: int) -> MaskedLinear:
        scores = self._initial_scores(site, index)
        sizes = None if site.grain is None else site.sizes()
        return MaskedLinear(site.linear, scores, self.spec.regularization, site.grain, sizes)

    def _initial_scores(self, site: Site, index: int) -> Tensor | None:
        if self.spec.pruning_method == "magnitude":
            return None
        weight = site.linear.weight.detach()
        scores = weight.new_full(site.shape, self.spec.mask_scale)
        generator = torch.Generator(scores.device).manual_seed(self.seed + index)
        if self.spec.mask_init == "uniform":
            scores.uniform_(-self.spec.mask_scale, self.spec.mask_scale, generator=generator)
        elif self.spec.mask_init == "kaiming" and site.grain is not None:
            bound = in_features(site.linear) ** -0.5  # as wide as that of the weights
            scores.uniform_(-bound, bound, generator=generator)
        elif self.spec.mask_init == "kaiming":
            out_first = scores if isinstance(site.linear, nn.Linear) else scores.t()  # a view that has the fan-in last
            nn.init.kaiming_uniform_(out_first, a=math.sqrt(5), generator=generator)
        return scores


def threshold_schedule(spec: PruneSpec, clock: Clock) -> Schedule:
    """Step -> threshold. An int warm-up is in units of the learning rate's warm-up steps, as the original's."""
    start, tail = (
        units * clock.warmup if isinstance(units, int) else steps_of(units, clock.total)
        for units in (spec.initial_warmup, spec.final_warmup)
    )
    if start + tail > clock.total:
        raise UserError(
            f"prune: initial_warmup {spec.initial_warmup} and final_warmup {spec.final_warmup} hold the threshold for "
            f"{start} + {tail} steps, more than the phase's {clock.total}: write fractions, or lower warmup_steps"
        )
    return Schedule(spec.initial_threshold, spec.final_threshold, start, clock.total - tail, spec.schedule)


def _written(gates: Tensor) -> str:
    return "".join(map(str, gates.flatten().int().tolist()))


def _read(gates: str) -> Tensor:
    return torch.tensor([gate == "1" for gate in gates])
