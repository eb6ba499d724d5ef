"""Grains and the masks on them, against plain autograd on a weight of explicit gates."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.tasks.losses import hard_concrete, score_penalty
from ds_trainer.techniques.prune.grains import Grain
from ds_trainer.techniques.prune.masked import MaskedLinear
from ds_trainer.techniques.prune.masks import GateMask
from ds_trainer.techniques.prune.rules import decisions_above, largest_decisions, largest_of_four, open_gates
from ds_trainer.techniques.prune.selection import AllowedCounts

OUT, IN = 16, 24
GRAINS = {
    "row": (1, None),
    "column": (None, 1),
    "head": (None, 6),
    "block": (4, 8),
    "ragged": (5, 7),
}


def spread(name: str, gates: torch.Tensor) -> torch.Tensor:
    """Gates as a matrix of (OUT, IN), written out by index."""
    row, column = torch.meshgrid(torch.arange(OUT), torch.arange(IN), indexing="ij")
    places = {
        "row": (row,),
        "column": (column,),
        "head": (column // 6,),
        "block": (row // 4, column // 8),
        "ragged": (row // 5, column // 7),
    }
    return gates[places[name]]


def make(name: str, plain: type[nn.Module], penalty: str | None = None, scored: bool = True) -> MaskedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT) if plain is nn.Linear else Conv1D(OUT, IN)
    grain = Grain(OUT, IN, *GRAINS[name], turned=plain is Conv1D)
    return MaskedLinear(linear, torch.randn(grain.shape) if scored else None, penalty, grain)


def matrix(layer: MaskedLinear) -> torch.Tensor:
    weight = layer.weight.detach()
    return weight.t() if layer.plain is Conv1D else weight


@pytest.mark.parametrize("plain", [nn.Linear, Conv1D])
@pytest.mark.parametrize("penalty", [None, "l1"])
@pytest.mark.parametrize("name", GRAINS)
def test_output_and_gradients_equal_plain_autograd(name, penalty, plain):
    """Output, penalty and the gradients of input, weight and scores are those of W * gates in plain autograd."""
    layer = make(name, plain, penalty)
    size = layer.mask_scores.numel()
    layer.set_rule(partial(largest_decisions, count=size // 2, allowed=AllowedCounts()))
    hidden = torch.randn(5, 7, IN, requires_grad=True)
    out = layer(hidden)
    (out.square().sum() + (layer.penalty * 3 if penalty else 0)).backward()

    x, weight = hidden.detach().clone().requires_grad_(), matrix(layer).clone().requires_grad_()
    scores = layer.mask_scores.detach().clone().requires_grad_()
    kept = torch.zeros(size).index_fill(0, scores.detach().flatten().topk(size // 2).indices, 1.0)
    gates = kept.view(scores.shape).requires_grad_()
    expected = F.linear(x, weight * spread(name, gates), layer.bias.detach())
    (expected.square().sum() + (score_penalty(scores, penalty) * 3 if penalty else 0)).backward()

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(hidden.grad, x.grad)
    own = layer.weight.grad.t() if plain is Conv1D else layer.weight.grad
    torch.testing.assert_close(own, weight.grad)
    assert layer.weight.grad.is_contiguous()
    torch.testing.assert_close(layer.mask_scores.grad, gates.grad + (scores.grad if penalty else 0))
    assert layer.mask.kept == int(spread(name, gates).count_nonzero())
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(hidden), expected)


@pytest.mark.parametrize("name", GRAINS)
def test_gates_with_noise_have_their_gradient(name):
    """Hard-concrete gates of decisions: output and the scores' gradient are autograd's with the forward's own noise."""
    layer = make(name, nn.Linear)
    layer.set_rule(partial(open_gates, seed=7))
    hidden = torch.randn(9, IN)
    out = layer(hidden)
    out.square().sum().backward()
    eps, generator = torch.finfo().eps, torch.Generator().manual_seed(8)
    noise = torch.empty(layer.mask_scores.shape).uniform_(eps, 1 - eps, generator=generator)
    scores = layer.mask_scores.detach().clone().requires_grad_()
    gates = hard_concrete(scores, noise)
    expected = F.linear(hidden, layer.weight.detach() * spread(name, gates), layer.bias.detach())
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.mask_scores.grad, scores.grad)
    still = spread(name, hard_concrete(scores.detach(), None))
    assert layer.mask.kept == int((still > 0).sum())
    torch.testing.assert_close(layer.folded().weight, layer.weight * still)


@pytest.mark.parametrize("plain", [nn.Linear, Conv1D])
@pytest.mark.parametrize("name", GRAINS)
def test_magnitude_is_the_root_mean_square_of_a_decisions_weights(name, plain):
    """Of its own weights only, also where a block at the edge has fewer."""
    layer = make(name, plain, scored=False)
    places = spread(name, torch.arange(layer.grain.sizes.numel()).view(layer.grain.sizes.shape))
    for index, found in enumerate(layer.scores().flatten()):
        own = matrix(layer)[places == index]
        torch.testing.assert_close(found, own.square().mean().sqrt())
        assert int(layer.grain.sizes.flatten()[index]) == own.numel()


@pytest.mark.parametrize("plain", [nn.Linear, Conv1D])
def test_autocast_computes_in_its_dtype(plain):
    """Under bf16 autocast the output is bf16, and the gradients of parameters are fp32."""
    layer = make("head", plain)
    layer.set_rule(partial(largest_decisions, count=2, allowed=AllowedCounts()))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(4, IN))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.mask_scores.grad.dtype == torch.float32


def test_nothing_of_the_weights_size_is_kept_between_forward_and_backward():
    """Autograd keeps the layer's input and its parameters alone."""
    layer = make("head", nn.Linear)
    layer.set_rule(partial(largest_decisions, count=2, allowed=AllowedCounts()))
    own, kept = {p.data_ptr() for p in layer.parameters()}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(4, IN, requires_grad=True))
    assert [tuple(tensor.shape) for tensor in kept if tensor.data_ptr() not in own] == [(4, IN)]


@pytest.mark.parametrize(("inputs_at", "shape"), [(1, (6, 12)), (0, (12, 6))])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_so_many_of_every_four_inputs_are_kept(inputs_at, shape, count):
    """Of four neighbouring inputs the largest, and of ties the first: as a sort of every four has it."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).round()
    gates = largest_of_four(scores, count, inputs_at).gates
    by_output = (lambda values: values) if inputs_at else torch.Tensor.t
    for row, kept in zip(by_output(scores), by_output(gates), strict=True):
        for four, own in zip(row.split(4), kept.split(4), strict=True):
            largest = sorted(range(4), key=lambda place: (-float(four[place]), place))[:count]
            assert own.nonzero().flatten().tolist() == sorted(largest)


@pytest.mark.parametrize(
    ("sizes", "whole", "counts"),
    [
        (AllowedCounts(), 10, {0: 0, 3: 3, 10: 10}),
        (AllowedCounts(least=2), 10, {0: 2, 1: 2, 5: 5}),
        (AllowedCounts(least=4), 3, {0: 3, 2: 3}),
        (AllowedCounts(multiple=8), 40, {0: 0, 1: 8, 11: 8, 12: 16, 39: 40, 40: 40}),
        (AllowedCounts(multiple=8), 20, {1: 8, 13: 16, 19: 16, 20: 20}),
        (AllowedCounts(multiple=16), 12, {0: 0, 1: 12, 12: 12}),
    ],
)
def test_numbers_are_rounded_to_what_may_be_kept(sizes, whole, counts):
    """The nearest multiple, one at least unless none is kept, never more than there are whole ones of, or all."""
    found = {count: int(sizes.nearest(torch.tensor(count), whole)) for count in counts}
    assert found == counts


def test_decisions_pass_a_threshold():
    """Those above are kept, and where too few are, the largest; ties in memory order."""
    scores = torch.randn(400, generator=torch.Generator().manual_seed(0))
    kept = decisions_above(scores, 0.1, 0.005, AllowedCounts())
    assert torch.equal(kept.gates, scores > 0.1)
    few = decisions_above(torch.zeros(400), 9.0, 0.005, AllowedCounts())
    assert isinstance(few, GateMask)
    assert few.gates.nonzero().flatten().tolist() == [0, 1]
