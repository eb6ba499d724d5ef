"""Packed documents: whole, in full rows, each as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lm_files import CHATML, LINES, SMALL, chat, decoder_folder, lm_task
from transformers import (
    BertConfig,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)

from ds_trainer.tasks.data import Examples
from ds_trainer.tasks.lm.sequences import best_fit, packed

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_ROPE = SMALL | {"num_hidden_layers": 2, "max_position_embeddings": 128, "num_key_value_heads": 1}
APART = {
    "gpt2": GPT2Config(**_GPT2, embd_pdrop=0.0),
    "llama": LlamaConfig(**_ROPE),
    "mistral": MistralConfig(**_ROPE, sliding_window=8),
    "qwen3": Qwen3Config(**_ROPE, head_dim=16),
}
TOGETHER = {
    "bloom": BloomConfig(hidden_size=32, n_layer=1, n_head=2),
    "opt": OPTConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=32),
    "bert": BertConfig(**SMALL, is_decoder=True),
}
CONVERSATIONS = [
    chat("why is it wet?", "it rains in the hills.", "and the cat?", "by the door"),
    chat("no", "why"),
    chat("the old house", "by the river and the wide valley, where a bird is"),
]


@pytest.mark.parametrize(("lengths", "rows"), [([5, 3, 2, 6, 4], 3), ([8, 8], 2), ([1] * 9, 2), ([7, 7, 2], 3)])
def test_documents_are_dealt_out_whole(lengths: list[int], rows: int) -> None:
    """Each is in one row, none of which has more than 8; and a document goes where it leaves the least space."""
    dealt = best_fit(np.array(lengths), 8)
    assert sorted(index for row in dealt for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in dealt) <= 8
    assert len(dealt) == rows


def test_rows_are_full_and_mixed() -> None:
    """Of documents as long as sentences 99% of the positions hold a token, and a row's are from the whole file."""
    lengths = np.random.default_rng(1).geometric(1 / 30, 3000).clip(2, 128)
    dealt = best_fit(lengths, 128)
    assert lengths.sum() > 0.99 * 128 * len(dealt)
    several = [row for row in dealt if len(row) > 3]
    assert np.mean([abs(np.mean(row) - 1500) > 1400 for row in several]) < 0.02


def test_a_row_says_where_its_documents_begin() -> None:
    """By position ids, and labels that leave out the first token of each, and those that were left out before."""
    tokens = {"input_ids": np.array([5, 6, 7, 8, 9], np.int32), "labelled": np.array([0, 1, 0, 1, 1], np.uint8)}
    row = packed(Examples(np.array([0, 3, 5]), tokens), 6).row(0)
    assert {name: values.tolist() for name, values in row.items()} == {
        "input_ids": [5, 6, 7, 8, 9],
        "position_ids": [0, 1, 2, 0, 1],
        "labelled": [0, 1, 0, 0, 1],
    }


def totals(task: Any, model: Any, size: int) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, int]]:
    """The score, the gradient of the summed loss and the counts of all examples, in batches of a size."""
    examples, answers = task.examples("validation"), {}
    model.zero_grad()
    for ids in np.array_split(np.arange(len(examples)), -(-len(examples) // size)):
        batch = task.collate(examples, ids)
        out = model(**batch.inputs)
        answers |= task.answers(out, batch)
        (task.loss(out, batch) * task.counts(examples, ids)["label"]).backward()
        assert len(batch.labels) == task.counts(examples, ids)["label"]
        assert batch.mask.sum() == task.counts(examples, ids)["token"]
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return task.score("validation", answers), gradients, task.counts(examples, np.arange(len(examples)))


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("documents", [LINES, CONVERSATIONS], ids=["lines", "chat"])
def test_the_loss_is_that_of_the_documents_alone(name: str, documents: list[Any], tmp_path: Path) -> None:
    """So are score and gradients, to 1e-5 of the largest, and the counts of labels and tokens; padding is small."""
    source = decoder_folder(tmp_path / "model", APART[name], CHATML)
    one, two = (lm_task(tmp_path, source, documents, max_seq_length=128, packing=p) for p in (False, True))
    model = two.build_model(source).eval()
    (score, gradients, counts), (other, others, same) = totals(one, model, 2), totals(two, model, 2)
    assert len(two.examples("train")) < len(one.examples("train"))
    batch = two.collate(two.examples("train"), [0])
    # with a mask a teacher would not see where documents begin; what reads the mask still has it
    assert set(two.inputs_for(model, batch)) == {"input_ids", "position_ids", "head_positions"}
    assert batch.mask.shape == batch.inputs["input_ids"].shape
    # a limit counts documents: packed or not, the same ones are used
    limited = (lm_task(tmp_path, source, documents, max_train_samples=2, packing=p) for p in (False, True))
    few, packed_few = (np.sort(task.examples("train").tokens["input_ids"]) for task in limited)
    assert np.array_equal(few, packed_few)
    assert other == pytest.approx(score, rel=1e-5)
    assert [same[unit] for unit in ("label", "token")] == [counts[unit] for unit in ("label", "token")]
    for key, value in gradients.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_model_whose_documents_see_each_other_is_refused(name: str, tmp_path: Path) -> None:
    """By its architecture's name; without packing it is taken."""
    source = decoder_folder(tmp_path / "model", TOGETHER[name])
    one, two = (lm_task(tmp_path, source, LINES, max_seq_length=32, packing=p) for p in (False, True))
    one.build_model(source)
    with pytest.raises(
        ValueError, match=f"is a {name} model, which gives a document other logits in a row with others"
    ):
        two.build_model(source)
