"""Load what may come from anywhere: one error in words for whatever goes wrong, and no more memory than there is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ds_trainer.files.reading import memory
from ds_trainer.models.model_folder import Held
from ds_trainer.ranks.failures import UserError, first_line

_SLACK = Held(tensors=1000, numbers=10_000_000)
"""What a model has beyond its folder's weights: a new head, weights that are tied, buffers."""

_MOST_TENSORS = 20_000
"""Of any model: building one of more takes long, however small they are."""

T = TypeVar("T")


def told(what: str, call: Callable[[], T]) -> T:
    """The call's value; whatever it raises of a folder's contents becomes a ValueError that says `what`.

    Transformers takes what a folder says at its word in hundreds of places, each with an error of its own; tokenizers'
    panic is no Exception even.
    """
    try:
        return call()
    except _TooLargeError as error:
        raise UserError(str(error)) from None
    except Exception as error:
        raise UserError(f"{what}: {_said(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {_said(error)}") from error


@contextlib.contextmanager
def most_allocated(source: str, held: Held | None) -> Iterator[None]:
    """Inside, a model that is built without memory (on the "meta" device) must fit to the weights held, and this host.

    That is how transformers builds what it loads. Its parameters and buffers are counted as they come.
    """
    numbers, most_bytes = 0, memory()

    def count(name: str, tensor: torch.Tensor) -> None:
        nonlocal numbers
        numbers += tensor.numel()
        _check_numbers(source, held, most_bytes, numbers)

    with _most_tensors(source, held), _each_built(count):
        yield


def check_cut(source: str, held: Held | None, build: Callable[[], nn.Module]) -> None:
    """As `most_allocated`, of a model that is built whole and then cut: what counts is what is left of it.

    Builds it once, without memory. Raises what `told` tells.
    """
    with _most_tensors(source, held), torch.device("meta"):
        model = build()
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    _check_numbers(source, held, memory(), numbers)


@contextlib.contextmanager
def _most_tensors(source: str, held: Held | None) -> Iterator[None]:
    most = min(_MOST_TENSORS, 3 * held.tensors + _SLACK.tensors) if held else _MOST_TENSORS
    tensors = 0

    def count(name: str, tensor: torch.Tensor) -> None:
        nonlocal tensors
        tensors += 1
        if tensors > most:
            raise _TooLargeError(
                f"the config of {source} asks for more than {most:,} tensors"
                + (f", and its weights are {held.tensors:,}: they do not belong together" if held else ": lower it")
            )

    with _each_built(count):
        yield


def _check_numbers(source: str, held: Held | None, most_bytes: int, numbers: int) -> None:
    if held and numbers > 3 * held.numbers + _SLACK.numbers:
        raise _TooLargeError(
            f"the config of {source} asks for {numbers:,} numbers or more, and its weights are {held.numbers:,}: they "
            f"do not belong together"
        )
    if numbers * 4 > most_bytes:
        raise _TooLargeError(
            f"the config of {source} asks for more than {numbers * 4 >> 30:,} GiB in fp32, and this host has "
            f"{most_bytes >> 30:,}: take a smaller model"
        )


@contextlib.contextmanager
def _each_built(count: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Inside, call `count` with the name and values of what is registered on the "meta" device, buffers too."""

    def of_meta(_: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.is_meta:
            count(name, tensor)

    hooks = [register_module_parameter_registration_hook(of_meta), register_module_buffer_registration_hook(of_meta)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _TooLargeError(Exception):
    """A whole message of our own, raised from inside of transformers."""


def _said(error: BaseException) -> str:
    """What an error says first, cut where it shows a whole file; its kind, where that tells more than a ValueError."""
    said = first_line(error)[:300]
    if not (said and isinstance(error, OSError | ValueError)):
        said = ": ".join(filter(None, [type(error).__name__, said]))
    return said + ("; give --trust_remote_code if you trust it" if "trust_remote_code=True" in str(error) else "")
