"""Make a smaller model to start from: chosen layers of a larger one with all that is around them, or a new one.

A student starts with layers of its teacher, as DistilBERT does (arXiv 1910.01108). Layers are copied into a model of
the same family, whichever it is, or from BERT into DistilBERT. Training has to make the copied layers work together.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ds_trainer.files.messages import listed, quoted
from ds_trainer.models.folders import as_user_error, create_folder, save_folder
from ds_trainer.models.layers import FIELD, build_like, encoder_layers, shapes_like
from ds_trainer.models.pretrained import (
    HEADLESS,
    HeadKind,
    dtype_of,
    from_pretrained,
    load_config,
    load_tokenizer,
    unfilled_weights,
)
from ds_trainer.models.sentence_files import copy_sentence_files
from ds_trainer.models.shrink import simplest_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.technique_specs import StudentSpec

_DISTILBERT = {
    "BertModel": "DistilBertModel",
    "BertForMaskedLM": "DistilBertForMaskedLM",
    "BertForPreTraining": "DistilBertForMaskedLM",
    "BertForSequenceClassification": "DistilBertForSequenceClassification",
    "BertForQuestionAnswering": "DistilBertForQuestionAnswering",
    "BertForTokenClassification": "DistilBertForTokenClassification",
}
_DISTILBERT_CONFIG = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_SAME_IN_DISTILBERT = (
    *("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range"),
    *("tie_word_embeddings", "id2label", "label2id", "problem_type"),
)
_DISTILBERT_MODULES = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
    "pooler.dense": "pre_classifier",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.decoder": "vocab_projector",
}
"""The names in DistilBERT of the modules that it calls otherwise than BERT, inside a layer and around the layers."""


def create_student(spec: StudentSpec, source: str | Path, target: Path, seed: int) -> None:
    """Write to `target` a `transformers` folder, in fp32, of the student that `spec` makes of a folder or hub name.

    Copied weights are those of the source to the bit; `seed` is for the random ones of `spec.config`. The tokenizer is
    the source's. UserError where the source lacks a layer, or does not go with the spec.
    """
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(source)
    if spec.config is not None:
        create_folder(spec.config, tokenizer, target, seed)
        return
    assert spec.layers is not None, "the spec has one of the two"
    config, layers = load_config(source, HEADLESS), spec.layers
    count = getattr(config, "num_hidden_layers", 0)
    if list(layers) != sorted(set(layers)) or layers[-1] >= count:
        raise UserError(
            f"student.layers is {list(layers)}: {source} has {count} layers, name some of 0 to {count - 1} in rising "
            f"order, each once"
        )
    if spec.model_type in (None, config.model_type):
        student = with_layers(source, _load(source, config), layers)
    else:
        _check_distilbert(source, config, spec.model_type)
        student = _distilbert(source, _load(source, config), layers)
        # so that the saved tokenizer gives no token types, which DistilBERT does not take
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    save_folder(student.to(dtype_of(source)), tokenizer, target, partial(copy_sentence_files, source))


def _check_distilbert(source: str | Path, config: Any, model_type: str | None) -> None:
    """Raise UserError for what cannot be copied into DistilBERT, and for another family than it."""
    kind = next(iter(config.architectures or []), "")
    shrunk, epsilon = bool(getattr(config, FIELD, None)), getattr(config, "layer_norm_eps", None)
    if model_type != "distilbert" or kind not in _DISTILBERT or shrunk or epsilon != 1e-12:
        raise UserError(
            f"{source} is a {kind or config.model_type}{' that was shrunk' * shrunk} (layer_norm_eps {epsilon}), and "
            f'student.model_type can only be "distilbert", of whole models with 1e-12: {", ".join(_DISTILBERT)}. '
            "Leave student.model_type out, or write a student.config"
        )


def _load(source: str | Path, config: Any) -> Any:
    """Load the model as the class that its folder names, in fp32. Only a pooler may be new."""
    name = next(iter(config.architectures or []), "")
    model_class = getattr(transformers, str(name), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise UserError(
            f"the config of {source} names the architecture {quoted(name)}, which transformers does not know: set "
            f'"architectures" in its config.json to a class of it, e.g. ["BertForMaskedLM"]'
        )
    model, info = from_pretrained(source, config, HeadKind(name, model_class, {type(config): model_class}))
    new = unfilled_weights(info)
    if any("pooler" not in weight for weight in new):
        raise UserError(
            f"the weights of {source} are no whole {name}: these do not fit or are missing: {listed(new, 3)}"
        )
    over = sorted(info["unexpected_keys"])
    for names, fault in ((new, "are missing, and random in the student"), (over, f"have no place in a {name}")):
        if names:
            distributed.warn(f"{source}: these weights {fault}: {listed(names, 3)}")
    return model


def with_layers(source: str | Path, teacher: Any, layers: Sequence[int]) -> Any:
    """Return a model of the teacher's class with these of its layers; `source` names the teacher in errors."""
    config = config_of_layers(teacher.config, layers)
    if getattr(config, FIELD, None):  # a plain config may be able to say the sizes of these layers, though not of all
        config = simplest_config(teacher, config)
    student = build_like(teacher, config)
    _fill(source, student, _copied(teacher, layers), layers)
    if teacher.can_generate():
        student.generation_config = teacher.generation_config
    return student


def can_keep(teacher: Any, layers: Sequence[int]) -> bool:
    """Return whether `with_layers` can make a model of these layers: ModernBERT's differ by their place."""
    copied = {name: weight.shape for name, weight in _copied(teacher, layers).items()}
    return shapes_like(teacher, config_of_layers(teacher.config, layers)) == copied


def config_of_layers(config: Any, layers: Sequence[int]) -> Any:
    """Return the config of these layers alone. Lists with an entry for each layer (`layer_types`, sizes) keep theirs.

    What a layer computes from its number (GPT-2's `scale_attn_by_inverse_layer_idx`) it computes from the new one.
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
    """Copy into a DistilBERT, which with all layers computes as the BERT does on texts of one segment.

    Only its pooler differs: DistilBERT has a ReLU between the classifier's layers, where BERT has a tanh.
    """
    bert = teacher.config
    before_classifier = bert.hidden_dropout_prob if bert.classifier_dropout is None else bert.classifier_dropout
    config = transformers.DistilBertConfig(
        n_layers=len(layers),
        seq_classif_dropout=before_classifier,
        qa_dropout=0.0,  # BERT has no dropout before its answers
        **{new: getattr(bert, old) for old, new in _DISTILBERT_CONFIG.items()},
        **{name: getattr(bert, name) for name in _SAME_IN_DISTILBERT},
    )
    student = getattr(transformers, _DISTILBERT[type(teacher).__name__])(config)
    state = {_distilbert_name(name): weight for name, weight in _copied(teacher, layers).items()}
    stem = "distilbert.embeddings" if hasattr(teacher, "bert") else "embeddings"
    # DistilBERT has no segments: the vector that BERT adds to every token of the first one is added to every position
    segment = state[f"{stem}.token_type_embeddings.weight"][0]
    state[f"{stem}.position_embeddings.weight"] = state[f"{stem}.position_embeddings.weight"] + segment
    _fill(source, student, {name: state[name] for name in student.state_dict() if name in state}, layers)
    return student


def _distilbert_name(name: str) -> str:
    """Name a weight as DistilBERT does. A weight that DistilBERT lacks, as a bare model's pooler, keeps its name."""
    match = re.fullmatch(r"(bert\.)?(?:encoder\.(layer\.\d+\.))?(.+)\.(\w+)", name)
    assert match is not None, name
    prefix, layer, module, kind = match.groups()
    module = _DISTILBERT_MODULES.get(module, module)
    if layer:
        module = f"transformer.{layer}{module}"
    inside = prefix and (layer or module.startswith("embeddings."))
    return f"{'distilbert.' if inside else ''}{module}.{kind}"


def _copied(teacher: Any, layers: Sequence[int]) -> dict[str, Tensor]:
    """Return the teacher's weights without those of layers that are not chosen; the chosen ones are numbered anew."""
    stem = next(iter(encoder_layers(teacher))).removesuffix("0")
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
    """Load the weights into the student, which must need them all, and no others."""
    fault = f"layers {list(layers)} of {source} make no {type(student).__name__}, whose layers differ by their place"
    with as_user_error(f"{fault}: keep layer 0 as the first, or take those of another pattern"):
        student.load_state_dict(state)
