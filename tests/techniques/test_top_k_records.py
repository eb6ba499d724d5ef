"""Records of a teacher's likeliest tokens."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.tasks.divergences import TopK
from ds_trainer.techniques.distill.top_k_records import bytes_per_token, pack, unpack


@pytest.mark.parametrize(("k", "vocabulary"), [(1, 2), (3, 5), (7, 30_522), (64, 32_000), (64, 32_769), (5, 1 << 18)])
def test_a_record_holds_the_ids_and_the_probabilities_to_half_precision(k, vocabulary):
    """Whatever the bits of an id: the lowest and the highest one too, and not a byte more than was told."""
    generator = torch.Generator().manual_seed(k)
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:k] for _ in range(9)])
    ids[0, 0], ids[1, -1] = 0, vocabulary - 1
    log_probs = torch.randn(9, k + 1, generator=generator).mul(4).log_softmax(-1)
    records = pack(TopK(ids, log_probs), vocabulary)
    assert records.shape == (9, bytes_per_token(k, vocabulary))
    read = unpack(torch.from_numpy(records), k, vocabulary)
    assert torch.equal(read.ids, ids)
    torch.testing.assert_close(read.log_probs, log_probs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(read.log_probs.exp().sum(-1), torch.ones(9))


def test_64_of_32000_tokens_take_250_bytes():
    """128 for the probabilities, 2 for that of the others, 120 for ids of 15 bits."""
    assert bytes_per_token(64, 32_000) == 250
