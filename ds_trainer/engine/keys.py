"""Compare a config with the table of every key that DeepSpeed knows: names, JSON types, ranges.

The table, `engine_keys.json`, is written from DeepSpeed by `tests/tools/dump_engine_keys.py`. An entry has
the `types` and `enum` values that it takes, its limits, `items` of a list, `keys` of a section, `open` where
other keys may stand too, `alias_of` and `deprecated` for a second name, `default`, `on_by_presence` for a section
that is on wherever it stands, and how "auto" is meant: `own_auto` where it is DeepSpeed's own word,
`auto_is_default` for a section in which DeepSpeed drops it and takes the default. Does not know what keys mean
together (see `engine_blocks.py`), nor which have an effect here (see `engine_verdicts.py`).
"""

import difflib
import functools
import json
import operator
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ds_trainer.files.messages import shown

AUTO = "auto"
# Filled from the recipe although DeepSpeed itself has no use for "auto" there.
FILLED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "torch_autocast.enabled",
}


@functools.cache
def key_table() -> dict[str, Any]:
    """The table: `keys`, those that are `removed`, the names of optimizers and schedulers with their parameters."""
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def key_mistakes(
    block: dict[str, Any], known: dict[str, Any], path: str = "", auto_is_default: bool = False
) -> Iterator[str]:
    """What is wrong with a section at the dotted `path` (with its last dot), by the table's entries."""
    removed = key_table()["removed"]
    for key, value in block.items():
        here = f"{path}{key}"
        if key in known:
            yield from _value_mistakes(value, known[key], here, auto_is_default)
            replaced_by = known[key].get("alias_of") or known[key].get("deprecated")
            if replaced_by in block:
                yield f"{here} and {path}{replaced_by} are one setting: keep the second"
        # DeepSpeed passes over unknown keys at the top level, where plain JSON users keep their comments
        elif here not in removed and (path or not str(key).startswith(("_", "//", "#"))):
            yield unknown_key(here, str(key), known)


def unknown_key(path: str, key: str, known: Collection[str]) -> str:
    """The mistake of a key that is not among `known`, with the nearest, or the place where it belongs."""
    if not difflib.get_close_matches(key, known, 1):
        homes = [home for home in _all_paths(key_table()["keys"]) if home.split(".")[-1] == key]
        if homes:
            return f"{path} is not a key that DeepSpeed knows there: it belongs at {' or '.join(homes[:3])}"
    return f"{path} is not a key that DeepSpeed knows: did you mean {nearest_of(key, known)}?"


def nearest_of(name: str, known: Collection[str]) -> str:
    """The known name most like this one, case aside."""
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())


def is_batch_number(value: Any) -> bool:
    """A whole number above 0."""
    return is_number(value) and value == int(value) and value > 0


def flag_at(config: dict[str, Any], path: str) -> bool | None:
    """True or false at a dotted path, or 1 or 0; None where it is absent, "auto" or something else."""
    value = value_at(config, path)
    return bool(value) if isinstance(value, bool | int) else None


def _all_paths(known: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, entry in known.items():
        yield f"{path}{key}"
        yield from _all_paths(entry.get("keys", {}), f"{path}{key}.")


def _value_mistakes(value: Any, entry: dict[str, Any], path: str, auto_is_default: bool) -> Iterator[str]:
    if is_auto(value):
        # DeepSpeed drops "auto" inside its pydantic sections; a stage that is silently 0 is no one's wish
        droppable = auto_is_default and path != "zero_optimization.stage"
        if not (droppable or entry.get("own_auto") or path in FILLED):
            yield f'{path} is "auto", which nothing can fill: write {_allowed(entry)}'
        return
    types = entry.get("types")
    if types and not any(_is_of_type(value, kind) for kind in types):
        yield f"{path} is {shown(value)}: write {_allowed(entry)}" + _hint(value)
    elif isinstance(value, dict):
        if "keys" in entry:
            is_open = entry.get("open", False)
            inner = {key: value[key] for key in value if not is_open or key in entry["keys"]}
            below = auto_is_default or entry.get("auto_is_default", False)
            yield from key_mistakes(inner, entry["keys"], f"{path}.", below)
    elif isinstance(value, list) and "items" in entry:
        for index, item in enumerate(value):
            yield from _value_mistakes(item, entry["items"], f"{path}[{index}]", False)
    elif value is not None and not _is_within(value, entry):
        yield f"{path} is {shown(value)}: write {_allowed(entry)}"


def _is_of_type(value: Any, kind: str) -> bool:
    if kind == "int":
        return is_number(value) and value == int(value)
    if kind == "bool":
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind == "number":
        return is_number(value)
    if kind == "null":
        return value is None
    return isinstance(value, {"str": str, "list": list, "dict": dict}[kind])


def _is_within(value: Any, entry: dict[str, Any]) -> bool:
    if "enum" in entry:
        allowed = entry["enum"]
        if entry.get("any_case") and isinstance(value, str):
            return value.lower() in [name.lower() for name in allowed]
        return value in allowed
    if not is_number(value):
        return True
    tests = {"above": operator.gt, "min": operator.ge, "below": operator.lt, "max": operator.le}
    return all(test(value, entry[limit]) for limit, test in tests.items() if limit in entry)


def _allowed(entry: dict[str, Any]) -> str:
    if "enum" in entry:
        return "one of " + ", ".join(shown(value) for value in entry["enum"])
    words = {
        "int": "a whole number",
        "number": "a number",
        "bool": "true or false",
        "str": "text",
        "list": "a list",
        "dict": "an object",
        "null": "null",
    }
    kinds = " or ".join(words[kind] for kind in entry.get("types", [])) or "a value"
    limits = {"above": "above", "min": "of at least", "below": "below", "max": "of at most"}
    return kinds + "".join(f" {word} {entry[limit]}" for limit, word in limits.items() if limit in entry)


def _hint(value: Any) -> str:
    if isinstance(value, str) and value.rstrip().endswith(","):
        return " (text without quotes runs to the end of its line, comma included)"
    return ""


def value_at(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path; None where it is absent or "auto"."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return None if is_auto(value) else value


def is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def is_number(value: Any) -> bool:
    """A number that a float can be; true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
