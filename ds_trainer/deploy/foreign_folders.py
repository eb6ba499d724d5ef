"""Import the folders of two other programs: movement pruning (arXiv 2005.07683) and DeeBERT (arXiv 2004.12993).

A masked BERT has `mask_scores` beside the matrices of its layers. It is folded as the program's script bertarize.py
does: the result is a plain BERT. DeeBERT has a "highway" after every layer, a pooler and a classifier: the result is a
plain BERT or RoBERTa with exit heads. Configs this old say little, so family and head are read from the weights' names.

The weights may be in `pytorch_model.bin`, a pickle. It is read as weights only, and only here without `--allow_pickle`:
a user who names the program that wrote a folder asks for it.
"""

import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from ds_trainer.config.exit_specs import ExitsSpec, SavedExits, policy_of
from ds_trainer.config.jobs import ExportJob
from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import read_value
from ds_trainer.files.run_folder import TOKENIZER_FILES
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import encoder_linears, total_weights
from ds_trainer.models.loading import as_user_error
from ds_trainer.models.pretrained import ANSWERER, CLASSIFIER, check_fits, load_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.exits.early_exit import load_for_inference
from ds_trainer.techniques.exits.heads import new_heads, save_heads
from ds_trainer.techniques.prune.selection import largest_on_device

_SCORES = ".mask_scores"
_HIGHWAY = ".encoder.highway."
_HEADS = {
    "bert": {"pooler.dense": "steps.0", "classifier": "steps.3"},
    "roberta": {"pooler.dense": "steps.0.dense", "classifier": "steps.0.out_proj"},
}
"""The names in an `ExitHead` of the modules of a highway, for each family."""
_ROBERTA = {"roberta.pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
"""DeeBERT classifies RoBERTa as it does BERT; transformers has the same two layers in RoBERTa's head."""
_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
    *("initializer_range", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id"),
)
"""The fields that are taken from an old config; the others are settings of its program."""


def import_folder(job: ExportJob, made: Path, aside: Path) -> dict[str, Any]:
    """Write the folder of `job.model` as one of this library into `made`; returns what is reported of it.

    `aside` is a folder for temporary files. UserError where config and weights are not those of the program.
    """
    config, state = read_value(job.model / "config.json"), _read_weights(job.model)
    masked = job.import_from == "masked_bert"
    added = [name for name in state if (name.endswith(_SCORES) if masked else _HIGHWAY in name)]
    beside = {name: state.pop(name) for name in added}
    model = _plain_model(job.model, config, state)
    tokenizer = _load_tokenizer(job.model, model, aside / "tokenizer")
    check_fits(model, tokenizer, max_seq_length=1)
    report: dict[str, Any] = {"from": job.import_from}
    if masked:
        report |= {"pruning_method": config["pruning_method"], "threshold": job.threshold}
        _fold(job.model, model, beside, config["pruning_method"], job.threshold or 0.0)
    save_folder(model, tokenizer, made)
    if not masked:
        report["exits"] = _save_heads(job.model, model, beside, made)
        report["left_out"] = "the highway of the last layer, which DeeBERT does not train"
    load_for_inference(made)  # refuses what would not be loaded later
    return {"imported": report | {"weights": total_weights(model)}}


def mask_of(scores: Tensor, method: str, threshold: float) -> Tensor:
    """The mask that movement pruning's scripts multiply a matrix by; the scores of "magnitude" are its absolute values.

    Of equal scores the first are kept: the scripts' sort does not define which.
    """
    if method == "l0":
        return (scores.sigmoid() * 1.2 - 0.1).clamp(0, 1)  # the stretched sigmoid, without its noise
    if method in ("topK", "magnitude"):
        return largest_on_device(scores, int(threshold * scores.numel())).float()
    mask = (scores.sigmoid() if method == "sigmoied_threshold" else scores) > threshold
    least = int(0.005 * scores.numel()) + 1
    if mask.sum() < least:
        mask = scores > scores.flatten().kthvalue(max(scores.numel() - least, 1)).values
    return mask.float()


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The state dict of a folder, from the one file that both programs write, or from safetensors made of it."""
    with as_user_error(f"the weights of {folder} cannot be loaded"):
        if (folder / "model.safetensors").is_file():
            return load_file(folder / "model.safetensors")
        return dict(torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True).items())


def _plain_model(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Any:
    """The model of transformers that these weights fill exactly."""
    family = "roberta" if any(name.startswith("roberta.") for name in state) else "bert"
    kind, output = (ANSWERER, "qa_outputs") if "qa_outputs.weight" in state else (CLASSIFIER, "classifier")
    architecture = str(next(iter(config.get("architectures") or []), ""))
    suffix = "ForQuestionAnswering" if kind is ANSWERER else "ForSequenceClassification"
    head = state.get(f"{output}.weight")
    if head is None or (architecture and not architecture.endswith(suffix)):
        raise UserError(
            f"the weights of {folder} are no {suffix.removeprefix('For')}'s with {output}.weight "
            f"(architectures: {quoted(architecture)})"
        )
    # old files have positions as a buffer; BERT's answers come from no pooler
    dropped = ("position_ids", "bert.pooler") if kind is ANSWERER else ("position_ids",)
    state = {name: value for name, value in state.items() if not any(part in name for part in dropped)}
    if family == "roberta":
        places = {name: name.rpartition(".") for name in state}
        state = {f"{_ROBERTA.get(p[0], p[0])}.{p[2]}": state[name] for name, p in places.items()}
    fields = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    with as_user_error(f"the weights of {folder} do not fit its config.json"):
        new: Any = AutoConfig.for_model(family, **fields)
        new.num_labels = len(head)
        model = kind.classes(new)[0](new)
        model.load_state_dict(state)
    return model.eval()


def _load_tokenizer(folder: Path, model: Any, staging: Path) -> Any:
    """Load the folder's tokenizer beside the new config, by which transformers chooses the tokenizer's class."""
    model.config.save_pretrained(staging)
    for path in folder.iterdir():
        if any(fnmatchcase(path.name, pattern) for pattern in TOKENIZER_FILES):
            shutil.copyfile(path, staging / path.name)
    with as_user_error(f"the tokenizer of {folder} cannot be loaded"):
        return load_tokenizer(staging)


@torch.no_grad()
def _fold(folder: Path, model: Any, scores: Mapping[str, Tensor], method: str, threshold: float) -> None:
    """Multiply each matrix of the layers by the mask that its scores make."""
    with as_user_error(f"the scores of {folder} do not go with its matrices and {method}"):
        for name, linear in encoder_linears(model).items():
            values = linear.weight.abs() if method == "magnitude" else scores[f"{name}{_SCORES}"].float()
            linear.weight *= mask_of(values, method, threshold)


def _save_heads(folder: Path, model: Any, highways: Mapping[str, Tensor], made: Path) -> list[int]:
    """Write a head for every layer but the last, which has the model's own; returns the numbers of those layers."""
    layers = list(range(1, model.config.num_hidden_layers))
    heads, names, state = new_heads(model, layers, "first"), _HEADS[model.config.model_type], {}
    with as_user_error(f"the weights of {folder} are not those of DeeBERT's second stage"):
        for name, value in highways.items():
            _, _, _, number, *module, kind = name.split(".")
            if int(number) < len(layers):
                part = ".".join(module)
                state[f"{int(number) + 1}.{names.get(part, part)}.{kind}"] = value
        heads.load_state_dict(state)
    policy = policy_of(ExitsSpec(), len(layers), regression=model.config.num_labels == 1)
    save_heads(made, heads, SavedExits(layers=layers, pooling="first", policy=policy))
    return layers
