"""Model folders: write one, make one for a new model, train its tokenizer."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer.models.layers import FIELD
from ds_trainer.models.loading import as_user_error
from ds_trainer.ranks.failures import UserError


def save_folder(model: Any, tokenizer: Any, folder: Path, finish: Callable[[Path], None] = lambda _: None) -> None:
    """Write a `transformers` folder (safetensors) beside its place first, then move it there file by file.

    A shrunk model brings the code that its `auto_map` names. Files of other names that the folder has stay. `finish`,
    called with the folder beside its place, may add to it and check it: if it raises, nothing changes.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(aside)
        if backend := getattr(tokenizer, "backend_tokenizer", None):
            # tokenising sets both: the file would depend on whether the data came from the cache
            backend.no_truncation()
            backend.no_padding()
        tokenizer.save_pretrained(aside)
        finish(aside)
        folder.mkdir(exist_ok=True)
        for path in aside.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def create_folder(config: Mapping[str, Any], tokenizer: Any, folder: Path, seed: int) -> None:
    """Write the folder of a new model with random weights, from a `transformers` config and a trained tokenizer.

    The vocabulary is the tokenizer's unless the config sets a larger one. UserError where it sets a smaller one, or
    describes no model.
    """
    from transformers import AutoConfig, AutoModel

    kind = config["model_type"]
    if FIELD in config:
        raise UserError(f"config: {FIELD} is written where a trained model is cut, and a new one is whole: remove it")
    fields = {"vocab_size": len(tokenizer), **config, "pad_token_id": tokenizer.pad_token_id}
    del fields["model_type"]
    torch.manual_seed(seed)
    with as_user_error(f"config: transformers makes no {kind} model of it"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    embedded = model.get_input_embeddings().num_embeddings
    if embedded < len(tokenizer):
        raise UserError(
            f"config: vocab_size is {embedded}, and the tokenizer has {len(tokenizer)} tokens: raise it or remove it"
        )
    save_folder(model, tokenizer, folder)


def train_tokenizer(texts: Sequence[str], vocab_size: int, lowercase: bool) -> Any:
    """Train a WordPiece tokenizer in BERT's form on `texts`; the same texts give the same vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the characters inside words in the order in which it meets them, which differs from run to
    # run, and breaks ties between merges by these numbers. Listed in advance and sorted, they leave nothing to chance.
    inside = sorted({f"##{character}" for word in words for character in word[1:]})
    learner = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*special.values(), *inside], show_progress=False
    )
    learner.train_from_iterator(texts, trainer)

    # a second tokenizer on the learned vocabulary: in the first one the characters inside words count as special tokens
    ids = learner.get_vocab()
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=special["unk"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    sep, cls = ((special[name], ids[special[name]]) for name in ("sep", "cls"))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in special.items()},
    )
