"""Which of DeepSpeed's keys have an effect in ds_trainer: refused, honoured with another key beside it, or honoured.

The verdicts are in `verdicts.json`, by key. A `refused` key cannot have an effect in ds_trainer, or would break a run:
it is an error that says what to do instead. A key under `needs` has no effect in files that do not meet a condition:
since one file often serves several stages and machines, it is named in a warning. Every other key of `keys.json` is
honoured. `tests/tools/write_engine_docs.py` writes the table of `docs/engine_files.md` from both files.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_trainer.engine.keys import is_auto, key_table, offloads, precision_of, value_at, zero_stage


@functools.cache
def verdict_table() -> dict[str, Any]:
    """Return the table: `refused`, by key what to do instead, and `needs`, each a condition and its keys.

    A condition is there twice: in `words`, and as `when`, a list of alternatives. Each of them has the values that a
    path of the file may have ("none" where the file lacks it), or one of the facts of `_meets`.
    """
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def refusals(config: dict[str, Any]) -> Iterator[str]:
    """Report each refused key that requests something, in a file as it was read."""
    for path, name, _ in _requests(config, key_table()["keys"]):
        instead = verdict_table()["refused"].get(name)
        if instead:
            yield f"{path} is refused, remove it: {instead}"


def idle_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys of a resolved config that have no effect in it, each with what it needs."""
    known, idle = key_table()["keys"], {}
    for path, name, value in _requests(config, known):
        needs = [need for need in verdict_table()["needs"] if name in need["keys"]]
        unmet = [need["words"] for need in needs if not _meets(config, need["when"])]
        if unmet:
            idle[path] = unmet[0]
        elif isinstance(value, dict) and "enabled" not in value:
            switch = known.get(name, {}).get("keys", {}).get("enabled", {})
            if switch.get("default") is False:
                idle[path] = f"{path}.enabled true"
    sections = tuple(f"{path}." for path in idle)
    return [f"{path} (needs {words})" for path, words in idle.items() if not path.startswith(sections)]


def without_refused(section: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the config without refused keys that request nothing: DeepSpeed refuses some of them, or acts on them."""
    return {
        key: without_refused(value, f"{path}{key}.") if isinstance(value, dict) else value
        for key, value in section.items()
        if f"{path}{key}" not in verdict_table()["refused"]
    }


def _meets(config: dict[str, Any], alternatives: list[dict[str, list[str]]]) -> bool:
    """Whether a file has, for one of the alternatives, one of the listed values at every path, in any case."""
    facts = {"stage": zero_stage(config), "precision": precision_of(config)}
    facts |= {f"offload_{part}": offloads(config, part) for part in ("optimizer", "param")}

    def value(path: str) -> str:
        return str(facts[path] if path in facts else value_at(config, path)).lower()

    return any(all(value(path) in values for path, values in items.items()) for items in alternatives)


def _requests(
    section: dict[str, Any], known: dict[str, Any], path: str = "", parent: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name without aliases, and value of each key that requests something, sections before their keys."""
    for key, value in section.items():
        entry = known.get(key, {})
        if _requests_something(value, entry):
            here, name = f"{path}{key}", f"{parent}{entry.get('alias_of', key)}"
            yield here, name, value
            if isinstance(value, dict):
                yield from _requests(value, entry.get("keys", {}), f"{here}.", f"{name}.")


def _requests_something(value: Any, entry: dict[str, Any]) -> bool:
    """Whether a value differs from what holds without the key: not for "auto", the default, or a section turned off."""
    if is_auto(value) and not entry.get("own_auto"):
        return False
    if isinstance(value, dict):
        if "enabled" in value and not is_auto(value["enabled"]):
            return bool(value["enabled"])
        if entry.get("on_by_presence"):
            return True
        inner = (_requests_something(item, entry.get("keys", {}).get(key, {})) for key, item in value.items())
        return value.get("device") != "none" and any(inner)
    return value is not None and value != entry.get("default", False) and value != []
