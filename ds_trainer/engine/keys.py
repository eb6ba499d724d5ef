"""The table of DeepSpeed's keys, `keys.json`: compare an engine file with it, and look values up in a file.

`tests/tools/dump_engine_keys.py` writes the table from DeepSpeed's source. An entry has the JSON `types` and the `enum`
values of a key, its limits, `items` and `length` of a list, `keys` of a section, `open` for a section that takes other
keys too, `alias_of` and `deprecated` for a second name, `default`, `on_by_presence` for a section that is on wherever
it stands, and what "auto" means: `filled` by ds_trainer, `own_auto` for DeepSpeed's own word, `auto_is_default` for a
section in which DeepSpeed drops "auto" and takes the default. The table knows nothing of combinations of keys
(`engine_file.py`), nor which keys have an effect in ds_trainer (`verdicts.py`).
"""

import difflib
import functools
import json
import operator
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_trainer.files.messages import shown

_WORDS = {"int": "a whole number", "number": "a number", "bool": "true or false", "str": "text"}
_WORDS |= {"list": "a list", "dict": "an object", "null": "null"}
_LIMITS = {
    "above": ("above", operator.gt),
    "min": ("of at least", operator.ge),
    "below": ("below", operator.lt),
    "max": ("of at most", operator.le),
}


@functools.cache
def key_table() -> dict[str, Any]:
    """Return the table: `keys`, the `removed` ones, and the optimizers and schedulers with their parameters."""
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def key_mistakes(
    section: dict[str, Any], known: dict[str, Any], path: str = "", auto_is_default: bool = False
) -> Iterator[str]:
    """Compare a section at the dotted `path` (with its last dot) with the entries of the table."""
    for key, value in section.items():
        here = f"{path}{key}"
        if key in known:
            yield from _value_mistakes(value, known[key], here, auto_is_default)
            newer = known[key].get("alias_of") or known[key].get("deprecated")
            if newer in section:
                yield f"{here} and {path}{newer} are one setting: keep the second"
        # DeepSpeed ignores unknown keys at the top level, where users of plain JSON keep their comments
        elif here not in key_table()["removed"] and (path or not str(key).startswith(("_", "//", "#"))):
            yield unknown_key(here, str(key), known)


def unknown_key(path: str, key: str, known: Collection[str]) -> str:
    """Report a key that is not among `known`, with the nearest one, or with the section that it belongs to."""
    if not difflib.get_close_matches(key, known, 1):
        homes = [home for home in all_paths(key_table()["keys"]) if home.split(".")[-1] == key]
        if homes:
            return f"{path} is not a key that DeepSpeed knows there: it belongs at {' or '.join(homes[:3])}"
    return f"{path} is not a key that DeepSpeed knows: did you mean {nearest_of(key, known)}?"


def nearest_of(name: str, known: Collection[str]) -> str:
    """Return the known name most like this one, ignoring case."""
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())


def all_paths(known: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted path of every key in the table, sections before what is in them."""
    for key, entry in known.items():
        yield f"{path}{key}"
        yield from all_paths(entry.get("keys", {}), f"{path}{key}.")


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
    if config.get("zero_optimization") is True:  # the format of 2020: true is stage 1
        return 1
    stage = value_at(config, "zero_optimization.stage")
    return int(stage) if is_number(stage) else 0


def offloads(config: Mapping[str, Any], part: str) -> bool:
    """Whether the "optimizer" or the "param" is offloaded, in today's or in the deprecated spelling."""
    deprecated = "cpu_offload" if part == "optimizer" else "cpu_offload_param"
    device = value_at(config, f"zero_optimization.offload_{part}.device")
    return device in ("cpu", "nvme") or bool(flag_at(config, f"zero_optimization.{deprecated}"))


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the precision of the model's weights: "fp16", "bf16" or "fp32"."""
    sections = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    return next((kind for name, kind in sections.items() if flag_at(config, f"{name}.enabled")), "fp32")


def is_auto(value: Any) -> bool:
    """Whether a value is the word "auto"."""
    return isinstance(value, str) and value == "auto"


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _value_mistakes(value: Any, entry: dict[str, Any], path: str, auto_is_default: bool) -> Iterator[str]:
    if is_auto(value):
        # DeepSpeed drops "auto" inside its pydantic sections; but no user means stage 0 by the stage "auto"
        droppable = auto_is_default and path != "zero_optimization.stage"
        if not (droppable or entry.get("own_auto") or entry.get("filled")):
            yield f'{path} is "auto", which nothing can fill: write {_allowed(entry)}'
    elif not _is_allowed(value, entry):
        yield f"{path} is {shown(value)}: write {_allowed(entry)}"
    elif isinstance(value, dict) and "keys" in entry:
        inner = {key: value[key] for key in value if not entry.get("open") or key in entry["keys"]}
        below = auto_is_default or entry.get("auto_is_default", False)
        yield from key_mistakes(inner, entry["keys"], f"{path}.", below)
    elif isinstance(value, list) and "items" in entry:
        for index, item in enumerate(value):
            yield from _value_mistakes(item, entry["items"], f"{path}[{index}]", False)


def _is_allowed(value: Any, entry: dict[str, Any]) -> bool:
    """Whether a value has one of the entry's types, is one of its `enum` and within its limits."""
    types = entry.get("types")
    if types and not any(_is_of_type(value, kind) for kind in types):
        return False
    if "enum" in entry and value is not None:
        if entry.get("any_case") and isinstance(value, str):
            return value.lower() in [name.lower() for name in entry["enum"]]
        return value in entry["enum"]
    if isinstance(value, list):
        return len(value) == entry.get("length", len(value))
    limits = [(test, entry[limit]) for limit, (_, test) in _LIMITS.items() if limit in entry]
    return not is_number(value) or all(test(value, limit) for test, limit in limits)


def _is_of_type(value: Any, kind: str) -> bool:
    if kind in ("int", "number"):
        return is_number(value) and (kind == "number" or value == int(value))
    if kind == "bool":
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind == "null":
        return value is None
    return isinstance(value, {"str": str, "list": list, "dict": dict}[kind])


def _allowed(entry: dict[str, Any]) -> str:
    """Describe what an entry takes, for the end of a message."""
    if "enum" in entry:
        return "one of " + ", ".join(shown(value) for value in entry["enum"])
    kinds = " or ".join(_WORDS[kind] for kind in entry.get("types", [])) or "a value"
    limits = "".join(f" {word} {entry[limit]}" for limit, (word, _) in _LIMITS.items() if limit in entry)
    items = f" of {entry.get('length', '')} values, each {_allowed(entry['items'])}" if "length" in entry else ""
    return kinds + limits + items
