"""A cut that makes no sense is one clear error, before anything is loaded."""

import pytest
from pydantic import ValidationError

from ds_trainer.recipe.cut_specs import CutSpec

MISTAKES = {
    "nothing": ({}, "nothing says how much to keep"),
    "two amounts": ({"keep": 0.5, "target_flops": 0.5}, "keep and target_flops are set: keep one"),
    "all": ({"keep": 1.0}, "give a share between 0 and 1"),
    "uniform target": ({"target_flops": 0.5, "uniform": True}, "uniform keeps the same share"),
    "target of weights": ({"target_latency": 0.5, "granularity": "weight"}, "counts what heads and neurons cost"),
    "wanda of heads": ({"keep": 0.5, "method": "wanda"}, "method wanda scores single weights"),
    "heads of weights": ({"keep": 0.5, "granularity": "weight", "min_heads": 1}, "no heads are cut"),
    "2:4": ({"granularity": "2:4", "keep": 0.3}, "2:4 keeps half"),
    "sizes and keep": ({"layers": 0.5, "width": 0.5, "keep": 0.5}, "layers and width: a cut to sizes of the whole"),
    "sizes of heads": ({"neurons": 0.5, "granularity": "head"}, "neurons: a cut to sizes of the whole model"),
    "a mixture of 0.2": ({"granularity": "model", "target_flops": 0.5}, "was removed in 0.3: write sizes, such as"),
    "rising": ({"keep": [0.3, 0.5]}, "keeps less at each"),
    "quoted": ({"vocabulary": {"keep": "5000"}}, 'give "seen", a number of tokens without quotes'),
}


@pytest.mark.parametrize(("spec", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(spec, message):
    with pytest.raises(ValidationError, match=message):
        CutSpec(**spec)


@pytest.mark.parametrize(
    ("spec", "judges"),
    [
        ({"keep": 0.5}, True),
        ({"keep": 0.5, "uniform": True}, False),
        ({"vocabulary": {}}, False),
        ({"keep": 0.5, "granularity": "weight"}, True),
        ({"keep": 0.5, "granularity": "weight", "method": "magnitude"}, False),
        ({"keep": 0.5, "granularity": "weight", "uniform": True}, False),
        ({"keep": 0.5, "granularity": "weight", "uniform": True, "method": "fisher"}, True),
        ({"granularity": "2:4"}, False),
        ({"layers": 0.5, "width": 0.5, "contiguous": False}, True),
        ({"layers": 0.5, "layer_criterion": "cosine"}, False),
        ({"width": 0.5, "neurons": 0.5}, False),
    ],
)
def test_what_depends_on_answers_needs_a_trained_head(spec, judges):
    """Sizes by loss and Fisher costs do; uniform cuts by the inputs of matrices do not."""
    assert CutSpec(**spec).judges_answers is judges
