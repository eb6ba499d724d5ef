"""The masked linear layer against plain autograd, and its memory."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.exhaustive import chosen
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.tasks.losses import hard_concrete, score_penalty
from ds_trainer.techniques.prune.grains import Grain
from ds_trainer.techniques.prune.masked import MaskedLinear
from ds_trainer.techniques.prune.masks import HardMask, SoftMask
from ds_trainer.techniques.prune.rules import largest_decisions, largest_weights, open_gates, weights_above
from ds_trainer.techniques.prune.selection import AllowedCounts, Cutoff


class StraightThrough(torch.autograd.Function):
    """mask, whose gradient goes to the scores as it is (arXiv 2005.07683)."""

    @staticmethod
    def forward(ctx, scores, mask):
        return mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def make_layer(scored: bool = True, penalty: str | None = None, bias: bool = True) -> MaskedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(24, 16, bias=bias)
    return MaskedLinear(linear, torch.randn(16, 24) if scored else None, penalty)


def make_conv(penalty: str | None = None) -> tuple[MaskedLinear, MaskedLinear]:
    """A masked linear layer, and the masked Conv1D that holds the same weights and scores transposed."""
    layer = make_layer(penalty=penalty)
    conv = Conv1D(16, 24)
    with torch.no_grad():
        conv.weight.copy_(layer.weight.t())
        conv.bias.copy_(layer.bias)
    return layer, MaskedLinear(conv, layer.mask_scores.detach().t().contiguous(), penalty)


def reference_mask(scores: torch.Tensor, share: float) -> torch.Tensor:
    k = round(share * scores.numel())
    mask = torch.zeros_like(scores).flatten()
    mask[scores.flatten().topk(k).indices] = 1
    return mask.view_as(scores)


@pytest.mark.parametrize("penalty", [None, "l1", "l0"])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_equal_plain_autograd(penalty, bias):
    """Forward and all four gradients are those of W * straight_through(mask) in plain autograd."""
    layer = make_layer(penalty=penalty, bias=bias)
    layer.set_rule(partial(largest_weights, count=115))
    hidden = torch.randn(5, 7, 24, requires_grad=True)
    out = layer(hidden)
    loss = out.square().sum() + (layer.penalty * 3 if penalty else 0)
    loss.backward()

    x = hidden.detach().clone().requires_grad_()
    weight, scores = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.mask_scores))
    b = layer.bias.detach().clone().requires_grad_() if bias else None
    mask = StraightThrough.apply(scores, reference_mask(scores.detach(), 0.3))
    expected = F.linear(x, weight * mask, b)
    (expected.square().sum() + (score_penalty(scores, penalty) * 3 if penalty else 0)).backward()

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(hidden.grad, x.grad)
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    torch.testing.assert_close(layer.mask_scores.grad, scores.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, b.grad)


@pytest.mark.parametrize("penalty", [None, "l1", "l0"])
def test_a_conv1d_computes_as_the_linear_layer_it_transposes(penalty):
    """Output, penalty, all four gradients and the evaluation are the linear layer's, with its mask transposed."""
    linear, conv = make_conv(penalty)
    hidden = [torch.randn(5, 7, 24).requires_grad_()]
    hidden.append(hidden[0].detach().clone().requires_grad_())
    outs = []
    for layer, x in zip((linear, conv), hidden, strict=True):
        layer.set_rule(partial(largest_weights, count=115))
        outs.append(layer(x))
        (outs[-1].square().sum() + (layer.penalty * 3 if penalty else 0)).backward()
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(hidden[1].grad, hidden[0].grad)
    torch.testing.assert_close(conv.weight.grad, linear.weight.grad.t())
    torch.testing.assert_close(conv.mask_scores.grad, linear.mask_scores.grad.t())
    torch.testing.assert_close(conv.bias.grad, linear.bias.grad)
    assert conv.weight.grad.is_contiguous()
    assert conv.mask_scores.grad.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(conv.eval()(hidden[1]), linear.eval()(hidden[0]))


def test_a_conv1d_folds_to_a_conv1d():
    """The folded layer is a plain Conv1D with the asked share of zeros, also where all scores are equal."""
    conv = MaskedLinear(Conv1D(16, 24), torch.zeros(24, 16), None).eval()
    conv.set_rule(partial(largest_weights, count=96))
    hidden = torch.randn(3, 24)
    plain = conv.folded()
    assert type(plain) is Conv1D
    assert (plain.nx, plain.nf, tuple(plain.weight.shape)) == (24, 16, (24, 16))
    assert int(plain.weight.count_nonzero()) == 96
    torch.testing.assert_close(plain(hidden), conv(hidden))


def test_gates_and_autocast_work_on_a_conv1d():
    """Hard-concrete gates of a Conv1D under bf16 autocast: bf16 out, fp32 gradients for weight and scores."""
    _, conv = make_conv()
    conv.set_rule(partial(open_gates, seed=7))
    with torch.autocast("cpu", torch.bfloat16):
        out = conv(torch.randn(4, 24))
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert conv.weight.grad.dtype == conv.mask_scores.grad.dtype == torch.float32
    assert float(conv.mask_scores.grad.abs().sum()) > 0


def test_magnitude_masks_by_the_weight_itself():
    """Without scores the largest weights by magnitude stay, and only they get a gradient."""
    layer = make_layer(scored=False)
    layer.set_rule(partial(largest_weights, count=96))
    hidden = torch.randn(3, 24)
    layer(hidden).sum().backward()
    mask = reference_mask(layer.weight.detach().abs(), 0.25)
    torch.testing.assert_close(layer(hidden), F.linear(hidden, layer.weight * mask, layer.bias))
    assert bool((layer.weight.grad[mask == 0] == 0).all())
    assert bool((layer.weight.grad[mask == 1] != 0).all())


def test_gates_have_their_gradient_and_the_same_noise_both_ways():
    """Hard-concrete gates: the gradient of the scores is autograd's with the forward's own noise."""
    layer = make_layer()
    layer.set_rule(partial(open_gates, seed=7))
    hidden = torch.randn(9, 24)
    out = layer(hidden)
    out.square().sum().backward()
    noise = torch.empty(16, 24)
    noise.uniform_(torch.finfo().eps, 1 - torch.finfo().eps, generator=torch.Generator().manual_seed(8))
    scores = layer.mask_scores.detach().clone().requires_grad_()
    expected = F.linear(hidden, layer.weight.detach() * hard_concrete(scores, noise), layer.bias.detach())
    expected.square().sum().backward()
    torch.testing.assert_close(out.detach(), expected.detach())
    torch.testing.assert_close(layer.mask_scores.grad, scores.grad)


def test_gates_are_noisy_in_training_and_still_at_evaluation():
    """Two training forwards differ, two evaluations do not."""
    layer = make_layer()
    layer.set_rule(partial(open_gates, seed=7))
    hidden = torch.randn(2, 24)
    assert not torch.equal(layer(hidden), layer(hidden))
    layer.eval()
    assert torch.equal(layer(hidden), layer(hidden))
    torch.testing.assert_close(layer.folded()(hidden), layer(hidden))


def test_a_threshold_keeps_what_is_above_and_half_a_percent_at_least():
    """The kept share is that of scores above the threshold; where it is too small, the largest are kept."""
    scores = torch.randn(40, 50, generator=torch.Generator().manual_seed(3))
    assert weights_above(scores, 0.1).kept == int((scores > 0.1).sum())
    assert weights_above(scores, math.inf).kept == 10


def test_ties_are_kept_in_memory_order():
    """Where all scores are equal exactly the asked share is kept, in fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.zeros(30, 40, dtype=dtype)
        mask = largest_weights(scores, 180)
        ones = mask.times(torch.ones_like(scores), scores)
        assert int(ones.sum(dtype=torch.float32)) == mask.kept == 180
        assert bool((ones.flatten()[:180] == 1).all())


def test_the_masked_weight_is_not_kept_between_forward_and_backward():
    """Autograd keeps the layer's input and its parameters, no buffer of the weight's size."""
    layer = make_layer(penalty="l1")
    layer.set_rule(partial(largest_weights, count=192))
    own = {p.data_ptr() for p in layer.parameters()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(4, 24, requires_grad=True))
    foreign = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert [tuple(tensor.shape) for tensor in foreign] == [(4, 24)]


def test_autocast_computes_in_its_dtype_and_keeps_fp32_gradients():
    """Under bf16 autocast the output is bf16, equal to F.linear's there, and parameters' gradients are fp32."""
    layer = make_layer()
    layer.set_rule(partial(largest_weights, count=192))
    hidden = torch.randn(4, 24)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(hidden)
        mask = reference_mask(layer.mask_scores.detach(), 0.5)
        torch.testing.assert_close(out, F.linear(hidden, layer.weight * mask, layer.bias))
    out.float().sum().backward()
    assert layer.weight.grad.dtype == layer.mask_scores.grad.dtype == torch.float32


def test_the_mask_is_found_once_a_step():
    """The rule is asked at the first forward after set_rule() only, in training, evaluation and folding alike."""
    asked = []

    def rule(scores):
        asked.append(1)
        return HardMask(Cutoff(0.0, 0, int((scores > 0).sum())))

    layer = make_layer()
    layer.set_rule(rule)
    for _ in range(3):
        layer(torch.randn(2, 24))
    layer.eval()
    layer(torch.randn(2, 24))
    layer.folded()
    assert len(asked) == 1
    layer.set_rule(rule)
    layer(torch.randn(2, 24))
    assert len(asked) == 2


@torch.no_grad()
def test_an_evaluation_masks_once_and_follows_the_next_step():
    """The masked weight is kept between batches of an evaluation, and made anew after the next set_rule()."""
    layer = make_layer().eval()
    layer.set_rule(partial(largest_weights, count=192))
    hidden = torch.randn(2, 24)
    first = layer(hidden)
    kept = layer.step_mask.evaluation_weight
    assert layer(hidden).equal(first)
    assert layer.step_mask.evaluation_weight is kept
    layer.weight.mul_(2)
    layer.set_rule(partial(largest_weights, count=192))
    torch.testing.assert_close(layer(hidden) - layer.bias, 2 * (first - layer.bias))


def test_a_frozen_weight_gets_no_gradient():
    """Static model pruning: with the weight frozen, the scores alone learn, and from the same gradient."""
    layer, frozen = make_layer(), make_layer()
    frozen.weight.requires_grad_(False)
    hidden = torch.randn(4, 24)
    for each in (layer, frozen):
        each.set_rule(partial(largest_weights, count=192))
        each(hidden).square().sum().backward()
    assert frozen.weight.grad is None
    torch.testing.assert_close(frozen.mask_scores.grad, layer.mask_scores.grad)


def test_soft_mask_counts_open_gates():
    """`kept` is the number of gates above 0 at evaluation."""
    scores = torch.randn(50, 60) * 3
    mask = open_gates(scores, seed=1)
    assert isinstance(mask, SoftMask)
    assert mask.kept == int((hard_concrete(scores, None) > 0).sum())


def test_an_evaluation_sees_the_weights_of_today():
    """The masked weight that an evaluation keeps is not used by the next, though nothing was planned in between."""
    layer, hidden = make_layer(), torch.randn(3, 24)
    layer.set_rule(partial(largest_weights, count=192))
    for mode in (True, False, True):
        layer.train(mode)
        with torch.set_grad_enabled(mode):
            layer(hidden)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.eval()
        expected = F.linear(hidden, layer.find_mask().times(layer.weight, layer.scores()), layer.bias)
        assert torch.equal(layer(hidden), expected)


def exact_slope(scores: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient of the penalty in fp64, by the formula of its paper."""
    share = torch.sigmoid(scores.double() + {"l1": 0.0, "l0": -2 / 3 * math.log(0.1 / 1.1)}[kind])
    return share * (1 - share) / scores.numel()


@pytest.mark.parametrize(
    ("shape", "kind"),
    chosen([((768, 3072), "l1"), ((768, 3072), "l0"), ((4096, 4096), "l1")], lambda case: case[0] == (768, 3072)),
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_penaltys_gradient_is_rounded_once(shape, dtype, kind):
    """At every loss scale within 1% of fp64, or, in fp16, half of its smallest number: below 3e-6 that is the more.

    So the mean over 4096 x 4096 scores has the gradient 0 in fp16 at a scale of 1, and 1.5e-8 in bf16.
    """
    scores = torch.zeros(shape, dtype=dtype)
    scores[0, :4] = torch.tensor([2.197, -3.0, 1.0, -0.5])
    layer = MaskedLinear(nn.Linear(*shape[::-1], bias=False, dtype=dtype), scores, kind)
    layer.set_rule(partial(weights_above, threshold=-math.inf))
    layer(torch.zeros(1, shape[1], dtype=dtype))
    penalty, exact = layer.penalty, exact_slope(scores[0, :5], kind) * 5 / scores.numel()
    for scale in (1.0, 1024.0, 65536.0):
        (gradient,) = torch.autograd.grad(penalty * scale, layer.mask_scores, retain_graph=True)
        assert gradient.dtype == dtype
        half = 2**-25 if dtype == torch.float16 else 0.0
        torch.testing.assert_close(gradient[0, :5].double(), exact * scale, rtol=0.01, atol=half)
        assert bool((gradient[1:] == gradient[0, 4]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rule", [partial(largest_weights, count=100_000), partial(open_gates, seed=3)], ids=["cut", "gates"]
)
def test_a_penalty_under_the_rounding_of_the_loss_is_not_lost(rule, dtype):
    """The mean over 200,000 scores has the penalty's part, where each score's other part rounds by more than it is."""
    torch.manual_seed(0)
    linear = nn.Linear(400, 500, bias=False, dtype=dtype)
    layer = MaskedLinear(linear, torch.full((500, 400), 0.5, dtype=dtype), "l1")
    layer.set_rule(rule)
    hidden = torch.full((1, 400), 1.1, dtype=dtype)  # its products are no numbers of this dtype
    scale = 2.0**-9 * 4e4 if dtype == torch.bfloat16 else 2.0**-9 * 5e3  # a tenth of the rounding of most products
    out = layer(hidden)
    (both,) = torch.autograd.grad(out.sum() + layer.penalty * scale, layer.mask_scores, retain_graph=True)
    mask = layer.mask.drawn(1)
    ones = torch.ones(500, 400, dtype=torch.float64)
    slope = mask.scores_gradient(ones, ones, layer.mask_scores.detach().double(), None)
    of_penalty = (both.double() - linear.weight.detach().double() * slope * hidden.double()).mean()
    expected = scale * exact_slope(layer.mask_scores.detach(), "l1").mean()
    assert float(of_penalty) == pytest.approx(float(expected), rel=0.1)


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_a_decisions_gradient_in_fp16_is_that_of_fp64(scale):
    """The products that sum up to it, each below what fp16 can say, are summed in fp32."""
    torch.manual_seed(0)
    linear = nn.Linear(3072, 64, bias=False, dtype=torch.float16)
    with torch.no_grad():
        linear.weight.copy_(torch.rand(64, 3072) * 1e-3)
    layer = MaskedLinear(linear, torch.zeros(64, dtype=torch.float16), None, Grain(64, 3072, 1, None))
    layer.set_rule(partial(largest_decisions, count=64, allowed=AllowedCounts()))
    hidden = torch.full((1, 3072), 2.0**-14, dtype=torch.float16)
    layer(hidden).backward(torch.full((1, 64), scale, dtype=torch.float16))
    exact = linear.weight.detach().double().sum(1) * 2.0**-14 * scale
    torch.testing.assert_close(layer.mask_scores.grad.double(), exact, rtol=0.01, atol=0)
