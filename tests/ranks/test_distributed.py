"""A rank before it meets the others and after it leaves them, and the collectives between them."""

import ast
import contextlib
import copy
import json
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from support.launching import ROOT

from ds_trainer.ranks import distributed
from ds_trainer.ranks.distributed import building_kernels
from ds_trainer.ranks.failures import OutOfMemoryError
from ds_trainer.ranks.joining import joined

OWNERS = ("dist", "torch.distributed", "comm", "deepspeed.comm")


def test_the_lock_of_a_killed_compiler_is_removed_and_that_of_a_living_one_is_not(tmp_path, monkeypatch):
    """torch waits for a lock for ever; whoever may compile holds another, which goes with the process, or once done."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with building_kernels():
        assert not lock.exists()
        lock.touch()
        with building_kernels():  # the outer one may be at it
            assert lock.exists()
    with building_kernels():  # a run that only trains is no reason to keep it
        assert not lock.exists()


def test_the_default_folder_is_the_same_where_a_variable_names_it(tmp_path, monkeypatch):
    """A process that finds it by the variable leaves the locks of one that finds it by default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    with building_kernels():
        lock = next(tmp_path.glob("torch_extensions/*/ds_trainer")).with_name("deepspeed_shm_comm") / "lock"
        lock.parent.mkdir()
        lock.touch()
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
        with building_kernels():
            assert lock.exists()


def test_a_folder_that_cannot_be_written_is_deepspeeds_concern(monkeypatch):
    """The work inside is done without the lock."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/nowhere")
    done = []
    with building_kernels():
        done.append(True)
    assert done


@pytest.mark.parametrize("error", [None, OutOfMemoryError("too large")])
def test_a_lone_process_is_described_as_a_world_of_one_only_while_it_runs(monkeypatch, error):
    """A notebook's next run, and the commands that it starts, must not take the variables for a launcher's."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    described = {}
    stub = SimpleNamespace(init_distributed=lambda **_: described.update(os.environ))
    monkeypatch.setitem(sys.modules, "deepspeed", stub)
    monkeypatch.setitem(sys.modules, "transformers", MagicMock())
    with contextlib.suppress(OutOfMemoryError), joined():
        if error:
            raise error
    assert set(names) <= described.keys()
    assert not {*names} & os.environ.keys()


def test_the_variables_of_a_launcher_stay(monkeypatch):
    """This process has not set them."""
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(init_distributed=lambda **_: None))
    monkeypatch.setenv("RANK", "0")
    distributed.start()
    distributed.stop()
    assert os.environ["RANK"] == "0"


def test_no_collective_sees_a_tensor_of_the_host(taught_recipe, server, tmp_path):
    """NCCL has none for such tensors: a run of all techniques, gone on with from a checkpoint, does without.

    Both ranks pretend to be on an accelerator, which `host_tensors.py` explains.
    """
    recipe = copy.deepcopy(taught_recipe)
    recipe["phases"][1] |= {"max_steps": 4, "logging_steps": 3, "save_steps": 2, "eval_steps": 2}
    recipe["phases"][1]["techniques"]["exits"] = {"training": "joint"}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    words = ["--recipe", str(tmp_path / "recipe.json"), "--set", "report=false", "--set", "tensorboard=false"]
    pretended = dict.fromkeys(range(2), "import host_tensors; host_tensors.pretend()")
    for further in ([], ["--resume", str(tmp_path / "out/checkpoint-2")]):
        run = server.run(2, tmp_path / "out", *words, *further, sabotage=pretended)
        assert run.codes() == [0, 0], run.text[-3000:]
    assert "resumed from" in run.text


def test_collectives_are_called_in_one_place():
    """So the guarantees of `distributed.py` hold for all of them; the doctor's run in another process."""
    kinds = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier", "send")
    elsewhere = set()
    for path in sorted((ROOT / "ds_trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in OWNERS:
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module in OWNERS:
                names = [alias.name for alias in node.names]
            if any(name.startswith(kinds) for name in names):
                elsewhere.add(path.name)
    assert elsewhere == {"distributed.py", "rank.py"}
