"""How much memory a part of a test takes, whatever was taken before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def takes_less_than(mebibytes: int) -> Iterator[None]:
    """Fail where this process comes to hold so much more, inside, than it held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on what is held now
    before = _peak()
    yield
    assert _peak() - before < mebibytes << 20


def _peak() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
