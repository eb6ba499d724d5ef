"""Zeros written in whole models: how many, of which pattern, at which error, for every kind of architecture."""

import pytest
import torch
import transformers

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.fisher import fisher_diagonals
from ds_trainer.models.cut.layerwise import Calibration
from ds_trainer.models.cut.weights import cut_weights
from ds_trainer.models.layers import encoder_linears, rows_of

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
FAMILIES = {
    "bert": SMALL,
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40},
    "deberta-v2": SMALL | DEBERTA | {"share_att_key": True},
    "modernbert": SMALL | ENDS,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "pad_token_id": 0},
    "llama": SMALL | {"num_key_value_heads": 1, "pad_token_id": 0},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 40},
}
CPU = torch.device("cpu")


def model_of(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, num_labels=3, **FAMILIES[family])
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def calibration():
    """Six batches of four examples, a third of whose positions are padding."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randint(3, 40, shape, generator=generator)  # noqa: E731
    attended = torch.arange(9).expand(4, 9) < torch.tensor([[9], [6], [5], [4]])
    ids = [torch.where(attended, draw(4, 9), 0) for _ in range(6)]
    return Calibration(
        inputs=[{"input_ids": batch, "attention_mask": attended.long()} for batch in ids],
        attended=[attended] * 6,
        answers=lambda model: [model(input_ids=batch, attention_mask=attended.long()).logits for batch in ids],
        divergence=lambda dense, cut: float(sum((a - b).square().mean() for a, b in zip(dense, cut, strict=True))),
        loss=lambda model, index: torch.nn.functional.cross_entropy(
            model(input_ids=ids[index], attention_mask=attended.long()).logits, ids[index][:, 0] % 3, reduction="sum"
        ),
    )


def spec_of(**fields):
    return CutSpec(**({"granularity": "weight", "keep": 0.3, "uniform": True} | fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_keeps_its_share_of_every_family(family, calibration):
    """All linear layers of the encoder keep 30% of their weights, and every one of them has a record."""
    model = model_of(family)
    records = {record.name: record for record in cut_weights(model, calibration, spec_of(), CPU)}
    linears = encoder_linears(model)
    assert records.keys() == linears.keys()
    for name, linear in linears.items():
        assert int(linear.weight.count_nonzero()) == round(0.3 * linear.weight.numel()) == records[name].kept
        assert 0 < records[name].error < 0.9


@pytest.mark.parametrize("method", ["obs", "wanda", "magnitude", "fisher"])
@pytest.mark.parametrize("granularity", ["weight", "block", "2:4"])
def test_every_method_gives_every_pattern(method, granularity, calibration):
    """Half of the weights stay; two in every four, or blocks of 8 by 6 that are whole or zero."""
    model = model_of("gpt2")
    cut_weights(model, calibration, spec_of(granularity=granularity, keep=0.5, method=method, block_shape=[8, 6]), CPU)
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


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_surgeon_keeps_the_answers_better_than_wanda_and_magnitude(family, calibration):
    """At 30% of the weights the model's answers are nearest with obs; and nearer with new values than with old ones."""
    dense = calibration.answers(model_of(family))

    def moved(**fields):
        model = model_of(family)
        cut_weights(model, calibration, spec_of(**fields), CPU)
        return calibration.divergence(dense, calibration.answers(model))

    best = moved()
    assert best < 0.7 * min(moved(method="wanda"), moved(method="magnitude"))
    assert best < 0.7 * moved(update_weights=False)


@pytest.mark.parametrize("method", ["magnitude", "fisher"])
def test_comparable_scores_share_one_threshold(method, calibration):
    """Without `uniform` the matrices keep unequal shares, which add up to the share of all weights."""
    model = model_of("bert")
    records = cut_weights(model, calibration, spec_of(method=method, uniform=False), CPU)
    total = sum(record.count for record in records)
    assert sum(record.kept for record in records) == pytest.approx(0.3 * total, abs=1)
    assert len({round(record.kept / record.count, 2) for record in records}) > 3


def test_the_fisher_diagonal_is_the_sum_of_squared_derivatives_of_each_example(calibration):
    """Against autograd, one example at a time."""
    model = model_of("bert")
    linears = encoder_linears(model)
    diagonals = fisher_diagonals(model, linears, calibration, CPU)
    expected = {name: torch.zeros_like(linear.weight) for name, linear in linears.items()}
    for batch in calibration.inputs:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            loss = torch.nn.functional.cross_entropy(
                model(input_ids=ids[None], attention_mask=mask[None]).logits, ids[:1] % 3
            )
            slopes = torch.autograd.grad(loss, [linear.weight for linear in linears.values()])
            for name, slope in zip(linears, slopes, strict=True):
                expected[name] += slope.square()
    for name in linears:
        torch.testing.assert_close(diagonals[name], expected[name], rtol=1e-3, atol=1e-6)


def test_a_layer_that_2_4_does_not_fit_is_named(calibration):
    """A layer with 10 inputs cannot keep two of every four."""
    config = transformers.BertConfig(**SMALL | {"intermediate_size": 10})
    with pytest.raises(ValueError, match=r"layer\.0\.output\.dense has 10 inputs.*set granularity to weight or block"):
        cut_weights(transformers.BertModel(config), calibration, spec_of(granularity="2:4", keep=0.5), CPU)


def test_examples_all_alike_leave_a_model_that_runs(calibration):
    """If no input varies, damping decides alone, and all weights are finite."""
    model = model_of("bert")
    with torch.no_grad():
        for parameter in model.bert.embeddings.parameters():
            parameter.zero_()
    cut_weights(model, calibration, spec_of(), CPU)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
