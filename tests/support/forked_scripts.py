"""Scripts run one after the other, each in a process forked from one that has loaded what takes seconds to load.

`python tests/support/forked_scripts.py` reads a JSON list of [PATH, ARGUMENT, ...] and prints a
list of [exit code, output].
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path


def run(words: list[str]) -> tuple[int, str]:
    """The exit code of a script, and what it and its children wrote."""
    with tempfile.NamedTemporaryFile() as log:
        pid = os.fork()
        if not pid:
            _be_script(words, log.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code, Path(log.name).read_text(errors="replace")


def _be_script(words: list[str], log: int) -> None:
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    code: object = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - it is told, and the process ends here whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed writes there as it is loaded

    import transformers.trainer  # noqa: F401

    import ds_trainer.run  # noqa: F401

    results = [run(words) for words in json.load(sys.stdin)]
    os.write(answer, json.dumps(results).encode())
