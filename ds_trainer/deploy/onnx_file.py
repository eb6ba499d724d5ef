"""ONNX files: write a model of any batch size and length as one, run it by onnxruntime, check it, quantise it.

Decoders are written without a cache of keys and values: a file scores texts and does not generate. Weights stay in the
file itself, which the format limits to 2 GiB. onnx and onnxruntime come with the extra `onnx`.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.ranks.failures import UserError, first_line
from ds_trainer.tasks.task import Batch

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Inputs: TypeAlias = Mapping[str, Tensor]
"""A batch by the names of a model's inputs."""
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Run: TypeAlias = Callable[[Inputs], Sequence[Array]]
"""Gives the outputs for a batch on the CPU, in the order in which a model has them."""

TOLERANCE = 1e-4
INSTALL = """pip install -e ".[onnx]" from the project's folder"""
_OPSET = 17
"""The first with layer norm as one operator: every onnxruntime since 1.13 reads it."""
_OF_MODELS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""Outputs that go into a file, of those that a model has."""
_MOST_BYTES = 2**31 - 2**24
"""Of weights: the format's 2 GiB hold the graph, too."""
_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}


def check_installed() -> None:
    """Raise ValueError, with the way out, where onnx or onnxruntime cannot be loaded."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX files need onnx and onnxruntime ({error}): {INSTALL}") from error


def write_onnx(model: nn.Module, inputs: Inputs, path: Path) -> None:
    """Write a model on the CPU, in fp32, as an .onnx file whose batch and length are free.

    `inputs` are an example, each (rows, length, ...), and name the file's inputs. Its outputs are `logits`, or
    `start_logits` and `end_logits`; of a model that gives one tensor, `output`. Raises ValueError for a model of more
    than 2 GiB, and what the exporter raises for one that it cannot follow.

    The exporter is torch's older one, which traces. Of the models that this library knows both give the same numbers
    and onnxruntime runs both equally fast, but the newer one takes five to ten times as long, needs a further package,
    and its shapes stop onnxruntime's quantisation. What a trace got wrong shows in `check_onnx`.
    """
    check_installed()
    size = 4 * sum(weight.numel() for _, weight in model.named_parameters(remove_duplicate=False))
    if size > _MOST_BYTES:
        raise UserError(
            f"the model has {size:,} bytes in fp32, and an .onnx file holds 2 GiB: export a smaller one, --shrink it"
        )
    traced = {name: value if value.is_floating_point() else value.long() for name, value in inputs.items()}
    named = _Named(model, tuple(traced))
    with torch.no_grad(), _eager_attention(model), _evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every branch on a shape is told, and that there is a newer exporter
        found = named(*traced.values())
        free = {name: {0: "batch", 1: "length"} for name in traced}
        free |= {name: _free_axes(name, value) for name, value in zip(named.output_names, found, strict=True)}
        torch.onnx.export(
            named,
            tuple(traced.values()),
            str(path),
            dynamo=False,
            input_names=list(traced),
            output_names=named.output_names,
            dynamic_axes=free,
            opset_version=_OPSET,
        )


def session(path: Path, threads: int) -> InferenceSession:
    """The model of an .onnx file on so many threads of the CPU; ValueError where onnxruntime does not load it.

    Its threads sleep between calls: else they take the cores from whatever else the process runs, torch say.
    """
    check_installed()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes have no common one below this
        said = first_line(error) or type(error).__name__
        raise UserError(f"onnxruntime cannot load {path}: {said[:300]}") from error


def outputs(opened: InferenceSession, inputs: Inputs) -> tuple[Array, ...]:
    """What an .onnx file gives for a batch, in the order of its outputs.

    Inputs that the file does not have are left out; token types that are not given are zeros.
    """
    given = {}
    for node in opened.get_inputs():
        value = torch.zeros_like(inputs["input_ids"]) if _is_missing(node.name, inputs) else inputs[node.name]
        given[node.name] = value.detach().cpu().numpy().astype(_TYPES[node.type], copy=False)
    return tuple(opened.run(None, given))


def predictor(opened: InferenceSession) -> Callable[[Batch], Any]:
    """What evaluates in a model's place: outputs by name, as a task reads them."""
    names = [node.name for node in opened.get_outputs()]

    def predict(batch: Batch) -> Any:
        tensors = [torch.from_numpy(array).to(batch.labels.device) for array in outputs(opened, batch.inputs)]
        found = SimpleNamespace(**dict(zip(names, tensors, strict=True)))
        positions = batch.inputs.get("head_positions")
        if positions is not None:  # a file's head has run at all of them
            found.logits = found.logits.flatten(0, 1)[positions].unsqueeze(0)
        return found

    return predict


@torch.no_grad()
def compare(model: nn.Module, run: Run, batches: Iterable[Inputs]) -> dict[str, float]:
    """How far what `run` gives is from the model's outputs: `max_difference`, and the `largest` of those.

    Outputs for tokens count where `attention_mask` has a token. ValueError where either is not finite.
    """
    difference = largest = 0.0
    with _evaluating(model):
        for inputs in batches:
            names, expected = _outputs_of(model, inputs)
            for name, found, wanted in zip(names, run(inputs), expected, strict=True):
                of_tokens = 1 in _free_axes(name, wanted) and "attention_mask" in inputs
                chosen: Any = inputs["attention_mask"].bool().numpy() if of_tokens else slice(None)
                values = wanted.numpy()[chosen]
                if not (np.isfinite(values).all() and np.isfinite(found[chosen]).all()):
                    raise UserError(f"{name} are not finite (NaN or infinity): the model's weights are broken")
                difference = max(difference, float(np.abs(found[chosen] - values).max(initial=0.0)))
                largest = max(largest, float(np.abs(values).max(initial=0.0)))
    return {"max_difference": difference, "largest": largest}


def compare_file(model: nn.Module, path: Path, batches: Iterable[Inputs], threads: int = 1) -> dict[str, float]:
    """As `compare`, of an .onnx file, both given the inputs that the file has, and no others."""
    opened = session(path, threads)
    names = {node.name for node in opened.get_inputs()}
    taken = ({name: value for name, value in batch.items() if name in names} for batch in batches)
    return compare(model, partial(outputs, opened), taken)


def check_onnx(model: nn.Module, path: Path, batches: Iterable[Inputs], threads: int = 1) -> dict[str, float]:
    """Compare a file with its model; ValueError where they differ by more than 1e-4 of the largest output, or of 1."""
    found = compare_file(model, path, batches, threads)
    if found["max_difference"] > TOLERANCE * max(1.0, found["largest"]):
        raise UserError(
            f"the ONNX model's outputs differ from the model's by {found['max_difference']:.3g}, where the largest is "
            f"{found['largest']:.3g}: {type(model).__name__} does something that a trace does not hold, so that it "
            f"cannot be exported"
        )
    return found


def by_torch(model: nn.Module) -> Run:
    """The model itself, to be compared."""
    return lambda inputs: tuple(value.numpy() for value in _outputs_of(model, inputs)[1])


def quantise(path: Path, target: Path) -> None:
    """Write a copy whose weights are int8, a scale for each output, and whose activations are made so as it runs.

    Processors without int8 dot products (VNNI) may saturate sums of them: what that costs is measured, not bounded.
    """
    check_installed()
    import logging

    from onnxruntime.quantization import QuantType, quantize_dynamic

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises steps for models of other exporters
    try:
        quantize_dynamic(path, target, weight_type=QuantType.QInt8, per_channel=True)
    finally:
        root.setLevel(level)


class _Named(nn.Module):
    """A model called by position, as exporters do; gives the tensors of its output."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.options = {} if not hasattr(model, "config") else {"return_dict": True}
        if "use_cache" in inspect.signature(model.forward).parameters:
            self.options["use_cache"] = False
        self.output_names: list[str] = []

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        accepted = inspect.signature(self.model.forward).parameters
        options = {name: value for name, value in self.options.items() if name in accepted}
        found = self.model(**dict(zip(self.names, values, strict=True)), **options)
        self.output_names = _names_of(found)
        return _tensors_of(found, self.output_names)


def _names_of(found: Any) -> list[str]:
    if isinstance(found, Tensor):
        return ["output"]
    names = [name for name in _OF_MODELS if name in found]
    if not names:
        raise UserError(f"the model gives {', '.join(found)}: an ONNX file is made of one that gives logits")
    return names


def _tensors_of(found: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found[name] for name in names)


@torch.no_grad()
def _outputs_of(model: nn.Module, inputs: Inputs) -> tuple[list[str], tuple[Tensor, ...]]:
    """Names and values of what the model gives, for those of the inputs that it takes."""
    accepted = inspect.signature(model.forward).parameters
    found = model(**{name: value for name, value in inputs.items() if name in accepted})
    names = _names_of(found)
    return names, _tensors_of(found, names)


def _free_axes(name: str, value: Tensor) -> dict[int, str]:
    """Logits of two axes are one row an example; all else is one for each token."""
    per_example = name == "logits" and value.dim() == 2
    return {0: "batch"} if per_example else {0: "batch", 1: "length"}


def _is_missing(name: str, inputs: Inputs) -> bool:
    return name == "token_type_ids" and name not in inputs


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextlib.contextmanager
def _eager_attention(model: nn.Module) -> Iterator[None]:
    """Attention in plain operators: it gives a smaller graph than torch's fused one, taken apart again."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    fused = [config for config in configs.values() if hasattr(config, "_attn_implementation")]
    before = [config._attn_implementation for config in fused]
    try:
        for config in fused:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in zip(fused, before, strict=True):
            config._attn_implementation = implementation
