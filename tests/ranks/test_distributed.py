"""A rank before it meets the others and after it leaves them, and the collectives between them."""

import contextlib
import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from support.launching import ROOT

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import OutOfMemoryError
from ds_trainer.ranks.joining import joined


@pytest.mark.parametrize("error", [None, OutOfMemoryError("too large")])
def test_a_lone_process_is_described_as_a_world_of_one_only_while_it_runs(monkeypatch, error):
    """A notebook's next run, and the commands that it starts, must not take the variables for a launcher's. Those of a
    launcher stay."""
    names, described = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}, {}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    stub = SimpleNamespace(init_distributed=lambda **_: described.update(os.environ))
    monkeypatch.setitem(sys.modules, "deepspeed", stub)
    monkeypatch.setitem(sys.modules, "deepspeed.comm.torch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers", MagicMock())
    with contextlib.suppress(OutOfMemoryError), joined():
        if error:
            raise error
    assert names <= described.keys()
    assert not names & os.environ.keys()
    monkeypatch.setenv("RANK", "0")
    distributed.start()
    distributed.stop()
    assert os.environ["RANK"] == "0"


def test_a_tensor_is_summed_on_the_device(monkeypatch):
    """NCCL has no collective for tensors of the host; what is given stays as it was."""
    devices = []
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: devices.append(values.device.type))
    given = torch.ones(2)
    distributed.mean(given)
    assert devices == ["meta"]
    assert given.device.type == "cpu"


def test_collectives_are_called_in_one_place():
    """So the guarantees of `distributed.py` hold for all."""
    kinds = "(all_reduce|all_gather|all_to_all|broadcast|reduce|gather|scatter|barrier|send)"
    call = re.compile(rf"\b(dist|torch\.distributed|comm)\.{kinds}|from (torch|deepspeed)[.\w]* import .*\b{kinds}")
    sources = {path.name: path.read_text() for path in (ROOT / "ds_trainer").rglob("*.py")}
    assert {name for name, text in sources.items() if call.search(text)} == {"distributed.py"}
