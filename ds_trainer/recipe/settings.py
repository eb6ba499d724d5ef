"""`--set path.to.field=JSON`: change one field of a recipe or an engine file before it is checked."""

import json
from typing import Any

from ds_trainer.files.messages import cut, listed, shown
from ds_trainer.ranks.failures import UserError


def apply_to_task(task: dict[str, Any], setting: str) -> None:
    """Change the field of a task that a `--set` names: by `task.metrics`, as in a recipe, or by `metrics` alone."""
    path, value = parse_setting(setting)
    inside = path[1:] if path[0] == "task" and len(path) > 1 else path
    assign(task, inside, value, f'--set "{setting}"')


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """Split PATH=JSON into the parts of the path and the value. Raise UserError if it has another form.

    A value that is not JSON is taken as text, since launchers strip quotes on the way.
    """
    path, equals, text = setting.partition("=")
    parts = path.split(".")
    if not equals or not all(parts):
        raise UserError(f'--set "{cut(setting, 200)}": write PATH=JSON, e.g. phases.prune.max_steps=100')
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise UserError(f'--set "{cut(setting, 200)}": NaN and Infinity are no numbers in JSON') from None
    return parts, value


def assign(target: Any, path: list[str], value: Any, source: str) -> None:
    """Set a nested value in place, and make the objects that are missing on the way.

    Elements of a list are chosen by their index, by their "name", or all of them by "*". `source` says in errors where
    the value comes from. Raise UserError where the path leads into something else.
    """
    part, rest = path[0], path[1:]
    if isinstance(target, list):
        for index in _chosen(target, part, source):
            if rest:
                assign(target[index], rest, value, source)
            else:
                target[index] = value
    elif not isinstance(target, dict):
        raise UserError(f"{source}: {shown(target)} is no object, and so it has no field {shown(part)}")
    elif not rest:
        target[part] = value
    else:
        target[part] = {} if target.get(part) is None else target[part]
        assign(target[part], rest, value, source)


def _chosen(items: list[Any], part: str, source: str) -> list[int]:
    names = [str(item.get("name", "")) if isinstance(item, dict) else "" for item in items]
    chosen = [index for index, name in enumerate(names) if part in ("*", name, str(index))]
    if not chosen:
        known = listed(name or index for index, name in enumerate(names)) or "nothing"
        raise UserError(f"{source}: the list has no {shown(part)}; it has {known}")
    return chosen
