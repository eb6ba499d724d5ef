"""Import the folders of two other programs: movement pruning (arXiv 2005.07683) and DeeBERT (arXiv 2004.12993).

A masked BERT has `mask_scores` beside the matrices of its layers, and is folded as its own script, bertarize.py, does:
the result is a plain BERT. DeeBERT has a "highway" after every layer, a pooler and a classifier: the result is a plain
BERT or RoBERTa with exit heads. Configs as old as these say little, so that the weights' names tell family and head.

The weights may be in `pytorch_model.bin`, a pickle. It is read as weights only, here alone without `--allow_pickle`: a
user who names the program that wrote a folder asks for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from ds_trainer.config.exit_specs import ExitsSpec, SavedExits, policy_of
from ds_trainer.config.jobs import ExportJob
from ds_trainer.files.messages import quoted
from ds_trainer.files.run_folder import TOKENIZER_FILES
from ds_trainer.files.whole_file import check_file, memory, read_value
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import encoder_linears, total_weights
from ds_trainer.models.loading import most_allocated, told
from ds_trainer.models.model_folder import Held
from ds_trainer.models.pretrained import ANSWERER, CLASSIFIER, check_fits, load_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.exits.early_exit import load_model
from ds_trainer.techniques.exits.heads import new_heads, save_heads

_FILES = ("model.safetensors", "pytorch_model.bin")
_SCORES = ".mask_scores"
_HIGHWAY = ".encoder.highway."
_HEADS = {
    "bert": {"pooler.dense": "steps.0", "classifier": "steps.3"},
    "roberta": {"pooler.dense": "steps.0.dense", "classifier": "steps.0.out_proj"},
}
"""The parts of a highway in an `ExitHead` of each family."""
_ROBERTA = {"roberta.pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
"""DeeBERT classifies RoBERTa as it does BERT; transformers has the same two layers in RoBERTa's head."""
_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
    *("initializer_range", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id"),
)
"""What is taken of an old config: the rest are settings of its program."""


def import_folder(job: ExportJob, made: Path, aside: Path) -> dict[str, Any]:
    """Write the folder of `job.model` as one of this library into `made`; gives what is reported of it.

    `aside` is a folder for what is needed meanwhile. ValueError where config and weights are not those of the program.
    """
    config, state = read_value(job.model / "config.json"), _weights(job.model)
    family = "roberta" if any(name.startswith("roberta.") for name in state) else "bert"
    pattern = f"*{_SCORES}" if job.import_from == "masked_bert" else f"*{_HIGHWAY}*"
    added = {name: state.pop(name) for name in list(state) if fnmatchcase(name, pattern)}
    model = _plain_model(job.model, config, state, family)
    if job.import_from == "masked_bert":
        report = {"pruning_method": config["pruning_method"], "threshold": job.threshold}
        _fold(job.model, model, added, config["pruning_method"], job.threshold or 0.0)
    tokenizer = _tokenizer(job.model, model, aside / "tokenizer")
    check_fits(model, tokenizer, max_seq_length=1)
    save_folder(model, tokenizer, made)
    if job.import_from == "deebert":
        layers = _save_heads(job.model, model, added, made)
        report = {"exits": layers, "left_out": "the highway of the last layer, which DeeBERT does not train"}
    load_model(made)  # refuses what would not be loaded later
    return {"imported": {"from": job.import_from, **report, "weights": total_weights(model)}}


def mask_of(scores: Tensor, method: str, threshold: float) -> Tensor:
    """What movement pruning's scripts multiply a trained matrix by; the scores of "magnitude" are its absolute values.

    Of equal scores the first are kept; the sort of the scripts leaves open which.
    """
    if method == "l0":
        return (scores.sigmoid() * 1.2 - 0.1).clamp(0, 1)  # the stretched sigmoid, without its noise
    if method in ("topK", "magnitude"):
        order = scores.flatten().sort(descending=True, stable=True).indices
        mask = torch.zeros(scores.numel())
        mask[order[: int(threshold * scores.numel())]] = 1
        return mask.view(scores.shape)
    mask = (scores.sigmoid() if method == "sigmoied_threshold" else scores) > threshold
    least = int(0.005 * scores.numel()) + 1
    if mask.sum() < least:
        mask = scores > scores.flatten().kthvalue(max(scores.numel() - least, 1)).values
    return mask.float()


def _weights(folder: Path) -> dict[str, Tensor]:
    """The state dict of a folder. Both programs write one file."""
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"the model folder {folder} has no {' and no '.join(_FILES)}: join its shards to one")
    check_file(path, most=memory() // 3)  # the model is held beside it
    what = f"the weights of {folder} cannot be loaded"
    if path.suffix == ".safetensors":
        return told(what, lambda: load_file(path))
    state = told(what, lambda: torch.load(path, map_location="cpu", weights_only=True))
    if not isinstance(state, Mapping) or not all(isinstance(n, str) and _is_plain(t) for n, t in state.items()):
        raise UserError(f"{what}: {path} holds something else than tensors by name")
    return dict(state)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose bytes are all there: a few bytes of a pickle can claim a tensor of any size."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


@torch.no_grad()
def _fold(folder: Path, model: Any, scores: Mapping[str, Tensor], method: str, threshold: float) -> None:
    linears = encoder_linears(model)
    masked = {} if method == "magnitude" else {f"{name}{_SCORES}": linear.weight for name, linear in linears.items()}
    _check_shapes(folder, masked, scores)
    for name, linear in linears.items():
        values = linear.weight.abs() if method == "magnitude" else scores[f"{name}{_SCORES}"].float()
        if not values.isfinite().all():
            raise UserError(f"the weights of {folder}: what {name} is masked by holds NaN or infinity")
        linear.weight *= mask_of(values, method, threshold)


def _plain_model(folder: Path, config: Mapping[str, Any], state: dict[str, Tensor], family: str) -> Any:
    """The model of transformers that these weights fill exactly."""
    kind, output = (ANSWERER, "qa_outputs") if "qa_outputs.weight" in state else (CLASSIFIER, "classifier")
    architecture = str(next(iter(config.get("architectures") or []), ""))
    suffix = "ForQuestionAnswering" if kind is ANSWERER else "ForSequenceClassification"
    head = state.get(f"{output}.weight")
    if head is None or head.dim() != 2 or not head.numel() or (architecture and not architecture.endswith(suffix)):
        found = f" (architectures: {quoted(architecture)})" if architecture else ""
        raise UserError(f"the weights of {folder} are no {suffix.removeprefix('For')}'s with {output}.weight{found}")
    fields = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    what = f"the config of {folder} makes no {family} model"
    new: Any = told(what, lambda: AutoConfig.for_model(family, **fields))
    new.num_labels = len(head)
    held = Held(len(state), sum(value.numel() for value in state.values()))
    with most_allocated(str(folder), held), torch.device("meta"):
        empty = told(what, lambda: kind.auto_class.from_config(new))
    dropped = ("*.position_ids", "bert.pooler.*" if kind is ANSWERER else "")  # BERT's answers come from no pooler
    state = {name: value for name, value in state.items() if not any(fnmatchcase(name, p) for p in dropped)}
    if family == "roberta":
        places = [name.rpartition(".") for name in state]
        state = {f"{_ROBERTA.get(p[0], p[0])}.{p[2]}": v for p, v in zip(places, state.values(), strict=True)}
    _check_shapes(folder, empty.state_dict(), state)
    model = kind.auto_class.from_config(new, dtype=torch.float32)
    model.load_state_dict(state)
    return model.eval()


def _check_shapes(folder: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (wanted, found)]
    wrong = sorted(name for name in wanted.keys() | found.keys() if shapes[0].get(name) != shapes[1].get(name))
    if wrong:
        name = wrong[0]
        raise UserError(
            f"the weights of {folder} do not fit its config.json: {len(wrong)} differ, the first is {name[:80]}, which "
            f"is {shapes[1].get(name, 'missing')} and must be {shapes[0].get(name, 'left out')}"
        )


def _tokenizer(folder: Path, model: Any, staging: Path) -> Any:
    """The folder's tokenizer: transformers tells its kind by the config, which must be the new one."""
    staging.mkdir()
    for path in sorted(folder.iterdir()):
        if any(fnmatchcase(path.name, pattern) for pattern in TOKENIZER_FILES):
            shutil.copyfile(path, staging / path.name)
    model.config.save_pretrained(staging)
    try:
        return load_tokenizer(staging)
    except ValueError as error:
        raise UserError(str(error).replace(str(staging), str(folder))) from error


def _save_heads(folder: Path, model: Any, highways: dict[str, Tensor], made: Path) -> list[int]:
    """Write a head for every layer but the last, which has the model's own; gives their numbers."""
    layers = list(range(1, model.config.num_hidden_layers))
    if not layers:
        raise UserError(f"the model of {folder} has one layer, which has its own head: there is nowhere to exit")
    heads, family = new_heads(model, layers, "first"), model.config.model_type
    state = {}
    for layer, (part, place), kind in product(layers, _HEADS[family].items(), ("weight", "bias")):
        name = f"{family}{_HIGHWAY}{layer - 1}.{part}.{kind}"
        if name not in highways:
            raise UserError(f"the weights of {folder} lack {name}: they are not those of DeeBERT's second stage")
        state[f"{layer}.{place}.{kind}"] = highways.pop(name)
    last = f"{family}{_HIGHWAY}{len(layers)}."
    strangers = {name: value for name, value in highways.items() if not name.startswith(last)}
    _check_shapes(folder, heads.state_dict(), state | strangers)
    heads.load_state_dict(state)
    policy = policy_of(ExitsSpec(), len(layers), regression=model.config.num_labels == 1)
    save_heads(made, heads, SavedExits(layers=layers, pooling="first", policy=policy))
    return layers
