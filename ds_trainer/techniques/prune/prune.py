"""Pruning while training: masked linear layers whose scores are learned by movement, threshold, magnitude or L0.

Movement pruning (arXiv 2005.07683): topK, threshold, sigmoied_threshold (SMvP); static model pruning, where only the
scores are trained (arXiv 2210.06210); magnitude pruning (arXiv 1710.01878); hard-concrete L0 (arXiv 1712.01312).
A score decides on a weight or, as in block pruning (arXiv 2109.04838), on a row, column, block, head or neuron. Pruning
leaves zeros; the export cuts them out of the matrices. `KeepZeros` trains what is left of single weights further.

    Prune --> MaskedLinear --> Mask    a layer, and what multiplies its weight; `selection.py` makes it once a step
        `---> Site ----------> Grain   where in the model the layer is, and which of its weights one score decides on
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.models.layers import encoder_linears, in_features, swap
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import GroupRule
from ds_trainer.recipe.schedules import Schedule, steps_of
from ds_trainer.recipe.technique_specs import BY_SHARE, PruneSpec
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.prune.masked import GateMask, HardMask, MaskedLinear, StepMask
from ds_trainer.techniques.prune.selection import mask_of, mask_together
from ds_trainer.techniques.prune.sites import Site, sites_of
from ds_trainer.techniques.technique import PhaseLength, Technique

# Movement with less has failed: MiniLM, pruned to 15% on SST-2, ends at chance with 0.011 and 0.077 (765 steps at 3e-5
# and 2e-4), and with 0.21 (2,105 at 2e-4) at chance or 15 points below the dense model, by the seed. With 0.39 the
# quickstart's small model loses 1.2 points; the published runs (arXiv 2005.07683) have 0.83 and 1.1.
_LEAST_TRAVEL = 0.3
# in lower case, as DeepSpeed reads them
_MIXING_OPTIMIZERS = {"muon", "onebitadam", "onebitlamb", "zerooneadam"}


class Prune(Technique):
    name: ClassVar[str] = "prune"
    Spec = PruneSpec

    def __init__(self, spec: PruneSpec, length: PhaseLength, task: Task) -> None:
        self.spec, self.length = spec, length
        self.schedule = threshold_schedule(spec, length)
        self.term_units = {"prune.penalty": "example"} if spec.regularization else {}
        self.cheap_views = spec.evaluate_at_final_threshold
        self.sites: dict[str, Site] = {}  # these and the layers are by the names of the linear layers that are masked
        self.layers: dict[str, MaskedLinear] = {}
        self.step, self.threshold = 0, self.schedule(0)
        self.at_final: list[StepMask] = []  # the masks at the final threshold, once a view has made them in this step
        self.emptied: set[str] = set()  # the kinds of decisions of which nothing is left, once that is logged

    def attach(self, model: nn.Module) -> nn.Module:
        self.sites = sites_of(model, self.spec)
        for index, (name, site) in enumerate(self.sites.items()):
            scores = initial_scores(site, self.spec, self.length.seed + index)
            self.layers[name] = MaskedLinear(site.linear, scores, self.spec.regularization)
        swap(model, self.layers)
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        if self.spec.pruning_method == "magnitude":
            return ()
        rate = self.spec.mask_scores_learning_rate
        scores = GroupRule(params="*.mask_scores", learning_rate=rate, weight_decay=0.0)
        return (scores,) if self.spec.train_weights else (scores, GroupRule(params="*", frozen=True))

    def check(self, optimizer: str, travel: float) -> str | None:
        """Warn where the phase is too short for the scores of single weights to tell the weights apart."""
        spec = self.spec
        learned = spec.pruning_method in ("topK", "threshold", "sigmoied_threshold") and spec.train_weights
        if not learned or travel >= _LEAST_TRAVEL or "weight" not in spec.choices.values():
            return None
        return (
            f"prune: {spec.pruning_method} learns from their movement which single weights to keep, and "
            f"{self.length.total:,} steps at these rates move a weight by {travel:.2g} at most, where published runs "
            f'have 0.8 or more: train longer or at a higher learning_rate, or take pruning_method "magnitude" on a '
            f"fine-tuned model, or a cut"
        )

    def on_step(self, step: int) -> None:
        self.step, self.threshold, self.at_final = step, self.schedule(step), []
        if self._is_due():
            self._set_masks(self.threshold)

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """Run the model at the final threshold too, as the original's evaluations do, where the recipe asks for it."""
        if not self.spec.evaluate_at_final_threshold:
            return {}
        if self.threshold == self.spec.final_threshold and self._is_due():
            return {"final_threshold": forward.out}
        of_training = [layer.step_mask for layer in self.layers.values()]
        try:
            if self.at_final:
                self._put_back(self.at_final)
            else:
                self._set_masks(self.spec.final_threshold)
            return {"final_threshold": predict(forward.batch)}
        finally:  # also where the run is stopped here: a checkpoint holds the masks of training
            self.at_final = [layer.step_mask for layer in self.layers.values()]
            self._put_back(of_training)

    def state(self) -> dict[str, Any]:
        """Return the masks chosen over all layers, which the scores no longer give."""
        masks = [layer.mask for layer in self.layers.values()] if self.spec.global_topk else []
        gates = [mask.open.flatten().int().tolist() for mask in masks if isinstance(mask, GateMask)]
        return {
            "cuts": [asdict(mask) for mask in masks if isinstance(mask, HardMask)],
            "gates": ["".join(map(str, of_layer)) for of_layer in gates],
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        for layer, cut in zip(self.layers.values(), state["cuts"], strict=bool(state["cuts"])):
            layer.step_mask = StepMask(mask=HardMask(**cut))
        for name, gates in zip(self.layers, state["gates"], strict=bool(state["gates"])):
            kept = torch.tensor([gate == "1" for gate in gates])
            self.layers[name].step_mask = StepMask(mask=self.sites[name].gated(kept))

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """Return the mean over layers of their penalty, scaled by threshold / final_threshold (arXiv 2005.07683)."""
        if not self.term_units:
            return {}
        penalties = [layer.penalty for layer in self.layers.values() if layer.penalty is not None]
        ramp = self.threshold / self.spec.final_threshold
        return {"prune.penalty": torch.stack(penalties).mean() * ramp}

    def readings(self) -> dict[str, float]:
        """Return the threshold and, once a forward has made the masks, densities and the heads and neurons kept."""
        readings = {"prune/threshold": self.threshold}
        masks = {name: layer.mask for name, layer in self.layers.items() if layer.mask is not None}
        if not masks:
            return readings
        kept_weights, kept_of_kind = 0.0, Counter[str]()
        for name, mask in masks.items():
            site, kept, size = self.sites[name], mask.kept, self.layers[name].weight_size
            kept_weights += kept * site.weights / size
            readings |= {f"prune/density/{matrix}": kept / size for matrix in (*site.inner, name)}
            if site.block and isinstance(mask, GateMask):
                decisions = int(mask.open.count_nonzero())
                readings[f"prune/kept/{site.block}"] = decisions
                kept_of_kind[site.granularity] += decisions
        for kind in {kind for kind, count in kept_of_kind.items() if not count} - self.emptied:
            self.emptied.add(kind)
            distributed.warn(f"prune: no {kind} is left in any layer: change final_threshold or final_lambda")
        return readings | {"prune/density": kept_weights / sum(self.sites[name].weights for name in masks)}

    def fold(self, model: nn.Module) -> nn.Module:
        swap(model, {name: layer.folded() for name, layer in self.layers.items()})
        for name, layer in self.layers.items():
            if isinstance(layer.mask, GateMask) and self.sites[name].inner:
                self.sites[name].clear(model, ~layer.mask.open)
        if self.step >= self.length.total:  # beyond it where a run is resumed with fewer steps than it has taken
            self._warn_of_end(self.readings()["prune/density"])
        return model

    def _warn_of_end(self, density: float) -> None:
        """Warn where the density is far from the share to keep or, with a threshold, is nearly 1 or 0."""
        if self.spec.pruning_method in BY_SHARE:
            right = math.isclose(density, self.spec.final_threshold, rel_tol=0.2)
            why = f"and final_threshold is {self.spec.final_threshold:.1%}: choose a finer granularity"
        else:
            right = 0.01 <= density <= 0.99
            why = "next to nothing: lower final_lambda or final_threshold, or raise mask_scale"
            if density > 0.99:
                why = "next to no pruning: set regularization, and raise final_lambda"
        if not right:
            distributed.warn(f"prune: the run ends at a density of {density:.1%}, {why}")

    def _is_due(self) -> bool:
        """Whether this step makes new masks: a choice over all layers is held for a number of steps."""
        refreshed = not self.spec.global_topk or self.step % self.spec.global_topk_frequency_compute == 0
        return refreshed or self.step >= self.length.total or any(layer.mask is None for layer in self.layers.values())

    def _set_masks(self, threshold: float) -> None:
        """Have the next forward make the masks, where ZeRO-3 gathers the scores, or make now what needs more than them.

        These are choices over all layers, and magnitudes of decisions, which may be about several matrices: collective.
        """
        if self.spec.global_topk:
            mask_together(self.layers, self.sites, threshold)
            return
        method = self.spec.pruning_method
        for index, (layer, site) in enumerate(zip(self.layers.values(), self.sites.values(), strict=True)):
            # every layer and step has its own noise, the same in a resumed run
            seed = hash((self.length.seed, self.step, index)) & (2**62 - 1)
            make = partial(mask_of, site=site, method=method, threshold=threshold, seed=seed)
            by_magnitude = method == "magnitude" and site.grain
            layer.step_mask = StepMask(mask=make(site.magnitudes(layer.weight))) if by_magnitude else StepMask(make)

    def _put_back(self, step_masks: Sequence[StepMask]) -> None:
        for layer, step_mask in zip(self.layers.values(), step_masks, strict=True):
            layer.step_mask = step_mask


class KeepZeros(Technique):
    """Train a pruned model further while the zeros in its encoder's linear layers stay: they get no gradient.

    For unstructured models, since what a structured cut leaves is dense. A weight that is zero and never has a gradient
    stays zero under every optimizer that works elementwise, its moments and its weight decay included.
    """

    name: ClassVar[str] = "keep_zeros"
    Spec = bool

    density = 1.0

    def attach(self, model: nn.Module) -> nn.Module:
        kept = total = 0
        for linear in encoder_linears(model).values():
            mask = linear.weight.detach() != 0
            kept, total = kept + int(mask.count_nonzero()), total + mask.numel()
            linear.register_buffer("nonzero", mask, persistent=False)  # a buffer, so that the engine moves it
            linear.weight.register_hook(lambda g, linear=linear: torch.where(linear.get_buffer("nonzero"), g, 0))
        self.density = kept / total
        return model

    def check(self, optimizer: str, travel: float) -> None:
        """Raise UserError for an optimizer that moves a weight by the gradients of other weights."""
        if optimizer.lower() in _MIXING_OPTIMIZERS:
            raise UserError(
                f"keep_zeros: optimizer.type is {optimizer}, whose steps are not made weight by weight, so zeros would "
                "not stay: use AdamW, Adam, Adagrad or SGD"
            )

    def start(self, device: torch.device) -> None:
        """Raise UserError where the model has no zeros. `attach` cannot: it also runs on stand-ins for later models."""
        if self.density == 1:
            raise UserError(
                "keep_zeros: the linear layers of the model's encoder have no zeros to keep: start from a pruned "
                "model, or drop it"
            )

    def rehearse(self, device: torch.device) -> None:
        pass

    def readings(self) -> dict[str, float]:
        return {"keep_zeros/density": self.density}


def initial_scores(site: Site, spec: PruneSpec, seed: int) -> Tensor | None:
    """Return the scores of a site at the start, the same on every rank; None where magnitude needs none."""
    if spec.pruning_method == "magnitude":
        return None
    scores = site.linear.weight.detach().new_full(site.shape, spec.mask_scale)
    generator = torch.Generator(scores.device).manual_seed(seed)
    # kaiming's is the range of a linear layer's weights at their start
    bound = {"uniform": spec.mask_scale, "kaiming": in_features(site.linear) ** -0.5}.get(spec.mask_init)
    if bound is not None:
        scores.uniform_(-bound, bound, generator=generator)
    return scores


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
    return Schedule(spec.initial_threshold, spec.final_threshold, start, length.total - tail, spec.schedule)
