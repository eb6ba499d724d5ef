"""Write docs/recipes.md from the recipe's JSON schema, which `launch/train.py --recipe_schema` prints.

python tools/write_recipe_docs.py
"""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from ds_trainer.engine.engine_file import DEFAULT_MICRO_BATCH, DEFAULTS
from ds_trainer.recipe.recipe import Recipe
from ds_trainer.recipe.task_specs import FAMILIES

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "recipes.md"
HEAD = f"""# Every field of a recipe

A recipe is a JSON file for `--recipe`: the model, the task and the phases of a run. `ds_configs/recipes/` has the
shipped ones. `tools/write_recipe_docs.py` writes this page from the schema that `python launch/train.py
--recipe_schema` prints. An editor that knows this schema completes and checks a recipe; with `--plugin` the schema has
the fields of the plugin, too. `--set path.to.field=JSON` changes a field for one run, and finds phases by their names:
`--set phases.prune.max_steps=100`.

- An unknown key is a mistake, and the message names the key that is spelled most like it.
- A duration takes "int or number". A whole number is optimizer steps, and a number with a point, from 0.0 to 1.0, is a
  share of the phase: `100` is a hundred steps, `0.1` a tenth of the phase. `initial_warmup` and `final_warmup` count
  whole numbers in multiples of `warmup_steps`, as the scripts of movement pruning do.
- A field that "fills" a key of the engine file gives it its number where that file has `"auto"`, or lacks the key. Two
  different numbers are a mistake. Where neither file has one, the learning rate is {DEFAULTS["optimizer.params.lr"]:g},
  gradients are clipped at {DEFAULTS["gradient_clipping"]:g}, nothing decays, and a micro-batch has
  {DEFAULT_MICRO_BATCH} examples.
- A field whose default is empty is not set.
"""
SCHEMA = Recipe.model_json_schema()
SPECS = {entry.spec.__name__: family for family, entry in FAMILIES.items()}
KINDS = {"string": "text", "integer": "int", "number": "number", "boolean": "true, false"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def objects(properties: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Return the name and the path of every object below these fields, in their order."""
    for field, part in properties.items():
        path = above + field + "[]" * (part.get("type") == "array")
        for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(part)):
            yield name, path
            yield from objects(SCHEMA["$defs"][name]["properties"], f"{path}.")


TITLES: dict[str, str] = {}
"""The headings, by the names of the objects; each object has one, at its first place."""
for definition, where in objects(SCHEMA["properties"]):
    TITLES.setdefault(definition, f"`{where}`" + f", the family {SPECS.get(definition)}" * (definition in SPECS))


def values(part: dict[str, Any]) -> str:
    """Say what a field takes."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        anchor = re.sub(r"[^\w ]", "", TITLES[name].lower()).replace(" ", "-")
        return f"[{SPECS.get(name, 'object')}](#{anchor})"
    if "anyOf" in part or "oneOf" in part:
        options = part.get("anyOf") or part["oneOf"]
        return " or ".join(values(option) for option in options if option.get("type") != "null")
    if "enum" in part or "const" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part.get("enum") or [part["const"]])
    if part["type"] == "array":
        size = f"{part['maxItems']} of " if part.get("minItems") == part.get("maxItems", 0) else ""
        return f"list of {size}{values(part['items'])}"
    if part["type"] == "object":
        inner = part["additionalProperties"]
        return f"object of {values(inner)}" if isinstance(inner, dict) else "object"
    limits = {part[key]: f"{sign} {part[key]}" for key, sign in BOUNDS.items() if part.get(key, 2**63) < 2**31}
    return f"{KINDS[part['type']]} {', '.join(limits.values())}".strip()


def section(title: str, words: str, properties: dict[str, Any], required: list[str]) -> str:
    """Return a heading, the docstring of the class, and a table of these fields."""
    rows = ["| field | takes | default | |", "|---|---|---|---|"]
    for name, field in properties.items():
        plain = isinstance(field.get("default"), bool | int | float | str | list) or name == "loss"
        default = "required" if name in required else f"`{json.dumps(field['default'])}`" if plain else ""
        description = re.sub(r"([*|])", r"\\\1", field["description"])
        rows.append(f"| `{name}` | {values(field)} | {default} | {description} |")
    return "\n".join([f"\n## {title}\n", f"{words}\n", *rows])


def page() -> str:
    """Return the page: the recipe, then every object below it, once."""
    tasks = [SCHEMA["$defs"][name]["properties"] for name in SPECS]
    shared = {field: part for field, part in tasks[0].items() if all(other.get(field) == part for other in tasks)}
    parts = [HEAD.rstrip(), section("The recipe", SCHEMA["description"], SCHEMA["properties"], SCHEMA["required"])]
    for name, title in TITLES.items():
        if title == TITLES[next(iter(SPECS))]:
            parts.append(section("`task`, every family", "`task.name` selects the family.", shared, []))
        spec, known = SCHEMA["$defs"][name], shared if name in SPECS else {}
        own = {field: part for field, part in spec["properties"].items() if field not in known}
        parts.append(section(title, spec["description"], own, spec.get("required", [])))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
