"""Zeros written in whole models: how many, of which pattern, at which error, for every kind of architecture.

Then surgery on one linear layer: what is removed, at which error, and what the kept weights and the moments become.
"""

import logging

import numpy as np
import pytest
import torch
import transformers
from support.calibrated import calibration as fifteen_tokens
from support.calibrated import inputs_seen
from support.launching import run_deepspeed
from support.weight_cuts import FAMILIES, cut_by_ranks, dealt_calibration, model_of, spec_of
from support.zeroed import bare_of
from torch import Tensor

from ds_trainer.cuts import surgeon
from ds_trainer.cuts.cut import cut_model
from ds_trainer.cuts.surgeon import (
    Fitting,
    Gram,
    Pattern,
    admm_mask,
    masked_least_squares,
    output_error,
    removal,
)
from ds_trainer.cuts.weights import _replacement, cut_weights, fisher_diagonals, shares_of_largest
from ds_trainer.models.layers import encoder_linears, rows_of
from ds_trainer.ranks.failures import UserError

GIVEN = dealt_calibration()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_keeps_its_share_of_every_family(family):
    """All linear layers of the encoder keep 30% of their weights, and each has a record, and a Fisher diagonal.

    The latter also where a matrix, of relative positions, does not depend on the embeddings of tokens.
    """
    model = model_of(family)
    linears = encoder_linears(model)
    assert all(diagonal.any() for diagonal in fisher_diagonals(model, linears, GIVEN).values())
    records = {record.name: record for record in cut_weights(model, GIVEN, spec_of())}
    assert records.keys() == linears.keys()
    for name, linear in linears.items():
        assert int(linear.weight.count_nonzero()) == round(0.3 * linear.weight.numel()) == records[name].kept
        assert 0 < records[name].error < 0.9


@pytest.mark.parametrize("method", ["obs", "wanda", "magnitude", "fisher"])
@pytest.mark.parametrize("granularity", ["weight", "block", "2:4"])
def test_every_method_gives_every_pattern(method, granularity):
    """Half of the weights stay; two in every four, or blocks of 8 by 6 that are whole or zero."""
    model = model_of("gpt2")
    cut_weights(model, GIVEN, spec_of(granularity=granularity, keep=0.5, method=method, block_shape=[8, 6]))
    for linear in encoder_linears(model).values():
        kept = rows_of(linear.weight, type(linear)) != 0
        if granularity == "2:4":
            assert (kept.reshape(len(kept), -1, 4).sum(2) == 2).all()
        elif granularity == "block":
            blocks = [part.unique() for rows in kept.split(8) for part in rows.split(6, 1)]
            assert {len(values) for values in blocks} == {1}
            assert sum(map(int, blocks)) == round(0.5 * len(blocks))
        else:
            assert int(kept.sum()) == kept.numel() // 2


def test_wanda_scores_by_the_norm_of_the_inputs():
    """Not by their variance: a large mean counts, also where a bias could make up for it (arXiv 2306.11695)."""
    model = model_of("bert")
    name = "bert.encoder.layer.0.attention.self.query"
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.bias[::2] += 5.0
    inputs, weight = inputs_seen(model, [name], GIVEN)[name], model.get_submodule(name).weight.clone()
    cut_weights(model, GIVEN, spec_of(method="wanda", update_weights=False))
    expected = Pattern(group=16).mask(weight.abs() * inputs.norm(dim=0), 0.3)
    assert torch.equal(model.get_submodule(name).weight != 0, expected)


def test_fewer_tokens_than_inputs_are_told(caplog):
    """15 tokens for matrices of up to 32 inputs; magnitude without new values needs no token at all."""

    def warnings(**fields):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ds_trainer"):
            cut_model(bare_of("bert"), fifteen_tokens(1), spec_of(**fields))
        return [record.getMessage() for record in caplog.records]

    (message,) = warnings()
    assert message.startswith("cut: the cut of 32 inputs is fitted to 15 tokens, too few to fit it")
    assert not warnings(method="magnitude", update_weights=False)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_surgeon_keeps_the_answers_better_than_wanda_and_magnitude(family):
    """At 30% of the weights the model's answers are nearest with obs; and nearer with new values than with old ones."""
    dense = GIVEN.answers(model_of(family))

    def moved(**fields):
        model = model_of(family)
        cut_weights(model, GIVEN, spec_of(**fields))
        return GIVEN.divergence(dense, GIVEN.answers(model))

    best = moved()
    assert best < 0.7 * min(moved(method="wanda"), moved(method="magnitude"))
    assert best < 0.7 * moved(update_weights=False)


@pytest.mark.parametrize(("method", "off"), [("obs", 1), ("wanda", 20), ("magnitude", 1)])
def test_comparable_scores_share_one_threshold(method, off):
    """Without `uniform` the matrices keep unequal shares, which add up to the share of all weights.

    A feed-forward block that adds next to nothing loses its weights to others, except by its weights' size.
    """
    model = model_of("bert")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.mul_(1e-3)
    records = cut_weights(model, GIVEN, spec_of(method=method, uniform=False))
    total = sum(record.count for record in records)
    assert sum(record.kept for record in records) == pytest.approx(0.3 * total, abs=len(records) * off)
    shares = {record.name.removeprefix("bert.encoder.layer."): record.kept / record.count for record in records}
    idle = [shares.pop("0.output.dense"), *([] if method == "magnitude" else [shares.pop("0.intermediate.dense")])]
    assert max(idle) < min(0.15, *shares.values())
    assert len({round(share, 2) for share in shares.values()}) > 3


@pytest.mark.parametrize("keep", [0.001, 0.3, 0.7, 0.999])
def test_shares_are_those_of_a_sort(keep):
    """Over matrices of unlike scores, half of them zeros: of equal scores every matrix keeps the same part."""
    scores = [scale * torch.randn(30, size).relu().square() for scale, size in ((1e-9, 40), (1, 7), (50, 90))]
    joined = torch.cat([score.flatten() for score in scores])
    wanted = round(keep * len(joined))
    least = joined.sort(descending=True).values[wanted - 1]
    ties = (wanted - (joined > least).sum()) / (joined == least).sum()
    expected = [float(((score > least) + ties * (score == least)).mean()) for score in scores]
    assert shares_of_largest(scores, keep) == pytest.approx(expected)
    assert sum(share * score.numel() for share, score in zip(expected, scores, strict=True)) == pytest.approx(wanted)


@pytest.mark.parametrize("family", ["bert", "opt"])
def test_the_fisher_diagonal_is_the_sum_of_squared_derivatives_of_each_example(family):
    """Against autograd, one example at a time; OPT hands all tokens of a batch to a layer in one row."""
    model = model_of(family)
    linears = encoder_linears(model)
    diagonals = fisher_diagonals(model, linears, GIVEN)
    expected = {name: torch.zeros_like(linear.weight) for name, linear in linears.items()}
    for batch in GIVEN.inputs:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            loss = torch.nn.functional.cross_entropy(
                model(input_ids=ids[None], attention_mask=mask[None]).logits, ids[:1] % 3
            )
            slopes = torch.autograd.grad(loss, [linear.weight for linear in linears.values()])
            for name, slope in zip(linears, slopes, strict=True):
                expected[name] += slope.square()
    for name in linears:
        torch.testing.assert_close(diagonals[name], expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("funnel", {}, "does not run one list of layers, one after another"),
        ("bert", {"granularity": "2:4", "keep": 0.5}, r"0\.output\.dense has 10 inputs"),
        ("bert", {"granularity": "block", "block_shape": [8, 8], "keep": 0.95}, r"0\.95 rounds to all weights"),
    ],
)
def test_what_cannot_be_cut_is_refused(family, fields, message):
    """Layers in blocks of blocks, and a pattern that does not fit a matrix or keeps all of it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 10}
    if family == "funnel":
        sizes = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 96, "block_sizes": [1, 1, 1]}
    config = transformers.AutoConfig.for_model(family, **sizes, vocab_size=40)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with pytest.raises(UserError, match=message):
        cut_weights(model, GIVEN, spec_of(**fields))


@pytest.mark.parametrize("method", ["obs", "magnitude", "wanda"])
def test_zeros_stay_zeros(method):
    """A cut of a sparse model to more weights than it has keeps those that it has, and one to fewer is among them."""
    model = model_of("bert")
    cut_weights(model, GIVEN, spec_of())
    before = [linear.weight != 0 for linear in encoder_linears(model).values()]
    for keep, same in ((0.5, True), (0.2, False)):
        records = cut_weights(model, GIVEN, spec_of(method=method, keep=keep))
        after = [linear.weight != 0 for linear in encoder_linears(model).values()]
        assert not any((now & ~then).any() for now, then in zip(after, before, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True)) is same
        kept, count = (sum(getattr(record, name) for record in records) for name in ("kept", "count"))
        assert same or kept == pytest.approx(0.2 * count, rel=0.06)  # Wanda keeps 20% in every row that has as many


def test_outputs_on_which_the_loss_depends_keep_more_weights():
    """Of two outputs with weights of the same sizes, that with derivatives of the loss; the fit of each is as good."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 2)
    linear.weight.data[1] = linear.weight.data[0].flip(0)
    gram, fisher = Gram(16, torch.device("cpu")), torch.tensor([[1.0], [0.01]]).expand(2, 16)
    gram.add(torch.randn(400, 16))
    gram.add_ranks()
    plain, joint, blind = (
        _replacement(linear, gram, 0.5, spec_of(), each) for each in (None, fisher, torch.zeros(2, 16))
    )
    kept = [tuple(int((row != 0).sum()) for row in each.weight) for each in (plain, joint, blind)]
    assert kept[0] == kept[2] == (8, 8)
    assert kept[1][0] > 10 > 6 > kept[1][1]
    assert plain.error < joint.error < 1
    torch.testing.assert_close(plain.weight, blind.weight)


def test_two_ranks_write_the_same_zeros_and_weights(tmp_path):
    """Two ranks, with four batches and three, write the zeros of one rank, and its weights to fp32's last bits.

    Those of "obs" are reconstructed by 20 steps as well, in which two ranks' gradients have one sum.
    """
    done = run_deepspeed(2, "tests/support/weight_cuts.py", str(tmp_path / "weights.pt"))
    assert not done.returncode, done.stderr
    for method, weights in torch.load(tmp_path / "weights.pt").items():
        for name, weight in cut_by_ranks(method).items():
            assert torch.equal(weights[name] == 0, weight == 0)
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-5)


OUTPUTS = 5
WEIGHTS, FOUR, BLOCKS = Pattern(), Pattern(group=4), Pattern(block=(4, 3))


def layer(features: int, seed: int = 0, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor, Tensor]:
    """Data (rows, features) whose features depend on each other, their second moments, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(features, features, generator=generator, dtype=torch.float64)
    data = torch.randn(4 * features, features, generator=generator, dtype=torch.float64) @ mixed
    weight = torch.randn(outputs, features, generator=generator, dtype=torch.float64)
    return data, data.T @ data / len(data), weight


def smallest_error(data: Tensor, weight: Tensor, groups: list[int], width: int) -> float:
    """The mean squared error without these groups, the other weights fitted to the data by numpy."""
    remain = torch.ones(data.shape[1] // width, dtype=torch.bool)
    remain[groups] = False
    wanted, inputs = (data @ weight.T).numpy(), data[:, remain.repeat_interleave(width)].numpy()
    solution = np.linalg.lstsq(inputs, wanted, rcond=None)[0]
    return float(np.square(wanted - inputs @ solution).sum() / len(data))


def every_step(data: Tensor, weight: Tensor, width: int) -> tuple[list[int], list[float]]:
    """The greedy removal, with the error of every remaining group fitted anew at every step."""
    remaining, order, errors = list(range(data.shape[1] // width)), [], [0.0]
    while remaining:
        trials = {group: smallest_error(data, weight, [*order, group], width) for group in remaining}
        order.append(min(trials, key=trials.__getitem__))
        remaining.remove(order[-1])
        errors.append(trials[order[-1]])
    return order, np.diff(errors).tolist()


@pytest.mark.parametrize("pending", [1, 6, 96])
@pytest.mark.parametrize(("features", "width"), [(12, 1), (12, 2), (12, 4), (15, 5), (6, 6), (1, 1)])
def test_the_order_and_the_costs_are_those_of_trying_every_group(features, width, pending, monkeypatch):
    """However many removals wait for the update of the matrices, and to the last group."""
    monkeypatch.setattr(surgeon, "_PENDING", pending)
    data, moments, weight = layer(features)
    greedy, brute = removal(weight, moments, width), every_step(data, weight, width)
    assert greedy[0] == brute[0]
    assert greedy[1] == pytest.approx(brute[1], rel=1e-8, abs=1e-10)


def test_moments_that_rounding_left_indefinite_have_an_order():
    """Every group goes once, where a variance is below 0 by the rounding of fp32."""
    _, moments, weight = layer(12)
    vectors = torch.linalg.eigh(moments).eigenvectors
    values = torch.cat((torch.tensor([-1e-7], dtype=torch.float64), torch.arange(1.0, 12)))
    order, errors = removal(weight, vectors * values @ vectors.T, 2)
    assert sorted(order) == list(range(6))
    assert np.isfinite(errors).all()


@pytest.fixture
def sparse():
    """A weight (16, 24), and the covariance of its inputs: of unlike variances, some nearly dependent on others."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    inputs = (draw(400, 10) @ draw(10, 24) + 0.3 * draw(400, 24)) * torch.linspace(0.3, 3, 24)
    return draw(16, 24), inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("share", [0.001, 0.15, 0.5, 1.0])
def test_exactly_the_share_is_kept(sparse, share):
    """A mask keeps the rounded share of all weights, and at least one; the values are zero elsewhere."""
    mask, values = admm_mask(*sparse, share, WEIGHTS)
    assert int(mask.count_nonzero()) == max(1, round(share * mask.numel()))
    assert values[~mask].abs().max() == 0 if share < 1 else torch.allclose(values, sparse[0])
    each = Pattern(group=24).mask(sparse[0].square(), share).sum(1)
    assert (each == max(1, round(share * 24))).all()


def test_blocks_are_kept_whole_and_those_at_an_edge_are_smaller():
    """A block is kept or removed as one, by its mean score; blocks of (4, 3) divide (6, 7) into 2 by 3."""
    scores = torch.rand(6, 7, dtype=torch.float64)
    means = torch.stack([torch.stack([p.mean() for p in row.split(3, 1)]) for row in scores.split(4)])
    mask = BLOCKS.mask(scores, 0.5)
    kept = [[part.unique().tolist() for part in row.split(3, 1)] for row in mask.split(4)]
    assert kept == [[[bool(mean >= means.flatten().sort().values[3])] for mean in row] for row in means]


@pytest.mark.parametrize("pattern", [WEIGHTS, FOUR, BLOCKS], ids=["weight", "2:4", "block"])
def test_the_error_of_a_pattern_is_below_that_of_the_largest_weights_refitted(sparse, pattern):
    """The choice of weights, of blocks, or of two in four is better than that of the largest, with the best values."""
    weight = sparse[0]
    by_size = masked_least_squares(*sparse, pattern.mask(weight.square(), 0.5), weight)
    solved = masked_least_squares(*sparse, *admm_mask(*sparse, 0.5, pattern))
    assert output_error(*sparse, solved) < output_error(*sparse, by_size)


def test_the_values_on_a_mask_are_those_of_least_squares(sparse):
    """Each row's values on its mask are the solution of the normal equations, within the tolerance of the iteration."""
    weight, covariance = sparse
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    fitted = masked_least_squares(weight, covariance, mask, weight)
    best = torch.zeros_like(weight)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(covariance[kept][:, kept], covariance[kept] @ weight[row])
    assert output_error(weight, covariance, fitted) <= (1 + 1e-4) * output_error(weight, covariance, best)
    assert torch.allclose(fitted, best, atol=0.02)


def fitting(*batches: Tensor, bias: bool, damping: float = 0.0) -> Fitting:
    gram = Gram(batches[0].shape[1], torch.device("cpu"))
    for batch in batches:
        gram.add(batch)
    gram.add_ranks()
    return Fitting(torch.nn.Linear(batches[0].shape[1], 2, bias), gram, damping)


@pytest.mark.parametrize("block", [128, 4, 1])
def test_moments_are_those_of_all_tokens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second moments, or the covariance where a bias is fitted too, over batches of different sizes, one of them empty.

    Damping comes on top, as a share of the mean diagonal; the mean squares are those without it. Blocks of the products
    that divide them, or not, make no difference.
    """
    monkeypatch.setattr(surgeon, "_BLOCK", block)
    batches = [torch.randn(rows, 6) + torch.arange(6) for rows in (5, 1, 0, 30)]
    inputs = torch.cat(batches).double()
    moments, covariance = inputs.T @ inputs / 36, inputs.T.cov(correction=0)
    for bias, expected in ((False, moments), (True, covariance)):
        torch.testing.assert_close(fitting(*batches, bias=bias).damped, expected, rtol=1e-5, atol=1e-5)
        damped = fitting(*batches, bias=bias, damping=0.1)
        damping = 0.1 * expected.diagonal().mean() * torch.eye(6)
        torch.testing.assert_close(damped.damped, expected + damping, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(damped.squares, moments.diagonal(), rtol=1e-5, atol=1e-5)


def test_a_small_variance_beside_a_large_mean_is_not_rounded_away() -> None:
    """Inputs of 1,000 +- 0.01, whose squares differ by less than fp32 can tell, and constants: the latter vary by 0."""
    inputs = 1000 + 0.01 * torch.randn(4000, 3)
    inputs[:, 2] = 1000.1
    damped = fitting(*inputs.split(500), bias=True).damped
    expected = inputs.double().T.cov(correction=0)
    torch.testing.assert_close(damped, expected, rtol=1e-3, atol=2e-6)
    for value in (0.0, 3.5):  # and the moments of nothing but constants have an inverse
        constant = fitting(torch.full((9, 4), value), bias=True, damping=0.01)
        assert torch.linalg.inv(constant.damped).isfinite().all()
