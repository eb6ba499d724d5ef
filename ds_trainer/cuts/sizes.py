"""Cut a model to sizes of the whole: layers, channels of the residual stream, heads and neurons.

The sizes are the same in every layer, so that a plain config of the family says them. Layers go first, then heads and
neurons by optimal brain surgeon, then channels: those stay whose outputs of all norms, as means of absolute values over
the calibration tokens, have the largest sum (Minitron, arXiv 2407.14679). Weights that read or write the residual
stream are known by their shape, not by name: the config's width decides one of their dimensions.
"""

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.cuts.blocks import cut_blocks, cut_places
from ds_trainer.cuts.calibration import Calibration, check_sound, check_tokens, finite
from ds_trainer.cuts.layerwise import observe
from ds_trainer.cuts.reconstruction import Kept
from ds_trainer.cuts.surgeon import CutRecord
from ds_trainer.cuts.vocabulary import kept_alone
from ds_trainer.models.folders import as_user_error
from ds_trainer.models.layers import (
    blocks_of,
    build_like,
    encoder_layers,
    layers_of,
    sizes_of,
    whole_heads,
)
from ds_trainer.models.shrink import check_known, head_width, plain_config, shrink
from ds_trainer.models.student import can_keep, config_of_layers, with_layers
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.cut_specs import CutSpec

_STEPS = 64
"""Shares are rounded to sizes that are multiples of at least about this part of the whole."""


@dataclass(frozen=True)
class Sizes:
    """What every layer of a model has; heads are counted in groups that share a key and a value."""

    layers: int
    width: int
    heads: int
    neurons: int


def cut_sizes(model: Any, calibration: Calibration, spec: CutSpec) -> tuple[Any, list[CutRecord], dict[str, Any], Kept]:
    """Return the cut model, on the CPU, what was done to its blocks, its sizes as JSON values, and what is kept.

    Collective. UserError as `planned_sizes` raises it, and where weights are not finite.
    """
    check_sound(model, calibration)
    model.eval().cpu()
    now, sizes = sizes_now(model), planned_sizes(model, spec)
    layers, records = list(range(now.layers)), list[CutRecord]()
    if sizes.layers < now.layers:
        layers = remaining_layers(model, sizes.layers, calibration)
        model = with_layers("the model", model.cpu(), layers).eval()
    places = cut_places(model, spec)
    counts = {name: sizes.heads if place.block.kind == "attention" else sizes.neurons for name, place in places.items()}
    cut = [place.outer for name, place in places.items() if counts[name] < place.count]
    if cut:
        check_tokens(cut, calibration, spec)
        records = cut_blocks(model, places, counts, calibration, spec)
        model = shrink(model)
    channels = None
    if sizes.width < now.width:
        model, channels = _narrowed(model, sizes, calibration)
    report = {"sizes": {"before": asdict(now), "after": asdict(sizes), "layers": layers}}
    return model, records, report, Kept(layers, channels)


def outline_of_sizes(model: Any, spec: CutSpec) -> Any:
    """Return a model of the sizes that a spec says: its weights mean nothing."""
    return build_like(model, config_of_sizes(model, planned_sizes(model, spec)))


def planned_sizes(model: Any, spec: CutSpec) -> Sizes:
    """Return the sizes after a cut. The model may be on the meta device.

    UserError where the family is unknown, its layers differ, its config cannot say the sizes, or the model has fewer.
    """
    check_known(model)
    now, config, wanted = sizes_now(model), model.config, spec.sizes
    has_attention = any(block.kind == "attention" for block in blocks_of(next(iter(layers_of(model).values()))))
    follow = ("width" in wanted or "heads" in wanted) and _heads_follow_width(model)
    if ("heads" in wanted and (follow or not has_attention)) or (follow and not has_attention):
        raise UserError(
            f"cut: the config of a {config.model_type} cannot say fewer heads of the same width in every layer: leave "
            "heads out (width cuts them where the config ties the two), and width, too, where no cut knows the heads"
        )
    if follow:  # the config says how wide a head is only by the width over the heads
        step = now.width // now.heads
        width = _size("width", wanted, now.width, step)
        heads = width // step
        if width % step:
            raise UserError(
                f"cut: width is {width:,}, and each head of a {config.model_type} is {step} wide: write a multiple of "
                f"{step}, or a share"
            )
    else:
        heads = _size("heads", wanted, now.heads)
        group = config.num_attention_heads // whole_heads(config) * heads
        width = _size("width", wanted, now.width, _step(group, now.width))
    neurons = _size("neurons", wanted, now.neurons, _step(1, now.neurons))
    sizes = Sizes(_size("layers", wanted, now.layers), width, heads, neurons)
    if sizes == now:
        raise UserError(f"cut: {wanted} rounds to all that the model has: lower it")
    config_of_sizes(model, sizes)  # raises where the config cannot say them
    return sizes


def sizes_now(model: Any) -> Sizes:
    """Return the sizes of a model. UserError where its layers differ."""
    counts = sizes_of(model)
    if any(len(set(of_layers)) > 1 for of_layers in counts.values()):
        raise UserError("cut: the layers of the model differ in their heads or neurons: cut the dense model instead")
    heads, neurons = counts["heads"], counts["neurons"]
    return Sizes(len(heads), model.config.hidden_size, heads[0], neurons[0])


def config_of_sizes(model: Any, sizes: Sizes) -> Any:
    """Return the plain config of the model's family with these sizes. UserError where it cannot say them."""
    config = config_of_layers(model.config, range(sizes.layers))
    config.head_dim = head_width(config)
    config.hidden_size = sizes.width
    lists = {"heads": [sizes.heads] * sizes.layers, "neurons": [sizes.neurons] * sizes.layers}
    plain = plain_config(config, lists)
    if plain is None:
        heads = config.num_attention_heads // whole_heads(config) * sizes.heads
        raise UserError(
            f"cut: the config of a {config.model_type} refuses a width of {sizes.width:,} with {heads} heads: write a "
            "share, which is rounded to a multiple of the heads"
        )
    return plain


@torch.no_grad()
def _narrowed(model: Any, sizes: Sizes, calibration: Calibration) -> tuple[Any, Tensor]:
    """Return the model with the most active channels alone; collective. Norms keep the scale of what they give."""
    config, width = config_of_sizes(model, sizes), model.config.hidden_size
    narrow = build_like(model, config)
    state = narrow.state_dict()
    # norms of queries and keys may be as wide, and stay so
    norms = {
        name: module
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__
        and f"{name}.weight" in state
        and module.weight.shape == (width,) != state[f"{name}.weight"].shape
    }
    active = torch.zeros(width, dtype=torch.float64, device=calibration.device)
    observe(model, norms, calibration, lambda _, __, out: active.add_(out.abs().sum(0, dtype=torch.float64)))
    active = finite(distributed.total(active), "the outputs of norms")
    channels = active.topk(sizes.width).indices.sort().values
    scales = _scales(model, norms, channels, calibration)
    channels = channels.cpu()
    # an ELECTRA, for example, has a projection where its embeddings are not as wide as the stream
    fault = f"cut: with a width of {sizes.width:,} the class {type(model).__name__} has other weights than the model"
    with as_user_error(f"{fault}: leave width out, or write another one"):
        narrow.load_state_dict(
            {name: kept_alone(weight, state[name].shape, channels) for name, weight in model.cpu().state_dict().items()}
        )
    for name, scale in scales.items():
        _multiply(narrow.get_submodule(name), scale)
    _keep_scale_of_embeddings(narrow, width)
    if model.can_generate():
        narrow.generation_config = copy.deepcopy(model.generation_config)
    return narrow.eval(), channels


def _scales(model: Any, norms: Mapping[str, nn.Module], channels: Tensor, calibration: Calibration) -> dict[str, float]:
    """Return for each norm the mean ratio of what it divides by in the narrow model and in the wide one; collective.

    It is 1 for the norms of a head, which is not run.
    """
    sums = {name: torch.zeros(2, dtype=torch.float64, device=calibration.device) for name in norms}
    centred = {name: _centres(norm) for name, norm in norms.items()}

    def deviation(name: str, values: Tensor) -> Tensor:
        values = values.double()
        return (values - values.mean(1, keepdim=True) if centred[name] else values).square().mean(1).sqrt()

    def add(name: str, hidden: Tensor, _: Tensor) -> None:
        ratio = deviation(name, hidden[:, channels]) / deviation(name, hidden).clamp_min(1e-12)
        sums[name] += torch.stack((ratio.sum(), ratio.new_tensor(len(ratio))))

    observe(model, norms, calibration, add)
    totals = {name: distributed.total(of_norm).tolist() for name, of_norm in sums.items()}
    return {name: total / tokens if tokens else 1.0 for name, (total, tokens) in totals.items()}


def _centres(norm: Any) -> bool:
    """Return whether a norm subtracts the mean of a vector, and so ignores a constant: no class name says it."""
    vector = torch.linspace(-1, 1, len(norm.weight)).to(norm.weight)[None]
    given, shifted = norm(vector), norm(vector + 1)
    return bool((given - shifted).abs().max() <= 1e-2 * given.abs().max())


def _multiply(norm: Any, scale: float) -> None:
    """Multiply what a norm gives, but for its bias. Gemma's norms multiply by one more than their weight."""
    empty = copy.deepcopy(norm)
    for parameter in empty.parameters():
        parameter.zero_()
    offset = 1 if empty(torch.linspace(-1, 1, len(norm.weight)).to(norm.weight)[None]).any() else 0
    norm.weight.copy_((norm.weight + offset) * scale - offset)


def _keep_scale_of_embeddings(narrow: Any, width: int) -> None:
    """Undo that Gemma multiplies its embeddings by the root of a width that is smaller now.

    Where they are also the head's weights, the last norm makes up for it.
    """
    embeddings = narrow.get_input_embeddings()
    if "gemma" not in narrow.config.model_type:
        return
    scale = (width / narrow.config.hidden_size) ** 0.5
    embeddings.weight.mul_(scale)
    if narrow.config.tie_word_embeddings and narrow.get_output_embeddings() is not None:
        _multiply(narrow.base_model.norm, 1 / scale)


def _step(least: int, size: int) -> int:
    """Return the smallest `least` times a power of two that is above a 64th of the size."""
    return least * 2 ** (size // (least * _STEPS)).bit_length()


def _size(name: str, wanted: Mapping[str, float | int], now: int, step: int = 1) -> int:
    """Return how many are kept: the number that is wanted, or a share, which is rounded to a multiple of `step`."""
    size = wanted.get(name, now)
    if isinstance(size, int):
        if size > now:
            raise UserError(f"cut: {name} is {size:,}, and the model has {now:,}: write fewer, or a share of them")
        return size
    return min(now, step * max(1, round(size * now / step)))


def _heads_follow_width(model: Any) -> bool:
    """Return whether the width of a family's config decides about that of its heads, as in GPT-2 and BERT.

    Both dimensions of a query matrix then grow with the width.
    """
    config = config_of_layers(model.config, range(1))
    config.head_dim = head_width(config)
    config.hidden_size *= 2
    with torch.device("meta"):
        (layer,) = layers_of(build_like(model, config)).values()
    before = dict(next(iter(layers_of(model).values())).named_parameters())
    return any(
        weight.dim() == 2 and all(new != old for new, old in zip(weight.shape, before[name].shape, strict=True))
        for name, weight in layer.named_parameters()
    )


@torch.no_grad()
def remaining_layers(model: Any, count: int, calibration: Calibration) -> list[int]:
    """Return the numbers of the `count` layers that stay, rising; collective. The model is on the device afterwards.

    Layers go one at a time, each time the one without which the answers diverge least from the dense model's. Layers
    stay without which the family's class cannot be built, such as ModernBERT's first.
    """
    layers = list(encoder_layers(model.to(calibration.device)).values())
    kept = list(range(len(layers)))
    # layers that are all of the same form can take any place
    alike = len({tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers}) == 1
    dense = calibration.answers(model)

    def loss(number: int) -> float:
        with contextlib.ExitStack() as skipped:
            for other, layer in enumerate(layers):
                if other == number or other not in kept:
                    skipped.enter_context(layer.register_forward_hook(_skip))
            answers = calibration.answers(model)
        return calibration.divergence(dense, answers)

    while len(kept) > count:
        choices = [one for one in kept if alike or can_keep(model, [other for other in kept if other != one])]
        if not choices:
            raise UserError(
                f"cut: {len(kept) - count} more layers of a {type(model).__name__} cannot go, since its layers differ "
                "by their place: keep another number of layers, or cut width or neurons"
            )
        kept.remove(min(progress(choices, "trying the model without some layers", "choice"), key=loss))
    return kept


def _skip(_: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """Let a layer return what it was given, in the form in which it returns what it has computed."""
    return (given[0], *out[1:]) if isinstance(out, tuple) else given[0]
