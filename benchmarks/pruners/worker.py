"""Cut a model by one method, in a process of its own and in that method's environment.

`python worker.py METHOD REQUEST.json`, where METHOD is a module beside this file, whose `cut(request)` returns the
weights of the smaller model. Nothing here but `by_library.py` and `by_kwon.py` imports this project: the environments
of the others do not have it. A request has the folder of the dense model (`dense`), the file of the calibration
batches (`batches`), the share of the heads' and neurons' weights to keep (`share`), the folder for the results (`out`),
and for this library its `spec`, `task` and `seed`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def main(method: str, request_file: str) -> None:
    torch.manual_seed(0)
    module, request = importlib.import_module(method), json.loads(Path(request_file).read_text())
    started = time.process_time()  # the imports are not counted
    weights = module.cut(request)
    costs = {"CPU s": time.process_time() - started, "peak MiB": peak_mib()}
    torch.save(weights, Path(request["out"], "weights.pt"))
    Path(request["out"], "costs.json").write_text(json.dumps(costs))


def peak_mib() -> float:
    """Return the most memory that this process has held. `getrusage` would tell that of the parent, if it is more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def dense_model(request: dict[str, Any]) -> Any:
    """Load the dense model in fp32, by the class that its config names."""
    architecture = json.loads(Path(request["dense"], "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(request["dense"]).float()
    return model.eval()


def batches_of(request: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Read the calibration batches: the model's inputs and its labels, by the names of the model's arguments."""
    batches: list[dict[str, torch.Tensor]] = torch.load(request["batches"])
    return batches


if __name__ == "__main__":
    main(*sys.argv[1:])
