"""Pruning while training: masked linear layers whose scores are learned by movement, threshold, magnitude or L0.

Movement pruning (arXiv 2005.07683): topK, threshold, sigmoied_threshold (SMvP); static model pruning, where only the
scores are trained (arXiv 2210.06210); magnitude pruning (arXiv 1710.01878); hard-concrete L0 (arXiv 1712.01312).
Leaves zeros: what is cut out of the matrices is the export's concern.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.models import AnyLinear, encoder_linears, gathered, swap
from ds_trainer.recipe import GroupRule, PruneSpec
from ds_trainer.schedules import Schedule, steps_of
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.masked import HardMask, KeepAbove, KeepCut, KeepShare, MaskedLinear, MaskRule, OpenGates
from ds_trainer.techniques.selection import Cut, select_largest
from ds_trainer.techniques.technique import Clock, Forward, Technique


class Prune(Technique):
    name: ClassVar[str] = "prune"

    def __init__(self, spec: PruneSpec, clock: Clock, task: Task) -> None:
        self.spec = spec
        self.seed = clock.seed
        self.last_step = clock.total
        self.schedule = threshold_schedule(spec, clock)
        self.term_names = ("prune.penalty",) if spec.regularization else ()
        self.layers: dict[str, MaskedLinear] = {}
        self.threshold = self.schedule(0)

    def attach(self, model: nn.Module) -> nn.Module:
        linears = encoder_linears(model, self.spec.modules)
        self.layers = {
            name: MaskedLinear(linear, self._initial_scores(linear, index), self.spec.regularization)
            for index, (name, linear) in enumerate(linears.items())
        }
        swap(model, self.layers)
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        if self.spec.pruning_method == "magnitude":
            return ()
        rate = self.spec.mask_scores_learning_rate
        scores = GroupRule(params="*.mask_scores", learning_rate=rate, weight_decay=0.0)
        return (scores,) if self.spec.train_weights else (scores, GroupRule(params="*", frozen=True))

    def on_step(self, step: int) -> None:
        self.threshold = self.schedule(step)
        if self.spec.global_topk:
            self._plan_globally(step)
            return
        for index, layer in enumerate(self.layers.values()):
            layer.plan(self._rule(step, index))

    def state(self) -> dict[str, Any]:
        """The cuts of a global top-k, found some steps ago: those of today's scores would be others."""
        masks = [layer.mask for layer in self.layers.values()] if self.spec.global_topk else []
        return {"cuts": [asdict(mask.cut) for mask in masks if isinstance(mask, HardMask)]}

    def resume(self, state: Mapping[str, Any]) -> None:
        for layer, kept in zip(self.layers.values(), state["cuts"], strict=bool(state["cuts"])):
            cut = Cut(**kept)
            layer.plan(KeepCut(cut))
            layer.mask = HardMask(cut)  # with what it kept when it was found, not what it would keep today

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """The mean over layers of their penalty, scaled by threshold / final_threshold (arXiv 2005.07683)."""
        if not self.term_names:
            return {}
        penalties = [layer.penalty for layer in self.layers.values() if layer.penalty is not None]
        ramp = self.threshold / self.spec.final_threshold
        return {"prune.penalty": torch.stack(penalties).mean() * ramp}

    def readings(self) -> dict[str, float]:
        readings = {"prune/threshold": self.threshold}
        kept = {name: layer.mask.kept for name, layer in self.layers.items() if layer.mask is not None}
        if kept:
            sizes = {name: self.layers[name].weight_size for name in kept}
            readings["prune/density"] = sum(kept.values()) / sum(sizes.values())
            readings |= {f"prune/density/{name}": count / sizes[name] for name, count in kept.items()}
        return readings

    def fold(self, model: nn.Module) -> nn.Module:
        swap(model, {name: layer.folded() for name, layer in self.layers.items()})
        return model

    def _rule(self, step: int, index: int) -> MaskRule:
        method = self.spec.pruning_method
        if method in ("topK", "magnitude"):
            return KeepShare(self.threshold)
        if method == "l0":
            return OpenGates(hash((self.seed, step, index)) & (2**62 - 1))
        return KeepAbove(self.threshold, of_sigmoid=method == "sigmoied_threshold")

    def _plan_globally(self, step: int) -> None:
        """One cut over all layers' scores, found anew every so many steps and held in between."""
        layers = list(self.layers.values())
        due = step % self.spec.global_topk_frequency_compute == 0 or step == self.last_step
        if not due and all(layer.rule is not None for layer in layers):
            return
        sizes = [layer.weight_size for layer in layers]

        def chunks() -> Iterator[Tensor]:
            for layer in layers:
                with gathered(layer.weight if layer.mask_scores is None else layer.mask_scores):
                    yield layer.scores()

        cuts = select_largest(chunks, sizes, round(self.threshold * sum(sizes)))
        for layer, cut in zip(layers, cuts, strict=True):
            layer.plan(KeepCut(cut))

    def _initial_scores(self, linear: AnyLinear, index: int) -> Tensor | None:
        if self.spec.pruning_method == "magnitude":
            return None
        scores = torch.full_like(linear.weight.detach(), self.spec.mask_scale)
        generator = torch.Generator(scores.device).manual_seed(self.seed + index)
        if self.spec.mask_init == "uniform":
            scores.uniform_(-self.spec.mask_scale, self.spec.mask_scale, generator=generator)
        elif self.spec.mask_init == "kaiming":
            out_first = scores if isinstance(linear, nn.Linear) else scores.t()  # a view that has the fan-in last
            nn.init.kaiming_uniform_(out_first, a=math.sqrt(5), generator=generator)
        return scores


def threshold_schedule(spec: PruneSpec, clock: Clock) -> Schedule:
    """Step -> threshold. An int warm-up is in units of the learning rate's warm-up steps, as the original's."""
    start, tail = (
        units * clock.warmup if isinstance(units, int) else steps_of(units, clock.total)
        for units in (spec.initial_warmup, spec.final_warmup)
    )
    if start + tail > clock.total:
        raise ValueError(
            f"prune: initial_warmup {spec.initial_warmup} and final_warmup {spec.final_warmup} hold the threshold for "
            f"{start} + {tail} steps, more than the phase's {clock.total}: write fractions, or lower warmup_steps"
        )
    return Schedule(spec.initial_threshold, spec.final_threshold, start, clock.total - tail, spec.schedule)
