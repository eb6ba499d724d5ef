"""The cut of a phase: what a one-shot cut removes before training, by which method, and how much of it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.fields import Positive, Strict, Whole, only

CutMethod = Literal["obs", "magnitude", "wanda", "fisher"]
KeptShare = Annotated[float, Field(gt=0, lt=1)]
Size = Annotated[float, Field(strict=True, gt=0, lt=1)] | Positive
"""A share to keep, or with an int how many to keep."""
SIZES = ("layers", "width", "heads", "neurons")
"""The fields of a cut that say a size of the whole model."""
STRUCTURED = ("hybrid", "head", "neuron")
"""The granularities that make matrices smaller. The others write zeros."""


def _are_tokens(keep: Any) -> bool:
    return not keep.isdigit() if isinstance(keep, str) else type(keep) is int and keep > 0


def _one_share(keep: Any) -> Any:
    if isinstance(keep, list):
        raise UserError("a list was removed in 0.3: write a phase for each share, as the example in docs/cuts.md does")
    return keep


def _on_or_off(reconstruct: Any) -> Any:
    return ({} if reconstruct else None) if isinstance(reconstruct, bool) else reconstruct


_TOKENS = only(_are_tokens, 'give "seen", a number of tokens without quotes, or the name of a file that lists them')


class VocabularySpec(Strict):
    """Which tokens a model keeps. The special tokens, and those that spell any text, always stay."""

    keep: Annotated[Literal["seen"] | Positive | str, _TOKENS] = Field(
        "seen", description='"seen" in the training texts, the most frequent N, or a file with a token in each line'
    )

    @property
    def file(self) -> Path | None:
        """The file that lists the tokens, if one does."""
        return Path(self.keep) if isinstance(self.keep, str) and self.keep != "seen" else None


class ReconstructSpec(Strict):
    """The training of each layer of a cut model to the dense model's hidden states (arXiv 2510.14444)."""

    tokens: Positive = Field(
        32_768, description="about how many training tokens the layers are trained and compared on"
    )
    steps: Positive = Field(300, description="steps of Adam in each layer, of two texts, or more of about 256 tokens")
    learning_rate: float = Field(2e-3, gt=0, description="Adam's rate, which falls linearly to 0")


class CutSpec(Strict):
    """A cut from a calibration set, without labels, by optimal brain surgeon (arXiv 2302.04089) or its rivals."""

    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "contiguous": (False, "leave it out, and the layers go that cost least, wherever they are"),
        "layer_criterion": ("loss", "leave it out, and the layers go without which the answers change least"),
    }

    granularity: Literal["hybrid", "head", "neuron", "weight", "block", "2:4"] = Field(
        "hybrid",
        description='"hybrid" is heads and neurons, which are cut out; weight, block and 2:4 leave zeros',
    )
    layers: Size | None = Field(None, description="share of the layers to keep, or how many; instead of keep")
    width: Size | None = Field(None, description="of the residual stream: share to keep, or size (arXiv 2407.14679)")
    heads: Size | None = Field(None, description="share of a layer's heads, or how many groups with one key and value")
    neurons: Size | None = Field(None, description="share of each layer's neurons to keep, or how many")
    keep: Annotated[KeptShare | None, BeforeValidator(_one_share)] = Field(None, description="share to keep (2:4: 0.5)")
    target_flops: KeptShare | None = Field(None, description="share of the encoder's FLOPs to keep; instead of keep")
    target_latency: KeptShare | None = Field(None, description="share of the encoder's measured seconds to keep")
    cost_tokens: Positive = Field(128, description="length in tokens of the example whose FLOPs or seconds are counted")
    uniform: bool = Field(False, description="the same share in every layer, not shares chosen by the loss they add")
    method: CutMethod = Field(
        "obs",
        description="how to choose; obs is optimal brain surgeon for heads and neurons, and ADMM (arXiv 2406.07831), "
        "which has the same aim, for weight, block and 2:4; wanda and fisher are for the latter alone",
    )
    update_weights: bool = Field(True, description="refit the weights that are kept by least squares")
    calibration_examples: Positive = Field(512, description="training examples that the cut is fitted to")
    damping: float = Field(0.01, gt=0, le=10, description="share of the mean variance that is added to each input's")
    block_shape: list[Positive] = Field([32, 32], min_length=2, max_length=2, description="outputs, inputs of a block")
    min_heads: Whole = Field(0, description="heads, or groups that share a key and value, to keep in every layer")
    reconstruct: Annotated[ReconstructSpec | None, BeforeValidator(_on_or_off)] = Field(
        default_factory=ReconstructSpec,
        description="train each layer to give the dense model's states; false: do not, as without update_weights",
    )
    vocabulary: VocabularySpec | None = Field(None, description="also keep only some tokens, or this alone")

    @property
    def targets(self) -> list[str]:
        """The names of the fields that say how much to keep; a valid spec has one of them, or none."""
        names = ("keep", "target_flops", "target_latency")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def sizes(self) -> dict[str, float | int]:
        """The sizes of the whole model that are cut, the same in every layer, by the names of their fields."""
        return {name: size for name in SIZES if (size := getattr(self, name)) is not None}

    @property
    def cuts_layers(self) -> bool:
        """Whether layers or parts of them are removed, and not only tokens."""
        return bool(self.targets or self.sizes)

    @property
    def cuts_blocks(self) -> bool:
        """Whether matrices become smaller, and not sparse."""
        return self.cuts_layers and self.granularity in STRUCTURED

    @property
    def share(self) -> float:
        """The share to keep, of whatever the spec counts."""
        return float(getattr(self, self.targets[0]))

    @property
    def judges_answers(self) -> bool:
        """Whether the cut depends on the answers of the model, whose head must then be trained."""
        if self.sizes:
            return self.layers is not None
        if self.cuts_blocks or not self.cuts_layers:
            return self.cuts_blocks and not self.uniform
        by_loss = not self.uniform and self.granularity != "2:4" and self.method != "magnitude"
        return by_loss or self.method == "fisher"

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("granularity") == "model":
            raise UserError(
                'granularity "model" was removed in 0.3: write sizes, such as "layers": 0.75, "neurons": 0.6'
            )
        keep = {"keep": 0.5} if data.get("granularity") == "2:4" else {}
        return keep | ({"reconstruct": False} if data.get("update_weights") is False else {}) | data

    def mistakes(self) -> Iterator[str]:
        """Say what makes no sense together: amounts, and what they are of."""
        amounts, structured, sizes = self.targets, self.granularity in STRUCTURED, " and ".join(self.sizes)
        targets = [name for name in amounts if name != "keep"]
        if not amounts and not sizes and self.vocabulary is None:
            known = f"keep, target_flops, target_latency, vocabulary, or sizes of the model: {', '.join(SIZES)}"
            yield f"nothing says how much to keep: set {known}"
        if sizes and (amounts or self.granularity != "hybrid" or self.min_heads):
            others = "keep, targets, granularity and min_heads"
            yield f"{sizes}: a cut to sizes of the whole model goes without {others}: drop these, or the sizes"
        if len(amounts) > 1:
            yield f"{' and '.join(amounts)} are set: keep one"
        if targets and not structured:
            yield f"{targets[0]} counts what heads and neurons cost: set granularity to hybrid, head or neuron"
        if targets and self.uniform:
            yield f"uniform keeps the same share in every layer, and {targets[0]} chooses among all layers: keep one"
        if structured and self.method in ("wanda", "fisher"):
            yield f"method {self.method} scores single weights, and granularity is {self.granularity}: take obs"
        if self.min_heads and self.granularity not in ("hybrid", "head"):
            yield f"min_heads is {self.min_heads}, and no heads are cut: drop it"
        if self.granularity == "2:4" and self.keep != 0.5:
            yield f"keep is {self.keep}, and 2:4 keeps half: leave it out or write 0.5"
