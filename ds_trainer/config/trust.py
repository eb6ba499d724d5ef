"""What a command permits the model folders that it loads: nothing, unless its user says so.

The permissions are the command's own, so that no recipe that was downloaded grants itself any. Models are loaded in
some fifteen places, by tasks, techniques and students that have no other business with them: they are told through the
context rather than through every signature in between. A context that was never told, a new thread's say, permits
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Trust:
    """By default weights are read from safetensors alone, and no code of a model folder is run."""

    allow_pickle: bool = False
    """Read pytorch_model.bin where there are no safetensors; still as weights only, so that its code is not run."""
    trust_remote_code: bool = False
    """Run the Python files that a model's config names."""


_IN_FORCE: ContextVar[Trust] = ContextVar("trust", default=Trust())  # noqa: B039 - it is frozen


def trust_in_force() -> Trust:
    return _IN_FORCE.get()


@contextlib.contextmanager
def trusting(trust: Trust) -> Iterator[None]:
    """Load models under these permissions inside the block."""
    token = _IN_FORCE.set(trust)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)
