"""What a command permits the model folders that it loads: nothing, unless its user allows more.

The permissions are flags of the command, so that no downloaded recipe can grant itself any. Models are loaded in some
fifteen places, by tasks, techniques and students that have no other use for the permissions: they are passed in a
context variable instead of through every signature in between. Where it is not set, in a new thread for instance,
nothing is permitted.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Trust:
    """The permissions of model folders. By default weights are read from safetensors, and none of their code is run."""

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
