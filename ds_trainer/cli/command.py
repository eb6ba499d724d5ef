"""What every command shares: its parser, the list of its mistakes, and how it ends.

A command is a function of its arguments. It reads a job from them, which needs neither torch nor DeepSpeed and raises
all mistakes as one UserError, and then makes one call into the library, which is imported at that moment.
"""

import argparse
import contextlib
import errno
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from ds_trainer import __version__
from ds_trainer.files.messages import shortened, shown
from ds_trainer.files.redaction import redacted
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, UserError, exit_code, raise_mistakes

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
"""Errors of the disk or of permissions. Their messages name the file, and so no traceback is printed."""
T = TypeVar("T")
J = TypeVar("J", bound=BaseModel)


def run_command(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Run a command and return its exit code (see `failures.py`); one rank prints what went wrong."""
    distributed.start_logging()
    try:
        return command(arguments) or 0
    except Exception as error:  # noqa: BLE001 - the last place to print it
        code = exit_code(error)
        with contextlib.suppress(OSError):  # the reader of standard error may be gone
            _print_error(error, foreseen=code > 1 or _is_of_the_disk(error))
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print on every rank."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"ds-{name}", description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"ds_trainer {__version__}")

    def options(self, arguments: Sequence[str], given: Mapping[str, Any]) -> argparse.Namespace:
        """Parse a command line. `given` has further flags by their names, as a Python program passes them.

        Texts and paths are parsed as on a command line, other values are taken as they are, and None is left out.
        """
        texts = [f"--{name}={value}" for name, value in given.items() if isinstance(value, str | Path)]
        options = self.parse_args([*arguments, *texts])
        others = {name: value for name, value in given.items() if not isinstance(value, str | Path | None)}
        vars(options).update(others)
        return options

    def parse_known_args(self, *arguments: Any, **more: Any) -> Any:
        """Parse, and load the plugins that are named, before anything is read that may need them."""
        flags, unknown = super().parse_known_args(*arguments, **more)
        for name in getattr(flags, "plugin", []):
            from ds_trainer.cli.plugins import load_plugin  # loads torch, which a plugin needs anyway

            load_plugin(name)
        return flags, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage().strip()}")


class Mistakes(list[str]):
    """The mistakes of a command, which are collected until they are raised together."""

    def of(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Return the value of a call; or None where it raises a UserError, whose message is kept."""
        try:
            return call(*arguments)
        except UserError as error:
            self.append(str(error))
            return None

    def job(self, kind: type[J], flags: argparse.Namespace, **values: Any) -> J:
        """Make a job from `values` and from the flags that are named like its other fields; or raise all mistakes.

        A value that could not be read is None; its mistake is in the list already.
        """
        try:
            job = kind.model_validate({**vars(flags), **values})
        except ValidationError as error:
            unread = {name for name, value in values.items() if value is None}
            self += [flag_mistake(item) for item in error.errors() if item["loc"][0] not in unread]
            if not self:
                raise
        self.raise_all()
        return job

    def raise_all(self) -> None:
        """Raise one UserError with a line for each mistake; do nothing if there is none."""
        raise_mistakes(self)


def flag_mistake(error: Any) -> str:
    """Say what is wrong with a flag, from one of pydantic's errors about the field of that name."""
    allowed = error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    return f"--{error['loc'][0]} is {shown(error['input'])}: {allowed}" if error["loc"] else allowed


def one_process_mistakes(work: str) -> list[str]:
    """Return the mistake if a launcher has started several processes for work such as "a folder is measured"."""
    alone = distributed.world_size() == 1
    return [] if alone else [f"{work} by one process: start it with python, not with deepspeed"]


def _is_of_the_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK
    # safetensors raises an error of its own for what the system reports
    return any(str(error).endswith(f"(os error {number})") for number in _DISK)


def _print_error(error: Exception, foreseen: bool) -> None:
    """Print the message of an error that this library foresaw, on one rank; of any other, all that is known, on each.

    The rank is the one that the error names; before the ranks know of each other, it is the first of every host.
    """
    notes = getattr(error, "__notes__", [])
    if foreseen:
        reporter = getattr(error, "reporter", None)
        if (distributed.local_rank() if reporter is None else distributed.rank()) != (reporter or 0):
            return
        where = "" if distributed.is_main() or reporter is not None else f"rank {distributed.rank()}: "
        first = str(error) if isinstance(error, StoppedError) else f"error: {where}{error}"
        text = shortened(redacted("\n".join([first, *notes])))
    else:
        before_python_311 = notes if sys.version_info < (3, 11) else []
        text = redacted("".join([*traceback.format_exception(error), *before_python_311])).rstrip("\n")
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
