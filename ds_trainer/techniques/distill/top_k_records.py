"""What is kept on disk of a teacher's k likeliest tokens at a position: one record of bytes.

A record has the k log-probabilities and that of all other tokens together, in fp16, and then the k ids, the likeliest
first, in as many bits each as the vocabulary needs, the lowest bit first: 250 bytes for 64 of 32,000 tokens.
"""

import numpy as np
import torch
from torch import Tensor

from ds_trainer.tasks.data import Array
from ds_trainer.tasks.divergences import TopK


def bytes_per_token(k: int, vocabulary: int) -> int:
    """Return the size of a record."""
    return 2 * (k + 1) + -(-k * _bits(vocabulary) // 8)


def half(values: Tensor) -> Tensor:
    """Round to fp16; values beyond its range become its largest."""
    return values.float().clamp(-65504, 65504).half()


def pack(top: TopK, vocabulary: int) -> Array:
    """Return records (rows, bytes) uint8."""
    bits = top.ids.cpu().numpy()[..., None] >> np.arange(_bits(vocabulary)) & 1
    ids = np.packbits(bits.astype(np.uint8).reshape(len(bits), -1), axis=-1, bitorder="little")
    return np.concatenate([half(top.log_probs).cpu().numpy().view(np.uint8), ids], -1)


def unpack(records: Tensor, k: int, vocabulary: int) -> TopK:
    """Return what records (rows, bytes) uint8 hold, on their device, with probabilities that sum to 1 again."""
    split, bits = 2 * (k + 1), _bits(vocabulary)
    log_probs = records[:, :split].contiguous().view(torch.float16).float()
    packed = records[:, split:].long()
    first = torch.arange(k, device=records.device) * bits
    # an id and the bits before it in its first byte; bytes beyond the record's end have no bit of it
    spanned = range((bits + 14) // 8)
    values = sum(packed[:, (first // 8 + n).clamp_(max=packed.shape[1] - 1)] << 8 * n for n in spanned)
    return TopK(values >> first % 8 & (1 << bits) - 1, log_probs.log_softmax(-1))


def _bits(vocabulary: int) -> int:
    """Return the bits of an id."""
    return (vocabulary - 1).bit_length()
