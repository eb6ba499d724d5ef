"""A phase sets the dropout of its model, in whatever form the model's family has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.zeroed import KIN, VOCABULARY, bare_of, inputs_of, model_of
from torch import nn

from ds_trainer.models.layers import set_dropout
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.run.phase import PhaseModel
from ds_trainer.techniques.technique import PhaseLength


def outputs_of(model: Any) -> torch.Tensor:
    outputs: torch.Tensor = model(**inputs_of())[0]
    return outputs


@pytest.mark.parametrize("family", KIN)
@torch.no_grad()
def test_nothing_is_dropped_in_training_where_the_probability_is_0(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": VOCABULARY} | KIN[family]).to_dict()
    rates = {name: 0.5 for name, value in config.items() if "drop" in name and isinstance(value, float)}
    model = bare_of(family, **rates)
    expected = outputs_of(model)
    model.train()
    if rates:
        assert not torch.equal(outputs_of(model), expected), "the model has no dropout, and the test shows nothing"
    set_dropout(model, 0.0)
    torch.testing.assert_close(outputs_of(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("fields", "expected"), [({}, 0.1), ({"dropout": 0.0}, 0.0), ({"dropout": 0.3}, 0.3)])
def test_a_phase_has_the_dropout_of_its_recipe_or_of_the_config(fields: dict[str, Any], expected: float) -> None:
    spec = parse_recipe({"phases": [{"max_steps": 1, **fields}]}).phases[0]
    task: Any = SimpleNamespace(build_model=lambda _: model_of("bert"))
    model, _ = PhaseModel(spec, spec.techniques, task, "", PhaseLength(1, 0, 0)).build()
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {expected}
    assert model.config.hidden_dropout_prob == 0.1, "the exported config stays as it was"
