"""`--set path.to.field=JSON`: change one field of a recipe or an engine file before it is checked."""

from __future__ import annotations

import json
from typing import Any

from ds_trainer.files.json_file import value_faults
from ds_trainer.files.messages import cut, listed, shown
from ds_trainer.ranks.failures import UserError

_MOST_PARTS = 50


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """Split PATH=JSON; what is no JSON is taken as text, for launchers strip quotes on the way. Raises ValueError."""
    path, equals, text = setting.partition("=")
    said = f'--set "{cut(setting, 200)}"'
    if not equals or not all(path.split(".")):
        raise UserError(f"{said}: write PATH=JSON, e.g. phases.prune.max_steps=100")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    except (RecursionError, ValueError):  # it is JSON, but nested too deeply or with thousands of digits
        raise UserError(f"{said}: no field takes a value that is nested so deeply, or of so many digits") from None
    parts = path.split(".")
    if len(parts) > _MOST_PARTS:
        raise UserError(f"{said}: the path has {len(parts):,} parts, and no field is so deep")
    faults = value_faults({path: value})
    if faults:
        raise UserError("\n".join(f"{said}: {fault}" for fault in faults))
    return parts, value


def assign(target: dict[str, Any], path: list[str], value: Any, who: str) -> None:
    """Set a nested value in place, making objects on the way; list elements go by index, "name", or all by *.

    `who` says in errors what asked for it. Raises ValueError for an element that is not there.
    """
    _assign(target, path, value, f"{who}: ")


def _assign(target: Any, path: list[str], value: Any, who: str) -> None:
    part, rest = path[0], path[1:]
    if isinstance(target, list):
        for index in _chosen(target, part, who):
            if rest:
                _assign(target[index], rest, value, who)
            else:
                target[index] = value
    elif not isinstance(target, dict):
        raise UserError(f"{who}{shown(part)} is looked for inside {shown(target)}, which is no object")
    elif not rest:
        target[part] = value
    else:
        if target.get(part) is None:
            target[part] = {}
        _assign(target[part], rest, value, who)


def _chosen(items: list[Any], part: str, who: str) -> list[int]:
    names = [str(item.get("name", "")) if isinstance(item, dict) else "" for item in items]
    chosen = [index for index, name in enumerate(names) if part in ("*", name, str(index))]
    if not chosen:
        known = listed(name or index for index, name in enumerate(names)) or "none"
        raise UserError(f"{who}there is no {shown(part)} in the list; there are {known}")
    return chosen
