"""DeepSpeed's keys, from `keys.json`: compare an engine file with the table, and look values up in a file.

`keys` has an object for each section and, for each value, the JSON types that it may have, with "auto" where ds_trainer
or DeepSpeed fills it. A section with "*" takes other keys too. `refused` has the keys that DeepSpeed accepts, or once
accepted, and that cannot have an effect in ds_trainer: each with what to do instead. Values beyond their types are left
to DeepSpeed's own check (`engine.py`), and combinations that it does not see to `engine_file.py`.
"""

import difflib
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_trainer.files.messages import shown

_WORDS = {"int": "a whole number", "number": "a number", "bool": "true or false", "str": "text"}
_WORDS["list"] = "a list"


@functools.cache
def key_table() -> dict[str, Any]:
    """Return the table: `keys`, and the `refused` ones by their dotted path."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def key_mistakes(section: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Compare a section at the dotted `path` (with its last dot) with the entries of the table."""
    for key, value in section.items():
        here, entry = f"{path}{key}", known.get(key, known.get("*"))
        if here in key_table()["refused"]:
            if _asks_for_something(value):
                yield f"{here} is refused, remove it: {key_table()['refused'][here]}"
        elif entry is None:
            # at the top level, where DeepSpeed ignores unknown keys, users of plain JSON keep their comments
            if path or not str(key).startswith(("_", "//", "#")):
                (meant,) = difflib.get_close_matches(str(key), known, 1, cutoff=0)
                yield f"{here} is not a key that DeepSpeed knows: did you mean {meant}?"
        elif isinstance(entry, dict) and isinstance(value, dict):
            yield from key_mistakes(value, entry, f"{here}.")
        elif isinstance(entry, dict):
            if value is not None or not path:  # DeepSpeed takes null for an offload that is not wanted
                yield f"{here} is {shown(value)}: write an object"
        elif is_auto(value) and not {"auto", "str"} & {*entry.split("|")}:
            yield f'{here} is "auto", which nothing can fill: write a value'
        elif entry and not any(_is_of_type(value, kind) for kind in entry.split("|")):
            allowed = " or ".join(_WORDS[kind] for kind in entry.split("|") if kind in _WORDS)
            yield f"{here} is {shown(value)}: write {allowed}"


def without_refused(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a copy of a file without refused keys that ask for nothing: DeepSpeed refuses some, or acts on them."""
    return {
        key: without_refused(value, f"{path}{key}.") if isinstance(value, dict) else value
        for key, value in section.items()
        if f"{path}{key}" not in key_table()["refused"]
    }


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None where it is absent or "auto"."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return None if is_auto(value) else value


def flag_at(config: Mapping[str, Any], path: str) -> bool | None:
    """Return true or false for a flag at a dotted path, also for 1 and 0; None for anything else."""
    value = value_at(config, path)
    return bool(value) if isinstance(value, bool | int) else None


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage; 0 where the file has none."""
    stage = value_at(config, "zero_optimization.stage")
    return int(stage) if is_number(stage) else 0


def offloads(config: Mapping[str, Any], part: str) -> bool:
    """Whether the "optimizer" or the "param" is offloaded."""
    return value_at(config, f"zero_optimization.offload_{part}.device") in ("cpu", "nvme")


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the precision of the model's weights: "fp16", "bf16" or "fp32"."""
    return next((kind for kind in ("fp16", "bf16") if flag_at(config, f"{kind}.enabled")), "fp32")


def is_auto(value: Any) -> bool:
    """Whether a value is the word "auto"."""
    return isinstance(value, str) and value == "auto"


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _asks_for_something(value: Any) -> bool:
    """Whether the value of a refused key is more than nothing or false; an empty object turns some sections on."""
    if not isinstance(value, dict):
        return bool(value) and not is_auto(value)
    return _asks_for_something(value.get("enabled", not value or any(map(_asks_for_something, value.values()))))


def _is_of_type(value: Any, kind: str) -> bool:
    if kind in ("int", "number"):
        return is_number(value) and (kind == "number" or value == int(value))
    if kind == "bool":
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind in ("null", "auto"):
        return value is None if kind == "null" else is_auto(value)
    return isinstance(value, {"str": str, "list": list}[kind])
