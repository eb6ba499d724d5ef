"""ONNX files: write a model of any batch size and length as one, run it by onnxruntime, check it, quantise it.

Decoders are written without a cache of keys and values: a file scores texts and does not generate. Weights stay in the
file itself, which the format limits to 2 GiB. onnx and onnxruntime come with the extra `onnx`.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ds_trainer.deploy.export import agree, differences
from ds_trainer.models.folders import as_user_error
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Batch

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Inputs: TypeAlias = Mapping[str, Tensor]
"""A batch by the names of a model's inputs."""
Forward: TypeAlias = Callable[[Inputs], Sequence[Tensor]]
"""Gives the outputs for a batch on the CPU, in the order in which a model has them."""

TOLERANCE = 1e-4
"""By how much the outputs of an .onnx file may differ, whose operators sum up in another order than torch's."""
_OPSET = 17
"""The first with layer norm as one operator: every onnxruntime since 1.13 reads it."""
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""The outputs of a model that go into a file."""
_MOST_BYTES = 2**31 - 2**24
"""The limit for the weights: the format's 2 GiB hold the graph, too."""


def write_onnx(model: Any, inputs: Inputs, path: Path) -> None:
    """Write a model on the CPU, in fp32, as an .onnx file whose batch and length are free; sets it to evaluation.

    `inputs` are an example, each (rows, length, ...), and name the file's inputs. Its outputs are `logits`, or
    `start_logits` and `end_logits`. Raises UserError for a model of more than 2 GiB, and the exporter's own errors for
    a model that it cannot follow.

    The exporter is torch's older one, which traces. For the models that this library knows both give the same numbers
    and onnxruntime runs both equally fast, but the newer one takes five to ten times as long, needs a further package,
    and its shapes stop onnxruntime's quantisation. What a trace got wrong shows in `check_onnx`.
    """
    size = 4 * sum(weight.numel() for _, weight in model.named_parameters(remove_duplicate=False))
    if size > _MOST_BYTES:
        raise UserError(
            f"the model has {size:,} bytes in fp32, and an .onnx file holds 2 GiB: export a smaller one, --shrink it"
        )
    traced = {name: _as_traced(value) for name, value in inputs.items()}
    attention = model.config._attn_implementation
    model.eval().set_attn_implementation("eager")  # a smaller graph than torch's fused attention gives, taken apart
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for every branch on a shape, and one for the newer exporter
            outputs_of_model = _outputs_of(model, traced)
            axes = {name: {0: "batch", 1: "length"} for name in traced}
            axes |= {name: _free_axes(name, value) for name, value in outputs_of_model.items()}
            torch.onnx.export(
                _ByPosition(model, tuple(traced)).eval(),  # or the exporter would set the model to training at its end
                tuple(traced.values()),
                str(path),
                dynamo=False,
                input_names=list(traced),
                output_names=list(outputs_of_model),
                dynamic_axes=axes,
                opset_version=_OPSET,
            )
    finally:
        model.set_attn_implementation(attention)


def write_checked(
    model: Any, batches: Sequence[Inputs], path: Path, small: Path | None = None, threads: int = 1
) -> dict[str, dict[str, Any]]:
    """Write a model as `path`, once it agrees with the model on the batches, and a copy in int8 as `small`, if given.

    Returns name, bytes and `differences` of the files, as "onnx" and "int8". UserError says why there is no file.
    """
    with as_user_error("the model cannot be written as ONNX"):
        write_onnx(model, batches[0], path)
    report = {"onnx": {"file": path.name, "bytes": path.stat().st_size, **check_onnx(model, path, batches, threads)}}
    if small:
        with as_user_error("the model cannot be quantised"):
            quantise(path, small)
        compared = compare(model, partial(outputs, session(small, threads)), batches)
        report["int8"] = {"file": small.name, "bytes": small.stat().st_size, **compared}
    return report


def session(path: Path, threads: int) -> InferenceSession:
    """Open an .onnx file on this number of CPU threads; UserError where onnxruntime cannot load it.

    Its threads sleep between calls: else they take the cores from whatever else the process runs, torch for example.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised, and need not be printed as well
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # fused, addition and layer norm take several times as long as apart, and a small int8 model 1.2 times as long
    options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
    with as_user_error(f"onnxruntime cannot load {path}"):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def outputs(opened: InferenceSession, inputs: Inputs) -> tuple[Tensor, ...]:
    """Run an .onnx file on a batch; its outputs in their order.

    Inputs that the file does not have are left out; token types that are not given are zeros.
    """
    given = {}
    for node in opened.get_inputs():
        missing = node.name == "token_type_ids" and node.name not in inputs
        value = torch.zeros_like(inputs["input_ids"]) if missing else inputs[node.name]
        given[node.name] = _as_traced(value).detach().cpu().numpy()
    return tuple(torch.from_numpy(array) for array in opened.run(None, given))


def predictor(opened: InferenceSession) -> Callable[[Batch], Any]:
    """Make of an .onnx file what is evaluated in a model's place: it gives outputs by name, as a task reads them."""
    names = [node.name for node in opened.get_outputs()]

    def predict(batch: Batch) -> Any:
        tensors = [value.to(batch.labels.device) for value in outputs(opened, batch.inputs)]
        results = SimpleNamespace(**dict(zip(names, tensors, strict=True)))
        positions = batch.inputs.get("head_positions")
        if positions is not None:  # the head of a file has run at all positions
            results.logits = results.logits.flatten(0, 1)[positions].unsqueeze(0)
        return results

    return predict


@torch.no_grad()
def compare(model: nn.Module, forward: Forward, batches: Iterable[Inputs]) -> dict[str, float]:
    """Return the `differences` of the outputs of `forward` from the model's, which is set to evaluation.

    Outputs for tokens count where `attention_mask` has a token.
    """
    model.eval()

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs in batches:
            expected = _outputs_of(model, inputs)
            for (name, wanted), given in zip(expected.items(), forward(inputs), strict=True):
                of_tokens = 1 in _free_axes(name, wanted) and "attention_mask" in inputs
                chosen: Any = inputs["attention_mask"].bool() if of_tokens else slice(None)
                yield wanted[chosen], given[chosen]

    return differences(pairs())


def check_onnx(model: nn.Module, path: Path, batches: Iterable[Inputs], threads: int = 1) -> dict[str, float]:
    """Compare a file with its model; UserError where it differs by more than 1e-4 of the largest output, or of 1.

    A file that onnxruntime loads and cannot run is such an error, too.
    """
    opened = session(path, threads)
    cause = f"{type(model).__name__} does something that a trace does not hold, so that it cannot be exported"

    def run(inputs: Inputs) -> Sequence[Tensor]:
        with as_user_error(f"{cause}: onnxruntime cannot run the ONNX model"):
            return outputs(opened, inputs)

    results = compare(model, run, batches)
    if not agree(results, TOLERANCE):
        raise UserError(
            f"the ONNX model's outputs differ from the model's by {results['max_difference']:.3g}, where the largest "
            f"is {results['largest']:.3g}: {cause}"
        )
    return results


def by_torch(model: nn.Module) -> Forward:
    """Make of a model the `Forward` that another model is compared with."""
    return torch.no_grad()(lambda inputs: tuple(_outputs_of(model, inputs).values()))


def quantise(path: Path, target: Path) -> None:
    """Write a copy whose weights are int8, with a scale for each output; activations become int8 as the copy runs.

    Processors without int8 dot products (VNNI) may saturate sums of them: what that costs is measured, not bounded.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)  # it advises steps for models of other exporters
    try:
        quantize_dynamic(path, target, weight_type=QuantType.QInt8, per_channel=True)
    finally:
        logging.disable(logging.NOTSET)


def _as_traced(value: Tensor) -> Tensor:
    """An input in the type that the file takes: whole numbers as int64, whichever type a batch holds them in."""
    return value if value.is_floating_point() else value.long()


class _ByPosition(nn.Module):
    """A model called with its inputs by position, as the exporter does; gives the tensors of its output."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(_outputs_of(self.model, dict(zip(self.names, values, strict=True))).values())


def _outputs_of(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Run a model on those of the inputs that it takes; its outputs by name."""
    accepted = inspect.signature(model.forward).parameters
    options = {"return_dict": True, "use_cache": False, **inputs}
    result = model(**{name: value for name, value in options.items() if name in accepted})
    named = {name: result[name] for name in _OUTPUTS if name in result}
    if not named:
        raise UserError(f"the model gives {', '.join(result)}: an ONNX file is made of one that gives logits")
    return named


def _free_axes(name: str, value: Tensor) -> dict[int, str]:
    """The axes of an output that are free: logits of two axes have a row per example, other outputs one per token."""
    per_example = name == "logits" and value.dim() == 2
    return {0: "batch"} if per_example else {0: "batch", 1: "length"}
