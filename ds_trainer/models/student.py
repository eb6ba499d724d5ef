"""A smaller model to start from: chosen layers of a larger one, with all that is below and above them, or a new one.

Initialisation from a teacher's layers as DistilBERT (arXiv 1910.01108). Copies into the same family, whichever it is,
and from BERT into DistilBERT. What the copied layers then compute together is for training to find out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ds_trainer.config.recipe import StudentSpec
from ds_trainer.models.folders import create_folder, save_folder
from ds_trainer.models.layers import FIELD, encoder_layers
from ds_trainer.models.pretrained import HeadKind, from_pretrained, load_config, load_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_ANY = HeadKind("model", transformers.AutoModel, transformers.MODEL_MAPPING)

_DISTILBERT = {
    "BertModel": "DistilBertModel",
    "BertForMaskedLM": "DistilBertForMaskedLM",
    "BertForPreTraining": "DistilBertForMaskedLM",
    "BertForSequenceClassification": "DistilBertForSequenceClassification",
    "BertForQuestionAnswering": "DistilBertForQuestionAnswering",
}
_DISTILBERT_CONFIG = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
} | {
    name: name
    for name in (
        "vocab_size",
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "tie_word_embeddings",
        "id2label",
        "label2id",
        "problem_type",
    )
}
_DISTILBERT_LAYER = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
_DISTILBERT_AROUND = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.LayerNorm": "embeddings.LayerNorm",
    "pooler.dense": "pre_classifier",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.decoder": "vocab_projector",
}


def create_student(spec: StudentSpec, source: str | Path, target: Path, seed: int) -> None:
    """Write to `target` a `transformers` folder, in fp32, of the student that `spec` makes of a folder or hub name.

    Copied weights are those of the source to the bit; `seed` is for the random ones of `spec.config`. The tokenizer is
    the source's. ValueError where the source lacks a layer, or does not go with the spec.
    """
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(source)
    if spec.config is not None:
        create_folder(spec.config, tokenizer, target, seed)
        return
    assert spec.layers is not None, "the spec has one of the two"
    config = load_config(source, _ANY)
    _check_layers(source, config, spec.layers)
    to_distilbert = _crosses_to_distilbert(source, config, spec.model_type)
    teacher = _load(source, config)
    if to_distilbert:
        student = _distilbert(source, teacher, spec.layers)
        # tells tokenizers loaded from the folder to give no token types, which DistilBERT does not take
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    else:
        student = _same_family(source, teacher, spec.layers)
    save_folder(student, tokenizer, target)


def _check_layers(source: str | Path, config: Any, layers: Sequence[int]) -> None:
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        raise UserError(f"the config of {source} ({config.model_type}) counts no layers: use student.config instead")
    if list(layers) != sorted(set(layers)) or layers[-1] >= count:
        raise UserError(
            f"student.layers is {list(layers)}: {source} has {count} layers, name some of 0 to {count - 1} in rising "
            f"order, each once"
        )


def _crosses_to_distilbert(source: str | Path, config: Any, model_type: str | None) -> bool:
    if model_type in (None, config.model_type):
        return False
    if getattr(config, FIELD, None):
        raise UserError(
            f"{source} was shrunk, and a DistilBERT has layers of one size: leave student.model_type out, or start "
            f"from the model before it was cut"
        )
    if (config.model_type, model_type) != ("bert", "distilbert"):
        raise UserError(
            f'student.model_type is "{model_type}", and {source} is a {config.model_type} model. Layers are copied '
            f'into the same family (leave model_type out) and from bert into "distilbert": for any other use '
            f"student.config instead"
        )
    if config.layer_norm_eps != 1e-12:
        raise UserError(
            f"{source} has a layer_norm_eps of {config.layer_norm_eps}, and DistilBERT's is always 1e-12: leave "
            f"student.model_type out"
        )
    return True


def _load(source: str | Path, config: Any) -> Any:
    """The model as the class that its folder names, in fp32. Only a pooler may be new."""
    name = next(iter(config.architectures or []), "")
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise UserError(
            f'the config of {source} names the architecture "{str(name)[:60]}", which transformers does not know: set '
            f'"architectures" in its config.json to a class of it, e.g. ["BertForMaskedLM"]'
        )
    model, info = from_pretrained(source, config, HeadKind(name, model_class, {type(config): model_class}), True)
    missing = sorted(info["missing_keys"])
    if any("pooler" not in weight for weight in missing):
        raise UserError(f"the weights of {source} are no whole {name}: they lack {', '.join(missing[:3])}")
    if missing:
        distributed.warn(f"{source}: the weights have no pooler: the student's is random")
    if info["unexpected_keys"]:
        left = ", ".join(sorted(info["unexpected_keys"])[:3])
        distributed.warn(f"{source}: not copied, since a {name} has no place for them: {left}")
    return model


def _same_family(source: str | Path, teacher: Any, layers: Sequence[int]) -> Any:
    student = type(teacher)(_with_layers(teacher.config, layers))
    _fill(source, student, _copied(teacher, layers), layers)
    if teacher.can_generate():
        student.generation_config = teacher.generation_config
    return student


def _with_layers(config: Any, layers: Sequence[int]) -> Any:
    """The config of these layers alone; so are its lists with an entry a layer: `layer_types`, sizes and the like.

    What a layer takes from its own number (GPT-2's `scale_attn_by_inverse_layer_idx`) it takes from the new one.
    """
    fields = config.to_dict()
    for name, value in fields.items():
        if "layer" in name and isinstance(value, list) and len(value) == config.num_hidden_layers:
            fields[name] = [value[index] for index in layers]
    if fields.get(FIELD):
        fields[FIELD] = {kind: [sizes[index] for index in layers] for kind, sizes in fields[FIELD].items()}
    fields[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    return type(config).from_dict(fields)


def _distilbert(source: str | Path, teacher: Any, layers: Sequence[int]) -> Any:
    """The copy that computes as the BERT does on texts of one segment, if it has all layers.

    Without its pooler's tanh, though: the classifier's layers are copied, and DistilBERT has a ReLU between them.
    """
    kind = type(teacher).__name__
    if kind not in _DISTILBERT:
        raise UserError(
            f"{source} is a {kind}, which cannot be copied into DistilBERT: use one of {', '.join(_DISTILBERT)}, or "
            f"leave student.model_type out"
        )
    student = getattr(transformers, _DISTILBERT[kind])(_distilbert_config(teacher.config, len(layers)))
    state = {_distilbert_name(name): weight for name, weight in _copied(teacher, layers).items()}
    stem = "distilbert.embeddings" if hasattr(teacher, "bert") else "embeddings"
    # DistilBERT has no segments. Here every token of BERT's first one gets this vector, and so does every position
    segment = state[f"{stem}.token_type_embeddings.weight"][0]
    state[f"{stem}.position_embeddings.weight"] = state[f"{stem}.position_embeddings.weight"] + segment
    _fill(source, student, {name: state[name] for name in student.state_dict() if name in state}, layers)
    return student


def _distilbert_name(name: str) -> str:
    """Name a weight as DistilBERT does; what it has no place for (pooler of a bare model, ...) keeps its name."""
    match = re.fullmatch(r"(bert\.)?(?:encoder\.(layer\.\d+)\.)?(.+)\.(\w+)", name)
    assert match is not None, name
    prefix, layer, module, kind = match.groups()
    inside = "distilbert." if prefix else ""
    if layer:
        return f"{inside}transformer.{layer}.{_DISTILBERT_LAYER.get(module, module)}.{kind}"
    module = _DISTILBERT_AROUND.get(module, module)
    return f"{inside if module.startswith('embeddings.') else ''}{module}.{kind}"


def _distilbert_config(bert: Any, layers: int) -> Any:
    fields = {new: getattr(bert, old) for old, new in _DISTILBERT_CONFIG.items()}
    before_classifier = bert.hidden_dropout_prob if bert.classifier_dropout is None else bert.classifier_dropout
    # BERT drops nothing before its answers
    return transformers.DistilBertConfig(
        n_layers=layers, seq_classif_dropout=before_classifier, qa_dropout=0.0, **fields
    )


def _copied(teacher: Any, layers: Sequence[int]) -> dict[str, Tensor]:
    """The teacher's weights without the layers that are left out; the others are numbered anew."""
    names = list(encoder_layers(teacher))
    if len(names) != teacher.config.num_hidden_layers:
        raise UserError(
            f"a {type(teacher).__name__} of {teacher.config.num_hidden_layers} layers holds a list of {len(names)}: "
            f"layers cannot be chosen from it, use student.config instead"
        )
    stem = names[0].removesuffix("0")
    place = {str(old): str(new) for new, old in enumerate(layers)}
    state = {}
    for name, weight in teacher.state_dict().items():
        old, _, rest = name.removeprefix(stem).partition(".")
        if not name.startswith(stem):
            state[name] = weight
        elif old in place:
            state[f"{stem}{place[old]}.{rest}"] = weight
    return state


def _fill(source: str | Path, student: Any, state: Mapping[str, Tensor], layers: Sequence[int]) -> None:
    """Load the weights, which must be all that the student has, and no more."""
    wanted = {name: weight.shape for name, weight in student.state_dict().items()}
    found = {name: weight.shape for name, weight in state.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise UserError(
            f"layers {list(layers)} of {source} make no {type(student).__name__}, whose layers differ by their place: "
            f"{wrong[0]} does not fit. Keep layer 0 as the first, or take those of another pattern"
        )
    student.load_state_dict(state)
