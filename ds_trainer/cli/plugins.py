"""Tasks and techniques of a user's own, beside those of this library.

A plugin is a module with a dict `TASKS`, or `TECHNIQUES`, or both, of classes by their name in the recipe. Each class
has the pydantic model of its entry in the recipe as `Spec`. A plugin is code, so it is named by `--plugin` or from
Python, and never by a recipe, which is data that may come from anywhere.
"""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from pydantic.fields import FieldInfo

from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import Phase, Recipe, TaskParser
from ds_trainer.recipe.task_specs import FAMILIES, Family
from ds_trainer.recipe.technique_specs import Techniques
from ds_trainer.tasks.task import Task
from ds_trainer.tasks.text.text_data import TASK_NAMES
from ds_trainer.techniques.registry import TECHNIQUES
from ds_trainer.techniques.technique import Technique

_NONE: Mapping[str, type] = MappingProxyType({})
_OWN_TASKS = {*TASK_NAMES, *FAMILIES, *(name for family in FAMILIES.values() for name in family.names)}
"""The names of this library's tasks and families, as they were before any plugin was loaded."""


def load_plugin(name: str) -> None:
    """Import a module, or a file that ends in .py, and register its `TASKS` and `TECHNIQUES`."""
    module = _import(name)
    tasks, techniques = getattr(module, "TASKS", _NONE), getattr(module, "TECHNIQUES", _NONE)
    if not tasks and not techniques:
        raise UserError(f"--plugin {name}: the module has neither TASKS nor TECHNIQUES, dicts of classes by name")
    register(tasks, techniques)


def register(tasks: Mapping[str, type[Task]] = _NONE, techniques: Mapping[str, type[Technique]] = _NONE) -> None:
    """Let recipes name these tasks and techniques. A name that is registered again stands for the new class."""
    for name, task in tasks.items():
        if name in _OWN_TASKS:
            raise UserError(f'a plugin has the task "{name}", which is one of this library: rename it')
        FAMILIES[name] = Family(task.Spec, task, names=(name,))
    for name, technique in techniques.items():
        if TECHNIQUES.get(name, technique).__module__.startswith("ds_trainer."):
            raise UserError(f'a plugin has the technique "{name}", which is one of this library: rename it')
        TECHNIQUES[name] = technique
        Techniques.__pydantic_fields__[name] = FieldInfo(annotation=technique.Spec | None, default=None)  # type: ignore[arg-type]
    for model in (Techniques, Phase, TaskParser, Recipe):  # from the inside out: each holds the ones before
        model.model_rebuild(force=True)


def _import(name: str) -> ModuleType:
    """Import a plugin. That it does not exist is the user's mistake; an error inside it keeps its traceback."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"--plugin {name}: there is no such file")
        # a plugin json.py must not stand in for Python's own module
        spec = importlib.util.spec_from_file_location(f"ds_trainer_plugin_{Path(name).stem}", name)
        assert spec is not None and spec.loader is not None  # noqa: PT018 - it ends in .py
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # pydantic looks up annotations there
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:  # a script's path has the script's folder in place of the current one
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a module that the plugin imports
            raise
        raise UserError(f"--plugin {name}: there is no such module in {Path.cwd()} or in this Python") from None
