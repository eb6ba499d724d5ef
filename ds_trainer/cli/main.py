"""What the scripts in `launch/` and the installed `ds-train`, `ds-export`, ... call: it runs the command of a name.

Imports nothing but the standard library at the top, so that a Python without the project's packages can say so.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_NEEDED = ("torch", "deepspeed", "transformers", "pydantic", "hjson")
_SHARED = {"calibrate": "evaluate", "benchmark": "export", "report": "train"}
"""The commands whose module is named after another one."""


def console_script() -> None:
    """Run the command that an installed script is named after: `ds-train` runs `train`."""
    main(Path(sys.argv[0]).name.removeprefix("ds-"))


def main(name: str) -> None:
    """Run the command `name` of `ds_trainer.cli` with the arguments of this process, and end with its exit code."""
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        way_out = "activate the environment that ds_trainer is installed in (README.md says how to make one)"
        print(f"error: {sys.executable} has no {', '.join(missing)}: {way_out}", file=sys.stderr)
        sys.exit(2)
    from ds_trainer.ranks.distributed import leave, limit_spinning

    limit_spinning()
    from ds_trainer.cli.command import run_command

    leave(run_command(getattr(module_of(name), f"{name}_command"), sys.argv[1:]))


def module_of(command: str) -> ModuleType:
    """Import the module with the parser and the function of a command."""
    return importlib.import_module(f"ds_trainer.cli.{_SHARED.get(command, command)}")
