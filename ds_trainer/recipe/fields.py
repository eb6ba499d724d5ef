"""The types of a recipe's fields, each with its unit and the message for a mistake."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from ds_trainer.files.messages import shown
from ds_trainer.ranks.failures import UserError, raise_mistakes


def only(fits: Callable[[Any], bool], allowed: str) -> BeforeValidator:
    """Accept the values that fit, with one message for all others: pydantic has one for each member of a union."""

    def check(value: Any) -> Any:
        if fits(value):
            return value
        # the caller adds a value that is neither
        instead = f", not {shown(value)}" if isinstance(value, dict | list) else ""
        raise UserError(f"{allowed}{instead}")

    return BeforeValidator(check)


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


_WHOLE_OR_FRACTION = only(
    lambda value: _is_whole(value) or (isinstance(value, float) and 0 <= value <= 1),
    "write a whole number, or a fraction of the phase from 0.0 to 1.0",
)
_NAME_OR_NUMBER = only(
    lambda value: _is_whole(value) or isinstance(value, str),
    "write the name of a column, or without a header its number, from 0",
)

Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(strict=True, ge=0, lt=1)]
"""A part of a whole that is not all of it."""
Steps = Annotated[int | float, _WHOLE_OR_FRACTION]
"""An int is optimizer steps, a float in [0, 1] a fraction of the phase."""
Units = Annotated[int | float, _WHOLE_OR_FRACTION]
"""An int is multiples of the phase's `warmup_steps` (movement pruning's own unit), a float a fraction of the phase."""
Column = Annotated[str | int, _NAME_OR_NUMBER]
"""A column of a table: a str is its name, an int its number, from 0."""
Positive = Annotated[int, Field(strict=True, gt=0)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """A model in which unknown keys are mistakes, and which cannot be changed after it is checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """The fields of older versions: for each the value that changed nothing, and what replaces the others."""

    def mistakes(self) -> Iterable[str]:
        """Say which fields do not go together; each of them is valid by itself."""
        return ()

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        raise_mistakes(self.mistakes())
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_known_fields(cls, data: Any) -> Any:
        """Drop the removed fields that change nothing, which stand in every recipe that a run has written.

        An unknown field gets its hint into its name, by which pydantic reports it among the other mistakes.
        """
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        gone = {name: field for name, field in cls.removed.items() if name not in known}  # a plugin may bring it back
        other = [name for name, (idle, _) in gone.items() if data.get(name) not in (None, idle)]
        raise_mistakes(f"{name} was removed in 0.3: {gone[name][1]}" for name in other)
        return {
            name if name in known else f"{name}: unknown key; {did_you_mean(name, known)}": value
            for name, value in data.items()
            if name not in gone
        }


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint about an unknown name: the known one that is nearest, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(sorted(known))}"
