"""Write a folder of movement pruning's scripts (arXiv 2005.07683) or of DeeBERT (arXiv 2004.12993) as an ordinary one.

python examples/import_older_models.py masked_bert OLD NEW --threshold 0.15      # of pruning_method l0 without it
python examples/import_older_models.py deebert OLD NEW

A masked BERT has `mask_scores` beside the matrices of its layers. It is folded as the scripts' bertarize.py does: the
result is a plain BERT. The folder does not hold the final threshold of its run. DeeBERT has a "highway" after every
layer, a pooler and a classifier: the result is a plain BERT or RoBERTa with exit heads, which a sample leaves at an
entropy of 0.1 until launch/evaluate.py or launch/calibrate.py gives another. The last layer's highway, which DeeBERT
never trains, is dropped. Configs this old say little, so family and head are read from the weights' names. A pickle is
read as weights only.
"""

import argparse
import json
import shutil
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from ds_trainer.files.run_folder import TOKENIZER_FILES
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import encoder_linears
from ds_trainer.models.pretrained import ANSWERER, CLASSIFIER, check_fits, load_tokenizer
from ds_trainer.recipe.exit_specs import ExitsSpec, SavedExits, policy_of
from ds_trainer.techniques.exits.early_exit import new_heads, save_heads
from ds_trainer.techniques.prune.selection import largest_on_device

SCORES, HIGHWAY = ".mask_scores", ".encoder.highway."
METHODS = ("topK", "magnitude", "threshold", "sigmoied_threshold", "l0")
HEADS = {
    "bert": {"pooler.dense": "steps.0", "classifier": "steps.3"},
    "roberta": {"pooler.dense": "steps.0.dense", "classifier": "steps.0.out_proj"},
}
"""The names in an exit head of the modules of a highway, for each family."""
ROBERTA = {"roberta.pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
"""DeeBERT classifies RoBERTa as it does BERT; transformers has the same two layers in RoBERTa's head."""
FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
    *("initializer_range", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id"),
)
"""The fields that are taken from an old config; the others are settings of its program."""


def import_masked_bert(old: Path, new: Path, threshold: float | None) -> None:
    """Multiply each matrix of the layers by its mask, and write the plain model."""
    config, state = read_folder(old)
    method = config.get("pruning_method")
    if config.get("model_type") != "masked_bert" or method not in METHODS:
        raise SystemExit(f"{old}: its config must say model_type masked_bert, and one of {', '.join(METHODS)}")
    if (threshold is None) != (method == "l0"):
        raise SystemExit(f"give --threshold, the final one of the run, with every method but l0: {old} has {method}")
    if method in ("topK", "magnitude") and not 0 < (threshold or 0) <= 1:
        raise SystemExit(f"--threshold {threshold}: {method} takes the share to keep, above 0 and up to 1")
    scores = {name: state.pop(name).float() for name in list(state) if name.endswith(SCORES)}
    model = plain_model(config, state)
    with torch.no_grad():
        for name, linear in encoder_linears(model).items():
            values = linear.weight.abs() if method == "magnitude" else scores[f"{name}{SCORES}"]
            linear.weight *= mask_of(values, method, threshold or 0.0)
    save_folder(model, tokenizer_of(old, model), new)


def import_deebert(old: Path, new: Path) -> None:
    """Write the plain model, and a head for every layer but the last, which has the model's own."""
    config, state = read_folder(old)
    highways = {name: state.pop(name) for name in list(state) if HIGHWAY in name}
    model = plain_model(config, state)
    layers = list(range(1, model.config.num_hidden_layers))
    heads, names, of_heads = new_heads(model, layers, "first"), HEADS[model.config.model_type], {}
    for name, value in highways.items():
        _, _, _, number, *module, kind = name.split(".")
        if int(number) < len(layers):
            part = ".".join(module)
            of_heads[f"{int(number) + 1}.{names.get(part, part)}.{kind}"] = value
    heads.load_state_dict(of_heads)
    save_folder(model, tokenizer_of(old, model), new)
    policy = policy_of(ExitsSpec(), len(layers), regression=model.config.num_labels == 1)
    save_heads(new, heads, SavedExits(layers=layers, pooling="first", policy=policy))


def mask_of(scores: Tensor, method: str, threshold: float) -> Tensor:
    """The mask that the scripts multiply a matrix by; the scores of "magnitude" are its absolute values.

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


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config, and the weights from the one file that both programs write, or from safetensors made of it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (folder / "model.safetensors").is_file():
        return config, load_file(folder / "model.safetensors")
    return config, dict(torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True).items())


def plain_model(config: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """The model of transformers that these weights fill exactly."""
    family = "roberta" if any(name.startswith("roberta.") for name in state) else "bert"
    kind, output = (ANSWERER, "qa_outputs") if "qa_outputs.weight" in state else (CLASSIFIER, "classifier")
    # old files have positions as a buffer; BERT's answers come from no pooler
    dropped = ("position_ids", "bert.pooler") if kind is ANSWERER else ("position_ids",)
    state = {name: value for name, value in state.items() if not any(part in name for part in dropped)}
    classes = len(state[f"{output}.weight"])
    if family == "roberta":
        places = {name: name.rpartition(".") for name in state}
        state = {f"{ROBERTA.get(p[0], p[0])}.{p[2]}": state[name] for name, p in places.items()}
    fields = {name: config[name] for name in FIELDS if config.get(name) is not None}
    new: Any = AutoConfig.for_model(family, **fields)
    new.num_labels = classes
    model = kind.classes(new)[0](new)
    model.load_state_dict(state)
    return model.eval()


def tokenizer_of(folder: Path, model: Any) -> Any:
    """Load the folder's tokenizer beside the new config, by which transformers chooses the tokenizer's class."""
    with tempfile.TemporaryDirectory() as aside:
        model.config.save_pretrained(aside)
        for path in folder.iterdir():
            if any(fnmatchcase(path.name, pattern) for pattern in TOKENIZER_FILES):
                shutil.copyfile(path, Path(aside, path.name))
        tokenizer = load_tokenizer(Path(aside))
    check_fits(model, tokenizer, max_seq_length=1)
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=("masked_bert", "deebert"), help="which wrote the folder")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, help="the folder to write")
    parser.add_argument("--threshold", type=float, help="of a masked BERT: the final threshold of its run")
    flags = parser.parse_args()
    if flags.new.exists():
        parser.error(f"{flags.new} exists: name a new folder")
    if flags.program == "masked_bert":
        import_masked_bert(flags.old, flags.new, flags.threshold)
    else:
        import_deebert(flags.old, flags.new)
