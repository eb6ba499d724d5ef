"""Which models can learn language, and what is said of the others when they are built."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lm_files import LINES, SMALL, bytes_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    XLMConfig,
    XLNetConfig,
)

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.lm.lm_task import LmTask


@pytest.fixture
def task(tmp_path: Path) -> LmTask:
    """The task "clm" over some lines, for a GPT-2 that is saved in "gpt2"."""
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    tokenizer = bytes_tokenizer(beginning=False)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    spec = LmSpec(name="clm", data_dir=str(tmp_path), train_file="text.txt", validation_file="text.txt")
    return LmTask(spec, load_tokenizer(tmp_path / "gpt2"), tmp_path / "gpt2", tmp_path / "cache")


LEAKING = {
    "roberta": (RobertaConfig(vocab_size=300, **SMALL), {"is_decoder": True}),
    "xlm": (XLMConfig(n_words=300, emb_dim=32, n_layers=1, n_heads=2), {"causal": True}),
    # causal, XLNet refuses batches of more than one row
    "xlnet": (XLNetConfig(vocab_size=300, d_model=32, n_layer=1, n_head=2, d_inner=32), None),
}


@pytest.mark.parametrize("family", LEAKING)
def test_models_that_see_later_tokens_are_refused_until_they_are_causal(
    family: str, task: LmTask, tmp_path: Path
) -> None:
    """Whatever their config calls it: a forward tells. The settings that the message names help."""
    config, causal = LEAKING[family]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "leaks")
    with pytest.raises(ValueError, match=f"is a {family} model whose tokens see those after them"):
        task.build_model(tmp_path / "leaks")
    if causal is not None:
        other = type(config).from_dict(config.to_dict() | causal)
        AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "causal")
        assert task.build_model(tmp_path / "causal")


def test_the_check_of_a_model_leaves_no_trace(task: LmTask, tmp_path: Path) -> None:
    """It is in the mode in which it was loaded, without gradients, and the random state is as it was."""
    import torch

    before = torch.get_rng_state()
    model = task.build_model(tmp_path / "gpt2")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    assert model.training == loaded.training
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), loaded.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
