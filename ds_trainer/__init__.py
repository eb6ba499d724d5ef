"""Make transformer models small and fast: cuts, pruning, early exit and distillation, trained on DeepSpeed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_trainer.cli.api import cut, evaluate, load_model, shrink, train
    from ds_trainer.ranks.failures import StoppedError, UserError
    from ds_trainer.recipe.recipe import Recipe
    from ds_trainer.tasks.task import Task
    from ds_trainer.techniques.technique import Technique

__version__ = "0.3.0.dev0"
__all__ = ["Recipe", "StoppedError", "Task", "Technique", "UserError"]
__all__ += ["cut", "evaluate", "load_model", "shrink", "train"]
_MODULES = dict.fromkeys(__all__, "ds_trainer.cli.api") | {"Recipe": "ds_trainer.recipe.recipe"}
_MODULES |= dict.fromkeys(("StoppedError", "UserError"), "ds_trainer.ranks.failures")
_MODULES |= {"Task": "ds_trainer.tasks.task", "Technique": "ds_trainer.techniques.technique"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the checks of a command load no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ds_trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Name what is ours, and not what this module has imported."""
    return [*__all__, "__version__"]
