"""Classifiers of sequences or tokens: load one with the head that a task needs, its classes in the task's order."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.models import pretrained
from ds_trainer.models.pretrained import HeadKind
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import LabelledSpec


def trained_head(config: Any, kind: HeadKind) -> tuple[str, ...] | None:
    """Return the class names, in order, of the trained classifier that a config describes; None if there is none."""
    if not kind.trained_in(config):
        return None
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def label_order(task_labels: Sequence[str], head: Sequence[str] | None) -> tuple[str, ...]:
    """Return the task's labels, in the order of a trained head if that has the same ones, otherwise unchanged."""
    places = _places(head or (), task_labels) or range(len(task_labels))
    return tuple(label for _, label in sorted(zip(places, task_labels, strict=True)))


def unnamed(head: Sequence[str]) -> bool:
    """Return whether the classes have the placeholder names of transformers, LABEL_0 and so on."""
    return all(re.fullmatch(r"LABEL_\d+", name) for name in head)


def class_names(
    spec: LabelledSpec, head: Sequence[str] | None, names_in: Callable[[str], tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the classes that the training split has by `names_in`, which reads a split; collective.

    Without training examples the names of a trained head count: the examples to evaluate on may lack a class.
    """
    can_train = bool(spec.train_file or spec.dataset)
    if not can_train and head and not unnamed(head):
        return tuple(head)
    return distributed.on_main(lambda: names_in("train" if can_train else "validation"))


def check_trained(source: str | Path, kind: HeadKind, labels: Sequence[str], task: str) -> None:
    """Raise UserError unless a model folder or hub name claims a trained head for `labels`, or of a regression's score.

    The head's classes may have other names or another order, as for `load_model`.
    """
    head, outputs = trained_head(pretrained.load_config(source, kind), kind), max(1, len(labels))
    if head is None or len(head) != outputs:
        present = f"one of {len(head)}" if head else "none"
        raise UserError(f"{source} has no trained head of {outputs} outputs for {task}, but {present}")
    if labels:
        _head_order(source, head, labels)


def load_model(source: str | Path, kind: HeadKind, labels: Sequence[str], pad_token_id: int) -> nn.Module:
    """Load a classifier over `labels` in this order, or for regression if there are none, in fp32.

    A trained head of the same classes is kept, and its outputs are put in this order. One with as many classes of other
    names is kept with a warning, unless a label is the name of another output, which is an error. One with another
    number of classes is replaced. It is an error if the config promises a head to keep and the weights do not hold all
    of it.
    """
    config = pretrained.load_config(source, kind)
    head = trained_head(config, kind)
    size = max(1, len(labels))
    config.num_labels = size
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: index for index, name in enumerate(labels)}
    config.problem_type = "single_label_classification" if labels else "regression"
    if config.pad_token_id is None:
        config.pad_token_id = pad_token_id
    # weights of another shape belong to a head that is to be replaced, or the checks below report them by name
    model, info = pretrained.from_pretrained(source, config, kind)
    pretrained.check_encoder_is_whole(source, model, info)
    if head is None or len(head) != size:
        why = "has no trained head" if head is None else f"has a head of {len(head)} classes ({', '.join(head)})"
        outputs = f"{size} output{'s' if size > 1 else ''}"
        distributed.info_once(
            f"the model {Path(source).name} {why}, so it gets a new one of {outputs}, with random weights"
        )
        return model
    pretrained.check_head_is_whole(source, model, info)
    places = _head_order(source, head, labels) if labels else []
    if places is None:
        names = "are unnamed" if unnamed(head) else f"are {', '.join(head)}"
        distributed.warn(f"{source}: the head's classes {names}; they are taken for {', '.join(labels)}, in order")
    elif places != sorted(places):
        _reorder(model, places)
    return model


def _head_order(source: str | Path, head: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Return `_places`; UserError where it is None and a head has one of the labels in the place of another."""
    places = _places(head, labels)
    names = [_folded(name) for name in head]
    for index, label in enumerate(labels):
        if places is None and _folded(label) in names and names[index] != _folded(label):
            raise UserError(
                f"{source}: the head's classes are {', '.join(head)}, and the task's {', '.join(labels)}: "
                f"{label} is class {names.index(_folded(label))} of the head and {index} of the task, and the others "
                f"are not the same. Write into id2label of its config.json what the task calls each of the head's "
                f"outputs, or LABEL_0, LABEL_1, ... to have them taken in the task's order"
            )
    return places


@torch.no_grad()
def _reorder(model: Any, order: list[int]) -> None:
    """Permute the outputs of the classifier's last linear layer."""
    outside = (module for name, module in model.named_modules() if not name.startswith(f"{model.base_model_prefix}."))
    linears = [module for module in outside if isinstance(module, nn.Linear) and module.out_features == len(order)]
    for parameter in linears[-1].parameters():
        parameter.copy_(parameter[order].clone())


def _places(head: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Return where a head has each label, by its name or else by the folded one; None if names differ or repeat."""
    for written in (str, _folded):
        names, wanted = [written(name) for name in head], [written(label) for label in labels]
        if sorted(names) == sorted(wanted) and len(set(wanted)) == len(wanted):
            return [names.index(label) for label in wanted]
    return None


def _folded(name: str) -> str:
    whole = re.sub(r"^([+-]?\d+)\.0+$", r"\1", name)  # a class that version 0.2 called 1.0 is called 1 now
    return re.sub(r"[\s_-]+", "_", whole.casefold())
