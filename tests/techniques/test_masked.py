"""Masked linear layers against plain autograd on a weight of explicit gates, their memory, and which scores are kept:
exactly, in every dtype, whatever the values."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launching import exhaustive
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.techniques.prune.masked import Grain, HardMask, MaskedLinear, StepMask, hard_concrete, score_penalty
from ds_trainer.techniques.prune.selection import largest_on_device, mask_of, select_largest
from ds_trainer.techniques.prune.sites import Site

OUT, IN = 16, 24
GRAINS = {"weight": None, "row": (1, None), "column": (None, 1), "head": (None, 6), "block": (4, 8), "ragged": (5, 7)}
PLAIN = [nn.Linear, Conv1D]


def spread(name: str, gates: Tensor) -> Tensor:
    """Gates as a matrix of (OUT, IN), written out by index."""
    row, column = torch.meshgrid(torch.arange(OUT), torch.arange(IN), indexing="ij")
    places = {
        "weight": (row, column),
        "row": (row,),
        "column": (column,),
        "head": (column // 6,),
        "block": (row // 4, column // 8),
        "ragged": (row // 5, column // 7),
    }
    return gates[places[name]]


def site_of(name: str, plain: type[nn.Module]) -> Site:
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT) if plain is nn.Linear else Conv1D(OUT, IN)
    grain = Grain(OUT, IN, *GRAINS[name], turned=plain is Conv1D) if GRAINS[name] else None
    return Site(linear, name, grain, OUT * IN)


def make(
    name: str = "weight", plain: type[nn.Module] = nn.Linear, penalty: str | None = None, method: str = "topK"
) -> MaskedLinear:
    """A layer with random scores that keeps half of them, or has noise from seed 7."""
    site = site_of(name, plain)
    scores = None if method == "magnitude" else torch.randn(site.shape)
    layer = MaskedLinear(site.linear, scores, penalty)
    layer.step_mask = halved(site, method)
    return layer


def halved(site: Site, method: str = "topK") -> StepMask:
    return StepMask(lambda scores: mask_of(scores, site, method, 0.5, seed=7))


def by_rows(layer: MaskedLinear, values: Tensor) -> Tensor:
    """Values of a weight's shape as (OUT, IN)."""
    return values.t() if values.dim() == 2 and layer.plain is Conv1D and values.shape == (IN, OUT) else values


@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("penalty", [None, "l1", "l0"])
@pytest.mark.parametrize("name", GRAINS)
def test_output_and_gradients_equal_plain_autograd(name, penalty, plain):
    """Output, penalty and the gradients of input, weight, bias and scores are those of W * gates in plain autograd.

    The evaluation and the folded layer, which is plain, compute the same.
    """
    layer = make(name, plain, penalty)
    hidden = torch.randn(5, 7, IN, requires_grad=True)
    out = layer(hidden)
    (out.square().sum() + (layer.penalty * 3 if penalty else 0)).backward()

    x, weight, bias = (v.detach().clone().requires_grad_() for v in (hidden, by_rows(layer, layer.weight), layer.bias))
    scores = by_rows(layer, layer.mask_scores.detach()).clone().requires_grad_()
    count = scores.numel() // 2
    kept = torch.zeros(scores.numel()).index_fill(0, scores.detach().flatten().topk(count).indices, 1.0)
    gates = kept.view(scores.shape).requires_grad_()
    expected = F.linear(x, weight * spread(name, gates), bias)
    (expected.square().sum() + (score_penalty(scores, penalty) * 3 if penalty else 0)).backward()

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(hidden.grad, x.grad)
    torch.testing.assert_close(by_rows(layer, layer.weight.grad), weight.grad)
    torch.testing.assert_close(layer.bias.grad, bias.grad)
    assert layer.weight.grad.is_contiguous()
    total = gates.grad + (scores.grad if penalty else 0)
    torch.testing.assert_close(by_rows(layer, layer.mask_scores.grad), total)
    if not penalty:  # static model pruning: with the weight frozen, the scores learn from the same gradient
        frozen = make(name, plain)
        frozen.weight.requires_grad_(False)
        frozen(hidden.detach()).square().sum().backward()
        assert frozen.weight.grad is None
        torch.testing.assert_close(frozen.mask_scores.grad, layer.mask_scores.grad)
    assert layer.mask.kept == int(spread(name, gates).count_nonzero())
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(hidden), expected)
        folded = layer.folded()
        assert type(folded) is plain
        torch.testing.assert_close(folded(hidden), expected)


@pytest.mark.parametrize("name", GRAINS)
def test_gates_with_noise_have_their_gradient(name):
    """Hard-concrete gates: output and the scores' gradient are autograd's with the forward's own noise.

    Each training forward has other noise, evaluations have none, and what is kept is above 0 without noise.
    """
    layer = make(name, penalty="l0", method="l0")
    hidden = torch.randn(9, IN)
    out = layer(hidden)
    (out.square().sum() + layer.penalty * 3).backward()
    eps, generator = torch.finfo().eps, torch.Generator().manual_seed(8)
    noise = torch.empty(layer.mask_scores.shape).uniform_(eps, 1 - eps, generator=generator)
    scores = layer.mask_scores.detach().clone().requires_grad_()
    gates = hard_concrete(scores, noise)
    expected = F.linear(hidden, layer.weight.detach() * spread(name, gates), layer.bias.detach())
    (expected.square().sum() + score_penalty(scores, "l0") * 3).backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.mask_scores.grad, scores.grad)
    assert not torch.equal(layer(hidden), out)
    still = spread(name, hard_concrete(scores.detach(), None))
    assert layer.mask.kept == int((still > 0).sum())
    torch.testing.assert_close(layer.folded().weight, layer.weight * still)
    torch.testing.assert_close(layer.eval()(hidden), layer.folded()(hidden))


@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("name", [name for name in GRAINS if name != "weight"])
def test_magnitude_is_the_root_mean_square_of_a_decisions_weights(name, plain):
    """It counts no weight of another decision, also where a block at the edge has fewer."""
    site = site_of(name, plain)
    weight = site.linear.weight.detach()
    places = spread(name, torch.arange(site.sizes.numel()).view(site.shape))
    for index, magnitude in enumerate(site.magnitudes(site.linear.weight).flatten()):
        inside = (weight.t() if plain is Conv1D else weight)[places == index]
        torch.testing.assert_close(magnitude, inside.square().mean().sqrt())
        assert int(site.sizes.flatten()[index]) == inside.numel()


def test_magnitude_masks_by_the_weight_itself():
    """Without scores the largest weights by magnitude stay, and only they get a gradient."""
    layer, hidden = make(method="magnitude"), torch.randn(3, IN)
    layer(hidden).sum().backward()
    mask = layer.weight.detach().abs() >= layer.weight.detach().abs().flatten().sort().values[OUT * IN // 2]
    torch.testing.assert_close(layer(hidden), F.linear(hidden, layer.weight * mask, layer.bias))
    assert bool(((layer.weight.grad != 0) == mask).all())


@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("name", ["weight", "head"])
def test_autocast_computes_in_its_dtype(name, plain):
    """Under bf16 autocast the output is bf16, as F.linear's is, and the gradients of parameters are fp32."""
    layer, hidden = make(name, plain), torch.randn(4, IN)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(hidden)
        kept = layer.mask.times(torch.ones_like(layer.weight), layer.mask_scores.detach())
        torch.testing.assert_close(out, F.linear(hidden, by_rows(layer, layer.weight * kept), layer.bias))
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.mask_scores.grad.dtype == torch.float32
    assert float(layer.mask_scores.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", ["weight", "head"])
def test_the_masked_weight_is_not_kept_between_forward_and_backward(name):
    """Autograd keeps the layer's input and its parameters, no buffer of the weight's size."""
    layer = make(name, penalty="l1")
    parameters, kept = {p.data_ptr() for p in layer.parameters()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(4, IN, requires_grad=True))
    assert [tuple(tensor.shape) for tensor in kept if tensor.data_ptr() not in parameters] == [(4, IN)]


def test_the_mask_is_made_once_a_step():
    """The scores are read at the first forward of a step only, in training, evaluation and folding alike."""
    layer, made = make(), []
    layer.step_mask = StepMask(lambda scores: made.append(1) or HardMask(0.0, 0, int((scores > 0).sum())))
    for _ in range(2):
        layer.train()(torch.randn(2, IN))
        layer.eval()(torch.randn(2, IN))
    layer.folded()
    assert len(made) == 1


def test_an_evaluation_masks_once_and_sees_the_weights_of_today():
    """Its batches share the masked weight, which a new step and a training forward throw away."""
    layer, hidden, site = make(), torch.randn(2, IN), site_of("weight", nn.Linear)

    def evaluate() -> Tensor:
        with torch.no_grad():
            return layer.eval()(hidden) - layer.bias

    first, shared = evaluate(), layer.step_mask.evaluation_weight
    assert evaluate().equal(first)
    assert layer.step_mask.evaluation_weight is shared
    layer.weight.data.mul_(2)
    layer.step_mask = halved(site)
    torch.testing.assert_close(evaluate(), 2 * first)
    layer.train()(hidden)
    layer.weight.data.mul_(2)
    torch.testing.assert_close(evaluate(), 4 * first)


def exact_slope(scores: Tensor, kind: str) -> Tensor:
    """The gradient of the penalty in fp64, by the formula of its paper."""
    share = torch.sigmoid(scores.double() + {"l1": 0.0, "l0": -2 / 3 * math.log(0.1 / 1.1)}[kind])
    return share * (1 - share) / scores.numel()


@pytest.mark.parametrize("kind", ["l1", "l0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_penaltys_gradient_is_rounded_once(dtype, kind):
    """At every loss scale within 1% of fp64, or, in fp16, half of its smallest number: below 3e-6 that is the more."""
    scores = torch.zeros(768, 3072, dtype=dtype)
    scores[0, :4] = torch.tensor([2.197, -3.0, 1.0, -0.5])
    layer = MaskedLinear(nn.Linear(3072, 768, bias=False, dtype=dtype), scores, kind)
    layer.step_mask = StepMask(mask=HardMask(-math.inf, 0, scores.numel()))
    layer(torch.zeros(1, 3072, dtype=dtype))
    penalty, exact = layer.penalty, exact_slope(scores[0, :5], kind) * 5 / scores.numel()
    for scale in (1.0, 1024.0, 65536.0):
        (gradient,) = torch.autograd.grad(penalty * scale, layer.mask_scores, retain_graph=True)
        assert gradient.dtype == dtype
        half = 2**-25 if dtype == torch.float16 else 0.0
        torch.testing.assert_close(gradient[0, :5].double(), exact * scale, rtol=0.01, atol=half)
        assert bool((gradient[1:] == gradient[0, 4]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["topK", "l0"])
def test_a_penalty_under_the_rounding_of_the_loss_is_not_lost(method, dtype):
    """The mean over 200,000 scores has the penalty's part, where each score's other part rounds by more than it is."""
    torch.manual_seed(0)
    linear = nn.Linear(400, 500, bias=False, dtype=dtype)
    layer = MaskedLinear(linear, torch.full((500, 400), 0.5, dtype=dtype), "l1")
    layer.step_mask = halved(Site(linear, "weight", None, 200_000), method)
    hidden = torch.full((1, 400), 1.1, dtype=dtype)  # its products are no numbers of this dtype
    scale = 2.0**-9 * 4e4 if dtype == torch.bfloat16 else 2.0**-9 * 5e3  # a tenth of the rounding of most products
    out = layer(hidden)
    (both,) = torch.autograd.grad(out.sum() + layer.penalty * scale, layer.mask_scores, retain_graph=True)
    ones = torch.ones(500, 400, dtype=torch.float64)
    slope = layer.mask.drawn(1).scores_gradient(ones, ones, layer.mask_scores.detach().double(), None)
    of_penalty = (both.double() - linear.weight.detach().double() * slope * hidden.double()).mean()
    expected = scale * exact_slope(layer.mask_scores.detach(), "l1").mean()
    assert float(of_penalty) == pytest.approx(float(expected), rel=0.1)


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_a_decisions_gradient_in_fp16_is_that_of_fp64(scale):
    """The products that sum up to it, each below what fp16 can say, are summed in fp32."""
    linear = nn.Linear(3072, 64, bias=False, dtype=torch.float16)
    with torch.no_grad():
        linear.weight.copy_(torch.rand(64, 3072, generator=torch.Generator().manual_seed(0)) * 1e-3)
    site = Site(linear, "row", Grain(64, 3072, 1, None), linear.weight.numel())
    layer = MaskedLinear(linear, torch.zeros(64, dtype=torch.float16), None)
    layer.step_mask = StepMask(mask=site.gated(torch.ones(64, dtype=torch.bool)))
    layer(torch.full((1, 3072), 2.0**-14, dtype=torch.float16)).backward(torch.full((1, 64), scale, dtype=torch.half))
    exact = linear.weight.detach().double().sum(1) * 2.0**-14 * scale
    torch.testing.assert_close(layer.mask_scores.grad.double(), exact, rtol=0.01, atol=0)


def kept_by(mask, values: Tensor) -> Tensor:
    return mask.times(torch.ones_like(values), values) > 0


def check(chunks: list[Tensor], k: int) -> None:
    masks = select_largest(lambda: chunks, [chunk.numel() for chunk in chunks], k)
    gates = [kept_by(mask, chunk) for mask, chunk in zip(masks, chunks, strict=True)]
    assert [int(gate.sum()) for gate in gates] == [mask.kept for mask in masks]
    joined, kept = torch.cat([chunk.flatten() for chunk in chunks]), torch.cat([gate.flatten() for gate in gates])
    expected = torch.zeros_like(kept)
    expected[joined.sort(descending=True, stable=True).indices[:k]] = True
    assert torch.equal(kept, expected)
    if len(chunks) == 1:
        assert torch.equal(largest_on_device(chunks[0], k).flatten(), expected)


@settings(max_examples=150 if exhaustive() else 50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shape=st.sampled_from([lambda x: x, torch.round, torch.zeros_like, lambda x: x.sort().values, lambda x: x**15]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_exactly_k_of_the_largest_are_kept(sizes, dtype, shape, share, seed):
    """Over one or many chunks, the first k of a stable sort are kept: of equal ones those that come first.

    The values are normal, tied, constant, sorted, or with outliers.
    """
    generator = torch.Generator().manual_seed(seed)
    chunks = [shape(torch.randn(size, generator=generator)).to(dtype) for size in sizes]
    check(chunks, max(1, round(share * sum(sizes))))


def test_a_misleading_sample_costs_time_but_not_exactness():
    """The cut is exact where the strided sample sees one value of two, and where scores depend on their column only."""
    values = torch.zeros(100_000)
    values[1::2] = 1.0
    values[:: (100_000 // 8192) | 1] = 2.0
    check([values], 60_000)
    check([torch.arange(384.0).repeat(1536, 1)], 12_345)


def site_for(scores: Tensor, granularity: str) -> Site:
    linear = nn.Linear(3, len(scores)) if granularity != "weight" else nn.Linear(scores.shape[1], len(scores))
    grain = None if granularity == "weight" else Grain(len(scores), 3, 1, None)
    return Site(linear, granularity, grain, linear.weight.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["weight", "row", "neuron"])
def test_a_threshold_keeps_what_is_above_and_half_a_percent_at_least(granularity, dtype):
    """Of ties the first in memory; only heads and neurons may all fall. A sigmoid is compared as its score."""
    scores = torch.randn(40, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
    scores = scores if granularity == "weight" else scores.flatten()[:1000]
    site, least = site_for(scores, granularity), {"weight": 10, "row": 5, "neuron": 0}[granularity]

    def kept(method: str, threshold: float, values: Tensor = scores) -> Tensor:
        mask = mask_of(values, site, method, threshold, seed=0)
        gates = kept_by(mask, values) if granularity == "weight" else mask.open
        assert mask.kept == int(gates.sum()) * (1 if granularity == "weight" else 3)
        return gates

    assert torch.equal(kept("threshold", 0.1), scores > 0.1)
    assert torch.equal(kept("sigmoied_threshold", 0.6), scores > float(torch.tensor(0.6).logit()))
    assert bool(kept("sigmoied_threshold", -0.1).all())
    few = kept("threshold", 99.0)
    assert int(few.sum()) == least
    assert not least or scores[few].min() >= scores[~few].max()
    assert kept("threshold", 9.0, torch.zeros_like(scores)).flatten().nonzero().flatten().tolist() == [*range(least)]


def test_top_k_keeps_the_share_rounded_and_one_at_least():
    """31% of 21 are 6.51 weights, which is 7; half a percent of them is still one."""
    scores = torch.arange(21.0).view(3, 7)
    for share, kept in ((0.31, 7), (0.30, 6), (0.005, 1)):
        assert mask_of(scores, site_for(scores, "weight"), "topK", share, seed=0).kept == kept


@pytest.mark.parametrize("method", ["topK", "threshold", "l0"])
def test_nan_is_refused_not_ranked(method):
    """A sort would call it the largest; it is noticed where the decisions are read."""
    scores = torch.tensor([1.0, torch.nan, 0.0, -1.0])
    with pytest.raises(NonFiniteLossError, match="the scores hold NaN: the run has diverged"):
        assert mask_of(scores, site_for(scores, "row"), method, 0.5, seed=0).kept
    with pytest.raises(NonFiniteLossError, match="the scores hold NaN"):
        select_largest(lambda: [torch.tensor([1.0, torch.nan, 0.0, torch.nan])], [4], 3)
    assert not largest_on_device(scores, 1).any()
    assert isinstance(mask_of(torch.zeros(4, 3), site_for(torch.zeros(4, 3), "weight"), "topK", 0.5, 0), HardMask)
