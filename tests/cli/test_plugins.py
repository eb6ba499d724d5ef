"""Plugins: what a file or a module of a user's own may do, and which of its errors are told how."""

from __future__ import annotations

import json
import sys

import pytest

from ds_trainer.cli.plugins import load_plugin, register
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Task


def test_a_plugin_cannot_take_the_name_of_a_task_of_this_library():
    """Neither that of a family nor that of a task of GLUE."""
    for name in ("squad", "sst2"):
        with pytest.raises(ValueError, match=f'a plugin has the task "{name}", which is one of this library'):
            register(tasks={name: Task})


def test_a_plugin_stands_in_for_no_other_module(tmp_path):
    """A file that is named like one of Python's own modules is loaded beside it."""
    (tmp_path / "json.py").write_text("TASKS = TECHNIQUES = {}\n")
    with pytest.raises(UserError, match="neither TASKS nor TECHNIQUES"):
        load_plugin(str(tmp_path / "json.py"))
    assert sys.modules["json"] is json


@pytest.mark.parametrize("missing", ["no_such_module", "pl"])
def test_an_error_inside_a_plugin_keeps_its_traceback(missing, tmp_path, monkeypatch):
    """Only the absence of the plugin itself is reported as such; what it misses is a bug of the plugin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the current folder is added
    (tmp_path / "plugin.py").write_text(f"import {missing}")
    for name in ("plugin.py", "plugin"):
        with pytest.raises(ModuleNotFoundError):
            load_plugin(name)
    for name, message in (("examples/absent.py", "there is no such file"), ("no.such", "there is no such module")):
        with pytest.raises(UserError, match=f"--plugin {name}: {message}"):
            load_plugin(name)
